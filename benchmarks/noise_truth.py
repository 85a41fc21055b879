"""A problem whose noise scale is known in closed form: linear regression on Gaussian inputs.

inputs x of `width` features, each of variance 1; targets of variance `spread`²; weights w, which never move

gradient of one sample's squared error       2 (w·x − y) x
its mean                                G  = 2 w
its second moment                   E|g|²  = 4 ((width + 2) |w|² + width · spread²)
noise scale           (E|g|² − |G|²)/|G|²  = width + 1 + width · spread² / |w|²
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bigbatch import Accumulator, GradientNoise
from bigbatch.noise.noise_report import NoiseReport

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Regression:
    """Inputs of so many features, targets of such a spread, weights of such a length."""

    width: int = 20
    spread: float = 1.0
    length: float = 1.0

    @property
    def noise_scale(self) -> float:
        """What should be found, in samples."""
        return self.width + 1 + self.width * (self.spread / self.length) ** 2

    def model(self) -> nn.Linear:
        """Return the model that is measured."""
        model = nn.Linear(self.width, 1, bias=False).double()
        with torch.no_grad():
            model.weight.fill_(self.length / self.width**0.5)
        return model

    def batches(self, sizes: Sequence[int], generator: torch.Generator) -> Iterator[Batch]:
        """Yield fresh samples, so many at a time."""
        for size in sizes:
            inputs = torch.randn(size, self.width, dtype=torch.float64, generator=generator)
            yield inputs, self.spread * torch.randn(size, 1, dtype=torch.float64, generator=generator)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean squared error."""
    return F.mse_loss(model(batch[0]), batch[1])


def measured(problem: Regression, sizes: Sequence[int], windows: int, seed: int) -> NoiseReport:
    """Look at so many windows, each of micro-batches of these sizes."""
    model = problem.model()
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.0), steps=len(sizes))
    noise = GradientNoise(accumulator, every=1)
    for batch in problem.batches(list(sizes) * windows, torch.Generator().manual_seed(seed)):
        accumulator.backward(loss_of(model, batch))
    return noise.report()


def holds(report: NoiseReport, truth: float) -> bool:
    """Whether the interval has the truth in it."""
    low, high = report.interval
    return low <= truth <= high
