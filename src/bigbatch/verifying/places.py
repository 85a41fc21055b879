"""Some places in every gradient: enough to see how a sum was weighed, and few enough to keep for each micro-batch."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bigbatch.verifying.gradients import Gradients, wide

_KEPT = 1 << 17  # places in all
_FEWEST = 64  # of one parameter


@dataclass(frozen=True)
class Places:
    """For every parameter some elements: half where the gradient is largest, half spread over it."""

    indices: Mapping[str, Tensor]
    numbers: Mapping[str, int]  # elements in all

    @classmethod
    def in_gradients(cls, truth: Gradients, numbers: Mapping[str, int]) -> "Places":
        """Choose them by the big batch's gradient."""
        most = max(_FEWEST, _KEPT // max(len(numbers), 1))
        return cls({name: _chosen(truth.get(name), number, most) for name, number in numbers.items()}, numbers)

    def of(self, gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """Return what gradients have there, in float64 on the host; zero where there is none."""
        found = {}
        for name, indices in self.indices.items():
            gradient = wide(gradients.get(name))
            here = torch.zeros(len(indices), dtype=torch.float64)
            found[name] = here if gradient is None else gradient.flatten()[indices.to(gradient.device)].cpu()
        return found


def _chosen(gradient: Tensor | None, number: int, most: int) -> Tensor:
    if number <= most:
        return torch.arange(number)
    spread = torch.linspace(0, number - 1, most // 2, dtype=torch.float64).long()
    if gradient is None:
        return spread
    largest = gradient.flatten().abs().topk(most // 2).indices.cpu()
    return torch.cat([spread, largest]).sort().values
