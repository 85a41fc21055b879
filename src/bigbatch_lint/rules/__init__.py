"""The rules, and what they find in a file."""

from bigbatch_lint.rules.find import find
from bigbatch_lint.rules.rule_set import REMOVED, RULES

__all__ = ["REMOVED", "RULES", "find"]
