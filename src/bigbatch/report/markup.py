"""HTML that cannot be injected into: what is not known to be HTML is text, and is escaped where it is put in."""

from collections.abc import Iterable, Sequence
from html import escape

_VOID = frozenset({"meta", "br", "hr"})


class Html(str):
    """Text that is HTML already. Plain strings become it by `element` alone, which escapes them."""

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
    if name in _VOID:
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{together(inside)}</{name}>")


def together(parts: Iterable[str]) -> Html:
    """Put parts one behind the other."""
    return Html("".join(part if isinstance(part, Html) else escape(part) for part in parts))


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, caption: str, marks: Sequence[str | None] = ()
) -> Html:
    """Return a table whose first column names its rows; `marks` are classes of rows."""
    classes = marks or [None] * len(rows)
    return element(
        "div",
        element(
            "table",
            element("caption", element("span", caption)),
            element("thead", element("tr", *(element("th", cell, scope="col") for cell in head))),
            element("tbody", *(_row(row, mark) for row, mark in zip(rows, classes, strict=True))),
        ),
        class_="scrolls",
        tabindex="0",  # so that it can be scrolled by keys, too
        role="region",
        aria_label=caption,
    )


def _row(cells: Sequence[str], mark: str | None) -> Html:
    first, *others = cells
    return element("tr", element("th", first, scope="row"), *(element("td", cell) for cell in others), class_=mark)


def paragraphs(sentences: Iterable[str]) -> Html:
    """Return a paragraph for each."""
    return together(element("p", sentence) for sentence in sentences)
