"""A model that runs twice: first for its values alone, and again in backward, one micro-batch at a time.

`torch.utils.checkpoint` can do it, too, and is what stands in where this cannot. It asks Python about every tensor that
is saved, in both runs and in backward. Here the first run saves nothing, and one node stands for the whole of it, as in
GradCache. Gradients leave a model through what it returns; where one takes another way, by a feature that a hook has
put aside, it comes to an operation that has saved nothing, and that is an error, not another gradient.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from bigbatch.batches.splitting import leaves, mapped
from bigbatch.batches.writing import PLAIN
from bigbatch.errors import LossError
from bigbatch.lockstep.crew import Worker
from bigbatch.lockstep.found_before import FoundBefore, Place
from bigbatch.lockstep.meeting import refuse_second_derivative
from bigbatch.lockstep.numbers import Streams
from bigbatch.reading.counts import LOW_PRECISION

_KINDS = ("cpu", "cuda")
Places = dict[str, Tensor]
Autocast = tuple[tuple[str, bool, torch.dtype], ...]


class CannotRunAgain(RuntimeError):
    """A model, or what is made of its results, cannot do with a first run that saves nothing."""


class RunsDiffer(LossError):
    """A model gave other values the second time, or would."""


_SAME = 1e-2  # of the largest value, and less in high precision: kernels that add in no fixed order differ by far less
_OTHER_VALUES = (
    "the model returned other values when it was run again in backward with the same input. It depends on something "
    "that has changed in between: an attribute that loss_fn sets before it calls the model, or a counter of its own.\n"
    'Give it as an argument:  model(x, condition); or keep activations:  Options(activations="keep")'
)


_CHANGES_ITSELF = (
    "the model changes {what} when it runs, so a second run in backward would be another one.\n"
    'Do that in loss_fn, after the model has run; or keep activations:  Options(activations="keep")'
)


class _Alias(NamedTuple):
    """A result that shares its memory with another one, or with an input."""

    witness: Tensor  # without its memory: it knows whether that was changed in place
    version: int


@dataclass
class _Call:
    """One call of a model by one micro-batch."""

    model: nn.Module
    plain: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    inputs: Places
    versions: list[int]
    streams: Streams
    autocast: Autocast
    buffers: FoundBefore
    trained: frozenset[int]  # the parameters that got a gradient then
    wanted: Sequence[str] = ()  # where its results that have a gradient are
    drew: list[Tensor] | None = None  # where the random numbers stood before it, if it drew any
    values: Sequence[Tensor] = ()  # what they were, where that is to be compared

    def run(self, worker: Worker, given: tuple[tuple[Any, ...], dict[str, Any]] | None = None) -> Any:
        """Run the model, now; perhaps with other tensors of the same values."""
        positional, named = given or self.arguments
        with alone(worker):
            found = self.plain(*positional, **named)
        if self.versions != [tensor._version for tensor in self.inputs.values()]:  # noqa: SLF001 - torch's own counter
            raise CannotRunAgain("the model changes its input in place, so it cannot run again")
        return found

    def again(self, worker: Worker, given: tuple[tuple[Any, ...], dict[str, Any]]) -> list[Tensor]:
        """Run it once more as it ran the first time, with a graph; returns the results that have a gradient."""
        now = self.streams.state() if self.drew is not None else None
        if self.drew is not None:
            self.streams.go_on(self.drew)
        try:
            with torch.enable_grad(), _under(self.autocast), self.buffers.again():
                found = dict(leaves(self.run(worker, given)))
        finally:
            if now is not None:
                self.streams.go_on(now)
        missing = [place for place in self.wanted if not isinstance(found.get(place), Tensor)]
        if missing:
            raise CannotRunAgain(f"the model returned {missing[0]} the first time, and does not the second")
        results: list[Tensor] = [found[place] for place in self.wanted]
        for first, second in zip(self.values, results, strict=bool(self.values)):
            if first.shape != second.shape or _distance(first, second.detach()) > self._same(first):
                raise RunsDiffer(_OTHER_VALUES)
        return results

    def _same(self, result: Tensor) -> float:
        """Return how far two runs may be apart: as much as the lowest precision on the way may make them."""
        low = any(enabled for _, enabled, _ in self.autocast) or any(
            p.dtype in LOW_PRECISION for p in self.model.parameters()
        )
        exact = result.is_floating_point() or result.is_complex()
        return _SAME if low or not exact else min(_SAME, torch.finfo(result.dtype).eps ** 0.5)


class _Parts(NamedTuple):
    """What a model is made of, as the window found it."""

    parameters: tuple[nn.Parameter, ...]
    modules: tuple[nn.Module, ...]


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
    moving: dict[int, frozenset[Place]] = field(default_factory=dict)  # buffers of models that a run writes into
    aliases: list[_Alias] = field(default_factory=list)
    _parts: dict[int, "_Parts"] = field(default_factory=dict)  # of models: walking through one takes a while

    def call(self, model: nn.Module, plain: Callable[..., Any], worker: Worker, *given: Any) -> Any:
        """Call a model for the micro-batch at hand, with positional and named arguments."""
        parts = self._parts_of(model)
        with _refusing_changed_parameters(parts.parameters):
            if worker.number:
                return self._twice(model, plain, worker, given)
            # Its backward comes first, while no other holds anything: there is nothing to save.
            buffers = FoundBefore(parts.modules, frozenset())
            with alone(worker):
                found = plain(*given[0], **given[1])
            self.moving[id(model)] = self.moving.get(id(model), frozenset()) | buffers.written()
            return found

    def _twice(self, model: nn.Module, plain: Callable[..., Any], worker: Worker, given: Any) -> Any:
        inputs = _tensors(given)
        versions = [tensor._version for tensor in inputs.values()]  # noqa: SLF001
        buffers = FoundBefore(self._parts_of(model).modules, self.moving.get(id(model)))
        streams: Streams = worker.notes["streams"]
        call = _Call(model, plain, given, inputs, versions, streams, _autocast(), buffers, self.trained(model))
        before = streams.state()
        with saved_tensors_hooks(_nothing, _refuse):
            found = call.run(worker)
        if any(not torch.equal(*pair) for pair in zip(before, streams.state(), strict=True)):
            call.drew = before
        if not buffers.settle():
            raise RunsDiffer(_CHANGES_ITSELF.format(what="a buffer for some micro-batches, and not for the first,"))
        return self._standing_for(call, model, worker, found)

    def trained(self, model: nn.Module) -> frozenset[int]:
        """Return which of the optimizers' parameters a run of a model gives a gradient to, as they are now."""
        return self.parameters.intersection([id(p) for p in self._parts_of(model).parameters if p.requires_grad])

    def _parts_of(self, model: nn.Module) -> "_Parts":
        found = self._parts.get(id(model))
        if found is None:
            found = self._parts[id(model)] = _Parts(tuple(model.parameters()), tuple(model.modules()))
        return found

    def refuse_changed(self) -> None:
        """Forward is over: raise where a result was changed in place that shares its memory."""
        for witness, version in self.aliases:
            if witness._version != version:  # noqa: SLF001
                raise CannotRunAgain("results that are views of each other, or of an input, were changed in place")
        self.aliases.clear()

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
        handle = next((p for p in self._parts_of(model).parameters if p.requires_grad and self._is_handle(p)), None)
        if handle is None:
            raise CannotRunAgain("no parameter of the model can stand for all of them")
        with_gradient = [tensor for tensor in call.inputs.values() if tensor.requires_grad]
        values = [results[place].detach() for place in call.wanted]
        call.values = [value.clone() for value in values] if self.comparing else ()
        made = _Again.apply(call, self, worker, values, handle, *with_gradient)  # type: ignore[no-untyped-call]
        self.aliases.extend(_aliases(made, call.inputs.values()))
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
        if ctx.calls.trained(call.model) != call.trained:
            raise CannotRunAgain("parameters were frozen, or not, for one call of the model alone")
        given = mapped(call.arguments, lambda _, leaf: of.get(id(leaf), leaf))
        pairs = [
            (result, above)
            for result, above in zip(call.again(ctx.worker, given), gradients, strict=True)
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


def _aliases(results: Iterable[Tensor], inputs: Iterable[Tensor]) -> Iterator[_Alias]:
    """Yield the results that share memory: what is done to one in place is done to all, and none of them knows."""
    together = Counter(_memory(each) for each in (*results, *inputs))
    for each in results:
        if together[_memory(each)] > 1:
            witness = each.detach()
            witness.data = torch.empty(0, dtype=each.dtype, device=each.device)
            yield _Alias(witness, each._version)  # noqa: SLF001


def _memory(tensor: Tensor) -> int:
    """Return where a tensor's memory is; others than torch's own plain ones may have none, and stand for themselves."""
    if type(tensor) not in {Tensor, nn.Parameter} or tensor.layout != torch.strided:
        return -id(tensor)
    found: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - as torch.multiprocessing has it
    return found


@contextmanager
def _refusing_changed_parameters(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Raise where a model changes its own parameters as it runs, as an average of others: it would do so twice."""
    before = [parameter._version for parameter in parameters]  # noqa: SLF001
    yield
    if before != [parameter._version for parameter in parameters]:  # noqa: SLF001
        raise RunsDiffer(_CHANGES_ITSELF.format(what="its own parameters"))


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
