"""Runs statements and functions: the skeleton of a script, on concrete numbers and opaque tensors."""

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from bigbatch_lint.reading.module import FUNCTIONS, LONGEST_WINDOW, Module
from bigbatch_lint.reading.names import Role, called_name, counts_steps, dotted, is_loss, last_part, walk
from bigbatch_lint.running.expressions import Expressions
from bigbatch_lint.running.machine import BreakLoop, ContinueLoop, OutOfBudget, ReturnValue, WindowsAreWhole, batch
from bigbatch_lint.running.trace import Event, Kind, Round
from bigbatch_lint.running.values import (
    NUMBERS,
    PLAIN,
    Class,
    Environment,
    Function,
    Instance,
    Items,
    Loss,
    Opaque,
    new_loss,
)

_EPOCHS = 2  # of loops around a training loop
_WHILE = 11  # rounds of a loop without a length, at least
_DEEPEST = 6  # calls of functions in one another
_PARTS = set("p param params opt optimizer optim name group param_group module sched scheduler".split())
_CUTTERS = ("chunk", "window", "batched", "micro", "split", "group")
_ENDINGS = {ast.Break: BreakLoop, ast.Continue: ContinueLoop}


class Interpreter(Expressions):
    """The part of the interpreter that runs statements."""

    def __init__(self, module: Module, length: int, *, settings: bool) -> None:
        super().__init__(module, length, settings=settings)
        self._known_targets: dict[ast.AST, set[str]] = {}
        self._statements: dict[type[ast.AST], Callable[..., object]] = {
            ast.Expr: self._expression,
            ast.Assign: self._assignment,
            ast.AnnAssign: self._annotated,
            ast.AugAssign: self._augmented,
            ast.If: self._if,
            ast.For: self._for,
            ast.AsyncFor: self._for,
            ast.While: self._while,
            ast.With: self._with,
            ast.AsyncWith: self._with,
            ast.Try: self._try,
            ast.Match: self._match,
            ast.Return: self._return,
            ast.Raise: self._raise,
            ast.Break: self._leave,
            ast.Continue: self._leave,
            ast.Global: lambda node, _: self.globals.update(node.names),
            ast.Nonlocal: lambda node, _: self.globals.update(node.names),
            ast.Assert: self._assert,
            ast.FunctionDef: self._define,
            ast.AsyncFunctionDef: self._define,
            ast.ClassDef: self._define_class,
        }

    def run(self, body: Sequence[ast.stmt], env: Environment) -> None:
        """Run statements."""
        for statement in body:
            self.budget -= 1
            if self.budget < 0:
                raise OutOfBudget
            act = self._statements.get(type(statement))
            if act is not None:
                act(statement, env)

    def define(self, body: Sequence[ast.stmt], env: Environment) -> None:
        """Bind the functions and classes of a body ahead of time."""
        for statement in body:
            if isinstance(statement, FUNCTIONS):
                self._define(statement, env)
            elif isinstance(statement, ast.ClassDef):
                self._define_class(statement, env)

    def _define(self, node: ast.FunctionDef | ast.AsyncFunctionDef, env: Environment) -> None:
        env[node.name] = Function(node, env)

    def _define_class(self, node: ast.ClassDef, env: Environment) -> None:
        env[node.name] = Class(node, env)

    # Plain statements.
    def _expression(self, node: ast.Expr, env: Environment) -> None:
        value = self.evaluate(node.value, env)
        entered = isinstance(node.value, ast.Call) and called_name(node.value) == "enter_context"
        if entered and isinstance(value, Opaque) and value.role is Role.CONTEXT:
            self.contexts.append(value)

    def _assignment(self, node: ast.Assign, env: Environment) -> None:
        value = self.evaluate(node.value, env)
        for target in node.targets:
            self.assign(target, value, env, node.value)

    def _annotated(self, node: ast.AnnAssign, env: Environment) -> None:
        if node.value is not None:
            self.assign(node.target, self.evaluate(node.value, env), env, node.value)

    def assign(self, target: ast.AST, value: object, env: Environment, source: ast.expr | None) -> None:
        """Bind a target to a value."""
        if isinstance(target, (ast.Tuple, ast.List)):
            for number, each in enumerate(target.elts):
                if isinstance(each, ast.Starred):
                    self.assign(each.value, Opaque(), env, source)
                else:
                    self.assign(each, self._part(value, number, len(target.elts), dotted(each)), env, source)
            return
        text = dotted(target)
        value = self._kept_sum(target, text, value, source)
        if isinstance(target, ast.Attribute) and self._assign_attribute(target, text, value, env, source):
            return
        if isinstance(target, ast.Subscript):
            holder = self.evaluate(target.value, env)
            if isinstance(holder, dict) and isinstance(target.slice, ast.Constant):
                holder[target.slice.value] = value
        if text:
            self._learn_steps(text, value)
            scope = env.holder(text) if text in self.globals else None
            (scope if scope is not None else env)[text] = self.named(text, value)

    def _learn_steps(self, text: str, value: object) -> None:
        """Take a computed number for the length of a window, where the file has no other."""
        name = last_part(text)
        moduli = self.module.moduli
        meant = self.module.is_guess and (name in moduli if moduli else counts_steps(name))
        if meant and type(value) is int and 1 < value <= LONGEST_WINDOW:
            self.length = max(1, self.length * value // self.steps)
            self.steps = value

    def _part(self, value: object, number: int, count: int, name: str) -> object:
        """Return one item of what is unpacked."""
        if isinstance(value, (tuple, list)):
            found = value[number] if number < len(value) else Opaque()
        elif isinstance(value, Loss):
            found = value.item(number, count)
        else:
            found = self.unknown(name) if name else Opaque(is_setting=False)
            found = Opaque(is_setting=False) if isinstance(found, int) else found
        if isinstance(found, Opaque) and found.role is None and found.is_setting:
            return replace(found, is_setting=False)
        return found

    def _assign_attribute(
        self, target: ast.Attribute, text: str, value: object, env: Environment, source: ast.expr | None
    ) -> bool:
        """Bind an attribute of an object of the file, or note what happens to a gradient."""
        if target.attr == "grad":
            zeros = isinstance(source, ast.Call) and last_part(dotted(source.func)).startswith("zeros")
            kind = Kind.ZERO if zeros or isinstance(source, ast.Constant) else Kind.RESCALE
            divides = isinstance(source, ast.BinOp) and isinstance(source.op, ast.Div)
            factor = self.evaluate(source.right, env) if divides and isinstance(source, ast.BinOp) else None
            self.emit(Event(kind, target, subject=dotted(target.value), factor=factor))
            return True
        holder = self.evaluate(target.value, env)
        if isinstance(holder, Instance):
            holder.attributes[target.attr] = self.named(text, value)
            return True
        return False

    def _augmented(self, node: ast.AugAssign, env: Environment) -> None:
        value, text = self.evaluate(node.value, env), dotted(node.target)
        before = self.evaluate(node.target, env)
        if isinstance(before, Opaque) and before.role is Role.GRADIENT:
            factor: object = value
            if not isinstance(node.op, ast.Div):
                factor = 1 / value if isinstance(value, NUMBERS) and value else None
            self.emit(Event(Kind.RESCALE, node, factor=factor))
            return
        if isinstance(node.op, ast.Add) and isinstance(value, Loss) and value.live:
            value = self._keep(node, text or self.module.text(node.target), value)
        after = self.combine(node, node.op, (before, node.target), (value, node.value))
        if isinstance(node.target, ast.Attribute):
            holder = self.evaluate(node.target.value, env)
            if isinstance(holder, Instance):
                holder.attributes[node.target.attr] = after
                return
        if text:
            scope = env.holder(text) if text in self.globals else None
            (scope if scope is not None else env)[text] = after

    def _kept_sum(self, target: ast.AST, text: str, value: object, source: ast.expr | None) -> object:
        """Note `total = total + loss`, which keeps the graph of every loss."""
        if not (isinstance(value, Loss) and value.live and isinstance(source, (ast.BinOp, ast.IfExp)) and text):
            return value
        for part in [source.body, source.orelse] if isinstance(source, ast.IfExp) else [source]:
            names = {dotted(each) for each in walk(part)} - {""}
            if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Add) and text in names and names != {text}:
                return self._keep(target, text, value)
        return value

    def _keep(self, node: ast.AST, text: str, loss: Loss) -> Loss:
        self.emit(Event(Kind.KEEP, node, loss=loss, subject=text))
        return replace(loss, origins=loss.origins | {id(node)}, live=loss.live | {id(node)})

    # Conditions.
    def _if(self, node: ast.If, env: Environment) -> None:
        value = self.evaluate(node.test, env)
        answer = self.truth(value, node.test)
        if self.rounds and (answer is None or (isinstance(value, Opaque) and value.is_remainder)) and _trains(node):
            self.emit(Event(Kind.HANDED, node))
        if answer and any(isinstance(each, ast.Raise) for each in node.body) and _asks_for_remainder(node.test):
            raise WindowsAreWhole
        # What nobody can know is left out, with all that depends on it.
        computed = isinstance(value, bool) or self.varies(node.test)
        self.guards.append(node if self.rounds and computed else None)
        try:
            self.run(node.body if answer else node.orelse, env)
        finally:
            self.guards.pop()

    def _assert(self, node: ast.Assert, env: Environment) -> None:
        if self.evaluate(node.test, env) is False and _asks_for_remainder(node.test):
            raise WindowsAreWhole

    def _match(self, node: ast.Match, env: Environment) -> None:
        subject = self.evaluate(node.subject, env)
        for case in node.cases:
            fits: bool | None = self._fits(case.pattern, subject, env)
            if fits and case.guard is not None:
                fits = self.truth(self.evaluate(case.guard, env), case.guard)
            if fits:
                self.guards.append(None)
                try:
                    self.run(case.body, env)
                finally:
                    self.guards.pop()
                return

    def _fits(self, pattern: ast.pattern, subject: object, env: Environment) -> bool:
        """Tell whether a value fits a pattern; an unknown one fits what catches everything."""
        if isinstance(pattern, ast.MatchAs):
            fits = pattern.pattern is None or self._fits(pattern.pattern, subject, env)
            if fits and pattern.name:
                env[pattern.name] = subject
            return fits
        if isinstance(pattern, ast.MatchOr):
            return any(self._fits(each, subject, env) for each in pattern.patterns)
        if isinstance(pattern, ast.MatchSequence):
            same = isinstance(subject, (tuple, list)) and len(subject) == len(pattern.patterns)
            pairs = zip(pattern.patterns, subject, strict=True) if same and isinstance(subject, (tuple, list)) else ()
            return same and all(self._fits(each, value, env) for each, value in pairs)
        if isinstance(pattern, (ast.MatchValue, ast.MatchSingleton)):
            value = self.evaluate(pattern.value, env) if isinstance(pattern, ast.MatchValue) else pattern.value
            return isinstance(subject, PLAIN) and isinstance(value, PLAIN) and subject == value
        return False

    # Loops.
    def _for(self, node: ast.For | ast.AsyncFor, env: Environment) -> None:
        items = self.items_of(self.evaluate(node.iter, env), node.iter)
        rounds, is_micro = self._rounds(node, items)
        total = None if items.kind == "endless" or len(rounds) > (items.length or 0) else items.length

        def around(number: int) -> Round:
            return Round(node, number, self.passages[node], is_micro, total, items.kind, items.is_known)

        self._loop(node, rounds, around, lambda at: self.assign(node.target, items.item(at.number), env, None), env)
        self.run(node.orelse, env)

    def _rounds(self, node: ast.For | ast.AsyncFor, items: Items) -> tuple[Sequence[int], bool]:
        """Return which rounds of a loop are run, and whether each is a micro-batch."""
        length = items.length
        if items.kind == "range" and length == self.steps and self._counts_otherwise(node.iter):
            length = self.length
        if node not in self.module.trains:
            return range(min(1 if length is None else length, 1 if items.kind == "loader" else 3)), False
        if self._holds_loop(node) and items.kind in {"loader", "endless", "range", "list", "batched"}:
            return range(min(_EPOCHS if length is None else length, 3 if items.kind == "batched" else _EPOCHS)), False
        target = node.target.id if isinstance(node.target, ast.Name) else ""
        if is_loss(target) and not self._holds_loop(node):
            return range(min(2 if length is None else length, 2)), False
        if length is None:
            return range(2 * self.steps + 1), target not in _PARTS
        again = node in self.passages and items.kind != "pieces"
        return self._whole_windows(length, 1 if again else 2), target not in _PARTS

    def _whole_windows(self, length: int, windows: int) -> Sequence[int]:
        """Return the rounds of a loop; middle windows of a long one, or in a later epoch, are skipped."""
        end = length // self.steps * self.steps
        if windows > 1 and length <= 4 * self.steps:
            return range(length)
        first = min(windows * self.steps, end)
        return [*range(first), *range(max(end - (windows - 1) * self.steps, first), length)]

    def _counts_otherwise(self, head: ast.expr) -> bool:
        """Tell whether a number of micro-steps is not the window's: another name decides on the update."""
        names = [last_part(dotted(each)) for each in head.args] if isinstance(head, ast.Call) else []
        return bool(self.module.moduli) and any(counts_steps(each) and each not in self.module.moduli for each in names)

    def _holds_loop(self, node: ast.AST) -> bool:
        return node in self.module.holds_loop

    def _while(self, node: ast.While, env: Environment) -> None:
        trains, holds = node in self.module.trains, self._holds_loop(node)
        most = (_EPOCHS if holds else max(2 * self.steps + self.steps // 2 + 1, _WHILE)) if trains else 1
        exhausted = False

        def begin(_: Round) -> None:
            nonlocal exhausted
            value = self.evaluate(node.test, env)
            if trains and not isinstance(value, Opaque) and self.truth(value, node.test) is False:
                exhausted = True
                raise BreakLoop

        def around(number: int) -> Round:
            return Round(node, number, self.passages[node], trains and not holds, None, "while")

        self._loop(node, range(most), around, begin, env)
        if trains and not holds and self.events and self.events[-1].node is node:
            self.events[-1].is_exhausted = exhausted

    def _loop(
        self,
        node: ast.For | ast.AsyncFor | ast.While,
        rounds: Sequence[int],
        around: Callable[[int], Round],
        begin: Callable[[Round], None],
        env: Environment,
    ) -> None:
        self.assigned.append(self._targets(node))
        self.passages[node] = self.passages.get(node, 0) + 1
        depth, broken, is_micro = len(self.contexts), False, around(0).is_micro
        try:
            for number in rounds:
                self.rounds.append(around(number))
                try:
                    begin(self.rounds[-1])
                    self.run(node.body, env)
                except ContinueLoop:
                    pass
                finally:
                    self.rounds.pop()
                    del self.contexts[depth:]
        except BreakLoop:
            broken = True
        finally:
            self.assigned.pop()
        if is_micro:
            exhausted = not broken and around(0).total is not None
            self.emit(Event(Kind.END, node, is_exhausted=exhausted))

    def _targets(self, node: ast.AST) -> set[str]:
        """Return the names that a loop binds anew."""
        found = self._known_targets.get(node)
        if found is None:
            found = {text for each in walk(node) for target in _targets_of(each) for text in _names_in(target)}
            self._known_targets[node] = found
        return found

    # Blocks.
    def _with(self, node: ast.With | ast.AsyncWith, env: Environment) -> None:
        depth = len(self.contexts)
        for item in node.items:
            value = self.evaluate(item.context_expr, env)
            if item.optional_vars is not None:
                self.assign(item.optional_vars, value, env, item.context_expr)
            if isinstance(value, Opaque) and value.role is Role.CONTEXT:
                self.contexts.append(replace(value, made=node))
        try:
            self.run(node.body, env)
        finally:
            del self.contexts[depth:]

    def _try(self, node: ast.Try, env: Environment) -> None:
        self.run([*node.body, *node.orelse, *node.finalbody], env)

    def _return(self, node: ast.Return, env: Environment) -> None:
        raise ReturnValue(self.evaluate(node.value, env))

    def _raise(self, _: ast.Raise, __: Environment) -> None:
        raise ReturnValue(None)

    def _leave(self, node: ast.Break | ast.Continue, _: Environment) -> None:
        raise _ENDINGS[type(node)]

    # Functions.
    def call_function(self, function: Function, args: Sequence[object], words: Mapping[str, object]) -> object:
        """Run a function of the file; a generator becomes something to loop over."""
        node = function.node
        if self.depth >= _DEEPEST:
            return new_loss(id(node)).unknown_weight()
        self.entered.add(node)
        env = self._arguments(function, args, words)
        if isinstance(node, ast.Lambda):
            return self.evaluate(node.body, env)
        if node in self.module.generators:
            return self._generated(node)
        self.depth += 1
        guards, self.guards = self.guards, list(self.guards)
        try:
            self.run(node.body, env)
        except ReturnValue as returned:
            return returned.value
        finally:
            self.depth -= 1
            self.guards = guards
        return None

    def _arguments(self, function: Function, args: Sequence[object], words: Mapping[str, object]) -> Environment:
        env, given = Environment(function.env), function.node.args
        named = [each.arg for each in (*given.posonlyargs, *given.args)]
        defaults = dict(zip(reversed(named), reversed(given.defaults)))  # noqa: B905 - the last ones have them
        defaults |= {each.arg: value for each, value in zip(given.kwonlyargs, given.kw_defaults, strict=True) if value}
        if function.owner is not None and named:
            env[named.pop(0)] = function.owner
        for name in (*named, *(each.arg for each in given.kwonlyargs)):
            env[name] = self._default(name, defaults.get(name), env)
        for name, value in (*zip(named, args, strict=False), *words.items()):
            if name in env and not (isinstance(value, Opaque) and value.role is None and not value.text):
                env[name] = value
        return env

    def _default(self, name: str, default: ast.expr | None, env: Environment) -> object:
        value = self.unknown(name)
        plain = isinstance(default, ast.Constant) and not isinstance(default.value, (bool, type(None)))
        if plain and isinstance(value, Opaque) and value.role is None:
            return self.evaluate(default, env)
        return value

    def _generated(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Items:
        endless = any(isinstance(n, ast.While) and getattr(n.test, "value", False) for n in walk(node))
        if any(word in node.name for word in _CUTTERS):
            return Items(3, lambda _: Items(self.steps, batch, "pieces"), "list")
        return Items(None if endless else self.length, batch, "endless" if endless else "loader")


def _trains(node: ast.If) -> bool:
    """Tell whether a condition decides on a step or a clear."""
    calls = [each for statement in node.body for each in walk(statement) if isinstance(each, ast.Call)]
    return any(called_name(each) in {"step", "zero_grad"} for each in calls)


def _asks_for_remainder(test: ast.expr) -> bool:
    return any(isinstance(each, ast.Mod) for each in walk(test))


def _targets_of(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    single = (ast.AugAssign, ast.AnnAssign, ast.For, ast.AsyncFor, ast.NamedExpr)
    return [node.target] if isinstance(node, single) else []


def _names_in(target: ast.expr) -> Iterator[str]:
    for each in walk(target):
        text = dotted(each)
        if text:
            yield text
