"""A page: HTML elements that escape what they hold, plots as inline SVG, and the frame. Reading it fetches nothing."""

from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from html import escape
from importlib import metadata, resources

_VOID = frozenset({"meta", "br", "hr"})
# A page that was mailed or put on a server fetches nothing, whatever a name in it says.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_LEFT, _LONGEST, _WIDTH, _ROW = 70, 400, 640, 26  # of a plot: where bars begin, how long and how far apart they are


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
