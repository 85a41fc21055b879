"""Cut batches against one big batch in float64: how far gradients, outputs and running statistics are from it."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from textwrap import shorten

import torch

from benchmarks.gpu_figures import UNKNOWN
from benchmarks.lockstep_exact_cases import Compared, Make, cases
from benchmarks.lockstep_libraries import imported
from benchmarks.lockstep_racing import TIME_IS_OVER, say
from benchmarks.lockstep_scale import Scale
from benchmarks.lockstep_truth import Activations, distance
from benchmarks.racing import Outcome, attempt, release
from benchmarks.report import Grid

BAR = 1e-12
TELLING = 1e-6  # plain accumulation is wrong by more, or the case shows nothing


@dataclass(frozen=True)
class Exact:
    """One model or loss, in one way of keeping activations."""

    name: str
    library: str
    activations: str
    gradient: float | None = None
    outputs: float | None = None
    statistics: float | None = None
    plain: float | None = None  # the gradient of plain accumulation
    seconds: float | None = None
    error: str = ""
    bar: float = BAR
    met: str = field(init=False, default="")

    def __post_init__(self) -> None:
        """Say whether all that there is to compare is within the bar."""
        object.__setattr__(self, "met", self._verdict())

    def _verdict(self) -> str:
        if self.gradient is None:
            return "no (not measured)"
        if self.plain is not None and self.plain < TELLING:
            return "no (plain is right, too)"
        return "yes" if max(self.gradient, self.outputs or 0.0, self.statistics or 0.0) <= self.bar else "no"


def measure(scale: Scale, *, end: float) -> Iterator[tuple[Grid, list[Exact]]]:
    """Yield the table again with every row that is added."""
    imported("transformers")  # seconds, which are no row's
    rows: list[Exact] = []
    makes = cases(scale)
    # The first way of each comes first, so that a run that is cut off has seen every model.
    for turn in range(2):
        for name, make in makes.items():
            if time.perf_counter() <= end:
                rows.extend(_row(scale, name, make, turn))
            elif turn == 0 or not rows[-1].error:
                rows.append(Exact(name if turn == 0 else "the others", "", "", error=TIME_IS_OVER))
            yield _grid(scale, rows), list(rows)


def _row(scale: Scale, name: str, make: Make, turn: int) -> list[Exact]:
    """Return the row of one model's first or second way of keeping activations, where it has so many."""
    outcome = Outcome()
    found: list[Exact] = []
    library, activations, start = "", "", time.perf_counter()
    with attempt(outcome):
        compared = make()
        if turn >= len(compared.activations):
            return []
        library, activations = compared.library, compared.activations[turn]
        found.append(_compared(scale, compared, compared.activations[turn], start))
    release()
    say(f"exact: {name} {activations} took {time.perf_counter() - start:.1f} s {outcome.error}")
    if not found and (turn == 0 or activations):
        found.append(Exact(name, library, activations, error=outcome.error))
    return found


def _compared(scale: Scale, compared: Compared, activations: Activations, start: float) -> Exact:
    case, size = compared.case, scale.exact_micro_batch
    plain = distance(case.accumulated(size, torch.float64), case.truth)
    ours = distance(case.ours(size, torch.float64, activations), case.truth)
    return Exact(
        compared.name,
        compared.library,
        activations,
        gradient=ours.gradient,
        outputs=ours.outputs,
        statistics=ours.statistics,
        plain=plain.gradient,
        seconds=time.perf_counter() - start,
    )


def _grid(scale: Scale, rows: list[Exact]) -> Grid:
    size, micro = scale.exact, scale.exact_micro_batch
    title = f"Distance from one big batch, float64, {size.samples} samples in micro-batches of at most {micro}"
    header = ("", "from", "activations", "gradient", "outputs", "statistics", "bar", "met", "plain's gradient", "note")
    return Grid(
        title,
        header,
        [
            (
                row.name,
                row.library,
                row.activations,
                *(_power(each) for each in (row.gradient, row.outputs, row.statistics)),
                f"≤ {BAR:.0e}",
                row.met,
                _power(row.plain),
                shorten(row.error, 60, placeholder=" …"),
            )
            for row in rows
        ],
    )


def _power(number: float | None) -> str:
    return UNKNOWN if number is None else f"{number:.1e}"
