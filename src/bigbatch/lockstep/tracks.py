"""The way that a run took, to be compared with that of another: what autograd saves of it, and which leaves it reaches.

Values tell little where a model begins: an adapter or a gate that begins at zero gives the same result whichever
condition it is for, and another gradient. The condition is among what is saved, in a few numbers here.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from bigbatch.lockstep.differing import RunsDiffer

_SAME = 1e-2  # of a tensor's norm: other data are further apart, and rounding is not


class Tracks:
    """What one run has saved, and then another."""

    def __init__(self) -> None:
        """Have seen nothing."""
        self._first: list[tuple[torch.Size, Tensor]] = []
        self._second: list[tuple[torch.Size, Tensor]] = []
        self._leaves: frozenset[int] = frozenset()

    def forget(self, tensor: Tensor) -> None:
        """Save nothing of the first run."""
        self._first.append(_track(tensor))

    def first(self, results: Iterable[Tensor], inputs: Collection[Tensor]) -> None:
        """The first run is over: note which leaves its results hang on."""
        self._leaves = _leaves(results, inputs)

    @contextmanager
    def second(self) -> Iterator[None]:
        """Look at what is saved of a second run inside."""
        self._second = []
        with saved_tensors_hooks(self._look, lambda saved: saved):
            yield

    def compare(self, results: Iterable[Tensor], inputs: Collection[Tensor]) -> None:
        """Raise where the second run went another way."""
        if len(self._first) != len(self._second):
            raise RunsDiffer.in_path(f"{len(self._second)} tensors are saved of it, and were {len(self._first)}")
        if _leaves(results, inputs) != self._leaves:
            raise RunsDiffer.in_path("it uses other parameters")
        if any(one[0] != other[0] for one, other in zip(self._first, self._second, strict=True)):
            raise RunsDiffer.in_path("it computes with tensors of other shapes")
        apart = [_apart(one[1], other[1]) for one, other in zip(self._first, self._second, strict=True)]
        if any(bool(each) for each in apart):
            raise RunsDiffer.in_path("it computes with other values")

    def _look(self, tensor: Tensor) -> Tensor:
        self._second.append(_track(tensor))
        return tensor.detach()  # without its graph: an operation that held its own result would never go


def _tells(tensor: Tensor) -> bool:
    """Whether a tensor can be compared. What a kernel keeps for itself cannot: perhaps nobody has written to it."""
    if type(tensor) not in {Tensor, torch.nn.Parameter} or tensor.layout != torch.strided or not tensor.numel():
        return False
    whole = not tensor.is_floating_point() and not tensor.is_complex()
    # Of an attention that drops nothing on a GPU, on whichever side.
    is_seed = whole and torch.cuda.is_initialized() and (not tensor.dim() or tensor.dtype == torch.uint64)
    is_space = tensor.is_cuda and tensor.dtype == torch.uint8  # of a recurrent network
    return not is_seed and not is_space


@torch.no_grad()
def _track(tensor: Tensor) -> tuple[torch.Size, Tensor]:
    """Return a tensor's shape, and two numbers: one in which each place has a weight of its own, and its norm."""
    if not _tells(tensor):
        return tensor.shape, torch.zeros(2)
    with torch.autocast(tensor.device.type, enabled=False):
        wide = tensor.detach() if tensor.dtype in {torch.float32, torch.float64} else _real(tensor).float()
        rows = _real(wide).flatten(1) if wide.dim() > 1 else _real(wide).reshape(1, -1)
        weighed = (rows @ _weights(rows.shape[1], rows)) @ _weights(rows.shape[0], rows)
        return tensor.shape, torch.stack([weighed, torch.linalg.vector_norm(rows)]).double()


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _weights(number: int, like: Tensor) -> Tensor:
    return torch.cos(torch.arange(1, number + 1, dtype=like.dtype, device=like.device))


def _apart(one: Tensor, other: Tensor) -> Tensor:
    """Return whether two are of other data, as a tensor; where the first is not finite, nothing can be told."""
    near = (one - other).abs().amax() <= _SAME * one[1].clamp(min=1e-30)
    return one.isfinite().all() & ~near


def _leaves(results: Iterable[Tensor], inputs: Collection[Tensor]) -> frozenset[int]:
    """Return the ids of the leaves of a graph that lie above the inputs of a run."""
    given = {id(tensor) for tensor in inputs}
    seen: set[Any] = {tensor.grad_fn for tensor in inputs if tensor.grad_fn is not None}
    stack: list[Any] = [tensor.grad_fn for tensor in results if tensor.grad_fn is not None]
    found: set[int] = set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor) and id(variable) not in given:
            found.add(id(variable))
        stack.extend(below for below, _ in node.next_functions if below is not None)
    return frozenset(found)
