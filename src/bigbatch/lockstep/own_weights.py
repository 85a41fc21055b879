"""The weights that a window begins with: every micro-batch must find them at its turn, not those of another's call."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bigbatch.errors import LossError

_UNCHANGED = "Nothing was changed."


class _Weight(NamedTuple):
    module: nn.Module
    path: str
    name: str
    parameter: nn.Parameter
    data: Tensor
    version: int
    norm: Tensor | None  # by which another value in the same memory is known

    @property
    def is_there(self) -> bool:
        return self.module._parameters.get(self.name) is self.parameter  # noqa: SLF001 - where functional_call puts others

    @property
    def is_in_place(self) -> bool:
        own, before = self.parameter.untyped_storage(), self.data.untyped_storage()
        return bool(own._cdata == before._cdata)  # noqa: SLF001 - as torch.multiprocessing has it

    @property
    def is_changed(self) -> bool:
        """Whether it has another value; waits for a device where it was written to."""
        if self.norm is None or self.parameter._version == self.version:  # noqa: SLF001 - torch's own counter
            return False
        return not torch.equal(self.norm, _norm(self.parameter))


def _norm(parameter: Tensor) -> Tensor:
    wide = torch.promote_types(parameter.dtype, torch.float32)
    found: Tensor = torch.linalg.vector_norm(parameter.detach(), dtype=wide)
    return found


class OwnWeights:
    """Where a model's parameters are, and in which memory."""

    def __init__(self, models: Sequence[nn.Module], *, by_value: bool) -> None:
        """Look; `by_value`, too, to know what is written into the same memory."""
        self._found = [
            _Weight(
                module,
                path,
                name,
                parameter,
                parameter.data,
                parameter._version,  # noqa: SLF001
                _norm(parameter) if by_value and parameter.is_floating_point() else None,
            )
            for model in models
            for path, module in model.named_modules()
            for name, parameter in module._parameters.items()  # noqa: SLF001
            if parameter is not None and type(parameter.data) is Tensor  # others may have no memory of their own
        ]

    def refuse_others(self, place: str) -> None:
        """Raise where a micro-batch waits for others that would then run with the weights of its own call."""
        for each in self._found:
            changed = each.is_there and each.is_in_place and each.is_changed
            if not each.is_there or not each.is_in_place or changed:
                path = f"{each.path}.{each.name}".lstrip(".")
                state = "It was changed in place, and your code may not have put it back." if changed else _UNCHANGED
                msg = (
                    f"a micro-batch comes to {place} with another '{path}' than the model had before: by "
                    "torch.func.functional_call, an exchange of p.data, or a change in place. Micro-batches take turns "
                    f"there and share the model, so the others would run with it. {state}\n"
                    "Run what needs other weights where none of them meet, with BatchNorm in evaluation mode "
                    "(model.eval()), or in a model of its own:  BigStep([model, teacher], optimizer, loss_fn)"
                )
                raise LossError(msg)

    def restore(self) -> None:
        """Put all of them back: calls that ended in another order than they began have left others behind."""
        for each in self._found:
            if not each.is_there:
                each.module._parameters[each.name] = each.parameter  # noqa: SLF001
            if not each.is_in_place:
                each.parameter.data = each.data
