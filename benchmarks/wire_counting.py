"""Count what processes send each other: by asking torch's profiler, and by asking the network interface."""

import math
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.nn.utils import parameters_to_vector
from torch.profiler import ProfilerActivity, profile

from benchmarks.wire_loops import Batch, Train, all_loops, micro_batches, plain_model

WARM_UP = 2  # updates: DDP lays out its buckets anew after the first backward, BigStep checks in its first step
TRIES = 2  # of the interface's bytes, of which the fewest are kept: other traffic only adds
_BYTES = {"float": 4, "double": 8, "int": 4, "long int": 8, "unsigned char": 1, "c10::BFloat16": 2, "c10::Half": 2}
_DEVICES = Path("/proc/self/net/dev")
_SENT = 8  # the column of bytes sent
_CLOSE = 1e-5  # of float32 weights that are the same but for rounding


@dataclass(frozen=True)
class Wire:
    """What one update of one loop sends."""

    ranks: int
    loop: str
    steps: int
    collectives: int
    """Per update, on one rank: all-reduces, broadcasts and all else."""
    bytes: int
    """Handed to them, per update, on one rank."""
    loopback: int | None
    """Bytes that all ranks have really sent per update, headers included; None where nobody can tell."""


def count(ranks: int, steps: list[int], loops: list[str] | None = None) -> list[Wire]:
    """Run the loops on so many real processes, and count."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_on_rank, args=(ranks, steps, loops, folder), nprocs=ranks)
        found: list[Wire] = torch.load(Path(folder) / "found", weights_only=False)
        return found


def _on_rank(rank: int, ranks: int, steps: list[int], loops: list[str] | None, folder: str) -> None:
    torch.set_num_threads(1)
    # Accelerate looks at the environment, as torchrun makes it, also for how many threads to take.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1")
    os.environ.update(
        OMP_NUM_THREADS="1", MASTER_PORT="29500", GLOO_SOCKET_IFNAME="lo", KINETO_LOG_LEVEL="5", ACCELERATE_USE_CPU="1"
    )
    # A file to meet at, so that no store sends anything meanwhile.
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - it is no file
        # The profiler announces itself from C++; what is raised here is told by another way.
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    found = count_here(rank, steps, loops)
    if rank == 0:
        torch.save(found, Path(folder) / "found")
    dist.barrier()
    dist.destroy_process_group()


def count_here(rank: int, steps: list[int], loops: list[str] | None = None) -> list[Wire]:
    """Count as one of a group of processes that is there already."""
    return [each for number in steps for each in _of_one_window(rank, number, loops)]


def _of_one_window(rank: int, steps: int, loops: list[str] | None) -> Iterator[Wire]:
    reference: torch.Tensor | None = None
    for name, loop in all_loops().items():
        if loops is not None and name not in loops:
            continue
        model = plain_model()
        train, batches = loop(model, steps), micro_batches(rank, steps)
        for _ in range(WARM_UP):
            train(batches)
        weights = parameters_to_vector(model.parameters()).detach()
        reference = weights if reference is None else reference
        if not (weights - reference).norm() <= _CLOSE * reference.norm():
            raise RuntimeError(f"{name} trains something else than the other loops")
        messages = _messages(rank, train, batches)
        yield Wire(dist.get_world_size(), name, steps, len(messages), sum(messages), _sent(train, batches))


def _messages(rank: int, train: Train, batches: list[Batch]) -> list[int]:
    """Return the bytes of every message of an update, as the backend was handed them on the first rank."""
    if rank:
        train(batches)
        dist.barrier()
        return []
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        train(batches)
        dist.barrier()  # what is under way has arrived, and is written down
    events = [event for event in seen.events() or [] if event.name.startswith("gloo:")]
    messages = [event for event in events if event.name != "gloo:barrier"]
    return [
        sum(
            math.prod(shape) * _BYTES[dtype]
            for shape, dtype in zip(event.input_shapes, event.input_dtypes, strict=True)
        )
        for event in messages
    ]


def _sent(train: Train, batches: list[Batch]) -> int | None:
    """Return the bytes that all ranks have sent in an update."""
    if not _DEVICES.exists():
        return None
    tries = []
    for _ in range(TRIES):
        with _between_barriers() as found:
            train(batches)
        tries.append(found[1] - found[0])
    return min(tries)


@contextmanager
def _between_barriers() -> Iterator[list[int]]:
    found: list[int] = []
    dist.barrier()
    found.append(_loopback())
    dist.barrier()
    yield found
    dist.barrier()
    found.append(_loopback())


def _loopback() -> int:
    line = next(line for line in _DEVICES.read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[_SENT])


def quiet_loopback() -> bool:
    """Whether this process has a loopback interface of its own, so that nobody else's bytes are counted."""
    return socket.if_nameindex() == [(1, "lo")]
