"""Records what a loop that somebody else wrote does in one window: backwards, clipping, and what it steps with."""

import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from bigbatch.verification.model_copy import ModelCopy, raise_used_itself
from bigbatch.verification.tolerance import add, read_gradients

TrainWindow = Callable[[Any, list[Any]], Any]


class LoopRecord:
    """What a loop does in one window, where steps have no effect; an optimizer of the model `under_test` is refused."""

    def __init__(self, model: ModelCopy, under_test: ModelCopy, *, undo_clipping: bool) -> None:
        """Have seen nothing yet."""
        self.stepped: list[dict[str, Tensor]] = []  # the gradients at each step of an optimizer
        self.left: dict[str, Tensor] = {}  # in .grad after the window
        self.most_steps = 0  # of one optimizer
        self.clipped = 0  # how often one parameter was: parts of a model may be clipped one by one
        self.clipped_by = ""  # the function of torch
        self.autocast: torch.dtype | None = None  # the loop's own, inside the model
        self.loss = math.nan  # what it returned
        self._model, self._undo_clipping = model, undo_clipping
        self._refused = {id(p) for p in under_test.all_parameters}
        self._names = {id(p): name for name, p in model.parameters.items()}
        self._times = Counter[Any]()  # of clipping by parameter, of steps by optimizer
        self._weights: list[tuple[Tensor, Tensor]] = []

    @property
    def gradients(self) -> dict[str, Tensor]:
        """What it stepped with first; without a step what it left."""
        first = {name: each[name] for each in reversed(self.stepped or [self.left]) for name in each}
        return {name: first.get(name, torch.zeros_like(left)) for name, left in self.left.items()}

    @property
    def over_all_steps(self) -> dict[str, Tensor]:
        """The gradients of all steps and what was left after the last, added up."""
        return add([self.left, *self.stepped])

    def run(self, train_window: TrainWindow, micro_batches: list[Any]) -> None:
        """Run a loop over one window, under hooks."""
        with ExitStack() as stack:
            for each in self._model.models:
                each.register_forward_pre_hook(self._read_autocast, prepend=True)
            stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
            for function in (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_):
                name, replacement = function.__name__, partial(self._clip, function)
                for module in list(sys.modules.values()):  # each that has imported it by name
                    if getattr(module, "__dict__", {}).get(name) is function:
                        setattr(module, name, replacement)
                        stack.callback(setattr, module, name, function)
            returned = train_window(self._model.model, micro_batches)
        self.left = read_gradients(self._model.parameters)
        if isinstance(returned, int | float) or (isinstance(returned, Tensor) and returned.numel() == 1):
            self.loss = float(returned.detach() if isinstance(returned, Tensor) else returned)

    def _read_autocast(self, *_: object) -> None:
        if torch.is_autocast_enabled(self._model.device.type):
            self.autocast = torch.get_autocast_dtype(self._model.device.type)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Read the gradients, or have them read once a closure has made them, as Lightning's."""
        every = [p for group in optimizer.param_groups for p in group["params"]]
        if any(id(p) in self._refused for p in every):
            raise_used_itself()
        own = [p for p in every if id(p) in self._names]
        if not own:
            return None
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
        """Undo the step; the next one reads what was added since."""
        with torch.no_grad():
            for p, weights in self._weights:
                p.copy_(weights)
                if p.grad is not None:
                    p.grad.zero_()
        self._weights = []

    def _read_step(self, optimizer: Optimizer, own: Sequence[Any]) -> None:
        if any(p.grad is not None for p in own):
            scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer divides by the loss scale itself
            factor = 1.0 if scale is None else 1.0 / float(scale)
            self.stepped.append(read_gradients({self._names[id(p)]: p for p in own}, factor))
            self._times[optimizer] += 1
            self.most_steps = max(self.most_steps, self._times[optimizer])

    def _clip(self, function: Callable[..., Any], given: Any, *args: Any, **kwargs: Any) -> Any:
        """Call one of torch's clipping functions; it has no effect where it is to have none."""
        every = [given] if isinstance(given, Tensor) else list(given)
        own: list[Any] = [p for p in every if id(p) in self._names and p.grad is not None]
        for p in own:
            self._times[function, id(p)] += 1
            if self._times[function, id(p)] > self.clipped:
                self.clipped, self.clipped_by = self.clipped + 1, function.__name__
        kept = [(p.grad, p.grad.detach().clone()) for p in own] if self._undo_clipping else []
        result = function(every, *args, **kwargs)
        with torch.no_grad():
            for gradient, value in kept:
                gradient.copy_(value)
        return result
