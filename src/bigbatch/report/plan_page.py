"""A plan as a page: the size to take, the memory and the time of each size, and why."""

from typing import TYPE_CHECKING

from bigbatch.memory.budget import human
from bigbatch.memory.search import TIE
from bigbatch.planner.plan_report import Plan
from bigbatch.report.page import Html, element, figure, opening, page, paragraphs, section, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FAR = 3.0  # a budget this many times the highest peak is not drawn: all peaks would lie on the ground
_GIB = 1 << 30


def plan_page(plan: Plan, *, name: str, next_step: tuple[str, str]) -> str:
    """Return the page of a plan; `name` is the file's, `next_step` what to type and why."""
    verdict = "nothing fits" if plan.size is None else f"{plan.size:,} × {plan.steps:,}"
    verdict = "all at once" if plan.steps == 1 else verdict
    times = [(row.size, 1e3 * row.seconds_per_sample) for row in plan.rows if row.seconds_per_sample is not None]
    command, reason = next_step
    typed = element("pre", element("code", command), tabindex="0")
    return page(
        f"{name}: bigbatch plan",
        opening("bigbatch plan", name, plan.headline(), verdict=verdict, good=plan.size is not None),
        # On a CPU this is the memory of the whole process, Python and torch included.
        element("p", f"{human(plan.resident_bytes)} are held at any size, weights and optimizer state in it."),
        *([section("Why", paragraphs(plan.advice))] if plan.advice else []),
        _memory(plan),
        *([_time(plan, times)] if len(times) > 1 else []),
        section("Every size that was tried", _table(plan)),
        *([section("To know", paragraphs(plan.notes), kind="notes")] if plan.notes else []),
        section("Next", typed, element("p", f"{reason[0].upper()}{reason[1:]}.")),
    )


def _table(plan: Plan) -> Html:
    columns = ["micro-batch", "steps", "predicted peak", "measured peak", "ms per sample", ""]
    rows, marks = [], []
    for row in plan.rows:
        time = "" if row.seconds_per_sample is None else f"{1e3 * row.seconds_per_sample:,.3g}"
        peaks = ["" if peak is None else human(peak) for peak in (row.predicted_bytes, row.measured_bytes)]
        failed = "ran out of memory" if plan.measured and row.measured_bytes is None else "does not fit"
        said = "take this" if row.size == plan.size else "" if row.fits else failed
        rows.append([f"{row.size:,}", f"{row.steps:,}", *peaks, time, said])
        marks.append("chosen" if row.size == plan.size else None if row.fits else "out")
    kept = [at for at, column in enumerate(zip(*rows, strict=True)) if any(column)]
    caption = f"Micro-batch sizes for a batch of {plan.batch_size:,}"
    return table([columns[at] for at in kept], [[row[at] for at in kept] for row in rows], caption=caption, marks=marks)


def _memory(plan: Plan) -> Html:
    predicted = [(row.size, row.predicted_bytes / _GIB) for row in plan.rows if row.predicted_bytes is not None]
    measured = [(row.size, row.measured_bytes / _GIB) for row in plan.rows if row.measured_bytes is not None]
    failed = [row.size for row in plan.rows if row.measured_bytes is None and not row.fits and plan.measured]
    budget, held = plan.budget / _GIB, plan.resident_bytes / _GIB
    highest = max([held, *(peak for _, peak in (*predicted, *measured))])

    def draw(axes: "Axes") -> None:
        if measured:
            axes.plot(*zip(*measured, strict=True), "o-", label="measured")
        if predicted:
            axes.plot(*zip(*predicted, strict=True), "D-", fillstyle="none", label="predicted by tracing")
        axes.axhline(held, color="gray", linestyle=":", label="held at any size")
        if failed or budget < _FAR * highest:
            axes.axhline(budget, color="tab:red", label=f"budget, {human(plan.budget)}")
        if failed:
            axes.plot(failed, [budget] * len(failed), "X", color="tab:red", label="ran out of memory")
        _label_sizes(axes, plan)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("peak memory, GiB")

    peaks = [(row.size, row.predicted_bytes if row.measured_bytes is None else row.measured_bytes) for row in plan.rows]
    told = "; ".join(f"{size:,}: {'out of memory' if peak is None else human(peak)}" for size, peak in peaks)
    kind = "measured" if plan.measured else "predicted"
    says = f"Peak memory by micro-batch size, {kind}: {told}. The budget is {human(plan.budget)}."
    caption = "The peak of a micro-step" + ("." if plan.measured else ", by tracing it on fake tensors.")
    return section("Memory", figure(draw, name="memory", height=4.2, says=says, caption=caption))


def _time(plan: Plan, timed: list[tuple[int, float]]) -> Html:
    def draw(axes: "Axes") -> None:
        axes.plot(*zip(*timed, strict=True), "o-", label="measured")
        _label_sizes(axes, plan)
        axes.set_yscale("log")
        axes.set_ylabel("milliseconds per sample")

    says = f"Time per sample by micro-batch size: {'; '.join(f'{size:,}: {time:.3g} ms' for size, time in timed)}."
    caption = "Lower is faster. Where the line is flat, a smaller micro-batch is as fast and leaves memory free."
    drawn = figure(draw, name="time", height=3.4, says=says, caption=caption)
    return section("Time", drawn, paragraphs(_why_not_the_fastest(plan)))


def _label_sizes(axes: "Axes", plan: Plan) -> None:
    """Make an axis of micro-batch sizes, with the size to take on it."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.set_xlabel("samples in a micro-batch")
    if plan.size is not None:
        axes.axvline(plan.size, color="black", linestyle="--", label=f"take this: {plan.size:,}")


def _why_not_the_fastest(plan: Plan) -> list[str]:
    times = {row.size: row.seconds_per_sample for row in plan.rows if row.fits and row.seconds_per_sample is not None}
    fastest, chosen = min(times, key=times.__getitem__, default=None), times.get(plan.size or 0)
    if fastest is None or chosen is None or fastest == plan.size:
        return []
    why = f"Sizes within {TIE - 1:.0%} count as equally fast, and the time of the whole update decides."
    return [f"Micro-batches of {fastest:,} were faster: {1e3 * times[fastest]:,.3g} ms, not {1e3 * chosen:,.3g}. {why}"]
