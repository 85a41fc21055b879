"""What the head of a loop says: what it goes over, how often, and which name counts its rounds."""

import ast
from collections.abc import Iterable
from dataclasses import dataclass, replace

from bigbatch.lint.reading.changes import assigned_in, attributes_set_by_calls, counters_in, targets_of
from bigbatch.lint.reading.expressions import value_of
from bigbatch.lint.reading.places import Loop, LoopKind, Place
from bigbatch.lint.reading.program import dotted
from bigbatch.lint.reading.scopes import Class, Function, Object
from bigbatch.lint.reading.things import Computed, Thing
from bigbatch.lint.reading.trees import nodes_in
from bigbatch.lint.reading.values import Number, Numbered, Rows, Unknown, Value
from bigbatch.lint.reading.vocabulary import ENDLESS, PIECES, last_part
from bigbatch.lint.reading.walk import Walk, by_name

ForLoop = ast.For | ast.AsyncFor
_WITHOUT_STRIDE = 2  # arguments of a range whose numbers count its rounds
_LOOKED_THROUGH = {"tqdm", "track", "trange", "progress_bar", "iter", "list", "notebook_tqdm"}
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
    _bind(walk, node.target, source, loop, value)
    start_rounds(walk, loop, node.body)
    return loop


def enter_comprehension(walk: Walk, node: ast.comprehension, element: ast.expr) -> Loop:
    """Return the loop that a comprehension is."""
    source = _unwrapped(walk, node.iter)
    text = ast.unparse(source.node)
    kind, length = _kind(walk, source, value_of(walk, source.node), text)
    targets = frozenset(targets_of(node.target))
    loop = Loop(element, kind, targets, targets, text, length)
    _bind(walk, node.target, source, loop, Unknown())
    return loop


def enter_while(walk: Walk, node: ast.While) -> Loop:
    """Return a `while` loop, its names set as its first round finds them; `while n < steps` may count its rounds."""
    assigned = assigned_in([node]) | attributes_set_by_calls(walk.program, node.body)
    kind, length = LoopKind.ENDLESS, None
    match node.test:
        case ast.Compare(left=left, ops=[ast.Lt()], comparators=[right]) if dotted(left) in counters_in(node.body).here:
            kind, length = LoopKind.COUNTED, walk.number(value_of(walk, right), right)
    loop = Loop(node, kind, assigned, length=length)
    start_rounds(walk, loop, node.body)
    value_of(walk, node.test)
    return loop


def start_rounds(walk: Walk, loop: Loop, body: list[ast.stmt]) -> None:
    """Forget what will have changed by the second round; find what counts the rounds."""
    counters = counters_in(body)
    _count_in_objects(walk, loop, body)
    for name in loop.assigned - loop.targets:
        before = walk.scope.find(name)
        if isinstance(before, Place) and before.loop is loop:
            continue
        if name in counters.here:
            walk.scope.set(name, Place(loop, _start(before), name in walk.carried, counters.set_back.get(name)))
        elif name in counters.below:
            walk.carried.add(name)
        elif isinstance(before, Number):
            walk.scope.set(name, Number(name, fixed=False, atoms=frozenset({name})))
        elif before is not None and not isinstance(before, Thing | Function | Class | Object | Rows | Computed):
            walk.scope.set(name, Unknown(name))


def _start(value: Value | None) -> int | None:
    """Return where a counter starts, if that is a plain number."""
    return int(value.known) if isinstance(value, Number) and value.known is not None else None


def _count_in_objects(walk: Walk, loop: Loop, body: Iterable[ast.AST], deep: int = 3) -> None:
    """Find counters that live in an object: `self.calls += 1` in a method that is called in every round."""
    for statement in body if deep else ():
        for node in nodes_in(statement):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            owner = walk.scope.find(dotted(node.func.value))
            method = walk.program.method(owner.node, node.func.attr) if isinstance(owner, Object) else None
            if method is None or not isinstance(owner, Object):
                continue
            counters, attributes = counters_in(method.body), owner.attributes.variables
            for name in counters.here & attributes.keys():
                before = attributes[name]
                if not (isinstance(before, Place) and before.loop is loop):
                    # One that a loop outside has claimed counts the rounds of this one: the call stands in both.
                    start = before.offset if isinstance(before, Place) else _start(before)
                    attributes[name] = Place(loop, start, carried=True, resets=counters.set_back.get(name))
            if dotted(node.func.value) == "self":
                _count_in_objects(walk, loop, method.body, deep - 1)


def _unwrapped(walk: Walk, node: ast.expr, *, names: bool = True) -> _Source:
    """Look through enumerate, progress bars and whatever else takes an iterable first and gives it back."""
    meant = _meant(walk, node) if names else node
    names = names and meant is node  # one name deep: `loader = enumerate(loader)` has no end
    node = meant
    if not isinstance(node, ast.Call) or not node.args:
        return _Source(node)
    name = walk.program.full_name(dotted(node.func)).rpartition(".")[2] or last_part(ast.unparse(node.func))
    if name == "enumerate":
        start = next((word.value for word in node.keywords if word.arg == "start"), None) or (
            node.args[1] if len(node.args) > 1 else ast.Constant(0)
        )
        inner = _unwrapped(walk, node.args[0], names=names)
        return replace(inner, numbered=True, start=_whole(value_of(walk, start)))
    if name == "range":
        return _Source(node, _whole(value_of(walk, node.args[0])) if len(node.args) > 1 else 0, counted=True)
    # `zip(range(n), loader)` counts its rounds, and there are no more than n.
    counted = name == "zip" and isinstance(node.args[0], ast.Call) and dotted(node.args[0].func) == "range"
    if name in _LOOKED_THROUGH or counted or _takes_enumerate(node):
        return _unwrapped(walk, node.args[0], names=names)
    return _Source(node)


def _meant(walk: Walk, node: ast.expr) -> ast.expr:
    """Look through names: `bar = tqdm(enumerate(loader))` above the loop, or `(bar := ...)` in its head."""
    if isinstance(node, ast.NamedExpr):
        value_of(walk, node)
        return node.value
    named = walk.scope.find(dotted(node)) if dotted(node) else None
    return named.call if isinstance(named, Numbered) else node


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
    if (isinstance(value, Rows) and value.endless) or ENDLESS.search(text):
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
    named = bool(dotted(node)) and PIECES.search(last_part(text))
    return (LoopKind.PIECES if cut or named else LoopKind.BATCHES), length


def _range_length(walk: Walk, node: ast.Call, value: Value) -> Number | None:
    """Return how many numbers a range has."""
    if isinstance(value, Rows) and value.count is not None and len(node.args) > 1:
        return Number(ast.unparse(node), value.count)
    match node.args:
        case [stop]:
            return walk.number(value_of(walk, stop), stop)
        case [first, stop]:
            number, start = walk.number(value_of(walk, stop), stop), _whole(value_of(walk, first))
            return replace(number, plus=number.plus - start) if number is not None and start is not None else None
    return None


def _bind(walk: Walk, target: ast.expr, source: _Source, loop: Loop, value: Value) -> None:
    """Set the names of a loop's head."""
    for name in targets_of(target):
        walk.scope.set(name, value if isinstance(value, Computed) else by_name(name))
    numbers = source.counted and len(getattr(source.node, "args", ())) <= _WITHOUT_STRIDE
    head = target.elts[0] if isinstance(target, ast.Tuple) and target.elts else target
    if isinstance(head, ast.Name) and ((source.numbered and head is not target) or (numbers and not source.numbered)):
        walk.scope.set(head.id, Place(loop, source.start))
    inner = target.elts[1] if source.numbered and isinstance(target, ast.Tuple) and len(target.elts) > 1 else target
    if isinstance(inner, ast.Name) and isinstance(source.node, ast.Call):
        called = source.node.func.attr if isinstance(source.node.func, ast.Attribute) else dotted(source.node.func)
        if called in _WINDOWS or PIECES.search(called):
            walk.scope.set(inner.id, Rows(None, cut=True))
