"""Records what a loop that somebody else wrote does in one window: backwards, clipping, and what it steps with."""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import median
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from bigbatch.verification.model_copy import ModelCopy, raise_used_itself
from bigbatch.verification.tolerance import add, in_float64, read_gradients

_ALIKE = 1.01  # a loss scale is a factor of all gradients, but for rounding
_CLIPPING = ("clip_grad_norm_", "clip_grad_value_")
TrainWindow = Callable[[Any, list[Any]], Any]
Stepped = dict[str, Tensor | None]


@dataclass
class LoopRecord:
    """What a loop did in one window."""

    stepped: list[Stepped] = field(default_factory=list)  # the gradients at each step of an optimizer
    left: Stepped = field(default_factory=dict)  # in .grad after the window
    most_steps: int = 0  # of one optimizer
    steps_of_others: int = 0  # of optimizers that have no parameter of the model
    backwards: int = 0  # that reached one parameter
    clipped: int = 0  # how often one parameter was: parts of a model may be clipped one by one
    clipped_by: str = ""  # the function of torch
    clipped_sizes: dict[str, float] = field(default_factory=dict)  # norms of gradients before they were clipped
    autocast: torch.dtype | None = None  # the loop's own, inside the model
    loss: float = math.nan  # what it returned

    @property
    def gradients(self) -> Stepped:
        """What it stepped with first; without a step what it left."""
        return {name: each[name] for each in reversed(self.stepped) for name in each} if self.stepped else self.left

    @property
    def over_all_steps(self) -> Stepped:
        """The gradients of all steps and what was left after the last, added up."""
        return add([*self.stepped, self.left])

    @property
    def scale_at_clip(self) -> float:
        """By which factor gradients were larger when they were clipped than in the step: a loss scale, else 1."""
        pairs = [(size, self.gradients.get(name)) for name, size in self.clipped_sizes.items()]
        sizes = [(size, float(gradient.norm())) for size, gradient in pairs if gradient is not None]
        ratios = [size / stepped for size, stepped in sizes if math.isfinite(size) and 0 < stepped < math.inf]
        is_scale = bool(ratios) and max(ratios) <= _ALIKE * min(ratios) and min(ratios) > _ALIKE
        return median(ratios) if is_scale else 1.0


def record(
    train_window: TrainWindow,
    model: ModelCopy,
    micro_batches: Sequence[Any],
    *,
    undo_clipping: bool,
    undo_steps: bool,
    refused: frozenset[int],
) -> LoopRecord:
    """Run a loop over one window; an optimizer with a `refused` parameter, by id, trains another model."""
    found = LoopRecord()
    device = next((p.device.type for p in model.parameters.values()), "cpu")

    def read_autocast(*_: object) -> None:
        if torch.is_autocast_enabled(device):
            found.autocast = torch.get_autocast_dtype(device)

    for each in model.models:
        each.register_forward_pre_hook(read_autocast, prepend=True)
    with ExitStack() as stack:
        stack.enter_context(_count_backwards(found, model.parameters))
        stack.enter_context(_read_steps(_Steps(found, model.parameters, refused, undo=undo_steps)))
        stack.enter_context(_record_clipping(found, model.parameters, undo=undo_clipping))
        returned = train_window(model.model, list(micro_batches))
    found.left = read_gradients(model.parameters)
    if isinstance(returned, int | float) or (isinstance(returned, Tensor) and returned.numel() == 1):
        found.loss = float(returned.detach() if isinstance(returned, Tensor) else returned)
    return found


@contextmanager
def _count_backwards(found: LoopRecord, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Count how often a gradient reaches a parameter; the hooks are the graph's, since a parameter's change paths."""
    times = dict.fromkeys(parameters, 0)

    def counter(name: str) -> Callable[[Any, Any], None]:
        def count(_inputs: Any, _outputs: Any) -> None:
            times[name] += 1
            found.backwards = max(found.backwards, times[name])

        return count

    nodes = {name: get_gradient_edge(p).node for name, p in parameters.items()}  # which live while held
    with ExitStack() as stack:
        for name, node in nodes.items():
            stack.callback(node.register_hook(counter(name)).remove)
        yield


@contextmanager
def _read_steps(steps: "_Steps") -> Iterator[None]:
    with ExitStack() as stack:
        stack.callback(register_optimizer_step_pre_hook(steps.before).remove)
        stack.callback(register_optimizer_step_post_hook(steps.after).remove)
        yield


class _Steps:
    """Reads the gradients of every optimizer step on this thread; steps on other threads are another training."""

    def __init__(
        self, found: LoopRecord, parameters: Mapping[str, nn.Parameter], refused: frozenset[int], *, undo: bool
    ) -> None:
        self._found, self._refused, self._undo, self._thread = found, refused, undo, get_ident()
        self._names = {id(p): name for name, p in parameters.items()}
        self._times: dict[int, int] = {}
        self._weights: list[tuple[Tensor, Tensor]] = []

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Read the gradients, or have them read once a closure has made them, as Lightning's."""
        if get_ident() != self._thread:
            return None
        every = [p for group in optimizer.param_groups for p in group["params"]]
        if any(id(p) in self._refused for p in every):
            raise_used_itself()
        own = [p for p in every if id(p) in self._names]
        if self._undo:
            self._weights = [(p, p.detach().clone()) for p in own]
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            self._read(optimizer, own)
            return None

        def then_read() -> Any:
            loss = closure()
            self._read(optimizer, own)
            return loss

        return ((args[0], then_read, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": then_read})

    def after(self, *_: object) -> None:
        """Undo the step, where it is to have no effect; the next step reads what was added since."""
        if get_ident() != self._thread:
            return
        with torch.no_grad():
            for p, weights in self._weights:
                p.copy_(weights)
                if p.grad is not None:
                    p.grad.zero_()
        self._weights = []

    def _read(self, optimizer: Optimizer, own: Sequence[Tensor]) -> None:
        self._found.steps_of_others += not own
        if not any(p.grad is not None for p in own):
            return
        scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer divides by the loss scale itself
        factor = 1.0 if scale is None else 1.0 / float(scale)
        self._found.stepped.append({self._names[id(p)]: in_float64(p.grad, factor) for p in own})
        self._times[id(optimizer)] = self._times.get(id(optimizer), 0) + 1
        self._found.most_steps = max(self._times.values())


@contextmanager
def _record_clipping(found: LoopRecord, parameters: Mapping[str, nn.Parameter], *, undo: bool) -> Iterator[None]:
    """Record calls of torch's two clipping functions, in every module that has imported them; `undo` their effect."""
    names = {id(p): name for name, p in parameters.items()}
    times: dict[tuple[str, str], int] = {}

    def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
        def clip(given: Any, *args: Any, **kwargs: Any) -> Any:
            every = [given] if isinstance(given, Tensor) else list(given)
            own = [(names[id(p)], p.grad) for p in every if id(p) in names and p.grad is not None]
            for name, gradient in own:
                key = (function.__name__, name)
                times[key] = times.get(key, 0) + 1
                if times[key] > found.clipped:
                    found.clipped, found.clipped_by = times[key], function.__name__
                found.clipped_sizes.setdefault(name, float(gradient.detach().double().norm()))
            kept = [(gradient, gradient.detach().clone()) for _, gradient in own] if undo else []
            result = function(every, *args, **kwargs)
            with torch.no_grad():
                for gradient, value in kept:
                    gradient.copy_(value)
            return result

        return clip

    with ExitStack() as stack:
        for name in _CLIPPING:
            function = getattr(nn.utils, name)
            replacement = recorded(function)
            for module in list(sys.modules.values()):
                if getattr(module, "__dict__", {}).get(name) is function:
                    setattr(module, name, replacement)
                    stack.callback(setattr, module, name, function)
        yield
