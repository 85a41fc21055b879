"""Stand-ins without memory: a model, an optimizer and a batch whose tensors have shapes and no numbers."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bigbatch.batch.tree import mapped
from bigbatch.distributed.fsdp_internals import local


class Fakes:
    """Fake tensors by the real ones they stand for; to be used inside a fake mode."""

    def __init__(self) -> None:
        """Know none."""
        self._made: dict[int, tuple[Tensor, Tensor]] = {}  # with the real one, so that its id stays its own

    def of(self, real: Tensor) -> Tensor:
        """Return the stand-in of a tensor: always the same for the same one, so that tied weights stay tied."""
        if id(real) not in self._made:
            own = local(real)
            fake = torch.empty_strided(own.shape, own.stride(), dtype=real.dtype, device="cpu")
            if isinstance(real, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=real.requires_grad)
            elif real.requires_grad:
                fake.requires_grad_()
            self._made[id(real)] = (real, fake)
        return self._made[id(real)][1]

    def batch(self, real: Any) -> Any:
        """Return a batch of the same structure."""
        return mapped(real, lambda _, leaf: self.of(leaf) if isinstance(leaf, Tensor) else leaf)

    def optimizer(self, real: Optimizer) -> Optimizer:
        """Return an optimizer of the stand-ins; hooks, and schedulers that patched the real one, stay behind."""
        tensors = [p for group in real.param_groups for p in group["params"]]
        tensors += [v for state in real.state.values() for v in state.values() if isinstance(v, Tensor)]
        memo: dict[int, Any] = {id(tensor): self.of(tensor) for tensor in tensors}
        return copy.deepcopy(real, memo)


@contextmanager
def faked(models: Sequence[nn.Module], fakes: Fakes) -> Iterator[None]:
    """Inside, the models hold stand-ins; afterwards they are as before, with all attributes that a forward may set.

    The models themselves and no copies: a loss function may have closed over them, and not use what it is handed.
    """
    modules = list(dict.fromkeys(module for model in models for module in model.modules()))
    before = [(dict(m.__dict__), dict(m._parameters), dict(m._buffers)) for m in modules]  # noqa: SLF001
    try:
        for module in modules:
            for held in (module._parameters, module._buffers):  # noqa: SLF001 - setattr would register anew
                for name, tensor in held.items():
                    if tensor is not None:
                        held[name] = fakes.of(tensor)  # type: ignore[assignment]
        yield
    finally:
        for module, (attributes, parameters, buffers) in zip(modules, before, strict=True):
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for held, was in ((module._parameters, parameters), (module._buffers, buffers)):  # noqa: SLF001
                held.clear()
                held.update(was)  # type: ignore[arg-type]
