"""What the measured noise says of the batch size.

With a batch of B and a noise scale N, reaching the same loss takes, compared with the least over all batch sizes
(McCandlish et al. 2018, arXiv 1812.06162):

    1 + N / B   times the updates          1 + B / N   times the samples

At B = N both are 2. This is the batch worth having, within an order of magnitude: the model is plain gradient descent
on a quadratic loss of equal curvature.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, TypeAlias

from bigbatch.noise.estimate import LEAST, Estimate, Norms, estimate

Verdict: TypeAlias = Literal["nothing", "too few", "too noisy", "smaller", "right", "larger"]
Reason: TypeAlias = Literal["alone", "sum", "several", "coupled", "resumed", "unusable"]

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
        """Say it in sentences."""
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
