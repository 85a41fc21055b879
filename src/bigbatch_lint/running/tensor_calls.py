"""Known calls on tensors, losses, numbers and containers."""

import math
import re
from collections.abc import Callable
from dataclasses import replace

from bigbatch_lint.reading.names import PIECES, last_part
from bigbatch_lint.running.calls import reduction_of
from bigbatch_lint.running.machine import Call, Machine, Table, batch, computed
from bigbatch_lint.running.values import NUMBERS, PLAIN, Division, Items, Loss, Opaque, new_loss

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


@TENSOR_CALLS.on(
    "to half double bfloat16 clone contiguous view reshape squeeze unsqueeze flatten cuda cpu long requires_grad_ "
    "expand item tolist numpy detach detach_"
)
def _same(_: Machine, call: Call) -> object:
    if isinstance(call.receiver, Loss) and call.name in {"item", "tolist", "numpy", "detach", "detach_"}:
        return call.receiver.detached()
    return call.receiver if isinstance(call.receiver, (Loss, Opaque)) else NotImplemented


@TENSOR_CALLS.on("sum mean masked_select ne")
def _reduced(machine: Machine, call: Call) -> object:
    if call.name == "ne":
        return Opaque("", "mask", made=call.node)
    if call.role == "mask" and call.name == "sum":
        return Opaque("", "count", made=call.node)
    if isinstance(call.receiver, Loss):
        if call.name == "masked_select":
            return replace(call.receiver, masked=call.node)
        whole = call.name == "mean" or (not call.args and "dim" not in call.words)
        return replace(call.receiver, reduction=call.name if whole else "none")
    return NotImplemented if call.on or call.name != "sum" else _python_sum(machine, call)


def _python_sum(machine: Machine, call: Call) -> object:
    """Return what `sum(parts)` is: of losses one loss, of equal weight only if all of them are known."""
    parts = [call.first.item(0)] if isinstance(call.first, Items) else call.first
    if not isinstance(parts, list):
        return NotImplemented
    losses = [each for each in parts if isinstance(each, Loss)]
    if not losses:
        numbers = [each for each in parts if isinstance(each, NUMBERS)]
        unknown = len(numbers) < len(parts) or not parts
        return Opaque(is_setting=not machine.varies(call.node)) if unknown else sum(numbers)
    known = len(losses) == len(parts) and all(each.weight is not None for each in losses)
    origins, live = (frozenset().union(*sets) for sets in zip(*((each.origins, each.live) for each in losses)))  # noqa: B905
    return replace(losses[0], origins=origins, live=live, weight=losses[0].weight if known else None)


@TENSOR_CALLS.on("float int abs round bool ceil floor divmod gcd min max clamp clamp_min clamp_ maximum")
def _number(machine: Machine, call: Call) -> object:
    counts = [each for each in (call.receiver, *call.args) if isinstance(each, Opaque) and each.role == "count"]
    if counts or (isinstance(call.receiver, (Loss, Opaque)) and not call.args):
        return counts[0] if counts else call.receiver
    if call.args and call.name in _NUMBER_FUNCTIONS and all(isinstance(each, PLAIN) for each in call.args):
        return computed(_NUMBER_FUNCTIONS[call.name], *call.args)
    if call.name == "divmod":
        return Opaque(is_setting=False), Opaque(is_setting=False, is_remainder=True)
    if call.name in {"float", "int", "bool", "abs", "round"}:
        return call.first.detached() if isinstance(call.first, Loss) else call.first
    if call.name.startswith(("clamp", "maximum")):
        return NotImplemented
    return Opaque(is_setting=not machine.varies(call.node))


@TENSOR_CALLS.on("div div_ mul mul_ true_divide")
def _divided(machine: Machine, call: Call) -> object:
    loss, position = (call.receiver, 0) if isinstance(call.receiver, Loss) else (call.first, 1)
    if not isinstance(loss, Loss) or len(call.node.args) <= position:
        return NotImplemented
    value, text = call.args[position], machine.module.text(call.node.args[position])
    if isinstance(value, NUMBERS) and value:
        found = loss.divided(Division(1 / value if call.name.startswith("mul") else float(value), text, call.node))
    else:
        found = replace(loss, weight=None)
    if call.name.endswith("_") and call.on:
        call.env[call.on] = found
    return found


@TENSOR_CALLS.on("append extend clear pop")
def _change_list(machine: Machine, call: Call) -> object:
    known = call.receiver if isinstance(call.receiver, list) else []
    if call.name == "pop":
        return known.pop() if known else NotImplemented
    if call.name == "clear":
        known.clear()
        return None
    added = call.first
    if isinstance(added, Loss) and added.live and call.on:
        machine.emit("keep", call.node, loss=added, subject=call.on)
    if len(known) < _LONGEST_LIST:
        known.extend([added] if call.name == "append" else added if isinstance(added, list) else [])
    return None


@TENSOR_CALLS.on("get items values keys")
def _of_dict(_: Machine, call: Call) -> object:
    if isinstance(call.receiver, Loss) and not call.args:
        values = call.receiver.part(call.name)
        return [(Opaque(is_setting=False), values)] if call.name == "items" else [values]
    if not isinstance(call.receiver, dict):
        return NotImplemented
    if call.name == "get":
        return call.receiver.get(call.first) if isinstance(call.first, PLAIN) else Opaque()
    return list(getattr(call.receiver, call.name)())


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
    if not call.args or not isinstance(call.first, Items):
        return batch()
    ended = call.first.length is not None and call.first.taken >= call.first.length
    if ended and len(call.args) > 1:
        return Opaque("None", "nothing") if call.args[1] is None else call.args[1]
    return call.first.next()


@TENSOR_CALLS.on("enter_context is_gradient_accumulation_boundary")
def _of_context(machine: Machine, call: Call) -> object:
    return call.first if call.name == "enter_context" else machine.is_synchronizing()
