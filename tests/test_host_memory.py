"""Pieces of pinned host memory, here of plain one."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bigbatch.lockstep import pinned_slabs
from bigbatch.lockstep.pinned_slabs import HostMemory

_SLAB = 1 << 16


class _Torch:
    """torch, without a device to pin for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(size: int, pin_memory: bool, **named: Any) -> Tensor:
        assert pin_memory
        assert size & (size - 1) == 0, "torch's pool would round it up"
        return torch.empty(size, **named)


@pytest.fixture(autouse=True, scope="module")
def _unpinned() -> Any:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pinned_slabs, "torch", _Torch())
        patched.setattr(pinned_slabs, "_SLAB", _SLAB)
        yield


def _like(memory: HostMemory, size: int) -> Tensor:
    return memory.like(torch.empty(size, dtype=torch.uint8), size)


@given(st.lists(st.lists(st.integers(1, 3 * _SLAB), min_size=1, max_size=30), min_size=1, max_size=3))
def test_pieces_do_not_overlap(windows: list[list[int]]) -> None:
    """Each has its own bytes until the next window."""
    memory = HostMemory()
    for sizes in windows:
        memory.begin_anew()
        pieces = [_like(memory, size) for size in sizes]
        spans = sorted((piece.data_ptr(), piece.data_ptr() + piece.numel()) for piece in pieces)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
        assert [piece.numel() for piece in pieces] == sizes


@pytest.mark.parametrize("size", [_SLAB // 2 + 512, _SLAB + 512, 3 * _SLAB])
def test_little_is_left_at_the_ends_of_slabs(size: int) -> None:
    """What is there before a step is compared with what pieces take: more than a part of it must not be pinned."""
    memory = HostMemory()
    for _ in range(200):
        _like(memory, size)
    assert memory.held <= 1.3 * 200 * size


def test_small_pieces_fit_between_large_ones() -> None:
    """A slab that has no room for a large one is not done."""
    memory = HostMemory()
    for _ in range(20):
        _like(memory, 3 * _SLAB // 8)
        _like(memory, _SLAB // 8)
    assert memory.held == 20 * _SLAB // 2 + (20 * _SLAB // 2) % (2 * _SLAB)


def test_the_next_window_has_the_same_memory() -> None:
    """In whatever order its pieces come, also those of a batch that is not as large."""
    memory = HostMemory()
    sizes = [_SLAB, 300, 5 * _SLAB // 8, _SLAB // 4] * 5
    for size in sizes:
        _like(memory, size)
    held = memory.held
    for again in (sizes, sizes[:7], sizes):
        memory.begin_anew()
        for size in again:
            _like(memory, size)
        assert memory.held == held
