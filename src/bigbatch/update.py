"""One update: what an optimizer step was made of."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from bigbatch.errors import LossError
from bigbatch.terms import Count


@dataclass(frozen=True, eq=False, repr=False)
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
    _loss: Tensor | None = field(default=None)
    _skipped: bool | Tensor = field(default=False)

    @property
    def loss(self) -> Tensor:
        """The big batch's own loss: not the last micro-batch's, nor their plain average."""
        if self._loss is None:
            msg = (
                "the loss of this update is not known: its terms have different counts, and a graph keeps their sum, "
                "not their values.\nWrap each term so that its value is kept:\n"
                "    loss = counted(ce, tokens) + 0.1 * counted(aux, samples)"
            )
            raise LossError(msg)
        return self._loss

    @property
    def skipped(self) -> bool:
        """Whether the optimizer was left alone: nothing was counted, or a gradient was not finite."""
        return bool(self._skipped)

    def __repr__(self) -> str:
        """Show the numbers; this reads them from the device."""
        loss = "unknown" if self._loss is None else f"{self._loss.item():.6g}"
        norm = "" if self.grad_norm is None else f", grad_norm={self.grad_norm.item():.6g}"
        counts = self.count if isinstance(self.count, tuple) else (self.count,)
        count = ", ".join(f"{float(number):g}" for number in counts)
        count = f"({count})" if isinstance(self.count, tuple) else count
        return f"Update(loss={loss}, count={count}, micro_batches={self.micro_batches}{norm}, skipped={self.skipped})"
