"""What the head of a loop says: what it goes over, how often, and which name counts its rounds."""

import ast
from dataclasses import dataclass, replace

from bigbatch.lint.reading.assignments import assigned_in, attributes_set_by_calls, counters_in, targets_of
from bigbatch.lint.reading.expressions import value_of
from bigbatch.lint.reading.places import Loop, LoopKind, Place
from bigbatch.lint.reading.program import dotted
from bigbatch.lint.reading.scopes import Class, Function, Object
from bigbatch.lint.reading.things import Computed, Thing
from bigbatch.lint.reading.values import Number, Rows, Unknown, Value
from bigbatch.lint.reading.vocabulary import PIECES, last_part
from bigbatch.lint.reading.walk import Walk, by_name

ForLoop = ast.For | ast.AsyncFor
_WINDOWS = {"batched", "chunked", "grouper", "ichunked"}  # they give windows, each of several batches


@dataclass(frozen=True)
class _Source:
    """What a loop goes over, unwrapped."""

    node: ast.expr
    start: int | None = None  # of the number that enumerate gives
    numbered: bool = False
    counted: bool = False  # the rounds themselves are numbers


def enter_for(walk: Walk, node: ForLoop) -> Loop:
    """Return a `for` loop, its names set as its first round finds them."""
    source = _unwrapped(walk, node.iter)
    value = value_of(walk, source.node)
    text = ast.unparse(source.node)
    kind, length = _kind(walk, source, value, text)
    assigned = assigned_in([node]) | attributes_set_by_calls(walk.program, node.body)
    loop = Loop(node, kind, assigned, frozenset(targets_of(node.target)), text, length)
    _bind(walk, node.target, source, loop, text)
    start_rounds(walk, loop, node.body)
    return loop


def enter_while(walk: Walk, node: ast.While) -> Loop:
    """Return a `while` loop, its names set as its first round finds them."""
    assigned = assigned_in([node]) | attributes_set_by_calls(walk.program, node.body)
    loop = Loop(node, LoopKind.ENDLESS, assigned)
    start_rounds(walk, loop, node.body)
    value_of(walk, node.test)
    return loop


def start_rounds(walk: Walk, loop: Loop, body: list[ast.stmt]) -> None:
    """Forget what will have changed by the second round; find what counts the rounds."""
    counters = counters_in(body)
    for name in loop.assigned - loop.targets:
        before = walk.scope.find(name)
        if name in counters.here:
            known = isinstance(before, Number) and before.known is not None
            offset = int(before.known) if known and isinstance(before, Number) and before.known is not None else None
            walk.scope.set(name, Place(loop, offset, name in walk.carried, name in counters.set_back))
        elif name in counters.below:
            walk.carried.add(name)
        elif isinstance(before, Number):
            walk.scope.set(name, Number(name, fixed=False, atoms=frozenset({name})))
        elif before is not None and not isinstance(before, Thing | Function | Class | Object | Rows | Computed):
            walk.scope.set(name, Unknown(name))


def _unwrapped(walk: Walk, node: ast.expr) -> _Source:
    """Look through enumerate, progress bars and whatever else takes an iterable first and gives it back."""
    if not isinstance(node, ast.Call) or not node.args:
        return _Source(node)
    name = walk.program.full_name(dotted(node.func)).rpartition(".")[2] or last_part(ast.unparse(node.func))
    if name == "enumerate":
        start = next((word.value for word in node.keywords if word.arg == "start"), None) or (
            node.args[1] if len(node.args) > 1 else ast.Constant(0)
        )
        inner = _unwrapped(walk, node.args[0])
        return replace(inner, numbered=True, start=_whole(value_of(walk, start)))
    if name == "range":
        return _Source(node, _whole(value_of(walk, node.args[0])) if len(node.args) > 1 else 0, counted=True)
    if name in {"tqdm", "track", "trange", "progress_bar", "iter", "list", "notebook_tqdm"} or _takes_enumerate(node):
        return _unwrapped(walk, node.args[0])
    return _Source(node)


def _takes_enumerate(node: ast.Call) -> bool:
    first = node.args[0]
    return isinstance(first, ast.Call) and dotted(first.func) == "enumerate"


def _whole(value: Value) -> int | None:
    known = value.known if isinstance(value, Number) else None
    return int(known) if known is not None else None


def _kind(walk: Walk, source: _Source, value: Value, text: str) -> tuple[LoopKind, Number | None]:
    node = source.node
    name = last_part(dotted(node.func)) or getattr(node.func, "attr", "") if isinstance(node, ast.Call) else ""
    if source.counted and isinstance(node, ast.Call):
        return LoopKind.COUNTED, _range_length(walk, node, value)
    if isinstance(node, ast.Call) and name == "zip" and node.args:
        return _kind(walk, replace(source, node=node.args[0]), value_of(walk, node.args[0]), ast.unparse(node.args[0]))
    if isinstance(value, Rows) and value.endless:
        return LoopKind.ENDLESS, None
    known = value.count if isinstance(value, Rows) else None
    length = Number(f"len({text})", known, fixed=not walk.varies(node))
    if name in _WINDOWS:
        return LoopKind.BATCHES, length
    if isinstance(node, ast.Call) and name in {"chunk", "islice"}:
        counted = node.args[-1] if node.args else None
        number = walk.number(value_of(walk, counted), counted) if counted is not None else None
        return LoopKind.PIECES, number or length
    cut = isinstance(value, Rows) and value.cut
    return (LoopKind.PIECES if cut or PIECES.search(last_part(text)) else LoopKind.BATCHES), length


def _range_length(walk: Walk, node: ast.Call, value: Value) -> Number | None:
    if isinstance(value, Rows) and value.count is not None and len(node.args) > 1:
        return Number(ast.unparse(node), value.count)
    if len(node.args) == 1:
        return walk.number(value_of(walk, node.args[0]), node.args[0])
    stop, start = walk.number(value_of(walk, node.args[1]), node.args[1]), _whole(value_of(walk, node.args[0]))
    return replace(stop, plus=stop.plus - start) if stop is not None and start is not None and len(node.args) == 2 else None  # noqa: E501, PLR2004


def _bind(walk: Walk, target: ast.expr, source: _Source, loop: Loop, text: str) -> None:
    """Set the names of a loop's head."""
    for name in targets_of(target):
        walk.scope.set(name, by_name(name))
    numbers = source.counted and len(getattr(source.node, "args", ())) < 3  # noqa: PLR2004 - a stride counts no rounds
    head = target.elts[0] if isinstance(target, ast.Tuple) and target.elts else target
    if isinstance(head, ast.Name) and ((source.numbered and head is not target) or (numbers and not source.numbered)):
        walk.scope.set(head.id, Place(loop, source.start))
    inner = target.elts[1] if source.numbered and isinstance(target, ast.Tuple) and len(target.elts) > 1 else target
    if isinstance(inner, ast.Name) and isinstance(source.node, ast.Call):
        called = source.node.func.attr if isinstance(source.node.func, ast.Attribute) else dotted(source.node.func)
        if called in _WINDOWS or PIECES.search(called):
            walk.scope.set(inner.id, Rows(None, cut=True))
