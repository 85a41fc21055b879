"""A plan as a page: the size to take, the memory and the time of each size, and why."""

from typing import TYPE_CHECKING

from bigbatch.memory.budget import human
from bigbatch.planner.plan_report import Plan
from bigbatch.report.page import Html, element, figure, opening, page, paragraphs, section, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FAR = 3.0  # a budget this many times the highest peak is not drawn: all peaks would lie on the ground
_GIB = 1 << 30


def plan_page(plan: Plan, *, name: str, next_step: str) -> str:
    """Return the page of a plan; `name` is the file's, `next_step` what to do with it."""
    verdict = "nothing fits" if plan.size is None else f"{plan.size:,} × {plan.steps:,}"
    verdict = "all at once" if plan.steps == 1 else verdict
    times = [(row.size, 1e3 * row.seconds_per_sample) for row in plan.rows if row.seconds_per_sample is not None]
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
        section("Next", paragraphs([next_step])),
    )


def _table(plan: Plan) -> Html:
    columns, *rows = plan.table()
    marks = ["chosen" if row.size == plan.size else None if row.fits else "out" for row in plan.rows]
    return table(columns, rows, caption=f"Micro-batch sizes for a batch of {plan.batch_size:,}", marks=marks)


def _memory(plan: Plan) -> Html:
    kind = "measured" if plan.measured else "predicted by tracing"
    peaks = [(row.size, row.peak_bytes / _GIB) for row in plan.rows if row.peak_bytes is not None]
    failed = [row.size for row in plan.rows if row.peak_bytes is None]
    budget, held = plan.budget / _GIB, plan.resident_bytes / _GIB

    def draw(axes: "Axes") -> None:
        if peaks:
            axes.plot(*zip(*peaks, strict=True), "o-", label=kind)
        axes.axhline(held, color="gray", linestyle=":", label="held at any size")
        if failed or budget < _FAR * max([held, *(peak for _, peak in peaks)]):
            axes.axhline(budget, color="tab:red", label=f"budget, {human(plan.budget)}")
        if failed:
            axes.plot(failed, [budget] * len(failed), "X", color="tab:red", label="ran out of memory")
        _label_sizes(axes, plan)
        axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
        axes.set_ylabel("peak memory, GiB")

    told = "; ".join(f"{size}: {peak}" for size, _, peak, *_ in plan.table()[1:])
    says = f"Peak memory by micro-batch size, {kind}: {told}. The budget is {human(plan.budget)}."
    caption = f"The peak of a micro-step, {kind}."
    return section("Memory", figure(draw, name="memory", height=4.2, says=says, caption=caption))


def _time(plan: Plan, timed: list[tuple[int, float]]) -> Html:
    def draw(axes: "Axes") -> None:
        axes.plot(*zip(*timed, strict=True), "o-", label="measured")
        _label_sizes(axes, plan)
        axes.set_yscale("log")
        axes.set_ylabel("milliseconds per sample")

    says = f"Time per sample by micro-batch size: {'; '.join(f'{size:,}: {time:.3g} ms' for size, time in timed)}."
    caption = "Lower is faster. Where the line is flat, a smaller micro-batch is as fast and leaves memory free."
    return section("Time", figure(draw, name="time", height=3.4, says=says, caption=caption))


def _label_sizes(axes: "Axes", plan: Plan) -> None:
    """Make an axis of micro-batch sizes, with the size to take on it."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.set_xlabel("samples in a micro-batch")
    if plan.size is not None:
        axes.axvline(plan.size, color="black", linestyle="--", label=f"take this: {plan.size:,}")
