"""What an `Accumulator` is made with, as the loop already writes it."""

import ast

from bigbatch.lint.loops.cadence import Cadence
from bigbatch.lint.loops.facts import Shape, TrainingLoop
from bigbatch.lint.reading.events import Kind, Via
from bigbatch.lint.reading.program import dotted
from bigbatch.lint.reading.trees import nodes_in

_PARAMETERS_AND_NORM = 2


class NotSimple(Exception):
    """Why a loop is left as it is."""


def arguments_of(loop: TrainingLoop, steps: ast.expr) -> str:
    """Return the arguments of Accumulator."""
    models = {fact.event.subject for fact in loop.of(Kind.FORWARD)}
    if len(models) != 1 or not min(models):
        raise NotSimple("which model is trained cannot be told")
    parts = [*models, loop.of(Kind.STEP)[0].event.subject, f"steps={ast.unparse(steps)}"]
    parts += [f"clip_norm={ast.unparse(norm)}" for norm in _clip_norm(loop, min(models))]
    parts += [f"scheduler={scheduler}" for scheduler in _schedulers(loop)]
    parts += [f"scaler={fact.event.subject}" for fact in loop.of(Kind.UPDATE)[:1]]
    if any(fact.event.via is Via.SCALER for fact in loop.of(Kind.BACKWARD)) and not loop.of(Kind.UPDATE):
        raise NotSimple("its scaler is never updated")
    return ", ".join(parts)


def steps_as_written(loop: TrainingLoop, node: ast.For) -> ast.expr:
    """Return the number of micro-batches per window as the loop itself writes it."""
    if loop.shape is Shape.NESTED and isinstance(node.iter, ast.Call) and len(node.iter.args) == 1:
        return node.iter.args[0]
    for fact in loop.of(Kind.STEP, Kind.ZERO):
        condition = fact.condition()
        if isinstance(condition, ast.If) and condition in nodes_in(node):
            for part in [condition.test, *_meanings(condition.test, node)]:
                for each in nodes_in(part):
                    if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Mod):
                        return each.right
    raise NotSimple("its windows are not counted by a modulo over a loader, or by an inner range()")


def _meanings(test: ast.expr, node: ast.For) -> list[ast.expr]:
    """Return what the names in a condition were set to in the loop."""
    names = {dotted(each) for each in nodes_in(test)}
    assigned = [each for each in nodes_in(node) if isinstance(each, ast.Assign)]
    return [each.value for each in assigned if {dotted(target) for target in each.targets} & names]


def _schedulers(loop: TrainingLoop) -> set[str]:
    """Return the scheduler that moves with the loop; one that moves once per epoch stays where it is."""
    facts = [fact for fact in loop.of(Kind.SCHEDULER) if fact.cadence not in {Cadence.BEFORE, Cadence.AFTER}]
    found = {fact.event.subject for fact in facts}
    if len(found) > 1:
        raise NotSimple("it has several schedulers")
    return found


def _clip_norm(loop: TrainingLoop, model: str) -> list[ast.expr]:
    """Return the largest norm that gradients are clipped to; any other clipping is not ours to copy."""
    found: list[ast.expr] = []
    for fact in loop.of(Kind.CLIP):
        call = fact.event.node
        if not isinstance(call, ast.Call) or "norm" not in ast.unparse(call.func):
            raise NotSimple("it clips by value")
        given = [*call.args[1:2], *(word.value for word in call.keywords if word.arg == "max_norm")]
        more = {word.arg for word in call.keywords} - {"max_norm", "parameters"}
        if len(given) != 1 or more or len(call.args) > _PARAMETERS_AND_NORM:
            raise NotSimple("it clips in its own way")
        clipped = [*call.args[:1], *(word.value for word in call.keywords if word.arg == "parameters")]
        if [ast.unparse(each) for each in clipped] != [f"{model}.parameters()"]:
            raise NotSimple(f"what it clips is not {model}.parameters()")
        found += given
    return found[:1]
