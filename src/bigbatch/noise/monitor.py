"""Measure how noisy gradients are while training goes on: two norms of a window that runs anyway, now and then."""

import math
from collections import Counter, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch
from torch import Tensor

from bigbatch.accumulator import Accumulator
from bigbatch.big_step import BigStep
from bigbatch.errors import ConfigurationError, StateError
from bigbatch.loss.count import LOW_PRECISION, Count
from bigbatch.noise.estimate import Norms
from bigbatch.noise.noise_report import NoiseReport, Reason, reported
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

    After a window's first micro-batch `.grad` holds its gradient alone, at the end that of all. How much longer the
    first one is tells how much of it is noise. Two norms and no copy, no second backward; nothing waits for the device
    until `report()` reads what is there.

    It takes each micro-batch for a random part of its batch: shuffle, and do not sort samples within a batch.

    Args:
        training: the `Accumulator` or `BigStep` whose windows are looked at.
        every: look at each so-many-th window; 1 tells most, soonest, and costs most.
        last: how many of the windows looked at are kept; older ones, of other weights, are forgotten.
    """

    def __init__(self, training: Accumulator | BigStep, *, every: int = 16, last: int = 512) -> None:
        """Begin to look."""
        trains = _trains(training)
        self._every, self._last = _positive("every", every), _positive("last", last)
        self.reset()
        self._end = trains.observe(self)

    def report(self) -> NoiseReport:
        """Say what the windows so far tell. This reads numbers from the device, and so waits for it."""
        return reported(self._read(), self._left_out, self._every)

    def reset(self) -> None:
        """Forget all windows, as after a change of the learning rate or the data."""
        self._seen: deque[_Sight] = deque(maxlen=self._last)
        self._left_out: Counter[Reason] = Counter()
        self._windows = 0
        self._looking = False
        self._first: _First | None = None

    def stop(self) -> None:
        """Look at no more windows; what was seen can still be read."""
        self._end()

    def __enter__(self) -> "Self":
        """Look until the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Look at no more windows."""
        self.stop()

    def attends(self) -> bool:
        """Hear that a window opens; return whether it is one to look at."""
        if not self._looking:  # or the latest was dropped, and this one is looked at in its place
            self._looking = self._windows % self._every == 0
            self._windows += 1
        self._first = None
        return self._looking

    def first(self, window: Window, start: Count, count: Count) -> None:
        """See a window after its first micro-batch."""
        self._first = _First(_norm(window.gradients.parameters), window.residual / start, count)

    def whole(self, window: Window) -> None:
        """See a window before its step."""
        first, self._first, self._looking = self._first, None, False
        ledger = window.ledger
        totals = ledger.totals or (ledger.total,)
        if ledger.sure:
            self._left_out["coupled"] += 1
        elif ledger.micro_batches == 1:
            self._left_out["alone"] += 1
        elif ledger.kind == "sum" or (ledger.totals is None and not ledger.kind):
            self._left_out["sum"] += 1
        elif len(totals) > 1:
            self._left_out["several"] += 1
        elif first is None:
            self._left_out["resumed"] += 1
        else:
            norm = _norm(window.gradients.parameters)
            self._seen.append(_Sight(first, norm, ledger.correction() * window.residual / window.scale, totals[0]))

    def state_dict(self, *_: object) -> NoReturn:
        """Raise: what was seen is not kept over a restart."""
        raise StateError("GradientNoise has no state_dict() any more: after a restart it begins anew. Leave it out.")

    load_state_dict = state_dict

    def _read(self) -> list[Norms]:
        """Bring what was seen to the host, in one piece from each device."""
        numbers = _on_host([number for sight in self._seen for number in sight.numbers()])
        width = len(_Sight._fields) + len(_First._fields) - 1
        rows = [numbers[at : at + width] for at in range(0, len(numbers), width)]
        return [Norms((s * f) ** 2, things, (g * c) ** 2, total) for s, f, things, g, c, total in rows]


class _First(NamedTuple):
    """What was seen of a window's first micro-batch."""

    norm: Count
    factor: Count  # what the norm is to be multiplied with
    things: Count  # what the loss was averaged over


class _Sight(NamedTuple):
    """What was seen of a window."""

    first: _First
    norm: Count
    factor: Count
    total: Count

    def numbers(self) -> tuple[Count, ...]:
        return (*self.first, *self[1:])


def _norm(parameters: Sequence[Tensor]) -> Count:
    """Return the norm of all gradients, changing none: a number on the host, or a 0-d tensor that is not waited for."""
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for p in parameters:
        gradient = p.grad
        if gradient is not None:
            kinds.setdefault(gradient.dtype, []).append(
                gradient.coalesce().values() if gradient.is_sparse else gradient
            )
    norms: list[Tensor] = []
    for dtype, gradients in kinds.items():
        # A norm in 8 bits would be useless: it is to be subtracted from another.
        norms += torch._foreach_norm(gradients, 2, torch.float32 if dtype in LOW_PRECISION else None)  # noqa: SLF001
    if all(norm.is_cpu for norm in norms):
        return math.hypot(*[norm.item() for norm in norms])
    device = next(norm.device for norm in norms if not norm.is_cpu)
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]))
    return total


def _on_host(numbers: Sequence[Count]) -> list[float]:
    """Read numbers, some of them on devices, with one transfer from each."""
    found = [0.0 if isinstance(number, Tensor) else float(number) for number in numbers]
    places: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for at, number in enumerate(numbers):
        if isinstance(number, Tensor):
            places.setdefault((number.device, number.dtype), []).append(at)
    for there in places.values():
        together = torch.stack([torch.as_tensor(numbers[at]).reshape(()) for at in there])
        for at, number in zip(there, together.tolist(), strict=True):
            found[at] = number
    return found


def _trains(training: object) -> Accumulator | BigStep:
    if isinstance(training, Accumulator | BigStep):
        return training
    msg = (
        f"GradientNoise({type(training).__name__}): it looks at the windows of an Accumulator or a BigStep.\n"
        "Pass the one that trains:  GradientNoise(accumulator)"
    )
    raise ConfigurationError(msg)


def _positive(name: str, number: object) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        msg = f"{name} must be a positive integer; found {number!r}"
        raise ConfigurationError(msg)
    return number
