"""Known calls: those that train, those that make things, and those on tensors, numbers and containers."""

import ast
import math
import re
from collections.abc import Callable
from dataclasses import replace

from bigbatch_lint.reading.names import PIECES, announces_steps, last_part, role_made_by
from bigbatch_lint.running.machine import Call, Machine, batch, computed, reduction_of
from bigbatch_lint.running.values import PLAIN, UNKNOWN, Items, Kind, Loss, Opaque, Via, as_loss, new_loss, sum_of

_ENDLESS = {"endless", "infinite", "repeat", "forever", "loop_forever"}
_MOST_PIECES = 64
_LONGEST_LIST = 1000
_VIA: dict[str | None, Via] = {
    "scaler": "scaler", "accelerator": "accelerator", "fabric": "fabric", "engine": "engine"
}  # fmt: skip
_LOADERS = re.compile("load|batches|stream|dl$")
_NUMBER_FUNCTIONS: dict[str, Callable[..., object]] = {
    "float": float, "int": int, "abs": abs, "round": round, "bool": bool, "min": min, "max": max,
    "ceil": math.ceil, "floor": math.floor, "divmod": divmod, "gcd": math.gcd,
}  # fmt: skip
_Handler = Callable[[Machine, Call], object]
# What calls do, by their last name; a handler that cannot tell returns NotImplemented.
CALLS: dict[str, _Handler] = {}


def _on(names: str) -> Callable[[_Handler], _Handler]:
    """Register a function for calls of these names."""

    def register(handler: _Handler) -> _Handler:
        CALLS.update(dict.fromkeys(names.split(), handler))
        return handler

    return register


# Calls that train: backward, step, clear, clip, scale, and what frameworks have for them.
@_on("backward manual_backward")
def _backward(machine: Machine, call: Call) -> object:
    first = call.args[0] if call.args else None
    loss, via = as_loss(first), _VIA.get(call.role, "torch")
    divides: bool | None = False
    maker = call.receiver if isinstance(call.receiver, Opaque) and call.is_made else None
    if call.name == "manual_backward" or call.full.startswith("torch."):
        via = "torch"
    elif call.role == "accelerator":
        divides = None if maker is None else maker.steps not in {None, 1}
    elif call.role == "fabric":
        loss = replace(loss, weight=None) if len(call.args) > 1 else loss
    elif call.role is None and (isinstance(call.receiver, Loss) or not isinstance(first, Loss)):
        loss = as_loss(call.receiver)
        via = "scaler" if loss.is_scaled else "torch"
        loss = replace(loss, weight=None) if call.args or "gradient" in call.words else loss
    else:
        via, divides = "engine", True if call.role == "engine" and maker and "scale_wrt_gas" not in call.words else None
    steps = getattr(call.receiver, "steps", None)
    return machine.emit("backward", call.node, loss=loss, via=via, divides=divides, steps=steps)


@_on("step")
def _step(machine: Machine, call: Call) -> object:
    if call.role == "scheduler":
        return None if call.args else machine.emit("scheduler", call.node, subject=call.on, is_unprepared=call.is_made)
    if call.role == "scaler":
        return machine.emit("step", call.node, via="scaler", subject=call.written(0))
    if call.role not in {"optimizer", "engine"}:
        return NotImplemented
    made = getattr(call.receiver, "made", None)
    told = isinstance(made, ast.Call) and any(announces_steps(word.arg or "") for word in made.keywords)
    via, closure = "engine" if told else _VIA.get(call.role, "torch"), bool(call.args)
    return machine.emit("step", call.node, via=via, subject=call.on, is_unprepared=call.is_made, has_closure=closure)


@_on("zero_grad clear_grad clear_grads zero_gradients clear_gradients zero_ unscale_ unscale_gradients update")
def _on_gradients(machine: Machine, call: Call) -> object:
    if call.role != {"zero_": "gradient", "update": "scaler"}.get(call.name, call.role):
        return NotImplemented
    kind: Kind = "update" if call.name == "update" else "unscale" if call.name.startswith("unscale") else "zero"
    return machine.emit(kind, call.node, subject=call.on, is_unprepared=call.is_made)


@_on("no_sync no_backward_sync accumulate no_grad inference_mode nullcontext")
def _context(_: Machine, call: Call) -> object:
    subject = call.on if call.name == "no_sync" and call.role != "accelerator" else call.written(0)
    return Opaque(subject, "context", made=call.node, context=call.name.replace("no_backward_sync", "no_sync"))


# Calls that make things.
def make(machine: Machine, call: Call) -> object:
    """Return what a function makes by its name and its words; NotImplemented if they do not say."""
    if any(call.words.get(word) is True for word in _ENDLESS):
        return Items(None, batch, "endless")
    if call.name.endswith("Loss") and call.name[:1].isupper():
        reduction, masked = reduction_of(machine, call)
        return Opaque(call.name, "criterion", made=call.node, reduction=reduction, masked=masked)
    role = role_made_by(call.name)
    return NotImplemented if role is None else Opaque(call.name, role, made=call.node, steps=call.words.get("steps"))


@_on("initialize")
def _deepspeed(_: Machine, call: Call) -> object:
    engine = Opaque("deepspeed", "engine", made=call.node)
    return (engine, engine, Opaque(), Opaque()) if "deepspeed" in call.full else NotImplemented


@_on("Accelerator")
def _accelerator(_: Machine, call: Call) -> object:
    unseen = any(word == "**" or "plugin" in word for word in call.words)
    steps = call.words.get("gradient_accumulation_steps")
    return Opaque(call.name, "accelerator", made=None if unseen else call.node, steps=steps)


@_on("randn rand zeros ones randint empty")
def _data(_: Machine, call: Call) -> object:
    shapes = [each for each in (*call.args, call.words.get("size")) if isinstance(each, tuple)]
    size = shapes[0] if call.name == "randint" and shapes else call.first
    size = size[0] if isinstance(size, tuple) and size else size
    if isinstance(size, int):
        return Items(size, lambda _: UNKNOWN, "dataset", is_known=True)
    return new_loss(id(call.node))


@_on("DataLoader")
def _loader(machine: Machine, call: Call) -> object:
    data, size, drops = call.argument(0, "dataset"), call.argument(1, "batch_size"), call.words.get("drop_last", False)
    length = data.length if isinstance(data, Items) and data.is_known and isinstance(drops, bool) else None
    if length and isinstance(size, int) and size > 0:
        return Items(length // size if drops else -(-length // size), batch, is_known=True)
    return Items(machine.length, batch)


@_on("range trange")
def _range(machine: Machine, call: Call) -> object:
    bounds = [each for each in call.args if isinstance(each, int)]
    if not call.args or len(bounds) < len(call.args) or 0 in bounds[2:]:
        return Items(machine.length, lambda k: k, "range")
    rounds = range(*bounds[:3])
    return Items(len(rounds), lambda k: rounds.start + k * rounds.step, "range", is_known=True)


def _items(machine: Machine, call: Call, position: int = 0) -> Items:
    node = call.node.args[position] if len(call.node.args) > position else call.node
    return machine.items_of(call.args[position] if len(call.args) > position else None, node)


@_on("enumerate")
def _enumerate(machine: Machine, call: Call) -> object:
    start, items = call.argument(1, "start") or 0, _items(machine, call)
    number = (lambda k: start + k) if isinstance(start, int) else (lambda _: UNKNOWN)
    return Items(items.length, lambda k: (number(k), items.item(k)), items.kind, items.is_known)


@_on("zip")
def _zip(machine: Machine, call: Call) -> object:
    parts = [_items(machine, call, position) for position in range(len(call.args))]
    known = [each for each in parts if each.length is not None]
    sure = [each for each in known if each.kind != "loader"] or known
    shortest = min(sure, key=lambda each: each.length or 0, default=Items(None, batch, "endless"))
    kind = next((each.kind for each in known if each.kind != "range"), "range" if known else "endless")
    return Items(shortest.length, lambda k: tuple(each.item(k) for each in parts), kind, shortest.is_known)


@_on("tqdm track progress_bar iter list notebook_tqdm log_every prefetch tuple reversed sorted")
def _same_items(machine: Machine, call: Call) -> object:
    if not call.args:
        return [] if call.name in {"list", "tuple"} else NotImplemented
    is_list = isinstance(call.args[0], (list, tuple)) and call.name != "iter"
    return call.args[0] if is_list else _items(machine, call)


@_on("cycle repeat count")
def _endless(_: Machine, call: Call) -> object:
    if isinstance(call.receiver, Loss):
        return NotImplemented
    start, step, again = call.argument(0, "start") or 0, call.argument(1, "step") or 1, call.first
    item: Callable[[int], object] = (lambda _: UNKNOWN) if call.name == "count" else batch
    if call.name == "count" and isinstance(start, int) and isinstance(step, int):
        item = lambda k: start + k * step  # noqa: E731 - one of three
    elif isinstance(again, (list, tuple)) and again:
        item = lambda k: again[k % len(again)]  # noqa: E731 - one of three
    return Items(None, item, "endless")


@_on("islice batched chunked grouper ichunked")
def _groups(machine: Machine, call: Call) -> object:
    if len(call.args) < 2:  # noqa: PLR2004
        return NotImplemented
    if call.name == "islice":
        return Items(call.args[-1] if isinstance(call.args[-1], int) else machine.steps, batch, "pieces")
    size = call.args[1] if isinstance(call.args[1], int) and call.args[1] > 0 else machine.steps
    whole = (call.args[0].length if isinstance(call.args[0], Items) else None) or machine.length
    return Items(-(-whole // size), lambda k: Items(min(size, whole - k * size), batch, "pieces"), "batched")


@_on("chunk split tensor_split sliced array_split")
def _pieces(machine: Machine, call: Call) -> object:
    given = [each for each in call.args if isinstance(each, int) and each <= _MOST_PIECES]
    count = given[0] if given and call.name in {"chunk", "tensor_split", "array_split"} else machine.steps
    return Items(count, lambda k: new_loss(("piece", id(call), k)), "pieces")


# Calls on tensors, losses, numbers and containers.
@_on(
    "cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy "
    "binary_cross_entropy_with_logits kl_div cosine_embedding_loss ctc_loss"
)
def _loss(machine: Machine, call: Call) -> object:
    reduction, masked = reduction_of(machine, call)
    return new_loss(id(call.node), reduction=reduction, masked=masked)


@_on("scale scale_loss")
def _scale(_: Machine, call: Call) -> object:
    is_scaled = call.name == "scale"
    return NotImplemented if is_scaled and call.role != "scaler" else replace(as_loss(call.first), is_scaled=is_scaled)


@_on("sum mean ne")
def _reduced(_: Machine, call: Call) -> object:
    if call.name == "ne" or call.role == "mask":
        return Opaque("", "mask" if call.name == "ne" else "count", made=call.node)
    if isinstance(call.receiver, Loss):
        whole = call.name == "mean" or (not call.args and "dim" not in call.words)
        return replace(call.receiver, reduction=call.name if whole else "none")
    parts = [call.first.item(0)] if isinstance(call.first, Items) else call.first
    if call.on or not isinstance(parts, list):
        return NotImplemented
    losses = [each for each in parts if isinstance(each, Loss)]
    if losses:
        return replace(sum_of(call.node, losses), weight=losses[0].weight if len(losses) == len(parts) else None)
    return computed(sum, parts) if parts else NotImplemented


@_on("float int abs round bool ceil floor divmod gcd min max clamp clamp_min clamp_ maximum")
def _number(machine: Machine, call: Call) -> object:
    counts = [each for each in (call.receiver, *call.args) if isinstance(each, Opaque) and each.role == "count"]
    if counts or (isinstance(call.receiver, (Loss, Opaque)) and not call.args):
        return [*counts, call.receiver][0]
    if call.name.startswith(("clamp", "maximum")):
        return NotImplemented
    if call.args and all(isinstance(each, PLAIN) for each in call.args):
        return computed(_NUMBER_FUNCTIONS[call.name], *call.args)
    if call.name == "divmod":
        return UNKNOWN, Opaque(is_setting=False, is_remainder=True)
    if call.name in {"float", "int", "bool", "abs", "round"}:
        return call.first.detached() if isinstance(call.first, Loss) else call.first
    return Opaque(is_setting=not machine.varies(call.node))


@_on("div div_ mul mul_ true_divide")
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


@_on("append clear")
def _change_list(machine: Machine, call: Call) -> object:
    known = call.receiver if isinstance(call.receiver, list) else []
    known[:] = [] if call.name == "clear" else [*known[-_LONGEST_LIST:], *call.args[:1]]
    if isinstance(call.first, Loss) and call.first.live and call.on:
        machine.emit("keep", call.node, loss=call.first, subject=call.on)
    return None


@_on("items values")
def _of_dict(_: Machine, call: Call) -> object:
    if isinstance(call.receiver, dict):
        return list(call.receiver.items() if call.name == "items" else call.receiver.values())
    if not isinstance(call.receiver, Loss) or call.args:
        return NotImplemented
    value = call.receiver.part(call.name)
    return [(UNKNOWN, value) if call.name == "items" else value]


@_on("len")
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


@_on("next")
def _next(_: Machine, call: Call) -> object:
    if not isinstance(call.first, Items):
        return batch()
    ended = call.first.length is not None and call.first.taken >= call.first.length
    if ended and len(call.args) > 1:
        return Opaque("None", "nothing") if call.args[1] is None else call.args[1]
    return call.first.next()


@_on("enter_context")
def _enter(machine: Machine, call: Call) -> object:
    machine.contexts += [call.first] if isinstance(call.first, Opaque) and call.first.role == "context" else []
    return call.first


def _same(_: Machine, call: Call) -> object:
    return call.receiver if isinstance(call.receiver, (Loss, Opaque)) else NotImplemented


_SAME = "to half double bfloat16 clone contiguous view reshape squeeze unsqueeze flatten cuda cpu long expand"
CALLS.update(
    dict.fromkeys(_SAME.split(), _same),
    TensorDataset=lambda _, call: call.first if isinstance(call.first, Items) else Items(None, batch, "dataset"),
    compile=lambda _, call: call.first if isinstance(call.first, Opaque) else NotImplemented,
    dict=lambda _, call: NotImplemented if call.args else dict(call.words),
    lr_schedulers=lambda _, call: Opaque(f"{call.on}.lr_schedulers()", "scheduler"),
    optimizers=lambda _, call: Opaque(f"{call.on}.optimizers()", "optimizer"),
)
