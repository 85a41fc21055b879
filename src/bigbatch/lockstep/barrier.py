"""A barrier in a forward: what must hold before one, and what each micro-batch finds again after it."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from bigbatch.errors import LossError
from bigbatch.lockstep.recompute import refuse_meeting_while_recomputing
from bigbatch.lockstep.threads import Worker

Result = TypeVar("Result")


def refuse_inner_derivative(worker: Worker, title: str) -> None:
    """Raise in the backward of a barrier unless it is the window's own, taken once.

    A derivative that loss_fn takes itself would add up those of all micro-batches' own losses. A gradient of a gradient
    would be this micro-batch's alone.
    """
    if torch.is_grad_enabled():
        msg = (
            f"{title} cannot be differentiated twice: a gradient of a gradient, as in a gradient penalty "
            "(create_graph=True), would see this micro-batch alone."
        )
        raise RuntimeError(msg)
    is_part = worker.size > 1 or worker.round.ranks is not None
    if is_part and not worker.round.is_backward:
        msg = (
            f"a derivative inside of the loss goes through {title}: it would add up those of all micro-batches, which "
            "is not the big batch's.\n"
            "Take it where BatchNorm is in evaluation mode (model.eval()) and before bigbatch.across; or take the "
            "whole batch as one micro-batch."
        )
        raise LossError(msg)


def meet_in_forward(
    worker: Worker,
    name: str,
    value: Any,
    combine: Callable[[list[Any]], Result],
    fold: Callable[[Any, Any], Any] | None = None,
) -> Result:
    """Meet, and go on with this micro-batch's own random numbers; also in a forward that runs again in backward."""
    refuse_meeting_while_recomputing(worker.round, name)
    streams = worker.round.streams
    if streams is None:
        return worker.meet(name, value, combine, fold)
    mine = streams.state()
    found = worker.meet(name, value, combine, fold)
    streams.go_on(mine)
    return found
