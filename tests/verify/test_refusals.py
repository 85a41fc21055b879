"""What cannot be verified is refused, with what was found and what to type; the texts are approved."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bigbatch import errors, verify
from tests.support.defects import Batch, by_samples, mean, network, samples
from tests.support.messages import approve

Verify: Any = verify


def cleared(model: nn.Module, micro_batches: list[Batch]) -> None:
    """Clear all gradients at the end."""
    by_samples(mean)(model, micro_batches)
    model.zero_grad()


def of_another(_model: nn.Module, micro_batches: list[Batch]) -> None:
    """Train another model."""
    other = network()
    by_samples(mean)(other, micro_batches)
    torch.optim.SGD(other.parameters(), lr=0.0).step()


CASES: dict[str, tuple[Callable[[], object], type[Exception]]] = {
    "no model": (lambda: Verify(3, mean, samples(), 4), errors.ConfigurationError),
    "a criterion": (lambda: Verify(network(), nn.CrossEntropyLoss(), samples(), 4), errors.ConfigurationError),
    "a loop that is none": (lambda: Verify(network(), mean, samples(), 4, train_window=3), errors.ConfigurationError),
    "options that are none": (lambda: Verify(network(), mean, samples(), 4, options={}), errors.ConfigurationError),
    "no size": (lambda: verify(network(), mean, samples(), 0), errors.ConfigurationError),
    "all at once": (lambda: verify(network(), mean, samples(), 11), errors.ConfigurationError),
    "one sample": (lambda: verify(network(), mean, samples(1), 1), errors.BatchError),
    "nothing to train": (
        lambda: verify(network().requires_grad_(False), mean, samples(), 4),
        errors.ConfigurationError,
    ),
    "another loss": (
        lambda: verify(network(), lambda _, b: (b[0] * torch.ones((), requires_grad=True)).mean(), samples(), 4),
        errors.LossError,
    ),
    "no loss": (lambda: verify(network(), lambda m, b: m(b[0]), samples(), 4), errors.LossError),
    "no graph": (lambda: verify(network(), lambda m, b: mean(m, b).detach(), samples(), 4), errors.LossError),
    "no number": (lambda: verify(network(), lambda m, b: mean(m, b) * torch.nan, samples(), 4), errors.LossError),
    "a loop without": (lambda: Verify(network(), mean, samples(), 4, train_window=lambda *_: None), errors.LossError),
    "a loop that clears": (lambda: verify(network(), mean, samples(), 4, train_window=cleared), errors.LossError),
    "a loop of another": (lambda: verify(network(), mean, samples(), 4, train_window=of_another), errors.LossError),
    "a kind that is none": (
        lambda: verify(network(), mean, samples(), 4).raise_if_wrong(allow={"dropout"}),
        errors.ConfigurationError,
    ),
    "a kind in no set": (
        lambda: verify(network(), mean, samples(), 4).raise_if_wrong(allow="randomness"),
        errors.ConfigurationError,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_verified_is_refused(case: str) -> None:
    """In the house manner."""
    call, kind = CASES[case]
    with pytest.raises(kind) as raised:
        call()
    approve("verify", case, raised.value)
    assert "ccumulator" not in str(raised.value)
