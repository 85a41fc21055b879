"""A model that runs twice: first for its values alone, and again in backward, one micro-batch at a time.

`torch.utils.checkpoint` can do it, too, and is what stands in where this cannot. It asks Python about every tensor that
is saved, in both runs and in backward. Here the first run saves nothing, and one node stands for the whole of it, as in
GradCache. Gradients leave a model through what it returns; where one takes another way, by a feature that a hook has
put aside, it comes to an operation that has saved nothing, and that is an error, not another gradient.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _NormBase as Statistics

from bigbatch.batches.splitting import leaves, mapped
from bigbatch.batches.writing import PLAIN
from bigbatch.errors import LossError
from bigbatch.lockstep.crew import Worker
from bigbatch.lockstep.meeting import refuse_second_derivative
from bigbatch.lockstep.numbers import Streams

_KINDS = ("cpu", "cuda")
Places = dict[str, Tensor]
Autocast = tuple[tuple[str, bool, torch.dtype], ...]


class CannotRunAgain(RuntimeError):
    """A model, or what is made of its results, cannot do with a first run that saves nothing."""


class RunsDiffer(LossError):
    """A model gave other values the second time."""


_SAME = 1e-2  # of the largest value: kernels that add in no fixed order differ by far less
_OTHER_VALUES = (
    "the model returned other values when it was run again in backward with the same input. It depends on something "
    "that has changed in between: an attribute that loss_fn sets before it calls the model, or a counter of its own.\n"
    'Give it as an argument:  model(x, condition); or keep activations:  Options(activations="keep")'
)


class _Buffer(NamedTuple):
    module: nn.Module
    name: str
    tensor: Tensor | None
    version: int


@dataclass
class _Call:
    """One call of a model by one micro-batch."""

    plain: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    inputs: Places
    versions: list[int]
    streams: Streams
    autocast: Autocast
    wanted: Sequence[str] = ()  # where its results that have a gradient are
    moving: Sequence[_Buffer] = ()  # buffers that a run changes
    drew: list[Tensor] | None = None  # where the random numbers stood before it, if it drew any
    values: Sequence[Tensor] = ()  # what they were, where that is to be compared

    def run(self, worker: Worker) -> Any:
        """Run the model, now."""
        with alone(worker):
            found = self.plain(*self.arguments[0], **self.arguments[1])
        if self.versions != [tensor._version for tensor in self.inputs.values()]:  # noqa: SLF001 - torch's own counter
            raise CannotRunAgain("the model changes its input in place, so it cannot run again")
        return found

    def again(self, worker: Worker) -> list[Tensor]:
        """Run it once more as it ran the first time, with a graph; returns the results that have a gradient."""
        kept = [(buffer, None if buffer.tensor is None else buffer.tensor.detach().clone()) for buffer in self.moving]
        now = self.streams.state() if self.drew is not None else None
        if self.drew is not None:
            self.streams.go_on(self.drew)
        try:
            with torch.enable_grad(), _under(self.autocast):
                found = dict(leaves(self.run(worker)))
        finally:
            if now is not None:
                self.streams.go_on(now)
            for (module, name, tensor, _), copied in kept:
                module._buffers[name] = tensor  # noqa: SLF001 - there is no other way to put one back
                if tensor is not None and copied is not None:
                    tensor.copy_(copied)
        missing = [place for place in self.wanted if not isinstance(found.get(place), Tensor)]
        if missing:
            raise CannotRunAgain(f"the model returned {missing[0]} the first time, and does not the second")
        results: list[Tensor] = [found[place] for place in self.wanted]
        for first, second in zip(self.values, results, strict=bool(self.values)):
            if first.shape != second.shape or _distance(first, second.detach()) > _SAME:
                raise RunsDiffer(_OTHER_VALUES)
        return results


@contextmanager
def alone(worker: Worker) -> Iterator[None]:
    """Have no other micro-batch's turn come before this is over: it must not meet inside."""
    worker.notes["recomputing"] = True
    try:
        yield
    finally:
        worker.notes["recomputing"] = False


@dataclass(frozen=True)
class Calls:
    """The calls of one window."""

    own: Callable[[], tuple[Tensor, ...] | None]  # whose gradients are wanted; None: of all that there are
    parameters: frozenset[int]  # the ids of the optimizers'
    comparing: bool = False  # whether the second run gives what the first gave; this waits for the device

    def call(self, model: nn.Module, plain: Callable[..., Any], worker: Worker, *given: Any) -> Any:
        """Call a model for the micro-batch at hand, with positional and named arguments."""
        if worker.number == 0:  # its backward comes first, while no other holds anything: there is nothing to save
            with alone(worker):
                return plain(*given[0], **given[1])
        inputs = _tensors(given)
        versions = [tensor._version for tensor in inputs.values()]  # noqa: SLF001
        call = _Call(plain, given, inputs, versions, worker.notes["streams"], _autocast())
        buffers, before = _buffers(model), call.streams.state()
        with saved_tensors_hooks(_nothing, _refuse):
            found = call.run(worker)
        if any(not torch.equal(*pair) for pair in zip(before, call.streams.state(), strict=True)):
            call.drew = before
        call.moving = [buffer for buffer in buffers if _is_moving(buffer)]
        return self._standing_for(call, model, worker, found)

    def _standing_for(self, call: _Call, model: nn.Module, worker: Worker, found: Any) -> Any:
        """Return the results of a first run with one node for all of it, in place of a graph that has saved nothing."""
        # What a model hands on as it got it, or one of its own parameters, is no result of the run.
        given = {id(tensor) for tensor in call.inputs.values()}
        results = {p: t for p, t in _tensors(found).items() if t.grad_fn is not None and id(t) not in given}
        first: dict[int, str] = {}
        same = {place: first.setdefault(id(tensor), place) for place, tensor in results.items()}
        call.wanted = list(first.values())
        if not call.wanted:
            return found
        handle = next((p for p in model.parameters() if p.requires_grad and self._is_handle(p)), None)
        if handle is None:
            raise CannotRunAgain("no parameter of the model can stand for all of them")
        with_gradient = [tensor for tensor in call.inputs.values() if tensor.requires_grad]
        values = [results[place].detach() for place in call.wanted]
        call.values = [value.clone() for value in values] if self.comparing else ()
        made = _Again.apply(call, self, worker, values, handle, *with_gradient)  # type: ignore[no-untyped-call]
        of = dict(zip(call.wanted, made, strict=True))
        return mapped(found, lambda place, leaf: of[same[place]] if place in same else leaf)

    def _is_handle(self, parameter: Tensor) -> bool:
        """Whether a parameter can have the run in its graph: its own hooks would be called for nothing there."""
        return id(parameter) in self.parameters and not getattr(parameter, "_backward_hooks", None)


class _Again(torch.autograd.Function):
    """Stands for a whole run of a model. One of its parameters is in the graph for all: backward gets here by it."""

    @staticmethod
    def forward(
        ctx: Any, call: _Call, calls: Calls, worker: Worker, values: list[Tensor], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        del tensors
        ctx.call, ctx.calls, ctx.worker = call, calls, worker
        ctx.set_materialize_grads(False)
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("a model that runs again in backward")
        call: _Call = ctx.call
        inputs = [tensor for tensor in call.inputs.values() if tensor.requires_grad]
        fresh = [tensor.detach().requires_grad_() for tensor in inputs]
        of = {id(tensor): new for tensor, new in zip(inputs, fresh, strict=True)}
        call.arguments = mapped(call.arguments, lambda _, leaf: of.get(id(leaf), leaf))
        pairs = [
            (result, above)
            for result, above in zip(call.again(ctx.worker), gradients, strict=True)
            if above is not None and result.requires_grad
        ]
        own = ctx.calls.own()
        if pairs:
            results, above_them = zip(*pairs, strict=True)
            torch.autograd.backward(results, above_them, inputs=None if own is None else (*own, *fresh))
        return None, None, None, None, None, *(each.grad for each in fresh)


def _distance(first: Tensor, second: Tensor) -> float:
    """Return how far two results are apart, as a part of the largest value; NaN and infinity are at no distance."""
    apart = (first - second).abs().nan_to_num(0.0, 0.0, 0.0)
    return float(apart.max() / first.abs().nan_to_num(0.0, 0.0, 0.0).max().clamp(min=1e-30)) if apart.numel() else 0.0


def _nothing(_: Tensor) -> None:
    """Save nothing."""


def _refuse(_: None) -> Tensor:
    raise CannotRunAgain("the loss uses something from the inside of the model")


def _tensors(tree: Any) -> Places:
    """Return the tensors of a structure, each with its place; raise where one may be hidden in something else."""
    found: Places = {}
    for place, leaf in leaves(tree):
        if isinstance(leaf, Tensor):
            found[place] = leaf
        elif leaf is not None and not isinstance(leaf, (*PLAIN, torch.dtype, torch.device, list, tuple)):
            raise CannotRunAgain(f"a {type(leaf).__name__} goes into the model or comes out of it")
    return found


def _buffers(model: nn.Module) -> list[_Buffer]:
    return [
        _Buffer(module, name, tensor, 0 if tensor is None else tensor._version)  # noqa: SLF001
        for module in model.modules()
        for name, tensor in module._buffers.items()  # noqa: SLF001 - those that are not saved with the model, too
    ]


def _is_moving(buffer: _Buffer) -> bool:
    """Whether a run has changed a buffer, or may have without a new version."""
    if buffer.module._buffers.get(buffer.name) is not buffer.tensor:  # noqa: SLF001
        return True
    if isinstance(buffer.module, Statistics) and buffer.module.training:
        return True
    return buffer.tensor is not None and buffer.tensor._version != buffer.version  # noqa: SLF001


def _autocast() -> Autocast:
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _KINDS)


@contextmanager
def _under(autocast: Autocast) -> Iterator[None]:
    """Put an autocast in force, and nothing else."""
    before = _autocast()
    try:
        _set_autocast(autocast)
        yield
    finally:
        _set_autocast(before)


def _set_autocast(states: Autocast) -> None:
    for kind, enabled, dtype in states:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
