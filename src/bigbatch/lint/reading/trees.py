"""All nodes below a node, looked up once: walking over a tree is most of what reading it costs."""

import ast

_MARKS = (ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop)  # they say how, and hold nothing


def nodes_in(node: ast.AST) -> list[ast.AST]:
    """Return a node and all nodes below it, outermost first. The list is kept on the node, and lives as long as it."""
    kept: list[ast.AST] | None = node.__dict__.get("_nodes_in")
    if kept is not None:
        return kept
    found: list[ast.AST] = [node]
    for each in found:  # it grows while it is walked over
        for name in each._fields:
            value = getattr(each, name, None)
            if isinstance(value, ast.AST):
                if not isinstance(value, _MARKS):
                    found.append(value)
            elif isinstance(value, list):
                found += [part for part in value if isinstance(part, ast.AST)]
    node.__dict__["_nodes_in"] = found
    return found
