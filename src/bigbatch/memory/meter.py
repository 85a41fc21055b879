"""Measure what runs: the bytes of tensors alive at once, or saved by autograd; peak and time of a micro-step."""

import gc
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bigbatch.loss.count import LOW_PRECISION
from bigbatch.memory.budget import resident
from bigbatch.memory.search import Probe
from bigbatch.state.oom import is_out_of_memory, let_go
from bigbatch.state.snapshot import untouched

_SHORT, _REPEATS = 0.2, 2  # seconds of a micro-step that is timed once more, and how often
_SIDE = 64  # of a small square parameter that stands in for the real ones
_USUAL_STATES = 2  # of an optimizer that cannot be tried on a small one: as Adam has


class LiveBytes(TorchDispatchMode):
    """Inside `with LiveBytes() as live:` counts the bytes of tensors that operations return while they live.

    Activations, gradients, optimizer state and the batches cut out of the data count; what existed before does
    not, nor do buffers that a kernel allocates and frees within itself. The process's resident memory would hide a few
    KiB of activations; counting storages does not, and gives the same number in every run.

    Args:
        block: storages are rounded up to a multiple of so many bytes; CUDA's allocator hands out 512 at least.
        limit: the most bytes; more of them raise a MemoryError.
    """

    def __init__(self, *, block: int = 1, limit: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._block, self._limit = block, limit
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def add(self, tensors: Any) -> int:
        """Count tensors that are there already; return how many bytes that is."""
        before = self.now
        for tensor in tree_leaves(tensors):
            self._remember(tensor, new=True)
        return self.now - before

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and count the storages that it returned for the first time."""
        # An output may alias an input (a view, an in-place result), whose storage was there before.
        for tensor in tree_leaves((args, kwargs)):
            self._remember(tensor, new=False)
        outputs = self.computed(func, args, kwargs or {})
        self.add(outputs)
        self.peak = max(self.peak, self.now)
        if self._limit is not None and self.now > self._limit:
            raise MemoryError(f"{func} made this {self.now:,} bytes of at most {self._limit:,}")
        return outputs

    def computed(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation; a subclass may run another one."""
        return func(*args, **kwargs)

    def _remember(self, tensor: object, *, new: bool) -> None:
        storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
        if storage is None or (key := _identity(storage)) in self._known:
            return
        size = -(-storage.nbytes() // self._block) * self._block if new else 0
        self.now += size

        def freed(_: object) -> None:
            self.now -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, freed)


def saved_bytes(run: Callable[[], object], models: Sequence[nn.Module], device: torch.device) -> int:
    """Return how much autograd saves of what runs beside the models' own: of memory on the device, each piece once."""
    every = [each for model in models for each in (*model.parameters(), *model.buffers())]
    own = {_identity(each.untyped_storage()) for each in every if each.layout == torch.strided}
    found: dict[int, tuple[StorageWeakRef, int]] = {}  # a storage that is referred to keeps its identity

    def pack(tensor: Tensor) -> Tensor:  # without its graph: an operation that held its own result would never go
        if tensor.device == device and tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            if _identity(storage) not in own:
                found[_identity(storage)] = (StorageWeakRef(storage), storage.nbytes())
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda packed: packed):
        kept = run()
    del kept
    return sum(size for _, size in found.values())


def _identity(storage: torch.UntypedStorage) -> int:
    """Return what tells a storage from others: each of its tensors makes a Python object of its own for it."""
    return int(storage._cdata)  # noqa: SLF001 - as torch.multiprocessing does


class Stage:
    """Probes micro-steps of one model, one after the other.

    On CUDA it asks the caching allocator what it took from the device. A CPU has none that keeps a peak: there it
    counts the tensors that operations return, on top of what the process held when the stage was made, and stops a
    micro-step that would hold more than `limit` bytes. A GPU refuses by itself; a host hands out memory that it does
    not have, and ends the process when that is used.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        gradient_dtype: torch.dtype | None,
        device: torch.device,
        limit: int | None,
    ) -> None:
        self._models, self._optimizers, self._wide = models, optimizers, gradient_dtype
        self._device, self._limit = device, limit
        on_cuda = device.type == "cuda"
        with untouched(models, optimizers):  # a step may draw random numbers
            awaited = sum(p.numel() * dtype.itemsize for p, dtype in _awaited_state(optimizers))
        # Taken once: memory that one probe has freed may stay with the process, and is not the next one's. State to
        # come is added, not made: a host takes memory only when it is written to.
        self._before = (torch.cuda.memory_allocated(device) if on_cuda else resident()) + awaited
        missing = (dtype.itemsize * p.numel() for p, dtype in self._gradients() if p.grad is None)
        self.held = self._before + sum(missing)  # whatever the size

    def rehearse(self, size: int, run: Callable[[], object]) -> Probe:
        """Run a micro-step of `size` samples and return what it took; running out of memory is an answer, too."""
        with untouched(self._models, self._optimizers):
            try:
                return self._measured(size, run)
            except BaseException as error:
                if not is_out_of_memory(error):
                    raise
                let_go(error)
        return Probe(size, None, 0.0)

    def _measured(self, size: int, run: Callable[[], object]) -> Probe:
        company: list[Tensor] = []
        if self._device.type == "cuda":
            for p, dtype in self._gradients():  # which each has in every micro-batch but the first
                company.append(torch.zeros_like(p, dtype=dtype, requires_grad=False))
                if dtype == p.dtype:
                    p.grad = company[-1]
            company += [torch.empty_like(p, dtype=dtype) for p, dtype in _awaited_state(self._optimizers)]
        gc.collect()  # what lies in reference cycles is nobody's, and would be measured
        peak = self._peak(run)
        # Timed apart: the first time of a shape is slow, and so is a CPU whose tensors are counted.
        seconds = self._seconds(run)
        if seconds < _SHORT:
            seconds = min(
                seconds, *[self._seconds(run) for _ in range(_REPEATS)]
            )  # a generator would turn a StopIteration
        return Probe(size, peak, seconds)

    def _peak(self, run: Callable[[], object]) -> int:
        if self._device.type != "cuda":
            with LiveBytes(limit=None if self._limit is None else self._limit - self._before) as live:
                run()
            return self._before + int(live.peak)
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # a larger block that lies around is handed out, and counted, whole
        torch.cuda.reset_peak_memory_stats(self._device)
        run()
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.max_memory_reserved(self._device))

    def _seconds(self, run: Callable[[], object]) -> float:
        started = time.perf_counter()
        run()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - started

    def _gradients(self) -> list[tuple[Tensor, torch.dtype]]:
        """Return each parameter that is trained, and what its gradient is added up in."""
        every = [p for o in self._optimizers for group in o.param_groups for p in group["params"] if p.requires_grad]
        wide = self._wide
        return [(p, p.dtype if wide is None or p.dtype not in LOW_PRECISION else wide) for p in dict.fromkeys(every)]


def _awaited_state(optimizers: Sequence[Optimizer]) -> Iterator[tuple[Tensor, torch.dtype]]:
    """Yield a parameter and a dtype for each tensor of state that optimizers will have after their first step.

    Small twins of them step: to be called where random generators are restored afterwards.
    """
    for optimizer, group in [(each, group) for each in optimizers for group in each.param_groups]:
        if waiting := [p for p in group["params"] if p.requires_grad and not optimizer.state.get(p)]:
            dtypes = _state_dtypes(optimizer, group, waiting[0])
            yield from ((p.detach(), dtype) for p in waiting for dtype in dtypes)


def _state_dtypes(optimizer: Optimizer, group: dict[str, object], like: Tensor) -> list[torch.dtype]:
    """Return what an optimizer keeps of each element of a parameter, seen on a small one."""
    small = nn.Parameter(torch.zeros(_SIDE, _SIDE, dtype=like.dtype, device=like.device))
    small.grad = torch.zeros_like(small)
    options = {name: value for name, value in group.items() if name != "params"}
    try:
        twin = type(optimizer)([{**options, "params": [small]}], **optimizer.defaults)
        twin.step()
    except Exception:  # noqa: BLE001 - whatever an unknown optimizer wants
        return [like.dtype] * _USUAL_STATES
    kept = [value for value in twin.state[small].values() if isinstance(value, Tensor)]
    return [value.dtype for value in kept if value.numel() == small.numel()]
