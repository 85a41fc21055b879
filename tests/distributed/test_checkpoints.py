"""Checkpoints by `torch.distributed.checkpoint`: saved on some ranks, loaded on others."""

from pathlib import Path
from typing import Any

import pytest

from bigbatch import Accumulator
from tests.support.rank_loops import OPTIMIZERS, WRAPPERS, Batch, joined, mean, micro_batch, model, weights
from tests.support.ranks import exactly
from tests.support.reference import distance

pytestmark = pytest.mark.ranks

SIZES = [4, 3, 5, 2, 4, 1, 3, 6]  # micro-batches of two windows, four to each


def of_rank(rank: int, ranks: int, window: int) -> list[Batch]:
    """Return a rank's share of a window's four micro-batches."""
    every = [micro_batch(size, number) for number, size in enumerate(SIZES)]
    return every[4 * window : 4 * window + 4][rank::ranks]


def trained(rank: int, ranks: int, kind: str, window: int, folder: str) -> Any:
    """Load what is there, train one window, and save."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    dcp: Any = checkpoint
    network = WRAPPERS[kind](model())
    optimizer = OPTIMIZERS["adamw"](network.parameters())
    accumulator = Accumulator(network, optimizer, steps=4 // ranks)  # one rank's

    def state() -> dict[str, Any]:
        found, moments = get_state_dict(network, optimizer)
        return {"model": found, "optimizer": moments, "window": accumulator.state_dict()}

    if window:
        saved = state()
        dcp.load(saved, checkpoint_id=f"{folder}/{window - 1}")
        set_state_dict(network, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
        accumulator.load_state_dict(saved["window"])
    for batch in accumulator.over(of_rank(rank, ranks, window)):
        accumulator.backward(mean(network, batch))
    dcp.save(state(), checkpoint_id=f"{folder}/{window}")
    return weights(network)


@pytest.mark.parametrize(("kind", "numbers"), [("ddp", (2, 4)), ("shards", (2, 4)), ("shards", (4, 2))], ids=str)
def test_saved_on_some_ranks_and_loaded_on_others(kind: str, numbers: tuple[int, int], tmp_path: Path) -> None:
    """The weights after both windows are those of one process."""
    network = model()
    optimizer = OPTIMIZERS["adamw"](network.parameters())
    for window, ranks in enumerate(numbers):
        optimizer.zero_grad()
        mean(network, joined(of_rank(0, 1, window))).backward()
        optimizer.step()
        for each in exactly(ranks, trained, ranks, kind, window, str(tmp_path)):
            assert distance(each, weights(network)) <= 1e-12
