"""Rows of a parameter that an index has chosen: where that is made of labels, samples meet each other's rows."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import Accumulator, counted
from bigbatch.errors import CoupledLoss
from tests.reference import distance


class Prototypes(nn.Module):
    """Features, and one row for each class."""

    index: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.features, self.rows = nn.Linear(5, 4), nn.Parameter(torch.randn(6, 4))
        self.register_buffer("index", torch.tensor([4, 0, 2]))


Loss = Callable[[Any, Tensor, Tensor], Tensor]


def against(scores: Tensor) -> Tensor:
    """Each sample's own is on the diagonal."""
    return F.cross_entropy(scores, torch.arange(len(scores)))


BY_LABELS: dict[str, Loss] = {
    "index": lambda m, x, y: against(m.features(x) @ m.rows[y].T),
    "linear": lambda m, x, y: against(F.linear(m.features(x), m.rows[y])),
    "normalised": lambda m, x, y: against(m.features(x) @ (m.rows[y] / m.rows[y].norm(dim=1, keepdim=True)).T),
    "index_select": lambda m, x, y: against(m.features(x) @ m.rows.index_select(0, y).T),
    "gather": lambda m, x, y: against(m.features(x) @ m.rows.gather(0, y[:, None].expand(-1, 4)).T),
    "distances": lambda m, x, y: against(-torch.cdist(m.features(x), m.rows[y])),
}
APART: dict[str, Loss] = {
    "all rows": lambda m, x, y: F.cross_entropy(m.features(x) @ m.rows.T, y),
    "the model's own index": lambda m, x, y: F.cross_entropy(m.features(x) @ m.rows[m.index].T, y % 3),
    "the same by select": lambda m, x, y: F.cross_entropy(m.features(x) @ m.rows.index_select(0, m.index).T, y % 3),
    "each sample's own row": lambda m, x, y: (m.features(x) - m.rows[y]).square().sum(1).mean(),
    "in a product by sample": lambda m, x, y: torch.bmm(m.features(x)[:, None], m.rows[y][:, :, None]).mean(),
    "a slice": lambda m, x, y: F.cross_entropy(m.features(x) @ m.rows[:3].T, y % 3),
}


def batch() -> tuple[Tensor, Tensor]:
    """Return rows and labels."""
    by = torch.Generator().manual_seed(0)
    return torch.randn(11, 5, generator=by, dtype=torch.float64), torch.randint(6, (11,), generator=by)


def accumulated(model: Any, loss: Loss) -> None:
    """Make one update in uneven parts."""
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=3)
    for x, y in zip(*(each.split(4) for each in batch()), strict=True):
        accumulator.backward(loss(model, x, y))


@pytest.mark.parametrize("name", BY_LABELS)
def test_rows_that_labels_have_chosen_are_asked_about(name: str) -> None:
    """Each sample against all labels' rows is a loss of the whole batch; counted says that it is not."""
    torch.manual_seed(0)
    model = Prototypes().double()
    with pytest.raises(CoupledLoss, match="register_buffer"):
        accumulated(model, BY_LABELS[name])
    accumulated(Prototypes().double(), lambda m, x, y: counted(BY_LABELS[name](m, x, y), len(x)))


@pytest.mark.parametrize("name", APART)
def test_rows_that_are_the_same_for_all(name: str) -> None:
    """The update is the big batch's."""
    torch.manual_seed(0)
    true = Prototypes().double()
    mine = copy.deepcopy(true)
    accumulated(mine, APART[name])
    APART[name](true, *batch()).backward()
    torch.optim.SGD(true.parameters(), lr=0.1).step()
    pairs = zip(mine.parameters(), true.parameters(), strict=True)
    assert all(distance([p.detach()], [q.detach()]) < 1e-12 for p, q in pairs)
