"""Values of all micro-batches, with exact gradients, and the barrier at which they wait for each other.

What one shares, the losses of all may depend on: a gathered or summed value goes into every micro-batch's loss, so its
gradient is the sum of theirs, and backward is a barrier, too.
"""

import math
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

from bigbatch.distributed.ranks import Ranks
from bigbatch.errors import LossError
from bigbatch.lockstep.model_state import CannotRecompute
from bigbatch.lockstep.round import Round
from bigbatch.lockstep.threads import Worker
from bigbatch.loss.count import LOW_PRECISION
from bigbatch.loss.graph import remember_shared, shared_by_all

Result = TypeVar("Result")


def meet_in_forward(
    worker: Worker,
    name: str,
    value: Any,
    combine: Callable[[list[Any]], Result],
    fold: Callable[[Any, Any], Any] | None = None,
) -> Result:
    """Meet, and go on with this micro-batch's own random numbers; also in a forward that runs again in backward."""
    if worker.round.is_recomputing:
        raise CannotRecompute(f"the model runs again one micro-batch at a time, and has {name} inside")
    streams = worker.round.streams
    if streams is None:
        return worker.meet(name, value, combine, fold)
    mine = streams.state()
    found = worker.meet(name, value, combine, fold)
    mine.restore()
    return found


def refuse_inner_derivative(worker: Worker, title: str) -> None:
    """Raise in the backward of a barrier unless it is the window's own, taken once.

    A derivative that loss_fn takes itself would add up those of all micro-batches' own losses. A gradient of a gradient
    would be this micro-batch's alone.
    """
    if torch.is_grad_enabled():
        msg = f"{title} cannot be differentiated twice (create_graph=True): it would see this micro-batch alone."
        raise RuntimeError(msg)
    if (worker.size > 1 or worker.round.ranks is not None) and not worker.round.is_backward:
        raise LossError(
            f"a derivative inside of the loss goes through {title}: it would add up those of all micro-batches.",
            fix="BatchNorm in evaluation mode (model.eval()), and a derivative before bigbatch.across; or one "
            "micro-batch",
        )


def refuse_changed(together: Tensor, title: str) -> None:
    """Raise where a value that is one tensor for all micro-batches was changed in place by one of them."""
    if together._version:  # noqa: SLF001 - torch's own counter of changes in place
        msg = (
            f"the result of {title} was changed in place, and it is one tensor for all micro-batches.\n"
            "Write y = y * 2 instead of y.mul_(2), or clone it first."
        )
        raise RuntimeError(msg)


def refuse_unlike(round_: Round) -> None:
    """See once for every term of `across.once` that all micro-batches have the same value; it waits for a device.

    A value of 0 says nothing yet: what is cut off below says more later.
    """
    for number, marked in enumerate(zip(*round_.marked.values(), strict=False)):
        place, terms = (number, marked[0][0]), [term for _, term in marked]  # the line that marks it, and its turn
        if place in round_.same_terms or len(terms) == 1:
            continue
        values = [float(term) for term in terms]
        if not are_the_same(values, terms[0].dtype):
            raise LossError(
                "across.once marks a term that is the same in every micro-batch, and this one depends on the "
                "micro-batch's own samples.",
                found=", ".join(f"{value:.6g}" for value in values[:4]),
                fix="across.gather, across.sum or across.mean alone in it, or no across.once for a mean over samples",
            )
        if all(0 < abs(value) < math.inf for value in values):
            round_.same_terms.add(place)


def shared(worker: Worker, x: Tensor, kind: str, place: str) -> Tensor:
    """Return the rows of all micro-batches, in their order, or the sum of their tensors, which have one shape.

    `kind` and `place`: who of `across` has asked, and where.
    """
    rows = kind == "gather"
    sizes = ", ".join(map(str, ("rows", *x.shape[1:]) if rows else x.shape))
    gradient = " with gradient" if x.requires_grad and torch.is_grad_enabled() else ""
    name = f"across.{kind} of [{sizes}] {str(x.dtype).removeprefix('torch.')}{gradient}{place}"
    found: Tensor = _Shared.apply(x, worker, name, rows)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
    if not found.requires_grad:  # no graph tells whose it is
        remember_shared(found)
    return found


def are_the_same(values: list[float], dtype: torch.dtype) -> bool:
    """Whether micro-batches have the same value, up to rounding."""
    tolerance = 1e-9 if dtype == torch.float64 else 1e-3
    return not max(values) - min(values) > tolerance * max(*map(abs, values), 1e-30)


class _Shared(torch.autograd.Function):
    """The rows of all micro-batches, or the sum of their tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, worker: Worker, name: str, rows: bool) -> Tensor:  # noqa: FBT001
        ranks, own, ctx.rows = worker.round.ranks, x.detach(), None
        if rows:
            together, starts = meet_in_forward(worker, name, own, partial(_concatenated, ranks=ranks, title=name))
            ctx.rows = starts[worker.number], x.shape[0]
        else:
            together = meet_in_forward(worker, name, own, partial(_over_ranks, ranks=ranks, title=name), _add)
        worker.round.shared.append((together, name))
        # By its number, too: backward must come to the same one of several that look alike.
        ctx.worker, ctx.asked, ctx.title, ctx.together = worker, name, f"{name}, meeting {worker.meetings}", together
        if not rows and worker.size == 1 and ranks is None:
            return x.clone()
        # One copy for all: each gets a view of its own, which its own graph begins at.
        return together.to(x.dtype) if together.dtype != x.dtype else together.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        refuse_inner_derivative(ctx.worker, ctx.title)
        refuse_changed(ctx.together, ctx.title)
        # The title for ranks has no number: one with a single micro-batch has fewer meetings.
        combine = partial(_over_ranks, ranks=ctx.worker.round.ranks, title=f"the backward of {ctx.asked}")
        total = ctx.worker.meet(f"the backward of {ctx.title}", gradients[0], combine, _add)
        own = (total if ctx.rows is None else total.narrow(0, *ctx.rows)).to(gradients[0].dtype)
        if own is total and ctx.worker.round.offload is not None:
            own = total.clone()  # its memory may go while this micro-batch waits, and others have the same
        return own, None, None, None


shared_by_all(_Shared)


def _add(one: Tensor, other: Tensor) -> Tensor:
    """Add in float32 at least; the sum of many values of low precision would be rounded every time."""
    other = wide(other)
    return one.to(other.dtype) + other


def _concatenated(pieces: list[Tensor], ranks: Ranks | None, title: str) -> tuple[Tensor, list[int]]:
    together, mine = torch.cat(pieces), 0
    if ranks is not None:
        together, mine = ranks.gathered(together, title)
    return together, list(accumulate(map(len, pieces), initial=mine))


def _over_ranks(values: list[Tensor], ranks: Ranks | None, title: str) -> Tensor:
    """Return what micro-batches have added up, and other ranks theirs.

    A rank with one micro-batch has added nothing, and must send the same type.
    """
    return values[0] if ranks is None else ranks.summed(wide(values[0]), title)


def wide(x: Tensor) -> Tensor:
    """Return values in float32 at least."""
    return x.float() if x.dtype in LOW_PRECISION else x
