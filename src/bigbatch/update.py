"""One update: what an optimizer step was made of."""

import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bigbatch.loss.count import Count


@dataclass(frozen=True, eq=False, repr=False, init=False)
class Update:
    """What one window came to. Tensors stay on their device until they are read."""

    micro_batches: int
    """How many micro-batches went into it."""
    count: Count | tuple[Count, ...]
    """What the loss was averaged over: targets, elements, samples. 1 for a sum; one number per term for several."""
    grad_norm: Tensor | None = None
    """The norm of the big batch's gradient, before clipping; None where `clip_norm` is not set."""
    extras: Any = None
    """What else `loss_fn` returned, joined in the batch's own order (`BigStep`)."""
    _loss: Count = math.nan
    _dtype: torch.dtype = torch.float32
    _skipped: bool | Tensor = False
    _loss_known: bool | Tensor = True

    def __init__(self, **known: Any) -> None:
        """Take the fields at once: a frozen dataclass sets them one by one, which small models feel."""
        vars(self).update(known)

    @property
    def loss(self) -> Tensor:
        """The big batch's own loss: not the last micro-batch's, nor their plain average.

        That average it is where `loss_is_exact` is not, which is warned of.
        """
        if not self.loss_is_exact:
            warnings.warn(
                "update.loss is the plain average of the micro-batches' losses here: the terms have different counts, "
                "and a graph keeps their sum, not their values. The update itself is exact.\n"
                "To know the loss, too, wrap each term:  loss = counted(ce, tokens) + 0.1 * counted(aux, samples)",
                stacklevel=2,
            )
        return torch.as_tensor(self._loss, dtype=self._dtype)

    @property
    def loss_is_exact(self) -> bool:
        """Whether `loss` is the big batch's own."""
        return bool(self._loss_known)

    @property
    def skipped(self) -> bool:
        """Whether the optimizer was left alone: nothing was counted, or a gradient was not finite."""
        return bool(self._skipped)

    def __repr__(self) -> str:
        """Show the numbers; this reads them from the device."""
        loss = f"{'' if self.loss_is_exact else 'about '}{float(self._loss):.6g}"
        norm = "" if self.grad_norm is None else f", grad_norm={self.grad_norm.item():.6g}"
        counts = self.count if isinstance(self.count, tuple) else (self.count,)
        count = ", ".join(f"{float(number):g}" for number in counts)
        count = f"({count})" if isinstance(self.count, tuple) else count
        return f"Update(loss={loss}, count={count}, micro_batches={self.micro_batches}{norm}, skipped={self.skipped})"
