"""What happens statement by statement: conditions and loops are put around what stands inside them."""

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from bigbatch.lint.reading.assigning import assign, augment
from bigbatch.lint.reading.conditions import Always, Condition, Due, Last, Not, Synced, Varies, atoms, is_setting
from bigbatch.lint.reading.expressions import condition_of, value_of
from bigbatch.lint.reading.frames import Frame, Guard, Inside, Setting
from bigbatch.lint.reading.headers import enter_for, enter_while
from bigbatch.lint.reading.joining import join_snapshots
from bigbatch.lint.reading.places import Place
from bigbatch.lint.reading.scopes import Class, Function, restore
from bigbatch.lint.reading.things import Role, Thing
from bigbatch.lint.reading.trees import nodes_in
from bigbatch.lint.reading.values import Value
from bigbatch.lint.reading.walk import Walk


@dataclass(frozen=True)
class Outcome:
    """How a statement ends: the way goes on, perhaps only under some condition, or it does not."""

    ends: str = ""  # continue, return, break, raise
    frames: tuple[Frame, ...] = ()  # what stands around the statements after it


GOES_ON = Outcome()


def run_block(walk: Walk, body: list[ast.stmt]) -> Outcome:
    """Walk through statements in order."""
    before = len(walk.frames)
    outcome = GOES_ON
    for statement in body:
        walk.count_statement()
        runner = _RUNNERS.get(type(statement))
        outcome = runner(walk, statement) if runner is not None else GOES_ON
        walk.frames += outcome.frames
        if outcome.ends:
            break
    added = tuple(walk.frames[before:])
    del walk.frames[before:]
    return Outcome(outcome.ends, added)


def _if(walk: Walk, node: ast.If) -> Outcome:
    condition = condition_of(walk, node.test)
    if isinstance(condition, Always):
        return run_block(walk, node.body if condition.holds else node.orelse)
    frames = _frame(condition, node, branch=True), _frame(condition, node, branch=False)
    before = walk.scope.snapshot()
    with walk.inside(frames[0]):
        first = run_block(walk, node.body)
    after_first = walk.scope.snapshot()
    restore(before)
    with walk.inside(frames[1]):
        second = run_block(walk, node.orelse)
    if first.ends and second.ends:
        return Outcome(first.ends)
    _note_even(walk, node, first)
    if first.ends == "break":
        _note_stop(walk, node)
    if first.ends:
        return _rest(first, condition, frames[1])
    if second.ends:
        restore(after_first)
        return _rest(second, condition, frames[0])
    join_snapshots(condition, after_first, walk.scope.snapshot())
    return Outcome(
        frames=tuple(frame for each in (first, second) for frame in each.frames if isinstance(frame, Inside))
    )


def _note_even(walk: Walk, node: ast.If | ast.Assert, body: Outcome | None) -> None:
    """A script that refuses a number of micro-batches which does not divide has no leftover."""
    if (body is None or body.ends == "raise") and _has_remainder(node.test):
        walk.even = True


def _has_remainder(node: ast.expr) -> bool:
    return any(isinstance(each, ast.BinOp) and isinstance(each.op, ast.Mod) for each in nodes_in(node))


def _note_stop(walk: Walk, node: ast.If) -> None:
    """A loop that ends after a number of rounds may have been told one that divides."""
    names = [each.id for each in nodes_in(node.test) if isinstance(each, ast.Name)]
    walk.stopped |= {place.loop for name in names if isinstance(place := walk.named(name), Place) and place.loop}


def _rest(branch: Outcome, condition: Condition, frame: Frame) -> Outcome:
    """Say what stands around the statements after `if ...: continue`."""
    told = any(isinstance(atom, Due | Last | Synced) for atom in atoms(condition)) or is_setting(condition)
    return Outcome(frames=(frame,)) if branch.ends in {"continue", "return"} and told else GOES_ON


_NEGATIONS = re.compile(r"^not |\s+is None$|\s+is not None$|\s+==\s+(True|False)$|^\(|\)$")


def _frame(condition: Condition, node: ast.If, *, branch: bool) -> Frame:
    """Return what stands around the body of an `if` (`branch`), or around its `else`."""
    if not is_setting(condition):
        return Guard(condition if branch else Not(condition), node)
    text = ast.unparse(node.test)
    written = not (text.startswith("not ") or text.endswith((" is None", " == False")))
    return Setting(_NEGATIONS.sub("", text), holds=written is branch)


def _for(walk: Walk, node: ast.For | ast.AsyncFor) -> Outcome:
    loop = enter_for(walk, node)
    with walk.inside(loop):
        run_block(walk, node.body)
    run_block(walk, node.orelse)
    return GOES_ON


def _while(walk: Walk, node: ast.While) -> Outcome:
    loop = enter_while(walk, node)
    with walk.inside(loop):
        run_block(walk, node.body)
    run_block(walk, node.orelse)
    return GOES_ON


def _with(walk: Walk, node: ast.With | ast.AsyncWith) -> Outcome:
    frames: list[Frame] = []
    for item in node.items:
        value = value_of(walk, item.context_expr)
        if item.optional_vars is not None:
            assign(walk, item.optional_vars, value, item.context_expr)
        if isinstance(value, Thing) and value.role is Role.CONTEXT:
            frames.append(Inside(value.detail, value.text, node, value.condition))
    with walk.inside(*frames):
        return run_block(walk, node.body)


def _try(walk: Walk, node: ast.Try) -> Outcome:
    outcome = run_block(walk, node.body)
    for handler in node.handlers:
        before = walk.scope.snapshot()
        with walk.inside(Guard(Varies(), handler)):
            run_block(walk, handler.body)
        restore(before)
    run_block(walk, node.orelse)
    run_block(walk, node.finalbody)
    return replace(outcome, ends="") if node.handlers else outcome


def _match(walk: Walk, node: ast.Match) -> Outcome:
    value_of(walk, node.subject)
    for case in node.cases:
        before = walk.scope.snapshot()
        with walk.inside(Guard(Varies(), node)):
            run_block(walk, case.body)
        restore(before)
    return GOES_ON


def _assign(walk: Walk, node: ast.Assign) -> Outcome:
    value = value_of(walk, node.value)
    for target in node.targets:
        assign(walk, target, value, node.value)
    return GOES_ON


def _annotated(walk: Walk, node: ast.AnnAssign) -> Outcome:
    if node.value is not None:
        assign(walk, node.target, value_of(walk, node.value), node.value)
    return GOES_ON


def _augmented(walk: Walk, node: ast.AugAssign) -> Outcome:
    augment(walk, node)
    return GOES_ON


def _expression(walk: Walk, node: ast.Expr) -> Outcome:
    value = value_of(walk, node.value)
    entered = isinstance(node.value, ast.Call) and getattr(node.value.func, "attr", "") == "enter_context"
    if entered and isinstance(value, Thing) and value.role is Role.CONTEXT:  # `stack.enter_context(model.no_sync())`
        return Outcome(frames=(Inside(value.detail, value.text, node, value.condition),))
    return GOES_ON


def _assert(walk: Walk, node: ast.Assert) -> Outcome:
    value_of(walk, node.test)
    _note_even(walk, node, None)
    return GOES_ON


def _return(walk: Walk, node: ast.Return) -> Outcome:
    value: Value = value_of(walk, node.value)
    if walk.returned and node.value is not None:
        walk.returned[-1].append(value)
    return Outcome("return")


def _function(walk: Walk, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Outcome:
    walk.scope.set(node.name, Function(node, walk.scope))
    return GOES_ON


def _class(walk: Walk, node: ast.ClassDef) -> Outcome:
    walk.scope.set(node.name, Class(node, walk.scope))
    return GOES_ON


_RUNNERS: dict[type[ast.stmt], Callable[..., Outcome]] = {
    ast.If: _if,
    ast.For: _for,
    ast.AsyncFor: _for,
    ast.While: _while,
    ast.With: _with,
    ast.AsyncWith: _with,
    **dict.fromkeys((ast.Try, getattr(ast, "TryStar", ast.Try)), _try),
    ast.Match: _match,
    ast.Assign: _assign,
    ast.AnnAssign: _annotated,
    ast.AugAssign: _augmented,
    ast.Expr: _expression,
    ast.Assert: _assert,
    ast.Return: _return,
    ast.Continue: lambda _walk, _node: Outcome("continue"),
    ast.Break: lambda _walk, _node: Outcome("break"),
    ast.Raise: lambda _walk, _node: Outcome("raise"),
    ast.FunctionDef: _function,
    ast.AsyncFunctionDef: _function,
    ast.ClassDef: _class,
}
