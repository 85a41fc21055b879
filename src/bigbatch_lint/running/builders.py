"""Calls that make things: optimizers, scalers, loaders, iterators, and Python's own functions over them."""

import ast
import itertools
from collections.abc import Callable
from functools import lru_cache

from bigbatch_lint.reading.names import MODELS, OPTIMIZERS, SCHEDULERS, Role
from bigbatch_lint.running.call import UNKNOWN, Call, Table
from bigbatch_lint.running.machine import Machine, batch
from bigbatch_lint.running.values import Items, Loss, Opaque, new_loss

_TABLE = Table()
_ENDLESS = {"endless", "infinite", "repeat", "forever", "loop_forever"}
_LONGEST_LIST = 64
_BY_NAME = ((Role.OPTIMIZER, OPTIMIZERS), (Role.SCHEDULER, SCHEDULERS), (Role.MODEL, MODELS))


def build(machine: Machine, call: Call) -> object:
    """Handle a call that makes something."""
    if call.words and any(
        word.arg in _ENDLESS and call.constant(word.arg or "") is True for word in call.node.keywords
    ):
        return Items(None, batch, "endless")
    found = _TABLE(machine, call)
    if found is not UNKNOWN:
        return found
    if call.name.endswith("Loss") and call.name[:1].isupper():
        reduction = reduction_of(call)
        masked = masked_by(machine, call) if reduction == "mean" else None
        return Opaque(call.name, Role.CRITERION, made=call.node, reduction=reduction, masked=masked)
    role = _made_by(call.name)
    return UNKNOWN if role is None else Opaque(call.name, role, made=call.node)


@lru_cache(maxsize=8192)
def _made_by(name: str) -> Role | None:
    """Return what a function makes by its name."""
    return next((role for role, pattern in _BY_NAME if pattern.search(name)), None)


def reduction_of(call: Call) -> str:
    """Return a loss's `reduction`, which is a mean unless it says otherwise."""
    said = call.constant("reduction")
    return said if isinstance(said, str) else "mean"


def masked_by(machine: Machine, call: Call) -> ast.AST | None:
    """Return the call if its mean leaves out some targets."""
    if call.name.lower().replace("_", "") not in {"crossentropy", "crossentropyloss", "nllloss"}:
        return None
    ignores = any(word.arg == "ignore_index" for word in call.node.keywords) or machine.module.ignores_targets
    return call.node if ignores else None


@_TABLE.on("GradScaler ShardedGradScaler")
def _scaler(_: Machine, call: Call) -> object:
    return Opaque(call.name, Role.SCALER, made=call.node)


@_TABLE.on("Accelerator")
def _accelerator(_: Machine, call: Call) -> object:
    steps, plugin = call.words.get("gradient_accumulation_steps"), call.words.get("gradient_accumulation_plugin")
    unseen = any(word == "**" or word.startswith(("deepspeed", "megatron")) for word in call.words)
    if isinstance(plugin, Opaque):
        steps = plugin.steps
    return Opaque(call.name, Role.ACCELERATOR, made=None if unseen else call.node, steps=steps)


@_TABLE.on("GradientAccumulationPlugin")
def _plugin(_: Machine, call: Call) -> object:
    return Opaque(call.name, Role.CONTEXT, made=call.node, steps=call.words.get("num_steps", call.first))


@_TABLE.on("Fabric")
def _fabric(_: Machine, call: Call) -> object:
    return Opaque(call.name, Role.FABRIC, made=call.node)


@_TABLE.on("Accumulator BigStep")
def _bigbatch(_: Machine, call: Call) -> object:
    return Opaque(call.name, Role.ENGINE, made=call.node, steps=call.words.get("steps"))


@_TABLE.on("initialize")
def _deepspeed(_: Machine, call: Call) -> object:
    if "deepspeed" not in call.full:
        return UNKNOWN
    engine = Opaque("deepspeed", Role.ENGINE, made=call.node)
    return engine, engine, Opaque(), Opaque()


@_TABLE.on("compile")
def _compiled(_: Machine, call: Call) -> object:
    return call.first if isinstance(call.first, Opaque) else UNKNOWN


@_TABLE.on("randn rand zeros ones randint empty arange")
def _data(_: Machine, call: Call) -> object:
    sizes = [each for each in (*call.args, call.words.get("size")) if isinstance(each, tuple)]
    size = (sizes[0] if sizes else call.first) if call.name == "randint" else call.first
    size = size[0] if isinstance(size, tuple) and size else size
    if isinstance(size, int) and call.name != "arange":
        return Items(size, lambda _: Opaque(is_setting=False), "dataset", is_known=True)
    return new_loss(id(call.node))


@_TABLE.on("TensorDataset")
def _dataset(_: Machine, call: Call) -> object:
    return call.first if isinstance(call.first, Items) else Items(None, batch, "dataset")


@_TABLE.on("DataLoader")
def _loader(machine: Machine, call: Call) -> object:
    data, size = call.argument(0, "dataset"), call.argument(1, "batch_size")
    drops = call.words.get("drop_last", False)
    known = isinstance(data, Items) and data.is_known and isinstance(drops, bool)
    if known and isinstance(data, Items) and data.length and isinstance(size, int) and size > 0:
        length = data.length // size if drops else -(-data.length // size)
        return Items(length, batch, text="loader", is_known=True)
    return Items(machine.length, batch, text="loader")


@_TABLE.on("dict")
def _dict(_: Machine, call: Call) -> object:
    return UNKNOWN if call.args else dict(call.words)


@_TABLE.on("range")
def _range(machine: Machine, call: Call) -> object:
    bounds = [each for each in call.args if isinstance(each, int)]
    if not call.args or len(bounds) < len(call.args) or 0 in bounds[2:]:
        return Items(machine.length, lambda k: k, "range")
    rounds = range(*bounds)
    return Items(len(rounds), lambda k: rounds.start + k * rounds.step, "range", is_known=True)


@_TABLE.on("trange")
def _trange(machine: Machine, call: Call) -> object:
    length = call.first if isinstance(call.first, int) else machine.length
    return Items(length, lambda k: k, "range", is_known=length == call.first)


@_TABLE.on("enumerate")
def _enumerate(machine: Machine, call: Call) -> object:
    start, items = call.argument(1, "start") or 0, _items(machine, call)
    if not isinstance(start, int):
        return _mapped(items, lambda k: (Opaque(is_setting=False), items.item(k)))
    return _mapped(items, lambda k: (start + k, items.item(k)))


def _items(machine: Machine, call: Call, position: int = 0) -> Items:
    node = call.node.args[position] if len(call.node.args) > position else call.node
    return machine.items_of(call.args[position] if len(call.args) > position else None, node)


def _mapped(items: Items, item: Callable[[int], object]) -> Items:
    return Items(items.length, item, items.kind, items.text, items.is_known)


@_TABLE.on("zip")
def _zip(machine: Machine, call: Call) -> object:
    parts = [_items(machine, call, position) for position in range(len(call.args))]
    known = [each for each in parts if each.length is not None]
    sure = [each for each in known if each.kind != "loader" or len(parts) == 1] or known
    shortest = min(sure, key=lambda each: each.length or 0, default=None)
    kind = next((each.kind for each in known if each.kind != "range"), "range" if known else "endless")
    length, is_known = (shortest.length, shortest.is_known) if shortest is not None else (None, False)
    return Items(length, lambda k: tuple(each.item(k) for each in parts), kind, is_known=is_known)


@_TABLE.on("tqdm track progress_bar iter list notebook_tqdm log_every prefetch tuple reversed sorted")
def _same_items(machine: Machine, call: Call) -> object:
    if not call.args:
        return [] if call.name in {"list", "tuple"} else UNKNOWN
    if isinstance(call.args[0], (list, tuple)) and call.name == "iter":
        return _items(machine, call)
    return call.args[0] if isinstance(call.args[0], (list, tuple)) else _items(machine, call)


@_TABLE.on("cycle repeat count")
def _endless(_: Machine, call: Call) -> object:
    if isinstance(call.receiver, Loss):
        return UNKNOWN
    if call.name == "count":
        start, step = call.argument(0, "start") or 0, call.argument(1, "step") or 1
        if not (isinstance(start, int) and isinstance(step, int)):
            return Items(None, lambda _: Opaque(is_setting=False), "endless")
        return Items(None, lambda k: start + k * step, "endless")
    if isinstance(call.first, (list, tuple)) and call.first:
        again = list(itertools.islice(call.first, _LONGEST_LIST))
        return Items(None, lambda k: again[k % len(again)], "endless")
    return Items(None, batch, "endless")


@_TABLE.on("islice")
def _islice(machine: Machine, call: Call) -> object:
    if len(call.args) < 2:  # noqa: PLR2004
        return UNKNOWN
    return Items(call.args[-1] if isinstance(call.args[-1], int) else machine.steps, batch, "pieces")


@_TABLE.on("batched chunked grouper ichunked")
def _batched(machine: Machine, call: Call) -> object:
    if len(call.args) < 2:  # noqa: PLR2004
        return UNKNOWN
    size = call.args[1] if isinstance(call.args[1], int) and call.args[1] > 0 else machine.steps
    whole = (call.args[0].length if isinstance(call.args[0], Items) else None) or machine.length
    groups = -(-whole // size)
    return Items(groups, lambda k: Items(min(size, whole - k * size), batch, "pieces"), "batched")


@_TABLE.on("chunk split tensor_split sliced array_split")
def _pieces(machine: Machine, call: Call) -> object:
    given = next((each for each in call.args if isinstance(each, int)), machine.steps)
    count = given if call.name in {"chunk", "tensor_split", "array_split"} else machine.steps
    return Items(
        count if count <= _LONGEST_LIST else machine.steps, lambda k: new_loss(("piece", id(call), k)), "pieces"
    )
