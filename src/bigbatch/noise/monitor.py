"""Measure how noisy gradients are while training goes on: two norms of a window that runs anyway, now and then."""

from collections import Counter, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bigbatch import arguments
from bigbatch.accumulator import Accumulator
from bigbatch.big_step import BigStep
from bigbatch.errors import ConfigurationError
from bigbatch.loss.count import LOW_PRECISION, Count
from bigbatch.noise.noise_report import NoiseReport, Norms, Reason, make_report
from bigbatch.window.window import Window

if TYPE_CHECKING:
    from typing_extensions import Self  # Python 3.10 has none of its own


class GradientNoise:
    """Tell which batch size is worth having, from the micro-batches that run anyway.

        accumulator = Accumulator(model, optimizer, steps=8)
        noise = GradientNoise(accumulator)                    # or GradientNoise(step), of a BigStep
        for inputs, labels in accumulator.over(loader):       # train as before
            accumulator.backward(criterion(model(inputs), labels))
        print(noise.report())

    After a window's first micro-batch `.grad` holds its gradient alone, at the end that of all; how much longer the
    first one is tells how much of it is noise. This takes two norms, no copy and no second backward, and waits for the
    device in `report()` alone. It takes each micro-batch for a random part of its batch: shuffle, and do not sort.

    Args:
        training: the `Accumulator` or `BigStep` whose windows are measured.
        every: measure each so-many-th window; 1 tells most, soonest, and costs most.
        last: keep so many measured windows; older ones were of other weights.
    """

    def __init__(self, training: Accumulator | BigStep, *, every: int = 16, last: int = 512) -> None:
        if not isinstance(training, Accumulator | BigStep):
            raise ConfigurationError(
                f"GradientNoise({type(training).__name__}): it measures the windows of an Accumulator or a BigStep.",
                fix="GradientNoise(accumulator)",
            )
        self._every, self._last = arguments.positive("every", every), arguments.positive("last", last)
        self.reset()
        self._end = training.observe(self)

    def report(self) -> NoiseReport:
        """Return what the windows so far tell. This reads numbers from the device, and so waits for it."""
        return make_report(self._read(), self._left_out, self._every)

    def reset(self) -> None:
        """Forget all windows, as after a change of the learning rate or the data."""
        self._seen: deque[tuple[Count, ...]] = deque(maxlen=self._last)
        self._left_out: Counter[Reason] = Counter()
        self._windows, self._looking = 0, False
        self._first: tuple[Count, ...] | None = None  # its norm, the factor of that, and the count

    def stop(self) -> None:
        """Measure no more windows; `report()` still reads those measured."""
        self._end()

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def attends(self) -> bool:
        """Return whether the window that opens is to be measured."""
        if not self._looking:  # else the latest was dropped, and this one takes its place
            self._looking = self._windows % self._every == 0
            self._windows += 1
        self._first = None
        return self._looking

    def first(self, window: Window, start: Count, count: Count) -> None:
        """Measure a window after its first micro-batch."""
        self._first = _norm(window.gradients.parameters), window.starts.residual / start, count

    def whole(self, window: Window) -> None:
        """Measure a window before its step."""
        first, self._first, self._looking = self._first, None, False
        ledger = window.ledger
        totals = ledger.totals or (ledger.total,)
        is_sum = ledger.kind == "sum" or (ledger.totals is None and not ledger.kind)
        reasons: dict[Reason, bool] = {"coupled": ledger.sure, "alone": ledger.micro_batches == 1, "sum": is_sum}
        reasons |= {"several": len(totals) > 1, "resumed": first is None}
        reason = next((why for why, holds in reasons.items() if holds), None)
        if reason is not None:
            self._left_out[reason] += 1
        elif first is not None:
            factor = ledger.correction() * window.starts.residual / window.scale
            self._seen.append((*first, _norm(window.gradients.parameters), factor, totals[0]))

    def _read(self) -> list[Norms]:
        rows = [map(float, row) for row in self._seen]
        return [Norms((s * f) ** 2, things, (g * c) ** 2, total) for s, f, things, g, c, total in rows]


def _norm(parameters: Sequence[Tensor]) -> Count:
    """Return the norm of all gradients, which nothing waits for."""
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for gradient in (p.grad for p in parameters if p.grad is not None):
        dense = gradient.coalesce().values() if gradient.is_sparse else gradient
        kinds.setdefault(gradient.dtype, []).append(dense)
    norms: list[Tensor] = []
    for dtype, gradients in kinds.items():  # two norms are subtracted: in 8 bits nothing would be left
        norms += torch._foreach_norm(gradients, 2, torch.float32 if dtype in LOW_PRECISION else None)  # noqa: SLF001
    if not norms:
        return 0.0
    device = next((norm.device for norm in norms if not norm.is_cpu), norms[0].device)
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]))
    return total
