"""Put things back: what a forward and a backward change beside gradients, so that they can be done again."""

import random
import sys
import warnings
import weakref
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase as Statistics
from torch.optim import Optimizer

from bigbatch.caller import outside
from bigbatch.errors import WindowBroken

_SHOWN = 3  # names, at most
_LARGE = 1 << 20  # bytes of a buffer


class Randomness:
    """The states of the default random generators: torch's on the CPU and the devices in use, Python's, numpy's.

    And those of generators of a model's own.
    """

    def __init__(self, devices: frozenset[torch.device], own: Sequence[Any] = ()) -> None:
        """Take down the states as they are; no device is waited for."""
        self._own = [(each, _state_of(each)) for each in own]
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
        for generator, state in self._own:
            _set_state(generator, state)

    def drawn(self, *, torchs: bool = True) -> bool:
        """Whether anyone has drawn a number since; of torch's on the CPU only where it is asked for."""
        if torchs and not torch.equal(self._cpu, torch.get_rng_state()):
            return True
        if self._python != random.getstate() or any(_is_other(state, _state_of(own)) for own, state in self._own):
            return True
        if any(not torch.equal(state, torch.cuda.get_rng_state(device)) for device, state in self._devices.items()):
            return True
        numpy: Any = sys.modules.get("numpy")
        if self._numpy is None:
            return False
        return not all(numpy.array_equal(*pair) for pair in zip(self._numpy, numpy.random.get_state(), strict=True))


def is_generator(value: object) -> bool:
    """Tell a generator of random numbers: torch's, Python's or numpy's."""
    return isinstance(value, torch.Generator | random.Random) or type(value).__module__.startswith("numpy.random")


def _state_of(generator: Any) -> Any:
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    if isinstance(generator, torch.Generator) or hasattr(generator, "get_state"):
        return generator.get_state()
    return generator.getstate() if hasattr(generator, "getstate") else None


def _set_state(generator: Any, state: Any) -> None:
    if hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    elif isinstance(generator, torch.Generator) or hasattr(generator, "set_state"):
        generator.set_state(state)
    elif hasattr(generator, "setstate"):
        generator.setstate(state)


def _is_other(before: Any, now: Any) -> bool:
    return not torch.equal(before, now) if isinstance(before, Tensor) else repr(before) != repr(now)


class _Kept(NamedTuple):
    """A buffer that has stayed as it was, and a copy of it."""

    buffer: "weakref.ref[Tensor]"
    version: int
    training: bool  # of its module: a BatchNorm that was frozen begins to move when it is not
    copied: Tensor


class Habits(NamedTuple):
    """What the buffers of some models have done in the steps so far, by their ids."""

    still: Mapping[int, _Kept] = MappingProxyType({})
    moving: frozenset[int] = frozenset()


class Buffers:
    """The registered buffers of some models, as they are now.

    A copy of every buffer for every step would be wasteful for tables that never change, so a copy is kept of those
    that were seen to stay as they are: `habits` names them. A change is seen by the tensor's version or, the first
    time, by its values, since the statistics of a BatchNorm change without a new version.
    """

    def __init__(self, models: Sequence[nn.Module], habits: Habits | None = None) -> None:
        """Copy what may change."""
        self._habits = habits or Habits()
        self._saved: list[tuple[nn.Module, str, Tensor | None, Tensor | None, int]] = []
        self._trusted: set[int] = set()  # those whose versions tell all
        for module in dict.fromkeys(module for model in models for module in model.modules()):
            for name, buffer in module._buffers.items():  # noqa: SLF001 - there is no other way to put one back
                copied = None if buffer is None else self._copied(buffer, training=module.training)
                self._saved.append((module, name, buffer, copied, 0 if buffer is None else _version(buffer)))

    def habits(self) -> Habits:
        """Return what the buffers have done, after a step."""
        still, moving = {}, set(self._habits.moving)
        for module, name, buffer, copied, version in self._saved:
            if buffer is None or copied is None:
                continue
            replaced = module._buffers.get(name) is not buffer  # noqa: SLF001
            if not replaced and isinstance(module, Statistics) and module.training:
                moving.add(id(buffer))  # if not in this step, then in one that goes another way
            elif not replaced and id(buffer) not in moving and self._is_same(buffer, copied, version):
                still[id(buffer)] = _Kept(weakref.ref(buffer), version, module.training, copied)
            elif not replaced:
                moving.add(id(buffer))
        return Habits(still, frozenset(moving))

    def written(self, met: Container[int]) -> list[str]:
        """Return the buffers that forwards have changed: each micro-batch has, and a big batch would have once.

        Statistics of norms are looked after, also those by their ids that micro-batches have `met` at; and a table that
        is made longer is no matter.
        """
        return [
            f"{type(module).__name__}.{name}"
            for module, name, buffer, copied, version in self._saved
            if buffer is not None
            and copied is not None
            and not isinstance(module, Statistics)
            and id(buffer) not in met
            if self._is_moved(module._buffers.get(name), buffer, copied, version)  # noqa: SLF001
        ]

    def _is_moved(self, now: Tensor | None, before: Tensor, copied: Tensor, version: int) -> bool:
        if now is None or (now is before and _version(now) == version) or now.shape != copied.shape:
            return False
        return not torch.equal(now.detach().to(copied.device), copied)

    def restore(self) -> None:
        """Put all of them back, those that were replaced by other tensors, too."""
        with torch.no_grad(), ExitStack() as each_by_itself:
            for saved in self._saved:
                each_by_itself.callback(self._restore, *saved)

    def _restore(
        self, module: nn.Module, name: str, buffer: Tensor | None, copied: Tensor | None, version: int
    ) -> None:
        module._buffers[name] = buffer  # noqa: SLF001
        if buffer is None or copied is None:
            return
        # One that is as it was keeps its version.
        if id(buffer) in self._habits.moving or not self._is_same(buffer, copied, version):
            buffer.copy_(copied)

    def _copied(self, buffer: Tensor, *, training: bool) -> Tensor:
        kept = self._habits.still.get(id(buffer))
        if kept is not None and kept.buffer() is buffer and kept[1:3] == (_version(buffer), training):
            self._trusted.add(id(buffer))
            return kept.copied
        # What is large hardly ever changes, and may be a whole quantised model: its copy stays off the device.
        large = buffer.numel() * buffer.element_size() > _LARGE and id(buffer) not in self._habits.moving
        return buffer.detach().to("cpu", copy=True) if large else buffer.detach().clone()

    def _is_same(self, buffer: Tensor, copied: Tensor, version: int) -> bool:
        if _version(buffer) != version:
            return False
        return id(buffer) in self._trusted or torch.equal(buffer.to(copied.device), copied)


class Snapshot:
    """What a forward of some models begins with: their buffers, and random numbers."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        habits: Habits | None = None,
        devices: frozenset[torch.device] = frozenset(),
    ) -> None:
        """Copy both as they are; `devices` are those in use beside the models' own."""
        self.buffers, self.randomness = Buffers(models, habits), Randomness(devices_of(models) | devices)

    def restore(self, *, randomness: bool = True) -> None:
        """Go back to both, or raise: what is tried again must not begin with other numbers."""
        try:
            with ExitStack() as each_by_itself:
                each_by_itself.callback(self.buffers.restore)
                if randomness:
                    each_by_itself.callback(self.randomness.restore)
        except BaseException as error:
            said = str(error).partition("\n")[0]
            raise WindowBroken(
                "a step failed, and the model's buffers or random generators could not be restored. Parameters and the "
                "optimizer are as before it.",
                found=f"{type(error).__name__}: {said}",
                fix="the buffers of a checkpoint, loaded before you go on",
            ) from error


def warn_of_written(names: Sequence[str]) -> None:
    """Say which buffers move once for each micro-batch."""
    shown = ", ".join(dict.fromkeys(names[:_SHOWN])) + (", ..." if len(names) > _SHOWN else "")
    warnings.warn(
        f"the model changes buffers when it runs ({shown}): once for each micro-batch, not once for the batch. So they "
        "are not what the big batch would leave, and where the loss depends on them, as with spectral_norm or a "
        "running centre, neither is the gradient. bigbatch.verify tells by how much.\n"
        "Write to them after the step, from what loss_fn returns as extras; or take one micro-batch.",
        stacklevel=outside(),
    )


def _version(buffer: Tensor) -> int:
    return -1 if buffer.is_inference() else buffer._version  # noqa: SLF001 - torch's own counter


@contextmanager
def untouched(
    models: Sequence[nn.Module], optimizers: Sequence[Optimizer] = (), habits: Habits | None = None
) -> Iterator[None]:
    """Inside, train as you like: gradients, buffers and random generators are as before afterwards.

    Gradients are None at the start. Parameters and the optimizers' state are not guarded: do not step.
    """
    parameters = list({id(p): p for model in models for p in model.parameters()}.values())
    known = {id(p) for p in parameters}
    stepped = {id(p): p for o in optimizers for group in o.param_groups for p in group["params"]}
    parameters += [p for key, p in stepped.items() if key not in known]
    gradients = [p.grad for p in parameters]
    before = Snapshot(models, habits)
    for p in parameters:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
        before.restore()


def devices_of(models: Sequence[nn.Module]) -> frozenset[torch.device]:
    """Return the devices that the models' parameters are on."""
    return frozenset(p.device for model in models for p in model.parameters())
