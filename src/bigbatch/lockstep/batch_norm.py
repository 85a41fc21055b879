"""BatchNorm over all micro-batches of a window: the big batch's output, gradients and running statistics.

`F.batch_norm` is swapped while a window runs, and acts on its workers alone: that catches every layer that ends there,
subclasses and other libraries' included, also when a checkpoint runs it again in backward. (What calls the function
below it, `torch.batch_norm`, normalises by the micro-batch: a graph or the first check shows it.) Micro-batches meet
twice: in forward for mean and variance, in backward for the two sums that the gradient depends on.

    mean     = sum of n_i * mean_i / N
    variance = sum of n_i * (variance_i + (mean_i - mean)^2) / N
    dx       = weight / std * (dy - sum of dy / N - x_hat * sum of (dy * x_hat) / N)
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bigbatch.distributed.ranks import Ranks
from bigbatch.errors import BatchNormError
from bigbatch.lockstep.collectives import meet_in_forward, refuse_inner_derivative, wide
from bigbatch.lockstep.offload_remake import Recipe
from bigbatch.lockstep.round import Constants, Norms
from bigbatch.lockstep.threads import Worker, current
from bigbatch.state.patch import Swap


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


def norms_of(models: Sequence[nn.Module]) -> Norms:
    """Look up the layers of some models that may normalise by batches: those that keep something beside parameters."""
    found: Norms = {}
    for model in models:
        for name, module in model.named_modules():
            # Whatever a layer calls them. Not by attributes, which may be computed: a spectral norm moves by that.
            if module._buffers:  # noqa: SLF001 - also those that are not saved
                for tensor in (module._parameters.get("weight"), *module._buffers.values()):  # noqa: SLF001
                    if tensor is not None:
                        found[id(tensor)] = (name, module)
    return found


def _met(  # noqa: PLR0917 - torch's own signature
    input: Tensor,  # noqa: A002
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,  # noqa: FBT001, FBT002
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Take the place of `F.batch_norm`."""
    worker = current() if training else None
    if worker is None:
        plain: Tensor = swap.plain(input, running_mean, running_var, weight, bias, training, momentum, eps)
        return plain
    round_, calls = worker.round, worker.norms + 1
    rests = round_.mode == "resting" and running_mean is not None
    if round_.meets and rests:
        meet_in_forward(worker, "BatchNorm", None, lambda _: None)  # for nothing, but the others have their turn
    if rests or not round_.meets:
        plain = swap.plain(input, running_mean, running_var, weight, bias, not rests, momentum, eps)
        worker.norms = calls  # a function mode has torch come by here once more
        return plain
    worker.norms = calls
    name, module = (round_.norms or {}).get(id(weight if running_mean is None else running_mean), ("", None))
    running = None
    if running_mean is not None and running_var is not None:
        running = _updating(worker, running_mean, running_var, momentum, module)
    found, pooled = _BatchNorm.apply(input, weight, bias, eps, running, worker, name)  # type: ignore[no-untyped-call]
    recipes = round_.offload.recipes if round_.offload is not None else None
    if recipes is not None and found.requires_grad and recipes.in_force:
        own_weight, own_bias = (None if each is None else each.detach() for each in (weight, bias))
        now = partial(_normalised, weight=own_weight, bias=own_bias, pooled=pooled)
        recipes.add(found, Recipe(recipes.store(_dense(input.detach())), now))
    return found  # type: ignore[no-any-return]


swap = Swap(F, "batch_norm", lambda _: _met)
_Update = Callable[[Tensor, Tensor], None]


def _updating(worker: Worker, mean: Tensor, variance: Tensor, momentum: float, module: nn.Module | None) -> _Update:
    """Return what takes statistics into a layer's running ones; together, micro-batches count as one batch."""
    if module is None:
        raise BatchNormError(
            "a BatchNorm in training mode belongs to a model that this BigStep was not given, so its running "
            "statistics could not be put back if a step failed.",
            fix="BigStep([model, teacher], optimizer, loss_fn), or evaluation mode: teacher.eval()",
        )
    counter = None if worker.number else getattr(module, "num_batches_tracked", None)
    batches = counter.clone() if isinstance(counter, Tensor) else None  # as the first micro-batch has counted

    def update(new_mean: Tensor, new_variance: Tensor) -> None:
        worker.round.moved_statistics.update((id(mean), id(variance)))
        with torch.no_grad():
            for running, new in ((mean, new_mean), (variance, new_variance)):
                running.mul_(1 - momentum).add_(new.to(running.dtype), alpha=momentum)
            if batches is not None:
                module.num_batches_tracked.copy_(batches)  # type: ignore[operator]

    return update


_Local = tuple[Moments, _Update | None]  # what a micro-batch comes with


def _staying(*_: Any) -> AbstractContextManager[bool]:
    return nullcontext(enter_result=False)


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - `apply` takes no names
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        running: _Update | None,
        worker: Worker,
        name: str,
    ) -> tuple[Tensor, Pooled]:
        x = _dense(x)
        gradient = " with gradient" if any(ctx.needs_input_grad) else ""
        title = f"BatchNorm {name!r} over {x.shape[1]} channels{gradient}"
        local, offload = (_moments(x), running), worker.round.offload
        ctx.waiting = _staying
        # Not where a checkpoint takes what is saved: it can be asked once.
        if offload is not None and offload.recipes.in_force and gradient:
            offload.recipes.store(x)  # now, and not after the meeting: others may need its memory meanwhile
            ctx.waiting = offload.waiting
        with ctx.waiting(worker):
            pooled: Pooled = meet_in_forward(worker, title, local, lambda parts: _pool(parts, eps, worker))
        ctx.worker, ctx.number = worker, pooled.number
        ctx.title = f"{title}, meeting {worker.meetings}"  # backward must come to the same one of several
        ctx.save_for_backward(x, weight, pooled.mean, pooled.inverse_std)
        return _normalised(x, weight, bias, pooled), pooled

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        refuse_inner_derivative(ctx.worker, ctx.title)
        x, weight, mean, inverse_std = ctx.saved_tensors
        above, round_ = _dense(gradients[0]), ctx.worker.round
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        pooled = Pooled(mean, inverse_std, ctx.number)
        *sums, of_weight, of_bias = _sums_of(above, x, weight, pooled)
        of_x = None
        if needs_x:
            with ctx.waiting(ctx.worker, above, x.numel() * x.element_size()) as without:
                if without:
                    del x  # it comes back
                total = ctx.worker.meet(f"the backward of {ctx.title}", sums, partial(_added, ranks=round_.ranks))
            if without:
                x = ctx.saved_tensors[0]
            of_x = _below(above, x, weight, pooled, total, round_.constants)
        own = of_weight if weight is not None and needs_weight else None
        return of_x, own, of_bias if needs_bias else None, None, None, None, None


def _pool(parts: list[_Local], eps: float, worker: Worker) -> Pooled:
    """Make one of all micro-batches' statistics, and take them into the running ones, once."""
    every = [part for part, _ in parts]
    ranks, constants, like = worker.round.ranks, worker.round.constants, every[0].mean
    number = sum(part.number for part in every)
    numbers = [number] if ranks is None else ranks.numbers(number, like.device)
    number = sum(numbers)
    if number <= 1 and worker.round.mode != "probe":
        msg = f"BatchNorm needs more than one value per channel to train on; the whole batch has {number}"
        raise ValueError(msg)
    used = [part for part in every if part.number] or [every[0]._replace(number=1)]  # other ranks have values, and wait
    means = torch.stack([part.mean for part in used]).double()
    spreads = torch.stack([part.spread for part in used]).double()
    variances = torch.where(spreads == 0, 0, spreads.square().reciprocal()) if means.is_cuda else spreads
    mean, variance = _mixed(constants, [part.number for part in used], means, variances)
    if ranks is not None:
        mean, variance = _mixed(constants, numbers, *ranks.stacked(torch.stack([mean, variance])).unbind(1))
    update = parts[0][1]
    if update is not None:
        update(mean, variance * (number / max(number - 1, 1)))
    return Pooled(mean.to(like.dtype), (variance + eps).rsqrt().to(like.dtype), max(number, 1))


def _mixed(constants: Constants, numbers: list[int], means: Tensor, variances: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance of all from those of parts; shares are copied to the device once, without waiting."""

    def make() -> Tensor:
        shares = torch.tensor([[number / sum(numbers)] for number in numbers], dtype=torch.float64, device="cpu")
        return shares.pin_memory().to(means.device, non_blocking=True) if means.is_cuda else shares

    shares = constants.get(("shares", *numbers), means.device, make)
    mean = (shares * means).sum(0)
    return mean, (shares * (variances + (means - mean).square())).sum(0)


def _added(values: list[list[Tensor]], ranks: Ranks | None) -> tuple[Tensor, Tensor]:
    """Add up all at once: a few kernels for a meeting, instead of some for each micro-batch."""
    first, second = (torch.stack(column).sum(0) for column in zip(*values, strict=True))
    if ranks is not None:
        first, second = ranks.summed(torch.stack([first, second])).unbind()
    return first, second


# The arithmetic in pieces, between which micro-batches meet: torch's own kernels where there are some.


def _moments(x: Tensor) -> Moments:
    """Return those of one micro-batch."""
    number = x.numel() // max(x.shape[1], 1)
    if x.is_cuda and number:
        return Moments(*torch.batch_norm_stats(x, 0.0), number)  # eps = 0: it can be turned back
    if not number:
        nothing = wide(x).new_zeros(x.shape[1])
        return Moments(nothing, nothing, 0)
    variance, mean = torch.var_mean(wide(x), _but_channels(x), correction=0)
    return Moments(mean, variance, number)


def _normalised(x: Tensor, weight: Tensor | None, bias: Tensor | None, pooled: Pooled) -> Tensor:
    """Return the values of one micro-batch, normalised by all."""
    if x.is_cuda and x.numel():
        return torch.batch_norm_elemt(x, weight, bias, pooled.mean, pooled.inverse_std, 0.0)
    scale = pooled.inverse_std if weight is None else pooled.inverse_std * weight.to(pooled.mean.dtype)
    result = (wide(x) - _column(pooled.mean, x)) * _column(scale, x)
    if bias is not None:
        result = result + _column(bias.to(result.dtype), x)
    return result.to(x.dtype)


def _sums_of(above: Tensor, x: Tensor, weight: Tensor | None, pooled: Pooled) -> tuple[Tensor, ...]:
    """Return what one gradient sums to by channel, plain and times x - mean, and those of weight and bias."""
    if x.is_cuda and x.numel():
        flags = (True, weight is not None, True)
        return torch.batch_norm_backward_reduce(above, x, pooled.mean, pooled.inverse_std, weight, *flags)
    dims, above = _but_channels(x), wide(above)
    total, with_x = above.sum(dims), (above * (wide(x) - _column(pooled.mean, x))).sum(dims)
    kind = total.dtype if weight is None else weight.dtype
    return total, with_x, (with_x * pooled.inverse_std).to(kind), total.to(kind)


def _below(  # noqa: PLR0917 - as torch's kernel
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
    centred = wide(x) - _column(mean, x)
    result = (wide(above) - _column(total[0] / number, x) - centred * _column(slope, x)) * _column(scale, x)
    return result.to(above.dtype)


def _dense(x: Tensor) -> Tensor:
    """Have the channels lie first or last, as the kernels want it."""
    if x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)):  # noqa: PLR2004
        return x
    return x.contiguous()


def _but_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _column(values: Tensor, like: Tensor) -> Tensor:
    """Put one value per channel where the channels are."""
    return values.reshape(1, -1, *(1,) * (like.dim() - 2))
