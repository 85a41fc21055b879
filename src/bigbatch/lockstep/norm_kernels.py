"""The arithmetic of BatchNorm in pieces, between which micro-batches meet: torch's own kernels where there are some."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from bigbatch.execute.graph_record import NotCapturable

_MOST = 512


class Constants:
    """Small tensors that the sizes of a window give: made on a device once, and kept for the windows to come.

    A captured window reads them where they are, so it holds on to them.
    """

    def __init__(self) -> None:
        """Have none yet."""
        self._made: dict[tuple[object, ...], Tensor] = {}

    def get(self, key: tuple[object, ...], device: torch.device, make: Callable[[], Tensor]) -> Tensor:
        """Return a tensor that was made before, or make it; `key` names its numbers."""
        place = (*key, device)
        if place not in self._made:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                # It would be filled by the replays of one graph alone.
                raise NotCapturable("its micro-batches met with other numbers of values than in the window before")
            while len(self._made) >= _MOST:
                self._made.pop(next(iter(self._made)))
            self._made[place] = make()
        return self._made[place]

    def all(self) -> list[Tensor]:
        """Return all that there are."""
        return list(self._made.values())


class Moments(NamedTuple):
    """Mean and spread of some values, by channel."""

    mean: Tensor
    spread: Tensor  # the variance; on a device the inverse of its root, as the kernel gives it
    number: int  # values of each channel


class Pooled(NamedTuple):
    """Those of all micro-batches, as values are normalised by them."""

    mean: Tensor
    inverse_std: Tensor
    number: int


def moments(x: Tensor) -> Moments:
    """Return those of one micro-batch."""
    number = x.numel() // max(x.shape[1], 1)
    if x.is_cuda and number:
        return Moments(*torch.batch_norm_stats(x, 0.0), number)  # eps = 0: it can be turned back
    if not number:
        nothing = _wide(x).new_zeros(x.shape[1])
        return Moments(nothing, nothing, 0)
    variance, mean = torch.var_mean(_wide(x), _but_channels(x), correction=0)
    return Moments(mean, variance, number)


def normalised(x: Tensor, weight: Tensor | None, bias: Tensor | None, pooled: Pooled) -> Tensor:
    """Return the values of one micro-batch, normalised by all."""
    if x.is_cuda and x.numel():
        return torch.batch_norm_elemt(x, weight, bias, pooled.mean, pooled.inverse_std, 0.0)
    scale = pooled.inverse_std if weight is None else pooled.inverse_std * weight.to(pooled.mean.dtype)
    result = (_wide(x) - _column(pooled.mean, x)) * _column(scale, x)
    if bias is not None:
        result = result + _column(bias.to(result.dtype), x)
    return result.to(x.dtype)


def sums_of(above: Tensor, x: Tensor, weight: Tensor | None, pooled: Pooled) -> tuple[Tensor, ...]:
    """Return what one gradient sums to by channel, plain and times x - mean, and those of weight and bias."""
    if x.is_cuda and x.numel():
        flags = (True, weight is not None, True)
        return torch.batch_norm_backward_reduce(above, x, pooled.mean, pooled.inverse_std, weight, *flags)
    dims, wide = _but_channels(x), _wide(above)
    total, with_x = wide.sum(dims), (wide * (_wide(x) - _column(pooled.mean, x))).sum(dims)
    kind = total.dtype if weight is None else weight.dtype
    return total, with_x, (with_x * pooled.inverse_std).to(kind), total.to(kind)


def below(  # noqa: PLR0917 - as torch's kernel
    above: Tensor, x: Tensor, weight: Tensor | None, pooled: Pooled, total: tuple[Tensor, Tensor], constants: Constants
) -> Tensor:
    """Return the gradient of one micro-batch's values; `total`: the sums of all, plain and times x - mean."""
    mean, inverse_std, number = pooled
    if x.is_cuda and x.numel():
        make = lambda: torch.full((1,), number, dtype=torch.int32, device=x.device)  # noqa: E731
        there = constants.get(("number", number), x.device, make)
        return torch.batch_norm_backward_elemt(above, x, mean, inverse_std, weight, *total, there)
    scale = inverse_std if weight is None else inverse_std * weight.to(mean.dtype)
    slope = total[1] / number * inverse_std.square()
    centred = _wide(x) - _column(mean, x)
    result = (_wide(above) - _column(total[0] / number, x) - centred * _column(slope, x)) * _column(scale, x)
    return result.to(above.dtype)


def dense(x: Tensor) -> Tensor:
    """Have the channels lie first or last, as the kernels want it."""
    if x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)):  # noqa: PLR2004
        return x
    return x.contiguous()


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in {torch.float32, torch.float64} else x.float()


def _but_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _column(values: Tensor, like: Tensor) -> Tensor:
    """Put one value per channel where the channels are."""
    return values.reshape(1, -1, *(1,) * (like.dim() - 2))
