"""What sums, products, quotients and remainders make of places, amounts and losses."""

import ast
import math
import operator
from collections.abc import Callable
from dataclasses import replace

from bigbatch.lint.reading.places import Place, Quotient, Remainder
from bigbatch.lint.reading.things import Computed, Role, Thing, computed
from bigbatch.lint.reading.values import Inverse, Number, Unknown, Value
from bigbatch.lint.reading.vocabulary import counts_micro_batches
from bigbatch.lint.reading.walk import Walk

_NEARLY = 1e-9


def combine(walk: Walk, node: ast.BinOp | ast.AugAssign, left: Value, right: Value) -> Value:
    """Return what `left op right` stands for."""
    sides = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.target, node.value)
    numbers = walk.number(left, sides[0]), walk.number(right, sides[1])
    made = _places(node.op, left, right, numbers[0], numbers[1])
    if made is None and isinstance(node.op, ast.Mod) and numbers[1] is not None and _may_count(walk, numbers[0]):
        made = Remainder(Place(None, None), numbers[1])
    if made is not None:
        return made
    if isinstance(node.op, ast.Div | ast.FloorDiv) and _is_loss(left, numbers[1]):
        return _divided(node, _as_computed(left), right, numbers[1])
    if isinstance(node.op, ast.Mult):
        for one, other, number in ((left, right, numbers[1]), (right, left, numbers[0])):
            if isinstance(one, Computed):
                return _multiplied(node, one, other, number)
    if isinstance(left, Computed) or isinstance(right, Computed):
        return _added(node, left, right)
    if numbers[0] is not None and numbers[1] is not None:
        return _amount(walk, node, numbers[0], numbers[1])
    return computed(id(node))


def _places(op: ast.operator, left: Value, right: Value, one: Number | None, other: Number | None) -> Value | None:
    """Return the place or remainder that it is, if it is one."""
    if isinstance(op, ast.Mod) and isinstance(left, Place) and other is not None:
        return Remainder(left, other)
    if isinstance(op, ast.FloorDiv) and isinstance(left, Place) and other is not None:
        return Quotient(left, other)
    if isinstance(op, ast.Add | ast.Sub):
        sign = 1 if isinstance(op, ast.Add) else -1
        for place, number in ((left, other), (right, one)):
            if isinstance(place, Place) and number is not None and (place is left or sign == 1):
                return _moved(place, number, sign)
        if isinstance(left, Place) or isinstance(right, Place):  # `epoch * len(loader) + i`
            loop = next(side.loop for side in (left, right) if isinstance(side, Place))
            return Place(loop, None, carried=True)
    return None


def _may_count(walk: Walk, number: Number | None) -> bool:
    """Tell whether a name may be the number of a micro-batch that something unseen counts: `self.iter % n`."""
    if number is None or number.known is not None or walk.loop() is None:
        return False
    return not number.text.startswith("len(") and not counts_micro_batches(number.text)


def _moved(place: Place, number: Number, sign: int) -> Place:
    if number.known is not None and float(number.known).is_integer():
        return place.shifted(sign * int(number.known))
    return replace(place, offset=None, carried=True)


def _is_loss(value: Value, by: Number | None) -> bool:
    return isinstance(value, Computed) or (
        isinstance(value, Unknown) and by is not None and counts_micro_batches(by.text)
    )


def _as_computed(value: Value) -> Computed:
    if isinstance(value, Computed):
        return value
    return computed(value.text if isinstance(value, Unknown) else id(value))


def _divided(node: ast.BinOp | ast.AugAssign, loss: Computed, by: Value, number: Number | None) -> Value:
    if isinstance(by, Thing) and by.role is Role.COUNT:
        # A sum over the elements that a mask leaves, by their number: a mean over them.
        return replace(loss, reduction="mean", masked=node.value if isinstance(node, ast.AugAssign) else node)
    if number is not None:
        return loss.divided(number, node)
    right = node.right if isinstance(node, ast.BinOp) else node.value
    return replace(loss.divided(Number(ast.unparse(right), fixed=False), node), rescaled=True)


def _multiplied(node: ast.AST, loss: Computed, by: Value, number: Number | None) -> Computed:
    if isinstance(by, Inverse):
        return loss.divided(by.of, node)
    if isinstance(by, Computed):
        return replace(loss, origins=loss.origins | by.origins, live=loss.live | by.live, rescaled=True, reduction="?")
    if number is None:  # a mask, a count, or something unknown
        masks = isinstance(by, Thing) and by.role is not Role.COUNT
        return loss if masks else replace(loss, rescaled=True, masked=None)
    undone = next((place for place, divisor in enumerate(loss.most) if divisor.same(number)), None)
    if undone is not None:
        without = loss.most[:undone] + loss.most[undone + 1 :]
        places = loss.divided_at[:undone] + loss.divided_at[undone + 1 :]
        return replace(loss, most=without, least=without, divided_at=places)
    if number.known is None:
        return replace(loss, rescaled=True)
    return _weighed(node, loss, number.known)


def _weighed(node: ast.AST, loss: Computed, factor: float) -> Computed:
    """Take `0.25 * loss` for a division by 4, which a rule may or may not believe."""
    if 0 < factor < 1 and abs(1 / factor - round(1 / factor)) < _NEARLY:
        return loss.divided(Number(f"× {factor}", float(round(1 / factor))), node)
    return loss


def _added(node: ast.AST, left: Value, right: Value) -> Computed:
    parts = [side for side in (left, right) if isinstance(side, Computed)]
    more = max(parts, key=lambda part: len(part.most))
    made = {id(node)} if sum(bool(part.live) for part in parts) > 1 else set[object]()
    return Computed(
        origins=frozenset[object]().union(*(part.origins for part in parts), made),
        least=min((part.least for part in parts), key=len),
        most=more.most,
        reduction=parts[0].reduction if len({part.reduction for part in parts}) == 1 else "?",
        masked=next((part.masked for part in parts if part.masked is not None), None),
        live=frozenset[object]().union(*(part.live for part in parts), made),
        rescaled=any(part.rescaled for part in parts),
        divided_at=more.divided_at,
        amp=any(part.amp for part in parts),
    )


def _amount(walk: Walk, node: ast.BinOp | ast.AugAssign, one: Number, other: Number) -> Value:
    """Compute with two amounts."""
    if isinstance(node.op, ast.Div) and one.known == 1:
        return Inverse(other)
    known = _computed(node.op, one.known, other.known)
    fixed = one.fixed and other.fixed and not walk.varies(node)
    text = ast.unparse(node) if isinstance(node, ast.BinOp) else one.text
    atoms = one.atoms | other.atoms | {one.text, other.text}
    if known is not None:
        return Number(text, known, fixed=fixed, atoms=atoms)
    if isinstance(node.op, ast.Add | ast.Sub) and other.known is not None and float(other.known).is_integer():
        step = int(other.known) if isinstance(node.op, ast.Add) else -int(other.known)
        return replace(one, plus=one.plus + step)
    return Number(text, fixed=fixed, atoms=atoms)


_OPERATIONS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _computed(op: ast.operator, one: float | None, other: float | None) -> float | None:
    operation = _OPERATIONS.get(type(op))
    if one is None or other is None or operation is None:
        return None
    try:
        result = operation(one, other)
    except (ZeroDivisionError, OverflowError):
        return None
    return result if math.isfinite(result) else None
