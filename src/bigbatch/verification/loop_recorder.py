"""Records what a loop that somebody else wrote does in one window: backwards, clipping, and what it steps with."""

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from bigbatch.verification.model_copy import ModelCopy, raise_used_itself
from bigbatch.verification.tolerance import add, read_gradients

TrainWindow = Callable[[Any, list[Any]], Any]
Stepped = dict[str, Tensor]


@dataclass
class LoopRecord:
    """What a loop did in one window."""

    stepped: list[Stepped] = field(default_factory=list)  # the gradients at each step of an optimizer
    left: Stepped = field(default_factory=dict)  # in .grad after the window
    most_steps: int = 0  # of one optimizer
    backwards: int = 0  # that reached one parameter
    clipped: int = 0  # how often one parameter was: parts of a model may be clipped one by one
    clipped_by: str = ""  # the function of torch
    autocast: torch.dtype | None = None  # the loop's own, inside the model
    loss: float = math.nan  # what it returned

    @property
    def gradients(self) -> Stepped:
        """What it stepped with first; without a step what it left."""
        first = {name: each[name] for each in reversed(self.stepped) for name in each} if self.stepped else self.left
        return {name: first.get(name, torch.zeros_like(left)) for name, left in self.left.items()}

    @property
    def over_all_steps(self) -> Stepped:
        """The gradients of all steps and what was left after the last, added up."""
        return add([self.left, *self.stepped])


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
    recorder = _Recorder(model, refused, undo_clipping=undo_clipping, undo_steps=undo_steps)
    with ExitStack() as stack:
        recorder.install(stack)
        returned = train_window(model.model, list(micro_batches))
    found = recorder.found
    found.left = read_gradients(model.parameters)
    if isinstance(returned, int | float) or (isinstance(returned, Tensor) and returned.numel() == 1):
        found.loss = float(returned.detach() if isinstance(returned, Tensor) else returned)
    return found


class _Recorder:
    """The hooks that a window runs under; steps on other threads are another training."""

    def __init__(self, model: ModelCopy, refused: frozenset[int], *, undo_clipping: bool, undo_steps: bool) -> None:
        self.found = LoopRecord()
        self._model, self._refused, self._thread = model, refused, get_ident()
        self._undo_clipping, self._undo_steps = undo_clipping, undo_steps
        self._names = {id(p): name for name, p in model.parameters.items()}
        self._times: dict[Any, int] = {}  # of backward and of clipping by parameter, of steps by optimizer
        self._weights: list[tuple[Tensor, Tensor]] = []
        self._nodes: list[Node] = []  # which live while held

    def install(self, stack: ExitStack) -> None:
        """Register all hooks, until the stack is closed."""
        for each in self._model.models:
            each.register_forward_pre_hook(self._read_autocast, prepend=True)
        for name, p in self._model.parameters.items():  # the hooks are the graph's, since a parameter's change paths
            self._nodes.append(get_gradient_edge(p).node)
            stack.callback(self._nodes[-1].register_hook(partial(self._count_backward, name)).remove)
        stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            function = getattr(nn.utils, name)
            replacement = self._recording(function)
            for module in list(sys.modules.values()):  # each that has imported it by name
                if getattr(module, "__dict__", {}).get(name) is function:
                    setattr(module, name, replacement)
                    stack.callback(setattr, module, name, function)

    def _once_more(self, key: Any) -> int:
        self._times[key] = self._times.get(key, 0) + 1
        return self._times[key]

    def _read_autocast(self, *_: object) -> None:
        device = next((p.device.type for p in self._model.parameters.values()), "cpu")
        if torch.is_autocast_enabled(device):
            self.found.autocast = torch.get_autocast_dtype(device)

    def _count_backward(self, name: str, *_: object) -> None:
        self.found.backwards = max(self.found.backwards, self._once_more(name))

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Read the gradients, or have them read once a closure has made them, as Lightning's."""
        if get_ident() != self._thread:
            return None
        every = [p for group in optimizer.param_groups for p in group["params"]]
        if any(id(p) in self._refused for p in every):
            raise_used_itself()
        own = [p for p in every if id(p) in self._names]
        if self._undo_steps:
            self._weights = [(p, p.detach().clone()) for p in own]
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            self._read_step(optimizer, own)
            return None

        def then_read() -> Any:
            loss = closure()
            self._read_step(optimizer, own)
            return loss

        return ((args[0], then_read, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": then_read})

    def _after_step(self, *_: object) -> None:
        """Undo the step, where it is to have no effect; the next step reads what was added since."""
        if get_ident() != self._thread:
            return
        with torch.no_grad():
            for p, weights in self._weights:
                p.copy_(weights)
                if p.grad is not None:
                    p.grad.zero_()
        self._weights = []

    def _read_step(self, optimizer: Optimizer, own: Sequence[Any]) -> None:
        if not any(p.grad is not None for p in own):
            return
        scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer divides by the loss scale itself
        factor = 1.0 if scale is None else 1.0 / float(scale)
        self.found.stepped.append(read_gradients({self._names[id(p)]: p for p in own}, factor))
        self.found.most_steps = max(self.found.most_steps, self._once_more(optimizer))

    def _recording(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return one of torch's clipping functions that is recorded, and has no effect where it is to have none."""

        def clip(given: Any, *args: Any, **kwargs: Any) -> Any:
            every = [given] if isinstance(given, Tensor) else list(given)
            own = [(self._names[id(p)], p.grad) for p in every if id(p) in self._names and p.grad is not None]
            for name, _ in own:
                if self._once_more((function, name)) > self.found.clipped:
                    self.found.clipped, self.found.clipped_by = self.found.clipped + 1, function.__name__
            kept = [(gradient, gradient.detach().clone()) for _, gradient in own] if self._undo_clipping else []
            result = function(every, *args, **kwargs)
            with torch.no_grad():
                for gradient, value in kept:
                    gradient.copy_(value)
            return result

        return clip
