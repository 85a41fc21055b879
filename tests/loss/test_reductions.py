# ruff: noqa: E501  (a row of a table is a line)
"""Losses of several levels: rows one by one, a mean of means, a derivative, a learned factor over several terms."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bigbatch import Accumulator, counted
from bigbatch.errors import LossError
from tests.support.losses import squares
from tests.support.reference import accumulated, assert_equal, big_batches, sgd
from tests.support.samples import Batch, Loss, Tempered, mlp, rows, seeded, sequences

SIZES = ((2, 3, 1, 3), (1, 4, 2, 2), (3, 3, 3, 3))


def one_by_one(out: Tensor, each: Callable[[tuple[Tensor, ...], int], Tensor]) -> Tensor:
    """A loop over the rows of an output."""
    every = out.unbind(0)
    return torch.stack([each(every, at) for at in range(len(every))])


def times_the_next(every: tuple[Tensor, ...], at: int) -> Tensor:
    """Each row times the one after it."""
    return every[at] * every[(at + 1) % len(every)]


def slope(model: Any, batch: Batch, of: Callable[[Tensor, Batch], Tensor]) -> Tensor:
    """The derivative of a loss by its inputs, to be trained."""
    x = batch["x"].clone().requires_grad_()
    (found,) = torch.autograd.grad(of(model(x).tanh(), batch), x, create_graph=True)
    return 10 * (found.norm(dim=1) - 1).square().mean()


def learned_scale(model: Any, batch: Batch, penalty: Callable[[Tensor], Tensor]) -> Tensor:
    """A value that serves the data and a regularizer cannot carry the regularizer's weight."""
    scale = F.softplus(model.s)
    return (squares(model, batch) / (2 * scale**2)).sum() + penalty(scale)


def case(loss: Callable[[Any, Batch], Tensor], batch: Callable[[int, int], Batch] = rows) -> Loss:
    """A loss of a model with two scalars of its own."""
    return Loss("", seeded(Tempered), batch, loss)


EXACT = {
    "steps one by one": case(lambda m, b: torch.stack([y.tanh() for y in m(b["x"]).unbind(1)], 1).mean(1).exp().mean(), sequences),
    "slope of a summed loss": case(lambda m, b: slope(m, b, lambda y, b: F.mse_loss(y, b["value"], reduction="sum"))),
    "a learned scale, and its own place": case(lambda m, b: learned_scale(m, b, lambda scale: counted(scale, "once"))),
    "a factor over a mean and a regularizer": case(lambda m, b: m.s.exp() * (m(b["x"]).mean() + 0.1 * m.t.square())),
}  # fmt: skip

REFUSED = {
    "a factor over a sum and a regularizer": case(lambda m, b: m.s.exp() * (m(b["x"]).sum() + 0.1 * m.t.square().mean())),
    "a factor over a sum and its own logarithm": case(lambda m, b: m.s.exp() * (m(b["x"]).square().sum() / m.t.exp() + m.t)),
    "a learned scale of data and penalty": case(lambda m, b: learned_scale(m, b, lambda scale: scale)),
    "twice the size inside of a sum": case(lambda m, b: (squares(m, b).sum(1) / (2 * len(b["x"]))).sum()),
    "chamfer": case(lambda m, b: (m(b["x"])[:, None] - b["value"][None]).pow(2).sum(-1).min(1).values.mean()),
    "one row of an unbind": case(lambda m, b: m(b["x"]).unbind(0)[0].square().mean()),
    "one row of an unbind, of several steps": case(lambda m, b: m(b["x"]).unbind(0)[0].square().mean(), sequences),
    "rows against the next, one by one": case(lambda m, b: one_by_one(m(b["x"]), times_the_next).mean()),
    "rows against the next, beside others": case(lambda m, b: (one_by_one(m(b["x"]), times_the_next) * m(b["x"].sin())).mean()),
    "steps against the next row's, beside others": case(lambda m, b: (one_by_one(m(b["x"]), times_the_next) * m(b["x"].sin())).mean(), sequences),
    "neighbors in a dot product": case(lambda m, b: F.mse_loss(m(b["x"]), b["value"]) + torch.dot(m(b["x"])[1:, 0], m(b["x"])[:-1, 0])),
    "a grid that was centred over the batch": case(lambda m, b: F.grid_sample(b["value"][:, None, None], (m(b["x"]) - m(b["x"]).mean(0)).view(-1, 1, 2, 2), align_corners=False).mean()),
    "one row beside all": case(lambda m, b: (m(b["x"]).unbind(0)[0] * m(b["x"].sin())).mean()),
    "a slip hidden by a cat": case(lambda m, b: torch.cat([m(b["x"])[:, :1] - b["scalar"], m(b["x2"]), m(b["x3"])], 1).mean()),
    "a slip hidden by a cat of steps": case(lambda m, b: torch.cat([m(b["x"])[:, 0, :1] - b["reference"][:, 0], m(b["x"]).flatten(1)], 1).mean(), sequences),
    "slope of a cross-entropy": case(lambda m, b: slope(m, b, lambda y, b: F.cross_entropy(y, b["label"]))),
    "slope of an error beside it": case(lambda m, b: F.mse_loss(m(b["x"]), b["value"]) + slope(m, b, lambda y, b: F.huber_loss(y, b["value"]))),
}  # fmt: skip


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", EXACT)
def test_each_level_is_told_apart(name: str, sizes: tuple[int, ...]) -> None:
    """The samples' own mean is the one that counts."""
    batches = EXACT[name].micro_batches(sizes)
    assert_equal(accumulated(EXACT[name], batches, 4), big_batches(EXACT[name], batches, 4))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_told_is_refused(name: str, sizes: tuple[int, ...]) -> None:
    """Before the update that it would have made wrong."""
    with pytest.raises(LossError):
        accumulated(REFUSED[name], REFUSED[name].micro_batches(sizes), 4)


@pytest.mark.parametrize("sizes", [(1, 4, 2), (4, 1, 2)], ids=str)
def test_a_long_row_is_read_alike_in_all_micro_batches(sizes: tuple[int, ...]) -> None:
    """The row of a micro-batch of one sample looks like a sample."""
    loss = case(lambda m, b: m(b["x"]).view(1, -1).mean(-1).mean())
    with pytest.raises(LossError, match="which of two means"):
        accumulated(loss, loss.micro_batches(sizes), 3)


def ragged(model: Any, batch: Batch) -> Tensor:
    """A loop over samples of different length."""
    return torch.stack(
        [
            F.mse_loss(model(x[:n]), y[:n])
            for x, y, n in zip(batch["x"], batch["value"], batch["lengths"].tolist(), strict=True)
        ]
    ).mean()


def test_the_mean_over_one_ragged_sample_is_refused() -> None:
    """It is the mean over samples, or over all steps: with samples of one length it is both."""
    loss = Loss("ragged", mlp(), sequences, ragged)
    batches = loss.micro_batches((1, 1, 1))
    for batch, length in zip(batches, (2, 5, 3), strict=True):
        batch["lengths"][:] = length
    with pytest.raises(LossError, match="which of two means"):
        accumulated(loss, batches, 3)
    for batch in batches:
        batch["lengths"][:] = 4
    assert_equal(accumulated(loss, batches, 3), big_batches(loss, batches, 3))


SUMS: dict[
    str, tuple[tuple[int, ...], Callable[[Tensor], Tensor], bool]
] = {  # a sum times a number that may be the number of samples: what it is taken for, and what it then is
    "as many samples as features": ((4, 4), lambda out: out.square().sum() / len(out), True),
    "two samples": ((2, 2), lambda out: out.square().sum() / len(out), True),
    "half of two samples": ((2, 2), lambda out: 0.5 * out.square().sum(), True),
    "one sample": ((1, 1), lambda out: out.square().sum() / len(out), False),
    "other samples before": ((3, 4, 2), lambda out: out.square().sum() / len(out), False),
    "the size inside of the sum, and two": ((5, 3), lambda out: (out.square() / len(out) / 2).sum(), False),
    "half after other samples": ((3, 2), lambda out: 0.5 * out.square().sum(), False),
}


SHARES: dict[str, tuple[Callable[[Any, Batch], Tensor], str]] = {  # and the warning's words
    "by twice the samples": (lambda m, b: F.cross_entropy(m(b["x"]), b["label"]) + next(m.parameters()).square().sum() / (2 * len(b["x"])), "counts once per window"),
    "by the samples, beside elements": (lambda m, b: F.mse_loss(m(b["x"]), b["value"]) + next(m.parameters()).norm() / len(b["x"]), "counts once per window"),
    "a half": (lambda m, b: F.cross_entropy(m(b["x"]), b["label"]) + next(m.parameters()).square().sum() / 2, ""),
    "a third of the samples' number": (lambda m, b: F.cross_entropy(m(b["x"]), b["label"]) + next(m.parameters()).square().sum() / (3 * len(b["x"])), ""),
    "times a number": (lambda m, b: F.cross_entropy(m(b["x"]), b["label"]) + 1 / len(b["x"]) * next(m.parameters()).square().sum(), ""),
    "a sum by twice the samples": (lambda m, b: 1 / (2 * len(b["x"])) * (m(b["x"]) - b["value"]).square().sum(), "taken for a constant"),
    "a sum by four times the samples": (lambda m, b: 1 / (4 * len(b["x"])) * (m(b["x"]) - b["value"]).square().sum(), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", SHARES)
def test_what_is_divided_by_the_micro_batch_and_must_not_be_is_said_once(name: str) -> None:
    """As Bayes by backprop divides its prior; it is taken as it stands."""
    loss, words = SHARES[name]
    model = case(loss).model()
    accumulator = Accumulator(model, sgd(list(model.parameters())), steps=4)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for batch in case(loss).micro_batches((5, 5, 5) if "sum" in name else (5, 4, 5)):
            accumulator.backward(loss(model, batch))
    assert [words in str(each.message) for each in said] == [True] * bool(words)


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_by_a_number_that_may_be_its_samples_is_taken_for_the_usual_and_said(name: str) -> None:
    """Where no micro-batch of another size has told it before, one warning says what it was taken for."""
    sizes, loss, warns = SUMS[name]
    told = pytest.warns(UserWarning, match="this loss is a sum over data") if warns else nullcontext()
    found = case(lambda m, b: loss(m(b["x"])))
    batches, steps = found.micro_batches(sizes), len(sizes)
    with told:
        assert_equal(accumulated(found, batches, steps), big_batches(found, batches, steps))
