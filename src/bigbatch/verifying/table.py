"""What a verification says, as plain text: a table of the largest differences, the verdict, the causes."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bigbatch.verifying.verification import Difference, Verification

_ROWS = 10
_BY = {
    "BigStep": ", as BigStep accumulates them,",
    "train_window": ", as your train_window accumulates them,",
    "samples": ", weighed by their samples,",
}
_SEEN = 0.005  # of the difference; with less, another cause is so large that it makes none


def text(found: "Verification") -> str:
    """Return all of it; lines are as long as they are."""
    parts = ["\n".join(table(found.differences, found.dtype)), headline(found)]
    parts += [cause_text(found, number) for number in range(len(found.causes))]
    return "\n\n".join([*parts, *found.notes])


def headline(found: "Verification") -> str:
    """Say the verdict in one sentence."""
    samples = f"{found.samples_proved:,} samples"
    if found.samples_proved < found.samples:
        samples = f"{found.samples_proved:,} of {found.samples:,} samples"
    cut = f"{samples} in {len(found.micro_batches):,} micro-batches{_BY[found.accumulated_by]}"
    worst = found.worst
    if worst is None:
        return f"Nothing to compare: no parameter is trained ({cut.rstrip(',')})."
    far = worst.own_difference if math.isnan(worst.exact_difference) else worst.exact_difference
    dtype = "float64" if found.in_float64 else found.dtype
    if found.exact:
        return f"Exact: the gradient of {cut} is the big batch's, to {number(far)} in {dtype}."
    if found.accepted({"randomness"}):
        return f"Equal in distribution: the gradient of {cut} differs from the big batch's by its random numbers alone."
    if worst.exact and found.in_float64:
        if any(cause.kind == "low-precision-sums" for cause in found.causes):
            return (
                f"Exact in float64, not in {found.dtype}: the gradient of {cut} loses more than the big batch's does."
            )
        return (
            f"No proof: the gradient of {cut} came out as the big batch's, to {number(far)} in {dtype}, but see below."
        )
    return f"Not exact: the gradient of {cut} differs from the big batch's, by {number(far)} at {worst.name}."


def cause_text(found: "Verification", place: int) -> str:
    """Say one cause: what it is, where, the evidence and what to type."""
    cause = found.causes[place]
    where = f" at {cause.where}" if cause.where else ""
    return f"{place + 1}. {cause.kind}{where} ({share_text(found, place)})\n{cause.found}\n{cause.remedy}"


def share_text(found: "Verification", place: int) -> str:
    """Say how much of the difference one cause makes."""
    share = found.causes[place].share
    return "hidden behind the others" if share < _SEEN and len(found.causes) > 1 else f"{share:.0%} of the difference"


def table(differences: Sequence["Difference"], dtype: str) -> list[str]:
    """Return the lines of the table, the worst first."""
    shown = sorted(differences, key=lambda each: -each.excess)[:_ROWS]
    cells = [header(dtype), *(row(each) for each in shown)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]).rstrip()
        for line in cells
    ]
    left = len(differences) - len(shown)
    return [*lines, f"and {left:,} more, each nearer to the big batch's"] if left else lines


def header(dtype: str) -> tuple[str, ...]:
    """Name the columns."""
    return ("parameter", "shape", "float64", "rounding", dtype if dtype != "float64" else "own", "rounding")


def row(each: "Difference") -> tuple[str, ...]:
    """Write one parameter's figures."""
    figures = (each.exact_difference, each.exact_floor, each.own_difference, each.own_floor)
    return (each.name, "×".join(map(str, each.shape)) or "1", *map(number, figures))


def number(value: float) -> str:
    """Write a relative difference: two digits are all it has to say."""
    return "-" if math.isnan(value) else "0" if value == 0 else f"{value:.1e}" if value < 0.01 else f"{value:.2g}"  # noqa: PLR2004
