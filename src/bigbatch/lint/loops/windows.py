"""What makes a window in a loop: a condition on its rounds, the rounds of an inner loop, or a framework."""

import ast
from dataclasses import dataclass

from bigbatch.lint.loops.cadence import Cadence, cadence, conditions, happens
from bigbatch.lint.loops.facts import Shape
from bigbatch.lint.reading.conditions import Condition, Due, Moment, Synced, atoms
from bigbatch.lint.reading.events import Event, Kind, Via
from bigbatch.lint.reading.frames import Guard, Inside
from bigbatch.lint.reading.places import Loop, LoopKind
from bigbatch.lint.reading.values import Number
from bigbatch.lint.reading.vocabulary import PIECES, counts_micro_batches


@dataclass(frozen=True)
class Windows:
    """How a loop accumulates, and how many micro-batches at a time."""

    shape: Shape
    every: Number | None
    node: ast.AST | None = None  # the condition
    carried: bool = False  # the count goes on from one pass to the next


def windows_of(loop: Loop, inside: list[Event], outside: list[Event], backwards: list[Event]) -> Windows | None:
    """Return what a loop's windows are; None if that cannot be told."""
    framework = _framework(backwards)
    if framework is not None:
        return framework
    steps = [event for event in inside if event.kind is Kind.STEP]
    if not steps:
        return _nested(loop, inside, outside, backwards)
    dues = _dues(loop, steps)
    if not dues and _is_announced(loop, backwards):
        return Windows(Shape.NESTED, loop.length)
    dues = dues or _dues(loop, [e for e in inside if e.kind in {Kind.ZERO, Kind.CLIP, Kind.UPDATE}])
    if dues:
        alike = all(due.every.text == dues[0][0].every.text for due, _ in dues)
        return _modulo(loop, dues[0], steps, backwards) if alike else None
    return _plain(loop, steps, backwards)


def _plain(loop: Loop, steps: list[Event], backwards: list[Event]) -> Windows | None:
    """Tell a loop that steps when a framework says so, or in every round; any other is not understood."""
    if any(isinstance(atom, Synced) for step in steps for c in conditions(step.frames) for atom in atoms(c)):
        return Windows(Shape.FRAMEWORK, backwards[0].divides_by)
    often = [cadence(conditions(step.within(loop) or ()), None) for step in steps]
    return Windows(Shape.PLAIN, _announced(backwards)) if all(each is Cadence.MICRO for each in often) else None


def _framework(backwards: list[Event]) -> Windows | None:
    for event in backwards:
        accumulated = any(isinstance(frame, Inside) and frame.role == "accumulate" for frame in event.frames)
        if accumulated or event.via in {Via.LIGHTNING, Via.TRANSFORMERS}:
            return Windows(Shape.FRAMEWORK, event.divides_by)
    return None


def _dues(loop: Loop, events: list[Event]) -> list[tuple[Due, ast.AST]]:
    """Return the conditions on rounds of this loop, with where they stand."""
    found: list[tuple[Due, ast.AST]] = []
    for event in events:
        for frame in event.within(loop) or ():
            if isinstance(frame, Guard):
                found += [(atom, frame.node) for atom in _of_loop(frame.condition, loop)]
    return found


def _of_loop(condition: Condition, loop: Loop) -> list[Due]:
    return [atom for atom in atoms(condition) if isinstance(atom, Due) and atom.loop in {loop, None}]


def _modulo(loop: Loop, found: tuple[Due, ast.AST], steps: list[Event], backwards: list[Event]) -> Windows | None:
    due, node = found
    between = [happens(conditions(event.within(loop) or ()), Moment.MIDDLE, due.every) for event in backwards]
    if all(each is False for each in between):
        return None  # a loop that trains with every n-th batch, and accumulates nothing
    if _alternate(loop, steps, backwards, due.every):
        return None
    return Windows(Shape.MODULO, due.every, node, due.carried)


def _alternate(loop: Loop, steps: list[Event], backwards: list[Event], every: Number) -> bool:
    """Tell a GAN's loop: one optimizer steps always, the other, with a backward of its own, now and then."""
    often = {step: cadence(conditions(step.within(loop) or ()), every) for step in steps}
    always = [step for step in steps if often[step] is Cadence.MICRO]
    sometimes = [step for step in steps if often[step] is not Cadence.MICRO]
    return any(
        step.subject != other.subject or _innermost(step) in {_innermost(backward) for backward in backwards}
        for step in sometimes
        for other in always
    )


def _innermost(event: Event) -> Guard | None:
    return next((frame for frame in reversed(event.frames) if isinstance(frame, Guard)), None)


def _is_announced(loop: Loop, backwards: list[Event]) -> bool:
    """Tell an inner loop whose rounds are said to be one window, though it may step in each."""
    if loop.length is None or not _is_inner(loop, backwards):
        return False
    divisors = [divisor for event in backwards if event.loss is not None for divisor in event.loss.most]
    return counts_micro_batches(loop.length.text) or any(divisor.same(loop.length) for divisor in divisors)


def _is_inner(loop: Loop, backwards: list[Event]) -> bool:
    """Tell a loop over the micro-batches of one window from one over a loader, an epoch or anything else."""
    if loop.kind is LoopKind.PIECES:
        return True
    if loop.kind is not LoopKind.COUNTED or loop.length is None:
        return False
    length = loop.length
    divisors = [divisor for event in backwards if event.loss is not None for divisor in event.loss.most]
    announced = counts_micro_batches(length.text) or any(PIECES.search(name) for name in loop.targets)
    return announced or any(divisor.same(length) and divisor.atoms for divisor in divisors)


def _nested(loop: Loop, inside: list[Event], outside: list[Event], backwards: list[Event]) -> Windows | None:
    """Look for the step after the loop."""
    later = [event for event in outside if event.kind is Kind.STEP and event.order > inside[-1].order]
    literal = loop.kind is LoopKind.COUNTED and loop.length is not None and loop.length.known is not None
    if not later or not (_is_inner(loop, backwards) or literal or _announced(backwards) is not None):
        return None
    return Windows(Shape.NESTED, loop.length)


def _announced(backwards: list[Event]) -> Number | None:
    """Return the number of steps that a loss is divided by, if its name says that this is what it is."""
    for event in backwards:
        for divisor in event.loss.most if event.loss is not None else ():
            if counts_micro_batches(divisor.text) or any(map(counts_micro_batches, divisor.atoms)):
                return divisor
    return None
