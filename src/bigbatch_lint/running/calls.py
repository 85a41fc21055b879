"""Known calls that train, and those that make things: optimizers, scalers, loaders, iterators."""

import ast
from dataclasses import replace

from bigbatch_lint.reading.names import announces_steps, role_made_by
from bigbatch_lint.running.machine import Call, Machine, Table, batch, reduction_of
from bigbatch_lint.running.values import Items, Kind, Loss, Opaque, Via, as_loss, new_loss

CALLS = Table()
_ENDLESS = {"endless", "infinite", "repeat", "forever", "loop_forever"}
_LONGEST_LIST = 64
_VIA: dict[str | None, Via] = {
    "scaler": "scaler", "accelerator": "accelerator", "fabric": "fabric", "engine": "engine"
}  # fmt: skip


# Calls that train: backward, step, clear, clip, scale, and what frameworks have for them.
def _is_unprepared(call: Call) -> bool:
    """Tell whether the receiver is called as the file has made it; what `prepare` returns is of unknown making."""
    return isinstance(call.receiver, Opaque) and call.receiver.made is not None


@CALLS.on("backward manual_backward")
def _backward(machine: Machine, call: Call) -> object:
    first = call.args[0] if call.args else None
    loss, via = as_loss(first), _VIA.get(call.role, "torch")
    divides: bool | None = False
    maker = call.receiver if isinstance(call.receiver, Opaque) and call.receiver.made is not None else None
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
        divides = True if call.role == "engine" and maker and "scale_wrt_gas" not in call.words else None
        via = "engine"
    steps = getattr(call.receiver, "steps", None)
    machine.emit("backward", call.node, loss=loss, via=via, divides=divides, steps=steps)
    return Opaque()


@CALLS.on("step")
def _step(machine: Machine, call: Call) -> object:
    if call.role == "scheduler":
        if not call.args:
            machine.emit("scheduler", call.node, subject=call.on, is_unprepared=_is_unprepared(call))
        return Opaque()
    if call.role == "scaler":
        machine.emit("step", call.node, via="scaler", subject=call.written(0))
        return Opaque(is_setting=False)
    if call.role not in {"optimizer", "engine"} or not isinstance(call.receiver, Opaque):
        return NotImplemented
    made = call.receiver.made
    told = isinstance(made, ast.Call) and any(announces_steps(word.arg or "") for word in made.keywords)
    via = "engine" if told else _VIA.get(call.role, "torch")
    closure = bool(call.args)
    machine.emit("step", call.node, via=via, subject=call.on, is_unprepared=_is_unprepared(call), has_closure=closure)
    return Opaque(is_setting=False)


@CALLS.on("zero_grad clear_grad clear_grads zero_gradients clear_gradients zero_ unscale_ unscale_gradients update")
def _on_gradients(machine: Machine, call: Call) -> object:
    if call.role != {"zero_": "gradient", "update": "scaler"}.get(call.name, call.role):
        return NotImplemented
    kind: Kind = "update" if call.name == "update" else "unscale" if call.name.startswith("unscale") else "zero"
    machine.emit(kind, call.node, subject=call.on, is_unprepared=_is_unprepared(call))
    return Opaque()


@CALLS.on("scale scale_loss")
def _scale(_: Machine, call: Call) -> object:
    if call.name == "scale" and call.role != "scaler":
        return NotImplemented
    return replace(as_loss(call.first), is_scaled=call.name == "scale")


@CALLS.on("div_ mul_")
def _rescale(machine: Machine, call: Call) -> object:
    if call.role != "gradient":
        return NotImplemented
    machine.emit("rescale", call.node, factor=call.args[-1] if call.args and "div" in call.name else None)
    return Opaque()


@CALLS.on("no_sync no_backward_sync accumulate no_grad inference_mode nullcontext")
def _context(machine: Machine, call: Call) -> object:
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


def _deepspeed(_: Machine, call: Call) -> object:
    engine = Opaque("deepspeed", "engine", made=call.node)
    return (engine, engine, Opaque(), Opaque()) if "deepspeed" in call.full else NotImplemented


CALLS.update(
    TensorDataset=lambda _, call: call.first if isinstance(call.first, Items) else Items(None, batch, "dataset"),
    compile=lambda _, call: call.first if isinstance(call.first, Opaque) else NotImplemented,
    dict=lambda _, call: NotImplemented if call.args else dict(call.words),
    initialize=_deepspeed,
    lr_schedulers=lambda _, call: Opaque(f"{call.on}.lr_schedulers()", "scheduler"),
    optimizers=lambda _, call: Opaque(f"{call.on}.optimizers()", "optimizer"),
)


@CALLS.on("Accelerator")
def _accelerator(_: Machine, call: Call) -> object:
    unseen = any(word == "**" or "plugin" in word for word in call.words)
    steps = call.words.get("gradient_accumulation_steps")
    return Opaque(call.name, "accelerator", made=None if unseen else call.node, steps=steps)


@CALLS.on("randn rand zeros ones randint empty")
def _data(_: Machine, call: Call) -> object:
    shapes = [each for each in (*call.args, call.words.get("size")) if isinstance(each, tuple)]
    size = shapes[0] if call.name == "randint" and shapes else call.first
    size = size[0] if isinstance(size, tuple) and size else size
    if isinstance(size, int):
        return Items(size, lambda _: Opaque(is_setting=False), "dataset", is_known=True)
    return new_loss(id(call.node))


@CALLS.on("DataLoader")
def _loader(machine: Machine, call: Call) -> object:
    data, size, drops = call.argument(0, "dataset"), call.argument(1, "batch_size"), call.words.get("drop_last", False)
    known = isinstance(data, Items) and data.is_known and isinstance(drops, bool)
    if known and isinstance(data, Items) and data.length and isinstance(size, int) and size > 0:
        return Items(data.length // size if drops else -(-data.length // size), batch, is_known=True)
    return Items(machine.length, batch)


@CALLS.on("range trange")
def _range(machine: Machine, call: Call) -> object:
    bounds = [each for each in call.args if isinstance(each, int)]
    if not call.args or len(bounds) < len(call.args) or 0 in bounds[2:]:
        return Items(machine.length, lambda k: k, "range")
    rounds = range(*bounds[:3])
    return Items(len(rounds), lambda k: rounds.start + k * rounds.step, "range", is_known=True)


def _items(machine: Machine, call: Call, position: int = 0) -> Items:
    node = call.node.args[position] if len(call.node.args) > position else call.node
    return machine.items_of(call.args[position] if len(call.args) > position else None, node)


@CALLS.on("enumerate")
def _enumerate(machine: Machine, call: Call) -> object:
    start, items = call.argument(1, "start") or 0, _items(machine, call)
    number = (lambda k: start + k) if isinstance(start, int) else (lambda _: Opaque(is_setting=False))
    return Items(items.length, lambda k: (number(k), items.item(k)), items.kind, items.is_known)


@CALLS.on("zip")
def _zip(machine: Machine, call: Call) -> object:
    parts = [_items(machine, call, position) for position in range(len(call.args))]
    known = [each for each in parts if each.length is not None]
    sure = [each for each in known if each.kind != "loader"] or known
    shortest = min(sure, key=lambda each: each.length or 0, default=Items(None, batch, "endless"))
    kind = next((each.kind for each in known if each.kind != "range"), "range" if known else "endless")
    return Items(shortest.length, lambda k: tuple(each.item(k) for each in parts), kind, shortest.is_known)


@CALLS.on("tqdm track progress_bar iter list notebook_tqdm log_every prefetch tuple reversed sorted")
def _same_items(machine: Machine, call: Call) -> object:
    if not call.args:
        return [] if call.name in {"list", "tuple"} else NotImplemented
    is_list = isinstance(call.args[0], (list, tuple)) and call.name != "iter"
    return call.args[0] if is_list else _items(machine, call)


@CALLS.on("cycle repeat count")
def _endless(_: Machine, call: Call) -> object:
    if isinstance(call.receiver, Loss):
        return NotImplemented
    start, step = call.argument(0, "start") or 0, call.argument(1, "step") or 1
    if call.name == "count" and isinstance(start, int) and isinstance(step, int):
        return Items(None, lambda k: start + k * step, "endless")
    again = call.first if isinstance(call.first, (list, tuple)) else ()
    if again:
        return Items(None, lambda k: again[k % len(again)], "endless")
    return Items(None, batch if call.name != "count" else lambda _: Opaque(is_setting=False), "endless")


@CALLS.on("islice batched chunked grouper ichunked")
def _groups(machine: Machine, call: Call) -> object:
    if len(call.args) < 2:  # noqa: PLR2004
        return NotImplemented
    if call.name == "islice":
        return Items(call.args[-1] if isinstance(call.args[-1], int) else machine.steps, batch, "pieces")
    size = call.args[1] if isinstance(call.args[1], int) and call.args[1] > 0 else machine.steps
    whole = (call.args[0].length if isinstance(call.args[0], Items) else None) or machine.length
    return Items(-(-whole // size), lambda k: Items(min(size, whole - k * size), batch, "pieces"), "batched")


@CALLS.on("chunk split tensor_split sliced array_split")
def _pieces(machine: Machine, call: Call) -> object:
    given = [each for each in call.args if isinstance(each, int) and each <= _LONGEST_LIST]
    count = given[0] if given and call.name in {"chunk", "tensor_split", "array_split"} else machine.steps
    return Items(count, lambda k: new_loss(("piece", id(call), k)), "pieces")
