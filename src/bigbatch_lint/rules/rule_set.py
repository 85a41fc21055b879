"""The rules: predicates on the windows of a training loop."""

import ast
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from bigbatch_lint.reading.module import Module
from bigbatch_lint.reading.names import NORMED, announces_steps, called_name, dotted, forget_nodes, walk
from bigbatch_lint.rules.windows import Shape, TrainingLoop, rounds_in, training_loops, weight_of
from bigbatch_lint.running.interpreter import run_file
from bigbatch_lint.running.values import Event, Kind

_NO_SYNC = {"no_sync", "no_backward_sync", "require_backward_grad_sync", "set_requires_gradient_sync"}
_NAMES = {"accelerator": "Accelerate", "lightning": "Lightning", "engine": "the engine"}
# What takes BatchNorm out of a network, or stops it from normalizing by the batch.
_REPLACED = {"convert_to_groupnorm", "batch_norm_to_group_norm", "freeze_batch_norm", "freeze_bn"}
_REPLACED |= {"convert_frozen_batchnorm", "FrozenBatchNorm2d"}
Hit = tuple[ast.AST, str]  # one place where a rule is broken, and what is wrong there
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
    shapes: tuple[Shape, ...]


RULES: dict[str, Rule] = {}
_STEPPING: tuple[Shape, ...] = ("plain", "accumulating")
_ALL: tuple[Shape, ...] = ("unknown", "engine", "each", *_STEPPING)


def _rule(code: str, severity: Severity, remedy: str, *shapes: Shape) -> Callable[[Check], Check]:
    """Register a rule, with its function's name, for loops of some shapes; without any, for those that accumulate."""

    def register(check: Check) -> Check:
        slug = getattr(check, "__name__", "").strip("_").replace("_", "-")
        RULES[code] = Rule(code, slug, severity, remedy, check, shapes or ("accumulating",))
        return check

    return register


@_rule("BB101", "error", "clear gradients right after the step, under the same condition")
def _zero_grad_inside_window(loop: TrainingLoop) -> Iterator[Hit]:
    event, before_step = loop.zeroed or (None, False)
    often = "gradients are cleared with every micro-batch, the step comes once per window: only the last of "
    before = "gradients are cleared right before the step: it steps with none of them"
    if event is not None:
        yield event.node, before if before_step else f"{often}{loop.steps_text} micro-batches counts"


@_rule("BB102", "error", "step and clear only when a window is complete", "each")
def _step_every_micro_batch(loop: TrainingLoop) -> Iterator[Hit]:
    why = f"with gradients divided by {loop.steps}: without accelerator.accumulate nothing is accumulated"
    if loop.is_announced:
        why = f"though a window of {loop.steps_text} is announced: nothing is accumulated"
    yield loop.steps_inside[0].step.node, f"the optimizer steps with every micro-batch, {why}"


@_rule("BB103", "warning", "step once more for the rest, divided by the number of micro-batches in it")
def _leftover_dropped(loop: TrainingLoop) -> Iterator[Hit]:
    if loop.has_framework or not loop.steps_inside:
        return
    ended = [each for each in loop.leftovers if each[1].is_exhausted and 0 < rounds_in(each[0]) < loop.steps]
    at = loop.first_round
    if not ended or at is None:
        return
    left, _, number = ended[0]
    following = loop.windows[number] if number < len(loop.windows) else None
    leaks = following is not None and left[0] in following.backwards
    if following is not None:
        is_carried = following.size == loop.steps and loop.passes > 1 and leaks and not loop.zeroed
        if is_carried or not following.is_inside:
            return
    which = f"micro-batches left over after the last full window of {loop.steps_text}"
    if at.is_known and at.total:
        which = f"the last {rounds_in(left)} of {at.total} micro-batches"
    leak = " and leak into the next epoch's first window" if leaks else ""
    yield loop.steps_inside[0].place, f"{which} are never stepped{leak}"


@_rule("BB104", "warning", "divide by the number of micro-batches that are really in the window")
def _leftover_stepped_as_whole(loop: TrainingLoop) -> Iterator[Hit]:
    if loop.has_framework or loop.kind == "endless" or loop.of("rescale", around=True):
        return
    full = max((rounds_in(window.reached) for window in loop.whole), default=loop.steps)
    equal = [each.reached for each in loop.windows if rounds_in(each.reached) == len(each.reached) == full > 1]
    means = [own for own in equal if all(event.loss.reduction in {"mean", "?"} for event in own)]
    if not any(math.isclose(weight_of(own) or 0, 1.0) for own in means):
        return
    for previous, window in zip(loop.windows, loop.windows[1:]):  # noqa: B905 - pairs
        weight = weight_of(window.reached)
        step = previous.step.round_of(loop.node)
        passes = {each.passage for event in window.reached for each in event.rounds if each.loop is loop.node}
        is_short = step is not None and passes == {step.passage} and 0 < rounds_in(window.reached) < full
        if is_short and weight is not None and weight < 0.999:  # noqa: PLR2004
            text = f"a short last window is divided by {loop.steps_text} too, as if it were full"
            yield window.place, f"{text}: its gradient is too small"
            return


@_rule("BB105", "error", "ask for (i + 1) % steps == 0, and count a round before asking")
def _off_by_one_modulo(loop: TrainingLoop) -> Iterator[Hit]:
    n, inside = loop.steps, loop.steps_inside
    if loop.has_framework or len(inside) < 2 or n < 2 or loop.kind in {"pieces", "batched"}:  # noqa: PLR2004
        return
    first, second = (rounds_in(window.reached) for window in loop.windows[:2])
    late = f"the step comes with the first micro-batch of each {loop.steps_text}, not with the last: the first window "
    early = "the step comes before the backward of its window's last micro-batch, which goes into the next window: "
    reasons = {n + 1: f"{late}is one too long", 1: f"{late}holds one micro-batch"}
    reasons[n - 1] = f"{early}the first one is one too short"
    if second == n != first and first in reasons:
        yield inside[0].place, reasons[first]


@_rule("BB106", "error", "call optimizer.zero_grad() after each step", *_STEPPING)
def _never_zeroed(loop: TrainingLoop) -> Iterator[Hit]:
    inside, zeros = loop.steps_inside, loop.of("zero")
    if loop.has_framework or loop.of("handed") or not loop.windows or (loop.is_cleared and not inside):
        return
    if loop.shape == "plain" and (isinstance(loop.node, ast.FunctionDef) or len(inside) < 2):  # noqa: PLR2004
        return
    cleared, often = {event.subject for event in zeros}, "only outside the loop" if loop.is_cleared else "never"
    steps = {window.step.subject: window.step for window in reversed(inside or loop.windows)}
    for subject, step in steps.items():
        # Clearing something else than another optimizer may clear this one's gradients too.
        if cleared <= steps.keys() - {subject}:
            how = "never" if cleared else often
            yield step.node, f"gradients are {how} cleared: every step also takes those of all steps before"
    after = [each.step for each in loop.windows if not each.is_inside and inside]
    if zeros == loop.of("zero", around=True) and zeros and after and loop.passes > 1 and loop.shape == "accumulating":
        text = "the leftover's gradients are not cleared after their step: the next epoch's first window holds them too"
        yield after[0].node, text


@_rule("BB201", "error", "divide each loss by the number of micro-batches in its window")
def _loss_not_scaled(loop: TrainingLoop) -> Iterator[Hit]:
    size, own = (loop.whole[0].size, loop.whole[0].backwards) if loop.whole else (0, [])
    means = all(event.loss.reduction in {"mean", "?"} for event in loop.backwards)
    divided = loop.has_framework or loop.divides or loop.of("rescale", around=True)
    if not own or len(own) != size or not means or divided:
        return
    if math.isclose(weight_of(own) or 0, size) and all(each.value is not None for each in own[0].loss.divisions):
        text = loop.steps_text
        why = f"the gradient is {text} times that of the big batch's mean"
        yield own[0].node, f"{text} losses are added up and none is divided: {why}"


@_rule("BB202", "warning", "divide once, or leave it to the framework; a factor that is meant: # noqa: BB202", *_ALL)
def _loss_scaled_twice(loop: TrainingLoop) -> Iterator[Hit]:
    event = loop.backwards[0]
    written = [each for each in event.loss.divisions if loop.is_of_steps(each)]
    rescaled = loop.of("rescale", around=True)
    if written and event.divides:
        name = _NAMES.get(event.via, "the framework")
        yield written[0].node, f"{name} divides by the number of steps as well: divided twice"
    elif written and loop.shape == "accumulating":
        if len(written) > 1:
            yield written[1].node, f"the loss is divided by {loop.steps_text} a second time"
        elif rescaled and isinstance(factor := rescaled[0].factor, int | float) and factor == written[0].value:
            yield rescaled[0].node, f"loss and gradients are both divided by {loop.steps_text}"


@_rule("BB203", "warning", "sum the losses, and divide by the number of targets in the whole window")
def _masked_mean_divided_by_constant(loop: TrainingLoop) -> Iterator[Hit]:
    event = loop.backwards[0]
    if event.loss.masked is None or event.loss.reduction != "mean" or loop.of("rescale", around=True):
        return
    full = {loop.steps, *(window.size for window in loop.whole[:1])}
    written = [each.node for each in event.loss.divisions if each.value in full or announces_steps(each.text)]
    by_framework = loop.has_framework and event.via in {"accelerator", "lightning"} and event.divides is not False
    why = "and all weigh the same: the big batch's mean weighs them by that number"
    for node in written[-1:] or [event.node] * by_framework:
        yield node, f"each micro-batch's mean is over its own number of targets, {why}"


def _misplaced(loop: TrainingLoop, kind: Kind, early: str, late: str) -> Iterator[Hit]:
    """Yield what happens in the loop before a window's last backward; and between a step and the next backward."""
    order = {event: place for place, event in enumerate(loop.events)}
    ends = [(window, order[window.backwards[-1]]) for window in loop.windows if window.size > 1]
    found = [event for window, last in ends for event in window.events if event.kind == kind and order[event] < last]
    nodes = {event.node for event in found if event in loop.within}
    yield from ((node, early) for node in nodes)
    has_stepped = False
    for event in loop.events:
        if event.kind in {"step", "backward"}:
            has_stepped = event.kind == "step"
        elif event.kind == kind and has_stepped and event.node not in nodes:
            yield event.node, late


@_rule("BB301", "error", "clip once, after the window's last backward and before the step", *_STEPPING)
def _clip_in_wrong_place(loop: TrainingLoop) -> Iterator[Hit]:
    early = "partial sums are clipped with every micro-batch, not the window's gradient once"
    late = "the gradient is clipped after a step and before backward has added to it"
    return _misplaced(loop, "clip", early, late)


@_rule("BB302", "error", "call scaler.unscale_(optimizer) once per window, right before clipping", *_STEPPING)
def _unscale_in_wrong_place(loop: TrainingLoop) -> Iterator[Hit]:
    early = "gradients are unscaled with every micro-batch: what is added later is still scaled"
    yield from _misplaced(loop, "unscale", early, "gradients are unscaled after the step that used them")
    scaled = any(event.via == "scaler" for event in loop.backwards) and not loop.of("handed", around=True)
    unscaled = False
    for event in loop.events if scaled else ():
        if event.kind in {"unscale", "step"}:
            unscaled = event.kind == "unscale"
        elif event.kind == "clip" and not unscaled:
            yield event.node, "gradients are clipped while they are still multiplied by the scaler's scale"


def _repeated(loop: TrainingLoop, kind: Kind, message: str) -> Iterator[Hit]:
    for window in loop.windows:
        found = [event for event in window.events if event.kind == kind]
        rounds = {at.number if at else None for at in (event.round_of(loop.node) for event in found)}
        if window.size > 1 and len(rounds) > 1:
            yield found[0].node, message
            return


@_rule("BB303", "error", "call scaler.step and scaler.update once per window")
def _scaler_per_micro_batch(loop: TrainingLoop) -> Iterator[Hit]:
    return _repeated(loop, "update", "the scaler is updated with every micro-batch: its scale may change in mid-window")


@_rule("BB304", "warning", "step the scheduler after each optimizer step")
def _scheduler_per_micro_batch(loop: TrainingLoop) -> Iterator[Hit]:
    return _repeated(loop, "scheduler", f"the schedule advances {loop.steps_text} times per update")


@_rule("BB401", "warning", "run forward and backward of all but the last micro-batch under model.no_sync()")
def _ddp_without_no_sync(loop: TrainingLoop) -> Iterator[Hit]:
    if not loop.has_framework and not loop.module.words & _NO_SYNC and _is_distributed(loop.module):
        once = f"one exchange per window of {loop.steps_text} gives the same"
        yield loop.backwards[0].node, f"ranks exchange gradients with every micro-batch; {once}"


@lru_cache(maxsize=8)  # asked for each loop of a file
def _is_distributed(module: Module) -> bool:
    names = {module.full_name(called_name(call)).rpartition(".")[2] for call in module.calls}
    makers = [call for call in module.calls if called_name(call) in {"Fabric", "Trainer"}]
    words = [word.value for call in makers for word in call.keywords if word.arg == "strategy"]
    strategies = [str(getattr(each, "value", "")) for each in words]
    return bool(names & {"DistributedDataParallel", "DDP"}) or any(each.startswith("ddp") for each in strategies)


@_rule("BB402", "error", "put the forward into the same no_sync block")
def _no_sync_around_backward_only(loop: TrainingLoop) -> Iterator[Hit]:
    forwards: dict[tuple[int, ...], list[Event]] = {}
    for event in loop.inside:
        if event.kind == "forward":
            forwards.setdefault(event.place, []).append(event)
        block = next((each for each in event.contexts if each.context == "no_sync"), None)
        if event.kind == "backward" and block is not None:
            own = [each for each in forwards.get(event.place, ()) if not block.text or each.subject == block.text]
            if own and not any(each.made is block.made for forward in own for each in forward.contexts):
                why = "DDP decides in forward whether it will synchronise"
                yield block.made or event.node, f"forward runs outside no_sync, backward inside: {why}"


@_rule("BB501", "error", "add loss.detach(), and read it once per window or epoch", *_ALL)
def _running_loss_keeps_graph(loop: TrainingLoop) -> Iterator[Hit]:
    everything = frozenset().union(*(event.loss.origins for event in loop.backwards))
    for event in loop.of("keep"):
        without = any(each.context in {"no_grad", "inference_mode"} for each in event.contexts)
        # A loss that is made of several terms is no sum that outlives it.
        if not without and not {id(event.node), event.subject} & everything and event.loss.origins & everything:
            yield event.node, f"{event.subject or 'it'} keeps the graph of every loss that is added to it"


@_rule("BB601", "warning", "use bigbatch.BigStep, GroupNorm or LayerNorm, or freeze the layers")
def _batch_norm_under_accumulation(loop: TrainingLoop) -> Iterator[Hit]:
    # Under a framework, somebody must say that there is more than one micro-batch to a window.
    is_certain = not loop.has_framework or loop.is_announced or loop.divides
    text = "BatchNorm normalises by each micro-batch's statistics, not by the big batch's: accumulation is an "
    models = frozenset(event.subject for event in loop.of("forward"))
    call = _brings_batch_norm(loop.module, models) if is_certain else None
    if call is not None:
        yield call, f"{text}approximation here"


@lru_cache(maxsize=8)  # asked for each loop of a file
def _brings_batch_norm(module: Module, models: frozenset[str]) -> ast.Call | None:
    """Return the first layer or network with BatchNorm; None where it is replaced, frozen or in evaluation mode."""
    modes = {dotted(call.func).rpartition(".")[::2] for call in module.calls}
    evaluated = {name for name, mode in modes if mode == "eval" and (name, "train") not in modes}
    if (models and models <= evaluated) or module.words & _REPLACED:
        return None
    made = [node.value for node in module.of(ast.Assign) if evaluated & {*map(dotted, node.targets)}]
    frozen = {each for value in made for each in walk(value)}
    return next((call for call in module.calls if call not in frozen and _has_batch_norm(module, call)), None)


def _has_batch_norm(module: Module, call: ast.Call) -> bool:
    name = module.full_name(dotted(call.func)).rpartition(".")[2]
    if name == "create_model" and call.args and isinstance(call.args[0], ast.Constant):
        name = str(call.args[0].value)
    custom = any(word.arg == "norm_layer" for word in call.keywords)
    return not custom and bool(NORMED.search(name))


def find(tree: ast.Module) -> Iterator[tuple[str, ast.AST, str]]:
    """Yield what all rules find in a file, each place once."""
    forget_nodes()
    module, seen = Module(tree), set[tuple[str, ast.AST]]()
    for events, steps in () if module.is_of_another_library else run_file(module):
        for loop in training_loops(events, module, steps):
            for code, rule in RULES.items():
                for node, message in rule.check(loop) if loop.shape in rule.shapes else ():
                    if (code, node) not in seen:
                        seen.add((code, node))
                        yield code, node, message
