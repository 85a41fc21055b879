"""Calls that make, reduce, detach or fetch values: losses, masks, counts, lengths."""

import ast
from collections.abc import Callable
from dataclasses import replace

from bigbatch.lint.reading.called import Called
from bigbatch.lint.reading.conditions import Always, Condition
from bigbatch.lint.reading.events import Kind
from bigbatch.lint.reading.program import dotted
from bigbatch.lint.reading.things import Computed, Role, Thing, computed
from bigbatch.lint.reading.values import Inverse, Number, Rows, Unknown, Value
from bigbatch.lint.reading.walk import Walk

MEAN_LOSSES = set(
    "cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy "
    "binary_cross_entropy_with_logits kl_div cosine_embedding_loss hinge_embedding_loss poisson_nll_loss "
    "gaussian_nll_loss soft_margin_loss triplet_margin_loss margin_ranking_loss ctc_loss multi_margin_loss".split()
)
# They leave a value's size and meaning alone.
_SAME = set(
    "to float double half bfloat16 clone contiguous view reshape squeeze unsqueeze flatten cuda cpu long int bool "
    "requires_grad_ items values repeat expand".split()
)
_FEWER = {"clamp", "clamp_min", "clamp_", "maximum", "max"}


def tensor_call(walk: Walk, called: Called) -> Value | None:
    """Say what a call on or with values gives; None if nothing is known."""
    if called.name in MEAN_LOSSES:
        return _functional_loss(walk, called)
    if isinstance(called.node.func, ast.Attribute):
        if called.name in _SAME and isinstance(called.receiver, Computed | Thing):
            return called.receiver
        handler = _METHODS.get(called.name)
        found = handler(walk, called) if handler is not None else None
        if found is not None:
            return found
    handler = _FUNCTIONS.get(called.name)
    return handler(walk, called) if handler is not None else None


def reduction_of(node: ast.Call) -> str:
    """Return the `reduction=` of a loss, whose default is the mean."""
    given = next((word.value for word in node.keywords if word.arg in {"reduction", "size_average"}), None)
    if given is None:
        return "mean"
    return str(given.value) if isinstance(given, ast.Constant) else "?"


def masked_by(walk: Walk, node: ast.Call, name: str) -> ast.expr | None:
    """Return what tells that a cross-entropy leaves targets out: `ignore_index`, or labels of -100 in the file."""
    if name.lower().replace("_", "") not in {"crossentropy", "crossentropyloss", "nllloss"}:
        return None
    told = any(word.arg == "ignore_index" for word in node.keywords)
    return node if told or walk.program.ignores_labels else None


def _functional_loss(walk: Walk, called: Called) -> Value:
    reduction = reduction_of(called.node)
    masked = masked_by(walk, called.node, called.name) if reduction == "mean" else None
    return computed(id(called.node), reduction=reduction, masked=masked)


def _item(walk: Walk, called: Called) -> Value | None:
    return called.receiver if isinstance(called.receiver, Thing) else _detach(walk, called)


def _detach(_: Walk, called: Called) -> Value | None:
    return replace(called.receiver, live=frozenset()) if isinstance(called.receiver, Computed) else None


def _sum(_: Walk, called: Called) -> Value | None:
    if isinstance(called.receiver, Thing) and called.receiver.role is Role.MASK:
        return Thing(Role.COUNT, node=called.node)
    if not isinstance(called.receiver, Computed):
        return None
    whole = not called.args and "dim" not in called.words
    return replace(called.receiver, reduction="sum" if whole else "none")


def _mean(_: Walk, called: Called) -> Value | None:
    if not isinstance(called.receiver, Computed):
        return None
    return replace(called.receiver, reduction="mean")


def _at_least(walk: Walk, called: Called) -> Value | None:
    """Look through `mask.sum().clamp(min=1)` and `max(1, steps)`, which only keep from dividing by 0."""
    given = (called.receiver, *called.args)
    count = next((each for each in given if isinstance(each, Thing) and each.role is Role.COUNT), None)
    if count is not None or isinstance(called.node.func, ast.Attribute):
        return count
    numbers = [walk.number(each, node) for each, node in zip(called.args, called.node.args, strict=True)]
    match numbers:
        case [Number(value=1), Number() as other] | [Number() as other, Number(value=1)]:
            return other
    return None


def _divided(walk: Walk, called: Called) -> Value | None:
    """`loss.div(n)`, `loss.mul_(1 / n)`, `torch.div(loss, n)`; in place, the name stands for the result."""
    on_loss = isinstance(called.receiver, Computed)
    loss = called.receiver if on_loss else called.first()
    place = 0 if on_loss else 1
    if not isinstance(loss, Computed) or len(called.args) <= place:
        return None
    by = called.args[place]
    number = by.of if isinstance(by, Inverse) else walk.number(by, called.node.args[place])
    divides = called.name.startswith("div") or isinstance(by, Inverse)
    value = loss.divided(number, called.node) if number is not None and divides else replace(loss, rescaled=True)
    if called.name.endswith("_") and called.on:
        walk.scope.set(called.on, value)
    return value


def _append(walk: Walk, called: Called) -> Value | None:
    value = called.first()
    if isinstance(value, Computed) and value.live:
        walk.emit(Kind.KEEP, called.node, loss=value, subject=called.on)
    return Unknown()


def _not_equal(_: Walk, called: Called) -> Value | None:
    return Thing(Role.MASK, node=called.node) if isinstance(called.receiver, Computed | Unknown) else None


def _masked_select(_: Walk, called: Called) -> Value | None:
    loss = called.receiver if isinstance(called.receiver, Computed) else called.first()
    return replace(loss, masked=called.node) if isinstance(loss, Computed) else None


def _synced(_: Walk, called: Called) -> Value | None:
    """`engine.is_gradient_accumulation_boundary()`."""
    return called.receiver if isinstance(called.receiver, Condition) else None


def _float(_: Walk, called: Called) -> Value | None:
    value = called.first()
    if isinstance(value, Computed):
        return replace(value, live=frozenset())
    return value if isinstance(value, Number | Thing) else None


def _bool(_: Walk, called: Called) -> Value | None:
    return called.first() if isinstance(called.first(), Condition | Always) else None


def _len(walk: Walk, called: Called) -> Value:
    value = called.first()
    text = f"len({called.first_text() or ast.unparse(called.node.args[0]) if called.node.args else ''})"
    known = value.count if isinstance(value, Rows) else None
    return Number(text, known, fixed=not walk.varies(called.node), atoms=frozenset({text}))


def _tensor_divided(walk: Walk, called: Called) -> Value | None:
    return _divided(walk, called) if dotted(called.node.func).startswith("torch.") else None


_METHODS: dict[str, Callable[[Walk, Called], Value | None]] = {
    **dict.fromkeys(("item", "tolist", "numpy"), _item),
    "detach": _detach,
    "detach_": _detach,
    "sum": _sum,
    "mean": _mean,
    **dict.fromkeys(_FEWER, _at_least),
    **dict.fromkeys(("div", "div_", "mul", "mul_", "true_divide"), _divided),
    **dict.fromkeys(("append", "extend"), _append),
    "ne": _not_equal,
    "masked_select": _masked_select,
    "is_gradient_accumulation_boundary": _synced,
    "enter_context": lambda _, called: called.first(),
}
_FUNCTIONS: dict[str, Callable[[Walk, Called], Value | None]] = {
    "float": _float,
    "int": _float,
    "print": lambda _, __: Unknown(),
    "bool": _bool,
    "len": _len,
    "max": _at_least,
    **dict.fromkeys(("div", "mul", "true_divide"), _tensor_divided),
}
