"""Calls that train: backward, step, clear, clip, scale, and what frameworks have for them."""

import ast
from dataclasses import replace

from bigbatch_lint.reading.names import Role, announces_steps, dotted
from bigbatch_lint.running.call import UNKNOWN, Call, Table, as_loss
from bigbatch_lint.running.machine import Machine
from bigbatch_lint.running.trace import Event, Kind, Via
from bigbatch_lint.running.values import NUMBERS, Function, Loss, Opaque

_TABLE = Table()
_VIA = {Role.SCALER: Via.SCALER, Role.ACCELERATOR: Via.ACCELERATE, Role.FABRIC: Via.FABRIC, Role.ENGINE: Via.ENGINE}


def of_training(machine: Machine, call: Call) -> object:
    """Handle a call that trains."""
    if "clip_grad" in call.name:
        machine.emit(Event(Kind.CLIP, call.node, subject=call.on, via=_via(call)))
        return Opaque(is_setting=False)
    return _TABLE(machine, call)


def _via(call: Call) -> Via:
    return _VIA.get(call.role, Via.TORCH) if call.role is not None else Via.TORCH


def _is_prepared(call: Call) -> bool | None:
    """Tell whether a framework has wrapped the receiver; None where its making was not seen."""
    if not isinstance(call.receiver, Opaque):
        return None
    return True if call.receiver.is_prepared else None if call.receiver.made is None else False


@_TABLE.on("manual_backward")
def _manual_backward(machine: Machine, call: Call) -> object:
    machine.emit(Event(Kind.BACKWARD, call.node, loss=as_loss(call.first)))
    return Opaque()


@_TABLE.on("backward")
def _backward(machine: Machine, call: Call) -> object:
    first = call.args[0] if call.args else None
    by_tensor = call.role is None and (isinstance(call.receiver, Loss) or not isinstance(first, Loss))
    event = Event(Kind.BACKWARD, call.node, loss=as_loss(first), via=_via(call))
    if call.full.startswith("torch."):
        event.via = Via.TORCH
    elif call.role is Role.ACCELERATOR:
        event.divides, event.steps = _divides(call), getattr(call.receiver, "steps", None)
    elif call.role is Role.FABRIC:
        event.loss = event.loss.unknown_weight() if len(call.args) > 1 else event.loss
    elif by_tensor:
        loss = as_loss(call.receiver)
        weighted = bool(call.args) or "gradient" in call.words
        event.loss = loss.unknown_weight() if weighted else loss
        event.via = Via.SCALER if loss.is_scaled else Via.TORCH
    else:
        seen = call.role is Role.ENGINE and isinstance(call.receiver, Opaque) and call.receiver.made is not None
        event.divides = True if seen and "scale_wrt_gas" not in call.words else None
        event.via, event.steps = Via.ENGINE, getattr(call.receiver, "steps", None)
    machine.emit(event)
    return Opaque()


def _divides(call: Call) -> bool | None:
    """Tell whether an Accelerator divides; None where its making was not seen."""
    if not isinstance(call.receiver, Opaque) or call.receiver.made is None:
        return None
    return call.receiver.steps is not None and call.receiver.steps != 1


@_TABLE.on("step")
def _step(machine: Machine, call: Call) -> object:
    if call.role is Role.SCALER:
        subject = dotted(call.node.args[0]) if call.node.args else ""
        machine.emit(Event(Kind.STEP, call.node, via=Via.SCALER, subject=subject))
        return Opaque(is_setting=False)
    if call.role is Role.SCHEDULER:
        if not call.args:
            machine.emit(Event(Kind.SCHEDULER, call.node, subject=call.on, is_prepared=_is_prepared(call)))
        return Opaque()
    if call.role not in {Role.OPTIMIZER, Role.ENGINE}:
        return UNKNOWN
    if call.args and isinstance(call.args[0], Function):
        machine.call_function(call.args[0], (), {})
    made = call.receiver.made if isinstance(call.receiver, Opaque) else None
    told = isinstance(made, ast.Call) and any(announces_steps(word.arg or "") for word in made.keywords)
    machine.emit(
        Event(
            Kind.STEP,
            call.node,
            via=Via.ENGINE if told else _via(call),
            subject=call.on,
            is_prepared=_is_prepared(call),
            has_closure=bool(call.args),
        )
    )
    return Opaque(is_setting=False)


@_TABLE.on("zero_grad clear_grad clear_grads zero_gradients clear_gradients")
def _zero_grad(machine: Machine, call: Call) -> object:
    machine.emit(Event(Kind.ZERO, call.node, subject=call.on, is_prepared=_is_prepared(call), via=_via(call)))
    return Opaque()


@_TABLE.on("zero_ _foreach_zero_")
def _zero_in_place(machine: Machine, call: Call) -> object:
    if call.name == "zero_" and call.role is not Role.GRADIENT:
        return UNKNOWN
    machine.emit(Event(Kind.ZERO, call.node, subject=call.on))
    return Opaque()


@_TABLE.on("unscale_ unscale_gradients")
def _unscale(machine: Machine, call: Call) -> object:
    machine.emit(Event(Kind.UNSCALE, call.node, subject=call.on))
    return Opaque()


@_TABLE.on("update")
def _update(machine: Machine, call: Call) -> object:
    if call.role is not Role.SCALER:
        return UNKNOWN
    machine.emit(Event(Kind.UPDATE, call.node, subject=call.on))
    return Opaque()


@_TABLE.on("scale scale_loss")
def _scale(_: Machine, call: Call) -> object:
    if call.name == "scale" and call.role is not Role.SCALER:
        return UNKNOWN
    return replace(as_loss(call.first), is_scaled=call.name == "scale")


@_TABLE.on("div_ mul_ _foreach_div_ _foreach_mul_")
def _rescale(machine: Machine, call: Call) -> object:
    if call.role is not Role.GRADIENT and not call.name.startswith("_foreach"):
        return UNKNOWN
    factor = call.args[-1] if call.args else None
    if "mul" in call.name:
        factor = 1 / factor if isinstance(factor, NUMBERS) and factor else None
    machine.emit(Event(Kind.RESCALE, call.node, factor=factor))
    return Opaque()


@_TABLE.on("no_sync no_backward_sync accumulate no_grad inference_mode nullcontext")
def _context(machine: Machine, call: Call) -> object:
    if call.name == "accumulate" and call.role not in {Role.ACCELERATOR, None}:
        return UNKNOWN
    kind = "no_sync" if call.name == "no_backward_sync" else call.name
    own = call.name == "no_sync" and call.role is not Role.ACCELERATOR
    subject = call.on if own else dotted(call.node.args[0]) if call.node.args else ""
    if "enabled" in call.words and machine.truth(call.words["enabled"], call.node) is False:
        kind = "nullcontext"
    return Opaque(subject, Role.CONTEXT, made=call.node, context=kind)


@_TABLE.on("prepare setup setup_module setup_optimizers")
def _prepare(_: Machine, call: Call) -> object:
    if call.role not in {Role.ACCELERATOR, Role.FABRIC}:
        return UNKNOWN
    given = tuple(replace(each, is_prepared=True) if isinstance(each, Opaque) else each for each in call.args)
    return given[0] if len(given) == 1 else given


@_TABLE.on("gather gather_for_metrics all_gather all_reduce reduce")
def _gather(_: Machine, call: Call) -> object:
    if call.role not in {Role.ACCELERATOR, Role.FABRIC} or not isinstance(call.first, Loss):
        return UNKNOWN
    return call.first.detached()


@_TABLE.on("optimizers lr_schedulers")
def _of_lightning(_: Machine, call: Call) -> object:
    return Opaque(f"{call.on}.{call.name}()", Role.OPTIMIZER if call.name == "optimizers" else Role.SCHEDULER)
