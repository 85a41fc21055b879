"""What a comparison says about a micro-batch's place, or about settings."""

import ast
from dataclasses import replace

from bigbatch.lint.reading.conditions import AllOf, Always, Condition, Due, First, Fixed, Last, Not, Varies
from bigbatch.lint.reading.places import LoopKind, Place, Quotient, Remainder
from bigbatch.lint.reading.program import dotted
from bigbatch.lint.reading.things import Role, Thing
from bigbatch.lint.reading.values import Number, Value
from bigbatch.lint.reading.vocabulary import LAST, counts_micro_batches
from bigbatch.lint.reading.walk import Walk

_TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.GtE: ast.LtE}


def truth(walk: Walk, value: Value, node: ast.expr) -> Condition:
    """Return what `if value:` asks."""
    match value:
        case Remainder(place, of):
            return Not(_due(place, of, 0))
        case Place(loop=loop, offset=0, resets=None):
            return Not(First(loop))
        case Number(value=known) if known is not None:
            return Fixed(value.text) if value.atoms or not value.text.isdigit() else Always(bool(value.known))
        case Thing(role=role) if role not in {Role.MASK, Role.COUNT}:
            return Fixed(value.text)
        case _:
            return value if isinstance(value, Condition) else _other(walk, node)


def _other(walk: Walk, node: ast.expr) -> Condition:
    text = ast.unparse(node)
    return Varies() if walk.varies(node) else Fixed(text, of_steps=bool(dotted(node)) and counts_micro_batches(text))


def compare(walk: Walk, node: ast.Compare, left: Value, right: Value) -> Value:
    """Return what `left op right` asks."""
    op = type(node.ops[0])
    if isinstance(left, Quotient) and isinstance(right, Quotient):
        return _of_quotients(op, left, right)
    found = _of_places(walk, node, op, left, right)
    if found is None:
        found = _of_places(walk, node, _TURNED.get(op, op), right, left, turned=True)
    if found is None and isinstance(left, Condition) and isinstance(right, Always) and op in {ast.Eq, ast.Is}:
        found = left if right.holds else Not(left)
    if found is not None:
        return found
    return Thing(Role.MASK, node=node) if _is_mask(node) else _of_settings(walk, node, left, right)


def _of_settings(walk: Walk, node: ast.Compare, left: Value, right: Value) -> Condition:
    """Tell settings, such as `scaler is not None` and `steps > 1`, from what changes from round to round."""
    if isinstance(node.ops[0], ast.Is | ast.IsNot) and isinstance(left, Thing):
        return Fixed(ast.unparse(node))
    sides = [walk.number(side, part) for side, part in ((left, node.left), (right, node.comparators[0]))]
    if all(side is not None and side.fixed for side in sides) and not walk.varies(node):
        return Fixed(ast.unparse(node), of_steps=_asks_for_steps(sides))
    return _other(walk, node)


def _asks_for_steps(sides: list[Number | None]) -> bool:
    """Tell `steps > 1`, `steps == 1`: is there any accumulation?"""
    names = any(side is not None and side.atoms and counts_micro_batches(side.text) for side in sides)
    return names and any(side is not None and side.known is not None and side.known <= 1 for side in sides)


def _of_places(
    walk: Walk, node: ast.Compare, op: type[ast.cmpop], left: Value, right: Value, *, turned: bool = False
) -> Condition | None:
    number = walk.number(right, node.left if turned else node.comparators[0])
    if number is None:
        return None
    if isinstance(left, Remainder):
        return _of_remainder(op, left, number)
    if isinstance(left, Place):
        return _of_place(op, left, number)
    return None


def _of_quotients(op: type[ast.cmpop], left: Quotient, right: Quotient) -> Condition:
    """Read `(i + 1) // n > i // n`: the next micro-batch is in another window."""
    places = left.place, right.place
    if not left.by.same(right.by) or places[0].offset is None or places[1].offset is None:
        return Varies()
    later = max(places, key=lambda place: place.offset or 0)
    if abs(places[0].offset - places[1].offset) != 1 or op not in {ast.Gt, ast.Lt, ast.NotEq, ast.Eq}:
        return Varies()
    due = _due(later, left.by, 0)
    return Not(due) if op is ast.Eq else due


def _of_remainder(op: type[ast.cmpop], left: Remainder, right: Number) -> Condition:
    """Read `i % n == 0`, `i % n == n - 1`, `i % n != 0`, `i % n > 0`."""
    target = _remainder_asked(left.of, right)
    if target is None:
        return Varies()
    if op in {ast.Eq, ast.GtE} and (op is ast.Eq or target == -1):
        return _due(left.place, left.of, target)
    if op is ast.NotEq or (op is ast.Gt and target == 0) or (op is ast.Lt and target == -1):
        return Not(_due(left.place, left.of, target))
    return Varies()


def _remainder_asked(of: Number, right: Number) -> int | None:
    """Return the remainder as a small number: n - 1 is -1."""
    if right.known is not None and of.known is not None:
        asked = int(right.known)
        return asked - int(of.known) if asked == of.known - 1 else asked
    if right.known is not None:
        return int(right.known)
    plain = Number(right.text, right.value, atoms=right.atoms)
    return right.plus if plain.same(Number(of.text, of.value)) else None


def _due(place: Place, every: Number, remainder: int) -> Due:
    """Say when a place leaves a remainder: by the count of micro-batches, this one included."""
    if place.offset is None:
        return Due(place.loop, every, None, place.carried)
    phase = remainder - place.offset + 1
    if every.known is not None and every.known >= 1:
        phase %= int(every.known)
    return Due(place.loop, every, phase, place.carried)


def _of_place(op: type[ast.cmpop], place: Place, number: Number) -> Condition:
    """Read `i > 0`, `i == len(loader) - 1`, `count == n`."""
    if number.known is not None and place.offset is not None and place.resets is None:
        ahead = number.known - place.offset  # how many came before
        for asked, when in ((0, {ast.Eq: 1, ast.LtE: 1, ast.Gt: 0, ast.NotEq: 0}), (1, {ast.Lt: 1, ast.GtE: 0})):
            if ahead == asked and op in when:
                return First(place.loop) if when[op] else Not(First(place.loop))
    if op in {ast.Eq, ast.GtE}:
        return _full(place, number)
    if op in {ast.NotEq, ast.Lt}:
        return Not(_full(place, number))
    return Varies()


def _full(place: Place, number: Number) -> Condition:
    """Say when a count reaches a number: a window's, if it is set back then; or the loop's last."""
    if place.resets is None:
        return Varies() if place.carried and place.offset is None else _last(place, number)
    # Between setting it back and the next question it grows by one, whichever of the two is written first.
    every = replace(number, plus=number.plus - place.resets)
    if place.offset is None:
        return Due(place.loop, every, None, place.carried)
    longer = place.resets + 1 - place.offset  # the first window, which nothing was set back before
    due = Due(place.loop, every, longer, place.carried)
    return AllOf((due, Not(First(place.loop)))) if longer == 1 else due


def _last(place: Place, number: Number) -> Condition:
    """Say whether a number of rounds is the loop's own: surely, if its length is asked for; or by its name."""
    loop = place.loop
    length = loop.length if loop is not None else None
    if length is not None and place.offset is not None:
        reached = Number(number.text, number.value, number.plus - place.offset + 1)
        if reached.same(length):
            return Last(loop)
        if number.text == length.text or (reached.known is not None and length.known is not None):
            return Always(holds=False) if reached.plus > length.plus else Varies()
    other = loop is not None and loop.kind is LoopKind.COUNTED and not LAST.search(number.text)
    return Last(loop) if number.known is None and number.fixed and not other else Varies()


def _is_mask(node: ast.Compare) -> bool:
    """Tell `labels != -100`, `targets != pad_id` and `attention_mask == 1` from other comparisons."""
    text = ast.unparse(node)
    return ("-100" in text or "ignore_index" in text or "pad" in text.lower()) and isinstance(
        node.ops[0], ast.NotEq | ast.Gt | ast.GtE
    )
