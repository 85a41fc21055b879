"""Models whose parameters are in parts over ranks: those of `fully_shard` are trained, all others refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from bigbatch import Accumulator, BigStep, Options, Setup, plan
from bigbatch.errors import BigBatchError, ConfigurationError
from tests.support.rank_shards import model
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.ranks


def spread(mesh: DeviceMesh) -> nn.Module:
    """Put a model in parts over "tp"."""
    return parallelize_module(model(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})


def half(mesh: DeviceMesh) -> nn.Module:
    """Put a frozen layer alone in parts."""
    network = parallelize_module(model(), mesh["tp"], {"0": ColwiseParallel()})
    network.get_submodule("0").requires_grad_(False)
    return network


def accumulator(network: nn.Module, **named: Any) -> Accumulator:
    """Make one for any model."""
    return Accumulator(network, torch.optim.SGD(network.parameters(), lr=0.1), steps=1, **named)


def big_step(network: nn.Module) -> BigStep:
    """Make one for any model."""
    return BigStep(network, torch.optim.SGD(network.parameters(), lr=0.1), micro_batch_size=1)


def setup(network: nn.Module) -> Setup:
    """Make one for any model."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    return Setup(model=network, optimizer=optimizer, data=[torch.zeros(5)], batch_size=1)


def shard(network: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Return a model after it was sharded."""
    fully_shard(network, mesh=mesh)
    return network


def sharded_twice(mesh: DeviceMesh) -> nn.Module:
    """Shard a layer over other ranks than the rest."""
    network = model()
    shard(network[0], mesh["tp"])
    return shard(network, mesh["dp"])


IN_PARTS = "tensor parallelism"
CASES: dict[str, tuple[Callable[[DeviceMesh], object], str]] = {
    "alone": (lambda mesh: accumulator(spread(mesh)), IN_PARTS),
    "a group": (lambda mesh: accumulator(spread(mesh), group=mesh["dp"].get_group()), IN_PARTS),
    "big step": (lambda mesh: big_step(spread(mesh)), IN_PARTS),
    "and shards": (lambda mesh: accumulator(shard(spread(mesh), mesh["dp"])), IN_PARTS),
    "beside shards": (lambda mesh: accumulator(nn.ModuleList([half(mesh), shard(model(), mesh["dp"])])), IN_PARTS),
    "frozen": (lambda mesh: accumulator(half(mesh)), "0.weight is in parts over ranks"),
    "replicated": (lambda mesh: accumulator(distribute_module(model(), mesh)), IN_PARTS),
    "in DDP": (
        lambda mesh: accumulator(nn.parallel.DistributedDataParallel(spread(mesh), device_mesh=mesh["dp"])),
        IN_PARTS,
    ),
    "setup": (lambda mesh: setup(spread(mesh)), IN_PARTS),
    "plan": (lambda mesh: plan(spread(mesh), lambda m, b: m(b).sum(), torch.zeros(4, 5)), IN_PARTS),
    "shards of two meshes": (lambda mesh: accumulator(sharded_twice(mesh)), "a model is sharded over one mesh"),
    "shards and another group": (
        lambda mesh: accumulator(shard(model(), mesh["dp"]), group=mesh["tp"].get_group()),
        "the model without group=",
    ),
    "one replica of shards": (lambda mesh: accumulator(shard(model(), mesh["one", "dp"])), ""),
}


def refused(_: int) -> dict[str, Any]:
    """Try all of them, one after the other."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("one", "dp", "tp"))
    found: dict[str, Any] = {}
    for name, (make, _words) in CASES.items():
        try:
            found[name] = repr(make(mesh))
        except BigBatchError as error:  # noqa: PERF203 - what is looked for
            found[name] = error
    return found


def test_parts_of_other_kinds_are_refused() -> None:
    """When it is made, with what to type; a mesh with a dimension of one rank is none of them."""
    for found in run_on_ranks(4, refused):
        for name, (_, words) in CASES.items():
            assert isinstance(found[name], ConfigurationError if words else str), (name, found[name])
            assert words in str(found[name]), (name, found[name])


@pytest.mark.parametrize("make", [lambda: accumulator(model(), mesh="dp"), lambda: Options(mesh="dp")])  # type: ignore[arg-type]
def test_a_mesh_is_no_longer_taken(make: Callable[[], object]) -> None:
    """The error names what takes its place."""
    with pytest.raises(ConfigurationError, match=r"group=mesh\.get_group\(\)"):
        make()


def two_groups(rank: int) -> Any:
    """Have some ranks train a model of their own beside that of all."""
    pair = dist.new_group([0, 1])
    mine, ours = nn.Linear(2, 1), nn.Linear(2, 1)
    for each in (mine, ours):
        nn.init.ones_(each.weight)
        nn.init.ones_(each.bias)
    if rank < 2:
        accumulator(mine, group=pair).backward(mine(torch.ones(rank + 1, 2)).mean())
    update = accumulator(ours, group=dist.group.WORLD).backward(ours(torch.ones(rank + 1, 2)).mean())
    return None if update is None else float(update.count)  # type: ignore[arg-type]


def test_ranks_may_have_accumulators_that_others_have_no_part_in() -> None:
    """What closes is told apart by group."""
    assert run_on_ranks(3, two_groups) == [6.0] * 3
