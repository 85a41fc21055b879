"""BB3: what belongs between the last backward and the step, and nowhere else."""

from collections.abc import Iterator

from bigbatch.lint.finding import Severity
from bigbatch.lint.loops.cadence import Cadence
from bigbatch.lint.loops.facts import Fact, Shape, TrainingLoop
from bigbatch.lint.reading.events import Kind, Via
from bigbatch.lint.rules.rule import Hit, Rule, Script, of_loops

_OFTEN = (Cadence.MICRO, Cadence.REST)


def _steps_once(loop: TrainingLoop) -> bool:
    """Tell whether the window is as announced; otherwise BB102 has said it all."""
    return loop.accumulates and not loop.at(Kind.STEP, Cadence.MICRO)


def _rhythm(loop: TrainingLoop) -> Cadence | None:
    """Return how often the optimizer steps, in a loop whose steps are where they should be."""
    if _steps_once(loop):
        return Cadence.WINDOW
    return Cadence.MICRO if loop.shape is Shape.PLAIN and loop.every is None else None


def _clip(script: Script) -> Iterator[Hit]:
    for loop in script.loops:
        for fact in loop.at(Kind.CLIP, *_OFTEN) if _steps_once(loop) else ():
            yield Hit(fact.node, "partial sums are clipped with every micro-batch, not the window's gradient once")
        rhythm = _rhythm(loop)
        for fact in loop.at(Kind.CLIP, rhythm) if rhythm is not None else ():
            why = _misplaced(loop, fact)
            if why:
                yield Hit(fact.node, why)


def _misplaced(loop: TrainingLoop, clip: Fact) -> str:
    """Say what is wrong with the order of backward, clipping and step."""
    steps = [step for step in loop.at(Kind.STEP, clip.cadence) if step.may_meet(clip)]
    backwards = [each for each in loop.of(Kind.BACKWARD) if each.may_meet(clip)]
    if steps and all(step.event.order < clip.event.order for step in steps):
        # A backward in between makes it the clipping of the next step.
        between = any(step.event.order < each.event.order < clip.event.order for step in steps for each in backwards)
        return "" if between else "the gradient is clipped after the step that used it"
    first = min((each.event.order for each in backwards), default=0)
    if loop.shape is not Shape.NESTED and clip.event.order < first < min((s.event.order for s in steps), default=0):
        return "the gradient is clipped before backward has added to it"
    return ""


def _unscale(script: Script) -> Iterator[Hit]:
    for loop in script.loops:
        scaled = [fact for fact in loop.of(Kind.BACKWARD) if fact.event.via is Via.SCALER]
        rhythm = _rhythm(loop)
        if scaled and rhythm is not None:
            yield from _unscales(loop, rhythm)
            for fact in loop.at(Kind.CLIP, rhythm, *_OFTEN):
                before = [each for each in loop.of(Kind.UNSCALE) if each.event.order < fact.event.order]
                if not before and _meets_scaled(fact, scaled) and not _may_unscale(loop, fact):
                    yield Hit(fact.node, "gradients are clipped while they are still multiplied by the scaler's scale")


def _may_unscale(loop: TrainingLoop, clip: Fact) -> bool:
    """Tell whether something that cannot be seen into may do it: a method that clips, a function with the scaler."""
    of_torch = clip.event.subject.rpartition(".")[2] in {"", "utils", "nn", "torch", "clip_grad"}
    return not of_torch or bool(loop.of(Kind.HANDED_ON))


def _unscales(loop: TrainingLoop, rhythm: Cadence) -> Iterator[Hit]:
    for fact in loop.at(Kind.UNSCALE, *_OFTEN) if loop.accumulates else ():
        yield Hit(fact.node, "gradients are unscaled with every micro-batch: what is added later is still scaled")
    for fact in loop.at(Kind.UNSCALE, rhythm):
        steps = [step for step in loop.at(Kind.STEP, rhythm) if step.may_meet(fact)]
        if steps and all(step.event.order < fact.event.order for step in steps):
            yield Hit(fact.node, "gradients are unscaled after the step that used them")


def _meets_scaled(clip: Fact, scaled: list[Fact]) -> bool:
    """Tell whether a clipping is certain to see scaled gradients: settings about scaling must be those of backward."""
    about = {t: h for t, h in clip.settings().items() if any(w in t.lower() for w in ("scaler", "amp", "fp16", "half"))}
    return any(clip.may_meet(fact) and about.items() <= fact.settings().items() for fact in scaled)


def _scaler(loop: TrainingLoop) -> Iterator[Hit]:
    if _steps_once(loop):
        for fact in loop.at(Kind.UPDATE, *_OFTEN):
            yield Hit(fact.node, "the scaler is updated with every micro-batch: its scale may change in mid-window")


def _scheduler(loop: TrainingLoop) -> Iterator[Hit]:
    if not _steps_once(loop):
        return
    for fact in loop.at(Kind.SCHEDULER, *_OFTEN):
        if loop.shape is not Shape.FRAMEWORK or fact.event.prepared is False:
            yield Hit(fact.node, f"the schedule advances {loop.steps_text()} times per update")


RULES = (
    Rule(
        "BB301",
        "clip-in-wrong-place",
        Severity.ERROR,
        "clip once, after the window's last backward and before the step",
        _clip,
    ),
    Rule(
        "BB302",
        "unscale-in-wrong-place",
        Severity.ERROR,
        "call scaler.unscale_(optimizer) once per window, right before clipping",
        _unscale,
    ),
    Rule(
        "BB303",
        "scaler-per-micro-batch",
        Severity.ERROR,
        "call scaler.step and scaler.update once per window",
        of_loops(_scaler),
    ),
    Rule(
        "BB304",
        "scheduler-per-micro-batch",
        Severity.WARNING,
        "step the scheduler after each optimizer step",
        of_loops(_scheduler),
    ),
)
