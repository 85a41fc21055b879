"""Known calls: those that train, those that make things, and those on tensors, numbers and containers."""

import ast
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bigbatch_lint.reading.names import PIECES, last_part, role_made_by
from bigbatch_lint.running.machine import LONGEST, Call, Machine, batch, computed
from bigbatch_lint.running.values import PLAIN, UNKNOWN, Items, Kind, Loss, Opaque, Via

_LOADERS = re.compile("load|batches|stream|dl$")
_NUMBERS = (float, int, abs, round, bool, min, max, divmod, math.ceil, math.floor, math.gcd)
_NUMBER_FUNCTIONS: dict[str, Callable[..., object]] = {each.__name__: each for each in _NUMBERS}
# What clears, unscales or updates, and what for; None: for anything.
_ON_GRADIENTS: dict[str, tuple[Kind, str | None]] = {
    "zero_grad": ("zero", None), "zero_": ("zero", "gradient"), "update": ("update", "scaler"),
    "unscale_": ("unscale", None), "unscale_gradients": ("unscale", None),
}  # fmt: skip


def _backward(machine: Machine, call: Call) -> object:
    first, receiver, role = call.args[0] if call.args else None, call.receiver, call.role
    loss, via, steps = Loss.given(first), "torch", getattr(receiver, "steps", None)
    divides: bool | None = False
    if role == "accelerator":
        via, divides = role, steps not in {None, 1} if call.made else None
    elif role == "fabric" or call.name == "manual_backward" or call.full.startswith("torch."):
        pass
    elif role is None and (isinstance(receiver, Loss) or not isinstance(first, Loss)):
        loss = Loss.given(receiver)
        via = "scaler" if loss.is_scaled else "torch"
        loss = replace(loss, weight=None) if call.args or "gradient" in call.words else loss
    else:
        via = "engine"
        divides = True if role == "engine" and call.made and "scale_wrt_gas" not in call.words else None
    return machine.emit("backward", call.node, loss=loss, via=via, divides=divides, steps=steps)


def _step(machine: Machine, call: Call) -> object:
    if call.role == "scheduler":
        return (
            None
            if call.args
            else machine.emit("scheduler", call.node, subject=call.on, is_unprepared=call.made is not None)
        )
    if call.role == "scaler":
        return machine.emit("step", call.node, via="scaler", subject=call.written(0))
    if call.role not in {"optimizer", "engine"}:
        return NotImplemented
    via: Via = "engine" if call.role == "engine" else "torch"
    notes = {"is_unprepared": call.made is not None, "has_closure": bool(call.args)}
    return machine.emit("step", call.node, via=via, subject=call.on, **notes)


def _on_gradients(machine: Machine, call: Call) -> object:
    kind, role = _ON_GRADIENTS[call.name]
    if role not in {None, call.role}:
        return NotImplemented
    return machine.emit(kind, call.node, subject=call.on, is_unprepared=call.made is not None)


def _context(_: Machine, call: Call) -> object:
    subject = call.on if call.name == "no_sync" and call.role != "accelerator" else call.written(0)
    return Opaque(subject, "context", made=call.node, context=call.name.replace("no_backward_sync", "no_sync"))


def make(machine: Machine, call: Call) -> object:
    """Return what a function makes by its name; NotImplemented if that does not say."""
    if call.name.endswith("Loss") and call.name[:1].isupper():
        return Opaque(call.name, "criterion", made=call.node, **_reduction(machine, call))
    role = role_made_by(call.name)
    return NotImplemented if role is None else Opaque(call.name, role, made=call.node, steps=call.words.get("steps"))


def _reduction(machine: Machine, call: Call) -> dict[str, Any]:
    """Return a loss's `reduction`, a mean unless it says otherwise; and the call if its mean leaves out targets."""
    said = call.words.get("reduction")
    reduction = said if isinstance(said, str) else "mean"
    masks = call.name.lower().replace("_", "") in {"crossentropy", "crossentropyloss", "nllloss"}
    ignores = "ignore_index" in call.words or machine.module.ignores_targets
    return {"reduction": reduction, "masked": call.node if reduction == "mean" and masks and ignores else None}


def _deepspeed(_: Machine, call: Call) -> object:
    engine = Opaque("deepspeed", "engine", made=call.node)
    return (engine, engine, Opaque(), Opaque()) if "deepspeed" in call.full else NotImplemented


def _accelerator(_: Machine, call: Call) -> object:
    unseen = any(word == "**" or "plugin" in word for word in call.words)
    steps = call.words.get("gradient_accumulation_steps")
    return Opaque(call.name, "accelerator", made=None if unseen else call.node, steps=steps)


def _data(_: Machine, call: Call) -> object:
    shapes = [each for each in (*call.args, call.words.get("size")) if isinstance(each, tuple)]
    size = shapes[0] if call.name == "randint" and shapes else call.first
    size = size[0] if isinstance(size, tuple) and size else size
    return Items(size, batch, "dataset", is_known=True) if isinstance(size, int) else Loss.of(id(call.node))


def _loader(machine: Machine, call: Call) -> object:
    data, size, drops = call.argument(0, "dataset"), call.argument(1, "batch_size"), call.words.get("drop_last", False)
    length = data.length if isinstance(data, Items) and data.is_known and isinstance(drops, bool) else None
    if length and isinstance(size, int) and size > 0:
        return Items(length // size if drops else -(-length // size), batch, is_known=True)
    return Items(machine.length, batch)


def _range(machine: Machine, call: Call) -> object:
    bounds = [each for each in call.args if isinstance(each, int)]
    if not call.args or len(bounds) < len(call.args) or 0 in bounds[2:]:
        return Items(machine.length, lambda k: k, "range")
    rounds = range(*bounds[:3])
    return Items(len(rounds), lambda k: rounds.start + k * rounds.step, "range", is_known=True)


def _items(machine: Machine, call: Call, position: int = 0) -> Items:
    node = call.node.args[position] if len(call.node.args) > position else call.node
    return machine.items_of(call.args[position] if len(call.args) > position else None, node)


def _enumerate(machine: Machine, call: Call) -> object:
    start, items = call.argument(1, "start") or 0, _items(machine, call)
    number = (lambda k: start + k) if isinstance(start, int) else (lambda _: UNKNOWN)
    return Items(items.length, lambda k: (number(k), items.item(k)), items.kind, items.is_known)


def _zip(machine: Machine, call: Call) -> object:
    parts = [_items(machine, call, position) for position in range(len(call.args))]
    known = [each for each in parts if each.length is not None]
    shortest = min(known, key=lambda each: each.length or 0, default=Items(None, batch, "endless"))
    kind = next((each.kind for each in known if each.kind != "range"), "range" if known else "endless")
    return Items(shortest.length, lambda k: tuple(each.item(k) for each in parts), kind, shortest.is_known)


def _same_items(machine: Machine, call: Call) -> object:
    if not call.args:
        return [] if call.name in {"list", "tuple"} else NotImplemented
    is_list = isinstance(call.first, (list, tuple)) and call.name != "iter"
    return call.first if is_list else _items(machine, call)


def _endless(_: Machine, call: Call) -> object:
    start, step = call.argument(0, "start") or 0, call.argument(1, "step") or 1
    if call.name == "count" and isinstance(start, int) and isinstance(step, int):
        return Items(None, lambda k: start + k * step, "endless")
    return Items(None, batch, "endless")


def _groups(machine: Machine, call: Call) -> object:
    said = call.args[-1] if len(call.args) > 1 else None
    size = said if isinstance(said, int) and said > 0 else machine.steps
    if call.name == "islice":
        return Items(size, batch, "pieces")
    whole = (call.first.length if isinstance(call.first, Items) else None) or machine.length
    return Items(-(-whole // size), lambda k: Items(min(size, whole - k * size), batch, "pieces"), "batched")


def _scale(_: Machine, call: Call) -> object:
    is_scaled = call.name == "scale"  # apex' scale_loss does it by itself
    return (
        replace(Loss.given(call.first), is_scaled=is_scaled)
        if call.role == "scaler" or not is_scaled
        else NotImplemented
    )


def _reduced(_: Machine, call: Call) -> object:
    if call.role == "mask":
        return Opaque("", "count", made=call.node)
    if isinstance(call.receiver, Loss):
        whole = call.name == "mean" or (not call.args and "dim" not in call.words)
        return replace(call.receiver, reduction=call.name if whole else "none")
    return NotImplemented


def _number(machine: Machine, call: Call) -> object:
    if call.args and all(isinstance(each, PLAIN) for each in call.args) and call.name in _NUMBER_FUNCTIONS:
        return computed(_NUMBER_FUNCTIONS[call.name], *call.args)
    counts = [each for each in (call.receiver, *call.args) if isinstance(each, Opaque) and each.role == "count"]
    if counts or (isinstance(call.receiver, (Loss, Opaque)) and not call.args):
        return [*counts, call.receiver][0]
    return Opaque(is_setting=not machine.varies(call.node))


def _divided(machine: Machine, call: Call) -> object:
    if call.role == "gradient":
        return machine.emit("rescale", call.node, factor=call.args[-1] if call.args and "div" in call.name else None)
    loss, position = (call.receiver, 0) if isinstance(call.receiver, Loss) else (call.first, 1)
    if not isinstance(loss, Loss) or len(call.args) <= position:
        return NotImplemented
    op, expression = ast.Mult() if call.name.startswith("mul") else ast.Div(), call.node.args[position]
    found = machine.combine(call.node, op, (loss, expression), (call.args[position], expression))
    call.env.update({call.on: found} if call.name.endswith("_") and call.on else {})
    return found


def _append(machine: Machine, call: Call) -> object:
    if isinstance(call.receiver, list) and len(call.receiver) < LONGEST:
        call.receiver.extend(call.args[:1])
    if isinstance(call.first, Loss) and call.first.origins and call.on:
        machine.emit("keep", call.node, loss=call.first, subject=call.on)
    return None


def _len(machine: Machine, call: Call) -> object:
    first, text = call.first, call.written(0)
    if isinstance(first, (list, tuple, dict, str)):
        return len(first)
    if isinstance(first, Items) and first.length is not None:
        return first.length
    if isinstance(first, (Opaque, Loss)) and _LOADERS.search(text):
        return machine.length
    several = not isinstance(first, Loss) or "window" in text
    is_window = PIECES.search(last_part(text)) and several and not text.endswith("batch")
    return machine.steps if is_window else Opaque(f"len({text})", is_setting=not machine.varies(call.node))


def _next(_: Machine, call: Call) -> object:
    items = call.first if isinstance(call.first, Items) else Items(None, batch)
    items.taken += 1
    return items.item((items.taken - 1) % (items.length or items.taken))


def _same(_: Machine, call: Call) -> object:
    return call.receiver if isinstance(call.receiver, (Loss, Opaque)) else NotImplemented


# What calls do, by their last name; a handler that cannot tell returns NotImplemented.
_HANDLERS: dict[str, Callable[[Machine, Call], object]] = {
    "backward manual_backward": _backward,
    "step": _step,
    " ".join(_ON_GRADIENTS): _on_gradients,
    "no_sync no_backward_sync accumulate no_grad inference_mode nullcontext": _context,
    "initialize": _deepspeed,
    "Accelerator": _accelerator,
    "randn rand zeros ones randint empty": _data,
    "TensorDataset": lambda _, call: call.first if isinstance(call.first, Items) else Items(None, batch, "dataset"),
    "DataLoader": _loader,
    "range trange": _range,
    "enumerate": _enumerate,
    "zip": _zip,
    "tqdm track progress_bar iter list notebook_tqdm log_every prefetch tuple reversed sorted": _same_items,
    "cycle repeat count": _endless,
    "islice batched chunked grouper ichunked": _groups,
    "chunk split tensor_split sliced array_split": lambda machine, call: Items(
        machine.steps, lambda k: Loss.of(("piece", id(call), k)), "pieces"
    ),
    "cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy "
    "binary_cross_entropy_with_logits kl_div cosine_embedding_loss ctc_loss": lambda machine, call: Loss.of(
        id(call.node), **_reduction(machine, call)
    ),
    "scale scale_loss": _scale,
    "sum mean": _reduced,
    " ".join(_NUMBER_FUNCTIONS) + " clamp clamp_min clamp_ maximum": _number,
    "div div_ mul mul_ true_divide": _divided,
    "append": _append,
    "len": _len,
    "next": _next,
    "to half double bfloat16 clone contiguous view reshape squeeze unsqueeze flatten cuda cpu long expand": _same,
    "dict": lambda _, call: NotImplemented if call.args else dict(call.words),
    "lr_schedulers": lambda _, call: Opaque(f"{call.on}.lr_schedulers()", "scheduler"),
    "optimizers": lambda _, call: Opaque(f"{call.on}.optimizers()", "optimizer"),
}
CALLS = {name: handler for names, handler in _HANDLERS.items() for name in names.split()}
