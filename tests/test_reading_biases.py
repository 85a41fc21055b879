"""Biases that are computed on the way: of parameters they are fine, of samples they couple them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import Accumulator
from bigbatch.errors import CoupledLoss
from tests.reference import distance


class Biased(nn.Module):
    """A layer whose last part is of a case's own."""

    def __init__(self, last: "Last") -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 4), last
        self.weight, self.bias = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3))
        self.filters = nn.Parameter(torch.randn(3, 3, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3, 2, 2) → (n, 3)."""
        return self.last(self, self.first(x.flatten(1)), x)


Last = Callable[[Biased, Tensor, Tensor], Tensor]
APART: dict[str, Last] = {
    "a parameter": lambda m, h, _: F.linear(h, m.weight, m.bias),
    "twice one": lambda m, h, _: F.linear(h, m.weight, m.bias * 2),
    "tanh of one": lambda m, h, _: F.linear(h, m.weight, m.bias.tanh()),
    "one for each row": lambda m, h, _: torch.addmm(m.bias.expand(len(h), 3), h, m.weight.T),
    "each sample's own": lambda m, h, _: torch.addmm(h[:, :3], h, m.weight.T),
    "another layer's": lambda m, h, x: torch.addmm(F.linear(x.flatten(1)[:, :4], m.weight), h, m.weight.T),
    "of a convolution": lambda m, _, x: F.conv2d(x, m.filters, m.bias * 3).mean((2, 3)),
}
COUPLED: dict[str, Last] = {
    "a mean of samples": lambda m, h, _: F.linear(h, m.weight, h.mean(0)[:3]),
    "a sum of samples": lambda m, h, _: torch.addmm(h.sum(0)[:3], h, m.weight.T),
    "of a convolution": lambda m, h, x: F.conv2d(x, m.filters, h.mean(0)[:3]).mean((2, 3)),
}


def batch() -> tuple[Tensor, Tensor]:
    """Return images and their classes."""
    by = torch.Generator().manual_seed(0)
    return torch.randn(11, 3, 2, 2, generator=by, dtype=torch.float64), torch.randint(3, (11,), generator=by)


def accumulated(model: Any) -> None:
    """Make one update in uneven parts."""
    x, y = batch()
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=3)
    for rows, labels in zip(x.split(4), y.split(4), strict=True):
        accumulator.backward(F.cross_entropy(model(rows), labels))


@pytest.mark.parametrize("name", APART)
def test_a_bias_of_parameters_or_of_each_sample(name: str) -> None:
    """The update is the big batch's."""
    torch.manual_seed(0)
    true = Biased(APART[name]).double()
    mine = copy.deepcopy(true)
    accumulated(mine)
    F.cross_entropy(true(batch()[0]), batch()[1]).backward()
    torch.optim.SGD(true.parameters(), lr=0.1).step()
    pairs = zip(mine.parameters(), true.parameters(), strict=True)
    assert all(distance([p.detach()], [q.detach()]) < 1e-12 for p, q in pairs)


@pytest.mark.parametrize("name", COUPLED)
def test_a_bias_of_all_samples_is_refused(name: str) -> None:
    """It is another one in every micro-batch."""
    torch.manual_seed(0)
    with pytest.raises(CoupledLoss, match="mixes samples"):
        accumulated(Biased(COUPLED[name]).double())
