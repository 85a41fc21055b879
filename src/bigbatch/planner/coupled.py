"""Plan models whose samples are coupled inside: their micro-batches run in lock-step, and activations wait."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bigbatch.memory.budget import host_available, human
from bigbatch.memory.meter import saved_bytes
from bigbatch.planner.plan_report import Plan
from bigbatch.state.patch import Swap, swapped
from bigbatch.state.scope import times_asked
from bigbatch.window.awake_norms import batch_norms, is_awake

_MOST = 1.25  # times what autograd saves of one micro-batch: lock-step lets no more of the others wait at norms


def _without_statistics(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let a single sample leave running statistics alone: of its variance there is no estimate."""

    def batch_norm(
        x: Tensor, mean: Any, var: Any, weight: Any = None, bias: Any = None, *args: Any, **kw: Any
    ) -> Tensor:
        if (args[:1] or [kw.get("training")])[0] and x.numel() == x.shape[1]:
            mean = var = None
        return plain(x, mean, var, weight, bias, *args, **kw)

    return batch_norm


# BatchNorm takes a single sample, as beside others.
_single = Swap(F, "_verify_batch_size", lambda _: lambda _: None), Swap(F, "batch_norm", _without_statistics)


class Coupling:
    """Whether samples are coupled between a model's layers, by BatchNorm or `across`, and what waits because of it."""

    def __init__(self, models: Sequence[nn.Module], samples: Sequence[Tensor], batch_size: int) -> None:
        """Look up the BatchNorm layers that normalize by the batch."""
        self._models, self._batch_size = models, batch_size
        self._samples = sum(each.nbytes for each in samples)
        self.has_host = True  # whether there is a host's memory beside the device's, and samples are copied
        self.norms = [name for name, module in batch_norms(models) if is_awake(module)]
        self.inside = bool(self.norms)  # between layers
        self.asked = False  # by `across`, between layers or after the last one, as in a contrastive loss
        self.saved: dict[int, int] = {}  # bytes that autograd saves of a micro-batch, by its size

    def is_new(self, size: int) -> bool:
        """Whether what autograd saves is to be noted: by hooks, behind which no reader looks for counts."""
        return self.inside and size not in self.saved

    def call(self, size: int, run: Callable[[], Any], given: Sequence[Tensor], device: torch.device) -> Any:
        """Run a forward, and note where it asks for other samples and, once, what autograd saves beside `given`."""
        asked, before, returned = list[int](), times_asked(), list[Any]()

        def end(*_: Any) -> None:
            self.inside = self.inside or times_asked() != asked.pop()

        with ExitStack() as stack:
            for model in self._models:
                stack.callback(model.register_forward_pre_hook(lambda *_: asked.append(times_asked())).remove)
                stack.callback(model.register_forward_hook(end, always_call=True).remove)
            stack.enter_context(swapped(*_single))
            if self.is_new(size):
                self.saved[size] = saved_bytes(lambda: returned.append(run()), self._models, device, given)
            else:
                returned.append(run())
        self.asked = self.asked or times_asked() != before
        return returned.pop()

    def beside(self, size: int) -> int | None:
        """Return about what waits on the device beside a micro-batch, where activations are offloaded to the host.

        The samples of the others; and of their activations what lock-step lets stay at norms, or all at `across`.
        """
        others = self._batch_size - size
        if not self.has_host or size not in self.saved or not others:
            return None
        waiting = min(others, _MOST * size) if self.norms else others
        return int(self.saved[size] / size * waiting + self._samples * others / self._batch_size)

    def notes(self, found: Plan) -> tuple[str, ...]:
        """Say where activations wait while micro-batches run in lock-step, and whether there is room."""
        if not self.inside or found.size is None:
            return ()
        said = "This model asks for other samples between its layers (across):"
        if self.norms:
            said = f"BatchNorm ('{self.norms[0]}'{' and others' * (len(self.norms) > 1)}) couples the samples:"
        if found.steps == 1 or found.size not in self.saved:
            what = "BigStep takes all at once where that fits, and otherwise runs micro-batches in lock-step"
            return (f"{said} {what}; an Accumulator refuses it.",)
        there, beside = host_available(), self.beside(found.size)
        whole = int(self.saved[found.size] / found.size * self._batch_size) + (self._samples if self.has_host else 0)
        room = f"of {human(there)} that are free" if whole <= there else "more than is free: a step would be refused"
        said += f" micro-batches run in lock-step, and the activations of the whole batch, about {human(whole)},"
        if beside is None:
            return (f"{said} wait in this process's memory, beside these peaks, {room}.",)
        fits = next(row.fits for row in found.rows if row.size == found.size)
        peaks = (
            f"Peaks are of a micro-batch alone: beside one of {found.size:,} wait about {human(beside)} on the device, "
            f"samples and activations of the others; {human((found.peak_bytes or 0) + beside)} in all"
            f"{'' if fits else ', more than there is to use: take a smaller batch'}."
        )
        return f"{said} wait in host memory where the device has no room, {room}.", peaks
