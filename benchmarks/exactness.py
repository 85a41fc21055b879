"""How far accumulation ends from the true big batch: nine cases, six contestants, one epoch each, in float64.

python -m benchmarks.exactness [--json] [--out FOLDER]
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from benchmarks.cases import Case, all_cases
from benchmarks.contestants import CONTESTANTS, Contestant, true_big_batch
from benchmarks.machine import this_machine
from benchmarks.report import RESULTS, Grid, Report, progress
from bigbatch.errors import BatchNormError, LossError

GOAL = 1e-12
REFUSED = "refused: see BigStep"
OURS = {"Accumulator", "BigStep"}
NOTES = [
    (
        "Relative distance of the final weights from those of the true big batch, `|w − w*| / |w*|`, after one epoch of"
        " SGD in float64, where rounding is about 1e-16."
    ),
    (
        "Refused: `Accumulator` raises an error that names the cause instead of training on a wrong gradient. These"
        " cases couple the samples of a batch: `BigStep`, which has all of it, runs its micro-batches in lock-step. The"
        " last two are written with `across` there."
    ),
    (
        "HF Trainer is exact on masked tokens for models whose forward takes `num_items_in_batch`, and where a"
        " `compute_loss_func` uses it; with a model and loss of one's own it divides by the number of micro-batches."
    ),
]


@dataclass(frozen=True)
class Distance:
    """One cell of the table."""

    case: str
    contestant: str
    distance: float | None  # None where the contestant refused
    refusal: str | None = None  # the name of the error

    @property
    def met(self) -> bool:
        """Whether it is exact, or honest about not being so."""
        return self.distance is None or self.distance <= GOAL

    @property
    def text(self) -> str:
        """The cell as it is read."""
        if self.distance is None:
            return REFUSED
        return f"{self.distance:.0e}" if self.distance < GOAL else f"{self.distance:.2g}"


def measure(case: Case, name: str, train: Contestant, truth: Tensor) -> Distance:
    """Train once and compare; refusing is right where samples are coupled, and ends the benchmark elsewhere."""
    try:
        weights = weights_of(train(case))
    except (BatchNormError, LossError) as refusal:
        if not case.coupled or name != "Accumulator":
            raise
        return Distance(case.name, name, None, type(refusal).__name__)
    return Distance(case.name, name, float((weights - truth).norm() / truth.norm()))


def weights_of(model: nn.Module) -> Tensor:
    """Return all parameters as one vector."""
    return parameters_to_vector(model.parameters()).detach()


def measure_all() -> list[Distance]:
    """Every cell, row by row."""
    cases = list(all_cases())
    cells: list[Distance] = []
    with progress() as bar:
        task = bar.add_task("exactness", total=len(cases) * len(CONTESTANTS))
        for case in cases:
            truth = weights_of(true_big_batch(case))
            for name, train in CONTESTANTS.items():
                bar.update(task, description=f"{case.name}: {name}")
                cells.append(measure(case, name, train, truth))
                bar.advance(task)
    return cells


def grid(cells: list[Distance]) -> Grid:
    """Arrange cells as DESIGN.md's table."""
    names = tuple(dict.fromkeys(cell.contestant for cell in cells))
    by_place = {(cell.case, cell.contestant): cell.text for cell in cells}
    cases = dict.fromkeys(cell.case for cell in cells)
    rows = [(case, *(by_place[case, name] for name in names)) for case in cases]
    return Grid("One epoch, accumulated against the true big batch", ("case", *names), rows)


def main() -> int:
    """Measure, show, keep; 1 where bigbatch trained on a wrong gradient."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for exactness.json and exactness.md")
    arguments = parser.parse_args()
    cells = measure_all()
    report = Report("exactness", this_machine(), [grid(cells)], NOTES, list(cells))
    report.write(arguments.out)
    report.show(as_json=arguments.json)
    return 0 if all(cell.met for cell in cells if cell.contestant in OURS) else 1


if __name__ == "__main__":
    sys.exit(main())
