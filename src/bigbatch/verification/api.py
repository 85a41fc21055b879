"""The public function: check what was passed, compare both sides on as many samples as fit, and find causes."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bigbatch import arguments
from bigbatch.batch.batch import Batch
from bigbatch.batch.split import balanced
from bigbatch.default_loss import own_loss
from bigbatch.errors import BatchError, ConfigurationError, OutOfMemory
from bigbatch.options import Options
from bigbatch.state.oom import is_out_of_memory, let_go, missing
from bigbatch.state.scope import asked_aside
from bigbatch.verification.comparison import Verifier, name_of
from bigbatch.verification.loop_recorder import TrainWindow
from bigbatch.verification.model_copy import ModelUnderTest
from bigbatch.verification.result import Verification
from bigbatch.verification.runner import BigStepStrategy, Runner, Samples, UserLoop, loader_sizes

_LEAST = 2  # samples: two micro-batches of one


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
    find the causes: one thing after another is turned off, to see the difference go away. The model is not run or
    changed, and random generators are restored afterwards, also after an error.

    Args:
        model: in the mode in which it trains, on its device; one or several, as `loss_fn` takes them.
        loss_fn: called as `loss_fn(model, batch)`, for the big batch; None: `model(**batch).loss`.
        batch: all samples of one update, on any device.
        micro_batch_size: the most samples that go through the model at once.
        train_window: a function of your own, `train_window(model, micro_batches)`, which gets a copy of the model and
            one window's micro-batches as a list, cut as a DataLoader would. It may leave its gradients in `.grad`, or
            step an optimizer of torch once: what that steps with is compared. It may return its loss.
        options: those of your `BigStep`.
    """
    return run_verification(model, loss_fn, batch, micro_batch_size, train_window=train_window, options=options)


def run_verification(
    model: Any,
    loss_fn: Callable[[Any, Any], Any] | None,
    batch: Any,
    micro_batch_size: int,
    *,
    train_window: TrainWindow | None = None,
    options: Options | None = None,
    on_run: Callable[[str], None] = lambda _: None,
) -> Verification:
    """Verify, and call `on_run` with what each run is of before it is made."""
    models = arguments.models(model)
    _check_functions(loss_fn, train_window, options)
    options = options or Options()
    whole = Batch.of(batch, collate=options.collate)
    _check_size(micro_batch_size, whole.size)
    under_test = ModelUnderTest(model, models)
    if not under_test.own.parameters:
        raise ConfigurationError("no parameter of the model requires a gradient: there is nothing to verify.")
    asked = _Asked(under_test, loss_fn or own_loss, whole, micro_batch_size, train_window, options, on_run)
    with under_test.guarded(), torch.enable_grad(), asked_aside():
        return asked.verification()


@dataclass(frozen=True)
class _Asked:
    """What is to be verified."""

    model: ModelUnderTest
    loss_fn: Callable[[Any, Any], Any]
    whole: Batch
    size: int
    train_window: TrainWindow | None
    options: Options
    on_run: Callable[[str], None]

    def verification(self) -> Verification:
        """Compare on all samples, or, out of memory, on half of them, and so on; at last without float64."""
        samples, wide = self.whole.size, True
        while True:
            try:
                return self._on(samples, wide=wide).verification()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                let_go(error, told=True)
                if samples <= _LEAST and not wide:
                    problem = f"out of memory with two samples; {missing(error)}. The model is unchanged."
                    fix = "a smaller model of the same kind, or the CPU:  verify(model.cpu(), ...)"
                    raise OutOfMemory(problem, fix=fix) from error
            samples, wide = (samples // 2, wide) if samples > _LEAST else (self.whole.size, False)

    def _on(self, samples: int, *, wide: bool) -> Verifier:
        total, part = self.whole.size, self.whole
        at_once = self.size
        if samples < total:
            part, at_once = self.whole.only(range(samples)), min(self.size, samples // 2)
        device = next(iter(self.model.own.parameters.values())).device
        cut = balanced if self.train_window is None else loader_sizes
        strategy = (
            BigStepStrategy(at_once, self.options)
            if self.train_window is None
            else UserLoop(self.train_window, self.model.parameter_ids)
        )
        runner = Runner(
            self.model, self.loss_fn, Samples(part, tuple(cut(samples, at_once)), device), strategy, self.on_run
        )
        notes = []
        if not wide:
            notes.append(
                f"Not even two samples fit into memory in float64, so it was judged in {name_of(self.model.own.dtype)} "
                "alone, where small mistakes may hide in rounding."
            )
        if samples < total:
            smaller = f", in micro-batches of {at_once:,} instead of {self.size:,}" if at_once < self.size else ""
            notes.append(
                f"The whole batch of {total:,} did not fit into memory: the first {samples:,} samples were "
                f"compared{smaller}."
            )
        return Verifier(runner, total, wide, notes)


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None, None)
    except ValueError:  # some built-in functions have no signature
        return True
    except TypeError:
        return False
    return True


def _check_functions(loss_fn: Any, train_window: Any, options: object) -> None:
    a_loss = "lambda model, batch: criterion(model(batch[0]), batch[1])"
    if loss_fn is not None and (not callable(loss_fn) or isinstance(loss_fn, nn.Module)):
        raise ConfigurationError(
            "loss_fn must be a function of a model and a batch.", found=type(loss_fn).__name__, fix=a_loss
        )
    if loss_fn is not None and not _takes_two(loss_fn):
        raise ConfigurationError("loss_fn cannot be called with a model and a batch.", fix=a_loss)
    if train_window is not None and not (callable(train_window) and _takes_two(train_window)):
        problem = "train_window must be a function of a model and one window's micro-batches, a list."
        raise ConfigurationError(
            problem, found=type(train_window).__name__, fix="def train_window(model, micro_batches): ..."
        )
    if options is not None and not isinstance(options, Options):
        raise ConfigurationError("options must be Options.", found=repr(options), fix="Options(check=False)")


def _check_size(size: object, samples: int) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ConfigurationError("micro_batch_size must be a positive integer.", found=repr(size))
    if samples < _LEAST:
        raise BatchError("this batch has one sample, so there is nothing to accumulate.", fix="a batch of two or more")
    if size >= samples:
        problem = (
            f"micro_batch_size={size} takes all {samples} samples of this batch at once, so nothing is accumulated."
        )
        raise ConfigurationError(problem, fix=f"a smaller one, such as micro_batch_size={max(1, samples * 2 // 5)}")
