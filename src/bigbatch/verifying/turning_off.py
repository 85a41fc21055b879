"""What can be turned off in a model, to see whether a difference goes with it."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase as Statistics

from bigbatch.state.snapshot import Randomness, devices_of
from bigbatch.verifying.apart import Apart, running_apart
from bigbatch.verifying.attributes import Written, copied, of_module, put_back
from bigbatch.verifying.drawing import Draws
from bigbatch.verifying.subject import Standing


@dataclass(frozen=True)
class Off:
    """What is turned off for a run; by default nothing is."""

    statistics: bool = False  # BatchNorm uses what it has learned
    randomness: bool = False  # each random number is its mean
    state: bool = False  # every forward finds the buffers as they were
    apart: tuple[Apart, ...] = ()  # these modules see each micro-batch by itself, in the big batch, too

    @property
    def apart_names(self) -> frozenset[str]:
        """The modules that see each micro-batch by itself."""
        return frozenset(each.name for each in self.apart)

    def without(self, other: "Off") -> "Off":
        """Turn on again what `other` turns off."""
        return Off(
            statistics=self.statistics and not other.statistics,
            randomness=self.randomness and not other.randomness,
            state=self.state and not other.state,
            apart=tuple(each for each in self.apart if each.name not in other.apart_names),
        )

    def and_off(self, other: "Off") -> "Off":
        """Turn that off, too."""
        return Off(
            statistics=self.statistics or other.statistics,
            randomness=self.randomness or other.randomness,
            state=self.state or other.state,
            apart=(*self.apart, *(each for each in other.apart if each.name not in self.apart_names)),
        )

    @contextmanager
    def around(self, standing: Standing, sizes: Sequence[int] = ()) -> Iterator[None]:
        """Turn it off for what runs inside; `sizes` are the micro-batches of a big batch that runs whole."""
        with ExitStack() as stack:
            if self.statistics:
                stack.enter_context(_resting(standing.models))
            if self.state:
                stack.enter_context(_as_it_was(standing.models))
            if self.randomness:
                stack.enter_context(_drawing_again(standing.models))
                stack.enter_context(Draws(still=True))
            modules = standing.modules
            for each in self.apart if len(sizes) > 1 else ():
                stack.enter_context(running_apart(modules[each.name], each, sizes))
            yield


@contextmanager
def _resting(models: Sequence[nn.Module]) -> Iterator[None]:
    """Have BatchNorm use what it has learned, also where a loop puts the model into training mode."""
    norms = [m for m in dict.fromkeys(m for each in models for m in each.modules()) if isinstance(m, Statistics)]
    modes = {module: module.training for module in norms}

    def rest(module: nn.Module, _: object) -> None:
        module.training = False

    handles = [module.register_forward_pre_hook(rest, prepend=True) for module in norms]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def _as_it_was(models: Sequence[nn.Module]) -> Iterator[None]:
    """Have every forward of a module find its buffers, and its numbers, as they are now.

    Of each module by itself, not of a model when it begins: in lock-step all micro-batches begin before one goes on.
    """
    with ExitStack() as stack:
        for module in dict.fromkeys(module for each in models for module in each.modules()):
            if isinstance(module, Statistics):  # whose statistics are not read where they are written
                continue
            buffers = {name: b.detach().clone() for name, b in module.named_buffers(recurse=False)}
            written = {module: copied(of_module(module))}

            def restore(module: nn.Module, _: object, buffers: Any = buffers, written: Written = written) -> None:
                module._buffers.update(copied(buffers))  # noqa: SLF001 - there is no other way to put one back
                put_back(written)

            stack.callback(module.register_forward_pre_hook(restore, prepend=True).remove)
        yield


@contextmanager
def _drawing_again(models: Sequence[nn.Module]) -> Iterator[None]:
    """Have every forward of a model draw the same numbers: those of Python and numpy have no mean to stand for them."""
    randomness = Randomness(devices_of(models))
    handles = [m.register_forward_pre_hook(lambda *_: randomness.restore(), prepend=True) for m in models]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


NOTHING = Off()
