"""Running a backward with no more Python around it than needed.

`torch.autograd.backward` checks what it is given at length, about 25 microseconds a call, which a linear model feels.
We know what we give, so we hand it to the engine as that function does in the end; where a torch has no such engine,
we call the function.
"""

from typing import Any

import torch
from torch import Tensor

_engine: Any = getattr(torch.autograd.Variable, "_execution_engine", None)


def run_backward(loss: Tensor, start: Tensor, leaves: tuple[Tensor, ...] | None) -> None:
    """Add the gradient of `loss`, times `start`, to the leaves; to all that it depends on where none are given."""
    run = getattr(_engine, "run_backward", None)
    if run is None:
        torch.autograd.backward(loss, start, inputs=leaves)
    else:
        keep_graph, create_graph = False, False
        run((loss,), (start,), keep_graph, create_graph, leaves or (), allow_unreachable=True, accumulate_grad=True)
