"""Runs a backward with little Python around it, with weights of single terms put on their places in the graph.

`torch.autograd.backward` checks what it is given at length, about 25 microseconds a call, which a linear model feels.
We know what we give, so we hand it to the engine as that function does in the end; where a torch has no such engine,
we call the function.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node

from bigbatch.errors import LossError, SeveralCounts
from bigbatch.loss.count import LOW_PRECISION, Count, Term
from bigbatch.loss.graph import is_leaf
from bigbatch.window.tally import Weights

_Hook: TypeAlias = Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]
_IN_FLOAT32 = "Compute the loss in float32:  criterion(logits.float(), labels)"
_engine: Any = getattr(torch.autograd.Variable, "_execution_engine", None)
_run: Any = getattr(_engine, "run_backward", None)


def run_backward(loss: Tensor, start: Tensor, leaves: tuple[Tensor, ...] | None) -> None:
    """Add the gradient of `loss`, times `start`, to the leaves; to all that it depends on where none are given."""
    if _run is None:
        torch.autograd.backward(loss, start, inputs=leaves)
    else:
        keep_graph, create_graph = False, False
        _run((loss,), (start,), keep_graph, create_graph, leaves or (), allow_unreachable=True, accumulate_grad=True)


def refuse_rounded_weights(losses: list[Tensor], weights: list[Weights]) -> None:
    """Refuse low-precision losses of micro-batches that weigh differently: what is left over is one for all of them."""
    whole = [each.whole for each in weights]
    alike = all(isinstance(weight, float) and weight == whole[0] for weight in whole)
    if losses[0].dtype in LOW_PRECISION and len(losses) > 1 and not alike:
        raise LossError(
            f"micro-batches that run side by side have losses of {losses[0].dtype} and weigh differently, and such a "
            f"loss would round their weights.\n{_IN_FLOAT32}"
        )


def weigh_terms(weights: Weights, loss: Tensor, terms: list[Term], factors: dict[Node, Tensor]) -> list[Any]:
    """Put each term's own weight on its node, where terms have different ones; returns the handles.

    Their backward notes in `factors` what gradient has come to each term.
    """
    if weights.each and loss.dtype in LOW_PRECISION:
        names = ", ".join(term.name for term in terms)
        raise SeveralCounts(
            f"the terms of this loss ({names}) need weights of their own, and a {loss.dtype} loss would round them.\n"
            f"{_IN_FLOAT32}"
        )
    of = dict(weights.each)
    for term in terms:
        if term.node is not None and term.node in of and (term.shared or is_leaf(term.node)):
            raise SeveralCounts(
                f"a term of this loss ({term.name}) needs a weight of its own, and is a bare parameter, or its value "
                "is used elsewhere in the loss, too.\n"
                "Give the term a place of its own:  counted(term, 'once'), or counted(term, n) for a mean over n things"
            )
    return [node.register_prehook(_weigher(node, weight, factors)) for node, weight in of.items()]


def _weigher(node: Node, weight: Count, factors: dict[Node, Tensor]) -> _Hook:
    def weigh(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        factors[node] = gradients[0].detach()
        factor = weight.to(gradients[0].dtype) if isinstance(weight, Tensor) else weight
        return (gradients[0] * factor, *gradients[1:])

    return weigh
