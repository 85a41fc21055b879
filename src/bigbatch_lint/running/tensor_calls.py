"""Calls on tensors, losses, numbers and containers."""

import math
import re
from collections.abc import Callable
from dataclasses import replace

from bigbatch_lint.reading.names import PIECES, Role, dotted, last_part
from bigbatch_lint.running.builders import masked_by, reduction_of
from bigbatch_lint.running.call import UNKNOWN, Call, Table
from bigbatch_lint.running.machine import Machine, batch
from bigbatch_lint.running.trace import Event, Kind
from bigbatch_lint.running.values import NOTHING, NUMBERS, PLAIN, Division, Items, Loss, Opaque, new_loss

_TABLE = Table()
_LOADERS = re.compile("load|batches|stream|dl$")
_LONGEST_LIST = 1000
_NUMBER_FUNCTIONS: dict[str, Callable[..., object]] = {
    "float": float,
    "int": int,
    "abs": abs,
    "round": round,
    "bool": bool,
    "ceil": math.ceil,
    "floor": math.floor,
    "divmod": divmod,
    "pow": pow,
    "gcd": math.gcd,
}
of_tensor = _TABLE


@_TABLE.on(
    "cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy "
    "binary_cross_entropy_with_logits kl_div cosine_embedding_loss ctc_loss"
)
def _loss(machine: Machine, call: Call) -> object:
    reduction = reduction_of(call)
    masked = masked_by(machine, call) if reduction == "mean" else None
    return new_loss(id(call.node), reduction=reduction, masked=masked)


@_TABLE.on(
    "to half double bfloat16 clone contiguous view reshape squeeze unsqueeze flatten cuda cpu long "
    "requires_grad_ expand"
)
def _same(_: Machine, call: Call) -> object:
    return call.receiver if isinstance(call.receiver, (Loss, Opaque)) else UNKNOWN


@_TABLE.on("item tolist numpy")
def _fetched(_: Machine, call: Call) -> object:
    if isinstance(call.receiver, Loss):
        return call.receiver.detached()
    return call.receiver if isinstance(call.receiver, Opaque) else Opaque(is_setting=False)


@_TABLE.on("detach detach_")
def _detached(_: Machine, call: Call) -> object:
    return call.receiver.detached() if isinstance(call.receiver, Loss) else UNKNOWN


@_TABLE.on("sum")
def _sum(machine: Machine, call: Call) -> object:
    if call.role is Role.MASK:
        return Opaque("", Role.COUNT, made=call.node)
    if isinstance(call.receiver, Loss):
        whole = not call.args and "dim" not in call.words
        return replace(call.receiver, reduction="sum" if whole else "none")
    if call.on or not isinstance(call.first, (list, Items)):
        return UNKNOWN
    parts = call.first if isinstance(call.first, list) else [call.first.item(0)]
    numbers = [each for each in parts if isinstance(each, NUMBERS)]
    losses = [each for each in parts if isinstance(each, Loss)]
    if parts and len(numbers) == len(parts):
        return sum(numbers)
    if not losses:
        return Opaque(is_setting=not machine.varies(call.node))
    known = len(losses) == len(parts) and all(each.weight is not None for each in losses)
    return replace(
        losses[0],
        origins=frozenset().union(*(each.origins for each in losses)),
        live=frozenset().union(*(each.live for each in losses)),
        weight=losses[0].weight if known else None,
    )


@_TABLE.on("mean")
def _mean(_: Machine, call: Call) -> object:
    return replace(call.receiver, reduction="mean") if isinstance(call.receiver, Loss) else UNKNOWN


@_TABLE.on("clamp clamp_min clamp_ maximum")
def _clamp(_: Machine, call: Call) -> object:
    return call.receiver if call.role is Role.COUNT else UNKNOWN


@_TABLE.on("min max")
def _smallest(machine: Machine, call: Call) -> object:
    if call.role is Role.COUNT:
        return call.receiver
    if not call.args:
        return UNKNOWN
    numbers = [each for each in call.args if isinstance(each, NUMBERS)]
    if len(numbers) == len(call.args):
        return (min if call.name == "min" else max)(numbers)
    counts = [each for each in call.args if isinstance(each, Opaque) and each.role is Role.COUNT]
    return counts[0] if counts else Opaque(is_setting=not machine.varies(call.node))


@_TABLE.on("div div_ mul mul_ true_divide")
def _divided(machine: Machine, call: Call) -> object:
    own = isinstance(call.receiver, Loss)
    loss, position = (call.receiver, 0) if own else (call.first, 1)
    if not isinstance(loss, Loss) or len(call.node.args) <= position:
        return UNKNOWN
    value, node = call.args[position], call.node.args[position]
    known = isinstance(value, NUMBERS) and bool(value)
    if not known or not isinstance(value, NUMBERS):
        found = loss.unknown_weight()
    else:
        number = 1 / value if call.name.startswith("mul") else float(value)
        found = loss.divided(Division(number, machine.module.text(node), call.node))
    if call.name.endswith("_") and call.on:
        call.env[call.on] = found
    return found


@_TABLE.on("ne")
def _not_equal(_: Machine, call: Call) -> object:
    return Opaque("", Role.MASK, made=call.node)


@_TABLE.on("masked_select")
def _selected(_: Machine, call: Call) -> object:
    return replace(call.receiver, masked=call.node) if isinstance(call.receiver, Loss) else UNKNOWN


@_TABLE.on("append extend")
def _append(machine: Machine, call: Call) -> object:
    if not call.on or not call.args:
        return UNKNOWN
    added = call.args[0]
    if isinstance(added, Loss) and added.live:
        machine.emit(Event(Kind.KEEP, call.node, loss=added, subject=call.on))
    if isinstance(call.receiver, list) and len(call.receiver) < _LONGEST_LIST:
        call.receiver.extend([added] if call.name == "append" else added if isinstance(added, list) else [])
    return None


@_TABLE.on("clear pop")
def _shorter(_: Machine, call: Call) -> object:
    if not isinstance(call.receiver, list):
        return UNKNOWN
    if call.name == "pop":
        return call.receiver.pop() if call.receiver else Opaque(is_setting=False)
    call.receiver.clear()
    return None


@_TABLE.on("get items values keys")
def _of_dict(_: Machine, call: Call) -> object:
    if isinstance(call.receiver, Loss) and not call.args:
        values = call.receiver.part(call.name)
        return [(Opaque(is_setting=False), values)] if call.name == "items" else [values]
    if not isinstance(call.receiver, dict):
        return UNKNOWN
    if call.name == "get":
        return call.receiver.get(call.first) if isinstance(call.first, PLAIN) else Opaque()
    return list(getattr(call.receiver, call.name)())


@_TABLE.on("float int abs round bool ceil floor divmod pow gcd")
def _number(machine: Machine, call: Call) -> object:
    if isinstance(call.receiver, (Loss, Opaque)) and not call.args:
        return call.receiver
    numbers = [each for each in call.args if isinstance(each, PLAIN)]
    if numbers and len(numbers) == len(call.args):
        try:
            return _NUMBER_FUNCTIONS[call.name](*numbers)
        except (TypeError, ValueError, ArithmeticError):
            return Opaque(is_setting=False)
    if call.name == "divmod":
        return Opaque(is_setting=False), Opaque(is_setting=False, is_remainder=True)
    if isinstance(call.first, Loss):
        return call.first.detached()
    return (
        call.first if call.name in {"float", "int", "bool", "abs"} else Opaque(is_setting=not machine.varies(call.node))
    )


@_TABLE.on("len")
def _len(machine: Machine, call: Call) -> object:
    if isinstance(call.first, Items) and call.first.length is not None:
        return call.first.length
    if isinstance(call.first, (list, tuple, dict, str)):
        return len(call.first)
    text = dotted(call.node.args[0]) if call.node.args else ""
    if isinstance(call.first, (Opaque, Loss)) and _LOADERS.search(text):
        return machine.length
    several = not isinstance(call.first, Loss) or "window" in text
    if PIECES.search(last_part(text)) and several and not text.endswith("batch"):
        return machine.steps
    return Opaque(f"len({text})", is_setting=not machine.varies(call.node))


@_TABLE.on("next")
def _next(_: Machine, call: Call) -> object:
    if not call.args or not isinstance(call.first, Items):
        return batch()
    ended = call.first.length is not None and call.first.taken >= call.first.length
    if ended and len(call.args) > 1:
        return NOTHING if call.args[1] is None else call.args[1]
    return call.first.next()


@_TABLE.on("enter_context")
def _entered(_: Machine, call: Call) -> object:
    return call.first


@_TABLE.on("is_gradient_accumulation_boundary")
def _boundary(machine: Machine, _: Call) -> object:
    return machine.is_synchronizing()
