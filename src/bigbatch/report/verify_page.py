"""A verification to look at: the verdict, the causes with their remedies, and every parameter beside its rounding."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bigbatch.report.markup import Html, element, paragraphs, table
from bigbatch.report.page import figures, opening, page, section
from bigbatch.report.plots import figure
from bigbatch.verifying.table import header, headline, number, row, share_text
from bigbatch.verifying.verification import Difference, Verification

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DRAWN = 30  # parameters; of more, the worst ones
_LISTED = 12  # before the rest is folded away
_LONGEST = 36  # letters of a name beside a plot


def verify_page(found: Verification, *, name: str) -> str:
    """Return the page of a verification; `name` is that of the file or the model."""
    causes = [section("Why, and what to do", *(_cause(found, at) for at in range(len(found.causes))))]
    notes = [element("section", element("h2", "To know"), paragraphs(found.notes), class_="notes")]
    verdict, _, said = headline(found).partition(": ")
    return page(
        f"{name}: bigbatch verify",
        opening(
            "bigbatch verify",
            name,
            f"{said[0].upper()}{said[1:]}" if said else verdict,
            verdict=verdict if said else "",
            tone="good" if found.exact else "bad",
        ),
        figures(_figures(found)),
        *(causes if found.causes else []),
        *([_differences(found)] if found.differences else []),
        *([_listed(found)] if found.differences else []),
        *(notes if found.notes else []),
    )


def _figures(found: Verification) -> list[tuple[str, str, str]]:
    worst = found.worst
    wrong = sum(not each.exact for each in found.differences)
    proved = f"{found.samples_proved:,}"
    of_all = "samples, the whole batch" if found.samples_proved == found.samples else f"of {found.samples:,} samples"
    cut = [
        ("proved on", proved, of_all),
        ("micro-batches", f"{len(found.micro_batches):,}", _sizes(found.micro_batches)),
    ]
    if worst is None:
        return cut
    dtype = "float64" if found.in_float64 else found.dtype
    loss = [number(abs(found.loss[1] - found.loss[0]) / abs(found.loss[0] or 1.0))]
    return [
        ("largest difference", number(_difference(worst)), f"in {dtype}, of the gradient's size"),
        ("beyond rounding", f"{wrong:,}", f"of {len(found.differences):,} parameters"),
        *cut,
        *([("loss differs by", loss[0], "of its size")] if all(map(math.isfinite, found.loss)) else []),
    ]


def _sizes(sizes: Sequence[int]) -> str:
    shown = ", ".join(map(str, sizes[:6]))
    return f"of {shown}{', …' if len(sizes) > 6 else ''} samples"  # noqa: PLR2004


def _cause(found: Verification, at: int) -> Html:
    cause = found.causes[at]
    where = (" at ", element("span", cause.where, class_="where")) if cause.where else ()
    share = element("span", f" {share_text(found, at)}", class_="share")
    return element(
        "article",
        element("h3", f"{at + 1}. {cause.kind}", *where, share),
        paragraphs(cause.found.splitlines()),
        element("p", cause.remedy, class_="remedy"),
        class_="cause",
    )


def _difference(each: Difference) -> float:
    """What the verdict is about: in float64, where the model can run in it."""
    return each.own_difference if math.isnan(each.exact_difference) else each.exact_difference


def _floor(each: Difference) -> float:
    """What rounding alone was measured to make of it."""
    return each.own_floor if math.isnan(each.exact_difference) else each.exact_floor


def _worst_first(found: Verification) -> list[Difference]:
    return sorted(found.differences, key=lambda each: (-each.excess, -_difference(each)))


def _differences(found: Verification) -> Html:
    shown = _worst_first(found)[:_DRAWN]
    dtype = "float64" if found.in_float64 else found.dtype
    known = [n for each in shown for n in (_difference(each), _floor(each), each.tolerance) if 0 < n < math.inf]
    low, high = min(known, default=1e-17) / 4, max(known, default=1.0) * 4

    def draw(axes: "Axes") -> None:
        axes.set_xscale("log")
        axes.set_xlim(low, high)
        axes.barh(
            range(len(shown)),
            [min(each.tolerance, high) for each in shown],
            color="lightgray",
            label="what rounding explains",
        )
        axes.plot([_floor(each) for each in shown], range(len(shown)), "|", color="gray", label="measured rounding")
        for right, style, word in ((True, "o", "within"), (False, "D", "beyond")):
            points = [(min(max(_difference(e), low), high), at) for at, e in enumerate(shown) if e.exact == right]
            if points:
                colour = "tab:blue" if right else "tab:red"
                axes.plot(*zip(*points, strict=True), style, color=colour, label=f"difference, {word}", clip_on=False)
        axes.set_yticks(range(len(shown)), [_short(each.name) for each in shown], parse_math=False)
        axes.invert_yaxis()
        axes.set_xlabel(f"relative difference, in {dtype}")

    left = len(found.differences) - len(shown)
    rest = f" The {left:,} that are not shown lie nearer." if left else ""
    worst = shown[0]
    says = (
        f"Relative difference of each parameter's gradient from the big batch's, beside what rounding explains. "
        f"{sum(not each.exact for each in found.differences)} of {len(found.differences)} lie beyond it. The worst is "
        f"{worst.name}: {number(_difference(worst))}, where rounding explains {number(worst.tolerance)}.{rest}"
    )
    caption = (
        "The bar ends where two roundings of one gradient may lie apart; the tick in it was measured, for each "
        f"parameter. A point beyond the bar is a mistake, not rounding.{rest}"
    )
    plot = figure(draw, name="differences", height=1.4 + 0.28 * len(shown), says=says, caption=caption)
    return section("Every parameter beside its rounding", plot)


def _short(name: str) -> str:
    """Keep the end of a long name, which tells its parameter from its neighbors."""
    return name if len(name) <= _LONGEST else f"…{name[1 - _LONGEST :]}"


def _listed(found: Verification) -> Html:
    ordered = _worst_first(found)
    head = header(found.dtype)
    first, rest = ordered[:_LISTED], ordered[_LISTED:]

    def rows(some: Sequence[Difference], caption: str) -> Html:
        marks = [None if each.exact else "wrong" for each in some]
        return table(head, [row(each) for each in some], caption=caption, marks=marks)

    folded = (
        element(
            "details",
            element("summary", f"{len(rest):,} more, each nearer to the big batch's"),
            rows(rest, "The other parameters"),
        ),
    )
    caption = "Relative differences, and what rounding alone makes of the big batch; the worst first"
    return section("Figures", rows(first, caption), *(folded if rest else ()))
