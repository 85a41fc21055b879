"""What each mistake that `bigbatch lint` finds costs, measured on the textbook's experiment.

    python -m benchmarks.lint_consequences

1,008 samples of 10 features, 10→2 linear, SGD 0.1, 63 batches of 16, windows of 4, one epoch in float64. Beside a loop
over true batches of 64, each loop makes one mistake; the figure is how far its weights end from the true ones, relative
to how far those have moved. How large an error is depends on model, rate and data; that it is there does not.
"""

import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.report import Grid, show
from bigbatch_lint.rules import RULES

MICRO, STEPS = 16, 4
BIG = MICRO * STEPS
CLIP = 0.2
Batches = list[tuple[Tensor, Tensor]]
Loop = Callable[["Run"], None]


def data() -> tuple[Tensor, Tensor]:
    """Return the textbook's samples: is their sum above 0?"""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(63 * MICRO, 10, dtype=torch.float64, generator=generator)
    return x, (x.sum(dim=1) > 0).long()


def masked() -> tuple[Tensor, Tensor]:
    """Return the same, with some labels left out, more in some micro-batches than in others."""
    x, y = data()
    generator = torch.Generator().manual_seed(1)
    share = torch.rand(len(y) // MICRO, generator=generator).repeat_interleave(MICRO)
    return x, y.masked_fill(torch.rand(len(y), generator=generator) < share, -100)


@dataclass
class Run:
    """One training: a model, its optimizer, and what comes in."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    micro: Batches
    big: Batches

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean over the targets that are not left out."""
        return F.cross_entropy(self.model(x), y)

    def update(self) -> None:
        """Step and clear."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def fresh(samples: tuple[Tensor, Tensor], *, norm: bool = False) -> Run:
    """Return a training at its beginning, always the same."""
    torch.manual_seed(0)
    layers = [nn.BatchNorm1d(10)] if norm else []
    model = nn.Sequential(*layers, nn.Linear(10, 2)).double()
    x, y = samples
    cut = [list(zip(x.split(size), y.split(size), strict=True)) for size in (MICRO, BIG)]
    return Run(model, torch.optim.SGD(model.parameters(), lr=0.1), *cut)


def true(run: Run) -> None:
    """Train with the big batches themselves."""
    for x, y in run.big:
        run.loss(x, y).backward()
        run.update()


def clipped(run: Run) -> None:
    """Train with the big batches, each gradient clipped."""
    for x, y in run.big:
        run.loss(x, y).backward()
        nn.utils.clip_grad_norm_(run.model.parameters(), CLIP)
        run.update()


def scheduled(run: Run) -> None:
    """Train with the big batches, the rate falling to a tenth over ten updates."""
    schedule = torch.optim.lr_scheduler.LinearLR(run.optimizer, 1.0, 0.1, total_iters=10)
    for x, y in run.big:
        run.loss(x, y).backward()
        run.update()
        schedule.step()


def windows(run: Run, divisor: float = STEPS, phase: int = 1) -> Iterable[bool]:
    """Add up micro-batches; yield whether a window is full."""
    for i, (x, y) in enumerate(run.micro):
        (run.loss(x, y) / divisor).backward()
        yield (i + phase) % STEPS == 0


def tail(run: Run) -> None:
    """Step the leftover as it should be: divided by the number of micro-batches in it."""
    _multiply(run, STEPS / (len(run.micro) % STEPS))
    run.update()


def _multiply(run: Run, factor: float) -> None:
    for p in run.model.parameters():
        if p.grad is not None:
            p.grad *= factor


def no_mistake(run: Run) -> None:
    """The loop by hand, with nothing wrong."""
    for full in windows(run):
        if full:
            run.update()
    tail(run)


def zero_inside(run: Run) -> None:
    """BB101."""
    for i, (x, y) in enumerate(run.micro):
        run.optimizer.zero_grad()
        (run.loss(x, y) / STEPS).backward()
        if (i + 1) % STEPS == 0:
            run.optimizer.step()


def step_each(run: Run) -> None:
    """BB102."""
    for _ in windows(run):
        run.update()


def leftover_dropped(run: Run) -> None:
    """BB103."""
    for full in windows(run):
        if full:
            run.update()


def leftover_whole(run: Run) -> None:
    """BB104."""
    leftover_dropped(run)
    run.update()


def off_by_one(run: Run) -> None:
    """BB105, with the leftover dropped as such loops do."""
    for full in windows(run, phase=0):
        if full:
            run.update()


def never_zeroed(run: Run) -> None:
    """BB106."""
    for full in windows(run):
        if full:
            run.optimizer.step()


def not_scaled(run: Run) -> None:
    """BB201, with the leftover stepped."""
    for full in windows(run, divisor=1):
        if full:
            run.update()
    run.update()


def scaled_twice(run: Run) -> None:
    """BB202, with a leftover that is otherwise right."""
    for full in windows(run, divisor=STEPS**2):
        if full:
            run.update()
    tail(run)


def clip_each(run: Run) -> None:
    """BB301."""
    for full in windows(run):
        nn.utils.clip_grad_norm_(run.model.parameters(), CLIP)
        if full:
            run.update()
    tail(run)


def clip_scaled(run: Run) -> None:
    """BB302: what a GradScaler with its usual first scale does around a clip that it was not told of."""
    scale = 65536.0
    for full in windows(run, divisor=STEPS / scale):
        if full:
            nn.utils.clip_grad_norm_(run.model.parameters(), CLIP)
            _multiply(run, 1 / scale)
            run.update()
    nn.utils.clip_grad_norm_(run.model.parameters(), CLIP)
    _multiply(run, 1 / scale)
    tail(run)


def schedule_each(run: Run) -> None:
    """BB304."""
    schedule = torch.optim.lr_scheduler.LinearLR(run.optimizer, 1.0, 0.1, total_iters=10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch itself sees that the schedule is ahead of the optimizer
        for full in windows(run):
            if full:
                run.update()
            schedule.step()
    tail(run)


@dataclass(frozen=True)
class Cost:
    """How far from the true weights a mistake leads, relative to how far those moved."""

    code: str
    distance: float


MISTAKES: dict[str, tuple[Loop, Loop]] = {
    "none": (no_mistake, true),
    "BB101": (zero_inside, true),
    "BB102": (step_each, true),
    "BB103": (leftover_dropped, true),
    "BB104": (leftover_whole, true),
    "BB105": (off_by_one, true),
    "BB106": (never_zeroed, true),
    "BB201": (not_scaled, true),
    "BB202": (scaled_twice, true),
    "BB203": (no_mistake, true),  # on data with labels left out
    "BB301": (clip_each, clipped),
    "BB302": (clip_scaled, clipped),
    "BB304": (schedule_each, scheduled),
    "BB601": (no_mistake, true),  # on a model with BatchNorm
}


def cost(code: str) -> Cost:
    """Train with a mistake and without."""
    mistaken, right = MISTAKES[code]
    samples = masked() if code == "BB203" else data()
    runs = [fresh(samples, norm=code == "BB601") for _ in range(3)]
    mistaken(runs[0])
    right(runs[1])
    wrong, good, start = (torch.cat([p.detach().flatten() for p in run.model.parameters()]) for run in runs)
    return Cost(code, float((wrong - good).norm() / (good - start).norm()))


def costs() -> list[Cost]:
    """What each mistake costs."""
    return [cost(code) for code in MISTAKES]


def grid(found: list[Cost]) -> Grid:
    """Return the table."""
    rows: list[tuple[str, ...]] = [
        (f"{each.code} {RULES[each.code].slug}" if each.code in RULES else "no mistake", f"{each.distance:.2g}")
        for each in found
    ]
    return Grid("What a mistake costs", ("", "distance from the true weights after one epoch"), rows)


def main() -> int:
    """Measure and show."""
    show(grid(costs()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
