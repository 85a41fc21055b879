"""The parameters that a window begins with: every micro-batch must find them at its turn, not those of another's call.

`functional_call` and an exchange of `p.data` put others in their place for one call. Micro-batches take turns in its
midst, so calls end in another order than they began, and leave others behind.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from bigbatch.errors import LossError


class _Place(NamedTuple):
    module: nn.Module
    path: str
    name: str
    parameter: nn.Parameter
    data: Tensor

    def is_right(self) -> bool:
        """Whether the parameter is there, in the memory that it was in."""
        if self.module._parameters.get(self.name) is not self.parameter:  # noqa: SLF001 - where functional_call puts others
            return False
        now, before = self.parameter.untyped_storage(), self.data.untyped_storage()
        return bool(now._cdata == before._cdata)  # noqa: SLF001 - as torch.multiprocessing has it


class OwnParameters:
    """Which parameters some models have, and in which memory."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        """Note them."""
        self._places = [
            _Place(module, path, name, parameter, parameter.data)
            for model in models
            for path, module in model.named_modules()
            for name, parameter in module._parameters.items()  # noqa: SLF001
            if parameter is not None and type(parameter.data) is Tensor  # others may have no memory of their own
        ]

    def refuse_others(self) -> None:
        """Raise where the models have other parameters now."""
        wrong = next((each for each in self._places if not each.is_right()), None)
        if wrong is not None:
            msg = (
                f"the parameter '{f'{wrong.path}.{wrong.name}'.lstrip('.')}' is another one after the forwards of a "
                "window than before: torch.func.functional_call or an exchange of p.data, in the midst of which "
                "micro-batches take turns. Nothing was changed.\n"
                "Run what needs other weights with BatchNorm in evaluation mode (model.eval()), or in a model of its "
                "own:  BigStep([model, teacher], optimizer, loss_fn)"
            )
            raise LossError(msg)

    def restore(self) -> None:
        """Put all of them back."""
        for each in self._places:
            if not each.is_right():
                each.module._parameters[each.name] = each.parameter  # noqa: SLF001
                each.parameter.data = each.data
