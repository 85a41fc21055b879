"""The loop with `Accumulator`, as changes to the text."""

import ast

from bigbatch.lint.patching.arguments import NotSimple
from bigbatch.lint.patching.edits import Edit, Text
from bigbatch.lint.patching.simple import Plan
from bigbatch.lint.reading.changes import assigned_in
from bigbatch.lint.reading.program import dotted
from bigbatch.lint.reading.trees import nodes_in

IMPORT = "from bigbatch import Accumulator"


def rewritten(text: Text, plan: Plan, parents: dict[ast.AST, ast.AST], name: str = "accumulator") -> list[Edit]:
    """Return the changes; raise if they cannot be made cleanly."""
    edits: list[Edit] = []
    conditions = _conditions(plan, parents)
    result = "update" if "update" not in plan.taken else "completed"
    for condition, rest in conditions.items():
        if rest:
            edits.append(text.instead(condition.test, f"{result} is not None"))
        else:
            edits.append(_taken_out(text, condition))
    gone = {id(each) for condition, rest in conditions.items() if not rest for each in nodes_in(condition)}
    edits += [_taken_out(text, statement) for statement in plan.removed if id(statement) not in gone]
    edits += _divisions(text, plan, parents)
    edits.append(_backward(text, plan, name, result if any(conditions.values()) else ""))
    if plan.over:
        edits.append(_head(text, plan, parents, name))
    edits.append(_made(text, plan, name))
    return edits


def _taken_out(text: Text, statement: ast.stmt) -> Edit:
    if not text.is_alone(statement):
        raise NotSimple(f"line {statement.lineno} holds more than one statement")
    return text.without(statement)


def _conditions(plan: Plan, parents: dict[ast.AST, ast.AST]) -> dict[ast.If, list[ast.stmt]]:
    """Return each `if` that loses statements, with those that it keeps."""
    found: dict[ast.If, list[ast.stmt]] = {}
    removed = {id(statement) for statement in plan.removed}
    for statement in plan.removed:
        parent = parents.get(statement)
        if isinstance(parent, ast.If):
            found[parent] = [each for each in parent.body if id(each) not in removed]
    return found


def _divisions(text: Text, plan: Plan, parents: dict[ast.AST, ast.AST]) -> list[Edit]:
    edits: list[Edit] = []
    for node in plan.divisions:
        if id(node) in {id(each) for each in nodes_in(plan.backward)}:
            continue  # written anew with the backward
        statement = node if isinstance(node, ast.AugAssign) else parents[node]
        if isinstance(statement, ast.Assign) and isinstance(node, ast.BinOp):
            itself = len(statement.targets) == 1 and dotted(statement.targets[0]) == dotted(node.left) != ""
            edits += [_nothing(text, statement, parents) if itself else text.instead(node, _left(text, node))]
        elif isinstance(statement, ast.AugAssign):
            edits.append(_nothing(text, statement, parents))
        else:
            raise NotSimple("its loss is divided inside a longer expression")
    return edits


def _nothing(text: Text, statement: ast.stmt, parents: dict[ast.AST, ast.AST]) -> Edit:
    """Take out `loss = loss / n`, with an `if n > 1:` that holds nothing else."""
    parent = parents.get(statement)
    if isinstance(parent, ast.If) and len(parent.body) == 1:
        if parent.orelse:
            raise NotSimple("its loss is divided in one branch of an if")
        return _taken_out(text, parent)
    return _taken_out(text, statement)


def _left(text: Text, node: ast.BinOp) -> str:
    """Return what is divided, with the parentheses that a longer expression needs to stand alone."""
    written = text.of(node.left)
    return f"({written})" if "\n" in written else written


def _backward(text: Text, plan: Plan, name: str, result: str) -> Edit:
    loss = plan.loss
    if isinstance(loss, ast.BinOp) and loss in plan.divisions:
        loss = loss.left
    return text.instead(plan.backward, f"{f'{result} = ' if result else ''}{name}.backward({text.of(loss)})")


def _head(text: Text, plan: Plan, parents: dict[ast.AST, ast.AST], name: str) -> Edit:
    """Wrap the loader; a number that nothing needs any more goes."""
    source = plan.loop.iter
    match source, plan.loop.target:
        case ast.Call(func=ast.Name(id="enumerate"), args=[inner, *_]), ast.Tuple(elts=[number, item]):
            pass
        case _:
            return text.instead(source, f"{name}.over({text.of(source)})")
    removed = {id(each) for statement in plan.removed for each in nodes_in(statement)}
    removed |= {id(each) for condition in _conditions(plan, parents) for each in nodes_in(condition.test)}
    used = any(
        isinstance(each, ast.Name) and each.id == dotted(number) and id(each) not in removed
        for statement in plan.loop.body
        for each in nodes_in(statement)
    )
    if used:
        return text.instead(inner, f"{name}.over({text.of(inner)})")
    start, _ = text.span(plan.loop.target)
    _, end = text.span(source)
    target = text.of(item)
    target = target[1:-1] if isinstance(item, ast.Tuple) and target.startswith("(") and len(item.elts) > 1 else target
    return Edit(start, end, text=f"{target} in {name}.over({text.of(inner)})")


def _made(text: Text, plan: Plan, name: str) -> Edit:
    """Make the accumulator above the outermost loop in which nothing changes that it is made of."""
    roots = {each.partition(".")[0] for each in plan.names} | plan.names
    for loop in (*plan.around, plan.loop):
        if not roots & assigned_in([loop]):
            return text.above(loop, f"{text.indent(loop)}{name} = Accumulator({plan.arguments})")
    raise NotSimple("model, optimizer or steps change while it runs")


def importing(text: Text, tree: ast.Module) -> Edit | None:
    """Import Accumulator below the other imports, unless that is done."""
    imports = [each for each in tree.body if isinstance(each, ast.Import | ast.ImportFrom)]
    ours = [each for each in imports if isinstance(each, ast.ImportFrom) and each.module == "bigbatch"]
    if any(alias.name == "Accumulator" for each in ours for alias in each.names):
        return None
    if imports:
        return text.below(imports[-1], IMPORT)
    first = next((each for each in tree.body if not _is_docstring(each)), None)
    return text.above(first, IMPORT, rank=0) if first is not None else None


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
