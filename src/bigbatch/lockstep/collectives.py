"""Values of all micro-batches, with exact gradients: what one shares, the losses of all may depend on.

A gathered or summed value goes into every micro-batch's loss, so its gradient is the sum of theirs: backward is a
meeting, too.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bigbatch.distributed import rank_collectives
from bigbatch.distributed.ranks import Ranks
from bigbatch.lockstep.barrier import meet_in_forward, refuse_inner_derivative
from bigbatch.lockstep.threads import Worker
from bigbatch.loss.count import LOW_PRECISION
from bigbatch.loss.graph import remember_shared, shared_by_all


def gathered(worker: Worker, x: Tensor, place: str) -> Tensor:
    """Return the rows of all micro-batches, in their order; `place` is where they were asked for."""
    name = f"across.gather of {_named(x, x.shape[1:])}{place}"
    found: Tensor = _Gather.apply(x, worker, name)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
    return _remembered(found)


def summed(worker: Worker, x: Tensor, kind: str, place: str) -> Tensor:
    """Return the sum of all micro-batches' tensors, which have one shape; `kind` and `place`: who asked, and where."""
    name = f"across.{kind} of {_named(x, x.shape)}{place}"
    found: Tensor = _Sum.apply(x, worker, name)  # type: ignore[no-untyped-call]
    return _remembered(found)


def _remembered(found: Tensor) -> Tensor:
    if not found.requires_grad:  # no graph tells whose it is
        remember_shared(found)
    return found


def refuse_changed(shared: list[tuple[Tensor, str]]) -> None:
    """Raise where a value that is one tensor for all micro-batches was changed in place by one of them."""
    for together, title in shared:
        if together._version:  # noqa: SLF001 - torch's own counter of changes in place
            msg = (
                f"the result of {title} was changed in place, and it is one tensor for all micro-batches.\n"
                "Write y = y * 2 instead of y.mul_(2), or clone it first."
            )
            raise RuntimeError(msg)


def add(one: Tensor, other: Tensor) -> Tensor:
    """Add in float32 at least; the sum of many values of low precision would be rounded every time."""
    if other.dtype in LOW_PRECISION:
        other = other.float()
    return one.to(other.dtype) + other


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, worker: Worker, name: str) -> Tensor:
        ranks = worker.round.ranks
        together, starts = meet_in_forward(worker, name, x.detach(), partial(_concatenated, ranks=ranks, title=name))
        worker.round.shared.append((together, name))
        # By its number, too: backward must come to the same one of several that look alike.
        ctx.worker, ctx.title, ctx.together = worker, f"{name}, meeting {worker.meetings}", together
        ctx.rows, ctx.asked = (starts[worker.number], x.shape[0]), name
        # One copy for all: each gets a view of its own, which its own graph begins at.
        return together.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        refuse_inner_derivative(ctx.worker, ctx.title)
        refuse_changed([(ctx.together, ctx.title)])
        over_ranks = _over_ranks(ctx.worker, f"the backward of {ctx.asked}")
        total = ctx.worker.meet(f"the backward of {ctx.title}", gradients[0], over_ranks, add)
        start, rows = ctx.rows
        return total.narrow(0, start, rows).to(gradients[0].dtype), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, worker: Worker, name: str) -> Tensor:
        together = meet_in_forward(worker, name, x.detach(), _over_ranks(worker, name), add)
        worker.round.shared.append((together, name))
        # By its number, too: backward must come to the same one of several that look alike.
        ctx.worker, ctx.title, ctx.together = worker, f"{name}, meeting {worker.meetings}", together
        ctx.asked = name
        if worker.size == 1 and worker.round.ranks is None:
            return x.clone()
        return together.to(x.dtype) if together.dtype != x.dtype else together.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        refuse_inner_derivative(ctx.worker, ctx.title)
        refuse_changed([(ctx.together, ctx.title)])
        over_ranks = _over_ranks(ctx.worker, f"the backward of {ctx.asked}")
        total = ctx.worker.meet(f"the backward of {ctx.title}", gradients[0], over_ranks, add)
        own = total.to(gradients[0].dtype)
        if ctx.worker.round.offload is not None and own is total:
            own = total.clone()  # its memory may go while this micro-batch waits, and others have the same
        return own, None, None


def _concatenated(pieces: list[Tensor], ranks: Ranks | None, title: str) -> tuple[Tensor, list[int]]:
    starts = [0]
    for piece in pieces[:-1]:
        starts.append(starts[-1] + piece.shape[0])
    together = torch.cat(pieces)
    if ranks is None:
        return together, starts
    every, mine = rank_collectives.gathered(ranks, together, title)
    return every, [mine + start for start in starts]


def _over_ranks(worker: Worker, title: str) -> Callable[[list[Tensor]], Tensor]:
    """Return what makes one tensor of those that micro-batches have added up, and other ranks theirs.

    A title has no number: a rank with one micro-batch has fewer meetings.
    """
    ranks = worker.round.ranks
    return _only if ranks is None else lambda values: rank_collectives.summed(ranks, _wide(values[0]), title)


def _wide(x: Tensor) -> Tensor:
    """Return a sum as those of several micro-batches are: a rank that has one alone must send the same."""
    return x.float() if x.dtype in LOW_PRECISION else x


def _only(values: list[Tensor]) -> Tensor:
    return values[0]


def _named(x: Tensor, sizes: torch.Size) -> str:
    shape = ", ".join(("rows", *map(str, sizes))) if len(sizes) < x.dim() else ", ".join(map(str, sizes))
    gradient = " with gradient" if x.requires_grad and torch.is_grad_enabled() else ""
    return f"[{shape}] {str(x.dtype).removeprefix('torch.')}{gradient}"


shared_by_all(_Gather)
shared_by_all(_Sum)
