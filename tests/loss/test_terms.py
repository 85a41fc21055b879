# ruff: noqa: E501  (a row of a table is a line)
"""Terms and losses that are multiplied by zero: they add nothing, and stand in nobody's way."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import Accumulator, BigStep
from bigbatch.errors import LossError
from tests.support.reference import accumulated, assert_equal, big_batches, distance, sgd
from tests.support.samples import Batch, Loss, rows, seeded

Function = Callable[[Any, Batch], Tensor]


def build() -> nn.Module:
    """Two heads."""
    return nn.ModuleDict({"used": nn.Linear(3, 4), "unused": nn.Linear(3, 2)})


def decayed(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Moves without gradient, too, where there is one of zero."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


def entropy(model: Any, batch: Batch) -> Tensor:
    """What is trained."""
    return F.cross_entropy(model["used"](batch["x"]), batch["label"])


def chosen(batch: Batch) -> Tensor:
    """Rows that a loss is about; some micro-batches, and a whole window, have none."""
    return batch["scalar"] > 10


def selected(some: Function, none: Function) -> Function:
    """One loss of chosen rows, and another where there are none."""
    return lambda m, b: (some if chosen(b).any() else none)(m, b)


def error(model: Any, batch: Batch) -> Tensor:
    """Of chosen rows alone."""
    return F.mse_loss(model["used"](batch["x"])[chosen(batch)], batch["value"][chosen(batch)])


def squares(model: Any, batch: Batch) -> Tensor:
    """A sum over chosen rows, and a regularizer."""
    return model["used"](batch["x"])[chosen(batch)].square().sum() + 0.1 * model["unused"].weight.square().sum()


TERMS: dict[str, Function] = {
    "a sum": lambda m, b: entropy(m, b) + 0 * m["unused"](b["x"]).sum(),
    "a mean, behind": lambda m, b: m["unused"](b["x"]).mean() * 0.0 + entropy(m, b),
    "zeros summed": lambda m, b: entropy(m, b) + (m["unused"](b["x"]) * 0).sum(),
    "zeros averaged": lambda m, b: entropy(m, b) + torch.mean(-(0 * m["unused"](b["x"])).view(-1)),
    "half of nothing": lambda m, b: entropy(m, b) + 0.5 * (0 * m["unused"](b["x"]).sum()) / len(b["x"]),
    "parameters": lambda m, b: entropy(m, b) + sum(0.0 * p.sum() for p in m["unused"].parameters()),
    "a root": lambda m, b: entropy(m, b) + 0 * m["unused"](b["x"]).square().mean().sqrt(),
    "a contrast": lambda m, b: entropy(m, b) + 0.0 * (m["unused"](b["x"]) @ m["unused"](b["x"]).T).logsumexp(1).mean(),
    "a tensor": lambda m, b: entropy(m, b) + torch.zeros((), dtype=torch.float64) * m["unused"](b["x"]).sum(),
}
LOSSES: dict[str, Function] = {
    "a sum": selected(error, lambda m, b: 0 * m["used"](b["x"]).sum()),
    "a sum, behind": selected(error, lambda m, b: m["used"](b["x"]).sum() * 0.0),
    "zeros summed": selected(error, lambda m, b: (m["used"](b["x"]) * 0).sum()),
    "a mean": selected(error, lambda m, b: 0.0 * m["used"](b["x"]).mean()),
    "beside a sum and a regularizer": selected(
        squares, lambda m, b: 0 * (m["used"](b["x"]).sum() + m["unused"].weight.sum())
    ),
    "every time": lambda m, b: 0 * entropy(m, b) + 0.0 * m["unused"](b["x"]).sum(),
}
CHANGING: dict[str, Callable[[Tensor, float], Tensor]] = {
    "a fraction": lambda loss, part: part * loss,
    "a fraction of all": lambda loss, part: -(-loss * part),
    "a tensor": lambda loss, part: torch.tensor(part, dtype=torch.float64) * loss,
    "a flag": lambda loss, part: float(part > 0) * loss,
}


def case(loss: Function) -> Loss:
    """Both heads with a loss."""
    return Loss("zeros", seeded(build), rows, loss, told=False)


def some_without(loss: Loss) -> list[Batch]:
    """Micro-batches of which the first, the fifth and a whole window have no chosen rows."""
    batches = loss.micro_batches((3, 4, 2, 3, 5, 4, 4, 3, 4, 2, 3))
    for index, batch in enumerate(batches):
        if index not in {0, 4, 6, 7, 8}:
            batch["scalar"][:2] += 20
    return batches


@pytest.mark.parametrize(
    "zero", [*TERMS.values(), *LOSSES.values()], ids=[*TERMS, *(f"all: {name}" for name in LOSSES)]
)
def test_what_is_zero_adds_nothing(zero: Function) -> None:
    """As `find_unused_parameters` has taught people to write it; a window of nothing else makes its step."""
    loss = case(zero)
    batches = some_without(loss)
    ours, theirs = (run(loss, batches, 3, optimizer=decayed) for run in (accumulated, big_batches))
    assert_equal(ours, theirs)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_zero_in_a_big_step(name: str) -> None:
    """The same where the big batch is cut by itself, and checked."""
    loss = case(LOSSES[name])
    batches = [
        loss.join(some_without(loss)),
        *(loss.join(some_without(loss)[start : start + 3]) for start in (0, 3, 6)),
    ]
    model = loss.model()
    step = BigStep(model, decayed(list(model.parameters())), loss.loss, micro_batch_size=2)
    for batch in batches:
        step(batch)
    true = big_batches(loss, batches, 1, optimizer=decayed)
    assert distance([p.detach() for p in model.parameters()], true.weights) <= 1e-12


@pytest.mark.parametrize("parts", [(0.0, 0.5), (0.5, 0.0), (0.0, 1.0), (1.0, 0.0), (0.25, 0.0)], ids=str)
@pytest.mark.parametrize("name", CHANGING)
def test_a_factor_that_is_zero_once_is_refused(name: str, parts: tuple[float, float]) -> None:
    """One that changes with the micro-batch may be a count in disguise, as the part of rows with a label."""
    loss = case(entropy)
    model = loss.model()
    accumulator = Accumulator(model, sgd(list(model.parameters())), steps=2)
    first, second = loss.micro_batches((3, 2))
    accumulator.backward(CHANGING[name](entropy(model, first), parts[0]))
    with pytest.raises(LossError, match=r"not the same in all micro-batches"):
        accumulator.backward(CHANGING[name](entropy(model, second), parts[1]))
    accumulator.discard()


@pytest.mark.parametrize("parts", [(0.0, 0.5), (0.5, 0.0), (0.0, 1.0)], ids=str)
def test_a_term_that_is_zero_once_is_refused(parts: tuple[float, float]) -> None:
    """The big batch has one loss."""
    loss = case(entropy)
    model: Any = loss.model()
    accumulator = Accumulator(model, sgd(list(model.parameters())), steps=2)
    first, second = loss.micro_batches((3, 2))
    accumulator.backward(entropy(model, first) + parts[0] * model["unused"](first["x"]).square().mean())
    with pytest.raises(LossError, match=r"averaged over different things|changed within a window"):
        accumulator.backward(entropy(model, second) + parts[1] * model["unused"](second["x"]).square().mean())
    accumulator.discard()


REFUSED: dict[str, Function] = {
    "one of two, by turns": lambda m, b: (float(chosen(b).any()) * entropy(m, b) + float(not chosen(b).any()) * F.cross_entropy(m["used"](b["x"]) - 1, b["label"])),
    "beside a mean over all": selected(lambda m, b: F.mse_loss(m["used"](b["x"]), b["value"]), lambda m, b: m["used"](b["x"]).sum() * 0),
    "in some alone": lambda m, b: entropy(m, b) + (0 * m["unused"](b["x"]).sum() if chosen(b).any() else 0.0),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_zero_in_the_place_of_something_is_refused(name: str) -> None:
    """What is zero here and counts elsewhere would change what the others are averaged over."""
    loss = case(REFUSED[name])
    with pytest.raises(LossError):
        accumulated(loss, some_without(loss), 3)


def test_a_mean_of_zeros_counts() -> None:
    """It is over as many samples as any."""

    def value(model: Any, batch: Batch) -> Tensor:
        out = model["used"](batch["x"])
        return (out * (batch["scalar"] > 10)[:, None]).mean() if chosen(batch).any() else (out * 0).mean()

    loss = case(value)
    batches = some_without(loss)
    assert_equal(accumulated(loss, batches, 3), big_batches(loss, batches, 3))
