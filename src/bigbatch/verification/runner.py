"""Runs the big batch, the window and single micro-batches, always on the same samples and random numbers."""

import math
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_map

from bigbatch.batch.batch import Batch
from bigbatch.batch.tree import mapped
from bigbatch.big_step import BigStep
from bigbatch.default_loss import own_loss
from bigbatch.errors import LossError
from bigbatch.options import Options
from bigbatch.state.oom import is_out_of_memory, let_go
from bigbatch.state.scope import times_asked
from bigbatch.verification.loop_recorder import LoopRecord, TrainWindow, record
from bigbatch.verification.model_copy import ModelCopy, ModelUnderTest
from bigbatch.verification.tolerance import Gradients, Tolerance, add, in_float64, read_gradients, relative

LossFunction = Callable[[Any, Any], Any]
Found = TypeVar("Found")
_THIRD, _SEVENTH = 1 / 3, 1 / 7  # factors that no dtype holds exactly: every product is rounded anew
_LOWER = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Samples:
    """The big batch, and how many samples each micro-batch has."""

    batch: Batch
    sizes: tuple[int, ...]
    device: torch.device

    def whole(self, dtype: torch.dtype | None, order: Sequence[int] | None = None) -> Any:
        """Return all samples on the model's device, in their own order or in another."""
        return self._moved(self.batch.take(slice(0, self.batch.size) if order is None else order), dtype)

    def rows(self, start: int, end: int, dtype: torch.dtype | None) -> Any:
        """Return some samples on the model's device."""
        return self._moved(self.batch.take(slice(start, end)), dtype)

    def micro_batches(self, dtype: torch.dtype | None) -> list[Any]:
        """Return all micro-batches, as a loader would."""
        return [self.rows(end - n, end, dtype) for end, n in zip(accumulate(self.sizes), self.sizes, strict=True)]

    def _moved(self, tree: Any, dtype: torch.dtype | None) -> Any:
        return mapped(tree, lambda _, leaf: _cloned(leaf, dtype, self.device))


def _cloned(leaf: Any, dtype: torch.dtype | None, device: torch.device | None = None) -> Any:
    """Copy a tensor, since a loss may write into its batch, and cast its numbers, not its labels."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().to(device=device, dtype=dtype if leaf.is_floating_point() else None, copy=True)


@dataclass(frozen=True)
class Whole:
    """What one forward and backward over all samples gave."""

    gradients: Gradients
    loss: float
    is_precise: bool  # a float64 model computed all of it in float64


@dataclass(frozen=True)
class Accumulated:
    """What one window gave."""

    gradients: Gradients
    loss: float = math.nan
    sizes: tuple[int, ...] = ()  # of the micro-batches, where the strategy has cut them itself
    record: LoopRecord | None = None


class Strategy(Protocol):
    """A way to accumulate."""

    @property
    def name(self) -> str:
        """What a verification calls it."""
        ...

    def run(self, model: ModelCopy, loss_fn: LossFunction, samples: Samples, dtype: torch.dtype | None) -> Accumulated:
        """Accumulate the gradients of all samples."""
        ...


@dataclass(frozen=True)
class BigStepStrategy:
    """`BigStep`, as its user has it; what it raises comes out."""

    size: int
    options: Options
    name: str = "BigStep"

    @property
    def unchecked(self) -> "BigStepStrategy":
        """The same without the first check, which would refuse experiments, too."""
        return replace(self, options=replace(self.options, check=False))

    def run(self, model: ModelCopy, loss_fn: LossFunction, samples: Samples, dtype: torch.dtype | None) -> Accumulated:
        """Make one update with a rate of 0, and read what the optimizer steps with."""
        found: dict[str, Tensor | None] = dict.fromkeys(model.parameters)  # nothing counted: no step
        sizes: list[int] = []

        def sized(network: Any, micro_batch: Any) -> Any:
            sizes.append(Batch.of(micro_batch, shared=samples.batch.shared).size)
            return loss_fn(network, micro_batch)

        options, collate = self.options, self.options.collate
        batch = samples.batch.whole
        if collate is None:
            batch = mapped(batch, lambda _, leaf: _cloned(leaf, dtype))
        elif dtype is not None:
            options = replace(options, collate=lambda some: mapped(collate(some), lambda _, leaf: _cloned(leaf, dtype)))
        optimizer = torch.optim.SGD(model.parameters.values(), lr=0.0)
        optimizer.register_step_pre_hook(lambda *_: found.update(read_gradients(model.parameters)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # what BigStep cannot see is compared here
            inner = sized if options.lengths else loss_fn
            update = BigStep(model.model, optimizer, inner, micro_batch_size=self.size, options=options)(batch)
        loss = float(update.loss) if update.loss_is_exact else math.nan
        return Accumulated(found, loss, tuple(sizes[-update.micro_batches :]))


@dataclass(frozen=True)
class WeightedLoop:
    """One backward per micro-batch, each weighted by its samples: for what `BigStep` refuses."""

    name: str = "samples"

    def run(self, model: ModelCopy, loss_fn: LossFunction, samples: Samples, dtype: torch.dtype | None) -> Accumulated:
        """Add up."""
        total = 0.0
        for batch, size in zip(samples.micro_batches(dtype), samples.sizes, strict=True):
            loss, weight = loss_fn(model.model, batch), size / samples.batch.size
            loss.backward(torch.full_like(loss, weight))
            total += weight * float(loss.detach())
        return Accumulated(read_gradients(model.parameters), total)


@dataclass(frozen=True)
class UserLoop:
    """A loop that the user wrote."""

    train_window: TrainWindow
    refused: frozenset[int]  # ids of parameters that it must not step
    clipping: bool = False
    stepping: bool = True
    name: str = "train_window"

    def run(self, model: ModelCopy, loss_fn: LossFunction, samples: Samples, dtype: torch.dtype | None) -> Accumulated:
        """Run one window, and read what it steps with."""
        del loss_fn  # it has its own
        undo = {"undo_clipping": not self.clipping, "undo_steps": not self.stepping}
        found = record(self.train_window, model, samples.micro_batches(dtype), **undo, refused=self.refused)
        gradients = found.gradients if self.stepping else found.over_all_steps
        return Accumulated(gradients, found.loss, record=found)


class Switches(Protocol):
    """What an experiment turns off."""

    def applied(self, model: ModelCopy, sizes: Sequence[int]) -> AbstractContextManager[None]:
        """Turn it off inside; `sizes` are the micro-batches of a big batch that runs whole."""
        ...


@dataclass(frozen=True)
class _Nothing:
    def applied(self, model: ModelCopy, sizes: Sequence[int]) -> AbstractContextManager[None]:
        """Turn nothing off."""
        del model, sizes
        return nullcontext()


NOTHING = _Nothing()
Around = Callable[[ModelCopy], AbstractContextManager[object]]


@dataclass(frozen=True)
class PerMicroBatch:
    """What each micro-batch gave by itself: its loss, and its gradient."""

    losses: tuple[float, ...]
    gradients: tuple[dict[str, Tensor], ...]


class Runner:
    """All runs of a verification."""

    def __init__(
        self,
        model: ModelUnderTest,
        loss_fn: LossFunction,
        samples: Samples,
        strategy: Strategy,
        on_run: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Run nothing yet."""
        self.model, self.samples, self.strategy = model, samples, strategy
        self.dtype: torch.dtype | None = None  # what to run in; None: the model's own
        self.autocast: torch.dtype | None = None  # of the big batch in the model's own dtype: what a loop uses
        self.uses_across = False
        self.has_loss_fn = loss_fn is not own_loss
        self._loss_fn, self._on_run = loss_fn, on_run

    @property
    def is_loop(self) -> bool:
        """Whether the user's own loop is verified."""
        return isinstance(self.strategy, UserLoop)

    @property
    def judged_in(self) -> torch.dtype:
        """The dtype that the model runs in now."""
        return self.dtype or self.model.own.dtype

    def whole(
        self,
        off: Switches = NOTHING,
        *,
        order: Sequence[int] | None = None,
        factor: float = 1.0,
        around: Around = nullcontext,
    ) -> Whole:
        """Run the big batch, its loss times a `factor`, which is taken out again."""
        self._on_run("the big batch")
        with self.copy(off, self.samples.sizes) as model, around(model):
            asked = times_asked()
            loss = self.loss(model.model, self.samples.whole(self.dtype, order))
            self.uses_across = self.uses_across or times_asked() != asked
            precise = self.judged_in != torch.float64 or _is_precise(loss)
            loss.backward(torch.full_like(loss, factor))
            return Whole(read_gradients(model.parameters, 1 / factor), float(loss.detach()), precise)

    def accumulated(self, off: Switches = NOTHING, strategy: Strategy | None = None) -> Accumulated:
        """Run a window, by the strategy that is verified or by another."""
        self._on_run("accumulated")
        strategy = strategy or self.strategy
        with self.copy(off) as model:
            loss_fn = self._loss_fn if isinstance(strategy, BigStepStrategy) else self.loss  # BigStep checks its own
            return strategy.run(model, loss_fn, self.samples, self.dtype)

    def per_micro_batch(self, off: Switches, kept: Callable[[Gradients], dict[str, Tensor]]) -> PerMicroBatch:
        """Run the micro-batches one after the other, as a loop does, and keep something of each one's gradient."""
        self._on_run("each micro-batch")
        losses, gradients = [], []
        with self.copy(off) as model:
            for batch in self.samples.micro_batches(self.dtype):
                loss = self.loss(model.model, batch)
                loss.backward()
                losses.append(float(loss.detach()))
                gradients.append(kept(read_gradients(model.parameters)))
                for p in model.parameters.values():
                    p.grad = None
        return PerMicroBatch(tuple(losses), tuple(gradients))

    def weighted(self, weights: Sequence[float], off: Switches = NOTHING) -> Gradients:
        """Add the micro-batches up by given weights, in float64."""
        total, left = list[Gradients](), iter(weights)

        def added(gradients: Gradients) -> dict[str, Tensor]:
            weight = next(left)
            total[:] = [add([*total, {name: in_float64(g, weight) for name, g in gradients.items()}])]
            return {}

        self.per_micro_batch(off, added)
        return total[0]

    def of_parameters_alone(self, off: Switches = NOTHING) -> Gradients:
        """Run the big batch with the model's outputs detached: what is left comes from parameters alone."""
        self._on_run("parameters alone")

        def detach(_module: nn.Module, _args: object, output: Any) -> Any:
            return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output)

        with self.copy(off, self.samples.sizes) as model:
            for each in model.models:
                each.register_forward_hook(detach)
            loss = self._called(model.model, self.samples.whole(self.dtype))
            if not isinstance(loss, Tensor) or not loss.requires_grad:
                return dict.fromkeys(model.parameters)
            loss.backward()
            return read_gradients(model.parameters)

    def forward(self, model: ModelCopy, start: int, end: int) -> None:
        """Call the user's function on some samples, for what it does on its way."""
        self._called(model.model, self.samples.rows(start, end, self.dtype))

    def loss(self, model: Any, batch: Any) -> Tensor:
        """Call the user's function, and raise for what is no loss."""
        loss = self._called(model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            shape = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise LossError("loss_fn must return one number, the loss of the batch.", found=shape)
        if not loss.requires_grad:
            raise LossError(
                "the loss has no graph, so no gradient can come from it.",
                fix="it without .item(), .detach() and torch.no_grad()",
            )
        return loss

    def tolerance(self, truth: Whole) -> Tolerance:
        """Measure the rounding: run the big batch scaled, and in another order."""
        scaled = relative(self.whole(factor=_THIRD).gradients, truth.gradients)
        number = self.samples.batch.size
        order = [*range(1, number, 2), *range(0, number, 2)][::-1]
        moved = attempt(  # a loss may want its samples in order
            lambda: relative(self.whole(order=order, factor=_SEVENTH).gradients, truth.gradients), scaled
        )
        return Tolerance.measured(scaled, moved, precise=truth.is_precise and self.judged_in == torch.float64)

    @contextmanager
    def copy(self, off: Switches = NOTHING, sizes: Sequence[int] = ()) -> Iterator[ModelCopy]:
        """Return a copy of the model for a run; `sizes` are its micro-batches where it runs whole."""
        device = self.samples.device.type
        autocast = self.dtype is None and self.autocast is not None
        context = torch.autocast(device, dtype=self.autocast) if autocast else nullcontext()
        with self.model.fresh(self.dtype) as model:
            switched = off.applied(model, sizes)
            if not sizes:
                _draw_ahead(self.model.devices)
            with switched, context:
                yield model

    def _called(self, model: Any, batch: Any) -> Any:
        found = self._loss_fn(model, batch)
        return found[0] if isinstance(found, tuple) and len(found) == 2 else found  # noqa: PLR2004 - and extras


def attempt(experiment: Callable[[], Found], otherwise: Found, notes: list[str] | None = None) -> Found:
    """Return what an experiment finds; one may fail where training does not, as BatchNorm on one sample."""
    try:
        return experiment()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        let_go(error)
        if notes is not None:
            notes.append(f"An experiment failed with {type(error).__name__}: {str(error).partition(chr(10))[0]}")
        return otherwise


def loader_sizes(total: int, size: int) -> tuple[int, ...]:
    """Return the sizes of a loader's micro-batches: full ones and a short last one."""
    return (size,) * (total // size) + ((total % size,) if total % size else ())


def uneven_size(total: int, size: int, *, balanced: bool = False) -> int | None:
    """Return the nearest micro-batch size that does not divide the batch; `balanced`: as BigStep evens them out."""
    others = [each for each in range(2, total) if total % (-(-total // each) if balanced else each)]
    return min(others, key=lambda each: (abs(each - size), each), default=None)


def _draw_ahead(devices: frozenset[torch.device]) -> None:
    """Draw some numbers: by luck one layer's masks may be the same in any split."""
    for device in {torch.device("cpu"), *devices}:
        torch.rand(1009, device=device)
    random.random()  # noqa: S311 - no secret
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.random(7)


def _is_precise(loss: Tensor) -> bool:
    """Whether a float64 model computed all of its loss in float64: many round to float32 on their way."""
    stack, seen = [loss.grad_fn], set[Node]()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        metadata: Any = node
        if any(each.dtype in _LOWER for each in metadata._input_metadata):  # noqa: SLF001 - no public name
            return False
        stack.extend(below for below, _ in node.next_functions)
    return True
