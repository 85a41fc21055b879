"""A loop that somebody else wrote, watched while it runs one window: what its optimizer stepped with, and how often."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import median
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from bigbatch.verifying.clipping import Clipped, clips
from bigbatch.verifying.gradients import added, wide
from bigbatch.verifying.subject import Standing

_ALIKE = 1.01  # a loss scale is a factor of all gradients, but for rounding
TrainWindow = Callable[[Any, list[Any]], Any]


@dataclass
class Watched:
    """What a loop did in one window."""

    gradients: dict[str, Tensor | None] = field(default_factory=dict)  # at the first step, or left in .grad
    stepped: list[dict[str, Tensor | None]] = field(default_factory=list)  # at each step of an optimizer
    most_steps: int = 0  # of one optimizer
    steps_of_others: int = 0  # of optimizers that have no parameter of the model
    backwards: int = 0  # that came to one parameter
    clipped: Clipped = field(default_factory=Clipped)
    autocast: torch.dtype | None = None  # the loop's own, inside the model
    returned: float = float("nan")

    @property
    def scale_at_clip(self) -> float:
        """By how much gradients were larger when they were clipped than in the step: a loss scale; 1 where it is none.

        It is known where clipping was left out.
        """
        pairs = [(size, self.gradients.get(name)) for name, size in self.clipped.sizes.items()]
        sizes = [(size, float(gradient.norm())) for size, gradient in pairs if gradient is not None]
        ratios = [size / stepped for size, stepped in sizes if math.isfinite(size) and 0 < stepped < math.inf]
        alike = bool(ratios) and max(ratios) <= _ALIKE * min(ratios)
        return median(ratios) if alike and min(ratios) > _ALIKE else 1.0

    @property
    def over_all_steps(self) -> dict[str, Tensor | None]:
        """The gradients of all steps, and what was left after the last, added up."""
        return added([*self.stepped, self.left])

    left: dict[str, Tensor | None] = field(default_factory=dict)  # in .grad after the window


def watched(
    train_window: TrainWindow, standing: Standing, micro_batches: Sequence[Any], *, clipping: bool, stepping: bool
) -> Watched:
    """Run a loop over one window; without `clipping` or `stepping` those have no effect."""
    found = Watched()
    names = {id(p): name for name, p in standing.parameters.items()}
    device = next((p.device.type for p in standing.parameters.values()), "cpu")

    def look(*_: object) -> None:
        if torch.is_autocast_enabled(device):
            found.autocast = torch.get_autocast_dtype(device)

    with ExitStack() as stack:
        for model in standing.models:
            stack.callback(model.register_forward_pre_hook(look, prepend=True).remove)
        stack.enter_context(_backwards(found, standing))
        stack.enter_context(_steps(found, names, undone=not stepping))
        stack.enter_context(clips(found.clipped, standing.parameters, undone=not clipping))
        returned = train_window(standing.model, list(micro_batches))
    found.left = {name: wide(p.grad) for name, p in standing.parameters.items()}
    if not found.stepped:
        found.gradients = found.left
    if isinstance(returned, int | float | Tensor) and not (isinstance(returned, Tensor) and returned.numel() != 1):
        found.returned = float(returned.detach() if isinstance(returned, Tensor) else returned)
    return found


@contextmanager
def _backwards(found: Watched, standing: Standing) -> Iterator[None]:
    """Count how often a gradient comes to a parameter: what then is not there was cleared.

    The graph is listened to, not the parameter: training may take another path where a parameter has a hook.
    """
    times: dict[str, int] = {}

    def counting(name: str) -> Callable[[Any, Any], None]:
        def came(_inputs: Any, _outputs: Any) -> None:
            times[name] = times.get(name, 0) + 1
            found.backwards = max(found.backwards, times[name])

        return came

    nodes = {name: get_gradient_edge(p).node for name, p in standing.parameters.items()}  # which live while held
    handles = [node.register_hook(counting(name)) for name, node in nodes.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _steps(found: Watched, names: dict[int, str], *, undone: bool) -> Iterator[None]:
    """Read the gradients that each optimizer steps with, whichever loop calls it."""
    watch = _Stepping(found, names, undone=undone)
    handles = [register_optimizer_step_pre_hook(watch.before), register_optimizer_step_post_hook(watch.after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        watch.states.put_back()


class _Stepping:
    """Hears of every step of an optimizer; those of other threads are of another training."""

    def __init__(self, found: Watched, names: dict[int, str], *, undone: bool) -> None:
        self.states = _States()
        self._reader, self._names, self._undone, self._thread = _Reader(found, names), names, undone, get_ident()
        self._weights: list[tuple[Tensor, Tensor]] = []

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Read the gradients, or have them read once a closure has made them."""
        if get_ident() != self._thread:
            return None
        self.states.lend(optimizer)
        if self._undone:
            self._weights = [(p, p.detach().clone()) for p in _of_model(optimizer, self._names)]
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            self._reader.read(optimizer)
            return None

        # Lightning runs the last micro-batch inside of the step.
        def then_read() -> Any:
            loss = closure()
            self._reader.read(optimizer)
            return loss

        return ((args[0], then_read, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": then_read})

    def after(self, *_: object) -> None:
        """Take the step back, where it is to have no effect."""
        if get_ident() != self._thread:
            return
        with torch.no_grad():
            for p, weights in self._weights:
                p.copy_(weights)
                if p.grad is not None:  # the next step is to tell what has come since
                    p.grad.zero_()
        self._weights = []


class _States:
    """The states of optimizers that a loop has made elsewhere: each begins a run without one, and gets it back."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Optimizer, Any, list[dict[str, Any]]]] = {}

    def lend(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self._kept:
            groups = [{name: _own(value) for name, value in group.items()} for group in optimizer.param_groups]
            self._kept[id(optimizer)] = (optimizer, optimizer.state, groups)
            optimizer.state = defaultdict(dict)

    def put_back(self) -> None:
        for optimizer, state, groups in self._kept.values():
            optimizer.state = state
            for group, kept in zip(optimizer.param_groups, groups, strict=False):
                group.update(kept)


def _own(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


class _Reader:
    """Notes what optimizers step with."""

    def __init__(self, found: Watched, names: dict[int, str]) -> None:
        self._found, self._names = found, names
        self._times: dict[int, int] = {}

    def read(self, optimizer: Optimizer) -> None:
        """Copy the gradients that it is about to step with."""
        own = _of_model(optimizer, self._names)
        self._found.steps_of_others += not own
        if not any(p.grad is not None for p in own):
            return
        # A fused optimizer divides by the loss scale on its way.
        scale = getattr(optimizer, "grad_scale", None)
        factor = 1.0 if scale is None else 1.0 / float(scale)
        gradients = {self._names[id(p)]: wide(p.grad, factor) for p in own}
        self._found.stepped.append(gradients)
        self._times[id(optimizer)] = self._times.get(id(optimizer), 0) + 1
        self._found.most_steps = max(self._times.values())
        for name, gradient in gradients.items():
            self._found.gradients.setdefault(name, gradient)


def _of_model(optimizer: Optimizer, names: dict[int, str]) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if id(p) in names]
