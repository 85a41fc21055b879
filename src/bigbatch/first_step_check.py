"""The first check: is the gradient of a piece of the batch that of its parts together?

What couples samples inside a model, or was computed of the batch without gradient, shows in no graph. Then the gradient
of a piece is not the weighted sum of its parts' gradients, and no split is exact. A piece takes no more memory than
training one micro-batch does; it and its parts use the same random numbers.
"""

import math
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase as Statistics

from bigbatch.batch.split import Division
from bigbatch.batch.transfer import Mover
from bigbatch.caller import outside
from bigbatch.errors import BatchError, BigBatchError, CoupledLoss, PathsDiffer
from bigbatch.execute.micro_step import Runner
from bigbatch.first_step_parts import (
    COUNT_TOLERANCE,
    Part,
    Piece,
    Share,
    SideBySide,
    agree,
    apart,
    is_near,
    norm,
    together_of,
    totals_of,
)
from bigbatch.first_step_watch import quiet
from bigbatch.options import Options
from bigbatch.state.oom import is_out_of_memory, let_go
from bigbatch.state.scope import NeedsLockStep
from bigbatch.state.snapshot import untouched

_AGAIN = (1, 3, 15, 127)  # updates after which pieces are compared again
_LITTLE = 1 << 25  # bytes that a piece may hold in any case, and the gradients that are compared
_PARTS = 64  # of a piece, at most
_FEWEST = 2  # samples of a piece

# An error; or that all is well, that random numbers hide the losses, or the gradients alone, or that nothing could run.
Verdict = BigBatchError | Literal["agrees", "hidden", "unsure", "blind"]


class _Plan(NamedTuple):
    """How a piece is taken."""

    samples: int
    is_uneven: bool
    is_away: bool  # whether what its backward needs waits in host memory
    is_watched: bool = True


class FirstCheck:
    """Compares pieces of a batch with their parts, before updates 1, 2, 4, 16 and 128.

    It compares again where other modules are in training mode than before. Later updates matter: a gate that begins at
    zero hides at first what couples samples. A check that cannot run proves nothing; once the step is made, it warns.
    """

    def __init__(self, models: Sequence[nn.Module], runner: Runner, mover: Mover, options: Options) -> None:
        """Begin with nothing compared."""
        self._models, self._runner, self._mover, self._options = models, runner, mover, options
        self._modules = list(dict.fromkeys(module for model in models for module in model.modules()))
        self._updates = 0
        self._due: tuple[int, ...] = _AGAIN
        self._modes, self._mode = set[bytes](), b""  # which modules were in training mode when pieces were compared
        self._looked, self._unseen, self._reason, self._has_warned = False, "", "", False

    def __call__(self, division: Division, side_by_side: SideBySide | None = None) -> bool:
        """Refuse what cannot be cut or trimmed; returns whether pieces were compared (see `passed`)."""
        trimmed = division.longest is not None and min(division.longest) < division.width
        self._mode = bytes([trimmed, *(module.training for module in self._modules)])
        self._unseen = ""
        due = self._mode not in self._modes or self._updates >= min(self._due, default=math.inf)
        self._looked = due and (len(division) > 1 or trimmed)  # one micro-batch is the big batch
        if self._looked:
            # Statistics of a few samples amplify rounding, and are exact by themselves, except where they see padding.
            together = side_by_side and partial(side_by_side, resting=division.longest is None)
            piece = partial(Piece, self._models, self._runner, self._mover, division, side_by_side=together)
            groups = _groups(division)
            try:
                if trimmed:
                    self._refuse_counted_padding(piece, groups)
                if self._options.check:
                    self._unseen = self._unseen_in(piece, groups)
            finally:
                division.batch.refuse_changed()  # or the step, and perhaps the parts, would use other samples
        return self._looked

    def passed(self, *, stepped: bool) -> None:
        """Note that an update was made, or at least not refused; warn once of what could not be compared."""
        self._updates += stepped
        if self._looked:
            self._modes.add(self._mode)
            self._due = tuple(each for each in self._due if each >= self._updates)
        if self._unseen and not self._has_warned:
            self._has_warned = True
            warnings.warn(self._unseen, stacklevel=outside())

    def _unseen_in(self, piece: partial[Piece], groups: Sequence[Share]) -> str:
        """Compare in training mode, and in eval mode what random numbers hide there; returns what was not seen."""
        accepts, unseen = self._options.batch_norm == "micro", ""
        resting = [module for module in self._modules if accepts and isinstance(module, Statistics)]
        for modules in (resting, self._modules):
            with untouched(self._models), quiet(modules):
                found = self._first_that_runs(piece, groups)
            if found == "agrees":
                return unseen
            if found == "blind":
                return unseen or _BLIND.format(self._reason)
            if isinstance(found, BigBatchError) and not (accepts and modules is resting):
                raise self._dated(found)
            if found != "unsure":  # an error: of statistics that were accepted, and are not torch's own
                unseen = _UNSEEN
        return _UNSEEN

    def _dated(self, error: BigBatchError) -> BigBatchError:
        """Name the updates that were made before a coupling was seen."""
        since = f" This did not show at first: the updates before this one, {self._updates} by now, may not be right."
        return type(error)(error.problem + since, fix=error.fix_in_step) if self._updates else error

    def _first_that_runs(self, piece: partial[Piece], groups: Sequence[Share]) -> Verdict:
        """Compare uneven parts and even parts; where neither can be evaluated, two micro-batches."""
        size, peak = len(groups[0].samples), _LITTLE
        try:  # the memory of a micro-batch's forward says how many samples a piece may have
            peak = piece(groups[:1]).whole.peak
        except NeedsLockStep:
            raise
        except BigBatchError as error:  # a refusal of the micro-batch itself, which comes in the step
            self._reason = _said(error)
            return "blind"
        except Exception as error:  # noqa: BLE001 - it proves nothing
            self._is_short(error)
        fitting = max(size * _LITTLE // max(peak, 1), size)
        samples, is_away = max(fitting, _FEWEST), fitting < _FEWEST  # two samples, where one is a micro-batch
        piece = partial(piece, probes=self._runner.probes(_LITTLE))
        ran = False
        for is_uneven, is_watched, instead in (
            (True, True, 0),
            (False, True, 0),
            (False, True, 2 * size),
            (False, False, 2 * size),  # a few operations cannot be watched
        ):
            if ran and instead:
                break
            plan = _Plan(instead or samples, is_uneven, is_away, is_watched)
            found, samples, is_away = self._verdict(piece, groups, plan)
            if found not in ("agrees", "blind"):
                return found
            ran = ran or found == "agrees"
            if not samples:
                break
        return "agrees" if ran else "blind"

    def _verdict(self, piece: partial[Piece], groups: Sequence[Share], plan: _Plan) -> tuple[Verdict, int, bool]:
        """Compare a piece with its parts, or a smaller one where memory runs out.

        Returns how many samples there was memory for, and whether they waited in host memory, too.
        """
        while True:
            shares = _shares(groups, plan.samples, uneven=plan.is_uneven)
            try:
                found = _compared(piece(shares, is_watched=plan.is_watched, is_away=plan.is_away))
                return found, plan.samples, plan.is_away  # noqa: TRY300 - what raises is above
            except Exception as error:  # it proves nothing; what is the user's own comes in the step
                is_ours = piece.keywords["side_by_side"] is not None and isinstance(error, BigBatchError)
                if isinstance(error, NeedsLockStep) or (is_ours and not isinstance(error, PathsDiffer)):
                    raise
                smaller = plan._replace(samples=max(plan.samples // 2, _FEWEST), is_away=True)
                short = self._is_short(error)
                if not short or plan == smaller:
                    return "blind", 0 if short else plan.samples, plan.is_away
            finally:
                torch.clear_autocast_cache()  # or the step would use copies of weights that were made here
            plan = smaller

    def _is_short(self, error: Exception) -> bool:
        """Note why a piece could not run; free what it holds where memory is what it lacked, which takes a while."""
        self._reason, short = _said(error), is_out_of_memory(error)
        if short:
            let_go(error)
        return short

    def _refuse_counted_padding(self, piece: partial[Piece], groups: Sequence[Share]) -> None:
        """Compare what a loss is over with and without padding, whatever its value is."""
        first, *last = groups[:2]
        shares = [Share(first.samples[:1], first.width), *(Share(each.samples[-1:], each.width) for each in last)]
        try:
            with untouched(self._models), quiet():
                found = piece(shares)
                whole, parts = found.whole, found.parts()
        except Exception as error:  # noqa: BLE001 - it proves nothing
            self._is_short(error)
            return
        if whole.kinds == parts[0].kinds and all(part.certain for part in parts):
            counts = zip(whole.kinds, whole.counts, totals_of(parts), strict=True)
            # Less is no padding: counted(loss, 1) is the user's word for any number of samples.
            if any(kind == "mean" and number > total * (1 + COUNT_TOLERANCE) for kind, number, total in counts):
                raise self._dated(_padded(whole, parts))


def _compared(piece: Piece) -> Verdict:
    """Compare the gradient of a piece with that of its parts."""
    whole, parts = piece.whole, piece.parts()
    if agree(whole, parts):
        return "agrees"
    if whole.drew and not all(part.certain for part in parts):
        return "hidden"
    if whole.norms <= parts[0].norms and whole.drew and is_near(whole.value, together_of(parts), (whole, *parts)):
        return "unsure"  # what is run again in backward, or a fused kernel, draws numbers of its own there
    return _coupled(piece, parts)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _groups(division: Division) -> list[Share]:
    """Return the samples of each micro-batch; where they are trimmed, of the widest, the narrowest, and so on."""
    widths = division.longest or (0,) * len(division)
    order = sorted(range(len(division)), key=lambda number: -widths[number])
    if division.longest is not None:
        order = [number for pair in zip(order, order[::-1], strict=True) for number in pair][: len(order)]
    return [Share(division.indices(division.groups[number]), widths[number] or None) for number in order]


def _shares(groups: Sequence[Share], samples: int, *, uneven: bool) -> list[Share]:
    """Take the samples of a piece: parts of at most a micro-batch each; equal ones hide how they are weighed."""
    if len(groups) == 1:  # trimmed, and not cut
        return [Share(groups[0].samples[:samples], groups[0].width)]
    left, found = samples, list[Share]()
    for group, width in groups[:_PARTS]:
        room = left if found else left - max(left // (3 if uneven else 2), 1)
        if room < 1 or (len(found) > 1 and not uneven and room < len(group)):
            break
        found.append(Share(group[:room], width))
        left -= len(found[-1].samples)
    if uneven and len({len(share.samples) for share in found}) == 1:
        last = found.pop()
        found.append(Share(last.samples[: max(math.ceil(len(last.samples) / 3), 1)], last.width))
    return found


_TO_VERIFY = "print(bigbatch.verify(model, loss_fn, batch, micro_batch_size=...))"
_UNSEEN = (
    "this loss draws random numbers that cannot be drawn again for a part of a batch, as torch.randperm. So the check "
    "could not see, in training mode, whether samples are coupled.\n"
    "Use: numbers drawn before the step, a row for each sample of the batch; or Options(check=False)"
)
_BLIND = (
    "the check of this batch could not run: no piece of the batch could be compared with its parts ({}). So it is not "
    "known whether the update is the big batch's. It is not where a model keeps a state from call to call, of the "
    "size of a micro-batch, as truncated backpropagation does.\n"
    f"Use: {_TO_VERIFY}; a state that begins anew in each call, or comes with the batch; or Options(check=False)"
)
_CAUSES = (
    "Common causes: attention, pooling or a statistic over the batch dimension, also without gradient (normalized "
    "advantages, class weights of the batch, a threshold); padding that the loss counts; a term for each "
    "sample (return counted(loss, n) for n samples); a divisor that is no count; a tensor that all samples share "
    "and that has as many rows as there are samples; a state that moves in every call."
)
_IN_LOCKSTEP = (
    "Common causes: rows of own samples begin at across.offset(); what is made of across.gather must be the same in "
    "each micro-batch; and what the model or the loss keeps outside of the call, as in self.features = x, is another "
    "micro-batch's after BatchNorm and `across`."
)
_GHOST = (
    "BatchNorm is called {} times for them, and {} times for a part: it normalizes pieces of the batch (ghost or "
    'virtual batches, or one sample after the other), which change with the split. Options(batch_norm="micro") accepts '
    "that."
)


def _coupled(piece: Piece, parts: Sequence[Part]) -> CoupledLoss:
    """Say that the parts do not make the whole."""
    whole, samples = piece.whole, len(piece.samples)
    causes = _CAUSES if piece.side_by_side is None else _IN_LOCKSTEP
    if whole.norms > parts[0].norms:
        causes = _GHOST.format(whole.norms, parts[0].norms)
    size = max(norm(whole.gradient), sum(norm(part.gradient) for part in parts))
    away = apart(whole, parts) / size if size else 0.0
    return CoupledLoss(
        f"the samples of this batch are coupled: the gradient of {samples} of them is {away:.2g} of its norm away from "
        f"that of {len(parts)} parts together. Their losses are {whole.value:.6g} and {together_of(parts):.6g}. "
        f"No split into micro-batches gives the big batch's gradient.\n{causes}",
        fix=f"{_TO_VERIFY} to find the cause; "
        "Options(check=False) where the loss only looks coupled, as with random numbers of its own",
    )


def _padded(whole: Part, parts: Sequence[Part]) -> BatchError:
    """Say that a loss is another one without its padding."""
    over = [" over " + " and ".join(f"{count:g}" for count in counts) for counts in (whole.counts, totals_of(parts))]
    return BatchError(
        f"this loss counts padding: with it the loss is {whole.value:.6g}{over[0]}, without it {together_of(parts):.6g}"
        f"{over[1]}, so packing would change it.",
        fix="a loss that ignores padding, as cross_entropy ignores labels of -100, and an attention mask for the "
        "model; or leave lengths= out",
    )
