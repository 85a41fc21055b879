"""From what happens to training loops: which loop is over micro-batches, what its windows are, what belongs to it."""

import ast

from bigbatch.lint.loops.cadence import Cadence, cadence, conditions, happens
from bigbatch.lint.loops.facts import Fact, Shape, Tail, TrainingLoop
from bigbatch.lint.loops.windows import Windows, windows_of
from bigbatch.lint.reading.conditions import Due, Last, Moment, atoms
from bigbatch.lint.reading.events import Event, Kind, Via
from bigbatch.lint.reading.places import Loop, LoopKind
from bigbatch.lint.reading.roots import Story
from bigbatch.lint.reading.values import Number


def training_loops(story: Story) -> list[TrainingLoop]:
    """Return the training loops of a story; one that cannot be understood is left out."""
    loops: list[Loop] = []
    for event in story.events:
        if event.kind is Kind.BACKWARD:
            loop = _loop_of(event)
            if loop is not None and loop not in loops:
                loops.append(loop)
    found = (_training_loop(story, loop) for loop in loops)
    return [each for each in found if each is not None]


def _loop_of(event: Event) -> Loop | None:
    """Return the innermost loop around a backward whose rounds make the loss, not one over finished losses."""
    for loop in reversed(event.loops()):
        names = event.loss.origins if event.loss is not None else frozenset()
        if not loop.targets & names:
            return loop
    return None


def _training_loop(story: Story, loop: Loop) -> TrainingLoop | None:
    inside = [event for event in story.events if event.within(loop) is not None]
    backwards = [event for event in inside if event.kind is Kind.BACKWARD and _loop_of(event) is loop]
    if any(event.via is Via.ENGINE for event in inside):
        return _of_engine(loop, backwards, [event for event in inside if event.kind is Kind.KEEP])
    around = _around(backwards[0], loop)
    outside = _outside(story, inside, around)
    windows = windows_of(loop, inside, outside, backwards)
    if windows is None:
        return None
    facts = [*(_inner(event, loop, windows) for event in inside), *(_outer(e, inside, windows) for e in outside)]
    facts.sort(key=lambda fact: fact.event.order)
    tail, node = _tail(story, loop, windows, facts)
    return TrainingLoop(loop, around, windows.shape, windows.every, tuple(facts), tail, node)


def _of_engine(loop: Loop, backwards: list[Event], keeps: list[Event]) -> TrainingLoop:
    """Return a loop whose engine does all but compute the loss: nothing but the loss is looked at."""
    events = sorted((*backwards, *keeps), key=lambda event: event.order)
    facts = tuple(Fact(event, Cadence.UNKNOWN, None, None) for event in events)
    return TrainingLoop(loop, (), Shape.FRAMEWORK, backwards[0].divides_by, facts, Tail.UNKNOWN, None)


def _around(event: Event, loop: Loop) -> tuple[Loop, ...]:
    loops = event.loops()
    return loops[: loops.index(loop)]


def _outside(story: Story, inside: list[Event], around: tuple[Loop, ...]) -> list[Event]:
    """Return what happens beside the loop, in the same rounds of the loops around it."""
    training = {loop for event in story.events if event.kind is Kind.BACKWARD for loop in event.loops()}
    return [
        event
        for event in story.events
        if event not in inside
        and event.loops()[: len(around)] == around
        and not training & set(event.loops()[len(around) :])
    ]


def _inner(event: Event, loop: Loop, windows: Windows) -> Fact:
    frames = event.within(loop) or ()
    around = conditions(frames)
    often = cadence(around, windows.every)
    held = windows.shape is Shape.FRAMEWORK and event.prepared is not False
    if held and often is Cadence.MICRO and event.kind in {Kind.STEP, Kind.ZERO, Kind.SCHEDULER}:
        return Fact(event, Cadence.WINDOW, in_tail=True, at_first=False)  # Accelerate passes over the calls in between
    tail = happens(around, Moment.TAIL, windows.every)
    return Fact(event, often, tail, happens(around, Moment.FIRST, windows.every))


def _outer(event: Event, inside: list[Event], windows: Windows) -> Fact:
    """Say when something beside the loop happens: in a nested one once per window, elsewhere once per pass."""
    before = event.order < inside[0].order
    frames = event.frames[len(event.frames) - _own(event) :]
    around = [c for c in conditions(frames) if not any(isinstance(atom, Due | Last) for atom in atoms(c))]
    sure = cadence(around, windows.every) is Cadence.MICRO
    if windows.shape is Shape.NESTED:
        often = (Cadence.START if before else Cadence.WINDOW) if sure else Cadence.UNKNOWN
    else:
        often = Cadence.BEFORE if before else Cadence.AFTER
    return Fact(event, often, None, None)


def _own(event: Event) -> int:
    """Return how many frames stand around an event inside its innermost loop."""
    frames = list(event.frames)
    for place, frame in enumerate(reversed(frames)):
        if isinstance(frame, Loop):
            return place
    return len(frames)


def _tail(story: Story, loop: Loop, windows: Windows, facts: list[Fact]) -> tuple[Tail, ast.AST | None]:
    """Say what becomes of the micro-batches that are left over."""
    if windows.shape is Shape.NESTED and _cut_from_loader(loop, facts) and not story.even:
        return Tail.STEPPED, None
    steps = [fact for fact in facts if fact.event.kind is Kind.STEP]
    if windows.shape is not Shape.MODULO or story.even or windows.every is None:
        return Tail.UNKNOWN, None
    later = [fact for fact in steps if fact.cadence is Cadence.AFTER]
    if later:
        return Tail.STEPPED, later[0].node
    stepped = [fact for fact in steps if fact.in_tail is not False and fact.cadence is not Cadence.BEFORE]
    if stepped:
        sure = all(fact.in_tail for fact in stepped)
        return (Tail.STEPPED if sure else Tail.UNKNOWN), stepped[0].condition() or stepped[0].node
    if windows.carried or loop in story.stopped or not _can_be_left_over(loop, windows.every) or not steps:
        return Tail.UNKNOWN, None
    return Tail.DROPPED, windows.node or steps[0].node


def _cut_from_loader(loop: Loop, facts: list[Fact]) -> bool:
    """Tell a window that `batched(loader, n)` gives, the last of which is what remains."""
    outer = facts[0].event.loops()
    around = next((each for each in outer if loop.iterable in each.targets), None)
    return around is not None and "batched(" in around.iterable


def _can_be_left_over(loop: Loop, every: Number) -> bool:
    """Tell whether a pass over the loop may end in mid-window: never, if its length is a multiple."""
    length = loop.length
    if loop.kind is LoopKind.FRAMEWORK:
        return loop.framework == "lightning"
    if loop.kind in {LoopKind.ENDLESS, LoopKind.PIECES}:
        return False
    if length is not None and length.known is not None and every.known:
        return bool(length.known % every.known)
    if loop.kind is LoopKind.COUNTED:
        if length is not None and length.involves(every):  # `range(n - n % steps)`: who counts so knows of the rest
            return False
        return length is not None and (length.text.startswith("len(") or "batches" in length.text)
    return True
