"""From the norms of gradients to the noise scale and its interval, and to what they say of the batch size.

A gradient over d independent things is the true gradient G and noise whose variance falls with d, so that

    E|g|² = |G|² + tr Σ / d

The first micro-batch of a window (d of D things, gradient s) and the whole window (D things, gradient g) give two such
equations. Their solution is unbiased, whatever the sizes of the other micro-batches, since the big batch weighs each by
its count.

    tr Σ = (|s|² − |g|²) / (1/d − 1/D)          |G|² = (D|g|² − d|s|²) / (D − d)          noise scale = tr Σ / |G|²

A window says little where d is nearly D, so each has the weight (1 − d/D)². Numerators and denominators are averaged
apart: |G|² comes out near zero now and then, which would spoil a mean of ratios.

With a batch of B and a noise scale N, reaching the same loss takes, compared with the least over all batch sizes,

    1 + N / B   times the updates          1 + B / N   times the samples

At B = N both are 2. This is the batch worth having, within an order of magnitude: the model is plain gradient descent
on a quadratic loss of equal curvature. (Both from McCandlish et al. 2018, arXiv 1812.06162.)
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import Literal, NamedTuple, TypeAlias

Verdict: TypeAlias = Literal["nothing", "too few", "too noisy", "smaller", "right", "larger"]
Reason: TypeAlias = Literal["alone", "sum", "several", "coupled", "resumed", "unusable"]

CONFIDENCE = 0.95
LEAST = 16  # windows; an interval of fewer would promise too much
_NEAR = 2.0  # a batch within this factor of the scale is about right
_TELLING = 10.0  # beyond this ratio of the interval's ends not even the order of magnitude is known
_FEW = 0.1  # this share of windows may be left out without a sentence, as at the end of each epoch
_REASONS: dict[Reason, str] = {
    "alone": "one micro-batch per window, with no other to compare. Use smaller micro-batches, and more of them",
    "sum": "the loss is a sum over an unknown number of samples. Use: accumulator.backward(mean, count=n)",
    "several": "the loss has several counts, and each term has its own noise",
    "coupled": "micro-batches ran in lock-step, where no micro-batch has a gradient of its own",
    "resumed": "the window was resumed from a checkpoint after its first micro-batch",
    "unusable": "a gradient had an inf or NaN, or the first micro-batch counted nothing",
}
_ADVICE: dict[Verdict, str] = {
    "nothing": "The batch size cannot be judged: no measured window told anything.",
    "too few": "Too early to tell: {windows} of {least} windows that are needed. {more}",
    "too noisy": "Too noisy to tell: {four_times} windows would halve the interval. {more}",
    "right": "The batch is about right: half or twice of it would save few updates or samples.",
    "larger": "A larger batch is worth having: {worth}. See scale_lr for the learning rate.\n"
    "It saves updates. On one device it saves time only where updates are slow.",
    "smaller": "The batch is larger than useful: {worth} would do. See scale_lr for the learning rate.",
}
_LIMITS = "This is an order of magnitude: curvature, momentum and Adam's scaling are left out."


class Norms(NamedTuple):
    """What was measured of one window."""

    small: float  # |s|², of the first micro-batch
    things: float  # d, what it was averaged over
    large: float  # |g|², of the whole window
    total: float  # D

    @property
    def usable(self) -> bool:
        """Whether the window tells anything: its numbers are finite and the micro-batch is not all of it."""
        return all(map(math.isfinite, self)) and 0 < self.things < self.total * (1 - 1e-9)

    @property
    def part(self) -> tuple[float, float]:
        """What the window adds to the numerator and to the denominator, with its weight."""
        share = self.things / self.total
        noise = self.things * (self.small - self.large)
        return (1 - share) * noise, (1 - share) * (self.large - share * self.small)


@dataclass(frozen=True)
class Estimate:
    """The noise scale and its interval."""

    scale: float | None  # None where the true gradient cannot be told from zero
    low: float
    high: float  # infinite where the windows set no limit
    correlation: float  # this many windows count as one independent window


def estimate(parts: Sequence[tuple[float, float]]) -> Estimate:
    """Return the ratio of means, and the interval of all ratios that a t-test does not reject.

    A ratio R is rejected where the mean of (noise − R · signal) is too far from zero (Fieller 1954). The interval holds
    for noisy denominators, too, and has no upper end where the true gradient may be zero.
    """
    number = len(parts)
    noise, signal = map(fmean, zip(*parts, strict=True))
    correlation = correlation_time([one * signal - other * noise for one, other in parts])
    spread = correlation / (number * (number - 1))
    noise_noise = spread * sum((one - noise) ** 2 for one, _ in parts)
    signal_signal = spread * sum((other - signal) ** 2 for _, other in parts)
    noise_signal = spread * sum((one - noise) * (other - signal) for one, other in parts)
    reach = student(max(number / correlation - 1, 1.0)) ** 2
    # (noise − R signal)² ≤ reach · variance of that:  a R² − 2 b R + c ≤ 0
    a = signal**2 - reach * signal_signal
    if a > 0 and signal < 0:  # |G|² came out negative, by chance
        return Estimate(None, 0.0, math.inf, correlation)
    b, c = noise * signal - reach * noise_signal, noise**2 - reach * noise_noise
    root, low, high = math.sqrt(max(b * b - a * c, 0.0)), 0.0, math.inf
    if a > 0:  # the true gradient differs from zero
        low, high = max((b - root) / a, 0.0), max((b + root) / a, 0.0)
    elif c > 0:  # the noise differs from zero: the one positive root, without a division by a small number
        low = c / (b + root) if b > 0 else (b - root) / a
    return Estimate(max(noise, 0.0) / signal if signal > 0 else None, low, high, correlation)


def correlation_time(values: Sequence[float]) -> float:
    """Return the variance of the mean relative to that of independent values, by Newey and West (1987); at least 1."""
    number, middle = len(values), fmean(values)
    apart = [value - middle for value in values]
    variance = sum(value**2 for value in apart)
    lags, found = int(4 * (number / 100) ** (2 / 9)), 1.0
    for lag in range(1, min(lags, number - 1) + 1) if variance else ():
        together = sum(x * y for x, y in zip(apart, apart[lag:], strict=False))
        found += 2 * (1 - lag / (lags + 1)) * together / variance
    return max(found, 1.0)


def student(freedom: float) -> float:
    """Return Student's t by Cornish and Fisher's series; within 0.3 % from seven degrees of freedom on."""
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


@dataclass(frozen=True)
class NoiseReport:
    """The noise scale, and what it says of the batch size; `print(report)` says it in words.

    Sizes are in what the loss was averaged over, as `Update.count`: samples for a classifier, tokens for a language
    model, elements for a plain mean over several outputs.
    """

    verdict: Verdict  # which batch is worth having, or why this is unknown
    scale: float | None  # tr Σ / |G|², the batch at which noise and signal are equal; None where it is unknown
    interval: tuple[float, float]  # where the scale lies, at 95 %; (0, inf) where nothing is known
    batch: float | None  # the present batch, on average
    recommended_batch: int | None  # the batch worth having; None where it is unknown
    recommended_steps: int | None  # the number of present micro-batches that make it
    windows: int  # how many measured windows told something
    left_out: Mapping[Reason, int]  # how many told nothing, and why
    every: int  # every so-many-th window was measured

    def __str__(self) -> str:
        low, high = self.interval
        about = f"at least {_number(low)}" if math.isinf(high) else f"between {_number(low)} and {_number(high)}"
        scale = "unknown" if self.scale is None else _number(self.scale)
        more = "Keep training, or use every=1." if self.every > 1 else "Keep training."
        numbers = {"windows": self.windows, "least": LEAST, "four_times": 4 * self.windows}
        lines = [_ADVICE[self.verdict].format(**numbers, more=more, worth=self._worth())]
        if self.verdict not in {"nothing", "too few"}:
            batch = f"The batch is {_number(self.batch or 0.0)}, counted in what the loss is averaged over."
            windows = f"({about}, at 95 %), from {self.windows} windows."
            lines = [f"Gradient noise scale: {scale} {windows}", batch, *lines]
        for why, number in self.left_out.items():
            if number > _FEW * self.windows:
                lines.append(f"{number} window{'s' if number > 1 else ''} told nothing: {_REASONS[why]}.")
        return "\n".join([*lines, *([_LIMITS] if self.verdict in {"smaller", "right", "larger"} else [])])

    def _worth(self) -> str:
        low, high = self.interval
        if not high:
            return "one micro-batch"
        if self.recommended_batch is None:
            return f"at least {_number(low)}" if self.verdict == "larger" else f"at most {_number(high)}"
        times = self.recommended_batch / (self.batch or 1.0)
        steps = f"{self.recommended_steps} of these micro-batches"
        return f"about {_number(self.recommended_batch)} ({times:.2g} times this one, {steps})"


def make_report(seen: Sequence[Norms], left_out: Mapping[Reason, int], every: int = 16) -> NoiseReport:
    """Judge the windows of which every `every`-th was measured."""
    usable = [norms for norms in seen if norms.usable]
    if len(usable) < len(seen):
        left_out = {**left_out, "unusable": len(seen) - len(usable)}
    parts, windows = [norms.part for norms in usable], len(usable)
    batch = fmean(norms.total for norms in usable) if usable else None
    micro_batch = fmean(norms.things for norms in usable) if usable else None
    found = estimate(parts) if windows >= LEAST else Estimate(None, 0.0, math.inf, 1.0)
    verdict: Verdict = "nothing" if not parts else "too few" if windows < LEAST else judge(found, batch or 0.0)
    wanted = round(batch or 0.0) if verdict == "right" else None
    if verdict in {"smaller", "larger"} and found.scale and found.high <= _TELLING * found.low:
        wanted = max(1, round(found.scale))
    steps = max(1, round(wanted / micro_batch)) if wanted and micro_batch else None
    return NoiseReport(verdict, found.scale, (found.low, found.high), batch, wanted, steps, windows, left_out, every)


def judge(found: Estimate, batch: float) -> Verdict:
    """Compare the interval with the batch."""
    if found.low > batch and (found.scale is None or found.scale > _NEAR * batch):
        return "larger"
    if found.high < batch and found.scale is not None and found.scale < batch / _NEAR:
        return "smaller"
    near = found.scale is not None and batch / _NEAR <= found.scale <= _NEAR * batch
    return "right" if near and found.high <= _TELLING * found.low else "too noisy"


def _number(value: float) -> str:
    """Write three figures: no more mean anything here."""
    if not value or value >= 100:  # noqa: PLR2004
        return f"{float(f'{value:.3g}'):,.0f}"
    return f"{value:.3g}"
