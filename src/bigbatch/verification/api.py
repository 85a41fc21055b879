"""The public function: check what was passed, and compare both sides on as many samples as fit."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch import nn

from bigbatch import arguments
from bigbatch.batch.batch import Batch
from bigbatch.errors import BatchError, ConfigurationError, OutOfMemory
from bigbatch.options import Options, checked_loss_fn, checked_options
from bigbatch.state.oom import is_out_of_memory, let_go, missing
from bigbatch.state.scope import asked_aside
from bigbatch.state.snapshot import untouched
from bigbatch.verification.comparison import compare, name_of
from bigbatch.verification.diagnosis import Diagnosis
from bigbatch.verification.model_copy import ModelCopy, TrainWindow, first_line
from bigbatch.verification.result import Verification
from bigbatch.verification.runner import Runner
from bigbatch.verification.weights import count_all

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
    models, loss_fn, options = arguments.models(model), checked_loss_fn(loss_fn), checked_options(options)
    if isinstance(train_window, nn.Module) or not (train_window is None or callable(train_window)):
        problem, found = "train_window must be a function.", type(train_window).__name__
        raise ConfigurationError(problem, found=found, fix="def train_window(model, micro_batches): ...")
    whole, own = Batch.of(batch, collate=options.collate), ModelCopy(model)
    size = _checked_size(micro_batch_size, whole.size)
    halves = dict.fromkeys(max(_LEAST, whole.size >> times) for times in range(whole.size.bit_length()))
    failed: Exception = MemoryError()
    with untouched(models), torch.enable_grad(), asked_aside():
        for wide, samples in product((True, False), halves):  # at last without float64
            is_whole = samples == whole.size
            part, at_once = (whole, size) if is_whole else (whole.only(range(samples)), min(size, samples // 2))
            try:
                runner = Runner(own, loss_fn, part, at_once, options=options, train_window=train_window)
                return _verification(runner, whole.size, wide=wide)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                let_go(error, told=True)
                failed = error
    problem = f"out of memory with two samples; {missing(failed)}. The model is unchanged."
    fix = "a smaller model of the same kind, or the CPU:  verify(model.cpu(), ...)"
    raise OutOfMemory(problem, fix=fix) from failed


def _checked_size(given: object, samples: int) -> int:
    size = arguments.positive("micro_batch_size", given)
    if samples < _LEAST:
        raise BatchError("this batch has one sample, so there is nothing to accumulate.", fix="a batch of two or more")
    if size >= samples:
        problem = f"micro_batch_size={size} takes all {samples} samples at once, so nothing is accumulated."
        raise ConfigurationError(problem, fix=f"a smaller one, such as micro_batch_size={max(1, samples * 2 // 5)}")
    return size


def _verification(runner: Runner, samples: int, *, wide: bool) -> Verification:
    """Compare, find the causes, and say what else a reader should know; `samples` are those of the whole batch."""
    notes, dtype = runner.notes, name_of(runner.model.dtype)
    if not wide:
        notes.append(f"Not even two samples fit into memory in float64, so it was judged in {dtype} alone.")
    if runner.batch.size < samples:
        notes.append(
            f"The whole batch of {samples:,} did not fit into memory: the first {runner.batch.size:,} samples were "
            f"compared, in micro-batches of {runner.size:,}."
        )
    compared = compare(runner, wide=wide)
    causes = Diagnosis(runner, compared).causes()
    exact = all(each.exact for each in compared.differences) and not causes and runner.refused is None
    counts = (counts for name, counts in count_all(runner).items() if not name.endswith("!= 0).sum()"))  # 0: a class?
    if exact and runner.train_window and all(len(set(each)) == 1 for each in counts):
        notes.append(
            f"All {len(runner.sizes):,} micro-batches count the same, which hides a loop that weights them wrong. "
            "Take a micro_batch_size that does not divide the batch as well."
        )
    return Verification(
        exact=exact,
        differences=compared.differences,
        causes=tuple(causes),
        samples=samples,
        samples_proved=runner.batch.size,
        micro_batches=tuple(compared.window.sizes or runner.sizes),
        dtype=dtype,
        loss=(compared.whole.loss, compared.window.loss),
        accumulated_by="train_window" if runner.train_window else "samples" if runner.by_samples else "BigStep",
        refused="" if runner.refused is None else first_line(runner.refused),
        notes=tuple(dict.fromkeys(notes)),
    )
