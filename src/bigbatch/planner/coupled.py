"""Plan models whose samples are coupled inside: their micro-batches run in lock-step, and activations wait."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bigbatch.memory.budget import human
from bigbatch.memory.host import host_available
from bigbatch.planner.plan_report import Plan
from bigbatch.state.patch import Swap, swapped
from bigbatch.state.scope import times_asked
from bigbatch.window.awake_norms import batch_norms, is_awake

_MOST = 1.25  # times what autograd saves of one micro-batch: lock-step lets no more of the others wait at norms


class Coupling:
    """Whether the samples of a model are coupled between its layers: by BatchNorm, or by `across`."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        """Look up the BatchNorm layers that normalize by the batch."""
        self._models = models
        self.norms = [name for name, module in batch_norms(models) if is_awake(module)]
        self.inside = bool(self.norms)  # between layers
        self.asked = False  # by `across`, between layers or after the last one, as in a contrastive loss

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, note where a forward asks for other samples. BatchNorm takes a single one, as beside others."""
        asked, before = list[int](), times_asked()

        def begin(*_: Any) -> None:
            asked.append(times_asked())

        def end(*_: Any) -> None:
            self.inside = self.inside or times_asked() != asked.pop()

        with ExitStack() as stack:
            for model in self._models:
                stack.callback(model.register_forward_pre_hook(begin).remove)
                stack.callback(model.register_forward_hook(end, always_call=True).remove)
            stack.enter_context(single_samples())
            yield
        self.asked = self.asked or times_asked() != before


@contextmanager
def single_samples() -> Iterator[None]:
    """Let BatchNorm take a single sample, on this thread."""
    before = getattr(_here, "single", False)
    try:
        _here.single = True
        with swapped(_swap):
            yield
    finally:
        _here.single = before


def _taking_one(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Take the place of `F.batch_norm`."""

    def batch_norm(  # noqa: PLR0917 - torch's own signature
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,  # noqa: FBT001, FBT002
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training or x.numel() != x.shape[1] or not getattr(_here, "single", False):
            return plain(x, running_mean, running_var, weight, bias, training, momentum, eps)
        # What F.batch_norm comes to when it does not refuse a single value.
        return torch.batch_norm(x, weight, bias, None, None, True, momentum, eps, torch.backends.cudnn.enabled)  # noqa: FBT003

    return batch_norm


_here = threading.local()
_swap = Swap(F, "batch_norm", _taking_one)


@dataclass(frozen=True)
class Waiting:
    """What waits of a whole batch while its micro-batches run in lock-step, in bytes."""

    of_a_sample: float  # that autograd saves
    samples: int  # the batch, where it is copied to a device
    batch_size: int
    at_norms: bool

    @property
    def whole(self) -> int:
        """The activations of the whole batch, which wait in host memory where the device has no room."""
        return int(self.of_a_sample * self.batch_size) + self.samples

    def beside(self, size: int) -> int:
        """Return about what waits on the device beside a micro-batch, where activations are offloaded to the host.

        The samples of the others; and of their activations what lock-step lets stay at norms, or all at `across`.
        """
        others = max(0, self.batch_size - size)
        waiting = min(others, _MOST * size) if self.at_norms else others
        return int(self.of_a_sample * waiting + self.samples * others / self.batch_size)


def coupled_notes(coupling: Coupling, found: Plan, waiting: Waiting | None) -> tuple[str, ...]:
    """Say where activations wait while micro-batches run in lock-step, and whether there is room."""
    if not coupling.inside or found.size is None:
        return ()
    said = "This model asks for other samples between its layers (across):"
    if coupling.norms:
        more = " and others" if len(coupling.norms) > 1 else ""
        said = f"BatchNorm ('{coupling.norms[0]}'{more}) couples the samples:"
    if found.steps == 1 or waiting is None:
        said += " BigStep takes all at once where that fits, and otherwise runs micro-batches in lock-step;"
        return (f"{said} an Accumulator refuses it.",)
    there = host_available()
    room = f"of {human(there)} that are free"
    if waiting.whole > there:
        room = "more than is free: a step would be refused"
    said += f" micro-batches run in lock-step, and the activations of the whole batch, about {human(waiting.whole)},"
    chosen = next(row for row in found.rows if row.size == found.size)
    if chosen.waiting_bytes is None:
        return (f"{said} wait in this process's memory, beside these peaks, {room}.",)
    beside = (
        f"Peaks are of a micro-batch alone: beside one of {found.size:,} wait about {human(chosen.waiting_bytes)} on "
        f"the device, samples and activations of the others; {human((found.peak_bytes or 0) + chosen.waiting_bytes)} "
        f"in all{'' if chosen.fits else ', more than there is to use: take a smaller batch'}."
    )
    return f"{said} wait in host memory where the device has no room, {room}.", beside
