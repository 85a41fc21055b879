"""Meetings in a forward: what must hold before one, and what each micro-batch finds again after it."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from bigbatch.lockstep.activations import refuse_meeting_while_recomputing
from bigbatch.lockstep.own_weights import OwnWeights
from bigbatch.lockstep.threads import Worker
from bigbatch.state.rng import Streams

Result = TypeVar("Result")


def refuse_second_derivative(name: str) -> None:
    """Raise in a backward that is to be differentiated itself: micro-batches do not meet in its graph."""
    if torch.is_grad_enabled():
        msg = (
            f"{name} cannot be differentiated twice: a gradient of a gradient, as in a gradient penalty "
            "(create_graph=True), would see this micro-batch alone."
        )
        raise RuntimeError(msg)


def meet_in_forward(
    worker: Worker,
    name: str,
    value: Any,
    combine: Callable[[list[Any]], Result],
    fold: Callable[[Any, Any], Any] | None = None,
) -> Result:
    """Meet, and go on with this micro-batch's own random numbers; also in a forward that runs again in backward."""
    refuse_meeting_while_recomputing(worker.notes, name)
    weights: OwnWeights | None = worker.notes.get("weights")
    if weights is not None:
        weights.refuse_others(name)
    streams: Streams | None = worker.notes.get("streams")
    if streams is None:
        return worker.meet(name, value, combine, fold)
    mine = streams.state()
    found = worker.meet(name, value, combine, fold)
    streams.go_on(mine)
    return found
