"""A model that runs twice: first for its values alone, and again in backward, one micro-batch at a time.

`torch.utils.checkpoint` can do it, too, and is what stands in where this cannot. It asks Python about every tensor that
is saved, in both runs and in backward. Here the first run saves nothing, and one node stands for the whole of it, as in
GradCache. Gradients leave a model through what it returns; where one takes another way, by a feature that a hook has
put aside, it comes to an operation that has saved nothing, and that is an error, not another gradient.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from bigbatch.batch.tree import PLAIN, apart, leaves, mapped
from bigbatch.lockstep.differing import RunsDiffer, refuse_other_values
from bigbatch.lockstep.found_before import FoundBefore
from bigbatch.lockstep.holdings import Picture, Place
from bigbatch.lockstep.threads import Worker
from bigbatch.lockstep.tracks import Tracks
from bigbatch.loss.count import LOW_PRECISION
from bigbatch.state.rng import Draws

__all__ = ["Calls", "CannotRunAgain", "RunsDiffer"]

_KINDS = ("cpu", "cuda")
Places = dict[str, Tensor]
Autocast = tuple[tuple[str, bool, torch.dtype], ...]


class CannotRunAgain(RuntimeError):
    """A model, or what is made of its results, cannot do with a first run that saves nothing."""


class _Alias(NamedTuple):
    """A result that shares its memory with another one, or with an input."""

    witness: Tensor  # without its memory: it knows whether that was changed in place
    version: int


@dataclass
class _Call:
    """One call of a model by one micro-batch."""

    model: nn.Module
    plain: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]  # in structures of their own: the user's may be filled anew
    inputs: Places
    versions: list[int]
    autocast: Autocast
    found: FoundBefore
    draws: Draws
    trained: frozenset[int]  # the parameters that got a gradient then
    wanted: Sequence[str] = ()  # where its results that have a gradient are
    values: Sequence[Tensor] = ()  # what they were, where that is to be compared
    tracks: Tracks | None = None  # how it got there, likewise

    def run(self, worker: Worker, given: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        """Run the model, now; perhaps with other tensors of the same values."""
        positional, named = given
        with alone(worker):
            found = self.plain(*positional, **named)
        if self.versions != [tensor._version for tensor in self.inputs.values()]:  # noqa: SLF001 - torch's own counter
            raise CannotRunAgain("the model changes its input in place, so it cannot run again")
        return found

    def again(
        self, worker: Worker, given: tuple[tuple[Any, ...], dict[str, Any]], inputs: Sequence[Tensor]
    ) -> list[Tensor]:
        """Run it once more as it ran the first time, with a graph; returns the results that have a gradient."""
        looking = self.tracks.second() if self.tracks is not None else nullcontext()
        with torch.enable_grad(), _under(self.autocast), self.found.again(), self.draws.again(), looking:
            found = dict(leaves(self.run(worker, given)))
        if self.draws.differed:
            raise RunsDiffer.in_numbers()
        missing = [place for place in self.wanted if not isinstance(found.get(place), Tensor)]
        if missing:
            raise CannotRunAgain(f"the model returned {missing[0]} the first time, and does not the second")
        results: list[Tensor] = [found[place] for place in self.wanted]
        if self.values:
            low = any(enabled for _, enabled, _ in self.autocast)
            low = low or any(p.dtype in LOW_PRECISION for p in self.model.parameters())
            refuse_other_values(self.values, results, low=low)
        if self.tracks is not None:
            self.tracks.compare(results, inputs)
        return results


@contextmanager
def alone(worker: Worker) -> Iterator[None]:
    """Have no other micro-batch's turn come before this is over: it must not meet inside."""
    worker.round.is_recomputing = True
    try:
        yield
    finally:
        worker.round.is_recomputing = False


@dataclass(frozen=True)
class Calls:
    """The calls of one window."""

    own: Callable[[], tuple[Tensor, ...] | None]  # whose gradients are wanted; None: of all that there are
    parameters: frozenset[int]  # the ids of the optimizers'
    comparing: bool = False  # whether the second run gives what the first gave; this waits for the device
    moving: dict[int, frozenset[Place]] = field(default_factory=dict)  # tensors of models that a run writes into
    aliases: list[_Alias] = field(default_factory=list)
    _restless: set[int] = field(default_factory=set)  # models that put things aside when they run
    _parameters: dict[int, tuple[nn.Parameter, ...]] = field(default_factory=dict)  # of models
    _pictures: dict[int, Picture] = field(default_factory=dict)  # the latest: walking through a model takes a while

    def call(self, model: nn.Module, plain: Callable[..., Any], worker: Worker, *given: Any) -> Any:
        """Call a model for the micro-batch at hand, with positional and named arguments."""
        with _refusing_changed_parameters(self._parameters_of(model)):
            if worker.number:
                return self._twice(model, plain, worker, given)
            # Its backward comes first, while no other holds anything: there is nothing to save.
            picture = self._picture_of(model)
            before = FoundBefore(picture, frozenset())
            with alone(worker):
                found = plain(*given[0], **given[1])
            if not picture.is_current():
                self._restless.add(id(model))
            self.moving[id(model)] = self.moving.get(id(model), frozenset()) | before.written()
            return found

    def _twice(self, model: nn.Module, plain: Callable[..., Any], worker: Worker, given: Any) -> Any:
        inputs = _tensors(given)
        versions = [tensor._version for tensor in inputs.values()]  # noqa: SLF001
        picture = self._picture_of(model)
        assert worker.round.streams is not None  # noqa: S101 - several run
        before, draws = (
            FoundBefore(picture, self.moving.get(id(model))),
            Draws(worker.round.streams, picture.generators),
        )
        call = _Call(model, plain, apart(given), inputs, versions, _autocast(), before, draws, self.trained(model))
        call.tracks = Tracks() if self.comparing else None
        with saved_tensors_hooks(call.tracks.forget if call.tracks is not None else _nothing, _refuse):
            found = call.run(worker, given)
        draws.settle()
        changed = before.settle(restless=id(model) in self._restless)
        if changed:
            self._pictures[id(model)] = picture.renewed(changed)  # the other one holds what was found before
        return self._standing_for(call, model, worker, found)

    def trained(self, model: nn.Module) -> frozenset[int]:
        """Return which of the optimizers' parameters a run of a model gives a gradient to, as they are now."""
        return self.parameters.intersection([id(p) for p in self._parameters_of(model) if p.requires_grad])

    def _parameters_of(self, model: nn.Module) -> tuple[nn.Parameter, ...]:
        found = self._parameters.get(id(model))
        if found is None:
            found = self._parameters[id(model)] = tuple(model.parameters())
        return found

    def _picture_of(self, model: nn.Module) -> Picture:
        latest = self._pictures.get(id(model))
        found = self._pictures[id(model)] = Picture(model) if latest is None else latest.renewed()
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
        handle = next((p for p in self._parameters_of(model) if p.requires_grad and self._is_handle(p)), None)
        if handle is None:
            raise CannotRunAgain("no parameter of the model can stand for all of them")
        with_gradient = [tensor for tensor in call.inputs.values() if tensor.requires_grad]
        values = [results[place].detach() for place in call.wanted]
        if call.tracks is not None:
            call.tracks.first([results[place] for place in call.wanted], with_gradient)
        # On a host nothing has to be waited for, so there they are always compared.
        if self.comparing or all(value.device.type == "cpu" for value in values):
            call.values = [value.clone() for value in values]
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
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        inputs = [tensor for tensor in call.inputs.values() if tensor.requires_grad]
        fresh = [tensor.detach().requires_grad_() for tensor in inputs]
        of = {id(tensor): new for tensor, new in zip(inputs, fresh, strict=True)}
        if ctx.calls.trained(call.model) != call.trained:
            raise CannotRunAgain("parameters were frozen, or not, for one call of the model alone")
        given = mapped(apart(call.arguments), lambda _, leaf: of.get(id(leaf), leaf))
        pairs = [
            (result, above)
            for result, above in zip(call.again(ctx.worker, given, fresh), gradients, strict=True)
            if above is not None and result.requires_grad
        ]
        own = ctx.calls.own()
        if pairs:
            results, above_them = zip(*pairs, strict=True)
            torch.autograd.backward(results, above_them, inputs=None if own is None else (*own, *fresh))
        return None, None, None, None, None, *(each.grad for each in fresh)


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
        raise RunsDiffer.by_itself("its own parameters")


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
