"""The rules, and what they find in a file."""

import ast
from collections.abc import Iterator

from bigbatch_lint.reading.module import Module, mentions
from bigbatch_lint.reading.names import forget_nodes
from bigbatch_lint.rules.rule_set import RULES
from bigbatch_lint.rules.windows import training_loops
from bigbatch_lint.running.entry import run_file

__all__ = ["RULES", "find"]


def find(tree: ast.Module) -> Iterator[tuple[str, ast.AST, str]]:
    """Yield what all rules find in a file, each place once."""
    forget_nodes()
    mentions.cache_clear()
    module, seen = Module(tree), set[tuple[str, ast.AST]]()
    for events, steps in () if module.is_of_another_library else run_file(module):
        for loop in training_loops(events, module, steps):
            for code, rule in RULES.items():
                for node, message in rule.check(loop) if loop.shape in rule.shapes else ():
                    if (code, node) not in seen:
                        seen.add((code, node))
                        yield code, node, message
