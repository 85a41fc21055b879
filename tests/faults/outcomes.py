"""What a campaign of faults is made of: cases, and what came of them."""

from dataclasses import asdict, dataclass
from typing import Any

# fine: all is as promised, and training went on to the same weights. wrong: to others, without a word. lost: a batch,
# a window or an interrupt is gone. leaked: something was left changed. unclear: an error that tells nothing.
OUTCOMES = ("fine", "not reached", "wrong", "lost", "leaked", "hang", "unclear")


@dataclass(frozen=True)
class Case:
    """One fault; everything that is needed to run it again."""

    part: str  # "single" or "ranks"
    number: int  # its place in the draw
    seed: int  # the campaign's
    entrance: str  # "Accumulator" or "BigStep"
    mode: str
    place: str  # "op", "call", "forward", ...
    error: str
    at: int = 0  # which time, where that is part of the draw

    def to_json(self) -> dict[str, Any]:
        """Return it in plain types."""
        return asdict(self)


@dataclass(frozen=True)
class Outcome:
    """What came of a case."""

    kind: str  # one of OUTCOMES
    words: str = ""  # what was seen, on one line

    def __post_init__(self) -> None:
        """Take no kind that nobody counts."""
        assert self.kind in OUTCOMES, self.kind
