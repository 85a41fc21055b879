"""All rules, by their codes; one file per family."""

from bigbatch.lint.rules import bookkeeping, layers, losses, placement, ranks, windows
from bigbatch.lint.rules.rule import Rule

RULES: dict[str, Rule] = {
    rule.code: rule
    for rule in (
        *windows.RULES,
        *losses.RULES,
        *placement.RULES,
        *ranks.RULES,
        *bookkeeping.RULES,
        *layers.RULES,
    )
}
# Rules of version 0.1, and what is there instead.
REMOVED = {
    "BB305": "`bigbatch.scale_lr` changes the learning rate for a larger batch.",
    "BB502": "Add up `loss.detach()`, and read the sum once per window.",
    "BB900": "A file that cannot be read is an error on stderr, and the exit status is 2. Leave it out with --exclude.",
}
