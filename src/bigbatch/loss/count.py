"""Counts: how many things a mean is over, on the host or as a 0-d tensor on a device; and terms, which have one."""

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node

from bigbatch.errors import LossError

Count: TypeAlias = float | Tensor
Kind: TypeAlias = Literal["mean", "sum", "once"]
GivenCount: TypeAlias = float | Tensor | Literal["sum", "once"]


class TotalOfSum(float):
    """The total of a sum, which divides nothing: 1, however many have a part in it."""


RATIO_TOLERANCE = 1e-12  # of counts that are in one ratio in all micro-batches
LOW_PRECISION = frozenset({torch.bfloat16, torch.float16})


def wide(number: Tensor) -> Tensor:
    """Return a count on a device as precisely as the device can hold it."""
    return number.detach().to(torch.float32 if number.device.type == "mps" else torch.float64)


def finite(total: Count) -> Count:
    """Return a total of counts, or refuse one that no number holds; what is on a device is not waited for."""
    if isinstance(total, float) and total == math.inf:
        raise LossError("the counts of this window add up to inf.", fix="count=len(batch), or another finite number")
    return total


def checked_count(count: object) -> tuple[Kind, Count]:
    """Return the kind and number of a count that a user gave, or refuse it."""
    if isinstance(count, str) and count in {"sum", "once"}:
        return ("sum" if count == "sum" else "once"), 1.0
    if isinstance(count, Tensor):
        if count.numel() != 1 or count.requires_grad or count.is_complex():
            problem = "a count is one number without gradient."
            raise LossError(problem, found=f"a tensor of shape {tuple(count.shape)}", fix="count=mask.sum().detach()")
        if count.device.type == "cpu":
            return checked_count(count.item())
        return "mean", wide(count.reshape(()))
    is_number = isinstance(count, Real) and not isinstance(count, bool)  # numpy's are Real
    if not is_number or not 0 <= float(count) < math.inf:  # type: ignore[arg-type]  # a Real is one
        problem = "a count is a number of things, 0 or more, or 'sum' or 'once'."
        raise LossError(problem, found=repr(count), fix="count=len(batch)")
    return "mean", float(count)  # type: ignore[arg-type]


class Divisor(NamedTuple):
    """What a tensor has counted that divides a sum."""

    mask: int  # which of the tensors that choose what is summed, from the sum down; 0: samples
    each: float  # what each entry of the mask counts as: 1, or its features; of samples, how many there are


@dataclass(slots=True, eq=False)  # not frozen: one is made for every micro-batch, and frozen ones take thrice as long
class Term:
    """One mean or sum inside a loss: `mean` over `count` things, `sum` over data, or `once`, of parameters alone."""

    node: Node | None  # where a weight for this term alone may be put; None: the loss itself
    kind: Kind
    count: Count
    name: str
    value: Tensor | None = None  # known for counted terms only
    divided: bool = False  # a division by its own size has made a sum a mean
    factors: tuple[float | None, ...] = ()  # the constants it was multiplied with, where they can be read
    doubtful: bool = False  # may be over data or over constants
    source: Node | None = None  # the node that holds the count, where it is in a tensor
    about: float = 0.0  # about how large a count in a tensor is, where the host can tell
    shared: bool = False  # its node serves other parts of the loss, too: it cannot carry a weight of this term's
    divisor: Divisor | None = None  # what the tensor that divides a sum has counted
    chosen: bool = False  # over rows that an index or a mask has taken


class _Counted(torch.autograd.Function):
    """An identity in the graph that carries a count."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, kind: Kind, count: Count) -> Tensor:
        ctx.kind, ctx.count, ctx.value = kind, count, value.detach()
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        del ctx
        return gradients[0], None, None


def counted(value: Tensor, count: GivenCount) -> Tensor:
    """Say what a value was averaged over, where its graph cannot tell.

    >>> loss = counted(ce, tokens) + 0.1 * counted(aux, samples)

    `count` is the number of things that this micro-batch's mean is over, as a number or a tensor on any device; or
    "sum" for a plain sum over data; or "once" for a term that is the same in every micro-batch, such as a regulariser.
    It is your word: nothing below it is read. A masked mean with nothing left to average must not be NaN in its
    gradient: write `x.sum() / n.clamp(min=1)`.
    """
    kind, number = checked_count(count)
    if value.dim():
        msg = f"counted takes a 0-d tensor, a mean or a sum; found one of shape {tuple(value.shape)}"
        raise LossError(msg)
    if not value.requires_grad:
        return value
    result: Tensor = _Counted.apply(value, kind, number)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
    return result


class Arrival:
    """A copy of a 0-d tensor to the host; `read` waits for this copy alone, not for what was queued after it."""

    def __init__(self) -> None:
        """Have nothing under way."""
        self._number: Tensor | None = None
        self._host: Tensor | None = None
        self._event: torch.cuda.Event | None = None

    def start(self, number: Tensor) -> None:
        """Start the copy."""
        self._number = number
        if number.device.type == "cuda":
            if self._host is None or self._event is None or self._host.dtype != number.dtype:
                # kept from window to window: pinning memory is slow
                self._host = torch.empty((), dtype=number.dtype, pin_memory=True)
                self._event = torch.cuda.Event()
            self._host.copy_(number, non_blocking=True)
            self._event.record(torch.cuda.current_stream(number.device))

    def read(self) -> float:
        """Return the number."""
        if self._number is None:
            return 0.0
        if self._number.device.type != "cuda" or self._host is None or self._event is None:
            return float(self._number)
        self._event.synchronize()
        return float(self._host)
