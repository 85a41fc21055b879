"""What multiplies or divides a sum over data: a number of its samples, which makes it a mean, or a constant."""

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import Node

from bigbatch.caller import outside
from bigbatch.errors import LossError
from bigbatch.loss import graph, refusals
from bigbatch.loss.count import Count, Divisor, wide
from bigbatch.loss.graph import Edge, edges, operation, python_number, saved, saved_number, saved_tensor, shape, size_of
from bigbatch.loss.origin import Trail
from bigbatch.loss.rules import NLL, POINTWISE_LOSSES, PURE_POINTWISE, VIEWS

_SEQUENCES = 3  # dimensions of a model's output
_HABITS = frozenset({1, 2})  # `0.5 * x.sum()` is half of it, and seldom a mean over two; so may `/ 2` be
_ROUNDING = 1e-5  # of a sum of weights in float32
_FEW = 8  # masks that are looked at
_LIKELY = (
    "this loss is a sum over data {} {:g}. That makes it {} over its samples, or it is a constant that happens to "
    "be as large: it is taken for {}. accumulator.backward(loss, count=n) says that it is a mean over n samples, "
    "counted(term, 'sum') that it is a sum"
)
_SHARE = (
    "a term of parameters alone is divided by {:g}, which looks like this micro-batch's samples, or twice as many. "
    "Such a term counts once per window, whatever it is divided by: write the big batch's number of samples there"
)
_MASKED = PURE_POINTWISE | VIEWS | NLL | POINTWISE_LOSSES
_MASKED |= frozenset("Sum Where MaskedFill Index MaskedSelect Squeeze Unsqueeze".split())


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a summed tensor: by which numbers a division makes it a mean over samples, by which one over others.

    Each way to look at it is a list of sizes, with whether samples lie there: as it was summed, as the model gave it.
    """

    ways: tuple[tuple[tuple[int, bool], ...], ...]
    time_first: bool  # samples may lie second, too
    rows: frozenset[float]  # what kl_div's batchmean and its kin divide by, whatever else is as large

    def has_all(self, count: Count) -> bool:
        """Whether a count may be that of all samples that the model gave, chosen or not."""
        every = [math.prod(size for size, own in way if own) for way in self.ways[1:]]
        return isinstance(count, Tensor) or any(count % max(each, 1) == 0 for each in every)

    def meanings(self, divisor: float, *, whole: bool) -> tuple[set[bool], bool]:
        """Tell whether a division of the sum takes a mean over samples (True), or is by a constant; or may be either.

        And whether it then is by the rows, as in `x.sum() / len(x)`. A number of samples is a `whole` one, an integer.
        """
        one = whole and divisor == 1  # a count: nobody divides by 1 as such
        means, others, steps = set(self.rows), set() if one else set(_HABITS), set[float]()
        for way in self.ways:
            rest = {1}
            for place, (size, own) in enumerate(way):
                if not own:
                    # Of (a, b, c) either may be the samples and the other the steps of a sequence.
                    steps |= {each * size for each in rest} if place == 1 and len(way) == _SEQUENCES else set()
                    rest |= {each * size for each in rest}
            others |= {size for size, own in way if not own} if one else rest
            samples = [size for size, own in way if own]
            means |= {each * math.prod(samples) for each in rest} if samples else set()
        over, beside, unclear = (
            any(abs(divisor - each) <= 1e-9 * each for each in sizes) for sizes in (means, others, steps - {1})
        )
        of_rows = [way[:1] == ((divisor, True),) for way in self.ways]
        swapped = self.time_first and of_rows[1] and len(self.ways[1]) == _SEQUENCES
        if divisor in self.rows or (over and not beside and not swapped):
            return {True}, False
        if over or unclear or (one and not beside):
            return {True, False}, over and any(of_rows)
        return {False} if beside else set(), False


@dataclass(frozen=True, slots=True)
class Divided:
    """What the factors of a sum are: one may hold a count, the rest are constants."""

    count: Count | None
    factors: tuple[float | None, ...]
    source: Node | None = None  # the node that holds the count, where it is in a tensor
    divisor: Divisor | None = None  # what that has counted


def read_factors(factors: Iterable[Node], sizes: Sizes | None, trail: Trail) -> Divided:
    """Find the count among the factors of a sum over data; what makes it a mean over samples is one."""
    every = dict.fromkeys(factors)
    divisors = {factor: saved_tensor(factor, "other") for factor in every if operation(factor) in {"Mul", "Div"}}
    shared = [factor for factor, each in divisors.items() if each is not None and graph.is_shared_value(each)]
    trail.weights.extend((factor, "other") for factor in shared)  # to be looked at again
    read = {factor: _read(factor, at, sizes, trail) for at, factor in enumerate(every) if factor not in shared}
    counting, count = next(((each, n) for each, n in reversed(read.items()) if isinstance(n, float)), (None, None))
    doubts = [(factor, each) for factor, each in read.items() if isinstance(each, LossError)]
    if doubts:
        source, error = doubts[0]
        divisor = _divisor(source, sizes, trail) if trail.known.divisors and len(doubts) == 1 else None
        if divisor is not None and (divisor.mask or count is None):
            found = divided_by(source, divisor)
            if found is not None:
                return Divided(found, numbers(each for each in read if each is not source), source, divisor)
        if count is None:
            raise error
    return Divided(count, numbers(each for each in read if each is not counting))


def _read(factor: Node, at: int, sizes: Sizes | None, trail: Trail) -> float | LossError | None:
    """Return the number by which a factor takes a mean over samples, None for a constant; or why it cannot be told.

    `at`: its place among the factors of the sum.
    """
    name = operation(factor)
    number = float(saved(factor, "alpha")) if name in {"Add", "Sub"} else python_number(factor, "other")
    if number == 0.0 or (number is None and _is_learned(factor)):
        return None
    if number is None or sizes is None:
        return refusals.scaled_sum(name, "a tensor" if number is None else f"the number {number:g}")
    means = _meanings(factor, number, at, sizes, trail)
    if len(means) != 1:
        return refusals.scaled_sum(name, f"the number {number:g}")
    return float(round(_divisor_of(name, number))) if True in means else None


def warn_of_shares(factors: Iterable[Node], trail: Trail) -> None:
    """Warn once where a regularizer is divided by as many samples as the data beside it has, or by twice as many."""
    sizes = {times * size for times in _HABITS for size in trail.samples} - _HABITS
    for factor in factors:
        number = python_number(factor, "other") if operation(factor) == "Div" and _is_whole(factor) else None
        if number in sizes and trail.precedents.setdefault(("share",), number) == number:
            warnings.warn(_SHARE.format(number), stacklevel=outside())


def _divisor_of(name: str, number: float) -> float:
    return abs(number) if name == "Div" else 1 / abs(number)


def divides_by(factor: Node, count: float) -> bool:
    """Tell whether a factor was written as a division by this number."""
    number = python_number(factor, "other")
    return bool(number) and abs(_divisor_of(operation(factor), number or 1.0) - count) <= 1e-9 * count


def may_count(factor: Node, rows: int) -> bool:
    """Tell whether a factor may be by samples that have several rows each: `sum(losses) / len(x)` of two views."""
    number = python_number(factor, "other")
    by = _divisor_of(operation(factor), number) if number else 1.0
    return by > 1 and any(abs(each - round(each)) <= 1e-9 * each for each in (by / rows, rows / by))


def _meanings(factor: Node, number: float, at: int, sizes: Sizes, trail: Trail) -> set[bool]:
    """Tell whether a number takes a mean over samples (True) or is a constant, after the sizes, and others before."""
    name = operation(factor)
    divides, divisor = name == "Div", _divisor_of(name, number)
    means, likely = sizes.meanings(divisor, whole=divides and _is_whole(factor))
    if divides and divisor == 1 and means == {False} and not trail.known.divisors:
        means = {True, False}  # one feature, or one that was counted: `/ max(1, int(mask.sum()))`
    # As in all graphs of this kind that could be read in one way only; where those differ, it cannot be told.
    seen: set[bool] = trail.precedents.setdefault(trail.kind(name, at), set())
    if len(means) == 1:
        seen |= means
    if means and seen:
        return seen
    is_habit = not divides and divisor in _HABITS
    twice = not (means or divides or divisor / 2 in _HABITS) and sizes.meanings(divisor / 2, whole=False)[0] == {True}
    if (means or twice) and (likely or twice) and not trail.known.divisors:
        what = "a constant" if is_habit or twice else "a mean over samples"
        warnings.warn(
            _LIKELY.format("divided by" if divides else "times", number, "half a mean" if twice else "a mean", what),
            stacklevel=outside(),
        )
    if means and (is_habit or likely or trail.known.divisors):
        return {not is_habit}
    # A whole number that divides, and is no size, may be a count of something else.
    return means or (set() if divides and divisor == round(divisor) else {False})


def _is_whole(division: Node) -> bool:
    found = saved(division, "other")
    return not (found.is_floating_point() if isinstance(found, Tensor) else isinstance(found, float))


def _is_learned(factor: Node) -> bool:
    inputs = edges(factor)
    return len(inputs) > 1 and inputs[0][0] is not None and inputs[1][0] is not None


def numbers(factors: Iterable[Node]) -> tuple[float | None, ...]:
    """Read constant factors; a division by 1 is none, and a product with 1 may be one with 0 elsewhere."""
    found = [(factor, number_of(factor)) for factor in factors]
    return tuple(number for factor, number in found if number != 1.0 or operation(factor) == "Mul")


def number_of(factor: Node) -> float | None:
    """Read a constant factor, where that does not wait for a device."""
    if operation(factor) in {"Add", "Sub"}:
        return float(saved(factor, "alpha"))
    if _is_learned(factor):
        return None
    found = saved_number(factor, "other")
    return saved_number(factor, "self") if found is None and edges(factor)[0][0] is None else found


def factors_below(edge: Edge) -> list[Node]:
    """Find the numbers that were multiplied into a sum from below, `(x / n).sum()`: they may be counts."""
    found: list[Node] = []
    node = edge[0]
    while node is not None and operation(node) in {"Neg", "Mul", "Div"}:
        if operation(node) != "Neg" and _by_scalar(node) and not _averages(node):
            found.append(node)
        node = next((below for below, _ in edges(node) if below is not None), None)
    return found


def _averages(factor: Node) -> bool:
    """Tell a mean over features: a sum divided by the size of what it was over."""
    below = edges(factor)[0][0]
    if operation(factor) != "Div" or below is None or operation(below) != "Sum":
        return False
    whole = math.prod(saved(below, "self_sym_sizes"))
    return bool(python_number(factor, "other") == whole / max(math.prod(shape(below)), 1))


def _by_scalar(node: Node) -> bool:
    inputs = edges(node)
    if len(inputs) == 1:
        return True
    if all(below is not None for below, _ in inputs):
        return False
    tensors = [saved_tensor(node, which) for which in ("other", "self")]
    return any(tensor is not None and not tensor.dim() for tensor in tensors)


# Tensors that divide a sum, `(x * mask).sum() / mask.sum()`.


def divided_by(division: Node, by: Divisor) -> Count | None:
    """Return the count that divides a sum; 0 where it has counted nothing, whatever it was clamped to.

    Where it is another number than the mask counts, as one that a clamp has made, the answer is None; on a device,
    where that is not known yet, it is NaN, and the window raises before its step.
    """
    divisor, masks = saved_tensor(division, "other"), _masks(division)
    if divisor is None or by.mask > len(masks):
        return None
    mask = masks[by.mask - 1][0] if by.mask else divisor.new_ones(())
    number = wide(divisor.reshape(()))
    expected = mask.sum(dtype=number.dtype) * by.each
    counted = (number - expected).abs() <= _ROUNDING * expected.abs()
    kept = mask.any()
    if not divisor.is_cpu:
        return torch.where(kept, torch.where(counted, number, math.nan), 0.0)
    return (float(number) if counted else None) if kept else 0.0


def _divisor(division: Node, sizes: Sizes | None, trail: Trail) -> Divisor | None:
    """Find what a divisor has counted: a mask that was multiplied in, or samples; None for neither.

    A mask counts each entry once, or once for each of its features, in all graphs of one kind: any other multiple, or
    one that changes, is a number that a clamp has made.
    """
    divisor = saved_tensor(division, "other") if operation(division) == "Div" else None
    if divisor is None or divisor.numel() > 1:
        return None
    kind = trail.kind("divisor")
    before: set[tuple[int, bool]] | None = trail.precedents.get(kind)
    masks = _masks(division, trail)
    if not divisor.is_cpu and before is not None and len(before) == 1:
        ((place, once),) = before
        if place and once and place <= len(masks):  # `divided_by` looks at it without waiting
            return Divisor(place, 1.0)
    number = float(divisor.detach())
    found: dict[tuple[int, bool], Divisor] = {}
    for place, (mask, features) in enumerate(masks, 1):
        total = float(mask.sum(dtype=torch.float64))
        if not total and number <= 1:
            return Divisor(place, 1.0)
        for each in (1.0, *features):
            if total and abs(number - total * each) <= _ROUNDING * number:
                found.setdefault((place, each == 1), Divisor(place, each))
    if sizes is not None and sizes.meanings(number, whole=True)[0] == {True}:
        found[0, True] = Divisor(0, number)
    kept = found.keys() & (before or found.keys())
    if not kept:
        return None
    trail.precedents[kind] = kept
    return found[max(kept, key=lambda each: (each[0] > 0, -each[0], each[1]))]


def _masks(division: Node, trail: Trail | None = None) -> list[tuple[Tensor, list[float]]]:
    """Return the tensors that choose or weigh what is summed, from the sum down, and how many features an entry has.

    Those are of what it chooses, and of what that was made of further down.
    """
    masks: list[tuple[Tensor, list[float]]] = []
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
            kept = target != graph.signed(saved(node, "ignore_index")) if target is not None else None
        elif name in {"Where", "MaskedFill"}:
            chosen = saved_tensor(node, "condition" if name == "Where" else "mask")
            is_kept = name == "Where" and inputs[0][0] is not None
            kept = chosen if chosen is None or is_kept else ~chosen
        elif name in {"Index", "MaskedSelect"}:
            kept = torch.ones(()).expand(shape(node)[:1])
        if kept is not None and kept.dim():
            masks.append((kept, [math.prod(shape(node)) / max(kept.numel(), 1)]))
        below = next((each for each in inputs if each[0] is not None), (None, 0))
        for mask, features in masks:
            features.append(math.prod(size_of(below)) / max(mask.numel(), 1))
        node = below[0]
    return masks
