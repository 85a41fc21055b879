"""Convolutions whose weights are computed of parameters: they are applied to data, though that has no gradient."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import Accumulator, BigStep, Options
from bigbatch.errors import UnreadableLoss
from tests.reference import distance

Weight = Callable[[Tensor], Tensor]


def standardised(weight: Tensor) -> Tensor:
    """As timm has it: by a batch norm of the weight."""
    rows = weight.reshape(1, weight.shape[0], -1)
    return F.batch_norm(rows, None, None, training=True).reshape_as(weight)


class Computed(nn.Conv2d):
    """A convolution with another weight than its parameter."""

    def __init__(self, computed: Weight, channels: int, out: int) -> None:
        super().__init__(channels, out, 3)
        self.computed = computed

    def forward(self, x: Tensor) -> Tensor:
        """(n, channels, h, w) → (n, out, h - 2, w - 2)."""
        return F.conv2d(x, self.computed(self.weight), self.bias)


WEIGHTS: dict[str, Weight] = {
    "tanh": torch.tanh,
    "twice": lambda weight: weight * 2,
    "standardised": standardised,
    "of norm 1": lambda weight: weight / weight.norm(),
}


ASKED = ("standardised", "sum")  # by a batch norm of the weight


def network(name: str, layers: int) -> nn.Module:
    """Return one of such layers alone."""
    torch.manual_seed(0)
    more = [nn.ReLU(), Computed(WEIGHTS[name], 4, 4)] if layers > 1 else []
    return nn.Sequential(Computed(WEIGHTS[name], 3, 4), *more).double()


def images() -> Tensor:
    """Return some."""
    return torch.randn(11, 3, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(
    ("name", "reduce"), [(name, how) for name in WEIGHTS for how in ("mean", "sum") if (name, how) != ASKED]
)
def test_outputs_are_over_samples(name: str, reduce: str, layers: int) -> None:
    """No other layer says so, and no target: uneven micro-batches give the big batch's gradient."""
    true = network(name, layers)
    mine, big, x = copy.deepcopy(true), copy.deepcopy(true), images()

    def loss(model: Any, x: Tensor) -> Tensor:
        found: Tensor = getattr(model(x).square(), reduce)()
        return found

    accumulator = Accumulator(mine, torch.optim.SGD(mine.parameters(), lr=0.01), steps=3)
    for part in x.split(4):
        accumulator.backward(loss(mine, part))
    optimizer = torch.optim.SGD(big.parameters(), lr=0.01)
    BigStep(big, optimizer, loss, micro_batch_size=4, options=Options(check=False))(x)
    loss(true, x).backward()
    torch.optim.SGD(true.parameters(), lr=0.01).step()
    for model in (mine, big):
        pairs = zip(model.parameters(), true.parameters(), strict=True)
        assert all(distance([p.detach()], [q.detach()]) < 1e-12 for p, q in pairs)


def test_a_sum_of_outputs_is_asked_for() -> None:
    """It might be a regulariser of the weights, for all that the graph shows."""
    model = network(ASKED[0], 1)
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.01), steps=3)
    with pytest.raises(UnreadableLoss, match="a sum over data or a regularizer"):
        accumulator.backward(model(images()[:4]).square().sum())
