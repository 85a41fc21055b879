"""The loss that a model computes by itself, as those of Hugging Face do: what stands in for a `loss_fn`."""

from collections.abc import Mapping
from typing import Any

from bigbatch.errors import BatchError


def own_loss(model: Any, batch: Any) -> Any:
    """Return `model(**batch).loss`, or refuse a batch that has no names, and a model without a loss of its own."""
    x, y, found = "0", "1", f"but this batch is a {type(batch).__name__}, not a mapping of names to tensors"
    if isinstance(batch, Mapping):
        outputs = model(**batch)
        if (loss := getattr(outputs, "loss", None)) is not None:
            return loss
        x, y, names = "'x'", "'y'", ", ".join(map(repr, batch))
        found = f"and of {names} the model made a {type(outputs).__name__} without one: perhaps labels are missing"
    raise BatchError(
        f"without loss_fn the loss is model(**batch).loss, {found}.",
        fix=f"loss_fn = lambda model, batch: F.cross_entropy(model(batch[{x}]), batch[{y}])",
    )
