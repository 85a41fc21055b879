"""The `.grad` of a window's parameters, from its first backward to the step.

In mid-window `.grad` holds a provisional sum. It is ours: whoever else steps, zeroes or adds in between is noticed.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from bigbatch.errors import WindowDisturbed
from bigbatch.reading.counts import LOW_PRECISION, Count


class Gradients:
    """The gradients of several optimizers' parameters during one window."""

    def __init__(self, optimizers: Sequence[Optimizer], dtype: torch.dtype | None) -> None:
        """Take hold of the parameters; `dtype` is what low-precision ones add up in."""
        self._dtype = dtype
        self.parameters = [p for p in all_parameters(optimizers) if p.requires_grad]
        self.leaves = tuple(self.parameters)
        present = sum(p.grad is not None for p in self.parameters)
        if present:
            msg = (
                f"{present} of {len(self.parameters)} parameters have a gradient before the window's first backward, "
                "left by a backward() of your own or of another loss.\n"
                "Clear it before you start:  optimizer.zero_grad()"
            )
            raise WindowDisturbed(msg)
        self._wide = [p for p in self.parameters if dtype is not None and p.dtype in LOW_PRECISION]
        self._narrow = self._wide  # those whose gradient has not been widened yet
        for p in self._wide:
            p.grad_dtype = None  # lets a bf16 parameter hold a float32 gradient, until `release`
        self._versions: list[int | None] = [None] * len(self.parameters)

    def remember(self) -> None:
        """Take note of every gradient after our own backward, widening those of low precision that are new."""
        if self._narrow:
            waiting = []
            for p in self._narrow:
                if p.grad is None:
                    waiting.append(p)
                else:
                    p.grad = p.grad.to(self._dtype)
            self._narrow = waiting
        self._versions = self._look()

    def check(self) -> None:
        """Raise where a gradient is not as we left it."""
        if self._look() == self._versions:
            return
        zeroed = sum(
            p.grad is None and seen is not None for p, seen in zip(self.parameters, self._versions, strict=True)
        )
        found = f"{zeroed} were set to None" if zeroed else "they were changed in place"
        msg = (
            "gradients changed inside a window, and not by this accumulator: "
            f"{found}, as by zero_grad() or loss.backward().\n"
            "Inside `over` call accumulator.backward(loss) alone: it adds up, steps and clears.\n"
            "This window cannot be trusted any more: accumulator.discard() drops it."
        )
        raise WindowDisturbed(msg)

    def _look(self) -> list[int | None]:
        return [None if (g := p.grad) is None else id(g) + g._version for p in self.parameters]  # noqa: SLF001

    def scale(self, factor: Count) -> None:
        """Multiply all gradients."""
        if isinstance(factor, float) and factor == 1.0:
            return
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for gradient in self.dense():
            groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        for (device, dtype), gradients in groups.items():
            if isinstance(factor, float):
                torch._foreach_mul_(gradients, factor)
            elif dtype in LOW_PRECISION:  # a 0-d tensor would be rounded to bf16 first
                for gradient in gradients:
                    gradient.copy_(gradient.float() * factor)
            else:
                torch._foreach_mul_(gradients, factor.to(device, dtype))

    def norm(self) -> Tensor:
        """Return the norm over all gradients, of all optimizers."""
        return torch.nn.utils.get_total_norm(self.dense())

    def dense(self) -> list[Tensor]:
        """Return all gradients that are there; a sparse one by its values."""
        found = []
        for p in self.parameters:
            if p.grad is not None and p.grad.is_sparse:
                if not p.grad.is_coalesced():
                    p.grad = p.grad.coalesce()
                found.append(p.grad._values())  # noqa: SLF001 - values() would copy
            elif p.grad is not None:
                found.append(p.grad)
        return found

    @property
    def device(self) -> torch.device:
        """Where the gradients are, or most of them."""
        return self.parameters[0].device

    def narrow(self) -> None:
        """Round widened gradients, once, to what the optimizer expects."""
        for p in self._wide:
            if p.grad is not None:
                p.grad = p.grad.to(p.dtype)

    def release(self) -> None:
        """Clear all gradients and leave the parameters as they were before the window."""
        for p in self.parameters:
            p.grad = None
        for p in self._wide:
            p.grad_dtype = p.dtype

    def snapshot(self) -> list[Tensor | None]:
        """Return copies of the gradients, for a checkpoint."""
        return [None if p.grad is None else p.grad.detach().clone() for p in self.parameters]

    def restore(self, saved: Iterable[Tensor | None]) -> None:
        """Put gradients back that `snapshot` returned."""
        for p, gradient in zip(self.parameters, saved, strict=True):
            p.grad = None if gradient is None else gradient.to(p.device, copy=True)
        self._narrow = [p for p in self._wide if p.grad is None]
        self._versions = self._look()


def all_parameters(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """Return each parameter of the optimizers once, in order."""
    return list({id(p): p for o in optimizers for group in o.param_groups for p in group["params"]}.values())
