"""Checkpoints by `torch.distributed.checkpoint`: saved on some ranks, loaded on others."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bigbatch import Accumulator
from bigbatch.errors import StateError
from tests.support.rank_loops import OPTIMIZERS, Batch, mean, micro_batch, model
from tests.support.rank_shards import shards
from tests.support.ranks import run_on_ranks
from tests.support.reference import distance

pytestmark = pytest.mark.ranks

SIZES = [4, 3, 5, 2, 4, 1, 3, 6]  # micro-batches of two windows, four to each


def of_rank(rank: int, ranks: int, window: int) -> list[Batch]:
    """Return a rank's share of a window's four micro-batches."""
    every = [micro_batch(size, number) for number, size in enumerate(SIZES)]
    return every[4 * window : 4 * window + 4][rank::ranks]


def wrapped(kind: str) -> nn.Module:
    """Return the model as this rank has it."""
    return DistributedDataParallel(model()) if kind == "ddp" else shards(model())


def trained(rank: int, ranks: int, kind: str, window: int, folder: str) -> Any:
    """Load what is there, train one window, and save."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    dcp: Any = checkpoint
    network = wrapped(kind)
    optimizer = OPTIMIZERS["adamw"](network.parameters())
    accumulator = Accumulator(network, optimizer, steps=4 // ranks)  # one rank's
    if window:
        weights, moments = get_state_dict(network, optimizer)
        state: dict[str, Any] = {"model": weights, "optimizer": moments, "window": accumulator.state_dict()}
        dcp.load(state, checkpoint_id=f"{folder}/{window - 1}")
        set_state_dict(network, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        accumulator.load_state_dict(state["window"])
    for batch in accumulator.over(of_rank(rank, ranks, window)):
        accumulator.backward(mean(network, batch))
    weights, moments = get_state_dict(network, optimizer)
    dcp.save(
        {"model": weights, "optimizer": moments, "window": accumulator.state_dict()},
        checkpoint_id=f"{folder}/{window}",
    )
    found: list[Any] = list(network.parameters())
    return [p.full_tensor().detach() if hasattr(p, "full_tensor") else p.detach() for p in found]


@pytest.mark.parametrize("numbers", [(2, 4), (4, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_saved_on_some_ranks_and_loaded_on_others(kind: str, numbers: tuple[int, int], tmp_path: Path) -> None:
    """The weights after both windows are those of one process."""
    network = model()
    optimizer = OPTIMIZERS["adamw"](network.parameters())
    for window, ranks in enumerate(numbers):
        found = run_on_ranks(ranks, trained, ranks, kind, window, str(tmp_path))
        parts = of_rank(0, 1, window)
        optimizer.zero_grad()
        mean(network, (torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))).backward()
        optimizer.step()
        for each in found:
            if isinstance(each, BaseException):
                raise each
            assert distance(each, [p.detach() for p in network.parameters()]) <= 1e-12


def in_mid_window(_: int) -> Any:
    """Save where a window is open."""
    network = DistributedDataParallel(model())
    accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=2)
    accumulator.backward(mean(network, micro_batch(4, 1)))
    return accumulator.state_dict()


def test_a_window_of_several_ranks_is_not_saved() -> None:
    """It says when to save instead."""
    errors: Sequence[Any] = run_on_ranks(2, in_mid_window)
    for error in errors:
        assert isinstance(error, StateError), error
        assert "Save between two updates" in str(error)
