"""What a plan says: its figures, its table and its advice, as plain text."""

from collections.abc import Sequence
from dataclasses import dataclass

from bigbatch.memory.budget import human
from bigbatch.memory.search import TIE, Choice

_MOST = 0.5  # of the room for samples: one sample that takes this much leaves no choice
_MANY_STEPS = 16
_STILL_FALLING = 0.9  # time per sample at the largest size, to that at half of it


REFUSED = "A step would refuse this loss"  # how a note begins that says so


@dataclass(frozen=True)
class Row:
    """One size of micro-batch."""

    size: int
    steps: int
    predicted_bytes: int | None  # by a line through the other sizes, or by tracing
    measured_bytes: int | None
    seconds_per_sample: float | None
    fits: bool
    waiting_bytes: int | None = None  # of other micro-batches, on the device, where they wait for each other


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

    def __str__(self) -> str:
        """Return the table, the recommendation and the advice."""
        return "\n".join([self.headline(), "", *table(self.rows, self.size), "", *self.advice, *self.notes])

    @property
    def refused(self) -> bool:
        """Whether a step would refuse this loss, whatever its size."""
        return any(note.startswith(REFUSED) for note in self.notes)

    def headline(self) -> str:
        """Say the recommendation in one line."""
        inside = f"within {human(self.budget)} on {self.device}"
        batch = f"{self.batch_size:,}"
        if self.size is None:
            return f"Not one sample of this batch of {batch} fits {inside}."
        if self.steps == 1:
            return f"Batch of {batch}: all at once, without accumulation, {inside}."
        return f"Batch of {batch}: micro-batches of {self.size:,}, {self.steps:,} steps, {inside}."


def table(rows: Sequence[Row], chosen: int | None) -> list[str]:
    """Return the lines of the table; the chosen size is marked."""
    cells: list[tuple[str, ...]] = [
        ("micro-batch", "steps", "predicted peak", "measured peak", "waits beside", "ms/sample", "")
    ]
    for row in rows:
        mark = "<- take this" if row.size == chosen else "" if row.fits else "does not fit"
        time = "" if row.seconds_per_sample is None else f"{1e3 * row.seconds_per_sample:,.3g}"
        sizes = (row.predicted_bytes, row.measured_bytes, row.waiting_bytes)
        cells.append((f"{row.size:,}", f"{row.steps:,}", *("" if b is None else human(b) for b in sizes), time, mark))
    return _lines([column for column in zip(*cells, strict=True) if any(column[1:])])


def _lines(columns: Sequence[tuple[str, ...]]) -> list[str]:
    """Put columns side by side: numbers to the right, words to the left."""
    widths = [max(map(len, column)) for column in columns]
    aligned = [
        [cell.ljust(width) if cell.startswith(("<-", "does")) else cell.rjust(width) for cell in column]
        for column, width in zip(columns, widths, strict=True)
    ]
    return ["  ".join(line).rstrip() for line in zip(*aligned, strict=True)]


def advice(choice: Choice, resident: int) -> tuple[str, ...]:
    """Say when something other than accumulation is the better answer."""
    said = []
    whole, chosen = choice.seconds(choice.largest), choice.seconds(choice.size)
    if choice.fits_whole:
        if choice.size == choice.largest:
            timed = " and nothing is faster" if chosen is not None else ""
            said.append(f"The whole batch fits{timed}: no accumulation is needed.")
        elif whole is not None and chosen is not None:
            is_slower = whole > TIE * chosen
            how = f"{whole / chosen - 1:.0%} slower" if is_slower else "as fast"
            why = "for speed or " if is_slower else ""
            said.append(f"The whole batch fits, too, and is {how}: accumulate {why}to keep memory free, not for need.")
    one = choice.probes[0].peak_bytes
    room = choice.limit - resident
    if one is not None and choice.size == 1 < choice.largest and one - resident > _MOST * room:
        said.append(
            f"One sample takes {human(one - resident)} of the {human(room)} that weights, gradients and optimizer "
            "state leave: activation checkpointing (torch.utils.checkpoint) would let more samples through at once."
        )
    elif not choice.fits_whole and _still_faster(choice):
        said.append(
            "Time per sample is still falling at the largest size that fits: activation checkpointing or bf16 autocast "
            "would make room for larger micro-batches; measure whether it pays for its recomputation."
        )
    if choice.steps >= _MANY_STEPS:
        said.append(
            f"{choice.steps:,} steps make one update. Where no recipe fixes the batch size, a smaller batch learns "
            "more from as many samples (Marek et al. 2025, arXiv 2507.07101)."
        )
    return tuple(said)


def _still_faster(choice: Choice) -> bool:
    here, half = choice.seconds(choice.size), choice.seconds(max(1, choice.size // 2))
    return here is not None and half is not None and choice.size > 1 and here < _STILL_FALLING * half


def advice_when_nothing_fits(resident: int, one: int | None, limit: int) -> tuple[str, ...]:
    """Say what is too large, by how much, and what makes it smaller."""
    if resident > limit:
        found = (
            f"Weights, gradients, optimizer state and all else that this process holds take {human(resident)}, "
            f"{human(resident - limit)} more than "
            f"the {human(limit)} there are to use: no size of micro-batch changes that."
        )
        remedy = (
            "Train fewer weights (LoRA), take an optimizer with less state (SGD has none, Adafactor little), hold "
            "weights in bfloat16, or shard them over several devices (FSDP)."
        )
    else:
        missing = "" if one is None else f" and is {human(one - limit)} short"
        found = (
            f"Weights, gradients, optimizer state and all else that this process holds take {human(resident)} of "
            f"{human(limit)}; one sample does not fit into the {human(limit - resident)} left{missing}."
        )
        remedy = (
            "Use activation checkpointing (torch.utils.checkpoint around each block), shorter sequences or smaller "
            "images, or torch.autocast(device, dtype=torch.bfloat16)."
        )
    return found, remedy
