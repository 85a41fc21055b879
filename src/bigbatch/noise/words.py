"""A noise report in sentences: what was measured, what it means for the batch, and what to keep in mind."""

import math
from typing import TYPE_CHECKING

from bigbatch.noise.estimate import LEAST

if TYPE_CHECKING:
    from bigbatch.noise.noise_report import NoiseReport, Reason

_FEW = 0.1  # of the windows that told something: so many may be left out, as at the end of each epoch, without a word

_REASONS: dict["Reason", str] = {
    "alone": "one micro-batch each, which has no other to differ from: take smaller micro-batches, and more of them",
    "sum": (
        "a loss that is a sum, and nothing tells over how many samples: return a mean, or say what it counts, as in "
        "accumulator.backward(mean, count=n)"
    ),
    "several": "a loss of several counts, whose terms have noise of their own each",
    "coupled": "micro-batches in lock-step: where samples are coupled, none has a gradient of its own",
    "resumed": "resumed from a checkpoint after their first micro-batch",
    "unusable": "a gradient with an inf or NaN, or a first micro-batch that counted nothing",
}


def sentences(report: "NoiseReport") -> list[str]:
    """Say it all."""
    said = []
    if report.verdict not in {"nothing", "too few"}:
        low, high = map(number, report.interval)
        about = f"at least {low}" if math.isinf(report.interval[1]) else f"between {low} and {high}"
        scale = "unknown" if report.scale is None else number(report.scale)
        said.append(
            f"Gradient noise scale: {scale} ({about}, at 95 %), from {report.windows} windows. The batch is "
            f"{number(report.batch or 0.0)}, counted in what the loss is averaged over."
        )
    said.append(_advice(report))
    if report.drift is not None:
        before, after = map(number, report.drift)
        said.append(f"The scale is changing: {before} in the first half of these windows, {after} in the second.")
    for why, windows in report.left_out.items():
        if windows > _FEW * report.windows:
            said.append(f"{windows} window{'s' if windows > 1 else ''} told nothing: {_REASONS[why]}.")
    if report.verdict in {"smaller", "right", "larger"}:
        said.append("Take it for an order of magnitude: it leaves curvature, momentum and Adam's scaling out.")
    return said


def _advice(report: "NoiseReport") -> str:
    """Say which batch size is worth having, or that it cannot be told."""
    on = "Keep training, or look more often: every=1." if report.every > 1 else "Keep training."
    seen = f"{report.windows} window{' has' if report.windows == 1 else 's have'} told something"
    return {
        "nothing": "Nothing can be said of the batch size: no window that was looked at has told anything.",
        "too few": f"Too early to tell: {seen} so far, and {LEAST} are needed. {on}",
        "too noisy": f"Too noisy to tell: {4 * report.windows} windows would halve the interval. {on}",
        "right": "The batch is about right: half of it, or twice, would save little of updates or samples.",
        "larger": f"A larger batch is worth having, {_worth(report)}. See scale_lr for the learning rate.\n"
        "On one device its micro-batches run one after the other: it saves time where updates are slow or devices are "
        "many, not otherwise.",
        "smaller": f"The batch is larger than is worth having: {_worth(report)} would do. See scale_lr for the "
        "learning rate.",
    }[report.verdict]


def _worth(report: "NoiseReport") -> str:
    """Return the batch worth having, as a part of a sentence."""
    batch, (low, high) = report.recommended_batch, report.interval
    if not high:
        return "one micro-batch"
    if batch is None:
        return f"{number(low)} at least" if report.verdict == "larger" else f"{number(high)} or less"
    times = batch / (report.batch or 1.0)
    return f"about {number(batch)} ({times:.2g} times this one, {report.recommended_steps} of these micro-batches)"


def number(value: float) -> str:
    """Write a number as it is read: no more than three figures mean anything here."""
    if not value or value >= 100:  # noqa: PLR2004
        return f"{float(f'{value:.3g}'):,.0f}"
    return f"{value:.3g}"
