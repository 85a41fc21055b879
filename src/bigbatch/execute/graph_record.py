"""Record what a function launches on a device as a graph, and watch what no graph sees.

A graph reads tensors by address and keeps numbers, branches and hooks as they were: all that Python decided while it
was captured. So all that modules keep is compared before each window, and a capture that draws random numbers of the
host is refused.
"""

import gc
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from functools import cache
from itertools import starmap, zip_longest
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bigbatch.batch.tree import PLAIN
from bigbatch.errors import BigBatchError
from bigbatch.state.oom import is_out_of_memory
from bigbatch.state.rng import Randomness, is_generator

Result = TypeVar("Result")
_capture_stream = cache(torch.cuda.Stream)  # of a device: all captures are made on it
# What a call of a module does not read: ways to save it, and what is set once for its class.
_UNREAD = frozenset(name for name in vars(nn.Module()) if "state_dict" in name or name == "_non_persistent_buffers_set")
_OWN = "_parameters", "_buffers", "_modules"  # tables of each module, of any length
_CONTAINERS = (dict, list, tuple, set, deque)
_MANY = 256  # entries of a container that are compared; where there are more, it is a vocabulary or the like
_DEEP = 3  # containers in containers
_SMALL = 4096  # bytes of an array
# These are compared by value, or by identity where they have none; they are held, so that no other takes their place.
_COMPARED = (*PLAIN, complex, Enum, torch.dtype, torch.device, nn.Module, FunctionType, BuiltinFunctionType, MethodType)


class NotCapturable(BigBatchError):
    """This cannot be captured; the message says why."""


class Recorder:
    """Makes graphs. They may share memory because none runs beside another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None  # the memory of its graphs

    def forget(self) -> None:
        """Take other memory for the graphs to come: what the ones before have goes with them."""
        self._pool = None

    def record(self, run: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        """Return the graph of what `run` launches, and what it returns; nothing is computed by this."""
        stream = _capture_stream(self._device)
        free_workspaces()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.current_stream(self._device)
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            # Other threads, as a loader's that pins memory, may go on as they like.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                found = run()
                graph.capture_end()
                free_workspaces()
            except BaseException as error:
                self._abandon(graph)
                if not isinstance(error, RuntimeError) or isinstance(error, BigBatchError) or is_out_of_memory(error):
                    raise
                said = str(error).splitlines() or [type(error).__name__]
                raise NotCapturable(said[0]) from error
        before.wait_stream(stream)
        return graph, found

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Leave a capture that failed: torch would go on to hand out the graph's memory, and never free any."""
        with suppress(RuntimeError):
            graph.capture_end()
        free_workspaces()
        with suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)  # noqa: SLF001 - no public name
        self._pool = None
        # Torch takes its generator to be in a capture still, until the end of one that succeeds.
        some, graph = torch.empty((), device=self._device), torch.cuda.CUDAGraph()
        with suppress(RuntimeError):
            torch.cuda.synchronize(self._device)
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                some.zero_()
            finally:
                graph.capture_end()


def free_workspaces() -> None:
    """Free the memory that matrix products work in, where this torch can: 32 MiB and more per thread.

    What was launched still uses it, on the stream where the next one to get it launches. Around a capture it comes out
    of the graph's memory: it must not be older, or that memory may be given out again while the graph still writes to
    it; nor stay, or it holds on to it when the graph is long gone.
    """
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()  # noqa: SLF001 - no public name


class Guard:
    """Tells whether what captures depend on beside their inputs is as it was."""

    def __init__(self, models: Sequence[nn.Module], device: torch.device, *, draws: bool) -> None:
        """Have compared nothing yet; `draws`: a replay may draw random numbers of the device."""
        self._models, self._device, self._draws = models, device, draws
        self._state: object = None
        self._kept: _Kept | None = None

    def changed(self, parameters: Sequence[Tensor], settings: object) -> bool:
        """Whether modes, places of tensors, attributes, hooks or `settings` are others than at the last call."""
        stays = self._kept is not None and self._kept.stays()
        self._kept = self._kept or _Kept(self._models)
        weights = [each for _, each in self._kept.tensors if isinstance(each, nn.Parameter)]
        tables = [_place(each) for _, each in self._kept.tensors if not isinstance(each, nn.Parameter)]
        state = settings, [p.data_ptr() for p in (*parameters, *weights)], tables, [_hooks(p) for p in weights]
        before, self._state = self._state, state
        return before != state or not stays

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Refuse a capture that no replay can repeat; where it fails modules and generators are as they were.

        It may neither replace tensors that modules keep, since replays begin with the old ones, nor draw numbers of
        the host, which would be the same ones in every replay.
        """
        kept = _Kept(self._models)
        numbers = Randomness(frozenset() if self._draws else frozenset({self._device}), kept.generators)
        try:
            yield
            # On a CPU, which has no graphs, torch's own generator is the device's.
            kept.refuse_changed(drawn=numbers.drawn(torchs=not self._draws or self._device.type != "cpu"))
        except BaseException:
            kept.restore()
            numbers.restore()
            raise


class _Kept:
    """What modules keep in their attributes, and in the containers and objects among them: one walk, bounded."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._look()

    def stays(self) -> bool:
        """Whether all of it is as it was; if not, it is from now on."""
        if all(starmap(_holds, self._holders)):  # the same objects: nothing is compared by value
            return True
        before = self._values
        self._look()
        return bool(before == self._values)

    def restore(self) -> None:
        """Put the same things back."""
        for holder, content in self._holders:
            if not _holds(holder, content):
                holder.clear()
                (holder.update if isinstance(holder, dict | set) else holder.extend)(content)

    def refuse_changed(self, *, drawn: bool) -> None:
        """Raise where modules keep other tensors by now, or numbers were drawn."""
        if drawn:
            raise NotCapturable("it draws random numbers that each replay would repeat")
        for (name, old), (other, new) in zip_longest(self.tensors, _Kept(self._models).tensors, fillvalue=("", None)):
            if old is not new:
                raise NotCapturable(
                    f"its forward replaces a buffer or an attribute, {other or name}; write into it instead, as with "
                    "buffer.copy_()"
                )

    def _look(self) -> None:
        self.generators: list[Any] = []
        self.tensors: list[tuple[str, Tensor]] = []  # with their names; what has a graph is an activation put aside
        self._holders: list[tuple[Any, Any]] = []  # with copies of what they hold
        self._values: list[Any] = []
        seen: set[int] = set()
        for module in (module for model in self._models for module in model.modules()):
            self._hold(vars(module))
            for name, value in vars(module).items():
                if name not in _UNREAD:
                    self._values.append(name)
                    self._note(value, f"{type(module).__name__}.{name}", -1 if name in _OWN else 0, seen)

    def _note(self, value: Any, name: str, depth: int, seen: set[int]) -> None:
        """Take down a value; one of the module's own tables has a depth of -1."""
        if value is None or isinstance(value, _COMPARED):
            self._values.append(value)
        elif isinstance(value, Tensor | type | ModuleType):
            self._values.append(type(value))  # tensors are compared by their places
            if isinstance(value, Tensor) and value.grad_fn is None:
                self.tensors.append((name, value))
        elif is_generator(value):
            self.generators.append(value)
        elif hasattr(value, "tobytes"):
            self._values.append(value.tobytes() if getattr(value, "nbytes", _SMALL + 1) <= _SMALL else type(value))
        else:
            self._values.append(type(value))
            inside: Any = value if isinstance(value, _CONTAINERS) else getattr(value, "__dict__", None)
            few = isinstance(inside, _CONTAINERS) and (depth < 0 or (len(inside) <= _MANY and depth < _DEEP))
            if few and id(inside) not in seen:
                seen.add(id(inside))
                if not isinstance(inside, tuple):
                    self._hold(inside)
                for key, each in inside.items() if isinstance(inside, dict) else ((None, each) for each in inside):
                    self._note(key, name, depth + 1, seen)
                    self._note(each, name if key is None else f"{name.partition('.')[0]}.{key}", depth + 1, seen)

    def _hold(self, holder: Any) -> None:
        self._holders.append((holder, dict(holder) if isinstance(holder, dict) else list(holder)))


def _holds(holder: Any, content: Any) -> bool:
    same = len(holder) == len(content) and all(map(is_, holder, content))
    return same and (not isinstance(holder, dict) or all(map(is_, holder.values(), content.values())))


def _hooks(parameter: Tensor) -> object:
    own, accumulated = (getattr(parameter, name, None) for name in ("_backward_hooks", "_post_accumulate_grad_hooks"))
    return (tuple(own or ()), tuple(accumulated or ())) if own or accumulated else None


def _place(tensor: Tensor) -> object:
    """Another tensor in the same place with the same shape is as good, since a graph reads what is there."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
