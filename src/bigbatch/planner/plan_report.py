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
        inside = f"within {human(self.budget)} on {self.device}."
        if self.size is None:
            return f"Not one sample of this batch of {self.batch_size:,} fits {inside}"
        how = "all at once, without accumulation" if self.steps == 1 else f"micro-batches of {self.size:,}"
        steps = "" if self.steps == 1 else f", {self.steps:,} steps"
        return f"Batch of {self.batch_size:,}: {how}{steps}, {inside}"


def table(rows: Sequence[Row], chosen: int | None) -> list[str]:
    """Return the lines of the table, numbers to the right and words to the left; the chosen size is marked."""
    cells = [("micro-batch", "steps", "predicted peak", "measured peak", "waits beside", "ms/sample", "")]
    for row in rows:
        mark = "<- take this" if row.size == chosen else "" if row.fits else "does not fit"
        time = "" if row.seconds_per_sample is None else f"{1e3 * row.seconds_per_sample:,.3g}"
        sizes = (row.predicted_bytes, row.measured_bytes, row.waiting_bytes)
        told, measured, waiting = ("" if size is None else human(size) for size in sizes)
        cells.append((f"{row.size:,}", f"{row.steps:,}", told, measured, waiting, time, mark))
    columns = [column for column in zip(*cells, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    if not columns[-1][0]:
        widths[-1] = 0  # words
    return ["  ".join(map(str.rjust, line, widths)).rstrip() for line in zip(*columns, strict=True)]


def advice(choice: Choice, resident: int) -> tuple[str, ...]:
    """Say when something other than accumulation is the better answer."""
    said = []
    whole, chosen = choice.seconds(choice.largest), choice.seconds(choice.size)
    if choice.fits_whole and choice.size == choice.largest:
        timed = "" if chosen is None else " and nothing is faster"
        said.append(f"The whole batch fits{timed}: no accumulation is needed.")
    elif choice.fits_whole and whole is not None and chosen is not None:
        how, why = (f"{whole / chosen - 1:.0%} slower", "for speed or ") if whole > TIE * chosen else ("as fast", "")
        said.append(f"The whole batch fits, too, and is {how}: accumulate {why}to keep memory free, not for need.")
    one, room = choice.probes[0].peak_bytes, choice.limit - resident
    half = choice.seconds(max(1, choice.size // 2))
    if one is not None and choice.size == 1 < choice.largest and one - resident > _MOST * room:
        said.append(
            f"One sample takes {human(one - resident)} of the {human(room)} that weights, gradients and optimizer "
            "state leave: activation checkpointing (torch.utils.checkpoint) would let more samples through at once."
        )
    elif not choice.fits_whole and choice.size > 1 and chosen and half and chosen < _STILL_FALLING * half:
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


def advice_when_nothing_fits(resident: int, one: int | None, limit: int) -> tuple[str, ...]:
    """Say what is too large, by how much, and what makes it smaller."""
    found = f"Weights, gradients, optimizer state and all else that this process holds take {human(resident)}"
    if resident > limit:
        what = f"{human(resident - limit)} more than the {human(limit)} there are to use: no micro-batch changes that"
        remedy = "Train fewer weights (LoRA), take an optimizer with less state (SGD has none, Adafactor little), hold "
        remedy += "weights in bfloat16, or shard them over several devices (FSDP)."
        return f"{found}, {what}.", remedy
    short = "" if one is None else f" and is {human(one - limit)} short"
    remedy = "Use activation checkpointing (torch.utils.checkpoint around each block), shorter sequences or smaller "
    remedy += "images, or torch.autocast(device, dtype=torch.bfloat16)."
    return f"{found} of {human(limit)}; one sample does not fit into the {human(limit - resident)} left{short}.", remedy
