"""The pages of `--html`: that of a plan, and that of a verification."""

from collections.abc import Sequence

from bigbatch.memory.budget import human
from bigbatch.planner.plan_report import Plan
from bigbatch.report.page import Html, bars, element, page, paragraphs, section, table
from bigbatch.verification.result import Difference, Verification, header, headline, row

_FAR = 3.0  # a budget this many times the highest peak is not drawn: all peaks would lie on the ground
_LISTED = 12  # parameters, before the rest is folded away


def plan_page(plan: Plan, *, name: str, next_step: str) -> str:
    """Return the page of a plan: the size to take, the memory and the time of each size, and why.

    `name` is the file's, `next_step` what to do with it.
    """
    cut = "all at once" if plan.steps == 1 else f"{plan.size:,} × {plan.steps:,}" if plan.size and plan.steps else ""
    columns, *cells = plan.table()
    marks = ["chosen" if row.size == plan.size else None if row.fits else "out" for row in plan.rows]
    caption = f"Micro-batch sizes for a batch of {plan.batch_size:,}"
    return page(
        name,
        "bigbatch plan",
        plan.headline(),
        # On a CPU this is the memory of the whole process, Python and torch included.
        element("p", f"{human(plan.resident_bytes)} are held at any size, weights and optimizer state in it."),
        section("Why", paragraphs(plan.advice)),
        section("Memory", _memory(plan, marks)),
        section("Time", _time(plan)),
        section("Every size that was tried", table(columns, cells, caption=caption, marks=marks)),
        section("To know", paragraphs(plan.notes), kind="notes"),
        section("Next", paragraphs([next_step])),
        verdict=cut or "nothing fits",
        good=plan.size is not None,
    )


def _memory(plan: Plan, marks: Sequence[str | None]) -> Html:
    peaks = [row.peak_bytes for row in plan.rows]
    limits = [("held at any size", float(plan.resident_bytes))]
    if None in peaks or plan.budget < _FAR * max(plan.resident_bytes, *(peak or 0 for peak in peaks)):
        limits.append((f"budget, {human(plan.budget)}", float(plan.budget)))
    told = [("ran out of memory", plan.budget) if at is None else (human(at), at) for at in peaks]
    rows = [(f"{row.size:,}", float(peak), text) for row, (text, peak) in zip(plan.rows, told, strict=True)]
    kind = "measured" if plan.measured else "predicted by tracing"
    caption = f"The peak of a micro-step by the samples in it, {kind}."
    return bars(rows, caption=caption, marks=marks, limits=limits)


def _time(plan: Plan) -> Html:
    timed = [(f"{row.size:,}", 1e3 * row.seconds_per_sample) for row in plan.rows if row.seconds_per_sample is not None]
    marks = ["chosen" if size == f"{plan.size:,}" else None for size, _ in timed]
    caption = "The milliseconds per sample by the samples in a micro-batch. Of two that are as fast, the smaller one "
    rows = [(size, ms, f"{ms:,.3g} ms") for size, ms in timed]
    return bars(rows, caption=f"{caption}leaves memory free.", marks=marks) if len(timed) > 1 else Html()


def verify_page(found: Verification, *, name: str) -> str:
    """Return the page of a verification; `name` is that of the file or the model."""
    verdict, _, said = headline(found).partition(": ")
    first, rest = found.worst_first[:_LISTED], found.worst_first[_LISTED:]
    caption = "Relative differences, and what rounding alone makes of the big batch; the worst first"
    summary = element("summary", f"{len(rest):,} more, each nearer to the big batch's")
    others = element("details", summary, _figures(found, rest, "The other parameters")) if rest else Html()
    return page(
        name,
        "bigbatch verify",
        f"{said[0].upper()}{said[1:]}",
        section("Why, and what to do", *map(_cause, map(str, found.causes))),
        section("Every parameter and its rounding", _figures(found, first, caption), others),
        section("To know", paragraphs(found.notes), kind="notes"),
        verdict=verdict,
        good=found.exact,
    )


def _cause(text: str) -> Html:
    heading, _, body = text.partition("\n")
    return element("article", element("h3", heading), element("p", body, class_="remedy"), class_="cause")


def _figures(found: Verification, some: Sequence[Difference], caption: str) -> Html:
    marks = [None if each.exact else "wrong" for each in some]
    return table(header(found.dtype), [row(each) for each in some], caption=caption, marks=marks)
