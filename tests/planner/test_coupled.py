"""What a plan says of micro-batches that wait for each other."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import across
from bigbatch.planner.measure import plan

Batch = tuple[Tensor, Tensor]
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would be measured")


class Asking(nn.Module):
    """Takes the batch's mean from each sample between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 512), nn.Linear(512, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 64) → (n, 4)."""
        h = torch.tanh(self.first(x))
        found: Tensor = self.last(h - across.mean(h.mean(0)))
        return found


def normed() -> nn.Sequential:
    """Linear layers and a norm."""
    return nn.Sequential(nn.Linear(64, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 4))


def rows(number: int) -> Batch:
    """A batch."""
    return torch.randn(number, 64), torch.randint(4, (number,))


def classify(model: Any, batch: Batch) -> Tensor:
    """A mean over the samples."""
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize("make", [Asking, normed])
def test_what_waits_where_the_batch_is_cut(make: Any) -> None:
    """One sample at a time is tried, too, as it would run beside others; the model is as before."""
    model = make()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = plan(model, classify, rows(4096), memory="90MiB")
    assert found.rows[0].size == 1
    assert (found.steps or 0) > 1
    assert "couples the samples, so BigStep runs micro-batches in lock-step" in str(found)
    assert not found.refused
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("memory", ["4GiB", None], ids=["traced", "measured"])
@pytest.mark.parametrize("make", [Asking, normed])
def test_a_batch_that_fits_is_taken_whole(make: Any, memory: str | None) -> None:
    """As BigStep does, though a part may be faster alone; a plan restores statistics that one sample has none of."""
    model = make()
    found = plan(model, classify, rows(256), memory=memory)
    assert (found.size, found.steps, found.refused) == (256, 1, False)
    assert "BigStep takes all at once" in str(found)
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())


def test_a_loss_that_asks_is_not_refused() -> None:
    """A contrastive loss."""

    def contrast(model: Any, batch: Batch) -> Tensor:
        out = model(batch[0])
        return F.cross_entropy(out @ across.gather(out).T, across.offset() + torch.arange(len(out)))

    found = plan(nn.Linear(64, 4), contrast, rows(64))
    assert not found.refused
    assert "across couples the samples" in str(found)
