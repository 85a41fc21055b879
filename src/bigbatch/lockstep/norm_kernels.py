"""The arithmetic of BatchNorm in pieces, between which micro-batches meet: torch's own kernels where there are some."""

from typing import NamedTuple

import torch
from torch import Tensor

from bigbatch.lockstep.constants import Constants


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


class Sums(NamedTuple):
    """What a micro-batch's gradient sums to, by channel."""

    above: Tensor
    above_x: Tensor  # times x - mean
    weight: Tensor
    bias: Tensor


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


def sums_of(above: Tensor, x: Tensor, weight: Tensor | None, pooled: Pooled) -> Sums:
    """Return what all micro-batches' gradients depend on of one."""
    mean, inverse_std, _ = pooled
    if x.is_cuda and x.numel():
        flags = (True, weight is not None, True)
        return Sums(*torch.batch_norm_backward_reduce(above, x, mean, inverse_std, weight, *flags))
    dims, wide = _but_channels(x), _wide(above)
    total, with_x = wide.sum(dims), (wide * (_wide(x) - _column(mean, x))).sum(dims)
    kind = total.dtype if weight is None else weight.dtype
    return Sums(total, with_x, (with_x * inverse_std).to(kind), total.to(kind))


def below(  # noqa: PLR0917 - as torch's kernel
    above: Tensor,
    x: Tensor,
    weight: Tensor | None,
    pooled: Pooled,
    total: tuple[Tensor, Tensor],
    constants: Constants,
) -> Tensor:
    """Return the gradient of one micro-batch's values; `total`: the sums of all, plain and times x - mean."""
    mean, inverse_std, number = pooled
    if x.is_cuda and x.numel():
        number_there = _counted(constants, number, x.device)
        return torch.batch_norm_backward_elemt(above, x, mean, inverse_std, weight, *total, number_there)
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


def _counted(constants: Constants, number: int, device: torch.device) -> Tensor:
    return constants.get(("number", number), device, lambda: torch.full((1,), number, dtype=torch.int32, device=device))


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in {torch.float32, torch.float64} else x.float()


def _but_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _column(values: Tensor, like: Tensor) -> Tensor:
    """Put one value per channel where the channels are."""
    return values.reshape(1, -1, *(1,) * (like.dim() - 2))
