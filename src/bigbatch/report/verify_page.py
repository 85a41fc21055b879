"""A verification as a page: the verdict, the causes with their remedies, and each parameter with its rounding."""

from collections.abc import Sequence

from bigbatch.report.page import Html, element, opening, page, paragraphs, section, table
from bigbatch.verification.result import Difference, Verification, header, headline, row

_LISTED = 12  # parameters, before the rest is folded away


def verify_page(found: Verification, *, name: str) -> str:
    """Return the page of a verification; `name` is that of the file or the model."""
    verdict, _, said = headline(found).partition(": ")
    return page(
        f"{name}: bigbatch verify",
        opening("bigbatch verify", name, f"{said[0].upper()}{said[1:]}", verdict=verdict, good=found.exact),
        *([section("Why, and what to do", *map(_cause, map(str, found.causes)))] if found.causes else []),
        _figures(found),
        *([section("To know", paragraphs(found.notes), kind="notes")] if found.notes else []),
    )


def _cause(text: str) -> Html:
    heading, _, body = text.partition("\n")
    return element("article", element("h3", heading), element("p", body, class_="remedy"), class_="cause")


def _figures(found: Verification) -> Html:
    def rows(some: Sequence[Difference], caption: str) -> Html:
        marks = [None if each.exact else "wrong" for each in some]
        return table(header(found.dtype), [row(each) for each in some], caption=caption, marks=marks)

    first, rest = found.worst_first[:_LISTED], found.worst_first[_LISTED:]
    summary = element("summary", f"{len(rest):,} more, each nearer to the big batch's")
    folded = [element("details", summary, rows(rest, "The other parameters"))] if rest else []
    caption = "Relative differences, and what rounding alone makes of the big batch; the worst first"
    return section("Every parameter and its rounding", rows(first, caption), *folded)
