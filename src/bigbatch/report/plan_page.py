"""A plan to look at: the size to take, the memory and the time of each, and why."""

from typing import TYPE_CHECKING

from bigbatch.memory.budget import human
from bigbatch.memory.search import TIE
from bigbatch.planner.plan_report import Plan, Row
from bigbatch.report.markup import Html, element, paragraphs, table
from bigbatch.report.page import code, figures, opening, page, section
from bigbatch.report.plots import figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FAR = 3.0  # times the highest peak: a budget above is not drawn, or all peaks would lie on the ground
_STEEP = 10.0  # the slowest to the fastest: beyond, times are drawn by their ratios


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
    held = (
        "held at any size",
        human(plan.resident_bytes),
        "by this process: weights, gradients, optimizer state, all else",
    )
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
    budget, held = plan.budget / unit, plan.resident_bytes / unit
    highest = max([held, *(peak for _, peak in (*predicted, *measured))])

    def draw(axes: "Axes") -> None:
        if measured:
            axes.plot(*zip(*measured, strict=True), "o-", label="measured")
        if predicted:
            how = "predicted from the other sizes" if measured else "predicted by tracing"
            axes.plot(*zip(*predicted, strict=True), "D" if measured else "D-", fillstyle="none", label=how)
        axes.axhline(held, color="gray", linestyle=":", label="held at any size")
        if failed or budget < _FAR * highest:
            axes.axhline(budget, color="tab:red", label=f"budget, {human(plan.budget)}")
        if failed:
            axes.plot(failed, [budget] * len(failed), "X", color="tab:red", label="ran out of memory")
        _sizes(axes, plan)
        axes.set_ylim(bottom=0)
        axes.set_ylabel(f"peak memory, {name}")

    kind = "measured" if plan.measured else "predicted"
    told = "; ".join(
        f"{row.size:,}: {human(peak)}" if (peak := _peak(row)) is not None else f"{row.size:,}: out of memory"
        for row in plan.rows
    )
    says = f"Peak memory by micro-batch size, {kind}: {told}. The budget is {human(plan.budget)}."
    caption = (
        "What a micro-step holds at most. Diamonds are what the other sizes predict of each, by a line through the two "
        "nearest."
        if plan.measured
        else "What a micro-step would hold at most, by tracing it on fake tensors."
    )
    return section("Memory", figure(draw, name="memory", height=4.2, says=says, caption=caption))


def _time(plan: Plan) -> Html:
    timed = [(row.size, 1e3 * row.seconds_per_sample) for row in plan.rows if row.seconds_per_sample is not None]

    def draw(axes: "Axes") -> None:
        sizes, times = zip(*timed, strict=True)
        axes.plot(sizes, times, "o-", label="measured")
        _sizes(axes, plan)
        if max(times) > _STEEP * min(times):
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.set_ylabel("milliseconds per sample")

    told = "; ".join(f"{size:,}: {time:.3g} ms" for size, time in timed)
    caption = "Lower is faster. Where the line is flat, a smaller micro-batch is as fast and leaves memory free."
    says = f"Time per sample by micro-batch size: {told}."
    drawn = figure(draw, name="time", height=3.4, says=says, caption=caption)
    return section("Time", drawn, paragraphs(_not_the_fastest(plan)))


def _sizes(axes: "Axes", plan: Plan) -> None:
    """Have an axis of micro-batch sizes, doubling as it goes, with the size to take on it."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.set_xlabel("samples in a micro-batch")
    if plan.size is not None:
        axes.axvline(plan.size, color="black", linestyle="--", label=f"take this: {plan.size:,}")


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


def _unit(most: int) -> tuple[int, str]:
    """Return the unit to write bytes in."""
    power = max(p for p in range(1, 5) if p == 1 or most >= 1024**p)
    return 1024**power, ("KiB", "MiB", "GiB", "TiB")[power - 1]
