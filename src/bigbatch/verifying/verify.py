"""The public function: check what was given, prove it on as many samples as fit, leave all as it was."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bigbatch import arguments
from bigbatch.batch.batch import Batch
from bigbatch.batch.split import balanced
from bigbatch.default_loss import own_loss, takes
from bigbatch.errors import BatchError, ConfigurationError, OutOfMemory
from bigbatch.options import Options
from bigbatch.state.oom import is_out_of_memory, let_go, missing
from bigbatch.state.scope import asked_aside
from bigbatch.verifying.loops import TrainWindow
from bigbatch.verifying.proof import Proof
from bigbatch.verifying.runs import Runs
from bigbatch.verifying.samples import Samples, as_a_loader_cuts
from bigbatch.verifying.subject import Subject
from bigbatch.verifying.verification import Verification
from bigbatch.verifying.ways import Loop, OwnWay, Way
from bigbatch.wording import speaking_of

_FEWEST = 2  # samples: two micro-batches of one


def verify(
    model: nn.Module | Sequence[nn.Module],
    loss_fn: Callable[[Any, Any], Any] | None,
    batch: Any,
    micro_batch_size: int,
    *,
    train_window: TrainWindow | None = None,
    options: Options | None = None,
) -> Verification:
    """Prove that the accumulated gradient is the big batch's, or find out why it is not.

        print(verify(model, loss_fn, batch, micro_batch_size=8))                # as BigStep accumulates
        verify(model, loss_fn, batch, micro_batch_size=8).raise_if_wrong()      # in a test suite

        def train_window(model, micro_batches):                                 # as you do, without this library
            for inputs, labels in micro_batches:
                (criterion(model(inputs), labels) / len(micro_batches)).backward()

        print(verify(model, loss_fn, batch, micro_batch_size=8, train_window=train_window))

    The big batch runs once as a whole, and once accumulated, in the model's own dtype and in float64, each time on a
    copy of the model. What rounding explains is measured for each parameter. Where more than that is left, experiments
    find the causes: one thing after another is turned off, to see the difference go. Model, gradients, buffers, modes
    and random generators are as before afterwards, also after an error.

    Args:
        model: in the mode in which it trains, on its device; one or several, as `loss_fn` takes them.
        loss_fn: called as `loss_fn(model, batch)`, for the big batch; None: `model(**batch).loss`.
        batch: all samples of one update, on any device.
        micro_batch_size: the most samples that go through the model at once.
        train_window: a function of your own, `train_window(model, micro_batches)`, which gets a copy of the model and
            one window's micro-batches as a list, cut as a DataLoader would. It may leave its gradients in `.grad`, or
            step an optimizer of torch once: what that steps with is what is judged. It may return its loss.
        options: those of your `BigStep`.
    """
    return make_verification(model, loss_fn, batch, micro_batch_size, train_window=train_window, options=options)


def make_verification(
    model: Any,
    loss_fn: Callable[[Any, Any], Any] | None,
    batch: Any,
    micro_batch_size: int,
    *,
    train_window: TrainWindow | None = None,
    options: Options | None = None,
    on_run: Callable[[str], None] | None = None,
) -> Verification:
    """Verify, and tell `on_run` what each run is of before it is made."""
    with speaking_of("verify"):
        models = arguments.models(model)
    _check(loss_fn, train_window, options)
    options = options or Options()
    whole = Batch.of(batch, collate=options.collate)
    _check_size(micro_batch_size, whole.size)
    subject = Subject(model, models)
    if not subject.parameters:
        msg = "no parameter of the model requires a gradient: there is nothing to train, and nothing to verify"
        raise ConfigurationError(msg)
    claim = _Claim(subject, loss_fn or own_loss, whole, micro_batch_size, train_window, options)
    with subject.guarded(), torch.enable_grad(), asked_aside():
        return claim.proved(on_run or (lambda _: None))


@dataclass(frozen=True)
class _Claim:
    """That a batch, accumulated in micro-batches of some size, has the big batch's gradient."""

    subject: Subject
    loss_fn: Callable[[Any, Any], Any]
    whole: Batch
    size: int
    train_window: TrainWindow | None
    options: Options

    def proved(self, on_run: Callable[[str], None]) -> Verification:
        """Prove it on all samples, or, out of memory, on half of them, and so on; at last without float64."""
        number, wide = self.whole.size, True
        while True:
            try:
                return self._on(number, on_run, wide=wide).verification()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                if number <= _FEWEST and not wide:
                    let_go(error, told=True)
                    raise OutOfMemory(_too_large(error)) from error
                let_go(error)
            number, wide = (number // 2, wide) if number > _FEWEST else (self.whole.size, False)

    def _on(self, number: int, on_run: Callable[[str], None], *, wide: bool) -> Proof:
        """Set up a proof on the first samples."""
        total, size = self.whole.size, self.size
        part = self.whole if number == total else self.whole.only(range(number))
        at_once = min(size, number // 2) if number < total else size
        device = next(iter(self.subject.parameters.values())).device
        cut = as_a_loader_cuts if self.train_window is not None else balanced
        sizes = tuple(cut(number, at_once))
        way: Way = OwnWay(at_once, self.options) if self.train_window is None else Loop(self.train_window)
        runs = Runs(self.subject, self.loss_fn, Samples(part, sizes, device), way, on_run)
        proof = Proof(runs, total, wide=wide)
        if not wide:
            own = str(self.subject.dtype).removeprefix("torch.")
            proof.notes.append(
                f"Not even two samples fit into memory in float64, so it was judged in {own} alone, where small "
                "mistakes may hide in rounding."
            )
        if number < total:
            smaller = f", in micro-batches of {at_once:,} instead of {size:,}" if at_once < size else ""
            proof.notes.append(
                f"The whole batch of {total:,} did not fit into memory: the claim is proved on its first {number:,} "
                f"samples{smaller}."
            )
        return proof


def _too_large(error: BaseException) -> str:
    return (
        f"out of memory with two samples; {missing(error)}. A proof runs on a copy of the model, with gradients. "
        "The model is as it was.\n"
        "Verify a smaller model of the same kind (fewer or narrower layers), or on the CPU:  verify(model.cpu(), ...)"
    )


def _check(loss_fn: object, train_window: object, options: object) -> None:
    if loss_fn is not None and (not callable(loss_fn) or isinstance(loss_fn, nn.Module)):
        msg = (
            f"loss_fn must be a function loss_fn(model, batch) -> loss; found {type(loss_fn).__name__}.\n"
            "Wrap a criterion:  verify(model, lambda model, batch: criterion(model(batch[0]), batch[1]), batch, 8)"
        )
        raise ConfigurationError(msg)
    if loss_fn is not None and not takes(loss_fn, 2):
        msg = (
            "loss_fn cannot be called with a model and a batch.\n"
            "Let it take these two:  loss_fn = lambda model, batch: criterion(model(batch[0]), batch[1])"
        )
        raise ConfigurationError(msg)
    if train_window is not None and not callable(train_window):
        msg = (
            f"train_window must be a function train_window(model, micro_batches); found "
            f"{type(train_window).__name__}.\n"
            "Put your loop over one window's micro-batches into one."
        )
        raise ConfigurationError(msg)
    if train_window is not None and not takes(train_window, 2):
        msg = (
            "train_window cannot be called with a model and one window's micro-batches, a list.\n"
            "Let it take these two:  def train_window(model, micro_batches): ..."
        )
        raise ConfigurationError(msg)
    if options is not None and not isinstance(options, Options):
        msg = f"options must be an Options, as in verify(..., options=Options(check=False)); found {options!r}"
        raise ConfigurationError(msg)


def _check_size(size: object, samples: int) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        msg = f"micro_batch_size must be a positive integer; found {size!r}"
        raise ConfigurationError(msg)
    if samples < _FEWEST:
        msg = "this batch has one sample, so there is nothing to accumulate.\nVerify with a batch of two or more."
        raise BatchError(msg)
    if size >= samples:
        msg = (
            f"micro_batch_size={size} takes all {samples} samples of this batch at once, so nothing is accumulated.\n"
            f"Take a smaller one, such as micro_batch_size={max(1, samples * 2 // 5)}"
        )
        raise ConfigurationError(msg)
