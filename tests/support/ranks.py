"""Run functions on several ranks: real processes that stay alive between tests, a new gloo group for each function.

A process that fails while others still work is ended, as a user's would be: its peers lose their connection. Then, or
when a process died or hangs, the next function gets new processes.
"""

import functools
import gc
import inspect
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LIMIT = 60.0  # seconds
_PATIENCE = 0.3  # seconds until a rank that has failed is ended, while others work
_READY = "ready"
_pools: dict[int, "_Pool"] = {}


class RankFailed(AssertionError):
    """A rank raised, or did not end."""


def run_on_ranks(
    number: int,
    work: Callable[..., Any],
    *arguments: Any,
    limit: float = LIMIT,
    patience: float = 20.0,
    start: str = "fork",
    by: str = "gloo",
) -> list[Any]:
    """Return what `work(rank, ...)` returned on each rank; an exception there is returned in its place.

    A collective gives up a rank that does not answer for `patience`, in seconds. A process that will use a GPU must not
    be forked from one that has: `start="spawn"`.
    """
    pool = _pools.pop(number, None) if start == "fork" else None
    if pool is None or not pool.is_ready():
        pool = _Pool(number, start, by)
    found = pool.run(work, arguments, limit, patience)
    if start == "fork" and pool.is_whole:
        _pools[number] = pool
    else:
        pool.end()
    return found


def exactly(number: int, work: Callable[..., Any], *arguments: Any, **named: Any) -> list[Any]:
    """Return what all ranks returned; raise where one has failed: its own error, before those who lost a connection."""
    found = run_on_ranks(number, work, *arguments, **named)
    errors = [each for each in found if isinstance(each, BaseException)]
    for error in sorted(errors, key=lambda each: "peer" in str(each) or "another rank" in str(each)):
        raise error
    return found


def on_ranks(number: int | None = None, **named: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Have a test run on each of so many ranks, or of its argument `ranks`; its first argument is the rank."""

    def decorated(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*arguments: Any, **given: Any) -> None:
            exactly(number or given["ranks"], _inside, run, arguments, given, **named)

        whole = inspect.signature(test)
        vars(run)["__signature__"] = whole.replace(parameters=list(whole.parameters.values())[1:])
        return run

    return decorated


def _inside(rank: int, run: Any, arguments: Sequence[Any], given: dict[str, Any]) -> None:
    run.__wrapped__(rank, *arguments, **given)  # by the name of what wraps it, which can be sent


class _Pool:
    """Processes that wait for work."""

    def __init__(self, number: int, start: str, by: str) -> None:
        if start == "fork":  # what each process would import by itself
            for name in ("torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict"):
                import_module(name)
            torch.optim.SGD([torch.zeros(1)], lr=1.0)  # the first optimizer imports torch's compiler
        context: Any = mp.get_context(start)
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(number):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, number, by), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)
        self.is_whole = True

    def run(self, work: Callable[..., Any], arguments: Sequence[Any], limit: float, patience: float) -> list[Any]:
        """Return what each rank came to."""
        found: dict[int, Any] = {}
        with tempfile.TemporaryDirectory() as folder:
            for pipe in self._pipes:
                pipe.send((work, arguments, folder, patience))
            end, failed_at = monotonic() + limit, None
            while len(found) < len(self._pipes):
                waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in found}
                ready: list[Any] = wait(list(waiting), 0.05)
                for pipe in ready:
                    found[waiting[pipe]] = self._received(pipe)
                failed = [rank for rank, each in found.items() if isinstance(each, Exception)]
                failed_at = failed_at or (monotonic() if failed else None)
                if len(found) < len(self._pipes) and failed_at and monotonic() > failed_at + _PATIENCE:
                    for rank in failed:
                        self._processes[rank].kill()
                        self.is_whole = False
                if monotonic() > end:
                    self.end()
                    raise RankFailed(f"ranks {sorted(waiting.values())} did not end within {limit:g} s")
        return [found[rank] for rank in range(len(found))]

    def is_ready(self) -> bool:
        """Whether all have left their last group: a thread of gloo may abort a process then (see test_examples.py)."""
        found = [self._received(pipe) if pipe.poll(5.0) else None for pipe in self._pipes]
        if found != [_READY] * len(found):
            self.end()
        return self.is_whole

    def _received(self, pipe: Connection) -> Any:
        try:
            return pipe.recv()
        except (EOFError, OSError):
            self.is_whole = False
            return RankFailed("the process died")

    def end(self) -> None:
        """End all processes."""
        self.is_whole = False
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def _serve(pipe: Connection, rank: int, number: int, by: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    gc.freeze()  # what was there before is not looked through again
    while True:
        try:
            work, arguments, folder, patience = pipe.recv()
        except EOFError:
            os._exit(0)
        with warnings.catch_warnings():
            # Many tests train a model on each rank alone as well, to compare with.
            warnings.filterwarnings("ignore", message="this process is one of")
            dist.init_process_group(
                by,
                init_method=f"file://{Path(folder) / 'meeting'}",
                rank=rank,
                world_size=number,
                timeout=timedelta(seconds=patience),
            )
            try:
                found = work(rank, *arguments)
                dist.barrier()
            except Exception as error:  # noqa: BLE001 - told to whoever asked
                error.__dict__["seen"] = traceback.format_exc()  # travels with it
                found = error
        try:
            data = ForkingPickler.dumps(found)
        except Exception:  # noqa: BLE001 - an exception that cannot be sent as it is
            data = ForkingPickler.dumps(RankFailed(repr(found)))
        pipe.send_bytes(data)
        del found, work, arguments
        gc.collect()
        dist.destroy_process_group()
        pipe.send(_READY)
