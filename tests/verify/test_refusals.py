"""What cannot be verified is refused, with what was found and what to type; the texts are approved."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bigbatch import verify
from bigbatch.errors import BatchError, ConfigurationError, LossError
from tests.support.defects import Batch, by_samples, mean, network, samples
from tests.support.messages import approve

Verify: Any = verify


def called(
    loss_fn: Any = mean, number: int = 11, size: int = 4, model: Any = network, **more: Any
) -> Callable[[], Any]:
    """Verify this."""
    return lambda: Verify(model(), loss_fn, samples(number), size, **more)


def of_another(_model: nn.Module, micro_batches: list[Batch]) -> None:
    """Train another model."""
    other = network()
    by_samples(mean)(other, micro_batches)
    torch.optim.SGD(other.parameters(), lr=0.0).step()


def holding() -> nn.Module:
    """A model that cannot be copied, as one that holds a lock or a generator."""
    model = network()
    vars(model)["lines"] = (line for line in [""])
    return model


CASES: dict[str, tuple[type[Exception], Callable[[], Any]]] = {
    "no model": (ConfigurationError, called(model=lambda: 3)),
    "a criterion": (ConfigurationError, called(nn.CrossEntropyLoss())),
    "a loop that is none": (ConfigurationError, called(train_window=3)),
    "options that are none": (ConfigurationError, called(options={})),
    "no size": (ConfigurationError, called(size=0)),
    "all at once": (ConfigurationError, called(size=11)),
    "one sample": (BatchError, called(number=1, size=1)),
    "no copy": (ConfigurationError, called(model=holding)),
    "nothing to train": (ConfigurationError, called(model=lambda: network().requires_grad_(False))),
    "another loss": (LossError, called(lambda _, b: (b[0] * torch.ones((), requires_grad=True)).mean())),
    "no loss": (LossError, called(lambda m, b: m(b[0]))),
    "no graph": (LossError, called(lambda m, b: mean(m, b).detach())),
    "no number": (LossError, called(lambda m, b: mean(m, b) * torch.nan)),
    "a loop without": (LossError, called(train_window=lambda *_: None)),
    "a loop that clears": (LossError, called(train_window=by_samples(end=lambda model, _: model.zero_grad()))),
    "a loop of another": (LossError, called(train_window=of_another)),
    "a kind that is none": (ConfigurationError, lambda: called()().raise_if_wrong(allow={"dropout"})),
    "a kind in no set": (ConfigurationError, lambda: called()().raise_if_wrong(allow="randomness")),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_verified_is_refused(case: str) -> None:
    """In the house manner."""
    kind, call = CASES[case]
    with pytest.raises(kind) as raised:
        call()
    approve("verify", case, raised.value)
    assert "ccumulator" not in str(raised.value)


def test_a_model_that_is_used_past_the_argument_is_refused_before_it_runs() -> None:
    """By a loss, by a loop, and by an optimizer: nothing of it has moved."""
    model = network(nn.BatchNorm1d(8))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def step_itself(given: nn.Module, _: object) -> None:
        for p, twin in zip(model.parameters(), given.parameters(), strict=True):
            p.grad = twin.grad
        optimizer.step()

    losses: list[Any] = [lambda _, b: mean(model, b), lambda m, b: mean(m, b) + next(model.parameters()).square().sum()]
    cases: list[tuple[Any, Any]] = [(loss, None) for loss in losses]
    for loss, window in (*cases, (mean, by_samples(losses[0])), (mean, by_samples(end=step_itself))):
        with pytest.raises(LossError) as raised:
            verify(model, loss, samples(), 4, train_window=window)
        approve("verify", "the model itself", raised.value)
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
