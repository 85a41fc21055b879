"""Settle how a window is run: what this library refuses runs plainly, and what a loop does to gradients is seen."""

import math
from dataclasses import dataclass, field, replace

from bigbatch.errors import BatchNormError, BigBatchError, ConfigurationError, CoupledLoss, LossError
from bigbatch.state.oom import is_out_of_memory, let_go
from bigbatch.verifying.gradients import Gradients, is_finite
from bigbatch.verifying.loops import Watched
from bigbatch.verifying.runs import Runs, Whole
from bigbatch.verifying.trying import tried
from bigbatch.verifying.ways import Accumulated, Loop, OwnWay, Plain

_REFUSES = "BigStep refuses this: "


@dataclass
class Settling:
    """Runs a big batch and a window, and changes how they are run where they cannot be run as they are."""

    runs: Runs
    notes: list[str] = field(default_factory=list)
    refused: Exception | None = None

    def whole(self) -> Whole:
        """Run the big batch as it is: what fails here is the user's own."""
        runs = self.runs
        own = self._first()
        if runs.subject.reached() or not _any(own.gradients):
            # The loss does not use the model that it is given, but the one it knows: then it is that one we run on.
            runs.subject.lend_itself()
            own = runs.whole()
        if not _any(own.gradients):
            msg = (
                "no parameter of the model got a gradient from loss_fn(model, batch): the loss does not depend on it.\n"
                "Use the model that is passed in:  loss_fn = lambda model, batch: criterion(model(batch[0]), batch[1])"
            )
            raise LossError(msg)
        if not is_finite(own.gradients) or not math.isfinite(own.loss):
            msg = (
                f"the big batch itself has a loss of {own.loss:g} and a gradient that is not finite: there is nothing "
                "to compare with.\nVerify with samples and weights at which the model trains, as before a first step."
            )
            raise LossError(msg)
        return own

    def _first(self) -> Whole:
        """Run it for the first time; a function of batch and model fails by an error that does not say so."""
        runs = self.runs
        try:
            return runs.whole()
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, BigBatchError):
                raise
            if not (runs.has_loss_fn and tried(runs.is_swapped, otherwise=False)):
                raise
            let_go(error, told=True)
            msg = (
                "loss_fn takes a batch and a model; it is called as loss_fn(model, batch).\n"
                "Swap its arguments:  loss_fn = lambda model, batch: criterion(model(batch[0]), batch[1])"
            )
            raise ConfigurationError(msg) from error

    def accumulated(self) -> Accumulated:
        """Run a window; where this library refuses it, say so and go on without. BigStep's check need pass once."""
        way = self.runs.way
        try:
            found = self.runs.accumulated()
        except Exception as error:
            # What was refused may well fail where it runs all the same.
            ours = isinstance(error, LossError | BatchNormError) or self.refused is not None
            if not ours or not isinstance(way, OwnWay) or is_out_of_memory(error):
                raise
            self._go_on(way, error)
            return self.accumulated()
        if isinstance(way, OwnWay) and way.options.check:
            self.runs.way = way.unchecked
        return self._looked_at(found, way) if isinstance(way, Loop) else found

    def _go_on(self, way: OwnWay, error: Exception) -> None:
        """Take a way that refuses less."""
        self.refused = self.refused or error
        self.runs.way, how = Plain(), "each micro-batch weighed by its samples"
        if way.options.check and isinstance(error, CoupledLoss):
            self.runs.way, how = way.unchecked, "weighed as BigStep reads the loss"
        let_go(error, told=True)
        first = str(self.refused).partition("\n")[0]
        self.notes[:] = [note for note in self.notes if not note.startswith(_REFUSES)]
        self.notes.append(f"{_REFUSES}{first}\nThe figures are those of accumulating anyway, {how}.")

    def _looked_at(self, found: Accumulated, way: Loop) -> Accumulated:
        """See what a loop did, and run it again where that asks for it."""
        runs, watched = self.runs, found.watched
        if not _any(found.gradients) and not runs.subject.in_place:
            runs.subject.lend_itself()  # the loop has its own hold of the model
            return self.accumulated()
        if watched is None or not _any(found.gradients):
            raise LossError(f"train_window(model, micro_batches) left no gradient: {_why_none(watched)}")
        runs.autocast = watched.autocast or runs.autocast
        if way.clipping or not watched.clipped.times:
            return found
        if watched.clipped.times > max(1, len(watched.stepped)):
            runs.way = replace(way, clipping=True)
            return runs.accumulated()
        self.notes += [note for note in _of_clipping(watched) if note not in self.notes]
        return found


def _why_none(watched: Watched | None) -> str:
    """Say what a loop without gradients did: clear them, train something else, or nothing."""
    if watched is not None and watched.backwards:
        return (
            f"backward came to the model {watched.backwards} times, but .grad is None everywhere after it, and no "
            "optimizer of torch stepped with it.\n"
            "Leave the gradients in .grad, without p.grad = None or zero_grad() at the end, or step an optimizer."
        )
    if watched is not None and watched.steps_of_others:
        return (
            "an optimizer stepped, but none of its parameters is the model's, and no backward came to the model.\n"
            "Train the model that is passed in:  torch.optim.SGD(model.parameters(), lr=0.1), made in train_window"
        )
    return (
        "no backward came to the model, and no optimizer of torch stepped.\n"
        "Train the model that is passed in:  for batch in micro_batches: loss_fn(model, batch).backward()"
    )


def _of_clipping(watched: Watched) -> list[str]:
    notes = ["The loop clips its gradient; what was compared is the gradient before that."]
    scale = watched.scale_at_clip
    if scale > 1:
        notes.append(
            f"What it clips is {scale:g} times the gradient that it steps with: the loss scale is still in it, so the "
            "limit is as many times too low. Unscale first:  scaler.unscale_(optimizer)"
        )
    return notes


def _any(gradients: Gradients) -> bool:
    return any(gradient is not None for gradient in gradients.values())
