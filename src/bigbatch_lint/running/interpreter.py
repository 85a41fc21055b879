"""Runs a file, its statements and functions: the skeleton of a script, on concrete numbers and opaque tensors."""

import ast
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from bigbatch_lint.reading.module import LONGEST_WINDOW, UPDATES, Module, decides_on_update
from bigbatch_lint.reading.names import counts_steps, dotted, is_loss, last_part, source_of, targets, walk
from bigbatch_lint.running.expressions import Expressions
from bigbatch_lint.running.machine import Leave, batch
from bigbatch_lint.running.values import PLAIN, UNKNOWN, Environment, Event, Function, Items, Loss, Opaque, Round

_Loop = ast.For | ast.While
_Begin = Callable[[int], object]
_EPOCHS = 2  # of loops around a training loop
_WHILE = 11  # rounds of a loop without a length, at least
_DEEPEST = 6  # calls of functions in one another
Story = tuple[list[Event], int]  # what happened, and how many micro-batches a window has
_PARTS = set("p param params opt optimizer optim name group param_group module sched scheduler".split())


class Interpreter(Expressions):
    """The part of the interpreter that runs statements."""

    def __init__(self, module: Module, length: int, *, settings: bool) -> None:
        super().__init__(module, length, settings=settings)
        self._sums: dict[ast.AugAssign, ast.BinOp] = {}
        self._statements: dict[type[ast.AST], Callable[..., object]] = {
            ast.Expr: lambda node, env: self.evaluate(node.value, env),
            ast.AugAssign: self._augmented,
            **dict.fromkeys((ast.Assign, ast.AnnAssign), self._assignment),
            ast.If: self._if,
            ast.For: self._for,
            ast.While: self._while,
            ast.With: self._with,
            ast.Try: lambda node, env: self.run([*node.body, *node.orelse, *node.finalbody], env),
            ast.Match: self._match,
            ast.Assert: lambda node, env: self._refuse(node.test, is_refused=self.evaluate(node.test, env) is False),
            **dict.fromkeys((ast.Return, ast.Raise, ast.Break, ast.Continue), self._leave),
            **dict.fromkeys((ast.Global, ast.Nonlocal), lambda node, _: self.globals.update(node.names)),
            ast.FunctionDef: lambda node, env: env.update({node.name: Function(node, env)}),
        }

    def run(self, body: Sequence[ast.stmt], env: Environment) -> None:
        """Run statements."""
        for statement in body:
            self.budget -= 1
            if self.budget < 0:
                raise Leave
            act = self._statements.get(type(statement))
            if act is not None:
                act(statement, env)

    def _assignment(self, node: ast.Assign | ast.AnnAssign, env: Environment) -> None:
        value = self.evaluate(node.value, env)
        for target in node.targets if isinstance(node, ast.Assign) else [node.target] if node.value else []:
            self.assign(target, value, env, node.value)

    def assign(self, target: ast.AST, value: object, env: Environment, source: ast.expr | None) -> None:
        """Bind a target to a value."""
        if isinstance(target, (ast.Tuple, ast.List)):
            for number, each in enumerate(target.elts):
                self.assign(each, self._part(value, number, len(target.elts), dotted(each)), env, source)
            return
        text = dotted(target)
        value = self._kept_sum(target, text, value, source)
        if isinstance(target, ast.Attribute) and target.attr == "grad":
            divides = isinstance(source, ast.BinOp) and isinstance(source.op, ast.Div)
            factor = self.evaluate(getattr(source, "right", None), env) if divides else None
            cleared = isinstance(source, ast.Constant)
            self.emit("zero" if cleared else "rescale", target, subject=dotted(target.value), factor=factor)
            return
        if text:
            name, moduli = last_part(text), self.module.moduli
            meant = self.module.is_guess and (name in moduli if moduli else counts_steps(name))
            if meant and isinstance(value, int) and 1 < value <= LONGEST_WINDOW:  # the file has no other number
                self.length, self.steps = max(1, self.length * value // self.steps), value
            env.bind(text, self.named(text, value), outside=text in self.globals)

    def _part(self, value: object, number: int, count: int, name: str) -> object:
        """Return one item of what is unpacked; what is kept of one tensor keeps none of the others."""
        if isinstance(value, Loss):
            origins = frozenset((each, number, count) for each in value.origins)
            return replace(value, origins=origins)
        found = self.unknown(name)
        if isinstance(value, (tuple, list)):
            found = value[number] if number < len(value) else Opaque()
        elif isinstance(found, int):
            return UNKNOWN
        return replace(found, is_setting=False) if isinstance(found, Opaque) and found.role is None else found

    def _augmented(self, node: ast.AugAssign, env: Environment) -> None:
        total = self._sums.setdefault(node, ast.copy_location(ast.BinOp(node.target, node.op, node.value), node))
        self.assign(node.target, self.evaluate(total, env), env, total)

    def _kept_sum(self, target: ast.AST, text: str, value: object, source: ast.expr | None) -> object:
        """Record `total = total + loss`, which keeps the graph of every loss."""
        for part in [source.body, source.orelse] if isinstance(source, ast.IfExp) else [source]:
            is_sum = isinstance(part, ast.BinOp) and isinstance(part.op, ast.Add)
            if is_sum and isinstance(value, Loss) and value.origins:
                names = {dotted(each) for each in walk(part)} - {""}
                if (getattr(part, "left", None) is target or text in names) and any(
                    not text.startswith(each) for each in names
                ):
                    self.emit("keep", target, loss=value, subject=text or source_of(target))
                    return value.part(id(target))
        return value

    def _if(self, node: ast.If, env: Environment) -> None:
        value = self.evaluate(node.test, env)
        answer = self.truth(value, node.test)
        if self.rounds and answer is None and decides_on_update(node, UPDATES):
            self.emit("handed", node)
        self._refuse(node.test, is_refused=bool(answer) and any(isinstance(each, ast.Raise) for each in node.body))
        # What nobody can know is left out, with all that depends on it.
        guards, is_computed = self.guards, isinstance(value, bool) or self.varies(node.test)
        self.guards = [*guards, node] if self.rounds and is_computed else guards
        self.run(node.body if answer else node.orelse, env)
        self.guards = guards

    def _refuse(self, test: ast.expr, *, is_refused: bool) -> None:
        """Leave a run whose script refuses a leftover."""
        if is_refused and any(isinstance(each, ast.Mod) for each in walk(test)):
            self.refuses_leftover = True
            raise Leave

    def _match(self, node: ast.Match, env: Environment) -> None:
        """Run the case that has the subject's value, or that catches everything."""
        subject = self.evaluate(node.subject, env)
        for case in node.cases:
            fits = isinstance(case.pattern, ast.MatchAs) and case.pattern.pattern is None
            if isinstance(case.pattern, ast.MatchValue) and isinstance(subject, PLAIN):
                fits = subject == self.evaluate(case.pattern.value, env)
            if fits and (case.guard is None or self.truth(self.evaluate(case.guard, env), case.guard)):
                self.run(case.body, env)
                break

    def _for(self, node: ast.For, env: Environment) -> None:
        items = self.items_of(self.evaluate(node.iter, env), node.iter)
        rounds, is_micro = self._rounds(node, items)
        total = None if items.kind == "endless" or len(rounds) > (items.length or 0) else items.length
        like = Round(node, is_micro=is_micro, total=total, kind=items.kind, is_known=items.is_known)
        self._loop(node, like, rounds, env, lambda number: self.assign(node.target, items.item(number), env, None))
        self.run(node.orelse, env)

    def _rounds(self, node: ast.For, items: Items) -> tuple[Sequence[int], bool]:
        """Return which rounds of a loop are run, and whether each is a micro-batch."""
        length, holds_loop = items.length, node in self.module.holds_loop
        if items.kind == "range" and length == self.steps and self.module.moduli and isinstance(node.iter, ast.Call):
            names = {last_part(dotted(each)) for each in node.iter.args} - self.module.moduli
            length = self.length if any(map(counts_steps, names)) else length  # another name decides on the update
        target = node.target.id if isinstance(node.target, ast.Name) else ""
        trains = node in self.module.trains
        if not trains or (holds_loop and items.kind != "pieces") or (is_loss(target) and not holds_loop):
            few = _EPOCHS if trains else 1 if items.kind == "loader" or length is None else 3
            return range(few if length is None else min(length, few)), False
        if length is None:
            return range(2 * self.steps + 1), target not in _PARTS
        # Middle windows of a long loop, or in a later epoch, are skipped.
        windows = 1 if node in self.passages and items.kind != "pieces" else 2
        end = length // self.steps * self.steps
        first = min(windows * self.steps, end)
        last = max(end - (windows - 1) * self.steps, first)
        return [*range(first), *range(last, length)], target not in _PARTS

    def _while(self, node: ast.While, env: Environment) -> None:
        trains, holds = node in self.module.trains, node in self.module.holds_loop
        windows = max(2 * self.steps + self.steps // 2 + 1, _WHILE)

        def begin(_: int) -> bool:
            value = self.evaluate(node.test, env)
            return trains and not isinstance(value, Opaque) and self.truth(value, node.test) is False

        like = Round(node, is_micro=trains and not holds, kind="while")
        self._loop(node, like, range(1 if not trains else _EPOCHS if holds else windows), env, begin)

    def _loop(self, node: _Loop, like: Round, rounds: Sequence[int], env: Environment, begin: _Begin) -> None:
        """Run the rounds of a loop; `begin` binds its target, or asks its condition and tells whether that ends it."""
        self.assigned.append(targets(node))
        like.passage = self.passages[node] = self.passages.get(node, 0) + 1
        depth, guards, is_exhausted = len(self.contexts), self.guards, like.total is not None
        for number in rounds:
            self.rounds.append(replace(like, number=number))
            try:
                if begin(number):
                    is_exhausted = True
                    break
                self.run(node.body, env)
            except Leave as left:
                if isinstance(left.node, ast.Break):
                    is_exhausted = False
                    break
                if not isinstance(left.node, ast.Continue):
                    raise
            finally:
                self.rounds.pop()
                del self.contexts[depth:]
                self.guards = guards
        self.assigned.pop()
        if like.is_micro:
            self.emit("end", node, is_exhausted=is_exhausted)

    def _with(self, node: ast.With, env: Environment) -> None:
        depth = len(self.contexts)
        for item in node.items:
            value = self.evaluate(item.context_expr, env)
            if item.optional_vars is not None:
                self.assign(item.optional_vars, value, env, item.context_expr)
            if isinstance(value, Opaque) and value.role == "context":
                self.contexts.append(replace(value, made=node))
        self.run(node.body, env)
        del self.contexts[depth:]

    def _leave(self, node: ast.stmt, env: Environment) -> None:
        raise Leave(node, self.evaluate(node.value, env) if isinstance(node, ast.Return) else None)

    def call_function(self, function: Function, args: Sequence[object], words: Mapping[str, object]) -> object:
        """Run a function of the file; a generator something to loop over."""
        node = function.node
        if self.depth >= _DEEPEST:
            return replace(Loss.of(id(node)), weight=None)
        self.entered.add(node)
        env = self._arguments(function, args, words)
        if isinstance(node, ast.Lambda):
            return self.evaluate(node.body, env)
        if node in self.module.generators:
            endless = any(isinstance(n, ast.While) and getattr(n.test, "value", False) for n in walk(node))
            return Items(None if endless else self.length, batch, "endless" if endless else "loader")
        self.depth += 1
        around = self.guards, list(self.contexts), list(self.rounds), list(self.assigned)
        try:
            self.run(node.body, env)
        except Leave as left:
            return left.value
        finally:
            self.depth -= 1
            self.guards, self.contexts, self.rounds, self.assigned = around
        return None

    def _arguments(self, function: Function, args: Sequence[object], words: Mapping[str, object]) -> Environment:
        env, names = Environment(function.env), function.node.args
        positional = [each.arg for each in names.args]
        defaults = dict(zip(reversed(positional), reversed(names.defaults)))  # noqa: B905 - the last ones have them
        defaults |= {each.arg: value for each, value in zip(names.kwonlyargs, names.kw_defaults, strict=True) if value}
        if function.owner is not None and positional:
            env[positional.pop(0)] = function.owner
        given = {**dict(zip(positional, args)), **words}  # noqa: B905 - `*args` takes the rest
        for name in (*positional, *(each.arg for each in names.kwonlyargs)):
            default, value = defaults.get(name), given.get(name, Opaque())
            if isinstance(value, Opaque) and value.role is None and not value.text:
                value = self.unknown(name)
                plain = isinstance(default, ast.Constant) and not isinstance(default.value, bool | None)
                value = self.evaluate(default, env) if plain and getattr(value, "role", "") is None else value
            env[name] = value
        return env


def run_file(module: Module) -> list[Story]:
    """Return what happens in each run of the file: with all settings on, then off, where it asks for any.

    A loader has two windows and a half, or two where the script refuses a leftover.
    """
    found, n = list[Story](), module.steps
    for settings in (True, False):
        machine = Interpreter(module, 2 * n + max(1, n // 2), settings=settings)
        stories = _stories(machine)
        found += stories if not machine.refuses_leftover else _stories(Interpreter(module, 2 * n, settings=settings))
        if not machine.asked:
            break
    return found


def _stories(machine: Interpreter) -> list[Story]:
    module, env = machine.module, Environment()
    with suppress(Leave):
        machine.run(module.tree.body, env)
    stories = [(machine.events, machine.steps)]
    owners = {member: cls for cls in module.classes.values() for member in cls.body}
    for only_uncalled in (True, False):
        for function in module.functions:
            trains = function in module.trains or function.name == "training_step"
            called = function in machine.entered or (only_uncalled and function.name in module.called)
            if trains and not called and function.name != "__init__":
                machine.begin()
                with suppress(Leave):
                    _run_root(machine, function, owners.get(function), env)
                stories.append((machine.events, machine.steps))
    return stories


def _run_root(machine: Interpreter, node: ast.FunctionDef, owner: ast.ClassDef | None, env: Environment) -> None:
    """Call a function that is called from elsewhere: once, or with every micro-batch."""
    module, function = machine.module, Function(node, env)
    if owner is not None:
        with suppress(Leave):
            made = machine.construct(owner, env)
            function = Function(node, made, made)
    bases = {last_part(dotted(base)) for base in (owner.bases if owner else ())}
    by_lightning = node.name == "training_step" and "LightningModule" in bases
    if not by_lightning and node in module.holds_loop:
        counted = [each.target for each in walk(owner) if isinstance(each, ast.AugAssign)] if owner else []
        # What an object counts goes on in its next call.
        for _ in range(2 if any(dotted(each).startswith("self.") for each in counted) else 1):
            machine.call_function(function, (), {})
        return
    names = [each.arg for each in node.args.args][owner is not None :]
    machine.assigned.append(frozenset(names))
    # Lightning counts the batches; others' numbers may mean anything.
    counters = [name for name in names if by_lightning and name.startswith(("batch_i", "batch_n"))]
    total = machine.length if by_lightning else None
    for number in range(machine.length):
        machine.rounds = [Round(node, number, is_micro=True, total=total, kind="range")]
        with suppress(Leave):
            loss = machine.call_function(function, (), dict.fromkeys(counters, number))
            loss = loss.get("loss") if isinstance(loss, dict) else loss
            if by_lightning and isinstance(loss, Loss) and "automatic_optimization" not in module.words:
                # The framework runs the backward of the loss that it is given.
                place = [node, *(each for each in walk(node) if isinstance(each, ast.Return))][-1]
                is_told = "accumulate_grad_batches" in module.keywords
                machine.emit("backward", place, loss=loss, via="lightning", divides=is_told or None)
    machine.rounds = []
    machine.emit("end", node, is_exhausted=by_lightning)
