"""The model under test: every run trains on a copy of it, and the model itself is neither run nor stepped."""

import copy
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from bigbatch.errors import ConfigurationError, LossError
from bigbatch.state.oom import is_out_of_memory, let_go

_HOOKS: dict[str, Callable[[Any, Any], object]] = {
    "_backward_hooks": Tensor.register_hook,
    "_post_accumulate_grad_hooks": Tensor.register_post_accumulate_grad_hook,
}
USE_ARGUMENT = "the model that is passed in:  loss_fn = lambda model, batch: criterion(model(batch[0]), batch[1])"


class ModelCopy:
    """A model, one module or a sequence: that under test, or a copy that one run trains on."""

    def __init__(self, model: Any) -> None:
        """Name modules and parameters; the name of a single model is empty, and of several begins with its number."""
        self.model = model  # as loss_fn takes it
        self.models: tuple[nn.Module, ...] = tuple(model) if isinstance(model, list | tuple) else (model,)
        self.modules: dict[str, nn.Module] = {}
        named: dict[nn.Parameter, str] = {}
        for number, each in enumerate(self.models):
            prefix = f"[{number}]" if len(self.models) > 1 else ""
            self.modules |= dict(each.named_modules(prefix=prefix))
            for name, p in each.named_parameters(prefix=prefix):
                named.setdefault(p, name)
        self.all_parameters = list(named)
        self.parameters = {name: p for p, name in named.items() if p.requires_grad}  # those that are trained
        if not self.parameters:
            raise ConfigurationError("no parameter of the model requires a gradient: there is nothing to verify.")
        self.device = next(iter(self.parameters.values())).device
        self.dtype = max(named, key=lambda p: p.numel() * p.is_floating_point()).dtype  # of the largest one

    def called(self, name: str) -> str:
        """Return the name of a module; of a model as a whole its class."""
        return name or type(self.models[0]).__name__

    def refuse_reached(self) -> None:
        """Raise where a run on a copy left gradients in the model itself."""
        if any(p.grad is not None for p in self.all_parameters):
            raise_used_itself()

    def twin(self, dtype: torch.dtype | None) -> "ModelCopy":
        """Return a copy for one run, with hooks on its parameters, in a dtype; None: its own."""
        kept = (v for module in self.modules.values() for v in vars(module).values() if isinstance(v, Tensor))
        memo: dict[int, Any] = {id(each): each.detach().clone() for each in kept if not each.is_leaf}
        try:
            found = ModelCopy(copy.deepcopy(self.model, memo))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            let_go(error, told=True)
            said = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            problem = f"verify runs copies of the model, and this one cannot be copied: {said}"
            fix = "a model without files, locks, generators and handles in its attributes, which copy.deepcopy can copy"
            raise ConfigurationError(problem, fix=fix) from error
        for p, other in zip(self.all_parameters, found.all_parameters, strict=True):
            for attribute, register in _HOOKS.items():  # which copies of tensors lose
                for hook in (getattr(p, attribute, None) or {}).values():
                    register(other, hook)
        for each in found.models if dtype is not None else ():
            each.to(dtype)
        return found


def raise_used_itself() -> NoReturn:
    """Raise since a loss or a loop uses the model it knows, not the copy that it is given."""
    problem = "loss_fn or train_window uses a model of its own, and not the copy that verify passes in"
    raise LossError(problem, fix=USE_ARGUMENT)
