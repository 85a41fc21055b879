"""Patches as `git apply` reads them, of scripts and notebooks."""

import ast
from dataclasses import dataclass
from difflib import unified_diff

from bigbatch.lint.checking import read_script
from bigbatch.lint.loops.facts import TrainingLoop
from bigbatch.lint.patching.arguments import NotSimple
from bigbatch.lint.patching.edits import Edit, Text
from bigbatch.lint.patching.on_disk import on_disk
from bigbatch.lint.patching.rewriting import importing, rewritten
from bigbatch.lint.patching.simple import plan
from bigbatch.lint.reading.trees import nodes_in
from bigbatch.lint.rules import RULES
from bigbatch.lint.rules.rule import Script
from bigbatch.lint.sources import Source

_NORMS = RULES["BB601"]


@dataclass(frozen=True)
class Patch:
    """A file before and after, and why some of its loops are as they were."""

    path: str
    before: str
    after: str
    refused: tuple[tuple[int, str], ...]  # line, why

    def diff(self) -> str:
        """Return the change as a patch; nothing if there is none."""
        name = self.path.removeprefix("/")
        lines = unified_diff(_lines(self.before), _lines(self.after), f"a/{name}", f"b/{name}")
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _lines(text: str) -> list[str]:
    """Return the lines with their ends; of all that Python calls an end of line, patches know one."""
    parts = text.split("\n")
    return [f"{part}\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def patch(source: Source) -> Patch:
    """Rewrite all loops of a file that accumulate and are simple enough."""
    raw = source.raw
    script = read_script(source.tree)
    parents = {child: node for node in nodes_in(source.tree) for child in ast.iter_child_nodes(node)}
    text = Text(source.text)
    edits: list[Edit] = []
    refused: list[tuple[int, str]] = []
    for loop in {id(loop.loop.node): loop for loop in script.loops if loop.accumulates and loop.is_seen}.values():
        made, why = _changes(script, loop, text, parents, edits)
        edits += made
        refused += [(getattr(loop.loop.node, "lineno", 1), why)] if why else []
    if not edits:
        return Patch(source.path, raw, raw, tuple(refused))
    importer = importing(text, source.tree)
    try:
        after = on_disk(source, raw, text, [*edits, *([importer] if importer is not None else [])])
    except NotSimple as why:
        return Patch(source.path, raw, raw, (*refused, (1, str(why))))
    return Patch(source.path, raw, after, tuple(refused))


def _changes(
    script: Script, loop: TrainingLoop, text: Text, parents: dict[ast.AST, ast.AST], earlier: list[Edit]
) -> tuple[list[Edit], str]:
    """Return the changes to one loop, or why there are none."""
    try:
        _check_layers(script)
        made = rewritten(text, plan(script, loop, parents), parents, _free_name(script, len(earlier)))
        _check_parses(text, [*earlier, *made])
    except NotSimple as why:
        return [], str(why)
    return made, ""


def _free_name(script: Script, earlier: int) -> str:
    """Return a name for an accumulator that nothing in the file has."""
    names = ["accumulator", *(f"accumulator_{number}" for number in range(2, 100))]
    return next(name for name in names[min(earlier, 1) :] if name not in script.program.words)


def _check_layers(script: Script) -> None:
    if any(True for _ in _NORMS.check(script)):
        raise NotSimple("it has BatchNorm, which Accumulator refuses: see BigStep")


def _check_parses(text: Text, edits: list[Edit]) -> None:
    """Never hand out what Python cannot read."""
    after = text.after(edits)
    try:
        if after is not None:
            ast.parse(after)
            return
    except SyntaxError:
        pass
    raise NotSimple("the rewritten loop would not parse")
