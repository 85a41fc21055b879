"""Which names a block of statements changes, and which of them count its rounds."""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from bigbatch.lint.reading.program import Program, dotted
from bigbatch.lint.reading.trees import nodes_in


def targets_of(target: ast.AST) -> Iterator[str]:
    """Yield the names that an assignment's left side sets."""
    if isinstance(target, ast.Tuple | ast.List):
        for part in target.elts:
            yield from targets_of(part)
    elif isinstance(target, ast.Starred):
        yield from targets_of(target.value)
    elif dotted(target):
        yield dotted(target)


def _set_by(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Assign(targets=targets):
            for target in targets:
                yield from targets_of(target)
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target) | ast.NamedExpr(target=target):
            yield from targets_of(target)
        case ast.For(target=target) | ast.AsyncFor(target=target):
            yield from targets_of(target)
        case ast.withitem(optional_vars=target) if target is not None:
            yield from targets_of(target)


def assigned_in(body: Iterable[ast.AST]) -> frozenset[str]:
    """Return all names that are set somewhere in a block."""
    return frozenset(name for statement in body for node in nodes_in(statement) for name in _set_by(node))


def attributes_set_by_calls(program: Program, body: Iterable[ast.AST]) -> frozenset[str]:
    """Return the `self.x` that methods of this file set which are called in a block; one call deep."""
    called = {
        node.func.attr
        for statement in body
        for node in nodes_in(statement)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and dotted(node.func.value) == "self"
    }
    methods = [function for function in program.functions if function.name in called]
    return frozenset(n for method in methods for n in assigned_in(method.body) if n.startswith("self."))


@dataclass(frozen=True)
class Counters:
    """Names that grow by one in every round, and those among them that something sets back."""

    here: frozenset[str]
    below: frozenset[str]  # in a loop inside, or only sometimes
    set_back: dict[str, int]  # and to what


def counters_in(body: list[ast.stmt]) -> Counters:
    """Find the counters of a loop's body."""
    every_round = set(_increments(_always_run(body)))
    anywhere = set(_increments(node for statement in body for node in nodes_in(statement)))
    others: dict[str, list[ast.AST]] = {}
    for statement in body:
        for node in nodes_in(statement):
            for name in _set_by(node):
                if not (isinstance(node, ast.stmt) and name in set(_increments([node]))):
                    others.setdefault(name, []).append(node)
    plain = {name for name in anywhere if all(_is_start(node) for node in others.get(name, []))}
    set_back = {name: _start(others[name][-1]) for name in plain & set(others)}
    return Counters(frozenset(every_round & plain), frozenset((anywhere - every_round) & plain), set_back)


def _increments(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield `x` of `x += 1` and `x = x + 1`."""
    for node in nodes:
        match node:
            case ast.AugAssign(target=target, op=ast.Add(), value=ast.Constant(value=1)):
                yield dotted(target)
            case ast.Assign(targets=[target], value=ast.BinOp(left=left, op=ast.Add(), right=ast.Constant(value=1))):
                if dotted(left) and dotted(left) == dotted(target):
                    yield dotted(target)


def _is_start(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and node.value.value in {0, 1}


def _start(node: ast.AST) -> int:
    return int(bool(node.value.value)) if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) else 0


def _always_run(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that no condition, inner loop or early `continue` stands before."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.With | ast.AsyncWith | ast.Try):
            yield from _always_run(statement.body)
        if isinstance(statement, ast.If) and any(isinstance(each, ast.Continue) for each in nodes_in(statement)):
            return
