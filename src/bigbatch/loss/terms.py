"""What a loss was averaged over, read from its graph.

    L(big batch) = sum over terms t of  factor_t * (sum of S_t,i) / (sum of d_t,i)        i over micro-batches

A micro-batch's loss shows S_t,i / d_t,i. Its graph tells the rest: which nodes are the terms, and of each the count
d_t,i. Factors need no reading: a gradient passes through them by itself.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from bigbatch.errors import LossError
from bigbatch.loss import graph, refusals
from bigbatch.loss.count import Term
from bigbatch.loss.divisors import number_of, numbers, read_factors, warn_of_shares
from bigbatch.loss.graph import edges, operation, python_number, saved
from bigbatch.loss.origin import Origin, Trail, is_made_of
from bigbatch.loss.reductions import (
    FUSED,
    LINEAR,
    Reduced,
    Scalar,
    label_smoothing,
    once,
    read_fused,
    read_reduction,
    read_sum,
)

_ZERO = "zero"  # what a term is called that a factor of zero leaves out


def read(loss: Tensor, trail: Trail) -> list[Term]:
    """Return the terms of a loss in the order they were written, or raise a LossError that says what to type.

    What is multiplied by zero, as in `loss + 0 * unused.sum()`, is no term; `0 * loss` has none.
    """
    root = loss.grad_fn
    if root is None:
        return [once("a parameter")]
    terms, shares = list[Term](), list[Node]()
    stack = [Scalar((root, loss.output_nr))]
    while stack:
        place = stack.pop()
        with _spoken_of_term() if stack or terms else nullcontext():
            below = _step(place, trail)
        if isinstance(below, Term):
            below.node = place.pinned or below.node
            terms.append(below)
            shares += place.factors if below.kind == "once" and below.name != _ZERO else ()
        else:
            stack.extend(reversed(below))
    if any(term.name == _ZERO for term in terms):  # the others keep their places: what is zero here may not be there
        for number, term in enumerate(terms, 1):
            term.name = _ZERO if term.name == _ZERO else f"{term.name} ({number} of {len(terms)})"
        terms = [term for term in terms if term.name != _ZERO]
    if not trail.known.divisors:  # else gradients are compared
        warn_of_shares(shares, trail)
    for unbind in trail.unbound:
        used = {number for other in trail.nodes for below, number in edges(other) if below is unbind}
        if trail.crossed or len(used) < graph.results(unbind):
            raise refusals.coupled("Unbind")
    for term in terms if len(terms) > 1 else ():
        users = sum(below is term.node for other in trail.nodes for below, _ in edges(other))
        term.shared = term.node is not None and users > 1
    return terms


@contextmanager
def _spoken_of_term() -> Iterator[None]:
    """Have errors say what to type where the loss has other terms, too."""
    try:
        yield
    except LossError as error:
        error.speak_of_term()
        raise


def _step(  # noqa: C901, PLR0911 - one way out per kind of operation
    place: Scalar, trail: Trail
) -> Term | list[Scalar]:
    """Go one scalar operation down: to the scalars that it was made of, or to a term."""
    node, output = place.edge
    assert node is not None  # noqa: S101 - Scalar is only made of edges that carry gradient
    trail.passed(node)
    name = operation(node)
    if _is_zero(node, trail):
        return once(_ZERO, node)
    if graph.is_shared_by_all(node):
        return once(name, node)
    if graph.is_custom(node):
        return _custom(place, node, output, name)
    if graph.is_leaf(node):
        return once("a parameter", node)
    loop = read_sum(place.edge, place.factors, trail)
    if loop is not None:
        return _term(place, node, loop, trail)
    if name in {"Add", "Sub", "Rsub"}:
        return _sum(place, node, trail)
    if name in {"Mul", "Div"}:
        return _product(place, node, name, trail)
    if name in FUSED:
        return _term(place, node, read_fused(node, name, trail), trail)
    found = read_reduction(place.edge, place.factors, trail)
    if isinstance(found, list):
        return [Scalar(each.edge, (*place.factors, *each.factors), place.pinned or each.pinned) for each in found]
    if found is not None:
        return _term(place, node, found, trail)
    if is_made_of(Origin.PARAMETERS, place.edge, trail) or is_made_of(Origin.SHARED, place.edge, trail):
        return once(name, node)
    if is_made_of(Origin.BESIDE, place.edge, trail):
        raise refusals.data_or_constant(name)
    raise refusals.nonlinear(name)


def _is_zero(node: Node, trail: Trail) -> bool:
    """Tell whether a factor of zero was written: `0 * out.sum()`, `(out * 0).sum()`; a mean of zeros has a count."""
    while operation(node) in LINEAR | {"Sum"} and (below := edges(node)[0][0]) is not None:
        node = below
        trail.passed(node)
    return operation(node) == "Mul" and number_of(node) == 0.0


def _custom(place: Scalar, node: Node, output: int, name: str) -> Term | list[Scalar]:
    carried: Any = node
    if name == "_Counted":
        return Term(node, carried.kind, carried.count, "counted", carried.value, source=node)
    if name == "_Alone":
        raise refusals.alone()
    if name == "_DDPSink":  # DDP's find_unused_parameters wraps a model's outputs in an identity
        return [place._replace(edge=edges(node)[output])]
    raise refusals.custom(name)


def _sum(place: Scalar, node: Node, trail: Trail) -> Term | list[Scalar]:
    smoothed = label_smoothing(node, trail)
    if smoothed is not None:
        return _term(place, node, smoothed, trail)
    scaled = saved(node, "alpha", 1) != 1  # torch.add(a, b, alpha=0.1)
    return [
        place._replace(edge=edge, factors=(*place.factors, node) if scaled and second else place.factors)
        for second, edge in enumerate(edges(node))
        if edge[0] is not None
    ]


def _product(place: Scalar, node: Node, name: str, trail: Trail) -> Term | list[Scalar]:
    """A scalar times a constant, or times a learned factor as in `exp(-s) * loss`."""
    inputs, factors = edges(node), (*place.factors, node)
    if len(inputs) == 1 or inputs[1][0] is None:
        return [place._replace(edge=inputs[0], factors=factors)]
    if inputs[0][0] is None and name == "Mul":
        return [place._replace(edge=inputs[1], factors=factors)]
    learned = [
        is_made_of(Origin.SHARED, edge, trail) or inputs[0][0] is None or is_made_of(Origin.PARAMETERS, edge, trail)
        for edge in inputs
    ]
    if all(learned):
        return once(name, node)
    if learned[1] or (learned[0] and name == "Mul"):
        return [Scalar(inputs[0 if learned[1] else 1], factors, place.pinned or node)]
    if is_made_of(Origin.SHARED, place.edge, trail):
        return once(name, node)
    raise refusals.nonlinear(name)


def _term(place: Scalar, node: Node, found: Reduced, trail: Trail) -> Term:
    """Put the term of a reduction in its place."""
    term = found.term
    term.node = node
    if term.kind == "sum":  # over data: what divides it by its samples makes it a mean, all else is a constant
        factors = (*place.factors, *found.inside)
        if found.empty and factors and all(python_number(factor, "other") is not None for factor in factors):
            trail.passing = True
            return once(_ZERO, node)  # whether it was divided by the rows chosen or by all of them, nothing shows
        by = read_factors(factors, found.sizes, trail)
        term.factors = by.factors
        if by.count is not None:
            term.kind, term.count, term.source, term.divisor = "mean", by.count, by.source, by.divisor
            term.divided = by.source is None
            term.chosen = term.chosen and found.sizes is not None and not found.sizes.has_all(by.count)
        elif term.doubtful:
            raise refusals.data_or_constant(term.name)
    elif term.kind == "mean":
        term.divided = found.divided is not None
        term.factors = numbers(factor for factor in place.factors if factor is not found.divided)
        means = (saved(factor, "self_sym_sizes") for factor in place.factors if operation(factor) == "Mean")
        if any(math.prod(sizes) == 1 for sizes in means):
            # A stack of one: of one sample, whose own mean this is; of one head, whose mean is over the samples.
            count = term.about or term.count
            if not isinstance(count, Tensor) and not trail.is_as_before("one", count):
                raise refusals.lone_rows()
    return term
