"""What assignments do: names stand for something else, and some of them touch gradients or keep a loss alive."""

import ast
from dataclasses import replace

from bigbatch.lint.reading.arithmetic import combine
from bigbatch.lint.reading.conditions import Varies
from bigbatch.lint.reading.events import Kind
from bigbatch.lint.reading.expressions import value_of
from bigbatch.lint.reading.places import Place
from bigbatch.lint.reading.program import dotted
from bigbatch.lint.reading.things import Computed, Role, Thing
from bigbatch.lint.reading.trees import nodes_in
from bigbatch.lint.reading.values import Inverse, Number, Several, Unknown, Value
from bigbatch.lint.reading.vocabulary import last_part, role_of_name
from bigbatch.lint.reading.walk import Walk, by_name

_SYNC = "require_backward_grad_sync"
_BY_NAME = {Role.OPTIMIZER, Role.SCHEDULER, Role.SCALER, Role.MODEL, Role.CRITERION, Role.MASK}


def assign(walk: Walk, target: ast.expr, value: Value, source: ast.expr) -> None:
    """Let a target stand for a value."""
    if isinstance(target, ast.Tuple | ast.List):
        for place, part in enumerate(target.elts):
            assign(walk, part, _part(value, place, len(target.elts)), source)
        return
    if isinstance(target, ast.Starred):
        assign(walk, target.value, Unknown(), source)
        return
    text = dotted(target)
    if isinstance(target, ast.Attribute):
        _note_attribute(walk, target, source)
    if not text:
        return
    value = _note_sum(walk, target, text, value, source)
    walk.carried.discard(text)
    walk.scope.set(text, _named(text, value))


def _part(value: Value, place: int, of: int) -> Value:
    if isinstance(value, Several):
        return value.items[place] if place < len(value.items) else Unknown()
    if isinstance(value, Computed):
        return value.part((place, of))
    return Unknown()


def _named(text: str, value: Value) -> Value:
    """Return a value under its new name; where nothing is known of it, the name may tell."""
    if isinstance(value, Number) and not value.text.startswith("len("):
        atoms = value.atoms | ({value.text} if value.atoms else frozenset()) | {text}
        return (
            replace(value, text=text, value=value.known, plus=0, atoms=atoms)
            if value.known is not None or not value.plus
            else value
        )
    if isinstance(value, Thing):
        return replace(value, text=text) if value.role not in {Role.CONTEXT, Role.GRADIENT} else value
    role = role_of_name(text)
    if role is Role.MASK and isinstance(value, Varies):  # a comparison, element by element
        return Thing(role, text)
    blank = isinstance(value, Unknown) or (isinstance(value, Computed) and value.reduction == "?" and not value.most)
    if role is not None and role in _BY_NAME and blank:
        return Thing(role, text)
    if isinstance(value, Unknown) and not value.text:
        return by_name(text) if isinstance(by_name(text), Computed) else Unknown(text)
    return value


def _note_attribute(walk: Walk, target: ast.Attribute, source: ast.expr) -> None:
    """Note what setting an attribute does to gradients."""
    if target.attr == "grad":
        zeros = isinstance(source, ast.Call) and last_part(dotted(source.func)).startswith("zeros")
        cleared = zeros or (isinstance(source, ast.Constant) and not source.value)
        factor = None
        if isinstance(source, ast.BinOp) and isinstance(source.op, ast.Div):
            factor = walk.number(value_of(walk, source.right), source.right)
        walk.emit(Kind.ZERO if cleared else Kind.RESCALE, target, subject=dotted(target.value), factor=factor)
    elif target.attr == _SYNC:
        walk.emit(Kind.SYNC, target, subject=dotted(target.value))


def _note_sum(walk: Walk, target: ast.expr, text: str, value: Value, source: ast.expr) -> Value:
    """Note `total = total + loss`, which keeps the graph of every loss; what is made of it is known by this line."""
    if not isinstance(value, Computed) or not value.live or isinstance(source, ast.Call):
        return value
    sums = [node for node in nodes_in(source) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)]
    names = {dotted(node) for each in sums for node in nodes_in(each) if isinstance(node, ast.Name | ast.Attribute)}
    others = [walk.scope.find(name) for name in names - {text}]
    if text in names and any(isinstance(other, Computed) and other.live & value.live for other in others):
        walk.emit(Kind.KEEP, target, loss=value, subject=text)
        return value.part(id(target))
    return value


def augment(walk: Walk, node: ast.AugAssign) -> None:
    """Carry out `x += y` and its like."""
    value = value_of(walk, node.value)
    text = dotted(node.target)
    if isinstance(node.target, ast.Attribute) and node.target.attr == "grad":
        walk.emit(Kind.RESCALE, node, factor=_divisor(walk, node, value))
        return
    before = (walk.scope.find(text) or by_name(text)) if text else value_of(walk, node.target)
    if isinstance(before, Thing) and before.role is Role.GRADIENT:
        walk.emit(Kind.RESCALE, node, factor=_divisor(walk, node, value))
        return
    if isinstance(node.op, ast.Add) and isinstance(value, Computed) and value.live:
        walk.emit(Kind.KEEP, node, loss=value, subject=text or ast.unparse(node.target))
        value = value.part(id(node))
    after = combine(walk, node, before, value)
    if text:
        walk.scope.set(text, after if isinstance(after, Computed | Number | Place) else Unknown(text))


def _divisor(walk: Walk, node: ast.AugAssign, value: Value) -> Number | None:
    """Return what gradients are divided by in place."""
    if isinstance(node.op, ast.Div):
        return walk.number(value, node.value)
    return value.of if isinstance(node.op, ast.Mult) and isinstance(value, Inverse) else None
