"""A page: HTML elements that escape what they hold, plots as inline SVG, and the frame. Reading it fetches nothing."""

import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from html import escape
from importlib import metadata, resources
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigbatch.errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_VOID = frozenset({"meta", "br", "hr"})
# A page that was mailed or put on a server fetches nothing, whatever a name in it says.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_WIDTH = 8.0  # inches of a plot
_NEEDLESS = re.compile(r'<metadata>.*?</metadata>|<style.*?</style>|(?<=<g) id="[^"]*"', re.DOTALL)


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


def opening(kicker: str, title: str, lead: str, *, verdict: str, good: bool) -> Html:
    """Return what a page begins with: what it is, of what, and its answer."""
    badge = [element("span", verdict, class_=f"badge {'good' if good else 'bad'}"), " "] if verdict else []
    lines = [element("p", kicker, class_="kicker"), element("h1", title), element("p", *badge, lead, class_="lead")]
    return element("header", *lines)


def check_page(to: Path) -> None:
    """Raise where no page can be drawn or written, before anything is measured for it."""
    if to.is_dir() or not to.parent.is_dir():
        raise ConfigurationError(f"--html {to}: name a file in a folder that exists.", fix="--html page.html")
    try:
        import matplotlib.figure  # noqa: F401, PLC0415 - an extra's, and slow to import
    except ImportError as error:
        raise ConfigurationError(
            "--html draws its plots with matplotlib, which is not installed.", fix="pip install 'bigbatch[html]'"
        ) from error


def figure(draw: "Callable[[Axes], None]", *, name: str, height: float, says: str, caption: str) -> Html:
    """Return a plot.

    Args:
        draw: draws into axes.
        name: unlike that of any other plot on the page.
        height: in inches.
        says: what the plot shows, for who cannot see it.
        caption: stands below it.
    """
    import matplotlib as mpl  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415 - not pyplot, which keeps figures and picks a window system

    written = StringIO()
    settings: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": name}  # words stay words, to be found
    with warnings.catch_warnings(), mpl.rc_context(settings):
        warnings.simplefilter("ignore")  # of letters that matplotlib's own typeface lacks: the page's will have them
        drawing = Figure(figsize=(_WIDTH, height), layout="constrained")
        draw(drawing.subplots())
        drawing.legend(loc="outside upper left", ncols=2, frameon=False)
        drawing.savefig(written, format="svg", transparent=True)
    svg = written.getvalue()
    head = svg.index(">", svg.index("<svg"))
    box = re.search(r'viewBox="([^"]+)"', svg[:head])
    content = Html(_NEEDLESS.sub("", svg[head + 1 : svg.rindex("</svg>")]).strip())
    plot = element("svg", content, class_="plot", viewBox=box[1] if box else None, role="img", aria_label=says)
    return element("figure", element("div", plot, class_="scrolls"), element("figcaption", caption))


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
