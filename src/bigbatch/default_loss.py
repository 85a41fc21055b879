"""The loss that a model computes by itself, as those of Hugging Face do: what stands in for a `loss_fn`."""

import inspect
from collections.abc import Mapping
from typing import Any

from bigbatch.errors import BatchError


def own_loss(model: Any, batch: Any) -> Any:
    """Return `model(**batch).loss`, or refuse a batch that has no names."""
    if not isinstance(batch, Mapping):
        msg = (
            f"without loss_fn the loss is model(**batch).loss, but this batch is a {type(batch).__name__}, not a "
            "mapping of names to tensors.\nSay how a loss is made of it:\n"
            "    loss_fn = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])"
        )
        raise BatchError(msg)
    outputs = model(**batch)
    loss = getattr(outputs, "loss", None)
    if loss is None:
        found = "no loss" if hasattr(outputs, "loss") else f"a {type(outputs).__name__} without a loss"
        msg = (
            f"without loss_fn the loss is model(**batch).loss, and model(**batch) returned {found}; the batch has "
            f"{', '.join(map(repr, batch))}.\n"
            "Put the labels into the batch, as models of Hugging Face want them, or say how a loss is made of it:\n"
            "    loss_fn = lambda model, batch: F.cross_entropy(model(batch['x']), batch['y'])"
        )
        raise BatchError(msg)
    return loss


def takes(function: Any, number: int) -> bool:
    """Whether a function can be called with so many arguments; True where Python cannot tell."""
    try:
        inspect.signature(function).bind(*range(number))
    except ValueError:  # some built-in functions have no signature
        return True
    except TypeError:
        return False
    return True
