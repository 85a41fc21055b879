"""What a plan says: its figures, its table and its advice, as plain text."""

from collections.abc import Sequence
from dataclasses import dataclass

from bigbatch.memory.budget import human
from bigbatch.memory.search import TIE, Choice, Probe


@dataclass(frozen=True)
class Row:
    """One size of micro-batch."""

    size: int
    steps: int
    peak_bytes: int | None  # measured or traced; None: it ran out of memory
    seconds_per_sample: float | None
    fits: bool


@dataclass(frozen=True)
class Plan:
    """The size to take for a batch, and why.

    `print(plan)` shows it as a table; `plan.size` is what to pass on: `BigStep(..., micro_batch_size=plan.size)`.
    """

    batch_size: int
    size: int | None  # None: not even one sample fits
    steps: int | None
    peak_bytes: int | None  # of a micro-step of that size
    budget: int
    resident_bytes: int  # held at any size: weights, gradients, optimizer state, and all else of this process
    device: str
    measured: bool  # on the device; otherwise traced
    rows: tuple[Row, ...]
    advice: tuple[str, ...]
    notes: tuple[str, ...]
    refused: bool = False  # whether a step would refuse this loss, whatever its size

    def __str__(self) -> str:
        return "\n".join([self.headline(), "", *aligned(self.table()), "", *self.advice, *self.notes])

    def headline(self) -> str:
        """Say the recommendation in one line."""
        inside = f"within {human(self.budget)} on {self.device}."
        if self.size is None:
            return f"Not one sample of this batch of {self.batch_size:,} fits {inside}"
        how = f"micro-batches of {self.size:,}, {self.steps:,} steps"
        how = "all at once, without accumulation" if self.steps == 1 else how
        return f"Batch of {self.batch_size:,}: {how}, {inside}"

    def table(self) -> list[list[str]]:
        """Return the titles of the columns and a row for each size, without columns that nothing is in."""
        peak = "measured peak" if self.measured else "predicted peak"
        cells = [["micro-batch", "steps", peak, "ms/sample", ""]]
        for each in self.rows:
            mark = "<- take this" if each.size == self.size else "" if each.fits else "does not fit"
            time = "" if each.seconds_per_sample is None else f"{1e3 * each.seconds_per_sample:,.3g}"
            peak = "out of memory" if each.peak_bytes is None else human(each.peak_bytes)
            cells.append([f"{each.size:,}", f"{each.steps:,}", peak, time, mark])
        filled = [column for column in zip(*cells, strict=True) if any(column[1:])]
        return list(map(list, zip(*filled, strict=True)))


def row(probe: Probe, total: int, limit: int) -> Row:
    """Return the row of a size that was tried, for a batch of `total` samples."""
    time = probe.seconds / probe.size if probe.seconds and probe.peak_bytes else None
    return Row(probe.size, -(-total // probe.size), probe.peak_bytes, time, probe.fits(limit))


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table: the first column to the left, all others to the right."""
    first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    return ["  ".join([row[0].ljust(first), *map(str.rjust, row[1:], widths)]).rstrip() for row in rows]


def advice(choice: Choice) -> tuple[str, ...]:
    """Say when accumulation is not needed."""
    if choice.size == choice.largest:
        return ("The whole batch fits: no accumulation is needed.",)
    whole, chosen = choice.seconds(choice.largest), choice.seconds(choice.size)
    if not choice.fits_whole or whole is None or chosen is None:
        return ()
    how, why = (f"{whole / chosen - 1:.0%} slower", "for speed or ") if whole > TIE * chosen else ("as fast", "")
    return (f"The whole batch fits, too, and is {how}: accumulate {why}to keep memory free, not for need.",)
