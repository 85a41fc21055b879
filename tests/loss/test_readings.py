"""A reading is remembered by its graph's looks: losses that look alike and differ must not be taken for one another."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bigbatch import Accumulator
from bigbatch.errors import LossError
from tests.support.losses import READABLE
from tests.support.reference import distance, trained
from tests.support.refused import COUPLED, SETTLED, UNREADABLE, Refused
from tests.support.samples import Loss, join, mlp, rows

pytestmark = pytest.mark.filterwarnings(
    "ignore:Using a target size:UserWarning",  # some of them are that mistake
    "ignore:reduction.*divides the total loss:UserWarning",  # kl_div(reduction="mean")
    "ignore:this loss looks divided by steps:UserWarning",
    "ignore:this loss is a sum over data:UserWarning",  # by a number that is also another size
)

BATCHES = [rows(3, 0), rows(2, 1)]


def on_rows(case: Loss) -> bool:
    """All losses of one model on one kind of data, so that one accumulator can meet them all."""
    shapes = [p.shape for p in case.model().parameters()]
    return case.batch is rows and shapes == [p.shape for p in mlp()().parameters()] and "compiled" not in case.name


POOL = {
    case.name + (" refused" if isinstance(case, Refused) else ""): case
    for case in [*READABLE, *SETTLED, *UNREADABLE, *COUPLED]
    if on_rows(case) and not (isinstance(case, Refused) and case.late)
}


@functools.cache
def true_gradient(name: str) -> list[Tensor]:
    """The gradient of one real big batch."""
    model = mlp()()
    loss = POOL[name].loss(model, join(BATCHES))
    return list(torch.autograd.grad(loss, trained(model), materialize_grads=True))


def assert_read_as_ever(names: list[str]) -> None:
    """One accumulator meets these losses twice, window after window: each is exact, or refused where it must be."""
    model = mlp()()
    accumulator = Accumulator(model, torch.optim.SGD(trained(model), lr=0.0), steps=2)
    seen: list[Tensor] = []

    def look() -> None:
        seen[:] = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in trained(model)]

    accumulator.before_step(look)
    for name in [*names, *names]:
        case = POOL[name]
        try:
            for batch in BATCHES:
                accumulator.backward(case.loss(model, batch))
        except LossError as error:
            assert isinstance(case, Refused), f"{name}: {error}"  # noqa: PT017 - it may be raised or not
            accumulator.discard()
        else:
            assert not isinstance(case, Refused), f"{name} was read"
            assert distance(seen, true_gradient(name), floor=1e-2) <= 1e-12, name


@given(st.lists(st.sampled_from(sorted(POOL)), min_size=2, max_size=8))
@settings(max_examples=150)
def test_losses_are_read_as_if_for_the_first_time(names: list[str]) -> None:
    """Whatever was read before."""
    assert_read_as_ever(names)


def test_every_loss_is_read_beside_its_neighbours() -> None:
    """By name, those that look most alike follow one another."""
    assert_read_as_ever(sorted(POOL))


@pytest.mark.parametrize("glued", [False, True])
def test_a_loss_of_one_sample_without_a_reduction_counts_one_again(*, glued: bool) -> None:
    """`cross_entropy(..., reduction="none")` saves no count, so its remembered reading must not look for one."""
    model, batch = mlp()(), join(BATCHES)
    x, y = batch["x"], batch["label"]

    def loss(at: int) -> Tensor:
        value = torch.nn.functional.cross_entropy(model(x[at : at + 1]), y[at : at + 1], reduction="none")
        return torch.cat([value]).mean() if glued else value.squeeze()

    true = torch.autograd.grad(torch.stack([loss(at) for at in range(len(x))]).mean(), trained(model))
    accumulator = Accumulator(model, torch.optim.SGD(trained(model), lr=0.0), steps=len(x))
    seen: list[Tensor] = []
    accumulator.before_step(lambda: seen.extend(p.grad.clone() for p in trained(model) if p.grad is not None))
    for at in range(len(x)):
        accumulator.backward(loss(at))
    assert distance(seen, true) <= 1e-12
