"""A model that runs twice: first for its values alone, and again in backward, as in GradCache.

The first run saves nothing, and one node of the graph stands for all of it. The second run draws the same random
numbers and finds the same state. In the first windows, and on a host always, it must give the same values: a model that
depends on anything else, as on a global that `loss_fn` sets, is refused. So is a loss that uses something from the
inside of the model: it comes to an operation that has saved nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from bigbatch.batch.tree import PLAIN, apart, leaves, mapped
from bigbatch.lockstep.model_state import CannotRecompute, ModelState
from bigbatch.lockstep.offload_evict import Saved, name_of
from bigbatch.lockstep.thread_state import autocasts, under
from bigbatch.lockstep.threads import Worker, current
from bigbatch.loss.count import LOW_PRECISION
from bigbatch.state.rng import Draws

_SAME = 1e-2  # of the largest value, and less in high precision: kernels that add in no fixed order differ by far less
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Recompute:
    """The recomputed calls of one window."""

    own: Callable[[], tuple[Tensor, ...] | None]  # whose gradients are wanted; None: of all that there are
    parameters: frozenset[int]  # the ids of the optimizers'
    comparing: bool  # whether values of both runs are compared on a device, too, which waits for it
    calls: int = 0  # how many were recomputed, or would have been but for the first micro-batch's
    _states: dict[int, ModelState] = field(default_factory=dict)  # of models

    @contextmanager
    def of(self, models: Sequence[nn.Module]) -> Iterator[None]:
        """Inside, calls of models, and those of their children that are called without them, are recomputed."""
        with ExitStack() as stack:
            for model in models:
                for each in (model, *_children(model)):
                    plain = each.forward
                    if isinstance(plain, _Forward):  # a child of two models
                        continue
                    undo = (delattr,) if "forward" not in vars(each) else (setattr, plain)
                    each.forward = _Forward(each, plain, self, is_whole=each is model)
                    stack.callback(undo[0], each, "forward", *undo[1:])
            yield

    def call(self, model: nn.Module, plain: Callable[..., Any], worker: Worker, given: Arguments) -> Any:
        """Call a model for the micro-batch at hand."""
        self.calls += 1
        known = self._states.get(id(model))
        if known is not None:
            known.refuse_changed()
            if worker.number:
                return self._standing_for(_Call(self, model, plain, known, worker, apart(given)), given)
        # The backward of the first comes first, while no other holds anything: there is nothing to save.
        state = known or ModelState(model)
        result = _alone(worker, plain, given)
        if known is None:
            self._states[id(model)] = state
            state.learn()
        return result

    def _standing_for(self, call: "_Call", given: Arguments) -> Any:
        """Return the results of a first run with one node for all of it, in place of a graph that has saved nothing."""
        with saved_tensors_hooks(lambda _: None, _refuse):
            result = _alone(call.worker, call.plain, given)
        call.draws.settle()
        # What a model hands on as it got it, or one of its own parameters, is no result of the run.
        inputs = set(map(id, call.inputs))
        results = {p: t for p, t in _tensors(result).items() if t.grad_fn is not None and id(t) not in inputs}
        if not results:
            return result
        # A parameter's own hooks would be called for nothing.
        able = (p for p in call.model.parameters() if p.requires_grad and not getattr(p, "_backward_hooks", None))
        handle = next((p for p in able if id(p) in self.parameters), None)
        if handle is None and not call.inputs:
            raise CannotRecompute("no parameter of the model can stand for all of them")
        values = [tensor.detach() for tensor in results.values()]
        call.wanted = list(results)
        # On a host nothing has to be waited for, so there they are always compared.
        if self.comparing or all(value.device.type == "cpu" for value in values):
            call.values = [value.clone() for value in values]
        made = _Again.apply(call, values, handle, *call.inputs)  # type: ignore[no-untyped-call]
        together = Counter(_memory(each) for each in (*made, *_tensors(call.arguments).values()))
        call.aliases = [Saved.without_memory(each) for each in made if together[_memory(each)] > 1]
        return mapped(result, dict(zip(results, made, strict=True)).get)


@dataclass
class _Call:
    """One call of a model by one micro-batch."""

    window: Recompute
    model: nn.Module
    plain: Callable[..., Any]
    state: ModelState
    worker: Worker
    arguments: Arguments  # in structures of their own: the user's may be filled anew
    wanted: Sequence[str] = ()  # where its results that have a gradient are
    values: Sequence[Tensor] = ()  # what they were, where that is to be compared
    aliases: Sequence[Saved] = ()  # results that share memory

    def __post_init__(self) -> None:
        """Take note of what it begins with."""
        assert self.worker.round.streams is not None  # noqa: S101 - several run
        self.inputs = [tensor for tensor in _tensors(self.arguments).values() if tensor.requires_grad]
        self.found, self.autocasts, self.draws = self.state.found(), autocasts(), Draws(self.worker.round.streams)

    def again(self, given: Arguments) -> list[Tensor]:
        """Run it once more as it ran the first time, with a graph, on other tensors of the same values.

        Returns the results that have a gradient.
        """
        if any(each.is_changed for each in self.aliases):
            raise CannotRecompute("results that are views of each other, or of an input, were changed in place")
        with torch.enable_grad(), under(self.autocasts), self.state.again(self.found), self.draws.again():
            found = dict(leaves(_alone(self.worker, self.plain, given)))
        results: list[Any] = [found.get(place) for place in self.wanted]
        low = any(enabled for _, _, enabled, _ in self.autocasts)
        low = low or any(p.dtype in LOW_PRECISION for p in self.model.parameters())
        same = not self.values or all(_is_same(*pair, low=low) for pair in zip(self.values, results, strict=True))
        if not same or not all(isinstance(each, Tensor) for each in results):
            raise CannotRecompute(
                "the model returned other values when it was run again in backward with the same input. It depends "
                "on something outside of it that has changed in between, such as a global that loss_fn sets, or "
                "changes its input",
                "model(x, condition), an argument of the call",
            )
        return results


class _Again(torch.autograd.Function):
    """Stands for a whole run of a model. One of its parameters is in the graph for all: backward gets here by it."""

    @staticmethod
    def forward(ctx: Any, call: _Call, values: list[Tensor], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        del tensors
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        if not call.worker.round.is_backward:
            raise CannotRecompute("loss_fn takes a derivative of its own through the model")
        fresh = [tensor.detach().requires_grad_() for tensor in call.inputs]
        of = {id(tensor): new for tensor, new in zip(call.inputs, fresh, strict=True)}
        results = call.again(mapped(apart(call.arguments), lambda _, leaf: of.get(id(leaf), leaf)))
        pairs = [pair for pair in zip(results, gradients, strict=True) if pair[1] is not None and pair[0].requires_grad]
        own = call.window.own()
        if pairs:
            below, above = zip(*pairs, strict=True)
            torch.autograd.backward(below, above, inputs=None if own is None else (*own, *fresh))
        return None, None, None, *(each.grad for each in fresh)


@dataclass(eq=False)
class _Forward:
    """Stands in a model's place for its forward while a window runs."""

    model: nn.Module
    plain: Callable[..., Any]
    recompute: Recompute
    is_whole: bool

    def __call__(self, *positional: Any, **named: Any) -> Any:
        worker = current()
        # In backward it is a part of a second run, perhaps of a checkpoint that is inside of the model.
        is_part = worker is not None and (worker.round.is_recomputing or worker.round.is_backward)
        if worker is None or is_part or not torch.is_grad_enabled():
            return self.plain(*positional, **named)
        if worker.meetings and not self.is_whole:  # a layer of the loss, whose terms are read through it
            return self.plain(*positional, **named)
        return self.recompute.call(self.model, self.plain, worker, (positional, named))

    def __reduce__(self) -> Any:
        """A copy of the model, as of a teacher that loss_fn makes of it, has its own forward and knows no window."""
        return _itself, (self.plain,)


def _itself(plain: Callable[..., Any]) -> Callable[..., Any]:
    return plain


def _children(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that a model's own methods call; lists of modules are called one by one.

    Not those without parameters: they may be losses, which are read.
    """
    for child in model.children():
        if type(child).forward is nn.Module.forward:
            yield from _children(child)
        elif not isinstance(child, torch.jit.ScriptModule) and any(True for _ in child.parameters()):
            yield child


def _alone(worker: Worker, plain: Callable[..., Any], given: Arguments) -> Any:
    """Run a model, and have no other micro-batch's turn come before this is over: it must not meet inside."""
    worker.round.is_recomputing = True
    try:
        return plain(*given[0], **given[1])
    finally:
        worker.round.is_recomputing = False


def _refuse(_: None) -> Tensor:
    raise CannotRecompute("the loss uses something from the inside of the model", "return it from forward")


def _tensors(tree: Any) -> dict[str, Tensor]:
    """Return the tensors of a structure, each with its place; raise where one may be hidden in something else."""
    found: dict[str, Tensor] = {}
    for place, leaf in leaves(tree):
        if isinstance(leaf, Tensor):
            found[place] = leaf
        elif leaf is not None and not isinstance(leaf, (*PLAIN, torch.dtype, torch.device, list, tuple)):
            raise CannotRecompute(f"it takes or returns an object that no one can look into ({type(leaf).__name__})")
    return found


def _memory(tensor: Tensor) -> int:
    """Return where a tensor's memory is; others than torch's own plain ones may have none, and stand for themselves."""
    is_plain = type(tensor) in {Tensor, nn.Parameter} and tensor.layout == torch.strided
    return name_of(tensor) if is_plain else -id(tensor)


def _is_same(first: Tensor, second: object, *, low: bool) -> bool:
    """Whether two runs gave the same values; `low`: precision is, so they may be further apart."""
    if not isinstance(second, Tensor) or first.shape != second.shape or not first.numel():
        return isinstance(second, Tensor) and first.shape == second.shape
    slack = _SAME if low else min(_SAME, torch.finfo(first.dtype).eps ** 0.5)
    largest = float(first.nan_to_num(0.0, 0.0, 0.0).abs().max())
    return torch.allclose(first, second.detach(), rtol=0.0, atol=slack * largest, equal_nan=True)
