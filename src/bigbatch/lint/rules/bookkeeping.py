"""BB5: what is done with the loss besides backward."""

from collections.abc import Iterator

from bigbatch.lint.finding import Severity
from bigbatch.lint.loops.facts import Fact
from bigbatch.lint.reading.events import Kind
from bigbatch.lint.reading.frames import Inside
from bigbatch.lint.rules.rule import Hit, Rule, Script


def _keeps_graph(script: Script) -> Iterator[Hit]:
    for loop in script.loops:
        backwards = [loss.origins for _, loss in loop.losses()]
        for fact in loop.of(Kind.KEEP):
            if fact.event.within(loop.loop) is not None and _outlives(fact, backwards):
                yield Hit(fact.node, f"{fact.event.subject or 'it'} keeps the graph of every loss that is added to it")


def _outlives(fact: Fact, backwards: list[frozenset[object]]) -> bool:
    """Tell whether what is kept is the loss of a backward, and is no part of it: a loss made of several terms is."""
    if any(isinstance(frame, Inside) and frame.role in {"no_grad", "inference_mode"} for frame in fact.event.frames):
        return False
    kept = fact.event.loss.live if fact.event.loss is not None else frozenset()
    part = any(id(fact.node) in origins or fact.event.subject in origins for origins in backwards)
    return not part and any(kept & origins for origins in backwards)


RULES = (
    Rule(
        "BB501",
        "running-loss-keeps-graph",
        Severity.ERROR,
        "add loss.detach(), and read it once per window or epoch",
        _keeps_graph,
    ),
)
