"""All rules, by their codes; one file per family."""

from collections.abc import Iterator

from bigbatch.lint.finding import Severity
from bigbatch.lint.rules import bookkeeping, layers, losses, placement, ranks, windows
from bigbatch.lint.rules.rule import Hit, Rule, Script


def _nothing(_: Script) -> Iterator[Hit]:
    """BB900 is not looked for: it is what is said of a file that nothing could be looked for in."""
    yield from ()


UNREADABLE = Rule("BB900", "unreadable", Severity.ERROR, "make it a file that Python, or Jupyter, can read", _nothing)
RULES: dict[str, Rule] = {
    rule.code: rule
    for rule in (
        *windows.RULES,
        *losses.RULES,
        *placement.RULES,
        *ranks.RULES,
        *bookkeeping.RULES,
        *layers.RULES,
        UNREADABLE,
    )
}
