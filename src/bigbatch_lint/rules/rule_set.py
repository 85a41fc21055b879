"""The rules: predicates on the windows of a training loop."""

import ast
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from bigbatch_lint.reading.module import Module
from bigbatch_lint.reading.names import announces_steps, called_name
from bigbatch_lint.rules.batch_norm import brings_batch_norm
from bigbatch_lint.rules.windows import Shape, TrainingLoop, Window, rounds_in, weight_of
from bigbatch_lint.running.trace import Event, Kind, Via
from bigbatch_lint.running.values import NUMBERS, Division

_NO_SYNC = {"no_sync", "no_backward_sync", "require_backward_grad_sync", "set_requires_gradient_sync"}
_TORCH_CLIPS = {"", "utils", "nn", "torch", "clip_grad"}
_WORDS = {Via.LIGHTNING: "accumulate_grad_batches", Via.TRAINER: "gradient_accumulation_steps"}
_NAMES = {Via.ACCELERATE: "Accelerate", Via.LIGHTNING: "Lightning", Via.TRAINER: "Trainer", Via.ENGINE: "the engine"}
# Rules of version 0.1, and what is there instead.
REMOVED = {
    "BB305": "`bigbatch.scale_lr` changes the learning rate for a larger batch.",
    "BB502": "Add up `loss.detach()`, and read the sum once per window.",
    "BB900": "A file that cannot be read is an error on stderr, and the exit status is 2. Leave it out with --exclude.",
}


@dataclass(frozen=True)
class Hit:
    """One place where a rule is broken, and what is wrong there."""

    node: ast.AST
    message: str


Severity = Literal["error", "warning"]
Check = Callable[[TrainingLoop], Iterator[Hit]]


@dataclass(frozen=True)
class Rule:
    """A mistake that can be found; its page is docs/lint/<code>.md."""

    code: str
    slug: str
    severity: Severity  # a wrong gradient, or one that is wrong for some data
    remedy: str
    check: Check
    shapes: frozenset[Shape]


RULES: dict[str, Rule] = {}


def _rule(code: str, slug: str, severity: Severity, remedy: str, *shapes: Shape) -> Callable[[Check], Check]:
    """Register a rule for loops of some shapes; without any, for those that accumulate."""

    def register(check: Check) -> Check:
        RULES[code] = Rule(code, slug, severity, remedy, check, frozenset(shapes or (Shape.ACCUMULATING,)))
        return check

    return register


# BB1: which micro-batches enter a step.
@_rule("BB101", "zero-grad-inside-window", "error", "clear gradients right after the step, under the same condition")
def _zero_inside(loop: TrainingLoop) -> Iterator[Hit]:
    for event, before_step in loop.zeroed:
        if before_step:
            yield Hit(event.node, "gradients are cleared right before the step: it steps with none of them")
        else:
            yield Hit(
                event.node,
                "gradients are cleared with every micro-batch, the step comes once per window: "
                f"only the last of {loop.steps_text} micro-batches counts",
            )


@_rule("BB102", "step-every-micro-batch", "error", "step and clear only when a window is complete", Shape.EACH)
def _step_each(loop: TrainingLoop) -> Iterator[Hit]:
    if loop.is_announced:
        why = (
            f"the optimizer steps with every micro-batch, though a window of {loop.steps_text} is announced: "
            "nothing is accumulated"
        )
    else:
        why = (
            f"the optimizer steps with every micro-batch, with gradients divided by {loop.steps}: "
            "without accelerator.accumulate nothing is accumulated"
        )
    yield Hit(loop.steps_inside[0].step.node, why)


@_rule(
    "BB103",
    "leftover-dropped",
    "warning",
    "step once more for the rest, divided by the number of micro-batches in it",
)
def _leftover_dropped(loop: TrainingLoop) -> Iterator[Hit]:
    by_lightning = any(event.via is Via.LIGHTNING for event in loop.backwards) or loop.module.is_manual_lightning
    if loop.has_framework or not loop.steps_inside or (loop.is_function and not by_lightning):
        return
    for leftover in loop.leftovers:
        left = rounds_in(leftover.backwards) if leftover.end.is_exhausted else 0
        if not 0 < left < loop.steps:
            continue
        following = loop.windows[leftover.following] if leftover.following < len(loop.windows) else None
        if following is not None and not (following.is_inside and _is_dropped(loop, leftover.backwards, following)):
            return
        yield Hit(loop.steps_inside[0].place(), _dropped(loop, leftover.backwards[0], left, following))
        return


def _is_dropped(loop: TrainingLoop, left: list[Event], following: Window) -> bool:
    """Tell whether a leftover is no part of a whole window in the next pass."""
    carried = following.size == loop.steps and loop.passes > 1 and left[0] in following.backwards
    return not carried or bool(loop.zeroed)


def _dropped(loop: TrainingLoop, first: Event, left: int, following: Window | None) -> str:
    at = next(each for each in first.rounds if each.loop is loop.node)
    leaks = following is not None and first in following.backwards
    leak = " and leak into the next epoch's first window" if leaks else ""
    if at.is_known and at.total:
        return f"the last {left} of {at.total} micro-batches are never stepped{leak}"
    return f"micro-batches left over after the last full window of {loop.steps_text} are never stepped{leak}"


@_rule(
    "BB104",
    "leftover-stepped-as-whole",
    "warning",
    "divide by the number of micro-batches that are really in the window",
)
def _leftover_as_whole(loop: TrainingLoop) -> Iterator[Hit]:
    if loop.has_framework or loop.kind == "endless" or _rescales(loop):
        return
    full = max((rounds_in(window.reached) for window in loop.whole), default=loop.steps)
    if not any(_is_mean(window, full) for window in loop.windows):
        return
    for previous, window in zip(loop.windows, loop.windows[1:]):  # noqa: B905 - pairs
        weight = weight_of(window.reached)
        short = 0 < rounds_in(window.reached) < full and loop.is_same_pass(previous, window)
        if short and weight is not None and weight < 0.999:  # noqa: PLR2004
            text = loop.steps_text
            yield Hit(
                window.place(),
                f"a short last window is divided by {text} too, as if it were full: its gradient is too small",
            )
            return


def _is_mean(window: Window, size: int) -> bool:
    """Tell whether the weights of a window of that size add up to one."""
    weight = weight_of(window.reached)
    if rounds_in(window.reached) != size or len(window.reached) != size or weight is None:
        return False
    means = all(event.loss.reduction in {"mean", "?"} for event in window.reached)
    return means and size > 1 and math.isclose(weight, 1.0)


def _is_judged(loop: TrainingLoop) -> bool:
    """Tell whether a window's weights are those of means, one for each micro-batch."""
    one_each = bool(loop.whole) and len(loop.whole[0].backwards) == loop.whole[0].size
    return one_each and all(event.loss.reduction in {"mean", "?"} for event in loop.backwards)


def _rescales(loop: TrainingLoop) -> list[Event]:
    return loop.everywhere(Kind.RESCALE)


@_rule("BB105", "off-by-one-modulo", "error", "ask for (i + 1) % steps == 0, and count a round before asking")
def _off_by_one(loop: TrainingLoop) -> Iterator[Hit]:
    n, spans, inside = loop.steps, loop.spans, loop.steps_inside
    if loop.has_framework or len(inside) < 2 or n < 2 or loop.kind in {"pieces", "batched"}:  # noqa: PLR2004
        return
    if spans[0] == n or spans[1] != n or spans[0] not in {1, n - 1, n + 1}:
        return
    if spans[0] == n - 1:
        why = (
            "the step comes before the backward of its window's last micro-batch, which goes into the next window: "
            "the first one is one too short"
        )
    else:
        first = "the first window holds one micro-batch" if spans[0] == 1 else "the first window is one too long"
        why = f"the step comes with the first micro-batch of each {loop.steps_text}, not with the last: {first}"
    yield Hit(inside[0].place(), why)


@_rule(
    "BB106",
    "never-zeroed",
    "error",
    "call optimizer.zero_grad() after each step",
    Shape.PLAIN,
    Shape.ACCUMULATING,
)
def _never_zeroed(loop: TrainingLoop) -> Iterator[Hit]:
    if loop.has_framework or loop.of(Kind.HANDED) or not loop.windows:
        return
    if loop.shape is Shape.PLAIN and (loop.is_function or len(loop.steps_inside) < 2):  # noqa: PLR2004
        return
    zeros = loop.of(Kind.ZERO)
    cleared = {event.subject for event in zeros}
    if loop.is_cleared and not loop.steps_inside:
        return
    steps = {window.step.subject: window.step for window in reversed(loop.steps_inside or loop.windows)}
    for subject, step in steps.items():
        # Clearing something else than another optimizer may clear this one's gradients too.
        if cleared <= steps.keys() - {subject}:
            often = "only outside the loop" if loop.is_cleared and not cleared else "never"
            yield Hit(step.node, f"gradients are {often} cleared: every step also takes those of all steps before")
    after = [each.step for each in loop.windows if not each.is_inside and loop.steps_inside]
    only_inside = all(event in loop.within for event in loop.everywhere(Kind.ZERO))
    if zeros and after and only_inside and loop.passes > 1 and loop.shape is Shape.ACCUMULATING:
        yield Hit(
            after[0].node,
            "the leftover's gradients are not cleared after their step: the next epoch's first window holds them too",
        )


# BB2: the weights.
@_rule("BB201", "loss-not-scaled", "error", "divide each loss by the number of micro-batches in its window")
def _not_scaled(loop: TrainingLoop) -> Iterator[Hit]:
    if not _is_judged(loop) or loop.has_framework or loop.divides or _rescales(loop):
        return
    window = loop.whole[0]
    unknown = any(each.value is None for each in window.backwards[0].loss.divisions)
    if window.weight is not None and math.isclose(window.weight, window.size) and not unknown:
        text = loop.steps_text
        yield Hit(
            window.backwards[0].node,
            f"{text} losses are added up and none is divided: "
            f"the gradient is {text} times that of the big batch's mean",
        )


@_rule(
    "BB202",
    "loss-scaled-twice",
    "warning",
    "divide once, or leave it to the framework; a factor that is meant: # noqa: BB202",
    *Shape,
)
def _scaled_twice(loop: TrainingLoop) -> Iterator[Hit]:
    for event in loop.backwards[:1]:
        written = [each for each in event.loss.divisions if loop.is_of_steps(each)]
        framework = next((each for each in written if _divides_too(loop, event, each)), None)
        if framework is not None:
            name = _NAMES.get(event.via, "the framework")
            yield Hit(framework.node, f"{name} divides by the number of steps as well: divided twice")
        elif len(written) > 1 and loop.shape is Shape.ACCUMULATING:
            yield Hit(written[1].node, f"the loss is divided by {loop.steps_text} a second time")
        elif written and loop.shape is Shape.ACCUMULATING:
            for later in _rescales(loop)[:1]:
                if isinstance(later.factor, NUMBERS) and math.isclose(later.factor, written[0].value or 0):
                    yield Hit(later.node, f"loss and gradients are both divided by {loop.steps_text}")


def _divides_too(loop: TrainingLoop, event: Event, division: Division) -> bool:
    """Tell whether the framework divides by the number of steps that the script divides by."""
    word = _WORDS.get(event.via)
    if event.via is Via.LIGHTNING and word and division.text.endswith(word):
        return True
    accumulates = event.via is Via.ACCELERATE and loop.has_framework and event.divides is not False
    return bool(event.divides) or (accumulates and announces_steps(division.text))


@_rule(
    "BB203",
    "masked-mean-divided-by-constant",
    "warning",
    "sum the losses, and divide by the number of targets in the whole window",
)
def _masked_mean(loop: TrainingLoop) -> Iterator[Hit]:
    event = loop.backwards[0]
    if event.loss.masked is None or event.loss.reduction != "mean" or _rescales(loop):
        return
    full = {loop.steps, *(window.size for window in loop.whole[:1])}
    written = [each for each in event.loss.divisions if each.value in full or announces_steps(each.text)]
    by_framework = loop.has_framework and event.via in {Via.ACCELERATE, Via.LIGHTNING} and event.divides is not False
    if written or by_framework:
        yield Hit(
            written[-1].node if written else event.node,
            "each micro-batch's mean is over its own number of targets, and all weigh the same: "
            "the big batch's mean weighs them by that number",
        )


# BB3: what belongs between the last backward and the step.
def _too_early(loop: TrainingLoop, kind: Kind) -> Iterator[Event]:
    """Yield what happens before the last backward of a window."""
    order = {event: place for place, event in enumerate(loop.events)}
    for window in loop.windows:
        if window.size > 1:
            last = order[window.backwards[-1]]
            yield from (event for event in window.noted[kind] if order[event] < last)


def _after_step(loop: TrainingLoop, kind: Kind) -> Iterator[Event]:
    """Yield what happens between a step and the next backward."""
    previous: Event | None = None
    for event in loop.events:
        if event.kind in {Kind.STEP, Kind.BACKWARD}:
            previous = event
        elif event.kind is kind and previous is not None and previous.kind is Kind.STEP:
            yield event


@_rule(
    "BB301",
    "clip-in-wrong-place",
    "error",
    "clip once, after the window's last backward and before the step",
    Shape.PLAIN,
    Shape.ACCUMULATING,
)
def _clip(loop: TrainingLoop) -> Iterator[Hit]:
    often = [event for event in _too_early(loop, Kind.CLIP) if event in loop.within]
    for event in often:
        yield Hit(event.node, "partial sums are clipped with every micro-batch, not the window's gradient once")
    nodes = {event.node for event in often}
    for event in _after_step(loop, Kind.CLIP):
        if event.node not in nodes:
            first = next(each for each in loop.events if each.node is event.node)
            early = first in loop.events[: loop.events.index(loop.backwards[0])]
            why = "before backward has added to it" if early else "after the step that used it"
            yield Hit(event.node, f"the gradient is clipped {why}")


@_rule(
    "BB302",
    "unscale-in-wrong-place",
    "error",
    "call scaler.unscale_(optimizer) once per window, right before clipping",
    Shape.PLAIN,
    Shape.ACCUMULATING,
)
def _unscale(loop: TrainingLoop) -> Iterator[Hit]:
    often = [event for event in _too_early(loop, Kind.UNSCALE) if event in loop.within]
    for event in often:
        yield Hit(event.node, "gradients are unscaled with every micro-batch: what is added later is still scaled")
    for event in _after_step(loop, Kind.UNSCALE):
        if event.node not in {each.node for each in often}:
            yield Hit(event.node, "gradients are unscaled after the step that used them")
    if any(event.via is Via.SCALER for event in loop.backwards) and not loop.everywhere(Kind.HANDED):
        for event in _clipped_while_scaled(loop):
            yield Hit(event.node, "gradients are clipped while they are still multiplied by the scaler's scale")


def _clipped_while_scaled(loop: TrainingLoop) -> Iterator[Event]:
    unscaled = False
    for event in loop.events:
        if event.kind in {Kind.UNSCALE, Kind.STEP}:
            unscaled = event.kind is Kind.UNSCALE
        elif event.kind is Kind.CLIP and not unscaled and event.subject.rpartition(".")[2] in _TORCH_CLIPS:
            yield event


@_rule("BB303", "scaler-per-micro-batch", "error", "call scaler.step and scaler.update once per window")
def _scaler(loop: TrainingLoop) -> Iterator[Hit]:
    for event in _repeated(loop, Kind.UPDATE):
        yield Hit(event.node, "the scaler is updated with every micro-batch: its scale may change in mid-window")


@_rule("BB304", "scheduler-per-micro-batch", "warning", "step the scheduler after each optimizer step")
def _scheduler(loop: TrainingLoop) -> Iterator[Hit]:
    for event in _repeated(loop, Kind.SCHEDULER):
        yield Hit(event.node, f"the schedule advances {loop.steps_text} times per update")


def _repeated(loop: TrainingLoop, kind: Kind) -> Iterator[Event]:
    """Yield what happens more than once per window."""
    if loop.has_framework or loop.zeroed:
        found = loop.of(kind)
        if found and len(found) > 1.5 * max(len(loop.steps_inside), 1) and loop.steps_inside:
            yield found[0]
        return
    for window in loop.windows:
        if window.size > 1 and len({loop.round_of(event) for event in window.noted[kind]}) > 1:
            yield window.noted[kind][0]
            return


# BB4: several devices.
@_rule(
    "BB401",
    "ddp-without-no-sync",
    "warning",
    "run forward and backward of all but the last micro-batch under model.no_sync()",
)
def _without_no_sync(loop: TrainingLoop) -> Iterator[Hit]:
    if not loop.has_framework and not loop.module.words & _NO_SYNC and _is_distributed(loop.module):
        yield Hit(
            loop.backwards[0].node,
            f"ranks exchange gradients with every micro-batch; one exchange per window of {loop.steps_text} "
            "gives the same",
        )


@lru_cache(maxsize=8)  # asked for each loop of a file
def _is_distributed(module: Module) -> bool:
    """Tell whether a model is wrapped for data-parallel training with one process per device."""
    for call in module.calls:
        name = called_name(call)
        if module.full_name(name).rpartition(".")[2] in {"DistributedDataParallel", "DDP"}:
            return True
        if name in {"Fabric", "Trainer"}:
            strategy = next((word.value for word in call.keywords if word.arg == "strategy"), None)
            if isinstance(strategy, ast.Constant) and str(strategy.value).startswith("ddp"):
                return True
    return False


@_rule("BB402", "no-sync-around-backward-only", "error", "put the forward into the same no_sync block")
def _around_backward_only(loop: TrainingLoop) -> Iterator[Hit]:
    forwards: dict[tuple[int, ...], list[Event]] = {}
    for event in loop.inside:
        rounds = event.place
        if event.kind is Kind.FORWARD:
            forwards.setdefault(rounds, []).append(event)
        block = next((each for each in event.contexts if each.context == "no_sync"), None)
        if event.kind is not Kind.BACKWARD or block is None:
            continue
        own = [each for each in forwards.get(rounds, ()) if not block.text or each.subject == block.text]
        if own and not any(each.made is block.made for forward in own for each in forward.contexts):
            yield Hit(
                block.made or event.node,
                "forward runs outside no_sync, backward inside: DDP decides in forward whether it will synchronise",
            )


# BB5 and BB6: the loss besides backward, and layers that see the micro-batch.
@_rule(
    "BB501",
    "running-loss-keeps-graph",
    "error",
    "add loss.detach(), and read it once per window or epoch",
    *Shape,
)
def _keeps_graph(loop: TrainingLoop) -> Iterator[Hit]:
    origins = [event.loss.origins for event in loop.backwards]
    everything = frozenset().union(*origins)
    for event in loop.of(Kind.KEEP):
        if any(each.context in {"no_grad", "inference_mode"} for each in event.contexts):
            continue
        # A loss that is made of several terms is no sum that outlives it.
        if not {id(event.node), event.subject} & everything and event.loss.live & everything:
            yield Hit(event.node, f"{event.subject or 'it'} keeps the graph of every loss that is added to it")


@_rule(
    "BB601",
    "batch-norm-under-accumulation",
    "warning",
    "use bigbatch.BigStep, GroupNorm or LayerNorm, or freeze the layers",
)
def _batch_norm(loop: TrainingLoop) -> Iterator[Hit]:
    if loop.has_framework and not (loop.is_announced or loop.divides):
        return  # nobody said that there is more than one micro-batch to a window
    models = frozenset(event.subject for event in loop.of(Kind.FORWARD))
    call = brings_batch_norm(loop.module, models)
    if call is not None:
        yield Hit(
            call,
            "BatchNorm normalises by each micro-batch's statistics, not by the big batch's: "
            "accumulation is an approximation here",
        )
