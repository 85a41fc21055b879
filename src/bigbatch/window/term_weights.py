"""Weights of a loss's terms, each put on its own place in the graph where they differ."""

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor
from torch.autograd.graph import Node

from bigbatch.errors import LossError, SeveralCounts
from bigbatch.loss.count import LOW_PRECISION, Count, Term
from bigbatch.loss.graph import is_leaf
from bigbatch.window.tally import Weights

Hook: TypeAlias = Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]


def refuse_rounded_weights(losses: list[Tensor], weights: list[Weights]) -> None:
    """Refuse low-precision losses of micro-batches that weigh differently: what is left over is one for all of them."""
    whole = [each.whole for each in weights]
    alike = all(isinstance(weight, float) and weight == whole[0] for weight in whole)
    if losses[0].dtype in LOW_PRECISION and len(losses) > 1 and not alike:
        msg = (
            f"micro-batches that run side by side have losses of {losses[0].dtype} and weigh differently, and such a "
            "loss would round their weights.\n"
            "Compute the loss in float32:  criterion(logits.float(), labels)"
        )
        raise LossError(msg)


def weigh_terms(weights: Weights, loss: Tensor, terms: list[Term], factors: dict[Node, Tensor]) -> list[Any]:
    """Put each term's own weight on its node, where terms have different ones; returns the handles."""
    if weights.each and loss.dtype in LOW_PRECISION:
        names = ", ".join(term.name for term in terms)
        msg = (
            f"the terms of this loss ({names}) need weights of their own, and a {loss.dtype} loss would round them.\n"
            "Compute the loss in float32:  criterion(logits.float(), labels)"
        )
        raise SeveralCounts(msg)
    of = dict(weights.each)
    for term in terms:
        if term.shared and term.node in of:
            msg = (
                f"a term of this loss ({term.name}) needs a weight of its own, and its value is used elsewhere in the "
                "loss, too.\n"
                "Give the term a place of its own:  counted(term, 'once'), or counted(term, n) for a mean over n things"
            )
            raise SeveralCounts(msg)
    return [node.register_prehook(_weigher(node, weight, factors)) for node, weight in of.items()]


def _weigher(node: Node, weight: Count, factors: dict[Node, Tensor]) -> Hook:
    def weigh(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        factors[node] = gradients[0].detach()
        factor = weight.to(gradients[0].dtype) if isinstance(weight, Tensor) else weight
        return (gradients[0] * factor, *gradients[1:])

    if is_leaf(node):
        msg = (
            "a bare parameter stands as a term beside a sum, and cannot carry a weight of its own.\n"
            "Say that it counts once per window:  loss = x.sum() + counted(parameter, 'once')"
        )
        raise SeveralCounts(msg)
    return weigh
