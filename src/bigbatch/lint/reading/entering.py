"""Following calls into functions and classes of the file itself."""

import ast

from bigbatch.lint.reading.expressions import value_of
from bigbatch.lint.reading.joining import join
from bigbatch.lint.reading.program import Def
from bigbatch.lint.reading.scopes import Class, Function, Object, Scope
from bigbatch.lint.reading.statements import run_block
from bigbatch.lint.reading.things import Role, Thing, computed
from bigbatch.lint.reading.trees import nodes_in
from bigbatch.lint.reading.values import Rows, Unknown, Value
from bigbatch.lint.reading.walk import DEEP, Walk, by_name

_MODULES = {"Module", "LightningModule", "PreTrainedModel", "Sequential"}


def enter(walk: Walk, function: Function, args: tuple[Value, ...], words: dict[str, Value]) -> Value:
    """Walk through a function with the arguments it gets, and return what it returns."""
    node = function.node
    if node in walk.active or len(walk.active) >= DEEP:
        return computed(id(node), rescaled=True)
    attributes = function.owner.attributes if function.owner is not None else None
    scope = Scope(function.scope, attributes)
    bind(scope, node.args, args, words, function.owner)
    if isinstance(node, ast.Lambda):
        with walk.naming(scope):
            return value_of(walk, node.body)
    if is_generator(node):
        endless = any(isinstance(each, ast.While) and getattr(each.test, "value", False) for each in nodes_in(node))
        return Rows(None, cut=_gives_windows(node), endless=endless)
    return run_function(walk, node, scope)


def run_function(walk: Walk, node: ast.FunctionDef | ast.AsyncFunctionDef, scope: Scope) -> Value:
    """Walk through a function's body; return what it returns, on whichever way."""
    walk.entered.add(node)
    walk.active.append(node)
    walk.returned.append([])
    try:
        with walk.naming(scope):
            run_block(walk, node.body)
    finally:
        walk.active.pop()
        values = walk.returned.pop()
    result: Value | None = None
    for value in values:
        result = value if result is None else join(node.name, result, value)
    return result if result is not None else Unknown()


def bind(
    scope: Scope, arguments: ast.arguments, args: tuple[Value, ...], words: dict[str, Value], owner: Object | None
) -> None:
    """Give parameters their arguments; those that got none are known by their names."""
    names = [arg.arg for arg in (*arguments.posonlyargs, *arguments.args)]
    if owner is not None and names:
        scope.variables[names[0]] = owner
        names = names[1:]
    for name in (*names, *(arg.arg for arg in arguments.kwonlyargs)):
        scope.variables[name] = by_name(name)
    for name, value in (*zip(names, args, strict=False), *words.items()):
        if name in scope.variables and not (isinstance(value, Unknown) and not value.text):
            scope.variables[name] = value


def make(walk: Walk, of: Class, args: tuple[Value, ...], words: dict[str, Value]) -> Value:
    """Return an object of a class of the file: what its bases say it is, or one whose methods can be followed."""
    bases = walk.program.bases(of.node)
    if bases & _MODULES:
        role = Role.CRITERION if of.node.name.lower().endswith(("loss", "criterion")) else Role.MODEL
        return Thing(role, of.node.name, of.node)
    if any(base.endswith("Optimizer") for base in bases):
        return Thing(Role.OPTIMIZER, of.node.name, of.node)
    if any("Dataset" in base for base in bases):
        return Rows(None)
    return new_object(walk, of, args, words)


def new_object(walk: Walk, of: Class, args: tuple[Value, ...], words: dict[str, Value]) -> Object:
    """Return an object with the attributes that its `__init__` sets."""
    made = Object(of.node, Scope())
    init = walk.program.method(of.node, "__init__")
    if init is not None:
        enter(walk, Function(init, of.scope, made), args, words)
    return made


def is_generator(node: ast.AST) -> bool:
    """Tell whether a function yields; one inside it may, without making it one."""
    yields = [each for each in nodes_in(node) if isinstance(each, ast.Yield | ast.YieldFrom)]
    if not yields:
        return False
    inner = {id(below) for each in nodes_in(node)[1:] if isinstance(each, Def) for below in nodes_in(each)}
    return any(id(each) not in inner for each in yields)


def _gives_windows(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(word in node.name for word in ("chunk", "window", "batched", "micro", "split", "group"))
