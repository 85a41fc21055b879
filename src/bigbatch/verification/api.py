"""The public function: check what was passed, and compare both sides on as many samples as fit."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from bigbatch import arguments
from bigbatch.batch.batch import Batch
from bigbatch.batch.split import balanced
from bigbatch.errors import BatchError, ConfigurationError, OutOfMemory
from bigbatch.options import Options
from bigbatch.state.oom import is_out_of_memory, let_go, missing
from bigbatch.state.scope import asked_aside
from bigbatch.state.snapshot import untouched
from bigbatch.verification.comparison import Verifier, name_of
from bigbatch.verification.loop_recorder import TrainWindow
from bigbatch.verification.model_copy import ModelUnderTest
from bigbatch.verification.result import Verification
from bigbatch.verification.runner import Runner, Strategy

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
    models = arguments.models(model)
    options = Options() if options is None else options
    _check_functions(loss_fn, train_window, options)
    whole = Batch.of(batch, collate=options.collate)
    size = _checked_size(micro_batch_size, whole.size)
    under_test = ModelUnderTest(model)
    samples, wide = whole.size, True

    def verification() -> Verification:
        at_once = size if samples == whole.size else min(size, samples // 2)
        part = whole if samples == whole.size else whole.only(range(samples))
        sizes = balanced(samples, at_once) if train_window is None else _loader_sizes(samples, at_once)
        way = Strategy("train_window" if train_window else "BigStep", at_once, options, train_window)
        runner = Runner(under_test, loss_fn, part, tuple(sizes), way)
        if not wide:
            runner.notes.append(
                f"Not even two samples fit into memory in float64, so it was judged in {name_of(under_test.dtype)} "
                "alone, where small mistakes may hide in rounding."
            )
        if samples < whole.size:
            runner.notes.append(
                f"The whole batch of {whole.size:,} did not fit into memory: the first {samples:,} samples were "
                f"compared, in micro-batches of {at_once:,}."
            )
        return Verifier(runner, wide=wide).verification(whole.size)

    with untouched(models), torch.enable_grad(), asked_aside():
        while True:  # on all samples, or, out of memory, on half of them, and so on; at last without float64
            try:
                return verification()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                let_go(error, told=True)
                if samples <= _LEAST and not wide:
                    problem = f"out of memory with two samples; {missing(error)}. The model is unchanged."
                    fix = "a smaller model of the same kind, or the CPU:  verify(model.cpu(), ...)"
                    raise OutOfMemory(problem, fix=fix) from error
            samples, wide = (samples // 2, wide) if samples > _LEAST else (whole.size, False)


def _check_functions(loss_fn: object, train_window: object, options: object) -> None:
    if loss_fn is not None and (not callable(loss_fn) or isinstance(loss_fn, nn.Module)):
        fix = "lambda model, batch: criterion(model(batch[0]), batch[1])"
        problem = "loss_fn must be a function of a model and a batch."
        raise ConfigurationError(problem, found=type(loss_fn).__name__, fix=fix)
    if train_window is not None and not callable(train_window):
        problem = "train_window must be a function of a model and one window's micro-batches, a list."
        fix = "def train_window(model, micro_batches): ..."
        raise ConfigurationError(problem, found=type(train_window).__name__, fix=fix)
    if not isinstance(options, Options):
        raise ConfigurationError("options must be Options.", found=repr(options), fix="Options(check=False)")


def _checked_size(given: object, samples: int) -> int:
    size = arguments.positive("micro_batch_size", given)
    if samples < _LEAST:
        raise BatchError("this batch has one sample, so there is nothing to accumulate.", fix="a batch of two or more")
    if size >= samples:
        problem = f"micro_batch_size={size} takes all {samples} samples at once, so nothing is accumulated."
        raise ConfigurationError(problem, fix=f"a smaller one, such as micro_batch_size={max(1, samples * 2 // 5)}")
    return size


def _loader_sizes(total: int, size: int) -> tuple[int, ...]:
    """Return the sizes of a loader's micro-batches: full ones and a short last one."""
    return (size,) * (total // size) + ((total % size,) if total % size else ())
