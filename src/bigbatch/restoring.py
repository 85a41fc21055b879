"""Put things back: what a forward and a backward change beside gradients, so that they can be done again."""

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bigbatch.gradients import all_parameters


class Randomness:
    """The states of the default random generators: torch's on the CPU and the devices in use, Python's, numpy's."""

    def __init__(self, devices: frozenset[torch.device]) -> None:
        """Take down the states as they are; no device is waited for."""
        self._cpu = torch.get_rng_state()
        self._devices = {device: torch.cuda.get_rng_state(device) for device in devices if device.type == "cuda"}
        self._python = random.getstate()
        numpy: Any = sys.modules.get("numpy")
        self._numpy = numpy.random.get_state() if numpy is not None else None

    def restore(self) -> None:
        """Go back to the states."""
        torch.set_rng_state(self._cpu)
        for device, state in self._devices.items():
            torch.cuda.set_rng_state(state, device)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)

    def drawn(self) -> bool:
        """Whether torch has drawn a number since."""
        return not torch.equal(self._cpu, torch.get_rng_state()) or any(
            not torch.equal(state, torch.cuda.get_rng_state(device)) for device, state in self._devices.items()
        )


class Buffers:
    """The registered buffers of some models, as they are now.

    A copy of every buffer for every step would be wasteful for tables that never change, so those that were seen to
    stay as they are through a step are only watched: `still` names them.
    """

    def __init__(self, models: Sequence[nn.Module], still: frozenset[int] = frozenset()) -> None:
        """Copy what may change; `still` are the ids of buffers that never have."""
        self._saved: list[tuple[nn.Module, str, Tensor | None, Tensor | None, int]] = []
        for module in dict.fromkeys(module for model in models for module in model.modules()):
            for name, buffer in module._buffers.items():  # noqa: SLF001 - there is no other way to put one back
                copied = None if buffer is None or id(buffer) in still else buffer.detach().clone()
                self._saved.append((module, name, buffer, copied, 0 if buffer is None else buffer._version))  # noqa: SLF001

    def still(self) -> frozenset[int]:
        """Return the ids of the buffers that have stayed as they were."""
        return frozenset(
            id(buffer)
            for module, name, buffer, _, version in self._saved
            if buffer is not None and module._buffers.get(name) is buffer and buffer._version == version  # noqa: SLF001
        )

    def restore(self) -> None:
        """Put all of them back, those that were replaced by other tensors, too."""
        with torch.no_grad():
            for module, name, buffer, copied, version in self._saved:
                module._buffers[name] = buffer  # noqa: SLF001
                if buffer is None or buffer._version == version:  # noqa: SLF001
                    continue
                if copied is None:
                    msg = (
                        f"buffer {name!r} of a {type(module).__name__} never changed in a forward before and did in "
                        "one that failed: it was not copied and could not be put back. Load it from a checkpoint."
                    )
                    raise RuntimeError(msg)
                buffer.copy_(copied)


@contextmanager
def untouched(models: Sequence[nn.Module], optimizers: Sequence[Optimizer] = ()) -> Iterator[None]:
    """Inside, train as you like: gradients, buffers and random generators are as before afterwards.

    Gradients are None at the start. Parameters and the optimizers' state are not guarded: do not step.
    """
    parameters = list({id(p): p for model in models for p in model.parameters()}.values())
    known = {id(p) for p in parameters}
    parameters += [p for p in all_parameters(optimizers) if id(p) not in known]  # type: ignore[misc]
    gradients = [p.grad for p in parameters]
    buffers, randomness = Buffers(models), Randomness(devices_of(models))
    for p in parameters:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
        buffers.restore()
        randomness.restore()


def devices_of(models: Sequence[nn.Module]) -> frozenset[torch.device]:
    """Return the devices that the models' parameters are on."""
    return frozenset(p.device for model in models for p in model.parameters())
