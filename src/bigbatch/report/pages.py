"""The pages of `--html`, of a plan and of a verification: elements that escape what they hold, and plots as inline SVG.

Reading one fetches nothing.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from html import escape
from importlib import metadata, resources

from bigbatch.memory.budget import human
from bigbatch.planner.plan_report import Plan
from bigbatch.verification.result import Difference, Verification, header, headline, row

_VOID = frozenset({"meta", "br", "hr"})
# A page that was mailed or put on a server fetches nothing, whatever a name in it says.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_LEFT, _LONGEST, _WIDTH, _ROW = 70, 400, 640, 26  # of a plot: where bars begin, how long and how far apart they are
_FAR = 3.0  # a budget this many times the highest peak is not drawn: all peaks would lie on the ground
_LISTED = 12  # parameters, before the rest is folded away


class Html(str):
    """Text that is HTML already. `element` alone makes it of plain strings, and escapes them."""

    __slots__ = ()


def element(name: str, /, *inside: str, **attributes: str | None) -> Html:
    """Return an element; plain strings inside are text. An attribute of None is left out.

    >>> element("p", "1 < 2, ", element("b", "always"), class_="note")
    '<p class="note">1 &lt; 2, <b>always</b></p>'
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{written}>" if name in _VOID else f"<{name}{written}>{join(inside)}</{name}>")


def join(parts: Iterable[str]) -> Html:
    """Concatenate parts; plain strings are text."""
    return Html("".join(part if isinstance(part, Html) else escape(part) for part in parts))


def paragraphs(sentences: Iterable[str]) -> Html:
    """Return a paragraph for each sentence."""
    return join(element("p", sentence) for sentence in sentences)


def section(heading: str, *parts: str, kind: str | None = None) -> Html:
    """Return a part of the page under a heading; nothing where it has no parts."""
    return element("section", element("h2", heading), *parts, class_=kind) if any(parts) else Html()


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, caption: str, marks: Sequence[str | None] = ()
) -> Html:
    """Return a table whose first column names its rows; `marks` are classes of rows."""
    body = [
        element("tr", element("th", row[0], scope="row"), *(element("td", cell) for cell in row[1:]), class_=mark)
        for row, mark in zip(rows, marks, strict=True)
    ]
    whole = element(
        "table",
        element("caption", element("span", caption)),
        element("thead", element("tr", *(element("th", cell, scope="col") for cell in head))),
        element("tbody", *body),
    )
    # With a tabindex, the keyboard scrolls it, too.
    return element("div", whole, class_="scrolls", tabindex="0", role="region", aria_label=caption)


def bars(
    rows: Sequence[tuple[str, float, str]],
    *,
    caption: str,
    marks: Sequence[str | None],
    limits: Sequence[tuple[str, float]] = (),
) -> Html:
    """Return a plot: a bar for each row of its label, its value and that as text.

    Args:
        rows: from top to bottom.
        caption: says what the bars are; it stands below them.
        marks: classes of rows.
        limits: names and values of lines across all bars.
    """
    scale = _LONGEST / max([value for _, value, _ in rows] + [value for _, value in limits])
    bottom, drawn = _ROW * len(rows), list[Html]()
    for number, ((label, value, text), mark) in enumerate(zip(rows, marks, strict=True)):
        top, length = _ROW * number, scale * value
        bar = element("rect", x=str(_LEFT), y=str(top + 4), width=f"{length:.1f}", height=str(_ROW - 8))
        name = element("text", label, x=str(_LEFT - 8), y=str(top + 18), text_anchor="end")
        said = element("text", text, x=f"{_LEFT + length + 8:.1f}", y=str(top + 18))
        drawn.append(element("g", name, bar, said, class_=mark))
    for number, (label, value) in enumerate(limits):
        x, y = f"{_LEFT + scale * value:.1f}", str(bottom + 18 * (number + 1))
        drawn += [element("line", x1=x, x2=x, y1="0", y2=y), element("text", label, x=x, y=y, dx="6")]
    says = f"{caption} {'; '.join(f'{label}: {text}' for label, _, text in rows)}."
    box = f"0 0 {_WIDTH} {bottom + 18 * len(limits) + 6}"
    plot = element("svg", *drawn, class_="plot", viewBox=box, role="img", aria_label=says)
    return element("figure", element("div", plot, class_="scrolls"), element("figcaption", caption))


def page(name: str, command: str, lead: str, *parts: str, verdict: str, good: bool) -> str:
    """Return the document: what it is of, the answer, and its parts."""
    style = (resources.files("bigbatch.report") / "style.css").read_text(encoding="utf-8")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{name}: {command}"),
        element("style", Html(style)),
    )
    badge = element("span", verdict, class_=f"badge {'good' if good else 'bad'}")
    opening = element("p", command, class_="kicker"), element("h1", name), element("p", badge, " ", lead, class_="lead")
    versions = (f"{package} {metadata.version(package)}" for package in ("bigbatch", "torch"))
    day = datetime.now(timezone.utc).date().isoformat()
    made = f"Made with {' and '.join(versions)} on {day}. This page fetches nothing."
    main = element("main", element("header", *opening), *parts)
    body = element("body", main, element("footer", element("p", made)))
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


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
