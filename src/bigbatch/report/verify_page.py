"""A verification as a page: the verdict, the causes with their remedies, and each parameter with its rounding."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bigbatch.report.page import Html, element, figure, opening, page, paragraphs, section, table
from bigbatch.verification.result import Difference, Verification, cause_text, header, headline, number, row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DRAWN = 30  # parameters; of more, the worst ones
_LISTED = 12  # before the rest is folded away
_LONGEST = 36  # letters of a name at a plot


def verify_page(found: Verification, *, name: str) -> str:
    """Return the page of a verification; `name` is that of the file or the model."""
    causes = [_cause(cause_text(found, place)) for place in range(len(found.causes))]
    worst_first = sorted(found.differences, key=lambda each: (-each.excess, -each.difference))
    verdict, _, said = headline(found).partition(": ")
    lead = f"{said[0].upper()}{said[1:]}" if said else verdict
    return page(
        f"{name}: bigbatch verify",
        opening("bigbatch verify", name, lead, verdict=verdict if said else "", good=found.exact),
        *([section("Why, and what to do", *causes)] if causes else []),
        *([_differences(found, worst_first), _listed(found, worst_first)] if worst_first else []),
        *([section("To know", paragraphs(found.notes), kind="notes")] if found.notes else []),
    )


def _cause(text: str) -> Html:
    heading, _, body = text.partition("\n")
    return element("article", element("h3", heading), element("p", body, class_="remedy"), class_="cause")


def _dtype(found: Verification) -> str:
    return "float64" if found.in_float64 else found.dtype


def _floor(each: Difference) -> float:
    """Return the measured rounding that it is compared with."""
    return each.own_floor if math.isnan(each.exact_difference) else each.exact_floor


def _differences(found: Verification, worst_first: Sequence[Difference]) -> Html:
    shown = worst_first[:_DRAWN]
    known = [n for each in shown for n in (each.difference, _floor(each), each.tolerance) if 0 < n < math.inf]
    low, high = min(known, default=1e-17) / 4, max(known, default=1.0) * 4

    def draw(axes: "Axes") -> None:
        axes.set_xscale("log")
        axes.set_xlim(low, high)
        widths = [min(each.tolerance, high) for each in shown]
        axes.barh(range(len(shown)), widths, color="lightgray", label="what rounding explains")
        axes.plot([_floor(each) for each in shown], range(len(shown)), "|", color="gray", label="measured rounding")
        for exact, style, color, word in ((True, "o", "tab:blue", "within"), (False, "D", "tab:red", "beyond")):
            points = [(min(max(e.difference, low), high), at) for at, e in enumerate(shown) if e.exact == exact]
            if points:
                axes.plot(*zip(*points, strict=True), style, color=color, label=f"difference, {word}", clip_on=False)
        names = [n if len(n) <= _LONGEST else f"…{n[1 - _LONGEST :]}" for n in (each.name for each in shown)]
        axes.set_yticks(range(len(shown)), names, parse_math=False)
        axes.invert_yaxis()
        axes.set_xlabel(f"relative difference, in {_dtype(found)}")

    worst, left = shown[0], len(worst_first) - len(shown)
    rest = f" The {left:,} that are not shown lie nearer." if left else ""
    says = (
        "Relative difference of each parameter's gradient from the big batch's, with what rounding explains. "
        f"{sum(not each.exact for each in worst_first)} of {len(worst_first)} lie beyond it. The worst is "
        f"{worst.name}: {number(worst.difference)}, where rounding explains {number(worst.tolerance)}.{rest}"
    )
    caption = (
        "The bar ends where two roundings of one gradient may lie apart; the tick in it was measured. A point beyond "
        f"the bar is a mistake, not rounding.{rest}"
    )
    plot = figure(draw, name="differences", height=1.4 + 0.28 * len(shown), says=says, caption=caption)
    return section("Every parameter and its rounding", plot)


def _listed(found: Verification, worst_first: Sequence[Difference]) -> Html:
    def rows(some: Sequence[Difference], caption: str) -> Html:
        marks = [None if each.exact else "wrong" for each in some]
        return table(header(found.dtype), [row(each) for each in some], caption=caption, marks=marks)

    first, rest = worst_first[:_LISTED], worst_first[_LISTED:]
    summary = element("summary", f"{len(rest):,} more, each nearer to the big batch's")
    folded = [element("details", summary, rows(rest, "The other parameters"))] if rest else []
    caption = "Relative differences, and what rounding alone makes of the big batch; the worst first"
    return section("Figures", rows(first, caption), *folded)
