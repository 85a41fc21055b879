"""CUDA graphs on a CPU: a capture notes every operation and computes nothing, a replay does them again.

As on a GPU, what a capture has made holds nothing before the first replay, and memory from outside is known by its
address alone: where a replay reads what was freed meanwhile, it says so.
"""

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from bigbatch import BigStep
from bigbatch.execute.graph_calls import ReplayedSteps, WholeWindows
from bigbatch.execute.graph_record import Recorder
from bigbatch.execute.graph_replay import Replayed
from bigbatch.execute.micro_step import Runner
from bigbatch.loss import readings, reductions
from bigbatch.loss.count import Term
from bigbatch.window import tally


class Freed(Exception):
    """A replay has read memory that was given back."""


class Outside:
    """A tensor that was there before the capture: an address and a shape."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = weakref.ref(tensor.untyped_storage())
        self._dtype, self._shape = tensor.dtype, (tensor.storage_offset(), tensor.size(), tensor.stride())

    def get(self) -> Tensor:
        """Return what is there now."""
        storage = self._storage()
        if storage is None:
            raise Freed
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._shape)


class Tape(TorchDispatchMode):
    """Notes operations, and does them again."""

    records = 0  # how many note something now

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._noted: list[tuple[Callable[..., Any], Any, list[Tensor | None]]] = []
        self._inside: set[int] = set()
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # what was written to, and what it was

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do it, and take note."""
        if any(isinstance(each, Tensor) and each.dtype == torch.uint8 for each in tree_leaves((args, kwargs))):
            return func(*args, **(kwargs or {}))  # the state of a generator: the host's
        given = tree_map(self._known, (args, kwargs or {}))
        for place, argument in enumerate(func._schema.arguments):
            written = args[place] if place < len(args) else (kwargs or {}).get(argument.name)
            # A BatchNorm writes to its statistics without saying so.
            writes = argument.is_write or argument.name in {"running_mean", "running_var"}
            for each in tree_leaves(written) if writes else ():
                if isinstance(each, Tensor) and _storage(each) not in {*self._inside, *self._before}:
                    whole = torch.empty(0, dtype=each.dtype).set_(each.untyped_storage())
                    self._before[_storage(each)] = whole, whole.clone()
        before = {_storage(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        result = func(*args, **(kwargs or {}))
        made = [
            each.detach() if isinstance(each, Tensor) and _storage(each) not in before else None
            for each in tree_leaves(result)
        ]
        self._inside |= {_storage(each) for each in made if each is not None}
        self._noted.append((func, given, made))
        return result

    def forget_changes(self) -> None:
        """Leave what was there before as it was; its version stays: it tells who got a gradient."""
        for there, value in self._before.values():
            there.data.copy_(value)

    def replay(self) -> None:
        """Do all of it again, into the same memory."""
        with torch.no_grad():
            for func, given, made in self._noted:
                args, kwargs = tree_map(lambda each: each.get() if isinstance(each, Outside) else each, given)
                for there, now in zip(made, tree_leaves(func(*args, **kwargs)), strict=True):
                    if there is not None:
                        there.copy_(now)

    def forget_values(self) -> None:
        """Leave nothing in what was made."""
        for each in (each for _, _, made in self._noted for each in made):
            if each is not None and each.is_floating_point():
                each.fill_(torch.nan)

    def _known(self, each: Any) -> Any:
        if not isinstance(each, Tensor):
            return each
        return each.detach() if _storage(each) in self._inside else Outside(each)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _counted_on_a_device(node: Any) -> Tensor:
    """Return a count as a tensor, which a replay counts anew; on a CPU it would be a number, and stay as it was."""
    total: Tensor = node._saved_total_weight
    return total.detach()


def _record(_: Recorder, run: Callable[[], Any]) -> tuple[Any, Any]:
    tape = Tape()
    Tape.records += 1
    try:
        with tape:
            found = run()
    finally:
        Tape.records -= 1
    tape.forget_changes()
    tape.forget_values()
    return tape, found


def _as_on_a_device(patch: Any) -> None:
    def read(self: Runner, loss: Tensor) -> list[Term]:
        with _disable_current_modes():
            return plain(self, loss)

    plain = getattr(Runner.read, "plain", Runner.read)
    read.plain = plain  # type: ignore[attr-defined]
    patch.setattr(Runner, "read", read)
    patch.setattr(tally, "_value", lambda loss: loss.detach().reshape(()).clone())  # not a number
    patch.setattr(Recorder, "record", _record)
    patch.setattr(reductions, "targets", _counted_on_a_device)
    patch.setattr(readings, "targets", _counted_on_a_device)


def graphs_of(step: BigStep, patch: Any) -> Replayed:
    """Return the graphs of micro-steps: those of a device, or emulated ones."""
    return step._runner.steps or emulated(step, patch)


def whole_emulated(step: BigStep, patch: Any) -> Replayed:
    """Let a step on the CPU replay whole windows, as with Options(cuda_graph=True) on a GPU; returns their graphs."""
    return _emulated(step, patch, "whole", WholeWindows, graph_windows=True)


def emulated(step: BigStep, patch: Any) -> Replayed:
    """Let a step on the CPU replay its micro-steps, as with Options(cuda_graph=True) on a GPU; returns its graphs."""
    return _emulated(step, patch, "steps", ReplayedSteps, graph_steps=True)


def _emulated(step: Any, patch: Any, name: str, kind: Any, **execution: bool) -> Replayed:
    _as_on_a_device(patch)
    step._options = step._divider._options = replace(step._options, cuda_graph=True)
    runner = step._runner
    setattr(runner, name, kind(runner._models, torch.device("cpu"), runner._stepper))
    step._execution = replace(step._execution, **execution)
    return getattr(runner, name)


def captures(step: BigStep) -> list[str]:
    """What a step still captures: micro-steps, whole windows."""
    return [name for name in ("steps", "whole") if getattr(step._runner, name) is not None]
