"""From the norms of gradients to the noise scale and its interval.

A gradient over d independent things is the true gradient G and noise whose variance falls with d, so that

    E|g|² = |G|² + tr Σ / d

The first micro-batch of a window (d of D things, gradient s) and the whole window (D things, gradient g) give two such
equations. Their solution is unbiased, whatever the sizes of the other micro-batches, since the big batch weighs each by
its count.

    tr Σ = (|s|² − |g|²) / (1/d − 1/D)          |G|² = (D|g|² − d|s|²) / (D − d)          noise scale = tr Σ / |G|²

(McCandlish et al. 2018, arXiv 1812.06162, appendix A.) A window says little where d is nearly D, so each has the weight
(1 − d/D)². Numerators and denominators are averaged apart: |G|² comes out near zero now and then, which would spoil a
mean of ratios.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import NamedTuple

CONFIDENCE = 0.95
LEAST = 16  # windows; an interval of fewer would promise too much


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
