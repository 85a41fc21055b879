"""A noise report, said in sentences: what was measured, what it means for the batch, and what to keep in mind."""

import math
from typing import TYPE_CHECKING

from bigbatch.noise.estimating import LEAST

if TYPE_CHECKING:
    from bigbatch.noise.report import NoiseReport, Reason

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


def measured(report: "NoiseReport") -> list[str]:
    """Say what was measured, if anything was."""
    if report.verdict in {"nothing", "too few"} or report.batch is None:
        return []
    low, high = report.interval
    about = f"between {number(low)} and {number(high)}"
    if math.isinf(high):
        about = f"at least {number(low)}" if low else "it could be anything"
    scale = "unknown" if report.scale is None else number(report.scale)
    of_batch = f"The batch is {number(report.batch)}, counted in what the loss is averaged over."
    return [f"Gradient noise scale: {scale} ({about}, at 95 %), from {report.windows} windows. {of_batch}"]


def advice(report: "NoiseReport") -> str:
    """Say which batch size is worth having, or that it cannot be told."""
    return {
        "nothing": _nothing,
        "too few": _too_few,
        "too noisy": _too_noisy,
        "right": _right,
        "larger": _larger,
        "smaller": _smaller,
    }[report.verdict](report)


def reservations(report: "NoiseReport") -> list[str]:
    """Say what to keep in mind."""
    said = []
    if report.drift is not None:
        before, after = map(number, report.drift)
        said.append(
            f"The scale is changing: {before} in the first half of these windows, {after} in the second. The interval "
            "is that of their mixture."
        )
    for why, windows in report.left_out.items():
        if windows > _FEW * report.windows:
            said.append(f"{windows} window{'s' if windows > 1 else ''} told nothing: {_REASONS[why]}.")
    if report.verdict in {"smaller", "right", "larger"}:
        said.append("Take it for an order of magnitude: it leaves curvature, momentum and Adam's scaling out.")
    return said


def _nothing(_: "NoiseReport") -> str:
    return "Nothing can be said of the batch size: no window that was looked at has told anything."


def _too_few(report: "NoiseReport") -> str:
    told = f"{report.windows} window{' has' if report.windows == 1 else 's have'} told something so far"
    return f"Too early to tell: {told}, and {LEAST} are needed. {_keep_on(report)}"


def _too_noisy(report: "NoiseReport") -> str:
    more = f"{4 * report.windows} windows would halve the interval. {_keep_on(report)}"
    return f"Too noisy to tell: a smaller batch may be the better one, and so may a larger. {more}"


def _keep_on(report: "NoiseReport") -> str:
    return "Keep training, or look more often: every=1." if report.every > 1 else "Keep training."


def _right(_: "NoiseReport") -> str:
    return "The batch is about right: half of it, or twice, would save little of updates or samples for the other."


def _larger(report: "NoiseReport") -> str:
    batch, low = report.batch or 0.0, report.interval[0]
    end = f"up to about {_worth(report, report.recommended_batch)}" if report.recommended_batch else "how far is open"
    scale = report.scale or low
    fewer = 1 - (1 + scale / (2 * batch)) / (1 + scale / batch)
    more = (1 + 2 * batch / scale) / (1 + batch / scale) - 1
    return (
        f"A larger batch is worth having, {end}: twice this one would take {fewer:.0%} fewer updates and {more:.0%} "
        "more samples to get as far.\n"
        "On one device its micro-batches run one after the other: it saves time where updates are slow or devices are "
        "many, not otherwise. Either way the learning rate should follow: see scale_lr."
    )


def _smaller(report: "NoiseReport") -> str:
    batch, high = report.batch or 0.0, report.interval[1]
    if not high:
        return (
            "The batch is larger than is worth having: a micro-batch has the gradient of all of them, so one would do, "
            "with a learning rate to match: see scale_lr. If samples differ, see that they are shuffled."
        )
    end = _worth(report, report.recommended_batch) if report.recommended_batch else f"{number(high)} or less"
    wasted = 1 + batch / (report.scale or high)
    return (
        f"The batch is larger than is worth having: to get as far it takes {wasted:.2g} times the samples that the "
        f"smallest would. One of about {end} would do, with a learning rate to match: see scale_lr."
    )


def _worth(report: "NoiseReport", batch: int) -> str:
    times = batch / (report.batch or 1.0)
    return f"{number(batch)} ({times:.2g} times this one, {report.recommended_steps} of these micro-batches)"


def number(value: float) -> str:
    """Write a number as it is read: no more than three figures mean anything here."""
    if not value or value >= 100:  # noqa: PLR2004
        return f"{float(f'{value:.3g}'):,.0f}"
    return f"{value:.3g}"
