"""Models whose outermost sharded module has parameters of its own, which it keeps whole from forward to backward."""

from collections.abc import Sequence
from typing import Any

import pytest

from bigbatch import Accumulator
from tests.support.rank_loops import LOSSES, OPTIMIZERS, assert_same, batches_of, truth
from tests.support.rank_shards import model, shards, whole
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.ranks


def accumulated(rank: int, sizes: Sequence[Sequence[int]], inner: bool, overlap: bool) -> Any:
    """Train micro-batches on one rank; the last layer belongs to the outermost module, and the first, if not inner."""
    plain = model()
    network = shards(plain, [plain[0]] if inner else [])
    optimizer = OPTIMIZERS["adamw"](network.parameters())
    accumulator = Accumulator(network, optimizer, steps=2, clip_norm=1.0, overlap=overlap)
    updates = []
    for batch in accumulator.over(batches_of(rank, sizes)):
        update = accumulator.backward(LOSSES["mean"](network, batch))
        if update is not None:
            updates.append((float(update.loss), float(update.grad_norm or 0), update.skipped, float(update.count)))  # type: ignore[arg-type]
    return whole(network), updates


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("inner", [False, True])
def test_no_gradient_of_the_outermost_module_is_lost(inner: bool, overlap: bool) -> None:
    """Also where gradients stay whole until the last backward of a window."""
    sizes = [[3, 5, 2, 4], [6, 1, 1, 7]]
    found = run_on_ranks(2, accumulated, sizes, inner, overlap)
    assert_same(found, truth(sizes, 2, "mean", "adamw"))
