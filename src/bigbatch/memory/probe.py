"""Probe a micro-step: run it as a step would, beside gradients and optimizer state, and leave no trace."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bigbatch.memory.budget import resident
from bigbatch.memory.meter import LiveBytes
from bigbatch.memory.search import Probe
from bigbatch.state.oom import is_out_of_memory, let_go
from bigbatch.state.snapshot import untouched

_SHORT, _REPEATS = 0.2, 2  # seconds of a micro-step that is timed once more, and how often
_SIDE = 64  # of a small square parameter that stands in for the real ones
_USUAL_STATES = 2  # of an optimizer that cannot be tried on a small one: as Adam has


class Stage:
    """Probes micro-steps of one model, one after the other.

    On CUDA it asks the caching allocator what it took from the device. A CPU has none that keeps a peak: there it
    counts the tensors that operations return, on top of what the process held when the stage was made, and stops a
    micro-step that would hold more than `limit`. A GPU refuses by itself; a host hands out memory that it does not
    have, and ends the process when that is used.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        gradient_dtype: torch.dtype | None,
        device: torch.device,
        limit: int | None,
    ) -> None:
        """Take what a step has; `limit` is what may be held, in bytes."""
        self._models, self._optimizers, self._gradient_dtype = models, optimizers, gradient_dtype
        self._device, self._limit = device, limit
        on_cuda = device.type == "cuda"
        with untouched(models, optimizers):  # a step may draw random numbers
            awaited = sum(p.numel() * dtype.itemsize for p, dtype in _awaited_state(optimizers))
        # Taken once: memory that one probe has freed may stay with the process, and is not the next one's. State to
        # come is added, not made: a host takes memory only when it is written to.
        self._before = (torch.cuda.memory_allocated(device) if on_cuda else resident()) + awaited
        wide = [_gradient_dtype(p, gradient_dtype).itemsize * p.numel() for p in _trained(optimizers) if p.grad is None]
        self.held = self._before + sum(wide)  # whatever the size

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
            company += _empty_gradients(self._optimizers, self._gradient_dtype)
            company += [torch.empty_like(p, dtype=dtype) for p, dtype in _awaited_state(self._optimizers)]
        gc.collect()  # what lies in reference cycles is nobody's, and would be measured
        peak = self._peak(run)
        # Timed apart: the first time of a shape is slow, and so is a CPU whose tensors are counted.
        seconds = self._seconds(run)
        for _ in range(_REPEATS if seconds < _SHORT else 0):
            seconds = min(seconds, self._seconds(run))
        del company
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
        peak: int = torch.cuda.max_memory_reserved(self._device)
        return peak

    def _seconds(self, run: Callable[[], object]) -> float:
        started = time.perf_counter()
        run()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - started


def _trained(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    every = [p for o in optimizers for group in o.param_groups for p in group["params"] if p.requires_grad]
    return list({id(p): p for p in every}.values())


def _gradient_dtype(p: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return what the gradients of a parameter are added up in."""
    return dtype if dtype is not None and p.dtype in {torch.bfloat16, torch.float16} else p.dtype


def _empty_gradients(optimizers: Sequence[Optimizer], dtype: torch.dtype | None) -> list[Tensor]:
    """Give every parameter a gradient, as it has in every micro-batch but the first."""
    made = []
    for p in _trained(optimizers):
        made.append(torch.zeros_like(p, dtype=_gradient_dtype(p, dtype), requires_grad=False))
        if made[-1].dtype == p.dtype:
            p.grad = made[-1]
    return made


def _awaited_state(optimizers: Sequence[Optimizer]) -> Iterator[tuple[Tensor, torch.dtype]]:
    """Yield a parameter and a dtype for each tensor of state that optimizers will have after their first step.

    Small twins of them step: to be called where random generators are restored afterwards.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            waiting = [p for p in group["params"] if p.requires_grad and not optimizer.state.get(p)]
            dtypes = _state_dtypes(optimizer, group, waiting[0]) if waiting else []
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
