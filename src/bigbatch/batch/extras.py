"""Join what `loss_fn` returned beside the losses, in the order of the batch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bigbatch.batch.batch import numbers_on
from bigbatch.batch.tree import leaves, mapped
from bigbatch.errors import ConfigurationError


def joined(extras: Sequence[Any], sizes: Sequence[int], order: Sequence[int] | None) -> Any:
    """Join the extras of a window's micro-batches.

    A tensor with one row per sample becomes one with all samples' rows, in the batch's own order (`order` says which
    sample each row is of); a list of them where micro-batches were trimmed and rows differ in length. Any other tensor
    is stacked, one entry per micro-batch; what is no tensor makes a list.
    """
    if all(extra is None for extra in extras):
        return None
    columns: dict[str, list[Any]] = {}
    for extra in extras:
        for path, leaf in leaves(extra, ""):
            columns.setdefault(path, []).append(leaf)
    if any(len(column) != len(extras) for column in columns.values()):
        raise ConfigurationError(
            "The extras of this batch's micro-batches differ in structure, so they cannot be joined; nothing was "
            "changed.",
            found=", ".join(sorted({type(extra).__name__ for extra in extras})),
            fix="the same names in what every call of loss_fn returns",
        )
    made = {path: _join(column, sizes, order) for path, column in columns.items()}
    return mapped(extras[0], lambda path, _: made[path], "")


def detached(extras: Any) -> Any:
    """Detach all tensors: what is kept for the end of the window must not keep activations."""
    return mapped(extras, lambda _, leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf)


def _join(column: list[Any], sizes: Sequence[int], order: Sequence[int] | None) -> Any:
    if not all(isinstance(leaf, Tensor) for leaf in column):
        return column
    if all(leaf.dim() and leaf.shape[0] == size for leaf, size in zip(column, sizes, strict=True)):
        back = None if order is None else sorted(range(len(order)), key=order.__getitem__)
        if any(leaf.shape[1:] != column[0].shape[1:] for leaf in column):
            ragged = [row for leaf in column for row in leaf]
            return ragged if back is None else [ragged[place] for place in back]
        rows = torch.cat(column)
        return rows if back is None else rows.index_select(0, numbers_on(rows.device, back))
    if all(leaf.shape == column[0].shape for leaf in column):
        return torch.stack(column)
    return column
