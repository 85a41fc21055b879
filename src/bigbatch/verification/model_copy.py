"""The model under test: every run trains on a copy of it, and the model itself is neither run nor stepped."""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from bigbatch.errors import ConfigurationError, LossError
from bigbatch.state.oom import is_out_of_memory, let_go
from bigbatch.state.rng import Randomness
from bigbatch.state.snapshot import devices_of, untouched

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
USE_ARGUMENT = "the model that is passed in:  loss_fn = lambda model, batch: criterion(model(batch[0]), batch[1])"


@dataclass(frozen=True)
class ModelCopy:
    """A copy of the model that one run trains on."""

    model: Any  # as loss_fn takes it: one module or a sequence
    models: tuple[nn.Module, ...]
    parameters: dict[str, nn.Parameter]  # those that are trained

    @classmethod
    def of(cls, model: Any) -> "ModelCopy":
        """Wrap one module or a sequence; of several, names begin with the model's number."""
        models = tuple(model) if isinstance(model, list | tuple) else (model,)
        trained: dict[int, tuple[str, nn.Parameter]] = {}
        for prefix, each in _prefixed(models):
            for name, p in each.named_parameters():
                if p.requires_grad:
                    trained.setdefault(id(p), (_joined(prefix, name), p))
        return cls(model, models, dict(trained.values()))

    @property
    def modules(self) -> dict[str, nn.Module]:
        """All modules by name; the name of a single model is empty."""
        return {_joined(prefix, n): m for prefix, each in _prefixed(self.models) for n, m in each.named_modules()}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that most of the weights have."""
        numbers: dict[torch.dtype, int] = {}
        for p in (p for each in self.models for p in each.parameters() if p.is_floating_point()):
            numbers[p.dtype] = numbers.get(p.dtype, 0) + p.numel()
        return max(numbers, key=numbers.__getitem__, default=torch.float32)


class ModelUnderTest:
    """The model that was passed in."""

    def __init__(self, model: Any, models: tuple[nn.Module, ...]) -> None:
        """Keep the model as it is."""
        self.own = ModelCopy.of(model)
        self.devices = devices_of(models)
        self.parameter_ids = frozenset(id(p) for each in models for p in each.parameters())
        self._modules = list(dict.fromkeys(module for each in models for module in each.modules()))
        self._guards: list[int] = []

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Raise wherever the model itself is run inside; gradients, buffers and random generators are restored."""
        own = set(map(id, self._modules))

        def refuse(module: nn.Module, _: object) -> None:
            if id(module) in own:
                raise_used_itself()

        with untouched(self.own.models), ExitStack() as stack:
            for module in self._modules:
                handle = module.register_forward_pre_hook(refuse, prepend=True)
                self._guards.append(handle.id)
                stack.callback(handle.remove)
            yield

    def refuse_reached(self) -> None:
        """Raise where a run on a copy left gradients in the model itself."""
        if any(p.grad is not None for p in self.own.parameters.values()):
            raise_used_itself()

    @contextmanager
    def fresh(self, dtype: torch.dtype | None) -> Iterator[ModelCopy]:
        """Return a copy for one run, None for its own dtype. Random numbers are the same in every run."""
        randomness = Randomness(self.devices)
        try:
            found = ModelCopy.of(self._copied())
            for each in found.models if dtype is not None else ():
                each.to(dtype)
            yield found
        finally:
            randomness.restore()

    def _copied(self) -> Any:
        kept = (value for module in self._modules for value in vars(module).values() if isinstance(value, Tensor))
        memo: dict[int, Any] = {id(each): each.detach().clone() for each in kept if not each.is_leaf}
        try:
            found = copy.deepcopy(self.own.model, memo)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            let_go(error, told=True)
            problem = (
                f"verify runs copies of the model, and this one cannot be copied: {type(error).__name__}: "
                f"{str(error).partition(chr(10))[0]}"
            )
            fix = "a model without files, locks, generators and handles in its attributes, which copy.deepcopy can copy"
            raise ConfigurationError(problem, fix=fix) from error
        for module in _all_modules(found):
            for guard in self._guards:
                module._forward_pre_hooks.pop(guard, None)  # noqa: SLF001 - a copied hook has no handle
        for p, twin in zip(_all_parameters(self.own.models), _all_parameters(ModelCopy.of(found).models), strict=True):
            _copy_hooks(p, twin)
        return found


def raise_used_itself() -> NoReturn:
    """Raise since a loss or a loop uses the model it knows, not the copy that it is given."""
    problem = "loss_fn or train_window uses a model of its own, and not the copy that verify passes in"
    raise LossError(problem, fix=USE_ARGUMENT)


def has_gradient_hooks(p: nn.Parameter) -> bool:
    """Whether a parameter's gradient passes through hooks."""
    return any(getattr(p, name, None) for name in _HOOKS)


def _copy_hooks(p: nn.Parameter, twin: nn.Parameter) -> None:
    """Register the gradient hooks of a parameter, which copies of tensors lose."""
    before, after = ((getattr(p, name, None) or {}) for name in _HOOKS)
    for hook in before.values():
        twin.register_hook(hook)
    for hook in after.values():
        twin.register_post_accumulate_grad_hook(hook)


def _all_parameters(models: tuple[nn.Module, ...]) -> list[nn.Parameter]:
    return list(dict.fromkeys(p for each in models for p in each.parameters()))


def _all_modules(model: Any) -> list[nn.Module]:
    return list(dict.fromkeys(module for each in ModelCopy.of(model).models for module in each.modules()))


def _prefixed(models: tuple[nn.Module, ...]) -> Iterator[tuple[str, nn.Module]]:
    for number, model in enumerate(models):
        yield (f"[{number}]" if len(models) > 1 else ""), model


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name
