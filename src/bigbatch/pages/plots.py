"""Draw with matplotlib, for a page: inline SVG whose colours are the page's own, light or dark, and follow it."""

import math
import re
import warnings
from collections.abc import Callable
from io import StringIO
from typing import TYPE_CHECKING, Any

from bigbatch.errors import ConfigurationError
from bigbatch.pages.markup import Html, element

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Annotation

# Stand-ins, which no one would draw with, for the colours that style.css names.
INK, MUTED, LINE, ACCENT, SECOND, GOOD, BAD, PAPER, SHADE = (f"#0{n}0{n}0{n}" for n in range(1, 10))
_NAMES = dict(
    zip(
        (INK, MUTED, LINE, ACCENT, SECOND, GOOD, BAD, PAPER, SHADE),
        ("ink", "muted", "line", "accent", "second", "good", "bad", "paper", "shade"),
        strict=True,
    )
)
_COLOUR = re.compile(r"(fill|stroke): (#0\d0\d0\d)\b")
_POINTS = 72  # to an inch: with as many dots, an SVG's units are a page's pixels
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # words stay words: they can be selected, and take the page's typeface
    "font.size": 12.5,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": LINE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 1.0,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": LINE,
    "grid.linewidth": 0.7,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "legend.frameon": False,
    "legend.handletextpad": 0.4,
    "legend.borderaxespad": 0.0,
    "text.parse_math": False,  # a name with two $ in it is a name
}

# Where words may stand beside a point: how far, and which of their sides is turned to it.
_AROUND = (
    (13, 13, "left", "bottom"),
    (-13, 13, "right", "bottom"),
    (13, -13, "left", "top"),
    (-13, -13, "right", "top"),
    (0, 15, "center", "bottom"),
    (0, -15, "center", "top"),
    (-15, 30, "right", "bottom"),
    (15, 30, "left", "bottom"),
)
Draw = Callable[["Axes", bool], None]
"""Draws into axes; the second argument says whether they are narrow, as on a telephone."""


def require_matplotlib() -> None:
    """Raise where there is nothing to draw with, before anything is measured for it."""
    try:
        import matplotlib.figure  # noqa: F401, PLC0415 - an extra's, and slow to import
    except ImportError as error:
        msg = (
            "--html draws its plots with matplotlib, which is not installed.\n"
            "Install it:  pip install matplotlib        (or, with all of the extra:  pip install 'bigbatch[html]')"
        )
        raise ConfigurationError(msg) from error


def figure(draw: Draw, *, name: str, heights: tuple[int, int], says: str, caption: str) -> Html:
    """Return a plot, drawn twice: for a wide page and for a narrow one.

    Args:
        draw: draws it.
        name: unlike that of any other plot on the page.
        heights: in pixels, of the wide one and of the narrow one.
        says: what it shows, for who cannot see it.
        caption: stands below it.
    """
    wide = _svg(draw, f"{name}-wide", says, (760, heights[0]), narrow=False)
    narrow = _svg(draw, f"{name}-narrow", says, (360, heights[1]), narrow=True)
    return element("figure", wide, narrow, element("figcaption", caption))


def legend(axes: "Axes", *, columns: int) -> None:
    """Say what is what, above the plot and from the page's left edge on."""
    axes.figure.legend(loc="outside upper left", ncols=columns, borderaxespad=0.2)


def decades(axes: "Axes", low: float, high: float, *, most: int) -> None:
    """Write powers of ten under a plot as they are written in code; matplotlib would write them as formulas."""
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    apart = max(1, -(-(last - first + 1) // most))
    powers = range(first, last + 1, apart)
    axes.set_xticks([10.0**power for power in powers], [f"1e{power}" for power in powers])
    axes.set_xticks([], minor=True)
    axes.set_xlim(low, high)  # ticks may have widened it


def beside(axes: "Axes", said: str, at: tuple[float, float], **style: Any) -> "Annotation":
    """Write beside a point, on the side where least is drawn: no word stands on a line, nor outside of the plot."""
    whole = axes.get_figure(root=True)
    if whole is not None:
        whole.draw_without_rendering()  # so that places on the page are known
    tries = [
        axes.annotate(said, at, (x, y), textcoords="offset points", ha=across, va=along, **style)
        for x, y, across, along in _AROUND
    ]
    crossed = [_crossed(axes, each) for each in tries]
    chosen = crossed.index(min(crossed))
    for place, each in enumerate(tries):
        if place != chosen:
            each.remove()
    return tries[chosen]


def _crossed(axes: "Axes", words: "Annotation") -> int:
    """Count the lines that run through some words; outside of the plot there might be anything."""
    box = words.get_window_extent()
    inside = axes.bbox
    lines = [line for line in axes.get_lines() if line.get_linestyle() not in {"None", "none", ""}]
    paths = [line.get_transform().transform_path(line.get_path()) for line in lines]
    through = sum(bool(path.intersects_bbox(box, filled=False)) for path in paths)
    out = bool(box.x0 < inside.x0 or box.x1 > inside.x1 or box.y0 < inside.y0 or box.y1 > inside.y1)
    return through + (len(lines) + 1) * out


def _svg(draw: Draw, name: str, says: str, size: tuple[int, int], *, narrow: bool) -> Html:
    import matplotlib as mpl  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415 - not pyplot, which keeps figures and picks a window system

    written = StringIO()
    with warnings.catch_warnings(), mpl.rc_context({**_SETTINGS, "svg.hashsalt": name}):
        warnings.simplefilter("ignore")  # of letters that matplotlib's own typeface lacks: the page's will have them
        drawing = Figure(figsize=(size[0] / _POINTS, size[1] / _POINTS), dpi=_POINTS, layout="constrained")
        axes = drawing.subplots()
        axes.tick_params(length=0)
        draw(axes, narrow)
        drawing.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    return _inline(written.getvalue(), "narrow" if narrow else "wide", says)


def _inline(svg: str, kind: str, says: str) -> Html:
    """Take the drawing out of its file, and have its colours follow the page."""
    inside = svg[svg.index("<svg") :]
    box = re.search(r'viewBox="([^"]+)"', inside)
    content = inside[inside.index(">") + 1 : inside.rindex("</svg>")]
    for needless in (r"<metadata>.*?</metadata>", r"<style.*?</style>", r'(?<=<g) id="[^"]*"'):
        content = re.sub(needless, "", content, flags=re.DOTALL)
    follows = _COLOUR.sub(lambda found: f"{found[1]}: var(--{_NAMES[found[2]]})", content)
    return element(
        "svg",
        Html(follows.strip()),
        class_=f"plot {kind}",
        viewBox=box[1] if box else None,
        role="img",
        aria_label=says,
    )
