"""The loss that a model computes by itself, as those of Hugging Face do: what stands in for a `loss_fn`."""

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
    return model(**batch).loss
