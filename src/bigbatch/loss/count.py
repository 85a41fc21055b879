"""Counts: how many things a mean is over, as a number on the host or a 0-d tensor on a device."""

import math
from numbers import Real
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from bigbatch.errors import LossError

Count: TypeAlias = float | Tensor
Kind: TypeAlias = Literal["mean", "sum", "once"]
GivenCount: TypeAlias = float | Tensor | Literal["sum", "once"]


class TotalOfSum(float):
    """The total of a sum, which divides nothing: 1, however many have a part in it."""


RATIO_TOLERANCE = 1e-12  # of counts that are in one ratio in all micro-batches
LOW_PRECISION = (torch.bfloat16, torch.float16)


def wide(number: Tensor) -> Tensor:
    """Return a count on a device as precisely as the device can hold it."""
    return number.detach().to(torch.float32 if number.device.type == "mps" else torch.float64)


def finite(total: Count) -> Count:
    """Return a total of counts, or refuse one that no number holds; what is on a device is not waited for."""
    if isinstance(total, float) and total == math.inf:
        msg = "the counts of this window add up to inf: a count is how many things a mean is over, such as len(batch)"
        raise LossError(msg)
    return total


def checked_count(count: object) -> tuple[Kind, Count]:
    """Return the kind and number of a count that a user gave, or refuse it."""
    if count == "sum" and isinstance(count, str):
        return "sum", 1.0
    if count == "once" and isinstance(count, str):
        return "once", 1.0
    if isinstance(count, Tensor):
        if count.numel() != 1 or count.requires_grad or count.is_complex():
            msg = f"a count is one number without gradient; found a tensor of shape {tuple(count.shape)}"
            raise LossError(msg)
        if count.device.type == "cpu":
            return checked_count(count.item())
        return "mean", wide(count.reshape(()))
    if (
        isinstance(count, bool) or not isinstance(count, Real) or not 0 <= float(count) < float("inf")
    ):  # numpy's are Real
        msg = f"a count is a number of things, 0 or more, or 'sum' or 'once'; found {count!r}"
        raise LossError(msg)
    return "mean", float(count)
