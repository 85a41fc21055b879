"""Whether samples stay apart where the model's last layer is computed on the way: its bias, its rows, its filters."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import Accumulator, counted
from bigbatch.errors import LossError
from tests.audit.judge import Batch, judge, judge_big_step
from tests.support.reference import distance, sgd, trained
from tests.support.samples import join, mlp, rows


class Layers(nn.Module):
    """Parameters of which each case makes a layer of its own."""

    index: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 4)
        self.weight, self.bias = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3))
        self.filters, self.more = nn.Parameter(torch.randn(3, 3, 2, 2)), nn.Parameter(torch.randn(3, 3, 1, 1))
        self.rows = nn.Parameter(torch.randn(6, 4))
        self.register_buffer("index", torch.tensor([4, 0, 2]))


Loss = Callable[[Any, Batch], Tensor]


def layers() -> nn.Module:
    """The same weights each time."""
    torch.manual_seed(0)
    return Layers().double()


def windows(seed: int = 0) -> list[list[Batch]]:
    """One window of uneven micro-batches."""
    by = torch.Generator().manual_seed(seed)
    x = torch.randn(11, 3, 2, 2, generator=by, dtype=torch.float64)
    y = torch.randint(6, (11,), generator=by)
    return [[{"x": a, "y": b} for a, b in zip(x.split(4), y.split(4), strict=True)]]


def of_bias(last: Callable[[Any, Tensor, Tensor], Tensor]) -> Loss:
    """A loss of what a last layer makes of the features and the images."""
    return lambda m, b: F.cross_entropy(last(m, m.first(b["x"].flatten(1)), b["x"]), b["y"] % 3)


def of_rows(loss: Callable[[Any, Tensor, Tensor], Tensor]) -> Loss:
    """A loss of features and labels."""
    return lambda m, b: loss(m, m.first(b["x"].flatten(1)), b["y"])


def of_filters(weight: Callable[[Tensor], Tensor], reduce: str, *, deep: bool) -> Loss:
    """A loss of what convolutions with computed filters make of images, though these have no gradient."""

    def loss(m: Any, b: Batch) -> Tensor:
        out = F.conv2d(b["x"], weight(m.filters), padding=1)
        out = F.conv2d(out.relu(), weight(m.more)) if deep else out
        return out.square().sum() if reduce == "sum" else out.square().mean()

    return loss


def against(scores: Tensor) -> Tensor:
    """Each sample's own is on the diagonal."""
    return F.cross_entropy(scores, torch.arange(len(scores)))


def standardized(weight: Tensor) -> Tensor:
    """As timm has it: by a batch norm of the weight."""
    return F.batch_norm(weight.reshape(1, weight.shape[0], -1), None, None, training=True).reshape_as(weight)


WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "twice": lambda weight: weight * 2,
    "of norm 1": lambda weight: weight / weight.norm(),
}
APART: dict[str, Loss] = {
    "a bias": of_bias(lambda m, h, _: F.linear(h, m.weight, m.bias)),
    "twice a bias": of_bias(lambda m, h, _: F.linear(h, m.weight, m.bias * 2)),
    "tanh of a bias": of_bias(lambda m, h, _: F.linear(h, m.weight, m.bias.tanh())),
    "a bias for each row": of_bias(lambda m, h, _: torch.addmm(m.bias.expand(len(h), 3), h, m.weight.T)),
    "a bias of each sample's own": of_bias(lambda m, h, _: torch.addmm(h[:, :3], h, m.weight.T)),
    "a bias of another layer's": of_bias(
        lambda m, h, x: torch.addmm(F.linear(x.flatten(1)[:, :4], m.weight), h, m.weight.T)
    ),
    "a bias of a convolution": of_bias(lambda m, _, x: F.conv2d(x, m.filters, m.bias * 3).mean((2, 3))),
    "all rows": of_rows(lambda m, h, y: F.cross_entropy(h @ m.rows.T, y)),
    "rows of the model's own index": of_rows(lambda m, h, y: F.cross_entropy(h @ m.rows[m.index].T, y % 3)),
    "the same by select": of_rows(lambda m, h, y: F.cross_entropy(h @ m.rows.index_select(0, m.index).T, y % 3)),
    "each sample's own row": of_rows(lambda m, h, y: (h - m.rows[y]).square().sum(1).mean()),
    "in a product by sample": of_rows(lambda m, h, y: torch.bmm(h[:, None], m.rows[y][:, :, None]).mean()),
    "a slice of rows": of_rows(lambda m, h, y: F.cross_entropy(h @ m.rows[:3].T, y % 3)),
    **{
        f"filters, {name}, {reduce}": of_filters(weight, reduce, deep=reduce == "sum")
        for name, weight in WEIGHTS.items()
        for reduce in ("mean", "sum")
    },
    "filters, standardized": of_filters(standardized, "mean", deep=False),
    "filters, standardized, two layers": of_filters(standardized, "mean", deep=True),
}
BY_LABELS: dict[str, Loss] = {  # each sample against the rows of all labels is a loss of the whole batch
    "index": of_rows(lambda m, h, y: against(h @ m.rows[y].T)),
    "linear": of_rows(lambda m, h, y: against(F.linear(h, m.rows[y]))),
    "normalized": of_rows(lambda m, h, y: against(h @ (m.rows[y] / m.rows[y].norm(dim=1, keepdim=True)).T)),
    "index_select": of_rows(lambda m, h, y: against(h @ m.rows.index_select(0, y).T)),
    "gather": of_rows(lambda m, h, y: against(h @ m.rows.gather(0, y[:, None].expand(-1, 4)).T)),
    "distances": of_rows(lambda m, h, y: against(-torch.cdist(h, m.rows[y]))),
}
REFUSED: dict[str, tuple[Loss, str]] = {
    "a bias of a mean of samples": (of_bias(lambda m, h, _: F.linear(h, m.weight, h.mean(0)[:3])), "mixes samples"),
    "a bias of a sum": (of_bias(lambda m, h, _: torch.addmm(h.sum(0)[:3], h, m.weight.T)), "mixes samples"),
    "a convolution's": (
        of_bias(lambda m, h, x: F.conv2d(x, m.filters, h.mean(0)[:3]).mean((2, 3))),
        "mixes samples",
    ),
    # It might be a regularizer of the weights, for all that the graph shows.
    "a sum of standardized filters": (of_filters(standardized, "sum", deep=False), "a sum over data or a regularizer"),
    **{name: (loss, "register_buffer") for name, loss in BY_LABELS.items()},
}


@pytest.mark.parametrize("name", APART)
def test_samples_that_stay_apart_are_exact(name: str) -> None:
    """The update of uneven micro-batches is the big batch's."""
    model, loss = layers(), APART[name]
    assert str(judge(model, loss, windows())) == "exact"
    assert str(judge_big_step(model, loss, windows(), 4, check=False)) == "exact"


@pytest.mark.parametrize("name", REFUSED)
def test_samples_that_meet_are_refused(name: str) -> None:
    """The layer is another one in every micro-batch."""
    loss, words = REFUSED[name]
    told = judge(layers(), loss, windows())
    assert told.outcome == "refused"
    assert words in told.words


@pytest.mark.parametrize("name", BY_LABELS)
def test_rows_by_labels_are_taken_as_counted(name: str) -> None:
    """`counted` says that they are each sample's own: nothing is refused."""
    assert judge(layers(), lambda m, b: counted(BY_LABELS[name](m, b), len(b["x"])), windows()).outcome != "refused"


LONE: dict[str, Callable[[Any, Any], Tensor]] = {
    "parts of a sample": lambda m, b: F.softplus(-m(b["x"].repeat_interleave(4, 0))[:, 0].view(-1, 4).sum(1)).mean(),
    "a product for each sample": lambda m, b: -torch.einsum("bc,bc->b", m(b["x"]), b["value"]).exp().mean(),
}


@pytest.mark.parametrize("name", LONE)
def test_one_row_is_one_sample_where_the_batch_has_one(name: str) -> None:
    """Of a loop over batches the size is known; else the row may be all samples."""
    model, parts = mlp()(), [rows(1, number) for number in range(3)]
    true = torch.autograd.grad(LONE[name](model, join(parts)), trained(model))
    accumulator = Accumulator(model, sgd(trained(model)), steps=3)
    seen: list[Tensor] = []
    accumulator.before_step(lambda: seen.extend(p.grad.clone() for p in trained(model) if p.grad is not None))
    with pytest.raises(LossError):
        accumulator.backward(LONE[name](model, parts[0]))
    for part in accumulator.over(parts):
        accumulator.backward(LONE[name](model, part))
    assert distance(seen, true) <= 1e-12
