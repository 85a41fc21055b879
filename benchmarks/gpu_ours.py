"""bigbatch's contestant, in one place: what is said here is the interface that all works use."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.racing import Contestant

Loss = Callable[[nn.Module, Any], Tensor]


def big_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    batches: list[Any],
    *,
    options: dict[str, Any] | None = None,
    state: dict[str, Any] | None = None,
    **named: Any,
) -> Contestant:
    """Train `batches` in turn, one update each; raises ImportError where this bigbatch has no BigStep yet.

    What it learned of sizes goes into `state`, and is taken from there where it is not empty.
    """
    import bigbatch

    # Asked for by name, so that the peers can be measured with a bigbatch that is being written.
    try:
        make, make_options = getattr(bigbatch, "BigStep"), getattr(bigbatch, "Options")  # noqa: B009
    except AttributeError as error:
        raise ImportError("this bigbatch has no BigStep") from error
    step = make(model, optimizer, loss, clip_norm=1.0, options=make_options(**(options or {})), **named)
    last: list[Any] = []
    if state:
        step.load_state_dict(state)

    def update(number: int) -> Tensor:
        last[:] = [step(batches[number % len(batches)])]
        if state is not None:
            state.update(step.state_dict())
        return last[0].loss

    def note() -> str:
        return said(last[0].micro_batches) if last else ""

    return Contestant(model, update, note=note)


def said(micro_batches: int) -> str:
    """Return how a contestant's note begins."""
    return f"{micro_batches} micro-batch" + ("" if micro_batches == 1 else "es")
