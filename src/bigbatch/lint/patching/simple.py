"""Which loops are simple enough to be rewritten, and what is needed of them for it.

Simple is: one optimizer, one backward, and steps, clears, clips and schedules that stand as statements of their own in
the same function as the loop.
"""

import ast
from dataclasses import dataclass

from bigbatch.lint.loops.cadence import Cadence
from bigbatch.lint.loops.facts import Fact, Shape, TrainingLoop
from bigbatch.lint.patching.arguments import NotSimple, arguments_of, steps_as_written
from bigbatch.lint.reading.events import Kind, Via
from bigbatch.lint.reading.places import LoopKind
from bigbatch.lint.reading.program import dotted
from bigbatch.lint.reading.things import Computed
from bigbatch.lint.reading.trees import nodes_in
from bigbatch.lint.reading.values import Number
from bigbatch.lint.reading.vocabulary import counts_micro_batches, last_part
from bigbatch.lint.rules.rule import Script

_REMOVED = {Kind.STEP, Kind.ZERO, Kind.CLIP, Kind.UNSCALE, Kind.UPDATE, Kind.SCHEDULER}
_TOO_MUCH = {Kind.RESCALE: "gradients are rescaled by hand", Kind.SYNC: "ranks synchronise by hand"}


@dataclass(frozen=True)
class Plan:
    """What a rewriting needs to know."""

    loop: ast.For
    over: bool  # the loader is wrapped; else the window is filled by an inner loop
    backward: ast.Call
    loss: ast.expr
    divisions: tuple[ast.BinOp | ast.AugAssign, ...]
    removed: tuple[ast.stmt, ...]
    arguments: str  # of Accumulator(...)
    names: frozenset[str]  # that the arguments use
    around: tuple[ast.stmt, ...]  # loops outside, outermost first
    taken: frozenset[str]  # names that the file has a use for


def plan(script: Script, loop: TrainingLoop, parents: dict[ast.AST, ast.AST]) -> Plan:
    """Return what is needed to rewrite a loop, or raise with the reason why not."""
    node = loop.loop.node
    if not isinstance(node, ast.For) or node.orelse or loop.every is None:
        raise NotSimple("it is not a plain for loop with a fixed number of steps")
    _check_shape(script, loop, node)
    fact, loss = _only_backward(loop)
    backward = fact.event.node
    if not isinstance(backward, ast.Call) or not isinstance(parents.get(backward), ast.Expr):
        raise NotSimple("its backward is not a statement of its own")
    _check_hidden_scale(node, _loss_of(backward))
    removed = _removed(loop, node, parents)
    steps = steps_as_written(loop, node)
    arguments = arguments_of(loop, steps)
    names = frozenset(dotted(each) for each in nodes_in(ast.parse(f"f({arguments})"))) - {"", "f"}
    function = _function(node, parents)
    _check_other_uses(steps, node, loss)
    _check_logs(steps, function)
    outer = [each.node for each in loop.around if isinstance(each.node, ast.For | ast.While)]
    around = tuple(each for each in outer if _function(each, parents) is function)
    if loop.shape is Shape.NESTED and not around:
        raise NotSimple("an accumulator is made once, and this function runs for every update")
    if function is not None and any(getattr(each, "attr", "") == "grad" for each in nodes_in(function)):
        raise NotSimple("something looks at gradients by hand")
    return Plan(
        loop=node,
        over=loop.shape is Shape.MODULO,
        backward=backward,
        loss=_loss_of(backward),
        divisions=_divisions(loop, loss, parents),
        removed=removed,
        arguments=arguments,
        names=names,
        around=around,
        taken=frozenset(script.program.words),
    )


def _check_shape(script: Script, loop: TrainingLoop, node: ast.For) -> None:
    nested = loop.shape is Shape.NESTED and loop.loop.kind is LoopKind.COUNTED
    if not nested and not (loop.shape is Shape.MODULO and loop.loop.kind is LoopKind.BATCHES):
        raise NotSimple("its windows are not counted by a modulo over a loader, or by an inner range()")
    if loop.at(Kind.STEP, Cadence.MICRO):
        raise NotSimple("it steps with every micro-batch, so it may not mean to accumulate")
    if any(isinstance(each, ast.Break | ast.Continue | ast.Return | ast.Yield) for each in nodes_in(node)):
        raise NotSimple("it leaves a round or the loop early")
    for kind, why in _TOO_MUCH.items():
        if loop.of(kind):
            raise NotSimple(why)
    if script.program.words & {"DistributedDataParallel", "DDP", "FSDP", "fully_shard"}:
        raise NotSimple("its model is spread over several processes")
    if any(fact.event.via not in {Via.TORCH, Via.SCALER} for fact in loop.facts):
        raise NotSimple("a framework has a part in it")


def _only_backward(loop: TrainingLoop) -> tuple[Fact, Computed]:
    losses = loop.losses()
    if len(losses) != 1 or losses[0][0].cadence is not Cadence.MICRO:
        raise NotSimple("it has more than one backward, or not one per round")
    fact, loss = losses[0]
    if loss.masked is not None and not isinstance(loss.masked, ast.Call):
        raise NotSimple("its loss is divided by a mask's count: Accumulator needs to be told, with count=")
    if len({step.event.subject for step in loop.of(Kind.STEP)}) != 1 or not loop.of(Kind.STEP)[0].event.subject:
        raise NotSimple("it has several optimizers")
    return fact, loss


def _removed(loop: TrainingLoop, node: ast.For, parents: dict[ast.AST, ast.AST]) -> tuple[ast.stmt, ...]:
    """Return the statements that Accumulator makes unnecessary."""
    found: list[ast.stmt] = []
    for fact in loop.facts:
        kind = fact.event.kind
        outside = fact.cadence in {Cadence.BEFORE, Cadence.AFTER} or fact.event.within(loop.loop) is None
        if kind not in _REMOVED or (kind is Kind.SCHEDULER and outside and loop.shape is Shape.MODULO):
            continue
        statement = parents.get(fact.node)
        if not isinstance(statement, ast.Expr) or _function(statement, parents) is not _function(node, parents):
            raise NotSimple(f"line {fact.event.line} is not a statement of its own in the loop's function")
        if not _is_plain(statement, parents):
            raise NotSimple(f"line {fact.event.line} stands under a condition of its own")
        found.append(statement)
    return tuple(found)


def _is_plain(statement: ast.stmt, parents: dict[ast.AST, ast.AST]) -> bool:
    """Tell whether nothing but loops, functions and one `if` without `else` stands around a statement."""
    conditions = 0
    parent = parents.get(statement)
    while parent is not None:
        if isinstance(parent, ast.If):
            conditions += 1
            if parent.orelse:
                return False
        elif isinstance(parent, ast.Try | ast.Match):
            return False
        elif isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
            return conditions <= 1
        parent = parents.get(parent)
    return conditions <= 1


def _function(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> ast.AST | None:
    parent = parents.get(node)
    while parent is not None and not isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
        parent = parents.get(parent)
    return parent


def _loss_of(backward: ast.Call) -> ast.expr:
    """Return what backward is called on, without a scaler around it."""
    receiver = backward.func.value if isinstance(backward.func, ast.Attribute) else backward
    if backward.args or backward.keywords:
        raise NotSimple("its backward takes arguments")
    if isinstance(receiver, ast.Call) and isinstance(receiver.func, ast.Attribute) and receiver.func.attr == "scale":
        return receiver.args[0]
    return receiver


def _check_hidden_scale(node: ast.For, loss: ast.expr) -> None:
    """A loss that a `with` gives, as Apex's scale_loss does, is scaled until the block ends: no step may come in it."""
    given = {
        dotted(each.optional_vars) for each in nodes_in(node) if isinstance(each, ast.withitem) and each.optional_vars
    }
    if dotted(loss) in given:
        raise NotSimple(f"its loss is what a with statement makes of it: {dotted(loss)}")


def _divisions(
    loop: TrainingLoop, loss: Computed, parents: dict[ast.AST, ast.AST]
) -> tuple[ast.BinOp | ast.AugAssign, ...]:
    """Return the divisions by the number of steps, which go; what else a loss is divided by is its own."""
    if loss.rescaled or len(loss.most) != len(loss.divided_at):
        raise NotSimple("what its loss is multiplied or divided by cannot be told")
    found: list[ast.BinOp | ast.AugAssign] = []
    for number, node in zip(loss.most, loss.divided_at, strict=True):
        if loss.reduction == "mean" and _is_factor(loop, number):
            continue
        if loss.reduction not in {"mean", "?"} or not _is_steps(loop, number):
            raise NotSimple(f"its loss is divided by {number.text} too: Accumulator needs to be told, with count=")
        whole = isinstance(parents.get(node), ast.Assign | ast.Attribute | ast.Call | ast.AnnAssign)
        plain = isinstance(node, ast.AugAssign) or (isinstance(node, ast.BinOp) and whole)
        if not plain or not isinstance(node, ast.BinOp | ast.AugAssign) or not isinstance(node.op, ast.Div):
            raise NotSimple("its loss is divided inside a longer expression")
        found.append(node)
    return tuple(found)


def _is_factor(loop: TrainingLoop, number: Number) -> bool:
    """Tell a plain number that is not that of the steps: a weight of the loss, which stays where it is."""
    every = loop.every.known if loop.every is not None else None
    return number.known is not None and not number.atoms and every is not None and number.known != every


def _is_steps(loop: TrainingLoop, number: Number) -> bool:
    """Tell the number of steps, by its name or as a plain number; another name may happen to hold as much."""
    if loop.every is None or not number.same(loop.every):
        return False
    return not number.atoms or counts_micro_batches(number.text) or last_part(number.text) == last_part(loop.every.text)


def _check_other_uses(steps: ast.expr, node: ast.For, loss: Computed) -> None:
    """A loop that multiplies its log by the steps again would log the wrong number."""
    if not dotted(steps):
        return
    known = [*loss.divided_at, node.iter]
    known += [part.test for part in nodes_in(node) if isinstance(part, ast.If)]
    known += [part for part in nodes_in(node) if isinstance(part, ast.Assign) and isinstance(part.value, ast.Compare)]
    expected = {id(each) for part in known for each in nodes_in(part)}
    if any(dotted(each) == dotted(steps) and id(each) not in expected for each in nodes_in(node)):
        raise NotSimple(f"it uses {dotted(steps)} for something else too")


def _check_logs(steps: ast.expr, function: ast.AST | None) -> None:
    for each in nodes_in(function) if function is not None and dotted(steps) else ():
        if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Mult):
            sides = {dotted(each.left), dotted(each.right)}
            if dotted(steps) in sides and "loss" in ast.unparse(each).lower():
                raise NotSimple(f"it multiplies its loss by {dotted(steps)} again")
