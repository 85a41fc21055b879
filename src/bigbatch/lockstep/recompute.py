"""A model that runs twice: first for its values alone, and again in backward, as in GradCache.

The first run saves nothing, and one node of the graph stands for all of it. The second run draws the same random
numbers and finds the same buffers. In the first windows, and on a host always, it must give the same values: a model
that hangs on anything else, as on a global that `loss_fn` sets, is refused. So is a loss that uses something from the
inside of the model: it comes to an operation that has saved nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from bigbatch.batch.tree import PLAIN, apart, leaves, mapped
from bigbatch.lockstep.cannot_recompute import CannotRecompute, MeetsInside
from bigbatch.lockstep.model_state import Attributes, FoundState, Place
from bigbatch.lockstep.round import Round
from bigbatch.lockstep.threads import Worker, current
from bigbatch.loss.count import LOW_PRECISION
from bigbatch.state.rng import Draws

_SAME = 1e-2  # of the largest value, and less in high precision: kernels that add in no fixed order differ by far less
_KINDS = ("cpu", "cuda")
Autocast = tuple[tuple[str, bool, torch.dtype], ...]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class _Alias(NamedTuple):
    """A result that shares its memory with another one, or with an input."""

    witness: Tensor  # without its memory: it knows whether that was changed in place
    version: int


@dataclass
class Recompute:
    """The recomputed calls of one window."""

    own: Callable[[], tuple[Tensor, ...] | None]  # whose gradients are wanted; None: of all that there are
    parameters: frozenset[int]  # the ids of the optimizers'
    comparing: bool  # whether values of both runs are compared on a device, too, which waits for it
    calls: int = 0  # how many were recomputed, or would have been but for the first micro-batch's
    aliases: list[_Alias] = field(default_factory=list)
    _moving: dict[int, frozenset[Place]] = field(default_factory=dict)  # buffers that models write into
    _attributes: dict[int, Attributes] = field(default_factory=dict)  # of models, the latest

    @contextmanager
    def of(self, models: Sequence[nn.Module]) -> Iterator[None]:
        """Inside, calls of models, and those of their children that are called without them, are recomputed."""
        with ExitStack() as stack:
            for model in models:
                stack.enter_context(_replaced(model, self, is_whole=True))
                for child in _children(model):
                    stack.enter_context(_replaced(child, self, is_whole=False))
            yield

    def call(self, model: nn.Module, plain: Callable[..., Any], worker: Worker, given: Arguments) -> Any:
        """Call a model for the micro-batch at hand."""
        self.calls += 1
        found = FoundState(self._attributes_of(model), self._moving.get(id(model), frozenset()))
        if not worker.number:
            # Its backward comes first, while no other holds anything: there is nothing to save.
            with _alone(worker):
                result = plain(*given[0], **given[1])
            self._moving[id(model)] = self._moving.get(id(model), frozenset()) | found.moved()
            return result
        call = _Call(model, plain, given, found, worker)
        with saved_tensors_hooks(_save_nothing, _refuse):
            result = call.run(given)
        call.draws.settle()
        found.settle()
        return self._standing_for(call, result)

    def refuse_changed(self) -> None:
        """Forward is over: raise where a result was changed in place that shares its memory."""
        if any(alias.witness._version != alias.version for alias in self.aliases):  # noqa: SLF001
            raise CannotRecompute.because("results that are views of each other, or of an input, were changed in place")
        self.aliases.clear()

    def _attributes_of(self, model: nn.Module) -> Attributes:
        latest = self._attributes.get(id(model))
        if latest is None or not latest.are_current():
            latest = self._attributes[id(model)] = Attributes(model)
        return latest

    def _standing_for(self, call: "_Call", result: Any) -> Any:
        """Return the results of a first run with one node for all of it, in place of a graph that has saved nothing."""
        # What a model hands on as it got it, or one of its own parameters, is no result of the run.
        given = {id(tensor) for tensor in call.inputs.values()}
        results = {p: t for p, t in _tensors(result).items() if t.grad_fn is not None and id(t) not in given}
        first: dict[int, str] = {}
        same = {place: first.setdefault(id(tensor), place) for place, tensor in results.items()}
        call.wanted = list(first.values())
        if not call.wanted:
            return result
        with_gradient = [tensor for tensor in call.inputs.values() if tensor.requires_grad]
        handle = next((p for p in call.model.parameters() if p.requires_grad and self._is_handle(p)), None)
        if handle is None and not with_gradient:
            raise CannotRecompute.because("no parameter of the model can stand for all of them")
        values = [results[place].detach() for place in call.wanted]
        # On a host nothing has to be waited for, so there they are always compared.
        if self.comparing or all(value.device.type == "cpu" for value in values):
            call.values = [value.clone() for value in values]
        made = _Again.apply(call, self.own, values, handle, *with_gradient)  # type: ignore[no-untyped-call]
        self.aliases.extend(_aliases(made, call.inputs.values()))
        of = dict(zip(call.wanted, made, strict=True))
        return mapped(result, lambda place, leaf: of[same[place]] if place in same else leaf)

    def _is_handle(self, parameter: Tensor) -> bool:
        """Whether a parameter can have the run in its graph: its own hooks would be called for nothing there."""
        return id(parameter) in self.parameters and not getattr(parameter, "_backward_hooks", None)


class _Call:
    """One call of a model by one micro-batch."""

    def __init__(
        self, model: nn.Module, plain: Callable[..., Any], given: Arguments, found: FoundState, worker: Worker
    ) -> None:
        """Take note of what it begins with."""
        assert worker.round.streams is not None  # noqa: S101 - several run
        self.model, self._plain = model, plain
        self.arguments = apart(given)  # in structures of their own: the user's may be filled anew
        self.inputs = _tensors(given)
        self._versions = self._versions_now()
        self._found, self.draws, self._worker = found, Draws(worker.round.streams), worker
        self._autocast = _autocast()
        self.wanted: Sequence[str] = ()  # where its results that have a gradient are
        self.values: Sequence[Tensor] = ()  # what they were, where that is to be compared

    def run(self, given: Arguments) -> Any:
        """Run the model, now; perhaps with other tensors of the same values."""
        with _alone(self._worker):
            found = self._plain(*given[0], **given[1])
        if self._versions != self._versions_now():
            raise CannotRecompute.because("the model, or the loss after it, changes the model's input in place")
        return found

    def again(self, given: Arguments) -> list[Tensor]:
        """Run it once more as it ran the first time, with a graph; returns the results that have a gradient."""
        with torch.enable_grad(), _under(self._autocast), self._found.again(), self.draws.again():
            found = dict(leaves(self.run(given)))
        if self.draws.differed:
            raise CannotRecompute.because(
                "the second run did not draw the random numbers of the first: another thread has drawn some",
                "torch.Generator() in that thread",
            )
        missing = [place for place in self.wanted if not isinstance(found.get(place), Tensor)]
        if missing:
            raise CannotRecompute.because(f"the model returned {missing[0]} the first time, and not the second")
        results: list[Tensor] = [found[place] for place in self.wanted]
        if self.values:
            low = any(enabled for _, enabled, _ in self._autocast)
            low = low or any(p.dtype in LOW_PRECISION for p in self.model.parameters())
            _refuse_other_values(self.values, results, low=low)
        return results

    def is_over(self) -> bool:
        """Whether all forwards of the window are."""
        return self._worker.round.is_backward

    def _versions_now(self) -> list[int]:
        return [-1 if each.is_inference() else each._version for each in self.inputs.values()]  # noqa: SLF001


class _Again(torch.autograd.Function):
    """Stands for a whole run of a model. One of its parameters is in the graph for all: backward gets here by it."""

    @staticmethod
    def forward(ctx: Any, call: _Call, own: Any, values: list[Tensor], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        del tensors
        ctx.call, ctx.own = call, own
        ctx.set_materialize_grads(False)
        return tuple(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        if not call.is_over():
            raise CannotRecompute.because("loss_fn takes a derivative of its own through the model")
        inputs = [tensor for tensor in call.inputs.values() if tensor.requires_grad]
        fresh = [tensor.detach().requires_grad_() for tensor in inputs]
        of = {id(tensor): new for tensor, new in zip(inputs, fresh, strict=True)}
        results = call.again(mapped(apart(call.arguments), lambda _, leaf: of.get(id(leaf), leaf)))
        pairs = [
            (result, above)
            for result, above in zip(results, gradients, strict=True)
            if above is not None and result.requires_grad
        ]
        own = ctx.own()
        if pairs:
            below, above_them = zip(*pairs, strict=True)
            torch.autograd.backward(below, above_them, inputs=None if own is None else (*own, *fresh))
        return None, None, None, None, *(each.grad for each in fresh)


class _Forward:
    """Stands in a model's place for its forward while a window runs."""

    def __init__(self, model: nn.Module, plain: Callable[..., Any], recompute: Recompute, *, is_whole: bool) -> None:
        self._model, self._plain, self._recompute, self._is_whole = model, plain, recompute, is_whole

    def __call__(self, *positional: Any, **named: Any) -> Any:
        worker = current()
        # In backward it is a part of a second run, perhaps of a checkpoint that is inside of the model.
        is_part = worker is not None and (worker.round.is_recomputing or worker.round.is_backward)
        if worker is None or is_part or not torch.is_grad_enabled():
            return self._plain(*positional, **named)
        if worker.meetings and not self._is_whole:  # a layer of the loss, whose terms are read through it
            return self._plain(*positional, **named)
        return self._recompute.call(self._model, self._plain, worker, (positional, named))

    def __reduce__(self) -> Any:
        """A copy of the model, as of a teacher that loss_fn makes of it, has its own forward and knows no window."""
        return _itself, (self._plain,)


def _itself(plain: Callable[..., Any]) -> Callable[..., Any]:
    return plain


def refuse_meeting_while_recomputing(round_: Round, name: str) -> None:
    """Raise where micro-batches meet inside of a model that is to be recomputed one at a time."""
    if round_.is_recomputing:
        msg = (
            f'activations="recompute" runs the model again one micro-batch at a time, and this model has {name} '
            "inside, where micro-batches meet: all of them would have to be kept at once."
        )
        raise MeetsInside(msg, fix='Options(activations="offload"), which keeps them in host memory, or "keep"')


def _children(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that a model's own methods call; lists of modules are called one by one.

    Not those without parameters: they may be losses, which are read.
    """
    for child in model.children():
        if type(child).forward is nn.Module.forward:
            yield from _children(child)
        elif not isinstance(child, torch.jit.ScriptModule) and any(True for _ in child.parameters()):
            yield child


@contextmanager
def _replaced(model: nn.Module, recompute: Recompute, *, is_whole: bool) -> Iterator[None]:
    plain: Callable[..., Any] = model.forward
    was_set = "forward" in vars(model)
    if isinstance(plain, _Forward):  # a child of two models
        yield
        return
    model.forward = _Forward(model, plain, recompute, is_whole=is_whole)
    try:
        yield
    finally:
        if was_set:
            model.forward = plain
        else:
            del model.forward


@contextmanager
def _alone(worker: Worker) -> Iterator[None]:
    """Have no other micro-batch's turn come before this is over: it must not meet inside."""
    worker.round.is_recomputing = True
    try:
        yield
    finally:
        worker.round.is_recomputing = False


def _save_nothing(_: Tensor) -> None:
    """Save nothing."""


def _refuse(_: None) -> Tensor:
    raise CannotRecompute.because("the loss uses something from the inside of the model", "return it from forward")


def _tensors(tree: Any) -> dict[str, Tensor]:
    """Return the tensors of a structure, each with its place; raise where one may be hidden in something else."""
    found: dict[str, Tensor] = {}
    for place, leaf in leaves(tree):
        if isinstance(leaf, Tensor):
            found[place] = leaf
        elif leaf is not None and not isinstance(leaf, (*PLAIN, torch.dtype, torch.device, list, tuple)):
            kind = type(leaf).__name__
            raise CannotRecompute.because(f"it takes or returns an object that no one can look into ({kind})")
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


def _refuse_other_values(first: Iterable[Tensor], second: Iterable[Tensor], *, low: bool) -> None:
    """Raise where two runs gave other values; `low`: the precision on the way is, so they may be further apart."""
    for one, other in zip(first, second, strict=True):
        exact = one.is_floating_point() or one.is_complex()
        same = _SAME if low or not exact else min(_SAME, torch.finfo(one.dtype).eps ** 0.5)
        if one.shape != other.shape or _distance(one, other.detach()) > same:
            raise CannotRecompute.because(
                "the model returned other values when it was run again in backward with the same input. It depends on "
                "something outside of it that has changed in between, such as a global that loss_fn sets",
                "model(x, condition), an argument of the call",
            )


def _distance(first: Tensor, second: Tensor) -> float:
    """Return how far two results are apart, as a part of the largest value; not finite values agree with all."""
    if not first.numel():
        return 0.0
    finite = first.isfinite()
    difference = (first - second).abs().masked_fill(~finite, 0.0).nan_to_num(nan=torch.inf)
    return float(difference.max() / first.abs().masked_fill(~finite, 0.0).max().clamp(min=1e-30))


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
