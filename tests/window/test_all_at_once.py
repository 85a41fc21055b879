"""Weights of micro-batches that run side by side: counts that are tensors, as on a device, weigh as numbers do."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from bigbatch import BigStep
from bigbatch.loss.count import Term
from bigbatch.window.all_at_once import weigh_together
from bigbatch.window.tally import Ledger
from tests.support.reference import distance, sgd, trained, weights
from tests.support.samples import Batch, rows, seeded

every_count = st.sampled_from([1, 2]).flatmap(
    lambda number: st.lists(st.tuples(*[st.integers(0, 9)] * number), min_size=2, max_size=6)
)


def terms(counts: Sequence[int], *, on_device: bool) -> list[Term]:
    """Return means over as many things, each with a node of its own."""
    nodes = [(torch.ones((), requires_grad=True) * 2).grad_fn for _ in counts]
    numbers: list[Any] = [torch.tensor(float(n)) if on_device else float(n) for n in counts]
    return [Term(node, "mean", n, f"term {at}", None) for at, (node, n) in enumerate(zip(nodes, numbers, strict=True))]


def weighed(every: Sequence[Sequence[int]], *, on_device: bool) -> tuple[list[list[float]], Ledger]:
    """Return the weight of every term of every micro-batch."""
    ledger = Ledger(len(every))
    found = weigh_together(ledger, [terms(counts, on_device=on_device) for counts in every])
    number = len(every[0])
    return [[float(n) for _, n in w.each] if w.each else [float(w.whole)] * number for w in found], ledger


@given(every_count)
def test_counts_on_a_device_weigh_as_numbers_do(every: list[tuple[int, ...]]) -> None:
    """Each term's weights are its counts' shares: they add up to 1, or to 0 where nothing counted."""
    found, ledger = weighed(every, on_device=True)
    for mine, plain in zip(found, weighed(every, on_device=False)[0], strict=True):
        assert mine == pytest.approx(plain, rel=1e-12, abs=1e-12)
    for column, counts in zip(zip(*found, strict=True), zip(*every, strict=True), strict=True):
        assert [*column] == pytest.approx([n / (sum(counts) or 1) for n in counts], rel=1e-12)
    same = all(abs(row[0] - row[-1]) <= 1e-12 * row[0] for row in found)
    assert bool(ledger.loss_known) == same
    assert isinstance(ledger.loss_known, Tensor) is (len(every[0]) > 1)


COUNTS: dict[str, tuple[Callable[[Any, Batch], Tensor], Any]] = {
    "one mean": (lambda m, b: m(b["x"]).square().mean(), 40.0),
    "as many": (lambda m, b: m(b["x"]).square().mean() + m(b["x2"]).abs().mean(), 40.0),
    "more": (lambda m, b: m(b["x"]).square().mean() + m(b["x2"])[:, 0].abs().mean(), (40.0, 10.0)),
    "a mean and a sum": (lambda m, b: m(b["x"]).square().mean() + m(b["x2"]).abs().sum(), (40.0, 1.0)),
}


@pytest.mark.parametrize("name", COUNTS)
def test_an_update_tells_what_was_counted(name: str) -> None:
    """One number where all means were taken over as many; it is the big batch's update."""
    loss, count = COUNTS[name]
    model, twin = (seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))() for _ in range(2))
    update = BigStep(model, sgd(trained(model)), loss, micro_batch_size=4)(rows(10, 0))
    value = loss(twin, rows(10, 0))
    value.backward()
    sgd(trained(twin)).step()
    assert update.count == count
    assert distance(weights(model), weights(twin)) <= 1e-12
    assert not update.loss_is_exact or update.loss.item() == pytest.approx(value.item(), rel=1e-12)
