"""Calls that do something to gradients: backward, step, zero_grad, clipping, scaling, scheduling, synchronising."""

import ast
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bigbatch.lint.reading.called import Called
from bigbatch.lint.reading.conditions import Condition
from bigbatch.lint.reading.events import Kind, Via
from bigbatch.lint.reading.frames import Guard
from bigbatch.lint.reading.program import dotted
from bigbatch.lint.reading.scopes import Function
from bigbatch.lint.reading.things import Computed, Role, Thing, computed
from bigbatch.lint.reading.values import Inverse, Number, Several, Unknown, Value
from bigbatch.lint.reading.vocabulary import counts_micro_batches
from bigbatch.lint.reading.walk import Walk

_VIAS = {Role.SCALER: Via.SCALER, Role.ACCELERATOR: Via.ACCELERATE, Role.FABRIC: Via.FABRIC, Role.ENGINE: Via.ENGINE}


def training_call(walk: Walk, called: Called) -> Value | None:
    """Note what a call does to gradients; None if it is none of these."""
    if "clip_grad" in called.name:
        subject = called.on if isinstance(called.node.func, ast.Attribute) else ""
        walk.emit(Kind.CLIP, called.node, via=_via(called), subject=subject)
        return Unknown()
    handler = _HANDLERS.get(called.name)
    return handler(walk, called) if handler is not None else None


def _role(value: Value | None) -> Role | None:
    return value.role if isinstance(value, Thing) else None


def _via(called: Called) -> Via:
    role = _role(called.receiver)
    return _VIAS.get(role, Via.TORCH) if role is not None else Via.TORCH


def _backward(walk: Walk, called: Called) -> Value | None:
    role, via = _role(called.receiver), _via(called)
    given = called.first()
    of_torch = called.full.startswith("torch.")
    on_loss = role is None and (isinstance(called.receiver, Computed) or not isinstance(given, Computed))
    if of_torch or via in {Via.ACCELERATE, Via.FABRIC}:
        divides, by = _accelerator_divides(called.receiver) if via is Via.ACCELERATE else (False, None)
        loss = replace(_loss(given), rescaled=True) if len(called.args) > 1 else _loss(given)
        walk.emit(Kind.BACKWARD, called.node, via=via, loss=loss, divides=divides, divides_by=by)
    elif on_loss:
        loss = _loss(called.receiver)
        if called.args or "gradient" in called.words:  # a gradient from outside may be of any size
            loss = replace(loss, rescaled=True)
        walk.emit(Kind.BACKWARD, called.node, via=Via.SCALER if loss.amp else Via.TORCH, loss=loss)
    else:
        made = isinstance(called.receiver, Thing) and via is Via.ENGINE and called.receiver.node is not None
        made = made and "scale_wrt_gas" not in called.words  # DeepSpeed may be told not to divide
        steps = called.receiver.steps if isinstance(called.receiver, Thing) else None
        known: dict[str, Any] = {"divides": True if made else None, "divides_by": steps}
        walk.emit(Kind.BACKWARD, called.node, via=Via.ENGINE, subject=called.on, loss=_loss(given), **known)
    return Unknown()


def _manual_backward(walk: Walk, called: Called) -> Value:
    walk.emit(Kind.BACKWARD, called.node, loss=_loss(called.first()))
    return Unknown()


def _accelerator_divides(accelerator: Value | None) -> tuple[bool | None, Number | None]:
    """Accelerate divides by the steps it was made with; if that was not seen, nobody knows."""
    if not isinstance(accelerator, Thing) or accelerator.node is None:
        return None, None
    steps = accelerator.steps
    return steps is not None and steps.known != 1, steps


def _loss(value: Value | None) -> Computed:
    if isinstance(value, Computed):
        return value
    return computed(value.text if isinstance(value, Unknown | Thing) else id(value))


def _step(walk: Walk, called: Called) -> Value | None:
    role = _role(called.receiver)
    if role is Role.SCALER:
        walk.emit(Kind.STEP, called.node, via=Via.SCALER, subject=called.first_text())
    elif role in {Role.OPTIMIZER, Role.ENGINE}:
        closure = called.first()
        if isinstance(closure, Function):
            walk.enter(closure, (), {})
        via = Via.ENGINE if _accumulates_itself(called.receiver) else _via(called)
        walk.emit(Kind.STEP, called.node, via=via, subject=called.on, prepared=_is_prepared(called))
    elif role is Role.SCHEDULER:
        # One that is told where it stands, as by a fraction of an epoch, does not count calls.
        if not called.args:
            walk.emit(Kind.SCHEDULER, called.node, subject=called.on, prepared=_is_prepared(called))
    else:
        return None
    return Unknown()


def _accumulates_itself(optimizer: Value | None) -> bool:
    """Tell an optimizer that is made with a number of steps, and waits for them by itself."""
    made = optimizer.node if isinstance(optimizer, Thing) else None
    return isinstance(made, ast.Call) and any(counts_micro_batches(word.arg or "") for word in made.keywords)


def _is_prepared(called: Called) -> bool | None:
    """Tell whether Accelerate holds back the calls in mid-window; None: where it was made is not seen."""
    thing = called.receiver
    if not isinstance(thing, Thing) or thing.prepared or thing.node is None:
        return True if isinstance(thing, Thing) and thing.prepared else None
    return False


def _zero_grad(walk: Walk, called: Called) -> Value:
    walk.emit(Kind.ZERO, called.node, via=_via(called), subject=called.on, prepared=_is_prepared(called))
    return Unknown()


def _unscale(walk: Walk, called: Called) -> Value:
    walk.emit(Kind.UNSCALE, called.node, via=_via(called), subject=called.first_text())
    return Unknown()


def _update(walk: Walk, called: Called) -> Value | None:
    if _role(called.receiver) is not Role.SCALER:
        return None
    walk.emit(Kind.UPDATE, called.node, via=Via.SCALER, subject=called.on)
    return Unknown()


def _scale(_: Walk, called: Called) -> Value | None:
    if _role(called.receiver) is not Role.SCALER:
        return None
    return replace(_loss(called.first()), amp=True)


def scaler_call(walk: Walk, called: Called) -> Value | None:
    """`loss_scaler(loss, optimizer, need_update=...)`, as timm and MAE have it: backward, and the step when asked."""
    loss = called.first()
    if not isinstance(loss, Computed):
        return None
    walk.emit(Kind.BACKWARD, called.node, loss=loss)
    asked = next((called.words[word] for word in ("update_grad", "need_update") if word in called.words), None)
    frames = (Guard(asked, called.node),) if isinstance(asked, Condition) else ()
    with walk.inside(*frames):
        if asked is None or frames:
            walk.emit(Kind.STEP, called.node, subject=dotted(called.node.args[1]) if len(called.args) > 1 else "")
    return Unknown()


def _scale_loss(_: Walk, called: Called) -> Value | None:
    """Apex: `with amp.scale_loss(loss, optimizer) as scaled`; it does its own unscaling."""
    return replace(_loss(called.first()), amp=False)


def _context(walk: Walk, called: Called) -> Value | None:
    role = {"no_backward_sync": "no_sync"}.get(called.name, called.name)
    if role == "accumulate" and _role(called.receiver) not in {Role.ACCELERATOR, None}:
        return None
    condition = called.words.get("enabled")
    of_model = called.name == "no_sync" and _role(called.receiver) is not Role.ACCELERATOR
    subject = called.on if of_model else called.first_text()
    when = condition if isinstance(condition, Condition) else None
    if role in {"enable_grad", "set_grad_enabled"}:
        role = "other"
    walk.emit(Kind.SYNC, called.node, subject=subject) if role == "no_sync" else None
    return Thing(Role.CONTEXT, subject, called.node, detail=role, condition=when)


def _set_sync(walk: Walk, called: Called) -> Value:
    walk.emit(Kind.SYNC, called.node, subject=called.on)
    return Unknown()


def _prepared(_: Walk, called: Called) -> Value | None:
    """`accelerator.prepare` and `fabric.setup` give back what they got."""
    if _role(called.receiver) not in {Role.ACCELERATOR, Role.FABRIC}:
        return None
    given = tuple(replace(each, prepared=True) if isinstance(each, Thing) else each for each in called.args)
    return given[0] if len(given) == 1 else Several(given)


def _gathered(_: Walk, called: Called) -> Value | None:
    """`accelerator.gather(loss)` is the loss of all ranks, for looking at."""
    value = called.first()
    if _role(called.receiver) not in {Role.ACCELERATOR, Role.FABRIC} or not isinstance(value, Computed):
        return None
    return replace(value, live=frozenset())


def _optimizers(_: Walk, called: Called) -> Value | None:
    role = Role.OPTIMIZER if called.name == "optimizers" else Role.SCHEDULER
    return Thing(role, f"{called.on}.{called.name}()")


def _rescaled(walk: Walk, called: Called) -> Value | None:
    """Gradients multiplied in place, one by one or all at once."""
    if called.name.startswith("_foreach") or _role(called.receiver) is Role.GRADIENT:
        node = called.node.args[-1] if called.node.args else None
        by = called.args[-1] if called.args else Unknown()
        number = walk.number(by, node) if node is not None and "div" in called.name else None
        walk.emit(Kind.RESCALE, called.node, factor=by.of if isinstance(by, Inverse) else number)
        return Unknown()
    return None


def _zeroed(walk: Walk, called: Called) -> Value | None:
    if _role(called.receiver) is not Role.GRADIENT and not called.name.startswith("_foreach"):
        return None
    walk.emit(Kind.ZERO, called.node, subject=called.on)
    return Unknown()


_HANDLERS: dict[str, Callable[[Walk, Called], Value | None]] = {
    "backward": _backward,
    "manual_backward": _manual_backward,
    "step": _step,
    **dict.fromkeys(("zero_grad", "clear_grad", "clear_grads", "zero_gradients", "clear_gradients"), _zero_grad),
    "unscale_": _unscale,
    "unscale_gradients": _unscale,
    "update": _update,
    "scale": _scale,
    "scale_loss": _scale_loss,
    "no_sync": _context,
    "no_backward_sync": _context,
    "accumulate": _context,
    "no_grad": _context,
    "inference_mode": _context,
    "nullcontext": _context,
    "set_requires_gradient_sync": _set_sync,
    "prepare": _prepared,
    "setup": _prepared,
    "setup_module": _prepared,
    "setup_optimizers": _prepared,
    **dict.fromkeys(("gather", "gather_for_metrics", "all_gather", "all_reduce", "reduce"), _gathered),
    "optimizers": _optimizers,
    "lr_schedulers": _optimizers,
    "zero_": _zeroed,
    "_foreach_zero_": _zeroed,
    **dict.fromkeys(("div_", "mul_", "_foreach_div_", "_foreach_mul_"), _rescaled),
}
