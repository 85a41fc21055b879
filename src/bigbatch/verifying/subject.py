"""The model that is put to the proof: every run gets it as it was given, in the dtype it asks for, and nobody else.

A run trains on a copy. Where a model cannot be copied, or where a loss reaches the model itself past its argument, a
run trains on the model, with other tensors in the place of its own, which are put back afterwards.
"""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bigbatch.state.oom import is_out_of_memory, let_go
from bigbatch.state.snapshot import Buffers, Randomness, devices_of, untouched
from bigbatch.verifying.attributes import attributes, put_back


@dataclass(frozen=True)
class Standing:
    """A model as one run has it."""

    model: Any  # as loss_fn takes it: one or a sequence
    models: tuple[nn.Module, ...]
    parameters: dict[str, nn.Parameter]  # those that are trained

    @property
    def modules(self) -> dict[str, nn.Module]:
        """All modules by their names; the name of a single model is empty."""
        return {name: module for prefix, model in _named(self.models) for name, module in _modules(prefix, model)}


class Subject:
    """A model, one or several, that every run gets as it was given."""

    def __init__(self, model: Any, models: tuple[nn.Module, ...]) -> None:
        """Find out whether it can be copied."""
        self.model, self.models = model, models
        self.devices = devices_of(models)
        self._before: _Before | None = None
        self.in_place = any(has_hooks(p) for each in models for p in each.parameters()) or not _can_be_copied(model)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """What is trained, by name."""
        return _parameters(self.models)

    @property
    def dtype(self) -> torch.dtype:
        """The type that most of the weights have."""
        numbers: dict[torch.dtype, int] = {}
        for p in (p for each in self.models for p in each.parameters() if p.is_floating_point()):
            numbers[p.dtype] = numbers.get(p.dtype, 0) + p.numel()
        return max(numbers, key=numbers.__getitem__, default=torch.float32)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Leave the model itself as it was, whatever happens inside; its gradients are None at the start."""
        with untouched(self.models):
            self._before = _Before(self.models)
            try:
                yield
            finally:
                self._before.restore()

    def lend_itself(self) -> None:
        """Run on the model itself from now on; a run that was to be on a copy may have trained it already."""
        self.in_place = True
        if self._before is not None:
            self._before.restore()

    def reached(self) -> bool:
        """Whether a run on a copy has left gradients in the model itself."""
        return not self.in_place and any(p.grad is not None for each in self.models for p in each.parameters())

    @contextmanager
    def fresh(self, dtype: torch.dtype | None) -> Iterator[Standing]:
        """Lend the model for one run; None is its own dtype. Random numbers are the same for each."""
        randomness = Randomness(self.devices)
        with ExitStack() as stack:
            stack.callback(randomness.restore)
            if self.in_place:
                stack.enter_context(self._other_tensors(dtype))
                yield Standing(self.model, self.models, self.parameters)
            else:
                model = copy.deepcopy(self.model)
                models = tuple(model) if isinstance(model, list | tuple) else (model,)
                for each in models if dtype is not None else ():
                    each.to(dtype)
                yield Standing(model, models, _parameters(models))

    @contextmanager
    def _other_tensors(self, dtype: torch.dtype | None) -> Iterator[None]:
        """Put copies into the place of weights and buffers, and take them out again."""
        parameters = list({id(p): p for each in self.models for p in each.parameters()}.values())
        own = [p.data for p in parameters]
        modes = [(module, module.training) for each in self.models for module in each.modules()]
        numbers = [attributes(each) for each in self.models]
        with untouched(self.models):
            try:
                for p in parameters:
                    p.data = _copied(p.data, dtype)
                for module in dict.fromkeys(module for each in self.models for module in each.modules()):
                    for name, buffer in module._buffers.items():  # noqa: SLF001 - there is no other way to put one back
                        if buffer is not None:
                            module._buffers[name] = _copied(buffer, dtype)  # noqa: SLF001
                yield
            finally:
                for p, data in zip(parameters, own, strict=True):
                    p.grad = None
                    p.data = data
                for module, training in modes:
                    module.training = training
                for kept in numbers:
                    put_back(kept)


class _Before:
    """The model itself as it was: weights, buffers, modes, the numbers beside them; gradients are None."""

    def __init__(self, models: tuple[nn.Module, ...]) -> None:
        self._parameters = [p for each in models for p in each.parameters()]
        self._weights = [p.detach().to("cpu", copy=True) for p in self._parameters]
        self._needing = [p.requires_grad for p in self._parameters]
        self._versions = [p._version for p in self._parameters]  # noqa: SLF001 - torch's own counter
        self._modes = [(module, module.training) for each in models for module in each.modules()]
        self._numbers = [attributes(each) for each in models]
        self._buffers = Buffers(models)

    def restore(self) -> None:
        for module, training in self._modes:
            module.training = training
        for kept in self._numbers:
            put_back(kept)
        self._buffers.restore()
        for place, (p, needs) in enumerate(zip(self._parameters, self._needing, strict=True)):
            p.grad = None
            p.requires_grad_(needs)
            if p._version != self._versions[place]:  # noqa: SLF001 - a loop has stepped the model itself
                with torch.no_grad():
                    p.copy_(self._weights[place])
                self._versions[place] = p._version  # noqa: SLF001


def _copied(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.detach().to(dtype=dtype if tensor.is_floating_point() else None, copy=True)


def _parameters(models: tuple[nn.Module, ...]) -> dict[str, nn.Parameter]:
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for prefix, model in _named(models):
        for name, p in model.named_parameters():
            if p.requires_grad:
                found.setdefault(id(p), (_joined(prefix, name), p))
    return dict(found.values())


def _modules(prefix: str, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        yield _joined(prefix, name), module


def _named(models: tuple[nn.Module, ...]) -> Iterator[tuple[str, nn.Module]]:
    for number, model in enumerate(models):
        yield (f"[{number}]" if len(models) > 1 else ""), model


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def has_hooks(p: nn.Parameter) -> bool:
    """Whether something listens to a parameter's gradient, which a copy would not have."""
    return any(getattr(p, name, None) for name in ("_backward_hooks", "_post_accumulate_grad_hooks"))


def _can_be_copied(model: Any) -> bool:
    try:
        copy.deepcopy(model)
    except Exception as error:  # noqa: BLE001 - a model may hold anything
        let_go(error)
        return is_out_of_memory(error)  # then nothing else can be run, which is said where it is
    return True
