"""From a syntax tree to what the rules find in it."""

import ast
from collections.abc import Iterator

from bigbatch_lint.reading.module import Module
from bigbatch_lint.rules.rule_set import RULES, Hit
from bigbatch_lint.rules.windows import training_loops
from bigbatch_lint.running.entry import run_file


def find(tree: ast.Module) -> Iterator[tuple[str, Hit]]:
    """Yield what all rules find in a file, each place once."""
    module = Module(tree)
    if module.is_of_another_library:
        return
    seen: set[tuple[str, ast.AST]] = set()
    for events, steps in run_file(module):
        for loop in training_loops(events, module, steps):
            for code, rule in RULES.items():
                for hit in rule.check(loop) if loop.shape in rule.shapes else ():
                    if (code, hit.node) not in seen:
                        seen.add((code, hit.node))
                        yield code, hit
