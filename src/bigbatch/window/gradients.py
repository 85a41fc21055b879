"""The `.grad` of a window's parameters, from its first backward to the step.

In mid-window `.grad` holds a provisional sum. It is ours: whoever else steps, zeroes or adds in between is noticed.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from bigbatch.distributed.fsdp_internals import local
from bigbatch.errors import ConfigurationError, WindowDisturbed
from bigbatch.loss.count import LOW_PRECISION, Count


def _hand(parameter: Tensor, gradient: Tensor | None) -> None:
    """Give a parameter a gradient, perhaps of a wider type than its own.

    `Tensor.grad_dtype` would allow it, too, but once set it stays: a model that is cast later would go on to round its
    gradients to what they were. And torch 2.9 has none.
    """
    if gradient is None or gradient.dtype == parameter.dtype:
        parameter.grad = gradient
        return
    if parameter.grad is None:
        parameter.grad = torch.empty_like(parameter, requires_grad=False)
    parameter.grad.data = gradient  # what an assignment would refuse
    if hasattr(gradient, "to_local"):  # one in parts has its numbers elsewhere
        held: Any = parameter.grad
        new: Any = gradient
        held._local_tensor, held._spec = new._local_tensor, new._spec  # noqa: SLF001 - no public way


class Gradients:
    """The gradients of several optimizers' parameters during one window."""

    def __init__(self, optimizers: Sequence[Optimizer], dtype: torch.dtype | None) -> None:
        """Take hold of the parameters; `dtype` is what low-precision ones add up in."""
        self.dtype, self.every = dtype, all_parameters(optimizers)
        self.parameters = tuple([p for p in self.every if p.requires_grad])
        if not self.parameters:
            raise ConfigurationError(
                "no parameter of the optimizer requires a gradient: there is nothing to train.\n"
                "Unfreeze some:  parameter.requires_grad_(True)"
            )
        self._hold()
        if present := [p for p in self.parameters if p.grad is not None]:
            raise WindowDisturbed(
                f"{len(present)} of {len(self.parameters)} parameters have a gradient before the window's first "
                "backward, left by a backward() of your own or of another loss.\n"
                "Clear it before you start:  optimizer.zero_grad()"
            )
        self._wide = [] if dtype is None else [p for p in self.parameters if p.dtype in LOW_PRECISION]
        self._narrow = self._wide  # those whose gradient has not been widened yet
        self._zeros: dict[int, int] = {}  # versions of gradients that began as zero

    @property
    def device(self) -> torch.device:
        """Where the gradients are, or most of them."""
        return self.parameters[0].device

    def dtype_of(self, parameter: Tensor) -> torch.dtype:
        """Return what the gradient of a parameter is added up in."""
        return self.dtype or parameter.dtype if parameter.dtype in LOW_PRECISION else parameter.dtype

    def preset(self, gradients: Sequence[Tensor | None]) -> None:
        """Start from gradients at addresses of someone's choice, instead of from none."""
        for p, gradient in zip(self.parameters, gradients, strict=True):
            _hand(p, gradient)
        self._narrow = [p for p in self._wide if p.grad is None or p.grad.dtype != self.dtype]
        self._hold()

    def fill(self, wanted: Sequence[bool]) -> list[Tensor]:
        """Give those that have no gradient one of zero, where it is wanted; returns who got one."""
        new = [p for p, flag in zip(self.parameters, wanted, strict=True) if flag and p.grad is None]
        for p in new:
            _hand(p, torch.zeros_like(p, dtype=self.dtype_of(p), requires_grad=False))
        return new

    def widen(self) -> None:
        """Give low-precision parameters a gradient of zero to add to, where several backwards are under way at once."""
        new = self.fill([bool(self._wide) and p.dtype in LOW_PRECISION for p in self.parameters])
        self._narrow = []
        self._hold()
        self._zeros = {id(p): p.grad._version for p in new if p.grad is not None}  # noqa: SLF001 - torch's counter

    def drop_unused(self) -> None:
        """Take back gradients of zero that nothing was added to: an optimizer would step with them."""
        for p in self._wide if self._zeros else ():
            if p.grad is not None and p.grad._version == self._zeros.get(id(p)):  # noqa: SLF001
                p.grad = None
        self._zeros = {}
        self._hold()

    def remember(self) -> None:
        """Take note of every gradient after our own backward, widening those of low precision that are new."""
        if self._narrow:
            for p in self._narrow:
                if p.grad is not None:
                    _hand(p, p.grad.to(self.dtype))
            self._narrow = [p for p in self._narrow if p.grad is None]
        self._hold()

    def check(self) -> None:
        """Raise where a gradient is not as we left it."""
        for p, g, version, dtype in self._held:
            if not p.requires_grad or p.dtype is not dtype:
                how = f"cast from {dtype} to {p.dtype}" if p.requires_grad else "frozen"
                raise WindowDisturbed(
                    f"a parameter was {how} inside a window, which has its gradient already. Freeze, unfreeze and cast "
                    "between updates.",
                    fix="accumulator.flush() before it, or accumulator.discard()",
                    fix_in_step="",
                )
            if p.grad is not g or (g is not None and g._version != version):  # noqa: SLF001 - torch's own counter
                break
        else:
            return
        zeroed = sum(p.grad is None and g is not None for p, g, _, _ in self._held)
        found = f"{zeroed} were set to None" if zeroed else "they were changed in place"
        raise WindowDisturbed(
            f"gradients changed inside a window, and not by this library: {found}, as by zero_grad(), loss.backward() "
            "or clip_grad_norm_() (clip with clip_norm=).",
            fix="accumulator.backward(loss) alone inside `over`: it adds up, steps and clears. "
            "accumulator.discard() drops this window",
            fix_in_step="a loss_fn that returns the loss and leaves gradients alone: BigStep adds up, steps and clears",
        )

    def _hold(self) -> None:
        """Note gradients as we leave them; the objects, so that no new one can take an old one's address."""
        self._held = [
            (p, g, 0 if g is None else g._version, p.dtype)  # noqa: SLF001 - torch's own counter
            for p in self.parameters
            for g in (p.grad,)
        ]

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
        dense = self.dense()
        if len({(gradient.device, gradient.dtype) for gradient in dense}) != 1:
            return torch.nn.utils.get_total_norm(dense)
        norms: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(dense)))  # noqa: SLF001
        return norms  # as get_total_norm finds it, which sorts tensors by device and type first

    def dense(self) -> list[Tensor]:
        """Return all gradients that are there; a sparse one by its values, a sharded one by this rank's part."""
        found = []
        for p in self.parameters:
            gradient = p.grad
            if gradient is not None and gradient.is_sparse:
                p.grad = gradient = gradient.coalesce()
                found.append(gradient._values())  # noqa: SLF001 - values() would copy
            elif gradient is not None:
                found.append(gradient if type(gradient) is Tensor else local(gradient))
        return found

    def narrow(self) -> None:
        """Round widened gradients, once, to what the optimizer expects."""
        for p in self._wide:
            if p.grad is not None:
                p.grad = p.grad.to(p.dtype)

    def release(self, *, cleared: bool = True) -> None:
        """Leave the parameters as they were before the window; their gradients, too, unless they are for others."""
        for p in self.parameters if cleared else ():
            p.grad = None
        self._held = []


@contextmanager
def sparing(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Let a backward inside add to whatever it reaches: these parameters have the gradients they had, afterwards."""
    held = [(p, p.grad) for p in parameters]
    for p, _ in held:  # put aside, or it would be added to in place
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in held:
            _hand(p, gradient)


def all_parameters(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """Return each parameter of the optimizers once, in order."""
    return list({id(p): p for o in optimizers for group in o.param_groups for p in group["params"]}.values())
