"""The rules, and what they find in a file."""

from bigbatch_lint.rules.rule_set import RULES, find

__all__ = ["RULES", "find"]
