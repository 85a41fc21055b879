"""A page: HTML elements that escape what they hold, and the frame with its style. Reading it fetches nothing."""

from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from html import escape
from importlib import metadata, resources

_VOID = frozenset({"meta", "br", "hr"})
# A page that was mailed or put on a server fetches nothing, whatever a name in it says.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


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
    """Return a part of the page under a heading."""
    return element("section", element("h2", heading), *parts, class_=kind)


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, caption: str, marks: Sequence[str | None] = ()
) -> Html:
    """Return a table whose first column names its rows; `marks` are classes of rows."""
    body = [
        element("tr", element("th", row[0], scope="row"), *(element("td", cell) for cell in row[1:]), class_=mark)
        for row, mark in zip(rows, marks or [None] * len(rows), strict=True)
    ]
    whole = element(
        "table",
        element("caption", element("span", caption)),
        element("thead", element("tr", *(element("th", cell, scope="col") for cell in head))),
        element("tbody", *body),
    )
    # With a tabindex, the keyboard scrolls it, too.
    return element("div", whole, class_="scrolls", tabindex="0", role="region", aria_label=caption)


def figures(numbers: Sequence[tuple[str, str, str]]) -> Html:
    """Return a few numbers to see at a glance: each a name, a value and what it means."""
    return element(
        "dl",
        *(
            element("div", element("dt", name), element("dd", value, element("small", meaning)))
            for name, value, meaning in numbers
        ),
        class_="figures",
    )


def opening(kicker: str, title: str, lead: str, *, verdict: str, good: bool) -> Html:
    """Return what a page begins with: what it is, of what, and its answer."""
    badge = [element("span", verdict, class_=f"badge {'good' if good else 'bad'}"), " "] if verdict else []
    return element(
        "header",
        element("p", kicker, class_="kicker"),
        element("h1", title),
        element("p", *badge, lead, class_="lead"),
    )


def page(title: str, *parts: str) -> str:
    """Return the document."""
    style = (resources.files("bigbatch.report") / "style.css").read_text(encoding="utf-8")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Html(style)),
    )
    day = datetime.now(timezone.utc).date().isoformat()
    versions = (f"{package} {metadata.version(package)}" for package in ("bigbatch", "torch"))
    made = f"Made with {' and '.join(versions)} on {day}. This page fetches nothing."
    body = element("body", element("main", *parts), element("footer", element("p", made)))
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"
