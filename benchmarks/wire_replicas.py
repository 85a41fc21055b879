"""What replicas of shards (HSDP) send per update, by the number of micro-batches in it: two replicas of two shards.

python -m benchmarks.wire_replicas [--steps 1 8 64] [--json] [--out FOLDER]
"""

import argparse
import math
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn
from torch.profiler import ProfilerActivity, profile

from benchmarks.machine import this_machine
from benchmarks.report import RESULTS, Grid, Report
from benchmarks.wire_counting import _BYTES as BYTES
from benchmarks.wire_loops import RATE, Batch, Train, loss_of, micro_batches, plain_model
from bigbatch import Accumulator, BigStep

REPLICAS, SHARDS, STEPS = 2, 2, [1, 8, 64]
NOTES = [
    (
        "Two replicas of two shards, four processes on gloo. Bytes are those of the tensors that a rank handed to each "
        "kind of collective in the third update, as torch's profiler saw them: of an all-gather the whole, of a "
        "reduce-scatter what is scattered, of an all-reduce what is reduced, the message of 320 bytes included."
    ),
    "FSDP pads each parameter to a multiple of the shards; what is added up by us is not padded.",
]


@dataclass(frozen=True)
class Sent:
    """What one update of one loop hands to one kind of collective."""

    loop: str
    steps: int
    kind: str
    times: int
    bytes: int


def sharded() -> Any:
    """Shard every layer by itself, and the whole."""
    from torch.distributed.fsdp import fully_shard

    model = plain_model()
    mesh = init_device_mesh("cpu", (REPLICAS, SHARDS), mesh_dim_names=("replicas", "shards"))
    for part in [part for part in model.modules() if isinstance(part, nn.Linear)]:
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def by_hand(*, deferred: bool) -> Callable[[int], Train]:
    """FSDP as it comes, or told to add up replicas in the last backward alone."""

    def made(steps: int) -> Train:
        model = sharded()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

        def train(batches: list[Batch]) -> None:
            for number, batch in enumerate(batches):
                if deferred:
                    model.set_requires_all_reduce(number + 1 == steps)
                (loss_of(model, batch) / steps).backward()
            optimizer.step()
            optimizer.zero_grad()

        return train

    return made


def accumulator(*, overlap: bool) -> Callable[[int], Train]:
    """Make the three lines, in either way."""

    def made(steps: int) -> Train:
        model = sharded()
        ours = Accumulator(model, torch.optim.SGD(model.parameters(), lr=RATE), steps=steps, overlap=overlap)

        def train(batches: list[Batch]) -> None:
            for batch in batches:
                ours.backward(loss_of(model, batch))

        return train

    return made


def big_step(_: int) -> Train:
    """Make the two lines."""
    model = sharded()
    size = len(micro_batches(0, 1)[0][1])
    ours = BigStep(model, torch.optim.SGD(model.parameters(), lr=RATE), loss_of, micro_batch_size=size)
    return lambda batches: ours((torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])))


LOOPS: dict[str, Callable[[int], Train]] = {
    "FSDP, as it comes": by_hand(deferred=False),
    "FSDP, set_requires_all_reduce(last)": by_hand(deferred=True),
    "bigbatch Accumulator": accumulator(overlap=False),
    "bigbatch BigStep": big_step,
    "bigbatch Accumulator, overlap=True": accumulator(overlap=True),
}


def count(steps: list[int]) -> list[Sent]:
    """Run the loops on four real processes, and count."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_on_rank, args=(steps, folder), nprocs=REPLICAS * SHARDS)
        found: list[Sent] = torch.load(Path(folder) / "found", weights_only=False)
        return found


def _on_rank(rank: int, steps: list[int], folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", KINETO_LOG_LEVEL="5")
    ranks = REPLICAS * SHARDS
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    found = [each for name, loop in LOOPS.items() for number in steps for each in _sent(name, loop, number, rank)]
    if rank == 0:
        torch.save(found, Path(folder) / "found")
    dist.barrier()
    dist.destroy_process_group()


def _sent(name: str, loop: Callable[[int], Train], steps: int, rank: int) -> list[Sent]:
    train, batches = loop(steps), micro_batches(rank, steps)
    train(batches)
    train(batches)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as seen:
        train(batches)
        dist.barrier()  # what is under way has arrived, and is written down
    times: Counter[str] = Counter()
    handed: Counter[str] = Counter()
    for event in seen.events() or []:
        sizes = [
            math.prod(s) * BYTES[t] for s, t in zip(event.input_shapes, event.input_dtypes, strict=True) if t in BYTES
        ]
        # gloo reduces for all what it then scatters.
        for kind, sign, size in {
            "c10d::_allgather_base_": [("all-gather", 1, 0)],
            "c10d::_reduce_scatter_base_": [("reduce-scatter", 1, 1), ("all-reduce", -1, 1)],
            "gloo:all_reduce": [("all-reduce", 1, 0)],
        }.get(event.name, []):
            times[kind] += sign
            handed[kind] += sign * sizes[size]
    return [Sent(name, steps, kind, times[kind], handed[kind]) for kind in sorted(times)]


def grids(found: list[Sent]) -> list[Grid]:
    """One table of each kind of collective."""
    steps = list(dict.fromkeys(each.steps for each in found))
    of = {(each.loop, each.steps, each.kind): each for each in found}
    return [
        Grid(
            f"{kind}: bytes (and times) per update, each rank",
            ("micro-batches per update:", *map(str, steps)),
            [
                (loop, *(f"{of[loop, number, kind].bytes:,} ({of[loop, number, kind].times})" for number in steps))
                for loop in dict.fromkeys(each.loop for each in found)
            ],
        )
        for kind in dict.fromkeys(each.kind for each in found)
    ]


def main() -> int:
    """Count, show, keep. Fails where ours sends more over replicas for more micro-batches."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, nargs="+", default=STEPS, help="micro-batches in an update")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the tables")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for wire_replicas.json and wire_replicas.md")
    options = parser.parse_args()
    found = count(options.steps)
    report = Report("wire_replicas", this_machine(), grids(found), NOTES, list(found))
    report.show(as_json=options.json)
    report.write(options.out)
    reduced = {(each.loop, each.bytes) for each in found if each.kind == "all-reduce" and "bigbatch" in each.loop}
    return int(len(reduced) != len({loop for loop, _ in reduced}))


if __name__ == "__main__":
    sys.exit(main())
