"""A loop that somebody else wrote, watched while it runs one window: what its optimizer stepped with, and how often."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from bigbatch.verifying.gradients import added, wide
from bigbatch.verifying.subject import Standing

TrainWindow = Callable[[Any, list[Any]], Any]


@dataclass
class Watched:
    """What a loop did in one window."""

    gradients: dict[str, Tensor | None] = field(default_factory=dict)  # at the first step, or left in .grad
    stepped: list[dict[str, Tensor | None]] = field(default_factory=list)  # at each step of an optimizer
    most_steps: int = 0  # of one optimizer
    zeroed: int = 0  # times that gradients were cleared which no optimizer had stepped with
    clipped: int = 0
    autocast: torch.dtype | None = None  # the loop's own, inside the model
    returned: float = float("nan")

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
        stack.enter_context(_steps(found, names, undone=not stepping))
        stack.enter_context(_clearings(found, names))
        stack.enter_context(_clips(found, undone=not clipping))
        returned = train_window(standing.model, list(micro_batches))
    found.left = {name: wide(p.grad) for name, p in standing.parameters.items()}
    if not found.stepped:
        found.gradients = found.left
    if isinstance(returned, int | float | Tensor) and not (isinstance(returned, Tensor) and returned.numel() != 1):
        found.returned = float(returned.detach() if isinstance(returned, Tensor) else returned)
    return found


@contextmanager
def _steps(found: Watched, names: dict[int, str], *, undone: bool) -> Iterator[None]:
    """Read the gradients that each optimizer steps with, whichever loop calls it."""
    reader = _Reader(found, names)
    before: list[tuple[Tensor, Tensor]] = []

    def reading(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if undone:
            before[:] = [(p, p.detach().clone()) for p in _of_model(optimizer, names)]
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            reader.read(optimizer)
            return None

        # Lightning runs the last micro-batch inside of the step.
        def then_read() -> Any:
            loss = closure()
            reader.read(optimizer)
            return loss

        return ((args[0], then_read, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": then_read})

    def undoing(*_: object) -> None:
        with torch.no_grad():
            for p, weights in before:
                p.copy_(weights)
        before.clear()

    handles = [register_optimizer_step_pre_hook(reading), register_optimizer_step_post_hook(undoing)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Reader:
    """Notes what optimizers step with."""

    def __init__(self, found: Watched, names: dict[int, str]) -> None:
        self._found, self._names = found, names
        self._times: dict[int, int] = {}

    def read(self, optimizer: Optimizer) -> None:
        """Copy the gradients that it is about to step with."""
        own = _of_model(optimizer, self._names)
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


@contextmanager
def _clearings(found: Watched, names: dict[int, str]) -> Iterator[None]:
    """Notice gradients that are cleared before an optimizer has stepped with them."""
    optimizers_way, modules_way = Optimizer.zero_grad, nn.Module.zero_grad

    def note(parameters: Iterator[Tensor]) -> None:
        lost = any(id(p) in names and p.grad is not None and bool(p.grad.any()) for p in parameters)
        found.zeroed += lost and not found.stepped

    def by_optimizer(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        note(p for group in self.param_groups for p in group["params"])
        optimizers_way(self, *args, **kwargs)

    def by_module(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        note(iter(self.parameters()))
        modules_way(self, *args, **kwargs)

    with _instead(Optimizer, "zero_grad", by_optimizer), _instead(nn.Module, "zero_grad", by_module):
        yield


@contextmanager
def _clips(found: Watched, *, undone: bool) -> Iterator[None]:
    """Notice clipping by norm, and leave it out where the gradient before it is wanted."""
    name = "_clip_grads_with_norm_"
    inner = getattr(clip_grad, name, None)
    if inner is None:  # another torch: what is clipped is then seen as it is
        yield
        return

    def clip(*args: Any, **kwargs: Any) -> None:
        found.clipped += 1
        if not undone:
            inner(*args, **kwargs)

    with _instead(clip_grad, name, clip):
        yield


@contextmanager
def _instead(holder: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    own = getattr(holder, name)
    setattr(holder, name, function)
    try:
        yield
    finally:
        setattr(holder, name, own)
