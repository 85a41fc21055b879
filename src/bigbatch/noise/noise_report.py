"""What the measured noise says of the batch size.

With a batch of B and a noise scale N, going as far takes, beside the least that any batch size could do with
(McCandlish et al. 2018, arXiv 1812.06162):

    1 + N / B   times the updates          1 + B / N   times the samples

At B = N both are 2: a smaller batch saves samples, a larger one updates, and neither saves much of the other. That is
the batch worth having, within an order of magnitude: it holds for plain gradient descent on a bowl of equal curvature.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, TypeAlias

from bigbatch.noise import words
from bigbatch.noise.estimate import LEAST, Estimate, Norms, Part, estimate, part

Verdict: TypeAlias = Literal["nothing", "too few", "too noisy", "smaller", "right", "larger"]
Reason: TypeAlias = Literal["alone", "sum", "several", "coupled", "resumed", "unusable"]

_NEAR = 2.0  # times the batch or less, and the other way round: not worth a change
_TELLING = 10.0  # the high end of an interval to its low one: beyond, not even the order of magnitude is known


@dataclass(frozen=True)
class NoiseReport:
    """The noise scale, and what it says of the batch size; `print(report)` says it in words.

    Sizes are in what the loss was averaged over, as `Update.count`: samples for a classifier, tokens for a language
    model, elements for a plain mean over several outputs.
    """

    verdict: Verdict
    """What is worth having: a "smaller" batch, a "larger" one, or this is about "right". Or why it cannot be told."""
    scale: float | None
    """tr Σ / |G|²: the batch at which noise and signal are equal. None where it cannot be told."""
    interval: tuple[float, float]
    """Where the scale lies, at 95 %; (0, inf) where nothing is known."""
    batch: float | None
    """The batch as it is, on average."""
    micro_batch: float | None
    """A first micro-batch as it is, on average."""
    recommended_batch: int | None
    """The batch worth having, None where it cannot be told. The present one, where that is about right."""
    recommended_steps: int | None
    """So many of the present micro-batches make it."""
    windows: int
    """How many windows were looked at and told something."""
    left_out: Mapping[Reason, int]
    """How many told nothing, and why."""
    correlation: float
    """How many windows are worth one that is independent of the others; the interval allows for it."""
    drift: tuple[float, float] | None
    """The scale in the first and in the second half of the windows, where they contradict each other."""
    every: int
    """Each so-many-th window was looked at."""

    def updates(self, batch: float) -> float | None:
        """How many times the fewest updates would be taken with a batch of this size to get as far."""
        return None if not self.scale else 1 + self.scale / batch

    def samples(self, batch: float) -> float | None:
        """How many times the fewest samples would be taken with a batch of this size to get as far."""
        return None if not self.scale else 1 + batch / self.scale

    def __str__(self) -> str:
        """Say it."""
        return "\n".join(words.sentences(self))


def reported(seen: Sequence[Norms], left_out: Mapping[Reason, int], every: int = 16) -> NoiseReport:
    """Judge what was seen of each `every`-th window."""
    usable = [norms for norms in seen if norms.usable]
    without = dict(left_out)
    if len(usable) < len(seen):
        without["unusable"] = without.get("unusable", 0) + len(seen) - len(usable)
    parts = [part(norms) for norms in usable]
    batch = fmean(norms.total for norms in usable) if usable else None
    micro_batch = fmean(norms.things for norms in usable) if usable else None
    found = estimate(parts) if len(parts) >= LEAST else Estimate(None, 0.0, math.inf, 1.0)
    verdict: Verdict = "nothing" if not parts else "too few" if len(parts) < LEAST else _verdict(found, batch or 0.0)
    wanted = _wanted(found, verdict, batch or 0.0)
    return NoiseReport(
        verdict=verdict,
        scale=found.scale,
        interval=(found.low, found.high),
        batch=batch,
        micro_batch=micro_batch,
        recommended_batch=wanted,
        recommended_steps=max(1, round(wanted / micro_batch)) if wanted and micro_batch else None,
        windows=len(parts),
        left_out=without,
        correlation=found.correlation,
        drift=_drift(parts),
        every=every,
    )


def _verdict(found: Estimate, batch: float) -> Verdict:
    if found.low > batch and (found.scale is None or found.scale > _NEAR * batch):
        return "larger"
    if found.high < batch and found.scale is not None and found.scale < batch / _NEAR:
        return "smaller"
    near = found.scale is not None and batch / _NEAR <= found.scale <= _NEAR * batch
    return "right" if near and found.high <= _TELLING * found.low else "too noisy"


def _wanted(found: Estimate, verdict: Verdict, batch: float) -> int | None:
    if verdict == "right":
        return round(batch)
    if verdict not in {"smaller", "larger"} or not found.scale or found.high > _TELLING * found.low:
        return None
    return max(1, round(found.scale))


def _drift(parts: Sequence[Part]) -> tuple[float, float] | None:
    """Compare the two halves: where their intervals have nothing in common, they are not of one scale."""
    half = len(parts) // 2
    if half < LEAST:
        return None
    before, after = estimate(parts[:half]), estimate(parts[-half:])
    apart = before.high < after.low or after.high < before.low
    return (before.scale, after.scale) if apart and before.scale is not None and after.scale is not None else None
