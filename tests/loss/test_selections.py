"""Losses of what a mask has selected: a micro-batch may have nothing of it."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import Accumulator, BigStep, counted
from bigbatch.errors import CoupledLoss, UnreadableLoss
from tests.support.reference import accumulated, assert_equal, big_batches, distance, trained
from tests.support.samples import Batch, Loss, mlp, rows

ELEMENTWISE: dict[str, Callable[[Tensor, Batch, Tensor], Tensor]] = {
    "mse": lambda out, b, mask: F.mse_loss(out[mask], b["value"][mask]),
    "smooth_l1": lambda out, b, mask: F.smooth_l1_loss(out[mask], b["value"][mask]),
    "huber": lambda out, b, mask: F.huber_loss(out[mask], b["value"][mask]),
    "bce": lambda out, b, mask: F.binary_cross_entropy_with_logits(out[mask], b["unit"][mask]),
    "soft_margin": lambda out, b, mask: F.soft_margin_loss(out[mask], b["signs"][mask]),
    "multi_margin": lambda out, b, mask: F.multi_margin_loss(out[mask], b["label"][mask]),
    "mean": lambda out, b, mask: (out[mask] - b["value"][mask]).square().mean(),
    "masked_select": lambda out, b, mask: (out - b["value"]).square().masked_select(mask[:, None]).mean(),
}


def selected(name: str) -> Loss:
    """A loss of the rows whose first label is 0."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return ELEMENTWISE[name](model(batch["x"]), batch, batch["many"][:, 0] == 0)

    def count(batch: Batch) -> float:
        return float((batch["many"][:, 0] == 0).sum()) * (1 if name == "multi_margin" else 4)

    return Loss(name, mlp(), rows, loss, count=count)


def some_empty(case: Loss) -> list[Batch]:
    """Micro-batches of which the first and the fourth have nothing selected, and so has a whole window."""
    batches = case.micro_batches((3, 4, 2, 3, 5, 4, 4, 3, 4))
    for index, batch in enumerate(batches):
        first = 1 if index in {0, 3, 6, 7, 8} else 0
        batch["many"][:, 0] = torch.where(torch.arange(len(batch["x"])) % 2 == 0, first, 1)
    return [*batches, *case.micro_batches((4, 3), seed=5)]


def assert_big_step_equal(case: Loss, batches: list[Batch], size: int) -> None:
    """A BigStep that cuts each batch ends with the weights of the whole ones."""
    model = case.model()
    step = BigStep(model, torch.optim.SGD(model.parameters(), lr=0.5), case.loss, micro_batch_size=size)
    for batch in batches:
        step(batch)
    assert distance([p.detach() for p in model.parameters()], big_batches(case, batches, 1).weights) <= 1e-12


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_empty_selection_counts_nothing_and_leaves_the_next_alone(name: str) -> None:
    """Every later micro-batch counts as if there had been no empty one, also where a big batch is cut by itself."""
    case = selected(name)
    batches = some_empty(case)
    assert_equal(accumulated(case, batches, 3), big_batches(case, batches, 3))
    assert_big_step_equal(case, [case.join(batches), *case.micro_batches((6, 7), seed=3)], 2)


def test_a_term_that_some_micro_batches_lack() -> None:
    """Written everywhere, with a count of 0 where it does not apply."""

    def loss(model: Any, batch: Batch) -> Tensor:
        out = model(batch["x"])
        own = batch["scalar"] > 0
        aside = out[own].square().mean() if own.any() else 0 * out.sum()
        return F.mse_loss(out, batch["value"]) + 0.3 * counted(aside, int(own.sum()))

    case = Loss("lacking", mlp(), rows, loss)
    batch = case.batch(12, 0)
    batch["scalar"][:6] = -batch["scalar"][:6].abs()
    batch["scalar"][6:].abs_()
    assert_big_step_equal(case, [batch], 3)


CHOSEN: dict[str, Callable[[Any, Batch], Tensor]] = {
    "errors": lambda m, b: F.smooth_l1_loss(m(b["x"])[b["kept"]], b["value"][b["kept"]], reduction="sum"),
    "a sum": lambda m, b: (m(b["x"]) - b["value"]).abs().sum(1)[b["kept"]].sum(),
}


def kept(numbers: Iterable[int], size: int = 8) -> list[Batch]:
    """Micro-batches of which so many samples are chosen."""
    found = []
    for seed, number in enumerate(numbers):
        found.append({**rows(size, seed), "kept": torch.arange(size) < number})
    return found


@pytest.mark.parametrize("entrance", ["accumulator", "big step"])
@pytest.mark.parametrize("name", CHOSEN)
def test_a_sum_over_chosen_rows_divided_by_their_number(name: str, entrance: str) -> None:
    """As detection losses are written; a micro-batch with none counts none, though it divides by 1."""
    case = Loss(name, mlp(), rows, lambda m, b: CHOSEN[name](m, b) / max(1, int(b["kept"].sum())))
    batches = kept((6, 5, 4, 3, 5, 0, 6, 0, 0, 4, 3, 6))
    if entrance == "accumulator":
        assert_equal(accumulated(case, batches, 4), big_batches(case, batches, 4))
    else:
        assert_big_step_equal(case, [case.join(batches[start : start + 4]) for start in (0, 4, 8)], 8)


@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.filterwarnings("ignore:this loss is a sum over data:UserWarning")
def test_a_sum_over_no_rows_divided_by_all_of_them_is_refused(name: str) -> None:
    """Nothing shows that a sum over nothing was divided by the samples: that would count them."""
    case = Loss(name, mlp(), rows, lambda m, b: CHOSEN[name](m, b) / len(b["x"]))
    for numbers in ((5, 0), (0, 5)):
        model = case.model()
        accumulator = Accumulator(model, torch.optim.SGD(trained(model), lr=0.1), steps=2)
        first, second = kept(numbers)
        accumulator.backward(case.loss(model, first))
        with pytest.raises(UnreadableLoss, match="0 times something"):
            accumulator.backward(case.loss(model, second))
        accumulator.discard()


def test_an_embedding_that_divides_by_how_often_a_row_comes_is_refused() -> None:
    """A micro-batch has a row less often than the big batch; one micro-batch per update is the big batch."""
    model = nn.Sequential(nn.Embedding(6, 8, scale_grad_by_freq=True), nn.Linear(8, 3))
    for steps in (1, 2):
        accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=steps)
        for _ in range(2):  # it is refused again
            if steps == 1:
                assert accumulator.backward(model(torch.tensor([1, 1, 2])).mean()) is not None
            else:
                with pytest.raises(CoupledLoss, match="layer '0' divides each row's gradient"):
                    accumulator.backward(model(torch.tensor([1, 1, 2])).mean())
