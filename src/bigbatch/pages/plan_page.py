"""A plan to look at: the size to take, the memory and the time of each, and why."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bigbatch.memory.budget import human
from bigbatch.memory.sizing import TIE
from bigbatch.pages.markup import Html, element, paragraphs, table
from bigbatch.pages.page import code, figures, opening, page, section
from bigbatch.pages.plots import ACCENT, BAD, INK, MUTED, PAPER, SECOND, SHADE, beside, figure, legend
from bigbatch.planning.report import Plan, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HEADROOM = 1.18  # above the highest thing drawn
_FAR = 2.5  # times the highest peak: a budget above is named at the edge, or all peaks would lie on the ground
_STEEP = 10.0  # the slowest to the fastest: beyond, times are drawn by their ratios
_APART = {False: 0.05, True: 0.11}  # of the width, between the labels of two sizes


def plan_page(plan: Plan, *, name: str, next_step: tuple[str, str]) -> str:
    """Return the page of a plan; `name` is the file's, `next_step` what to type and why."""
    drawn = [_memory(plan)]
    if sum(row.seconds_per_sample is not None for row in plan.rows) > 1:
        drawn.append(_time(plan))
    why = [section("Why", paragraphs(plan.advice))] if plan.advice else []
    notes = [element("section", element("h2", "To know"), paragraphs(plan.notes), class_="notes")] if plan.notes else []
    command, reason = next_step
    return page(
        f"{name}: bigbatch plan",
        opening(
            "bigbatch plan", name, plan.headline(), verdict=_verdict(plan), tone="bad" if plan.size is None else "good"
        ),
        figures(_figures(plan)),
        *why,
        *drawn,
        section("Every size that was tried", _table(plan)),
        *notes,
        section("Next", code(command), element("p", f"{reason[0].upper()}{reason[1:]}.")),
    )


def _verdict(plan: Plan) -> str:
    if plan.size is None:
        return "nothing fits"
    return "all at once" if plan.steps == 1 else f"{plan.size:,} × {plan.steps:,}"


def _figures(plan: Plan) -> list[tuple[str, str, str]]:
    held = ("held at any size", human(plan.resident_bytes), "weights, gradients, optimizer state")
    budget = ("budget", human(plan.budget), f"on {plan.device}")
    if plan.size is None or plan.peak_bytes is None:
        return [("batch", f"{plan.batch_size:,}", "samples an update"), budget, held]
    how = "measured" if plan.measured else "predicted"
    return [
        ("micro-batch", f"{plan.size:,}", f"of {plan.batch_size:,} samples"),
        ("steps", f"{plan.steps:,}", "micro-batches an update"),
        ("peak", human(plan.peak_bytes), f"{how}, {plan.peak_bytes / plan.budget:.0%} of {human(plan.budget)}"),
        held,
    ]


def _table(plan: Plan) -> Html:
    head = ["micro-batch", "steps", "predicted peak", "measured peak", "ms per sample", ""]
    rows, marks = [], []
    for row in plan.rows:
        chosen = row.size == plan.size
        time = "" if row.seconds_per_sample is None else f"{1e3 * row.seconds_per_sample:,.3g}"
        peaks = ["" if peak is None else human(peak) for peak in (row.predicted_bytes, row.measured_bytes)]
        ran_out = plan.measured and row.measured_bytes is None
        said = "take this" if chosen else "" if row.fits else "ran out of memory" if ran_out else "does not fit"
        rows.append([f"{row.size:,}", f"{row.steps:,}", *peaks, time, said])
        marks.append("chosen" if chosen else None if row.fits else "out")
    kept = [at for at, column in enumerate(zip(*rows, strict=True)) if any(column)]
    caption = f"Micro-batch sizes for a batch of {plan.batch_size:,}"
    return table([head[at] for at in kept], [[row[at] for at in kept] for row in rows], caption=caption, marks=marks)


def _peak(row: Row) -> int | None:
    return row.measured_bytes if row.measured_bytes is not None else row.predicted_bytes


def _memory(plan: Plan) -> Html:
    unit, name = _unit(max([plan.budget, *(_peak(row) or 0 for row in plan.rows)]))
    predicted = [(row.size, row.predicted_bytes / unit) for row in plan.rows if row.predicted_bytes is not None]
    measured = [(row.size, row.measured_bytes / unit) for row in plan.rows if row.measured_bytes is not None]
    failed = [row.size for row in plan.rows if row.measured_bytes is None and not row.fits and plan.measured]

    def draw(axes: "Axes", narrow: bool) -> None:  # noqa: FBT001 - as `Draw` has it
        top = _HEADROOM * max([plan.resident_bytes / unit, *(peak for _, peak in (*predicted, *measured))])
        if plan.budget / unit <= _FAR * top:
            top = max(top, _HEADROOM * plan.budget / unit)
        axes.set_ylim(0, top)
        axes.axhspan(0, plan.resident_bytes / unit, color=SHADE, linewidth=0)
        axes.axhline(plan.budget / unit, color=BAD, linewidth=1.6)
        _sizes(axes, [row.size for row in plan.rows], plan.size, narrow=narrow)
        if measured:
            axes.plot(
                *zip(*measured, strict=True), color=ACCENT, marker="o", markersize=7, linewidth=1.6, label="measured"
            )
        if predicted:
            style = {"linestyle": "none"} if measured else {"linewidth": 1.6}
            axes.plot(
                *zip(*predicted, strict=True),
                color=SECOND,
                marker="D",
                markersize=8.5,
                markerfacecolor="none" if measured else SECOND,
                markeredgewidth=1.6,
                label="predicted from the other sizes" if measured else "predicted by tracing",
                **style,
            )
        if failed:
            axes.plot(
                failed,
                [plan.budget / unit] * len(failed),
                linestyle="none",
                marker="X",
                color=BAD,
                markersize=10,
                markeredgecolor=PAPER,
                label="ran out of memory",
            )
        _limits(axes, plan, unit, top, narrow=narrow)
        axes.set_ylabel(f"peak memory, {name}")
        axes.grid(visible=False, axis="x")
        legend(axes, columns=1 if narrow else 3)
        _chosen(axes, plan, measured or predicted)

    kind = "measured" if plan.measured else "predicted"
    told = "; ".join(
        f"{row.size:,}: {human(peak)}" if (peak := _peak(row)) is not None else f"{row.size:,}: out of memory"
        for row in plan.rows
    )
    says = f"Peak memory by micro-batch size, {kind}: {told}. The budget is {human(plan.budget)}."
    caption = (
        "What a micro-step holds at most. Diamonds are what the other sizes predict of each, by a line through the two "
        "nearest: how well they meet the dots is how far the prediction can be trusted."
        if plan.measured
        else "What a micro-step would hold at most, by tracing it on fake tensors."
    )
    return section("Memory", figure(draw, name="memory", heights=(360, 330), says=says, caption=caption))


def _limits(axes: "Axes", plan: Plan, unit: int, top: float, *, narrow: bool) -> None:
    """Name what no size changes: the budget, and what is held below all peaks."""
    left, right = axes.get_xlim()
    named, above = f"budget, {human(plan.budget)}", plan.budget / unit > top
    axes.annotate(
        f"{named}, is far above" if above else named,
        (left, top if above else plan.budget / unit),
        (4, -4 if above else 4),
        textcoords="offset points",
        va="top" if above else "bottom",
        color=BAD,
    )
    # On the right, where peaks are high.
    held = "held at any size" if narrow else "held at any size: weights, gradients, optimizer state"
    axes.annotate(held, (right, 0), (-5, 5), textcoords="offset points", ha="right", fontsize=11, color=MUTED)


def _time(plan: Plan) -> Html:
    timed = [(row.size, 1e3 * row.seconds_per_sample) for row in plan.rows if row.seconds_per_sample is not None]

    def draw(axes: "Axes", narrow: bool) -> None:  # noqa: FBT001
        fastest, slowest = min(time for _, time in timed), max(time for _, time in timed)
        top = _HEADROOM * slowest
        _sizes(axes, [row.size for row in plan.rows], plan.size, narrow=narrow)
        if slowest > _STEEP * fastest:
            _by_ratio(axes, fastest, slowest)
        else:
            axes.set_ylim(0, top)
        axes.plot(*zip(*timed, strict=True), color=ACCENT, marker="o", markersize=7, linewidth=1.6)
        axes.set_ylabel("milliseconds per sample")
        axes.grid(visible=False, axis="x")
        _chosen(axes, plan, timed)

    told = "; ".join(f"{size:,}: {time:.3g} ms" for size, time in timed)
    caption = "Lower is faster. Where the line is flat, a smaller micro-batch is as fast and leaves memory free."
    says = f"Time per sample by micro-batch size: {told}."
    drawn = figure(draw, name="time", heights=(280, 270), says=says, caption=caption)
    return section("Time", drawn, paragraphs(_not_the_fastest(plan)))


def _not_the_fastest(plan: Plan) -> list[str]:
    """Say why another size than the fastest is to be taken, where it is."""
    times = {row.size: row.seconds_per_sample for row in plan.rows if row.fits and row.seconds_per_sample is not None}
    fastest, chosen = min(times, key=times.__getitem__, default=None), times.get(plan.size or 0)
    if fastest is None or chosen is None or fastest == plan.size:
        return []
    said = (
        f"Micro-batches of {fastest:,} were the fastest by the sample: {1e3 * times[fastest]:,.3g} ms instead of "
        f"{1e3 * chosen:,.3g}. "
    )
    if chosen <= TIE * times[fastest]:
        return [f"{said}Within {TIE - 1:.0%} sizes count as equally fast, and of those the smallest is taken."]
    if plan.batch_size % fastest:
        return [f"{said}What counts is the whole update, in which a short last micro-batch takes its time, too."]
    return [f"{said}{'The notes below say why they are not taken.' if plan.notes else ''}".rstrip()]


def _by_ratio(axes: "Axes", fastest: float, slowest: float) -> None:
    """Have an axis on which twice as long is as far everywhere, with numbers that need no powers of ten."""
    axes.set_yscale("log")
    around = max(1.6, (slowest / fastest) ** 0.2)  # so that words fit above and below
    axes.set_ylim(fastest / around, slowest * around)
    powers = range(math.floor(math.log10(fastest)) - 1, math.ceil(math.log10(slowest)) + 1)
    ticks = [digit * 10.0**power for power in powers for digit in (1, 3)]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_yticks([], minor=True)
    axes.set_ylim(fastest / around, slowest * around)  # ticks may have widened it


def _sizes(axes: "Axes", sizes: Sequence[int], chosen: int | None, *, narrow: bool) -> None:
    """Have an axis of micro-batch sizes, doubling as it goes, with the sizes that were tried on it."""
    axes.set_xscale("log", base=2)
    low, high = min(sizes), max(sizes)
    axes.set_xlim(low / 1.35, max(high, low * 2) * 1.35)
    left, right = axes.get_xlim()
    shown: list[int] = []
    for size in sorted(sizes, key=lambda size: (size != chosen, -size)):  # the chosen one, then the largest
        if all(max(size / other, other / size) >= (right / left) ** _APART[narrow] for other in shown):
            shown.append(size)
    axes.set_xticks(shown, [f"{size:,}" for size in shown])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("samples in a micro-batch")


def _chosen(axes: "Axes", plan: Plan, points: Sequence[tuple[int, float]]) -> None:
    """Mark the size to take."""
    at = next(((size, value) for size, value in points if size == plan.size), None)
    if at is None:
        return
    axes.plot(*at, marker="o", color=INK, linestyle="none", markersize=15, markerfacecolor="none", markeredgewidth=1.6)
    beside(axes, "take this", at, fontweight="bold", color=INK)


def _unit(most: int) -> tuple[int, str]:
    """Return the unit to write bytes in."""
    power = max(p for p in range(1, 5) if p == 1 or most >= 1024**p)
    return 1024**power, ("KiB", "MiB", "GiB", "TiB")[power - 1]
