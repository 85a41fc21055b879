"""BB3: what belongs between the last backward and the step, and nowhere else."""

import ast
from collections.abc import Iterator

from bigbatch.lint.finding import Severity
from bigbatch.lint.loops.cadence import Cadence
from bigbatch.lint.loops.facts import Fact, Shape, TrainingLoop
from bigbatch.lint.reading.constructors import is_optimizer
from bigbatch.lint.reading.events import Kind, Via
from bigbatch.lint.reading.program import dotted
from bigbatch.lint.rules.rule import Hit, Rule, Script, of_loops

_OFTEN = (Cadence.MICRO, Cadence.REST)


def _steps_once(loop: TrainingLoop) -> bool:
    """Tell whether the window is as announced; otherwise BB102 has said it all."""
    return not loop.at(Kind.STEP, Cadence.MICRO)


def _clip(loop: TrainingLoop) -> Iterator[Hit]:
    if not _steps_once(loop):
        return
    for fact in loop.at(Kind.CLIP, *_OFTEN):
        yield Hit(fact.node, "partial sums are clipped with every micro-batch, not the window's gradient once")
    for fact in loop.at(Kind.CLIP, Cadence.WINDOW):
        steps = [step for step in loop.at(Kind.STEP, Cadence.WINDOW) if step.may_meet(fact)]
        backwards = [each for each in loop.of(Kind.BACKWARD) if each.may_meet(fact)]
        if steps and all(step.event.order < fact.event.order for step in steps):
            yield Hit(fact.node, "the gradient is clipped after the step that used it")
        elif loop.shape is Shape.MODULO and _before_backward(fact, steps, backwards):
            yield Hit(fact.node, "the gradient is clipped before the window's last backward has added to it")


def _before_backward(fact: Fact, steps: list[Fact], backwards: list[Fact]) -> bool:
    """Tell whether a backward stands between the clipping and the step."""
    return any(
        fact.event.order < backward.event.order < step.event.order for backward in backwards for step in steps
    )


def _unscale(loop: TrainingLoop) -> Iterator[Hit]:
    scaled = [fact for fact in loop.of(Kind.BACKWARD) if fact.event.via is Via.SCALER]
    if not scaled or not _steps_once(loop):
        return
    for fact in loop.at(Kind.UNSCALE, *_OFTEN):
        yield Hit(fact.node, "gradients are unscaled with every micro-batch: what is added later is still scaled")
    unscales = loop.at(Kind.UNSCALE, Cadence.WINDOW)
    for fact in unscales:
        steps = [step for step in loop.at(Kind.STEP, Cadence.WINDOW) if step.may_meet(fact)]
        if steps and all(step.event.order < fact.event.order for step in steps):
            yield Hit(fact.node, "gradients are unscaled after the step that used them")
    for fact in loop.at(Kind.CLIP, Cadence.WINDOW):
        before = [each for each in loop.of(Kind.UNSCALE) if each.event.order < fact.event.order]
        if _meets_scaled(fact, scaled) and not before:
            yield Hit(fact.node, "gradients are clipped while they are still multiplied by the scaler's scale")


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
        if loop.shape is not Shape.FRAMEWORK or fact.event.via is Via.TORCH:
            yield Hit(fact.node, f"the schedule advances {loop.steps_text()} times per update")


def _learning_rate(script: Script) -> Iterator[Hit]:
    if not any(loop.accumulates for loop in script.loops) or script.program.words & {"scale_lr", "scaled_lr"}:
        return
    for call in script.program.calls:
        rate = next((word.value for word in call.keywords if word.arg == "lr"), None)
        if isinstance(rate, ast.Constant) and is_optimizer(dotted(call.func).rpartition(".")[2]):
            yield Hit(rate, "a window makes the batch larger, and this rate does not know it: was it meant for it?")


RULES = (
    Rule(
        "BB301",
        "clip-in-wrong-place",
        Severity.ERROR,
        "clip once, after the window's last backward and before the step",
        of_loops(_clip),
    ),
    Rule(
        "BB302",
        "unscale-in-wrong-place",
        Severity.ERROR,
        "call scaler.unscale_(optimizer) once per window, right before clipping",
        of_loops(_unscale),
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
    Rule(
        "BB305",
        "learning-rate-not-revisited",
        Severity.INFO,
        "see bigbatch.scale_lr for what the papers say",
        _learning_rate,
        on=False,
    ),
)
