"""What does not show at the first update: samples are looked at once more, and updates that were made are told of."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import BigStep, Options
from bigbatch.errors import CoupledLoss
from tests.support.reference import trained

Batch = dict[str, Tensor]


def batch(seed: int) -> Batch:
    """Return rows and their classes."""
    by = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(11, 5, generator=by, dtype=torch.float64), "y": torch.randint(3, (11,), generator=by)}


class Gated(nn.Module):
    """Looks across samples, behind a gate that begins at zero; one that is learned shows in its gradient."""

    def __init__(self, *, learned: bool = False) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(5, 3), nn.Linear(5, 3)
        self.gate = nn.Parameter(torch.zeros(()), requires_grad=learned)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 5) → (n, 3)."""
        found: Tensor = self.layer(x) + self.gate * self.other((x - x.mean(0)).square())
        return found


def classified(model: Any, batch: Batch) -> Tensor:
    """A mean over samples."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


def test_a_gate_that_begins_at_zero() -> None:
    """Where it is learned its gradient shows at once what is behind; else the second look does."""
    model = Gated(learned=True).double()
    with pytest.raises(CoupledLoss, match="are coupled"):
        BigStep(model, torch.optim.SGD(model.parameters(), lr=0.1), classified, micro_batch_size=4)(batch(0))
    model = Gated().double()
    step = BigStep(model, torch.optim.SGD(trained(model), lr=0.1), classified, micro_batch_size=4)
    step(batch(0))
    model.gate.fill_(0.1)
    with pytest.raises(CoupledLoss, match=r"are coupled[\s\S]*did not show at first[\s\S]*1 by now"):
        step(batch(1))


def test_a_second_look_that_fails_accuses_nobody() -> None:
    """The user's own error comes out of the step itself."""
    model = nn.Linear(5, 3).double()
    failing: list[int] = []

    def loss(model: Any, batch: Batch) -> Tensor:
        if failing:
            raise ZeroDivisionError("mine")
        return classified(model, batch)

    step = BigStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, micro_batch_size=4)
    for seed in range(3):
        step(batch(seed))
    failing.append(1)
    with pytest.raises(ZeroDivisionError, match="mine"):
        step(batch(3))


@pytest.mark.parametrize("norm", [False, True])
def test_a_teacher_that_begins_as_a_copy(norm: bool) -> None:
    """Its average moves with every micro-batch; at first that moves nothing, and the update is right."""
    student = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4) if norm else nn.Tanh(), nn.Linear(4, 3)).double()
    teacher = copy.deepcopy(student).requires_grad_(False).eval()

    def loss(model: Any, batch: Batch) -> Tensor:
        with torch.no_grad():
            for mine, other in zip(teacher.parameters(), model.parameters(), strict=True):
                mine.lerp_(other, 0.5)
        return (
            F.cross_entropy(model(batch["x"]), batch["y"])
            + F.mse_loss(model(batch["x"]), teacher(batch["x"]), reduction="none").mean()
        )

    step = BigStep(student, torch.optim.SGD(student.parameters(), lr=0.5), loss, micro_batch_size=4)
    step(batch(0))
    with pytest.raises(CoupledLoss, match=r"did not show at first[\s\S]*to find the cause"):
        step(batch(1))


def test_class_weights_of_the_micro_batch_that_come_later() -> None:
    """What a later batch switches on is seen at the sixteenth."""
    model = nn.Linear(5, 3).double()
    number = [0]

    def loss(model: Any, batch: Batch) -> Tensor:
        weight = torch.bincount(batch["y"], minlength=3).double() + 1 if number[0] > 5 else None
        return F.cross_entropy(model(batch["x"]), batch["y"], weight=weight)

    step = BigStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, micro_batch_size=4)
    for seed in range(15):
        number[0] = seed
        step(batch(seed))
    with pytest.raises(CoupledLoss, match="15 by now"):
        step({**batch(15), "y": torch.arange(11) % 2})


def test_a_look_that_was_not_to_be_had_is_overdue() -> None:
    """A batch of one sample shows nothing, nor does an update that was skipped."""
    model = Gated().double()
    options = Options(skip_nonfinite=True)
    step = BigStep(model, torch.optim.SGD(trained(model), lr=0.1), classified, micro_batch_size=4, options=options)
    step(batch(0))
    model.gate.fill_(0.1)
    bad = batch(2)
    bad["x"][0, 0] = torch.inf
    assert step(bad).skipped
    step({name: values[:1] for name, values in batch(4).items()})
    with pytest.raises(CoupledLoss, match="2 by now"):
        step(batch(5))


def test_it_looks_four_times_more_and_leaves_no_trace() -> None:
    """Where it was told not to, never."""
    for check, looks in ((True, 4), (False, 0)):
        model = nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.0), nn.Linear(4, 3)).double()
        calls = [0]

        def loss(model: Any, batch: Batch, calls: list[int] = calls) -> Tensor:
            calls[0] += 1
            return classified(model, batch)

        step = BigStep(
            model, torch.optim.SGD(model.parameters(), lr=0.1), loss, micro_batch_size=4, options=Options(check=check)
        )
        found = []
        for seed in range(140):
            before = calls[0]
            step(batch(seed))
            found.append(calls[0] - before)
        assert [number for number, each in enumerate(found) if each > 3] == ([0, 1, 3, 15, 127] if looks else [])
