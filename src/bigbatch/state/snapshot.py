"""What a forward and a backward change beside gradients, restored so that they can run again."""

import warnings
from collections.abc import Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase as Statistics
from torch.optim import Optimizer

from bigbatch.caller import outside
from bigbatch.errors import WindowBroken
from bigbatch.state.rng import Randomness

_SHOWN = 3  # names, at most
_LARGE = 1 << 20  # bytes of a buffer


class _Saved(NamedTuple):
    """A registered buffer and its copy."""

    module: nn.Module
    name: str
    buffer: Tensor
    copied: Tensor
    version: int
    trusted: bool = False  # it has stayed before: its version tells all

    def is_same(self) -> bool:
        """Whether it has its version and, the first time, its values: a BatchNorm's statistics have no versions."""
        return _version(self.buffer) == self.version and (self.trusted or _equal(self.buffer, self.copied))


class Buffers:
    """The registered buffers of some models, as they are now.

    Tables that never change are not copied for every step: a buffer that stayed since the snapshot `before` keeps its
    copy. One that has moved once is copied each time.
    """

    def __init__(self, models: Sequence[nn.Module], before: "Buffers | None" = None) -> None:
        """Copy what may change."""
        self.moved: set[int] = set() if before is None else before.moved  # ids of those that have moved once
        stayed = {} if before is None else {id(each.buffer): each for each in before.saved}
        own = {module: module._buffers for model in models for module in model.modules()}  # noqa: SLF001 - to restore it
        self._registered = [(each, dict(each)) for each in own.values()]
        every = [(module, name, b) for module, each in own.items() for name, b in each.items() if b is not None]
        self.saved: list[_Saved] = [self._save(*each, stayed.get(id(each[2]))) for each in every]

    def _save(self, module: nn.Module, name: str, buffer: Tensor, known: _Saved | None) -> _Saved:
        moves = id(buffer) in self.moved or (isinstance(module, Statistics) and module.training)
        if known is not None and known.version == _version(buffer) and not moves:
            return known._replace(trusted=True)
        # What is large hardly ever changes, and may be a quantized model: its copy stays off the device.
        large = buffer.nbytes > _LARGE and not moves
        copied = buffer.detach().to("cpu", copy=True) if large else buffer.detach().clone()
        return _Saved(module, name, buffer, copied, _version(buffer))

    def settle(self) -> "Buffers":
        """A step is over: note which buffers it has moved. The others need no copy in the next one."""
        there = [each for each in self.saved if each.module._buffers.get(each.name) is each.buffer]  # noqa: SLF001
        self.moved |= {id(each.buffer) for each in there if not each.is_same()}
        self.saved = [each for each in there if id(each.buffer) not in self.moved]
        return self

    def written(self, met: Container[int]) -> list[str]:
        """Return the buffers that forwards have changed: each micro-batch has, and a big batch would have once.

        Statistics of norms are looked after, also those by their ids that micro-batches have `met` at; and a table that
        is made longer is no matter.
        """
        found = []
        for module, name, buffer, copied, version, _ in self.saved:
            now = module._buffers.get(name)  # noqa: SLF001
            if now is None or isinstance(module, Statistics) or id(buffer) in met or now.shape != copied.shape:
                continue
            if not (now is buffer and _version(now) == version) and not _equal(now, copied):
                found.append(f"{type(module).__name__}.{name}")
        return found

    def restore(self) -> None:
        """Put all of them back, those that were replaced by other tensors, too; one that is as it was stays."""

        def restore(saved: _Saved) -> None:
            if id(saved.buffer) in self.moved or not saved.is_same():
                saved.buffer.copy_(saved.copied)

        with torch.no_grad(), ExitStack() as each_by_itself:
            for saved in self.saved:
                each_by_itself.callback(restore, saved)
            for buffers, before in self._registered:
                each_by_itself.callback(buffers.update, before)


class Snapshot:
    """What a forward of some models begins with: their buffers, and random numbers of theirs and other `devices`."""

    def __init__(
        self, models: Sequence[nn.Module], before: Buffers | None = None, devices: frozenset[torch.device] = frozenset()
    ) -> None:
        self.buffers, self.randomness = Buffers(models, before), Randomness(devices_of(models) | devices)

    def restore(self, *, randomness: bool = True) -> None:
        """Go back to both, or raise: what is tried again must not begin with other numbers."""
        try:
            with ExitStack() as each_by_itself:
                each_by_itself.callback(self.buffers.restore)
                if randomness:
                    each_by_itself.callback(self.randomness.restore)
        except BaseException as error:
            said = str(error).partition("\n")[0]
            broken = WindowBroken(
                "a step failed, and the model's buffers or random generators could not be restored. Parameters and the "
                "optimizer are as before it.",
                found=f"{type(error).__name__}: {said}",
                fix="the buffers of a checkpoint, loaded before you go on",
            )
            if isinstance(error, Exception):
                raise broken from error
            raise error from broken  # Ctrl-C comes out as such, whoever takes errors for an answer


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


@contextmanager
def untouched(
    models: Sequence[nn.Module], optimizers: Sequence[Optimizer] = (), before: Buffers | None = None
) -> Iterator[None]:
    """Inside, train as you like: gradients, buffers and random generators are as before afterwards.

    Gradients are None at the start. Parameters and the optimizers' state are not guarded: do not step.
    """
    stepped = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    parameters = dict.fromkeys([*(p for model in models for p in model.parameters()), *stepped])
    gradients = [p.grad for p in parameters]
    snapshot = Snapshot(models, before)
    for p in parameters:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
        snapshot.restore()


def devices_of(models: Sequence[nn.Module]) -> frozenset[torch.device]:
    """Return the devices that the models' parameters are on."""
    return frozenset(p.device for model in models for p in model.parameters())


def _equal(one: Tensor, copied: Tensor) -> bool:
    return torch.equal(one.detach().to(copied.device), copied)


def _version(buffer: Tensor) -> int:
    return -1 if buffer.is_inference() else buffer._version  # noqa: SLF001 - torch's own counter
