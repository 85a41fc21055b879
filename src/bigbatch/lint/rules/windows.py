"""BB1: the window itself. When gradients are cleared, when the optimizer steps, what becomes of the rest."""

import ast
from collections.abc import Iterator

from bigbatch.lint.finding import Severity
from bigbatch.lint.loops.cadence import Cadence
from bigbatch.lint.loops.facts import Fact, Shape, Tail, TrainingLoop
from bigbatch.lint.reading.conditions import Due, atoms
from bigbatch.lint.reading.events import Kind, Via
from bigbatch.lint.reading.frames import Guard
from bigbatch.lint.reading.trees import nodes_in
from bigbatch.lint.rules.rule import Hit, Rule, Script, of_loops

# With these in a file, Accelerate may be told otherwise than by a `with` that is seen.
_ACCUMULATING = {"accumulate", "sync_gradients", "_set_sync_gradients", "_do_sync", "gradient_state"}


def _zero_inside_window(script: Script) -> Iterator[Hit]:
    for loop in script.loops:
        if loop.accumulates and not loop.at(Kind.STEP, Cadence.MICRO):
            yield from _zero_with_every_micro_batch(loop)
            yield from _zero_before_step(script, loop)


def _zero_before_step(script: Script, loop: TrainingLoop) -> Iterator[Hit]:
    """Find a clear that the step follows at once: with anything else in between, gradients may come from there."""
    for zero in loop.at(Kind.ZERO, Cadence.WINDOW):
        between = [fact.node for fact in loop.of(Kind.CLIP, Kind.UNSCALE, Kind.ZERO)]
        for step in loop.at(Kind.STEP, Cadence.WINDOW):
            own = step.event.subject == zero.event.subject and step.event.via in {Via.TORCH, Via.SCALER}
            closure = step.event.via is Via.TORCH and getattr(step.node, "args", None)
            if own and not closure and _follows(script.program.tree, zero.node, step.node, between):
                yield Hit(zero.node, "gradients are cleared right before the step: it steps with none of them")


def _follows(tree: ast.Module, first: ast.AST, then: ast.AST, between: list[ast.AST]) -> bool:
    """Tell whether two calls are statements of one block, with nothing but some others in between."""
    for node in nodes_in(tree):
        body = getattr(node, "body", None)
        calls = [getattr(each, "value", None) for each in body] if isinstance(body, list) else []
        if first in calls and then in calls:
            start, end = calls.index(first), calls.index(then)
            return start < end and all(each in between for each in calls[start + 1 : end])
    return False


def _zero_with_every_micro_batch(loop: TrainingLoop) -> Iterator[Hit]:
    stepped = {fact.event.subject for fact in loop.of(Kind.STEP)}
    for fact in loop.at(Kind.ZERO, Cadence.MICRO, Cadence.REST):
        if len(stepped) <= 1 or fact.event.subject in stepped:
            yield Hit(
                fact.node,
                "gradients are cleared with every micro-batch, the step comes once per window: "
                f"only the last of {loop.steps_text()} micro-batches counts",
            )


def _step_every_micro_batch(script: Script) -> Iterator[Hit]:
    for loop in script.loops:
        yield from _never_accumulated(script, loop)
        announced = loop.accumulates or loop.every is not None
        for fact in loop.at(Kind.STEP, Cadence.MICRO) if announced else ():
            yield Hit(
                fact.node,
                f"the optimizer steps with every micro-batch, though a window of {loop.steps_text()} is announced: "
                "nothing is accumulated",
            )


def _never_accumulated(script: Script, loop: TrainingLoop) -> Iterator[Hit]:
    """Accelerate holds steps back inside `accumulate` alone; made with a number of steps, it divides by it anyway."""
    if loop.shape is not Shape.PLAIN or loop.every or not loop.is_seen or script.program.words & _ACCUMULATING:
        return
    told = [fact.event.divides_by for fact in loop.of(Kind.BACKWARD) if fact.event.via is Via.ACCELERATE]
    steps = told[0] if told else None
    if steps is not None and loop.of(Kind.BACKWARD)[0].event.divides:
        for fact in loop.at(Kind.STEP, Cadence.MICRO):
            yield Hit(
                fact.node,
                f"the optimizer steps with every micro-batch, with gradients divided by {steps.text}: "
                "without accelerator.accumulate nothing is accumulated",
            )


def _leftover_dropped(loop: TrainingLoop) -> Iterator[Hit]:
    if loop.tail is not Tail.DROPPED or loop.tail_node is None or loop.at(Kind.STEP, Cadence.MICRO):
        return
    steps, length = loop.steps_text(), loop.loop.length
    known = length.known if length is not None else None
    every = loop.every.known if loop.every is not None else None
    if known is not None and every:
        rest = f"the last {int(known % every)} of {int(known)} micro-batches are never stepped"
    else:
        rest = f"micro-batches left over after the last full window of {steps} are never stepped"
    leak = " and leak into the next epoch's first window" if _leaks(loop) else ""
    yield Hit(loop.tail_node, rest + leak)


def _leaks(loop: TrainingLoop) -> bool:
    """Tell whether gradients of a pass are still there in the next."""
    return bool(loop.around) and not loop.at(Kind.ZERO, Cadence.BEFORE, Cadence.AFTER)


def _leftover_as_whole(loop: TrainingLoop) -> Iterator[Hit]:
    if loop.at(Kind.STEP, Cadence.MICRO):
        return
    divided = [loss for _, loss in loop.losses() if any(number.fixed for number in loop.scaling(loss))]
    if loop.tail is Tail.STEPPED and divided and not loop.of(Kind.RESCALE):
        yield Hit(
            loop.tail_node or divided[0].divided_at[-1],
            f"a short last window is divided by {loop.steps_text()} too, as if it were full: its gradient is too small",
        )


def _off_by_one(loop: TrainingLoop) -> Iterator[Hit]:
    backwards = loop.of(Kind.BACKWARD)
    for fact in loop.at(Kind.STEP, Cadence.WINDOW):
        yield from _one_behind(loop, fact)
    for fact in loop.at(Kind.STEP, Cadence.START, Cadence.ODD):
        if loop.shape is Shape.MODULO and fact.event.order > backwards[0].event.order:
            first = "the first window holds one micro-batch" if fact.at_first else "the first window is one too long"
            yield Hit(
                fact.condition() or fact.node,
                f"the step comes with the first micro-batch of each {loop.steps_text()}, not with the last: {first}",
            )


def _one_behind(loop: TrainingLoop, step: Fact) -> Iterator[Hit]:
    """Find a step at a window's last micro-batch, before its own backward; at an unknown place it may be the first."""
    late = all(step.event.order < fact.event.order for fact in loop.of(Kind.BACKWARD))
    conditions = [frame.condition for frame in step.event.frames if isinstance(frame, Guard)]
    known = any(isinstance(atom, Due) and atom.phase == 0 for each in conditions for atom in atoms(each))
    if loop.shape is Shape.MODULO and late and known:
        yield Hit(
            step.condition() or step.node,
            "the step comes before the backward of its window's last micro-batch, which goes into the next window: "
            "the first one is one too short",
        )


def _never_zeroed(script: Script) -> Iterator[Hit]:
    for loop in script.loops:
        if not loop.is_seen or loop.shape is Shape.FRAMEWORK or loop.of(Kind.HANDED_ON):
            continue
        cleared = {f.event.subject for f in loop.of(Kind.ZERO) if f.cadence not in {Cadence.BEFORE, Cadence.AFTER}}
        steps = {f.event.subject: f for f in loop.of(Kind.STEP) if f.cadence is not Cadence.AFTER}
        for subject, fact in steps.items():
            # Clearing something else than another optimizer may clear this one's gradients too.
            if cleared <= steps.keys() - {subject} and subject not in loop.loop.assigned:
                often = "only outside the loop" if loop.of(Kind.ZERO) else "never"
                often = "never" if cleared else often
                yield Hit(fact.node, f"gradients are {often} cleared: every step also takes those of all steps before")
        if loop.shape is Shape.MODULO and cleared and loop.around:
            yield from _kept_after_leftover(loop)


def _kept_after_leftover(loop: TrainingLoop) -> Iterator[Hit]:
    """A step for the leftover, behind the loop, needs a clear as well where the loop is gone through again."""
    steps = [fact for fact in loop.at(Kind.STEP, Cadence.AFTER) if fact.event.within(loop.around[-1]) is not None]
    later = loop.at(Kind.ZERO, Cadence.BEFORE, Cadence.AFTER)
    if steps and not later:
        yield Hit(
            steps[0].node,
            "the leftover's gradients are not cleared after their step: the next epoch's first window holds them too",
        )


RULES = (
    Rule(
        "BB101",
        "zero-grad-inside-window",
        Severity.ERROR,
        "clear gradients right after the step, under the same condition",
        _zero_inside_window,
    ),
    Rule(
        "BB102",
        "step-every-micro-batch",
        Severity.ERROR,
        "step and clear only when a window is complete",
        _step_every_micro_batch,
    ),
    Rule(
        "BB103",
        "leftover-dropped",
        Severity.WARNING,
        "step once more for the rest, divided by the number of micro-batches in it",
        of_loops(_leftover_dropped),
    ),
    Rule(
        "BB104",
        "leftover-stepped-as-whole",
        Severity.WARNING,
        "divide by the number of micro-batches that are really in the window",
        of_loops(_leftover_as_whole),
    ),
    Rule(
        "BB105",
        "off-by-one-modulo",
        Severity.ERROR,
        "ask for (i + 1) % steps == 0, and count a round before asking",
        of_loops(_off_by_one),
    ),
    Rule("BB106", "never-zeroed", Severity.ERROR, "call optimizer.zero_grad() after each step", _never_zeroed),
)
