"""Coupled samples over several ranks: BatchNorm and `across` see all micro-batches of all ranks."""

import pytest

from tests.support.rank_loops import Sizes
from tests.support.rank_norms import CASES, compare
from tests.support.ranks import exactly

pytestmark = pytest.mark.ranks

SIZES = [[[3, 5, 4], [7, 4, 2]], [[2, 5], [6, 2], [4, 4]]]


@pytest.mark.parametrize(
    ("name", "sizes", "activations"),
    [
        *[(name, sizes, "auto") for name in CASES for sizes in SIZES],
        *[("contrastive", [[5, 4], [6, 3]], activations) for activations in ("keep", "recompute")],
        ("two counts", SIZES[0], "auto"),
        ("values", [[8], [1]], "auto"),
    ],
    ids=str,
)
def test_micro_batches_of_all_ranks_meet(name: str, sizes: Sizes, activations: str) -> None:
    """Weights, losses and running statistics are those of one process; some ranks have one micro-batch alone."""
    exactly(len(sizes), compare, sizes, name, activations)
