"""Run a function on several ranks: real processes, a real gloo group, and a limit on how long they may take."""

import os
import pickle
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LIMIT = 60.0  # seconds


class RankFailed(AssertionError):
    """A rank raised, or did not end."""


def run_on_ranks(
    number: int, work: Callable[..., Any], *arguments: Any, limit: float = LIMIT, start: str = "fork", by: str = "gloo"
) -> list[Any]:
    """Return what `work(rank, ...)` returned on each rank; an exception there is returned in its place.

    A process that will use a GPU must not be forked from one that has: `start="spawn"`.
    """
    if start == "fork":
        import_module("torch._dynamo")  # which optimizers import: half a second that each process would take
    with tempfile.TemporaryDirectory() as folder:
        context: Any = mp.get_context(start)
        processes = [
            context.Process(target=_run, args=(rank, number, folder, by, work, arguments), daemon=True)
            for rank in range(number)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(limit)
        hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
        if hanging:
            raise RankFailed(f"ranks {hanging} did not end within {limit:g} s")
        return [_result(Path(folder) / str(rank)) for rank in range(number)]


def _result(path: Path) -> Any:
    return pickle.loads(path.read_bytes()) if path.exists() else RankFailed("the process died")  # noqa: S301 - ours


def _run(  # noqa: PLR0917 - what a process is started with
    rank: int, number: int, folder: str, by: str, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # Many tests train a model on each rank alone as well, to compare with.
    warnings.filterwarnings("ignore", message="this process is one of")
    dist.init_process_group(
        by,
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=number,
        timeout=timedelta(seconds=20),
    )
    try:
        found = work(rank, *arguments)
    except Exception as error:  # noqa: BLE001 - told to whoever asked
        error.__dict__["seen"] = traceback.format_exc()  # travels with it
        found = error
    try:
        data = pickle.dumps(found)
    except Exception:  # noqa: BLE001 - an exception that cannot be sent as it is
        data = pickle.dumps(RankFailed(repr(found)))
    (Path(folder) / str(rank)).write_bytes(data)
    if isinstance(found, Exception):
        os._exit(1)  # as a process that ends by an error: its peers lose their connection
    dist.barrier()
    dist.destroy_process_group()
