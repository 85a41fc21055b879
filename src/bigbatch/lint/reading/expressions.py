"""What an expression stands for; what happens while it is computed is noted on the way."""

import ast
from collections.abc import Callable
from dataclasses import replace

from bigbatch.lint.reading.arithmetic import combine
from bigbatch.lint.reading.calls import call
from bigbatch.lint.reading.comparing import compare, truth
from bigbatch.lint.reading.conditions import AllOf, Always, AnyOf, Condition, Last, Not, Synced
from bigbatch.lint.reading.joining import join
from bigbatch.lint.reading.program import dotted
from bigbatch.lint.reading.scopes import Function, Object
from bigbatch.lint.reading.things import Computed, Role, Thing
from bigbatch.lint.reading.values import Number, Rows, Several, Unknown, Value
from bigbatch.lint.reading.vocabulary import last_part, names_mask
from bigbatch.lint.reading.walk import Walk, by_name

_HUGE = 2**53  # beyond, a float is no longer exact
_SYNCED = {"sync_gradients", "is_gradient_accumulation_boundary"}
_PROPERTIES = {"property", "cached_property"}


def value_of(walk: Walk, node: ast.expr | None) -> Value:
    """Return what an expression stands for."""
    if node is None:
        return Unknown()
    reader = _READERS.get(type(node))
    if reader is not None:
        return reader(walk, node)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            value_of(walk, child)
    return Unknown()


def condition_of(walk: Walk, node: ast.expr) -> Condition:
    """Return what `if node:` asks."""
    return truth(walk, value_of(walk, node), node)


def _constant(_: Walk, node: ast.Constant) -> Value:
    if isinstance(node.value, bool):
        return Always(node.value)
    if isinstance(node.value, int | float) and abs(node.value) < _HUGE:
        return Number(repr(node.value), float(node.value))
    return Unknown()


def _name(walk: Walk, node: ast.Name) -> Value:
    return walk.named(node.id)


def _attribute(walk: Walk, node: ast.Attribute) -> Value:
    text = dotted(node)
    found = walk.scope.find(text) if text else None
    if found is not None or node.attr in _SYNCED:
        return found or Synced()
    if node.attr == "is_last_batch":  # Lightning's
        return Last(None)
    base = value_of(walk, node.value)
    if node.attr == "grad":
        return Thing(Role.GRADIENT, text)
    if isinstance(base, Object):
        return base.attributes.variables.get(f"self.{node.attr}") or _method(walk, base, node.attr) or by_name(text)
    if isinstance(base, Computed):
        return _of_computed(walk, base, node)
    kept = isinstance(base, Thing) and node.attr in {"data", "module"}
    return base if kept else by_name(text) if text else Unknown()


def _method(walk: Walk, owner: Object, name: str) -> Value | None:
    found = walk.program.method(owner.node, name)
    if found is None:
        return None
    method = Function(found, walk.module, owner)
    asked = any(last_part(dotted(decorator)) in _PROPERTIES for decorator in found.decorator_list)
    return walk.enter(method, (), {}) if asked else method


def _of_computed(walk: Walk, base: Computed, node: ast.Attribute) -> Value:
    """Read `outputs.loss`, whose model is known to leave out padding; `loss.data` has no graph."""
    if node.attr == "data":
        return replace(base, live=frozenset())
    if node.attr != "loss":
        return base.part(node.attr)
    padded = walk.program.padded_model and (walk.program.pads or walk.program.ignores_labels)
    return replace(base.part("loss"), reduction="mean", masked=node if padded else None)


def _subscript(walk: Walk, node: ast.Subscript) -> Value:
    text = dotted(node)
    found = walk.scope.find(text) if text else None
    if found is not None or names_mask(text):
        return found or Thing(Role.MASK, text)
    base, index = value_of(walk, node.value), value_of(walk, node.slice)
    if isinstance(base, Several) and isinstance(index, Number) and index.known is not None:
        place = int(index.known)
        return base.items[place] if -len(base.items) <= place < len(base.items) else Unknown()
    if isinstance(base, Thing):
        return base
    if isinstance(base, Computed):
        if isinstance(index, Thing) and index.role is Role.MASK:
            return replace(base, masked=node)
        return base.part(ast.unparse(node.slice))
    return by_name(text) if text else Unknown()


def _bin_op(walk: Walk, node: ast.BinOp) -> Value:
    return combine(walk, node, value_of(walk, node.left), value_of(walk, node.right))


def _unary_op(walk: Walk, node: ast.UnaryOp) -> Value:
    value = value_of(walk, node.operand)
    if isinstance(node.op, ast.Not):
        return Not(truth(walk, value, node.operand))
    if isinstance(value, Number) and value.known is not None and isinstance(node.op, ast.USub):
        return Number(f"-{value.text}", -value.known)
    if isinstance(node.op, ast.Invert) and isinstance(value, Condition):
        return Not(value)
    return value if isinstance(value, Computed | Thing) else Unknown()


def _bool_op(walk: Walk, node: ast.BoolOp) -> Value:
    parts = tuple(condition_of(walk, part) for part in node.values)
    return AllOf(parts) if isinstance(node.op, ast.And) else AnyOf(parts)


def _compare(walk: Walk, node: ast.Compare) -> Value:
    values = [value_of(walk, part) for part in (node.left, *node.comparators)]
    if len(node.ops) > 1:
        return Unknown()
    return compare(walk, node, values[0], values[1])


def _if_exp(walk: Walk, node: ast.IfExp) -> Value:
    condition = condition_of(walk, node.test)
    first, second = value_of(walk, node.body), value_of(walk, node.orelse)
    if isinstance(first, Number) and isinstance(second, Number) and not first.same(second):
        fixed = not walk.varies(node.test)
        return Number(ast.unparse(node), fixed=fixed, atoms=first.atoms | second.atoms | {first.text, second.text})
    return join(ast.unparse(node), first, second, condition)


def _several(walk: Walk, node: ast.Tuple) -> Value:
    return Several(tuple(value_of(walk, part) for part in node.elts))


def _list(walk: Walk, node: ast.List) -> Value:
    starred = any(isinstance(part, ast.Starred) for part in node.elts)
    for part in node.elts:
        value_of(walk, part)
    return Rows(None if starred else len(node.elts))


def _comprehension(walk: Walk, node: ast.ListComp | ast.GeneratorExp | ast.SetComp) -> Value:
    """Return something as long as what it is made from; its element is computed in a loop."""
    loops = [walk.go_over(generator, node.elt) for generator in node.generators]
    with walk.inside(*loops):
        value_of(walk, node.elt)
    length = loops[0].length if len(loops) == 1 and not node.generators[0].ifs else None
    return Rows(int(length.known) if length is not None and length.known is not None else None)


def _named(walk: Walk, node: ast.NamedExpr) -> Value:
    value = value_of(walk, node.value)
    walk.scope.set(node.target.id, value)
    return value


def _formatted(walk: Walk, node: ast.FormattedValue) -> Value:
    value_of(walk, node.value)
    return Unknown()


def _lambda(walk: Walk, node: ast.Lambda) -> Value:
    return Function(node, walk.scope)


def _starred(walk: Walk, node: ast.Starred | ast.Await) -> Value:
    return value_of(walk, node.value)


def _call(walk: Walk, node: ast.Call) -> Value:
    return call(walk, node, value_of)


_READERS: dict[type[ast.AST], Callable[..., Value]] = {
    ast.Constant: _constant,
    ast.Name: _name,
    ast.Attribute: _attribute,
    ast.Subscript: _subscript,
    ast.BinOp: _bin_op,
    ast.UnaryOp: _unary_op,
    ast.BoolOp: _bool_op,
    ast.Compare: _compare,
    ast.IfExp: _if_exp,
    ast.Tuple: _several,
    ast.List: _list,
    ast.ListComp: _comprehension,
    ast.GeneratorExp: _comprehension,
    ast.SetComp: _comprehension,
    ast.NamedExpr: _named,
    ast.FormattedValue: _formatted,
    ast.Lambda: _lambda,
    ast.Starred: _starred,
    ast.Await: _starred,
    ast.Call: _call,
}
