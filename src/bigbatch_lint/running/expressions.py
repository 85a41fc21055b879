"""Evaluates expressions: numbers, texts and containers as Python does, everything else as far as its kind matters."""

import ast
import math
import operator
import re
from collections.abc import Callable
from dataclasses import replace

from bigbatch_lint.reading.module import Module
from bigbatch_lint.reading.names import announces_steps, children, dotted, is_mask_key, last_part, source_of
from bigbatch_lint.running.calls import CALLS, make
from bigbatch_lint.running.machine import Call, Machine, Operand, computed
from bigbatch_lint.running.values import PLAIN, UNKNOWN, Division, Environment, Function, Items, Loss, Opaque

_OPERATORS: dict[type[ast.AST], Callable[..., object]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.BitAnd: operator.and_, ast.BitOr: operator.or_,
    ast.BitXor: operator.xor, ast.RShift: operator.rshift,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.Gt: operator.gt, ast.LtE: operator.le,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
}  # fmt: skip
_READERS = ("save", "checkpoint", "log", "print", "len", "isinstance", "get_lr", "current_lr", "getattr", "hasattr")
_RESCALES = re.compile(r"^_*((re)?scale|normali[sz]e|div(ide)?)_(\w+_)?grad", re.IGNORECASE)
_LENGTHS = re.compile(r"last|len|num|n_|_n|total|max|end|count|per_epoch|size", re.IGNORECASE)
_OWN_METHODS = re.compile(r"zero|clear|reset|grad|optim|step|clip|update", re.IGNORECASE)
_MASKS = re.compile("-100|ignore_index|pad", re.IGNORECASE)


class Expressions(Machine):
    """The part of the interpreter that computes values."""

    def __init__(self, module: Module, length: int, *, settings: bool) -> None:
        super().__init__(module, length, settings=settings)
        self._kinds: dict[type[ast.AST], Callable[..., object]] = {
            ast.Constant: lambda node, _: node.value if isinstance(node.value, PLAIN) else Opaque(),
            ast.Name: lambda node, env: self.unknown(node.id) if (at := env.find(node.id)) is None else at,
            ast.NamedExpr: self._walrus,
            ast.Starred: lambda node, env: self.evaluate(node.value, env),
            ast.Lambda: Function,
            ast.Tuple: lambda node, env: tuple(self.evaluate(each, env) for each in node.elts),
            ast.List: lambda node, env: [self.evaluate(each, env) for each in node.elts],
            ast.Dict: lambda node, env: {
                getattr(key, "value", number): self.evaluate(value, env)
                for number, (key, value) in enumerate(zip(node.keys, node.values, strict=True))
            },
            ast.Attribute: self._attribute,
            ast.Subscript: self._subscript,
            ast.UnaryOp: self._unary,
            ast.BoolOp: self._and_or,
            ast.Compare: self._compare,
            ast.IfExp: lambda node, env: self.evaluate(
                node.orelse if self.truth(self.evaluate(node.test, env), node.test) is False else node.body, env
            ),
            ast.BinOp: lambda node, env: self.combine(
                node, node.op, *((self.evaluate(each, env), each) for each in (node.left, node.right))
            ),
            ast.Call: self._call,
            **dict.fromkeys((ast.ListComp, ast.GeneratorExp), lambda node, _: Opaque(is_setting=not self.varies(node))),
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

    def _walrus(self, node: ast.NamedExpr, env: Environment) -> object:
        value = env[node.target.id] = self.evaluate(node.value, env)
        return value

    def _attribute(self, node: ast.Attribute, env: Environment) -> object:
        text, name = dotted(node), node.attr
        bound = env.find(text)
        if bound is not None:
            return bound
        if name in {"sync_gradients", "is_last_batch"}:
            return self.is_synchronizing() if name == "sync_gradients" else self.rounds and self.rounds[-1].is_last()
        base = self.evaluate(node.value, env)
        if isinstance(base, Environment):
            return self._member(base, name, text)
        if name == "data" and isinstance(base, Loss | Opaque):
            return replace(base, origins=frozenset()) if isinstance(base, Loss) else base
        if name == "grad" or not isinstance(base, Loss) or isinstance(self.unknown(name), int):
            return Opaque(text, "gradient") if name == "grad" else self.unknown(text or name)
        masked = node if self.module.pads_models else None
        return replace(base.part(name), reduction="mean", masked=masked) if name == "loss" else base.part(name)

    def _member(self, base: Environment, name: str, text: str) -> object:
        method, found = self.module.method(base.cls, name), base.get(f"self.{name}")
        if found is not None or method is None:
            return self.unknown(text or name) if found is None else found
        bound = Function(method, base, base)
        is_property = any(last_part(dotted(each)).endswith("property") for each in method.decorator_list)
        return self.call_function(bound, (), {}) if is_property else bound

    def _subscript(self, node: ast.Subscript, env: Environment) -> object:
        text = dotted(node)
        bound = env.find(text)
        if bound is not None:
            return bound
        base, index = self.evaluate(node.value, env), self.evaluate(node.slice, env)
        if isinstance(base, dict) and isinstance(index, PLAIN):
            return base.get(index, Opaque(text))
        if is_mask_key(text):
            return Opaque(text, "mask")
        if isinstance(base, (tuple, list)) and isinstance(index, int):
            return base[index] if -len(base) <= index < len(base) else Opaque(text)
        if isinstance(base, Loss):
            masked = isinstance(index, Opaque) and index.role == "mask"
            return replace(base, masked=node) if masked else base.part(source_of(node.slice))
        if isinstance(base, Opaque) and base.role is not None:
            return base
        return self.unknown(text) if text else Opaque(is_setting=not self.varies(node))

    def _unary(self, node: ast.UnaryOp, env: Environment) -> object:
        value = self.evaluate(node.operand, env)
        if isinstance(node.op, ast.Not):
            answer = self.truth(value, node.operand)
            return UNKNOWN if answer is None else not answer
        return -value if isinstance(value, int | float) and isinstance(node.op, ast.USub) else value

    def _and_or(self, node: ast.BoolOp, env: Environment) -> object:
        """Return what decides; a part that nobody can know leaves the whole unknown, unless another part decides."""
        decides, answers = isinstance(node.op, ast.Or), list[bool | None]()
        for part in node.values:
            value = self.evaluate(part, env)
            answers.append(self.truth(value, part))
            if answers[-1] is decides:
                return value if isinstance(value, PLAIN) else decides
        return UNKNOWN if None in answers else not decides

    def _compare(self, node: ast.Compare, env: Environment) -> object:
        left, result = self.evaluate(node.left, env), object()
        for op, comparator in zip(node.ops, node.comparators, strict=True):
            right = self.evaluate(comparator, env)
            result = self._comparison(node, op, left, right)
            if result is not True:
                break
            left = right
        return result

    def _comparison(self, node: ast.Compare, op: ast.cmpop, left: object, right: object) -> object:
        if isinstance(left, PLAIN) and isinstance(right, PLAIN) and type(op) in _OPERATORS:
            return computed(_OPERATORS[type(op)], left, right)
        if isinstance(op, (ast.Is, ast.IsNot)) and (left is None or right is None):
            value = left if right is None else right
            is_seen = isinstance(value, Opaque) and (value.made is not None or value.role == "gradient")
            is_seen = is_seen or isinstance(value, (Loss, Items, Function, Environment))
            return (is_seen or self.setting()) is isinstance(op, ast.IsNot)
        text = source_of(node)
        if isinstance(op, (ast.NotEq, ast.Gt, ast.GtE)) and _MASKS.search(text):
            return Opaque(text, "mask")
        if _LENGTHS.search(text) and isinstance(op, (ast.Eq, ast.GtE, ast.Lt, ast.NotEq)):
            # The round's own number and a length, whatever that is called: `i + 1 == total`.
            first, micro = isinstance(left, int), self.micro_round()
            number, total, side = (left, right, node.left) if first else (right, left, node.comparators[0])
            own = isinstance(number, int) and isinstance(total, Opaque) and total.is_setting and self.varies(side)
            if own and micro is not None and micro.total:
                return micro.is_last() is isinstance(op, (ast.Eq, ast.GtE))
        unsure = any(isinstance(each, Loss) or each is UNKNOWN for each in (left, right))
        return Opaque(text, is_setting=not (unsure or self.varies(node)))

    def combine(self, node: ast.AST, op: ast.operator, first: Operand, second: Operand) -> object:
        """Return what an operator makes of two values, each given with its expression."""
        left, right = first[0], second[0]
        if isinstance(left, int | float) and isinstance(right, int | float) and type(op) in _OPERATORS:
            return computed(_OPERATORS[type(op)], left, right)
        if isinstance(op, (ast.Div, ast.FloorDiv)) and isinstance(left, Loss):
            return self._quotient(left, node, second)
        losses = [each for each in (left, right) if isinstance(each, Loss)]
        if len(losses) == 1 and isinstance(op, ast.Mult):
            return self._product(losses[0], node, second if isinstance(left, Loss) else first)
        if losses:
            total = Loss.sum_of(losses)
            return replace(total, weight=None) if isinstance(op, ast.Mult) else total
        is_remainder = isinstance(op, ast.Mod) and isinstance(right, int) and self.rounds
        return UNKNOWN if is_remainder else Opaque(is_setting=not self.varies(node))

    def _quotient(self, loss: Loss, node: ast.AST, divisor: Operand) -> Loss:
        value, expression = divisor
        if isinstance(value, Opaque) and value.role == "count":
            return replace(loss, reduction="mean", masked=node)
        terms = isinstance(node, ast.BinOp) and isinstance(node.left, ast.BinOp) and isinstance(node.left.op, ast.Add)
        is_weight = terms and isinstance(expression, ast.Constant)
        number = float(value) if isinstance(value, int | float) else None
        return loss.divided(Division(number, source_of(expression), node, is_weight))

    def _product(self, loss: Loss, node: ast.AST, factor: Operand) -> Loss:
        """Return a loss times a number: one over the steps is a division."""
        value, expression = factor
        if isinstance(value, Opaque) and value.role == "mask":
            return loss
        if not isinstance(value, int | float) or isinstance(value, bool):
            return replace(loss, weight=None, masked=None)
        written = isinstance(expression, ast.Constant)
        if 0 < value < 1 and (not written or math.isclose(1 / value, self.steps)):
            text = f"× {value}" if written else source_of(expression)
            return loss.divided(Division(1 / value, text, node, is_weight=written))
        return loss if written else replace(loss, weight=None)

    def _call(self, node: ast.Call, env: Environment) -> object:
        text, method = dotted(node.func), node.func if isinstance(node.func, ast.Attribute) else None
        receiver = self.evaluate(method.value, env) if method is not None else None
        function = env.find(text) if method is not None else self.evaluate(node.func, env)
        if function is None and method is not None and isinstance(receiver, Environment):
            function = self._member(receiver, method.attr, text)
        args = [self.evaluate(each, env) for each in node.args]
        words = {word.arg or "**": self.evaluate(word.value, env) for word in node.keywords}
        if isinstance(function, Function):
            return self.call_function(function, args, words)
        full = self.module.full_name(text)
        name = full.rpartition(".")[2] or (method.attr if method is not None else text)
        on = dotted(method.value) if method is not None else ""
        owner = receiver if isinstance(receiver, Opaque) else UNKNOWN
        call = Call(node, name, full, on, receiver, owner.role, owner.made, args, words, env)
        if "clip_grad" in name:
            return self.emit("clip", node, subject=on)
        thing = self.unknown(text) if function is None and text else function
        for handle in (CALLS.get(name), make, lambda _, call: self._of_thing(call, thing, text)):
            found = NotImplemented if handle is None else handle(self, call)
            if found is not NotImplemented:
                return found
        return self._of_elsewhere(call)

    def construct(self, cls: ast.ClassDef, env: Environment) -> Environment:
        """Return an object of a class of the file, after its `__init__`."""
        made, method = Environment(env, cls), self.module.method(cls, "__init__")
        if method is not None:
            self.call_function(Function(method, made, made), (), {})
        return made

    def _of_thing(self, call: Call, thing: object, text: str) -> object:
        if not isinstance(thing, Opaque):
            return NotImplemented
        if thing.role == "scaler" and call.args and isinstance(call.args[0], Loss):
            self.emit("backward", call.node, loss=call.args[0])
            asked = next((call.words[word] for word in ("update_grad", "need_update") if word in call.words), True)
            return self.emit("step", call.node, subject=call.written(1)) if self.truth(asked, call.node) else UNKNOWN
        if thing.role == "model":
            self.emit("forward", call.node, subject=text or thing.text)
        makes = thing.role in {"model", "criterion"}
        return Loss.of(id(call.node), reduction=thing.reduction, masked=thing.masked) if makes else NotImplemented

    def _of_elsewhere(self, call: Call) -> object:
        """Call code of another file: it may do what it likes with what it is given."""
        given = [each for each in (*call.args, *call.words.values()) if isinstance(each, Opaque)]
        for each in given:
            if each.role in {"optimizer", "scaler"} and not call.name.lower().startswith(_READERS):
                self.emit("handed", call.node, subject=each.text)
        models = [each.text for each in given if each.role == "model"]
        if given and _RESCALES.search(call.name):
            self.emit("rescale", call.node)
        elif models:
            self.emit("forward", call.node, subject=models[0])
        if call.on == "self" and _OWN_METHODS.search(call.name):
            self.emit("handed", call.node, subject="self")
        hidden = call.on == "self" and not call.name.endswith(("model", "net", "criterion", "loss_fn"))
        told = any(announces_steps(dotted(each)) for each in call.node.args) or any(map(announces_steps, call.words))
        loss = Loss.of(id(call.node))
        return replace(loss, weight=None) if hidden or told else loss
