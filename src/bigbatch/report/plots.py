"""Plots of a page: matplotlib's own look, as inline SVG."""

import re
import warnings
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigbatch.errors import ConfigurationError
from bigbatch.report.page import Html, element

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH = 8.0  # inches
_NEEDLESS = re.compile(r'<metadata>.*?</metadata>|<style.*?</style>|(?<=<g) id="[^"]*"', re.DOTALL)


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
