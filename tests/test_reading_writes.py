"""Writes by index keep samples apart where every row is written to, in its order, with what is its own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import Accumulator, BigStep, across
from bigbatch.errors import CoupledLoss, LossError, UnreadableLoss
from tests.reference import TOLERANCE, accumulated, assert_equal, big_batches, distance, sgd, trained
from tests.samples import CLASSES, Batch, Loss, join, mlp, rows

SPLIT = (3, 4, 2, 1)
Write = Callable[[Tensor, Tensor, Tensor], Tensor]  # logits, rows in their order, labels


def margin(logits: Tensor, own: Tensor, labels: Tensor) -> Tensor:
    """ArcFace: an angle added at each sample's own class."""
    logits[own, labels] = torch.cos(torch.acos(logits[own, labels]) + 0.2)
    return logits


def margin_where_labelled(logits: Tensor, own: Tensor, labels: Tensor) -> Tensor:
    """The same in the way of those who leave out rows without a label, of which there are none."""
    del own
    index = torch.where(labels != -1)[0]
    logits[index, labels[index]] = logits[index, labels[index]] - 0.2
    return logits


def taken_off(logits: Tensor, own: Tensor, labels: Tensor) -> Tensor:
    """CosFace, in one line."""
    logits[own, labels] -= 0.2
    return logits


def masked(logits: Tensor, own: Tensor, labels: Tensor) -> Tensor:
    """By a mask of all positions."""
    del own
    mask = F.one_hot(labels, CLASSES).bool()
    logits[mask] = 2 * logits[mask]
    return logits


def masked_rows(logits: Tensor, own: Tensor, labels: Tensor) -> Tensor:
    """By a mask of rows."""
    del own
    mask = labels > 1
    logits[mask] = logits[mask].tanh()
    return logits


def masked_own(logits: Tensor, own: Tensor, labels: Tensor) -> Tensor:
    """By a mask of rows and numbers of classes."""
    del own
    mask = labels > 0
    logits[mask, labels[mask]] = logits[mask, labels[mask]] ** 2
    return logits


def columns(logits: Tensor, own: Tensor, labels: Tensor) -> Tensor:
    """Classes that are left out."""
    del own, labels
    logits[:, torch.tensor([0, 2])] = -1.0
    return logits


def columns_of_columns(logits: Tensor, own: Tensor, labels: Tensor) -> Tensor:
    """Classes that are made of others."""
    del own, labels
    logits[:, torch.tensor([0, 2])] = logits[:, 1:3].tanh()
    return logits


APART: dict[str, Write] = {
    "arc-face": margin,
    "arc-face-where-labelled": margin_where_labelled,
    "cos-face": taken_off,
    "constant": lambda x, own, y: x.index_put((own, y), torch.tensor(0.5, dtype=x.dtype)),
    "added": lambda x, own, y: x.index_put((own, y), -0.2 * torch.ones(len(y), dtype=x.dtype), accumulate=True),
    "gathered": lambda x, own, y: x.index_put((own, y), x.gather(1, y[:, None])[:, 0].tanh()),
    "a-column": lambda x, own, y: x.index_put((own, y), x[:, 0] * x[:, 1]),
    "several-per-row": lambda x, own, y: x.index_put(
        (own[:, None], torch.stack([y, (y + 1) % CLASSES], 1)), x[:, :2] ** 2
    ),
    "columns": columns,
    "columns-of-columns": columns_of_columns,
    "rows": lambda x, own, _: torch.zeros_like(x).index_put((own,), x.tanh()),
    "mask": masked,
    "mask-of-rows": masked_rows,
    "mask-and-labels": masked_own,
    "mask-and-a-constant": lambda x, _, y: x.index_put((F.one_hot(y, CLASSES).bool(),), torch.tensor(0.0).double()),
}


def written(write: Write) -> Callable[[Any, Batch], Tensor]:
    """A cross-entropy of logits that were written to."""

    def loss(model: Any, batch: Batch) -> Tensor:
        logits = model(batch["x"]).tanh() * 0.9
        return F.cross_entropy(4 * write(logits, torch.arange(len(logits)), batch["label"]), batch["label"])

    return loss


@pytest.mark.parametrize("name", APART)
def test_a_write_into_rows_of_their_own(name: str) -> None:
    """As one big batch: micro-batch by micro-batch, one of them of one sample, and cut by a BigStep."""
    case = Loss(name, mlp(), rows, written(APART[name]))
    batches = case.micro_batches(SPLIT)
    true = big_batches(case, batches, steps=len(SPLIT))
    assert_equal(accumulated(case, batches, steps=len(SPLIT)), true)
    model = case.model()
    BigStep(model, sgd(trained(model)), case.loss, micro_batch_size=3)(join(batches))
    assert distance([p.detach() for p in trained(model)], true.weights) <= TOLERANCE


COUPLING: dict[str, Write] = {
    "rows-of-others-read": lambda x, own, y: x.index_put((own, y), x[own.flip(0), y]),
    "rows-of-others-written": lambda x, own, y: x.index_put((own.flip(0), y), x[own, y]),
    "whole-rows-of-others": lambda x, own, _: x.index_put((own.flip(0),), x[own].tanh()),
    "a-column-of-others": lambda x, own, y: x.index_put((own, y), x[:, 0].flip(0)),
    "a-mean": lambda x, own, y: x.index_put((own, y), x.mean(0)[y]),
    "one-for-all": lambda x, own, y: x.index_put((own, y), x[:1, 0]),
    "one-for-all-by-a-mask": lambda x, _, y: torch.zeros_like(x).index_put((y >= 0,), x[:1]),
    "the-first-row": lambda x, _, __: x.index_put((torch.tensor([0]),), torch.tensor(0.0).double()),
    "the-first-row-of-some": lambda x, own, y: x.index_put((own[:1], y[:1]), torch.tensor(0.0).double()),
    "the-diagonal": lambda x, own, _: torch.cat([x, x], 1).index_put((own, own), torch.tensor(0.0).double()),
    "by-a-mask-from-another": lambda x, own, y: x.index_put((y > 0,), x[(y > 0)[own.flip(0)]][: int((y > 0).sum())]),
}
SIZE = 7


@pytest.mark.parametrize("name", COUPLING)
def test_a_write_into_rows_of_others_is_refused(name: str) -> None:
    """And it is right to: the gradient is not that of the parts, however they are weighed."""
    case = Loss(name, mlp(), rows, written(COUPLING[name]))
    model = case.model()
    accumulator = Accumulator(model, sgd(trained(model)), steps=2)
    with pytest.raises(LossError) as caught:
        accumulator.backward(case.loss(model, rows(SIZE, 0)))
    said = str(caught.value)
    assert "count=n" in said
    if isinstance(caught.value, UnreadableLoss):
        assert said.startswith("cannot tell whether the samples of this loss stay apart")
        assert "are coupled" not in said
    model = case.model()
    with pytest.raises(LossError):
        BigStep(model, sgd(trained(model)), case.loss, micro_batch_size=SIZE)(rows(3 * SIZE, 1))


def test_what_stays_unclear_says_what_to_write_instead() -> None:
    """Some rows by number: perhaps by what they are, perhaps by where they lie."""
    model = mlp()()
    accumulator = Accumulator(model, sgd(trained(model)), steps=2)
    some = written(lambda x, own, y: x.index_put((own[y > 1], y[y > 1]), torch.tensor(0.0).double()))
    with pytest.raises(UnreadableLoss, match=r"(?s)every row is written to.*torch\.where\(mask, y, x\).*count=n"):
        accumulator.backward(some(model, rows(SIZE, 0)))

    def part(x: Tensor, _: Tensor, __: Tensor) -> Tensor:
        x[:, 0] = 0
        return x

    with pytest.raises(UnreadableLoss, match=r"(?s)CopySlices.*does not show which part.*torch\.cat.*count=n"):
        accumulator.backward(written(part)(model, rows(SIZE, 0)))


def test_two_indices_in_order_are_not_said_to_be_one() -> None:
    """A permutation of few looks like an order: so it takes one index, and the error says so."""
    model = mlp()()
    accumulator = Accumulator(model, sgd(trained(model)), steps=2)

    def twice(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["x"])
        first, second = torch.arange(len(logits)), torch.arange(len(logits))
        return (logits[first, batch["label"]] * logits[second, batch["label"]]).mean()

    with pytest.raises(CoupledLoss, match=r"rows = torch\.arange\(len\(x\)\); x\[rows, labels\]"):
        accumulator.backward(twice(model, rows(4, 0)))


def test_the_same_write_by_another_index_is_looked_at_again() -> None:
    """The graph looks the same, and only the numbers differ."""
    model = mlp()()
    accumulator = Accumulator(model, sgd(trained(model)), steps=3)

    def loss(batch: Batch, order: Tensor) -> Tensor:
        logits = model(batch["x"])
        values = logits.gather(1, batch["label"][:, None])[:, 0].tanh()
        return F.cross_entropy(logits.index_put((order, batch["label"]), values), batch["label"])

    accumulator.backward(loss(rows(4, 0), torch.arange(4)))
    with pytest.raises(UnreadableLoss, match="every row is written to, in its order"):
        accumulator.backward(loss(rows(4, 1), torch.tensor([1, 0, 3, 2])))
    accumulator.discard()


def self_masked(kind: str) -> Callable[[Any, Batch], Tensor]:
    """SimCLR's mask of each sample with itself, in rows of own samples against all."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        own = F.normalize(model(batch["x"]), dim=1)
        others = F.normalize(model(batch["x2"]), dim=1)
        place = torch.arange(len(own))
        columns = place + across.offset()
        alike = own @ across.gather(own).T / 0.3
        if kind == "index":
            alike[place, columns] = float("-inf")
        else:
            itself = columns[:, None] == torch.arange(alike.shape[1])
            alike = alike.masked_fill(itself, float("-inf"))
        positive = own @ across.gather(others).T / 0.3
        return F.cross_entropy(torch.cat([positive, alike], 1), columns)

    return loss


@pytest.mark.parametrize("kind", ["index", "masked_fill"])
def test_a_self_mask_beside_all_samples(kind: str) -> None:
    """The mask goes by each row's own column of all: exact."""
    loss = self_masked(kind)
    batch = rows(10, 0)
    model, twin = mlp()(), mlp()()
    BigStep(model, sgd(trained(model)), loss, micro_batch_size=4)(batch)
    optimizer = sgd(trained(twin))
    loss(twin, batch).backward()
    optimizer.step()
    ours, true = ([p.detach() for p in trained(each)] for each in (model, twin))
    assert distance(ours, true) <= TOLERANCE


@pytest.mark.parametrize("kind", ["index", "masked_fill"])
def test_a_self_mask_among_the_micro_batch_alone_is_coupled(kind: str) -> None:
    """Its samples are set against each other, with or without the mask."""
    model = mlp()()
    accumulator = Accumulator(model, sgd(trained(model)), steps=2)
    own = F.normalize(model(rows(4, 0)["x"]), dim=1)
    alike, place = own @ own.T, torch.arange(4)
    if kind == "index":
        alike[place, place.clone()] = float("-inf")
    else:
        alike = alike.masked_fill(torch.eye(4).bool(), float("-inf"))
    with pytest.raises(CoupledLoss, match="a matrix product of samples with samples"):
        accumulator.backward(F.cross_entropy(alike, torch.tensor([1, 0, 3, 2])))
