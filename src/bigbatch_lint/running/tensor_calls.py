"""Known calls on tensors, losses, numbers and containers."""

import ast
import math
import re
from collections.abc import Callable
from dataclasses import replace

from bigbatch_lint.reading.names import PIECES, last_part
from bigbatch_lint.running.machine import Call, Machine, Table, batch, computed, reduction_of
from bigbatch_lint.running.values import PLAIN, Items, Loss, Opaque, new_loss, sum_of

TENSOR_CALLS = Table()
_LOADERS = re.compile("load|batches|stream|dl$")
_LONGEST_LIST = 1000
_NUMBER_FUNCTIONS: dict[str, Callable[..., object]] = {
    "float": float, "int": int, "abs": abs, "round": round, "bool": bool, "min": min, "max": max,
    "ceil": math.ceil, "floor": math.floor, "divmod": divmod, "gcd": math.gcd,
}  # fmt: skip


@TENSOR_CALLS.on(
    "cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy "
    "binary_cross_entropy_with_logits kl_div cosine_embedding_loss ctc_loss"
)
def _loss(machine: Machine, call: Call) -> object:
    reduction, masked = reduction_of(machine, call)
    return new_loss(id(call.node), reduction=reduction, masked=masked)


@TENSOR_CALLS.on("to half double bfloat16 clone contiguous view reshape squeeze unsqueeze flatten cuda cpu long expand")
def _same(_: Machine, call: Call) -> object:
    return call.receiver if isinstance(call.receiver, (Loss, Opaque)) else NotImplemented


@TENSOR_CALLS.on("sum mean ne")
def _reduced(machine: Machine, call: Call) -> object:
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


@TENSOR_CALLS.on("float int abs round bool ceil floor divmod gcd min max clamp clamp_min clamp_ maximum")
def _number(machine: Machine, call: Call) -> object:
    counts = [each for each in (call.receiver, *call.args) if isinstance(each, Opaque) and each.role == "count"]
    if counts or (isinstance(call.receiver, (Loss, Opaque)) and not call.args):
        return [*counts, call.receiver][0]
    if call.name.startswith(("clamp", "maximum")):
        return NotImplemented
    if call.args and all(isinstance(each, PLAIN) for each in call.args):
        return computed(_NUMBER_FUNCTIONS[call.name], *call.args)
    if call.name == "divmod":
        return Opaque(is_setting=False), Opaque(is_setting=False, is_remainder=True)
    if call.name in {"float", "int", "bool", "abs", "round"}:
        return call.first.detached() if isinstance(call.first, Loss) else call.first
    return Opaque(is_setting=not machine.varies(call.node))


@TENSOR_CALLS.on("div div_ mul mul_ true_divide")
def _divided(machine: Machine, call: Call) -> object:
    loss, position = (call.receiver, 0) if isinstance(call.receiver, Loss) else (call.first, 1)
    if not isinstance(loss, Loss) or len(call.args) <= position:
        return NotImplemented
    op, expression = ast.Mult() if call.name.startswith("mul") else ast.Div(), call.node.args[position]
    found = machine.combine(call.node, op, (loss, expression), (call.args[position], expression))
    if call.name.endswith("_") and call.on:
        call.env[call.on] = found
    return found


@TENSOR_CALLS.on("append clear")
def _change_list(machine: Machine, call: Call) -> object:
    known = call.receiver if isinstance(call.receiver, list) else []
    if call.name == "clear" or len(known) > _LONGEST_LIST:
        known.clear()
    if isinstance(call.first, Loss) and call.first.live and call.on:
        machine.emit("keep", call.node, loss=call.first, subject=call.on)
    known += call.args[:1]
    return None


@TENSOR_CALLS.on("items values")
def _of_dict(_: Machine, call: Call) -> object:
    if isinstance(call.receiver, dict):
        return list(call.receiver.items() if call.name == "items" else call.receiver.values())
    if not isinstance(call.receiver, Loss) or call.args:
        return NotImplemented
    value = call.receiver.part(call.name)
    return [(Opaque(is_setting=False), value) if call.name == "items" else value]


@TENSOR_CALLS.on("len")
def _len(machine: Machine, call: Call) -> object:
    if isinstance(call.first, Items) and call.first.length is not None:
        return call.first.length
    if isinstance(call.first, (list, tuple, dict, str)):
        return len(call.first)
    text = call.written(0)
    if isinstance(call.first, (Opaque, Loss)) and _LOADERS.search(text):
        return machine.length
    several = not isinstance(call.first, Loss) or "window" in text
    if PIECES.search(last_part(text)) and several and not text.endswith("batch"):
        return machine.steps
    return Opaque(f"len({text})", is_setting=not machine.varies(call.node))


@TENSOR_CALLS.on("next")
def _next(_: Machine, call: Call) -> object:
    if not isinstance(call.first, Items):
        return batch()
    ended = call.first.length is not None and call.first.taken >= call.first.length
    if ended and len(call.args) > 1:
        return Opaque("None", "nothing") if call.args[1] is None else call.args[1]
    return call.first.next()


@TENSOR_CALLS.on("enter_context")
def _enter(machine: Machine, call: Call) -> object:
    machine.contexts += [call.first] if isinstance(call.first, Opaque) and call.first.role == "context" else []
    return call.first
