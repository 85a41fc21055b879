"""Counts that come with a loss, `backward(loss, count=n)`, beside the one that its graph shows."""

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import Accumulator

X = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(4, (20,), generator=torch.Generator().manual_seed(1))
LABELS[[0, 1, 6, 12]] = -100
CUTS = [slice(0, 5), slice(5, 12), slice(12, 16), slice(16, 20)]

Counting = Callable[[nn.Module, slice], tuple[Tensor, int | Tensor]]


def entropy(model: nn.Module, cut: slice) -> Tensor:
    """A mean over the targets that are not ignored."""
    return F.cross_entropy(model(X[cut]), LABELS[cut])


CASES: dict[str, tuple[Counting, bool]] = {
    "samples for targets": (lambda m, cut: (entropy(m, cut), len(X[cut])), True),
    "targets": (lambda m, cut: (entropy(m, cut), (LABELS[cut] != -100).sum()), False),
    "samples for elements": (lambda m, cut: (m(X[cut]).square().mean(), len(X[cut])), False),
    "a loss that cannot be read": (lambda m, cut: (m(X[cut]).square().mean().sqrt(), len(X[cut])), False),
    "two terms": (lambda m, cut: (entropy(m, cut) + m(X[cut]).square().mean(), len(X[cut])), False),
    "a sum over as many features": (lambda m, _: (m(X[:4]).square().sum() / 4, 4), False),
    "a sum": (lambda m, cut: (m(X[cut]).square().sum() / len(X[cut]), len(X[cut])), False),
}


@pytest.mark.parametrize("name", CASES)
def test_a_count_that_contradicts_the_graph_is_warned_of(name: str) -> None:
    """Once, with both numbers; it is the user's word, so it counts."""
    make, contradicts = CASES[name]
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=4)
    update = None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for cut in CUTS * 3:
            loss, number = make(model, cut)
            update = accumulator.backward(loss, count=number)
    assert len(told) == contradicts
    assert all(
        "count= is 5 and 7 in two micro-batches whose losses are means over 3 and 6" in str(w.message) for w in told
    )
    assert all(w.filename == __file__ for w in told)
    assert update is not None


def test_a_count_is_compared_within_a_window() -> None:
    """Where a window has one micro-batch, any count is the same."""
    model = nn.Linear(6, 4)
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=1)
    for cut in CUTS:
        accumulator.backward(entropy(model, cut), count=1)
