"""What a loss was averaged over, read from its graph.

    L(big batch) = sum over terms t of  factor_t * (sum of S_t,i) / (sum of d_t,i)        i over micro-batches

A micro-batch's loss shows S_t,i / d_t,i. Its graph tells the rest: which nodes are the terms, and of each the count
d_t,i. Factors need no reading: a gradient passes through them by itself.
"""

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from bigbatch.caller import outside
from bigbatch.errors import LossError
from bigbatch.loss import refusals
from bigbatch.loss.count import Count, GivenCount, Kind, checked_count, wide
from bigbatch.loss.graph import (
    Edge,
    edges,
    is_custom,
    is_leaf,
    is_placement,
    is_shared_by_all,
    is_shared_value,
    operation,
    python_number,
    saved,
    saved_number,
    saved_tensor,
    shape,
    signed,
)
from bigbatch.loss.operations import NLL, POINTWISE_LOSSES, PURE_POINTWISE, VIEWS
from bigbatch.loss.origin import computed_weight, made_of_shared, parameters_alone
from bigbatch.loss.reductions import FUSED, HABITS, LINEAR, Sum, label_smoothing, read_fused, read_reduction
from bigbatch.loss.samples import Surroundings
from bigbatch.loss.selections import results
from bigbatch.loss.trail import Trail

_ROOT = 0.5
_ZERO = "zero"  # what a term is called that a factor of zero leaves out
_ROUNDING = 1e-5  # of a sum of weights in float32
_FEW, _MANY = 8, 1e6  # masks that are looked at, and features that one may be for
_LIKELY = (
    "this loss is a sum over data {} {:g}. That makes it a mean over its samples, or it is a constant that happens to "
    "be as large: it is taken for {}. accumulator.backward(loss, count=n) says that it is a mean over n samples, "
    "counted(term, 'sum') that it is a sum"
)
_MASKED = (
    PURE_POINTWISE
    | VIEWS
    | NLL
    | POINTWISE_LOSSES
    | frozenset("Sum Where MaskedFill Index MaskedSelect Squeeze Unsqueeze".split())
)


@dataclass(slots=True, eq=False)  # not frozen: one is made for every micro-batch, and frozen ones take thrice as long
class Term:
    """One mean or sum inside a loss: `mean` over `count` things, `sum` over data, or `once`, of parameters alone."""

    node: Node | None  # where a weight for this term alone may be put; None: the loss itself
    kind: Kind
    count: Count
    name: str
    value: Tensor | None = None  # known for counted terms only
    divided: bool = False  # a division by its own size has made a sum a mean
    factors: tuple[float | None, ...] = ()  # the constants it was multiplied with, where they can be read
    doubtful: bool = False  # may be over data or over constants
    source: Node | None = None  # the node that holds the count, where it is in a tensor
    about: float = 0.0  # about how large a count in a tensor is, where the host can tell
    shared: bool = False  # its node serves other parts of the loss, too: it cannot carry a weight of this term's
    mask: int = 0  # which of the tensors below a sum its divisor has counted
    chosen: bool = False  # over rows that an index or a mask has taken


class _Counted(torch.autograd.Function):
    """An identity in the graph that carries a count."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, kind: Kind, count: Count) -> Tensor:
        ctx.kind, ctx.count, ctx.value = kind, count, value.detach()
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        del ctx
        return gradients[0], None, None


def counted(value: Tensor, count: GivenCount) -> Tensor:
    """Say what a value was averaged over, where its graph cannot tell.

    >>> loss = counted(ce, tokens) + 0.1 * counted(aux, samples)

    `count` is the number of things that this micro-batch's mean is over, as a number or a tensor on any device; or
    "sum" for a plain sum over data; or "once" for a term that is the same in every micro-batch, such as a regulariser.
    It is your word: nothing below it is read. A masked mean with nothing left to average must not be NaN in its
    gradient: write `x.sum() / n.clamp(min=1)`.
    """
    kind, number = checked_count(count)
    if value.dim():
        msg = f"counted takes a 0-d tensor, a mean or a sum; found one of shape {tuple(value.shape)}"
        raise LossError(msg)
    if not value.requires_grad:
        return value
    result: Tensor = _Counted.apply(value, kind, number)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
    return result


class _Place(NamedTuple):
    """A scalar on the way down from the loss."""

    edge: Edge
    pinned: Node | None  # a product with a parameter above: a weight must be put there, to reach both factors
    factors: tuple[Node, ...]  # constant factors passed on the way, outermost first


def read(loss: Tensor, surroundings: Surroundings, trail: Trail) -> list[Term]:
    """Return the terms of a loss in the order they were written, or raise a LossError that says what to type.

    What is multiplied by zero, as in `loss + 0 * unused.sum()`, is no term; `0 * loss` has none.
    """
    root = loss.grad_fn
    if root is None:  # a bare parameter
        return [Term(None, "once", 1.0, "a parameter")]
    terms: list[Term] = []
    stack = [_Place((root, loss.output_nr), None, ())]
    while stack:
        below = _step(stack.pop(), surroundings, trail)
        if isinstance(below, Term):
            terms.append(below)
        else:
            stack.extend(reversed(below))
    if any(term.name == _ZERO for term in terms):  # the others keep their places: what is zero here may not be there
        for place, term in enumerate(terms, 1):
            term.name = _ZERO if term.name == _ZERO else f"{term.name} ({place} of {len(terms)})"
        terms = [term for term in terms if term.name != _ZERO]
    for unbind in trail.unbound:
        used = {place for other in trail.nodes for below, place in edges(other) if below is unbind}
        if len(used) < results(unbind):
            raise refusals.coupled("Unbind")
    if len(terms) > 1:
        for term in terms:
            term.shared = _serves_twice(term.node, trail)
    return terms


def _serves_twice(node: Node | None, trail: Trail) -> bool:
    users = sum(below is node for other in trail.nodes for below, _ in edges(other))
    return node is not None and users > 1


def _step(  # noqa: C901, PLR0911 - one way out per kind of operation
    place: _Place, surroundings: Surroundings, trail: Trail
) -> Term | list[_Place]:
    """Go one scalar operation down: to the scalars that it was made of, or to a term."""
    node, output = place.edge
    assert node is not None  # noqa: S101 - _Place is only made of edges that carry gradient
    trail.passed(node)
    name = operation(node)
    if _is_zero(node, trail):
        return Term(place.pinned or node, "once", 1.0, _ZERO)
    if is_shared_by_all(node):
        return Term(place.pinned or node, "once", 1.0, name)
    if is_custom(node):
        return _custom(place, node, output, name)
    if is_leaf(node):
        return Term(place.pinned or node, "once", 1.0, "a parameter")
    if name in {"Add", "Sub", "Rsub"}:
        return _sum(place, node, surroundings, trail)
    if name in {"Mul", "Div"}:
        return _product(place, node, name, surroundings, trail)
    if name in FUSED:
        return _term(place, node, read_fused(node, name, surroundings, trail), surroundings, trail)
    found = read_reduction(place.edge, surroundings, trail)
    if isinstance(found, list):
        return [_Place(edge, place.pinned, (*place.factors, *factors)) for edge, factors in found]
    if found is not None:
        return _term(place, node, found, surroundings, trail)
    if parameters_alone(place.edge, surroundings.own, trail) or made_of_shared(place.edge, surroundings.own, trail):
        return Term(place.pinned or node, "once", 1.0, name)
    if computed_weight(place.edge, surroundings.own, surroundings.is_weight, trail, beside=True):
        raise refusals.data_or_constant(name)
    raise refusals.nonlinear(name, root=name == "Sqrt" or saved_number(node, "exponent") == _ROOT)


def _is_zero(node: Node, trail: Trail) -> bool:
    """Tell whether a factor of zero was written: `0 * out.sum()`, `(out * 0).sum()`; a mean of zeros has a count."""
    while operation(node) in LINEAR | {"Sum"} and (below := edges(node)[0][0]) is not None:
        node = below
        trail.passed(node)
    return operation(node) == "Mul" and _number(node) == 0.0


def _custom(place: _Place, node: Node, output: int, name: str) -> Term | list[_Place]:
    carried: Any = node
    if name == "_Counted":
        return Term(place.pinned or node, carried.kind, carried.count, "counted", carried.value, source=node)
    if name == "_Alone":
        raise refusals.alone()
    if name == "_DDPSink":  # DDP's find_unused_parameters wraps a model's outputs in an identity
        return [place._replace(edge=edges(node)[output])]
    if is_placement(node, output):
        return [place._replace(edge=edges(node)[0])]
    raise refusals.custom(name)


def _sum(place: _Place, node: Node, surroundings: Surroundings, trail: Trail) -> Term | list[_Place]:
    smoothed = label_smoothing(node, surroundings, trail)
    if smoothed is not None:
        return _term(place, node, smoothed, surroundings, trail)
    scaled = saved(node, "alpha", 1) != 1  # torch.add(a, b, alpha=0.1)
    return [
        place._replace(edge=edge, factors=(*place.factors, node) if scaled and second else place.factors)
        for second, edge in enumerate(edges(node))
        if edge[0] is not None
    ]


def _product(place: _Place, node: Node, name: str, surroundings: Surroundings, trail: Trail) -> Term | list[_Place]:
    """A scalar times a constant, or times a learned factor as in `exp(-s) * loss`."""
    inputs = edges(node)
    if len(inputs) == 1 or inputs[1][0] is None:
        return [place._replace(edge=inputs[0], factors=(*place.factors, node))]
    if inputs[0][0] is None and name == "Mul":
        return [place._replace(edge=inputs[1], factors=(*place.factors, node))]
    shared = [made_of_shared(edge, surroundings.own, trail) for edge in inputs]
    learned = [
        is_shared or inputs[0][0] is None or parameters_alone(edge, surroundings.own, trail)
        for edge, is_shared in zip(inputs, shared, strict=True)
    ]
    if all(learned):
        return Term(place.pinned or node, "once", 1.0, name)
    if learned[1] or (learned[0] and name == "Mul"):
        factors = (*place.factors, node)
        return [place._replace(edge=inputs[0 if learned[1] else 1], pinned=place.pinned or node, factors=factors)]
    if made_of_shared(place.edge, surroundings.own, trail):
        return Term(place.pinned or node, "once", 1.0, name)
    raise refusals.nonlinear(name)


def _term(place: _Place, node: Node, found: Sum, surroundings: Surroundings, trail: Trail) -> Term:
    """Make a term of a reduction."""
    at = place.pinned or node
    numbers = _numbers(place.factors)
    if found.kind == "mean":
        if any(
            operation(factor) == "Mean" and math.prod(saved(factor, "self_sym_sizes")) == 1 for factor in place.factors
        ):
            # A stack of one: of one sample, whose own mean this is; of one head, whose mean is over the samples.
            key, count = ("one", *map(type, trail.nodes)), found.about or found.count
            if not isinstance(count, Tensor) and surroundings.readings.setdefault(key, int(count)) != count:
                raise refusals.lone_rows()
        return Term(
            at,
            "mean",
            found.count,
            found.name,
            factors=numbers,
            doubtful=found.doubtful,
            source=found.source,
            about=found.about,
            chosen=found.chosen,
        )
    if found.kind == "once":
        return Term(at, "once", 1.0, found.name)
    return _of_sum(place, at, found, surroundings, trail)


def _of_sum(place: _Place, at: Node, found: Sum, surroundings: Surroundings, trail: Trail) -> Term:
    """Make a term of a sum over data: what divides it by its samples makes it a mean, all else is a constant."""
    shared = [factor for factor in (*place.factors, *found.inside) if _is_shared_factor(factor)]
    trail.weights.extend((factor, "other") for factor in shared)  # to be looked at again
    read = {
        factor: _divisor(factor, found, surroundings, trail)
        for factor in (*place.factors, *found.inside)
        if factor not in shared
    }
    counts = [(factor, each) for factor, each in read.items() if isinstance(each, float)]
    doubts = [(factor, each) for factor, each in read.items() if isinstance(each, LossError)]
    counting: Node | None = counts[-1][0] if counts else None
    count: Count | None = counts[-1][1] if counts else None
    source: Node | None = None
    mask = _counted_mask(doubts[0][0], found, trail) if surroundings.divisors and len(doubts) == 1 else None
    if mask or (mask is not None and count is None):
        counting = source = doubts[0][0]
        count = divided_by(source, mask)
    elif count is None and doubts:
        raise doubts[0][1]
    numbers = _numbers(factor for factor in read if factor is not counting)
    if count is not None:
        of_own = source is None
        return Term(at, "mean", count, found.name, None, of_own, numbers, found.doubtful, source, mask=mask or 0)
    if found.doubtful:
        raise refusals.data_or_constant(found.name)
    return Term(at, "sum", 1.0, found.name, factors=numbers)


def divided_by(division: Node, mask: int) -> Count:
    """Return the count that divides a sum; 0 where it has counted nothing, whatever it was clamped to."""
    divisor, masks = saved_tensor(division, "other"), _masks(division)
    if divisor is None or mask > len(masks):
        return 0.0
    kept = masks[mask - 1].any() if mask else True
    if divisor.is_cpu:
        return float(divisor.detach()) if kept else 0.0
    return wide(divisor.detach().reshape(())) * kept


def _counted_mask(division: Node, found: Sum, trail: Trail) -> int | None:
    """Find what a divisor has counted: the number of a mask that was multiplied in, 0 for samples; None for neither."""
    divisor = saved_tensor(division, "other") if operation(division) == "Div" else None
    if divisor is None or divisor.numel() > 1:
        return None
    number = float(divisor.detach())
    for place, mask in enumerate(_masks(division, trail), 1):
        total = float(mask.sum(dtype=torch.float64))
        times = number / total if total else 1.0  # a mask of positions counts once for each feature, or once
        if abs(times - round(times)) <= _ROUNDING and times < _MANY and (total or number <= 1):
            return place
    return 0 if found.sizes is not None and found.sizes.read(number, whole=True) == "samples" else None


def _masks(division: Node, trail: Trail | None = None) -> list[Tensor]:
    """Return the tensors that choose or weigh what is summed, from the sum down."""
    masks: list[Tensor] = []
    node = edges(division)[0][0]
    while node is not None and operation(node) in _MASKED and len(masks) < _FEW:
        if trail is not None:
            trail.passed(node)
        name, inputs = operation(node), edges(node)
        kept: Tensor | None = None
        if name == "Mul" and len(inputs) > 1 and None in (inputs[0][0], inputs[1][0]):
            kept = saved_tensor(node, "self" if inputs[0][0] is None else "other")
        elif name in NLL:
            target = saved_tensor(node, "target")
            kept = target != signed(saved(node, "ignore_index")) if target is not None else None
        elif name in {"Where", "MaskedFill"}:
            chosen = saved_tensor(node, "condition" if name == "Where" else "mask")
            is_kept = name == "Where" and inputs[0][0] is not None
            kept = chosen if chosen is None or is_kept else ~chosen
        elif name in {"Index", "MaskedSelect"}:
            kept = torch.ones(()).expand(shape(node)[:1])
        if kept is not None and kept.dim():
            masks.append(kept)
        node = next((below for below, _ in inputs if below is not None), None)
    return masks


def _divisor(factor: Node, found: Sum, surroundings: Surroundings, trail: Trail) -> float | LossError | None:
    """Return the number by which a factor takes a mean over samples, None for a constant; or why it cannot be told."""
    name = operation(factor)
    number = float(saved(factor, "alpha")) if name in {"Add", "Sub"} else python_number(factor, "other")
    if number == 0.0 or (number is None and _is_learned(factor)):
        return None
    if number is None or found.sizes is None:
        return refusals.scaled_sum(name, "a tensor" if number is None else f"the number {number:g}")
    divisor, key = abs(number) if name == "Div" else 1 / abs(number), (name, *map(type, trail.nodes))
    habit = name != "Div" and divisor in HABITS
    over = found.sizes.read(divisor, whole=name == "Div" and _is_whole(factor))
    taken: bool | None = surroundings.readings.get(key)
    if over in {"samples", "others"}:
        taken = over == "samples"
        surroundings.readings.setdefault(key, taken)
    elif over == "none":
        taken = None if name == "Div" and divisor == round(divisor) else False
    elif taken is None and (habit or over == "likely" or surroundings.divisors):
        taken = not habit
        if over == "likely" and not surroundings.divisors:
            by, what = "divided by" if name == "Div" else "times", "a mean over samples" if taken else "a constant"
            warnings.warn(_LIKELY.format(by, number, what), stacklevel=outside())
    if taken is None:
        return refusals.scaled_sum(name, f"the number {number:g}")
    return float(round(divisor)) if taken else None


def _is_whole(division: Node) -> bool:
    found = saved(division, "other")
    return not (found.is_floating_point() if isinstance(found, Tensor) else isinstance(found, float))


def _is_learned(factor: Node) -> bool:
    inputs = edges(factor)
    return len(inputs) > 1 and inputs[0][0] is not None and inputs[1][0] is not None


def _is_shared_factor(factor: Node) -> bool:
    """Tell whether a sum was divided by what is the same in every micro-batch, as a count over all of them."""
    tensor = saved_tensor(factor, "other") if operation(factor) in {"Mul", "Div"} else None
    return tensor is not None and is_shared_value(tensor)


def _numbers(factors: Iterable[Node]) -> tuple[float | None, ...]:
    """Read constant factors; a division by 1 is none, and a product with 1 may be one with 0 elsewhere."""
    found = [(factor, _number(factor)) for factor in factors]
    return tuple(number for factor, number in found if number != 1.0 or operation(factor) == "Mul")


def _number(factor: Node) -> float | None:
    """Read a constant factor, where that does not wait for a device."""
    if operation(factor) in {"Add", "Sub"}:
        return float(saved(factor, "alpha"))
    if _is_learned(factor):
        return None
    found = saved_number(factor, "other")
    return saved_number(factor, "self") if found is None and edges(factor)[0][0] is None else found
