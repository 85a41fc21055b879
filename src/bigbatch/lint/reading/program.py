"""A file at a glance: what it imports, which functions call which, and words that tell what its data are like."""

import ast
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bigbatch.lint.reading.trees import nodes_in
from bigbatch.lint.reading.vocabulary import PADDED_MODELS

Def = ast.FunctionDef | ast.AsyncFunctionDef
_PADDING = {
    "pad_token",
    "pad_token_id",
    "DataCollatorForSeq2Seq",
    "DataCollatorWithPadding",
    "pad_sequence",
    "DataCollatorForLanguageModeling",
}
_IGNORED = 100  # labels of -100 are left out of a cross-entropy


@dataclass
class Program:
    """What one look over the whole tree gathers."""

    tree: ast.Module
    imports: dict[str, str] = field(default_factory=dict)  # name here → name there, dotted
    functions: list[Def] = field(default_factory=list)
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    calls: list[ast.Call] = field(default_factory=list)
    called: set[str] = field(default_factory=set)  # last parts of what is called
    words: set[str] = field(default_factory=set)  # names and attributes
    ignores_labels: bool = False
    pads: bool = False
    padded_model: bool = False

    def full_name(self, text: str) -> str:
        """Return `torch.optim.AdamW` for what is called `optim.AdamW` here."""
        first, dot, rest = text.partition(".")
        return self.imports.get(first, first) + dot + rest

    def method(self, owner: ast.ClassDef, name: str) -> Def | None:
        """Return a method of a class, or of the bases that are in this file."""
        seen: set[str] = set()
        waiting = [owner]
        while waiting:
            node = waiting.pop(0)
            if node.name in seen:
                continue
            seen.add(node.name)
            for statement in node.body:
                if isinstance(statement, Def) and statement.name == name:
                    return statement
            waiting += [self.classes[b.id] for b in node.bases if isinstance(b, ast.Name) and b.id in self.classes]
        return None

    def bases(self, node: ast.ClassDef) -> set[str]:
        """Return the last parts of the names of all bases, those in this file followed."""
        found: set[str] = set()
        waiting = [node]
        while waiting:
            for base in waiting.pop().bases:
                name = dotted(base).rpartition(".")[2]
                if name and name not in found:
                    found.add(name)
                    waiting += [self.classes[name]] if name in self.classes else []
        return found


def survey(tree: ast.Module) -> Program:
    """Look over a tree once."""
    program = Program(tree)
    for node in nodes_in(tree):
        looker = _LOOKERS.get(type(node))
        if looker:
            looker(program, node)
    return program


def dotted(node: ast.AST) -> str:
    """Return `a.b.c` or `a.b['c']` as written; nothing for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        base = dotted(node.value)
        return f"{base}[{node.slice.value!r}]" if base else ""
    return ""


def _look_at_call(program: Program, node: ast.Call) -> None:
    program.calls.append(node)
    name = node.func.attr if isinstance(node.func, ast.Attribute) else dotted(node.func)
    program.called.add(name)
    if any(word.arg == "padding" and not _is_false(word.value) for word in node.keywords):
        program.pads = True
    if name == "from_pretrained" and isinstance(node.func, ast.Attribute):
        program.padded_model |= bool(PADDED_MODELS.search(dotted(node.func.value)))
    # A function that is handed over may be called by whoever gets it.
    program.called |= {arg.id for arg in node.args if isinstance(arg, ast.Name)} if name == "step" else set()


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and not node.value


def _look_at_import(program: Program, node: ast.Import) -> None:
    for alias in node.names:
        here = alias.asname or alias.name.partition(".")[0]
        program.imports[here] = alias.name if alias.asname else here


def _look_at_import_from(program: Program, node: ast.ImportFrom) -> None:
    for alias in node.names:
        program.imports[alias.asname or alias.name] = f"{node.module or ''}.{alias.name}"


def _look_at_class(program: Program, node: ast.ClassDef) -> None:
    program.classes[node.name] = node


def _look_at_function(program: Program, node: Def) -> None:
    program.functions.append(node)


def _look_at_name(program: Program, node: ast.Name) -> None:
    program.words.add(node.id)
    program.pads |= node.id in _PADDING
    program.padded_model |= bool(PADDED_MODELS.search(node.id))


def _look_at_attribute(program: Program, node: ast.Attribute) -> None:
    program.words.add(node.attr)
    program.pads |= node.attr in _PADDING


def _look_at_minus(program: Program, node: ast.UnaryOp) -> None:
    if isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        program.ignores_labels |= node.operand.value == _IGNORED and isinstance(node.operand.value, int)


_LOOKERS: dict[type[ast.AST], Callable[[Program, Any], None]] = {
    ast.Call: _look_at_call,
    ast.Import: _look_at_import,
    ast.ImportFrom: _look_at_import_from,
    ast.ClassDef: _look_at_class,
    ast.FunctionDef: _look_at_function,
    ast.AsyncFunctionDef: _look_at_function,
    ast.Name: _look_at_name,
    ast.Attribute: _look_at_attribute,
    ast.UnaryOp: _look_at_minus,
}
