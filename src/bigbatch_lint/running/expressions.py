"""Evaluates expressions: numbers, texts and containers as Python does, everything else as far as its kind matters."""

import ast
import math
import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from bigbatch_lint.reading.module import Module
from bigbatch_lint.reading.names import LENGTHS, Role, announces_steps, children, dotted, is_mask_key, last_part
from bigbatch_lint.running.calls import call
from bigbatch_lint.running.machine import Machine
from bigbatch_lint.running.trace import Round
from bigbatch_lint.running.values import (
    NUMBERS,
    PLAIN,
    Class,
    Division,
    Environment,
    Function,
    Instance,
    Items,
    Loss,
    Nothing,
    Opaque,
    new_loss,
)

_ARITHMETIC: dict[type[ast.operator], Callable[[object, object], object]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.RShift: operator.rshift,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[..., object]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.Gt: operator.gt,
    ast.LtE: operator.le,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
_LARGEST = 10**12  # numbers beyond are no counters
_LISTED = 16  # items of a comprehension that are computed one by one


class Expressions(Machine):
    """The part of the interpreter that computes values."""

    def __init__(self, module: Module, length: int, *, settings: bool) -> None:
        super().__init__(module, length, settings=settings)
        self._kinds: dict[type[ast.AST], Callable[..., object]] = {
            ast.Constant: lambda node, _: node.value if isinstance(node.value, PLAIN) else Opaque(),
            ast.Name: self._name,
            ast.NamedExpr: self._walrus,
            ast.Await: lambda node, env: self.evaluate(node.value, env),
            ast.Starred: lambda node, env: self.evaluate(node.value, env),
            ast.Lambda: Function,
            ast.Tuple: lambda node, env: tuple(self.evaluate(each, env) for each in node.elts),
            ast.List: lambda node, env: [self.evaluate(each, env) for each in node.elts],
            ast.Dict: self._dict,
            ast.Attribute: self._attribute,
            ast.Subscript: self._subscript,
            ast.UnaryOp: self._unary,
            ast.BoolOp: self._and_or,
            ast.Compare: self._compare,
            ast.IfExp: self._if_else,
            ast.ListComp: self._comprehension,
            ast.GeneratorExp: self._comprehension,
            ast.SetComp: self._comprehension,
            ast.BinOp: self._binary,
            ast.Call: partial(call, self),
        }

    def evaluate(self, node: ast.expr | None, env: Environment) -> object:
        """Compute an expression."""
        if node is None:
            return None
        compute = self._kinds.get(type(node))
        if compute is not None:
            return compute(node, env)
        for child in children(node):
            if isinstance(child, ast.expr):
                self.evaluate(child, env)
        return Opaque(is_setting=not self.varies(node))

    def _name(self, node: ast.Name, env: Environment) -> object:
        bound = env.find(node.id)
        return bound if bound is not None else self.unknown(node.id)

    def _walrus(self, node: ast.NamedExpr, env: Environment) -> object:
        value = self.evaluate(node.value, env)
        env[node.target.id] = value
        return value

    def _dict(self, node: ast.Dict, env: Environment) -> object:
        found: dict[object, object] = {}
        for number, (key, value) in enumerate(zip(node.keys, node.values, strict=True)):
            found[key.value if isinstance(key, ast.Constant) else number] = self.evaluate(value, env)
        return found

    # Attributes and items.
    def _attribute(self, node: ast.Attribute, env: Environment) -> object:
        text = dotted(node)
        bound = env.find(text) if text else None
        if bound is not None:
            return bound
        if node.attr in {"sync_gradients", "is_gradient_accumulation_boundary"}:
            return self.is_synchronizing()
        if node.attr == "is_last_batch":
            return bool(self.rounds) and self.is_last(self.rounds[-1])
        base = self.evaluate(node.value, env)
        if node.attr == "grad":
            return Opaque(text, Role.GRADIENT)
        return self._attribute_of(base, node, text)

    def _attribute_of(self, base: object, node: ast.Attribute, text: str) -> object:
        if isinstance(base, Instance):
            return self._member(base, node.attr, text)
        if isinstance(base, dict) and node.attr in base:
            return base[node.attr]
        if isinstance(base, Loss):
            return self._tensor_attribute(base, node, text)
        if isinstance(base, Opaque) and base.role is not None and node.attr in {"data", "module"}:
            return base
        found = self.unknown(text or node.attr)
        if isinstance(found, Opaque) and isinstance(base, Opaque):
            found.is_setting = base.is_setting
        return found

    def _member(self, base: Instance, name: str, text: str) -> object:
        if name in base.attributes:
            return base.attributes[name]
        method = self.module.method(base.cls.node, name)
        if method is None:
            return self.unknown(text or name)
        bound = Function(method, base.cls.env, base)
        if any(last_part(dotted(each)) in {"property", "cached_property"} for each in method.decorator_list):
            return self.call_function(bound, (), {})
        return bound

    def _tensor_attribute(self, base: Loss, node: ast.Attribute, text: str) -> object:
        if isinstance(self.unknown(node.attr), int):
            return self.steps
        if node.attr == "shape":
            return Opaque(text, is_setting=False)
        if node.attr == "data":
            return base.detached()
        part = base.part(node.attr)
        if node.attr == "loss":
            return replace(part, reduction="mean", masked=node if self.module.pads_models else None)
        return part

    def _subscript(self, node: ast.Subscript, env: Environment) -> object:
        text = dotted(node)
        bound = env.find(text) if text else None
        if bound is not None:
            return bound
        base, index = self.evaluate(node.value, env), self.evaluate(node.slice, env)
        if text and is_mask_key(text) and not isinstance(base, (dict, Instance)):
            return Opaque(text, Role.MASK)
        return self._item(base, index, node, text)

    def _item(self, base: object, index: object, node: ast.Subscript, text: str) -> object:
        if isinstance(base, dict) and isinstance(index, PLAIN):
            return base.get(index, Opaque(text))
        if isinstance(base, (tuple, list)) and isinstance(index, int):
            return base[index] if -len(base) <= index < len(base) else Opaque(text)
        if isinstance(base, Items):
            return base.item(index) if isinstance(index, int) else base
        if isinstance(base, Opaque) and base.role is not None:
            return base
        if isinstance(base, Loss):
            masked = isinstance(index, Opaque) and index.role is Role.MASK
            return replace(base, masked=node) if masked else base.part(self.module.text(node.slice))
        return self.unknown(text) if text else Opaque(is_setting=not self.varies(node))

    # Questions.
    def _unary(self, node: ast.UnaryOp, env: Environment) -> object:
        value = self.evaluate(node.operand, env)
        if isinstance(node.op, ast.Not):
            answer = self.truth(value, node.operand)
            return Opaque(is_setting=False) if answer is None else not answer
        if isinstance(value, NUMBERS):
            return -value if isinstance(node.op, ast.USub) else value
        return value

    def _and_or(self, node: ast.BoolOp, env: Environment) -> object:
        """Return what decides; a part that nobody can know leaves the whole unknown, unless another part decides."""
        decides = isinstance(node.op, ast.Or)
        unknown = False
        for part in node.values:
            value = self.evaluate(part, env)
            answer = self.truth(value, part)
            if answer is None:
                unknown = True
            elif answer is decides:
                return value if isinstance(value, PLAIN) else decides
        return Opaque(is_setting=False) if unknown else not decides

    def _if_else(self, node: ast.IfExp, env: Environment) -> object:
        answer = self.truth(self.evaluate(node.test, env), node.test)
        return self.evaluate(node.orelse if answer is False else node.body, env)

    def _compare(self, node: ast.Compare, env: Environment) -> object:
        left = self.evaluate(node.left, env)
        result: object = True
        for op, comparator in zip(node.ops, node.comparators, strict=True):
            right = self.evaluate(comparator, env)
            result = self._comparison(node, op, left, right)
            if result is not True:
                return result
            left = right
        return result

    def _comparison(  # noqa: PLR0911 - one kind of question after the other
        self, node: ast.Compare, op: ast.cmpop, left: object, right: object
    ) -> object:
        if isinstance(left, PLAIN) and isinstance(right, PLAIN) and type(op) in _COMPARISONS:
            try:
                return bool(_COMPARISONS[type(op)](left, right))
            except TypeError:
                return Opaque(is_setting=False)
        if isinstance(op, (ast.Is, ast.IsNot)) and (left is None or right is None):
            return self._is_something(left if right is None else right) is isinstance(op, ast.IsNot)
        if isinstance(op, (ast.In, ast.NotIn)) and isinstance(left, PLAIN) and isinstance(right, (list, tuple, dict)):
            return (left in right) is isinstance(op, ast.In)
        if isinstance(op, (ast.NotEq, ast.Gt, ast.GtE)) and self._is_about_padding(node):
            return Opaque(self.module.text(node), Role.MASK)
        last = self._is_last_round(node, op, left, right)
        if last is not None:
            return last
        if isinstance(left, Opaque) and left.is_remainder:
            return Opaque(is_setting=False, is_remainder=isinstance(op, ast.Eq))
        varies = self.varies(node) or isinstance(left, Loss) or isinstance(right, Loss)
        return Opaque(self.module.text(node), is_setting=not varies)

    def _is_something(self, value: object) -> bool:
        if isinstance(value, Nothing):
            return False
        known = isinstance(value, Opaque) and (value.made is not None or value.role is Role.GRADIENT)
        return known or isinstance(value, (Loss, Items, Function, Instance, Class)) or self.setting()

    def _is_about_padding(self, node: ast.Compare) -> bool:
        text = self.module.text(node)
        return "-100" in text or "ignore_index" in text or "pad" in text.lower()

    def _is_last_round(self, node: ast.Compare, op: ast.cmpop, left: object, right: object) -> bool | None:
        """Answer `i + 1 == total` for the loop's own number, whatever its length is called."""
        micro: Round | None = next((each for each in reversed(self.rounds) if each.is_micro), None)
        if micro is None or not micro.total or not isinstance(op, (ast.Eq, ast.GtE, ast.Lt, ast.NotEq)):
            return None
        number, other = (left, right) if isinstance(left, int) else (right, left)
        side = node.left if isinstance(left, int) else node.comparators[0]
        if not (isinstance(number, int) and isinstance(other, Opaque) and other.is_setting and self.varies(side)):
            return None
        if not LENGTHS.search(self.module.text(node)):
            return None
        return self.is_last(micro) is isinstance(op, (ast.Eq, ast.GtE))

    # Comprehensions.
    def _comprehension(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp, env: Environment) -> object:
        head = node.generators[0]
        items = self.items_of(self.evaluate(head.iter, env), head.iter)
        inner = Environment(env)
        whole = node.elt in self.module.trains or (items.length is not None and items.length <= _LISTED)
        found = []
        trains = node.elt in self.module.trains
        self.passages[node] = passage = self.passages.get(node, 0) + 1
        for number in range(min(1 if items.length is None else items.length, 64 if whole else 1)):
            if trains:
                self.rounds.append(Round(node, number, passage, is_micro=True, total=items.length, kind=items.kind))
            self.assign(head.target, items.item(number), inner, None)
            if all(self.truth(self.evaluate(each, inner), each) is not False for each in head.ifs):
                found.append(self.evaluate(node.elt, inner))
            if trains:
                self.rounds.pop()
        if whole and items.length is not None and items.length <= 64:  # noqa: PLR2004
            return found
        value = found[0] if found else Opaque()
        return Items(items.length, lambda _: value, items.kind)

    def assign(self, target: ast.AST, value: object, env: Environment, source: ast.expr | None) -> None:
        """Bind a target to a value."""
        raise NotImplementedError

    # Arithmetic.
    def _binary(self, node: ast.BinOp, env: Environment) -> object:
        left, right = self.evaluate(node.left, env), self.evaluate(node.right, env)
        return self.combine(node, node.op, (left, node.left), (right, node.right))

    def combine(  # noqa: PLR0911 - one kind of values after the other
        self, node: ast.AST, op: ast.operator, first: tuple[object, ast.expr], second: tuple[object, ast.expr]
    ) -> object:
        """Return what an operator makes of two values, each given with its expression."""
        left, right = first[0], second[0]
        if isinstance(left, PLAIN) and isinstance(right, PLAIN):
            return _computed(op, left, right)
        if isinstance(left, (list, tuple)) and type(left) is type(right) and isinstance(op, ast.Add):
            return _computed(op, left, right)
        if isinstance(op, (ast.Div, ast.FloorDiv)) and _is_divisible(left, second):
            return self.divided(left, node, second)
        if isinstance(op, ast.Mult) and (isinstance(left, Loss) or isinstance(right, Loss)):
            return self._product(node, first, second)
        if isinstance(left, Loss) or isinstance(right, Loss):
            return _sum_of(node, [each for each in (left, right) if isinstance(each, Loss)])
        rest = isinstance(op, ast.Mod) and isinstance(right, int) and isinstance(left, Opaque) and left.role is None
        if rest and self.rounds:
            return Opaque(is_setting=False, is_remainder=True)
        return Opaque(self.module.text(node) if isinstance(node, ast.BinOp) else "", is_setting=not self.varies(node))

    def divided(self, left: object, node: ast.AST, divisor: tuple[object, ast.expr]) -> Loss:
        """Return a loss divided by something."""
        loss = left if isinstance(left, Loss) else new_loss(getattr(left, "text", ""))
        value, expression = divisor
        if isinstance(value, Opaque) and value.role is Role.COUNT:
            return replace(loss, reduction="mean", masked=node)
        number = float(value) if isinstance(value, NUMBERS) else None
        terms = isinstance(node, ast.BinOp) and isinstance(node.left, ast.BinOp) and isinstance(node.left.op, ast.Add)
        constant = isinstance(expression, ast.Constant)
        return loss.divided(Division(number, self.module.text(expression), node, is_weight=terms and constant))

    def _product(self, node: ast.AST, first: tuple[object, ast.expr], second: tuple[object, ast.expr]) -> object:
        loss, other = (first, second) if isinstance(first[0], Loss) else (second, first)
        if not isinstance(loss[0], Loss):
            return Opaque()
        if isinstance(other[0], Loss):
            both = _sum_of(node, [loss[0], other[0]])
            return replace(both, weight=None, reduction="?")
        if isinstance(other[0], NUMBERS) and not isinstance(other[0], bool):
            return self._scaled(loss[0], node, other[0], other[1])
        if isinstance(other[0], Opaque) and other[0].role is Role.MASK:
            return loss[0]
        return replace(loss[0], weight=None, masked=None)

    def _scaled(self, loss: Loss, node: ast.AST, factor: float, expression: ast.expr) -> Loss:
        """Return a loss times a number: one over the steps is a division, and a division may be undone."""
        undone = [each for each in loss.divisions if factor and each.value and math.isclose(each.value, factor)]
        if undone:
            left = tuple(each for each in loss.divisions if each not in undone)
            return replace(loss, weight=None if loss.weight is None else loss.weight * factor, divisions=left)
        if 0 < factor < 1 and not isinstance(expression, ast.Constant):
            return loss.divided(Division(1 / factor, self.module.text(expression), node))
        if 0 < factor < 1 and math.isclose(1 / factor, self.steps):
            return loss.divided(Division(1 / factor, f"× {factor}", node, is_weight=True))
        return loss if isinstance(expression, ast.Constant) else loss.unknown_weight()


def _computed(op: ast.operator, left: object, right: object) -> object:
    """Return what Python computes, unless that is an error or too large to be a counter."""
    compute = _ARITHMETIC.get(type(op))
    try:
        found = compute(left, right) if compute is not None else Opaque(is_setting=False)
    except (TypeError, ValueError, ArithmeticError):
        return Opaque(is_setting=False)
    huge = isinstance(found, NUMBERS) and not -_LARGEST < found < _LARGEST
    return Opaque(is_setting=False) if huge or (isinstance(found, str) and len(found) > 1000) else found  # noqa: PLR2004


def _is_divisible(value: object, divisor: tuple[object, ast.expr]) -> bool:
    """Tell whether a division is one of a loss, also where only the divisor says so."""
    if isinstance(value, Loss):
        return True
    number = isinstance(divisor[0], int) and announces_steps(dotted(divisor[1]))
    return number and isinstance(value, Opaque) and value.role is None


def _sum_of(node: ast.AST, parts: list[Loss]) -> Loss:
    """Return the sum of tensors: divided as often as that part which was divided least."""
    made = {id(node)} if len(parts) > 1 and all(part.live for part in parts) else set()
    most = max(parts, key=lambda part: len(part.divisions))
    least = min(parts, key=lambda part: len(part.divisions))
    weight = least.weight
    if len(least.divisions) != len(most.divisions) and weight is not None:
        weight = max(part.weight or 0.0 for part in parts)
    return Loss(
        frozenset().union(*(part.origins for part in parts), made),
        weight,
        most.divisions,
        parts[0].reduction if len({part.reduction for part in parts}) == 1 else "?",
        next((part.masked for part in parts if part.masked is not None), None),
        frozenset().union(*(part.live for part in parts), made),
        any(part.is_scaled for part in parts),
    )
