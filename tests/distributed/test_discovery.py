"""Who trains together: by wrappers, by `group=`, or nobody, which is told; models in other parts are refused."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as Ddp

from bigbatch import Accumulator, BigStep, Options, Setup, plan, verify
from bigbatch.errors import ConfigurationError
from tests.support.rank_loops import heard, made, mean, micro_batch, model, sgd, two_heads
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.ranks


def step(network: nn.Module, **options: Any) -> BigStep:
    """Return an object that trains a model."""
    return BigStep(network, sgd(network), mean, micro_batch_size=2, options=Options(**options))


# Models in parts.


def spread(mesh: DeviceMesh) -> nn.Module:
    """Put a model in parts over "tp"."""
    return parallelize_module(model(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})


def half(mesh: DeviceMesh) -> nn.Module:
    """Put a frozen layer alone in parts."""
    network = parallelize_module(model(), mesh["tp"], {"0": ColwiseParallel()})
    network.get_submodule("0").requires_grad_(False)
    return network


def shard(network: nn.Module, mesh: DeviceMesh, first: DeviceMesh | None = None) -> nn.Module:
    """Return a model after it was sharded, perhaps a layer of it over other ranks than the rest."""
    if first is not None:
        fully_shard(network.get_submodule("0"), mesh=first)
    fully_shard(network, mesh=mesh)
    return network


def in_pairs(_: DeviceMesh) -> Any:
    """Wrap the model for all ranks, and have two of them train together."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return made(Ddp(model()), group=pairs[dist.get_rank() // 2])


IN_PARTS, GROUPS = "is in parts over ranks by tensor parallelism", "name different processes"
PARTS: dict[str, tuple[Callable[[DeviceMesh], object], str]] = {
    "alone": (lambda mesh: made(spread(mesh)), IN_PARTS),
    "and shards": (lambda mesh: made(shard(spread(mesh), mesh["dp"])), IN_PARTS),
    "beside shards": (lambda mesh: made(nn.ModuleList([half(mesh), shard(model(), mesh["dp"])])), IN_PARTS),
    "frozen": (lambda mesh: made(half(mesh)), f"0.weight {IN_PARTS}"),
    "in DDP": (lambda mesh: made(Ddp(spread(mesh), device_mesh=mesh["dp"])), IN_PARTS),
    "setup": (lambda mesh: Setup(model=(n := spread(mesh)), optimizer=sgd(n), data=[0], batch_size=1), IN_PARTS),
    "plan": (lambda mesh: plan(spread(mesh), lambda m, b: m(b).sum(), torch.zeros(4, 5)), IN_PARTS),
    "shards of two meshes": (lambda mesh: made(shard(model(), mesh["dp"], mesh["tp"])), "sharded over one mesh"),
    "shards and another group": (lambda mesh: made(shard(model(), mesh["dp"]), group=mesh["tp"].get_group()), GROUPS),
    "over one rank": (lambda mesh: made(parallelize_module(model(), mesh["one"], {"0": ColwiseParallel()})), ""),
    "shards and their group": (lambda mesh: made(shard(model(), mesh["dp"]), group=mesh["dp"].get_group()), ""),
    "a wrapper and another group": (in_pairs, GROUPS),
    "one replica of shards": (lambda mesh: made(shard(model(), mesh["one", "dp"])), ""),
}


@on_ranks(4)
def test_parts_and_groups_of_other_kinds_are_refused(rank: int) -> None:
    """When it is made; a mesh with a dimension of one rank is none of them."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("one", "dp", "tp"))
    for name, (make, words) in PARTS.items():
        found = heard(make, mesh)
        assert found.partition(": ")[0] == ("ConfigurationError" if words else ""), (rank, name, found)
        assert words in found, (name, found)


@pytest.mark.parametrize(
    ("named", "words"), [({"mesh": "dp"}, r"group=mesh\.get_group\(\)"), ({"group": object()}, "init_process_group")]
)
@pytest.mark.parametrize("make", [made, step])
def test_what_names_no_ranks_is_refused(make: Callable[..., Any], named: dict[str, Any], words: str) -> None:
    """The error says what to write instead of a mesh, and what to call before there are groups."""
    with pytest.raises(ConfigurationError, match=words):
        make(model(), **named)


# Groups.


@on_ranks(3)
def test_a_group_is_for_its_members(rank: int) -> None:
    """Two of three ranks train one model, which the third is told, and all another; what closes is told by group."""
    pair = dist.new_group([0, 2])
    mine, ours = (nn.Linear(2, 1) for _ in range(2))
    for p in (*mine.parameters(), *ours.parameters()):
        nn.init.ones_(p)
    said = heard(lambda: made(mine, steps=1, group=pair).backward(mine(torch.ones(rank + 1, 2)).mean()))
    assert said.partition(".")[0] == ("ConfigurationError: group must be a torch" if rank == 1 else "")
    update: Any = made(ours, steps=1, group=dist.group.WORLD).backward(ours(torch.ones(rank + 1, 2)).mean())
    assert float(update.count) == 6.0


# Who trains alone among others.


def said(work: Callable[[], object]) -> list[str]:
    """Return the warnings that something gives."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        work()
    return [f"{Path(each.filename).name}: {each.message}" for each in found if each.category is UserWarning]


@on_ranks(2)
def test_a_process_among_others_that_would_train_alone_is_told(rank: int) -> None:
    """It says what to type, and nothing where somebody has said who trains together, or one is only looked at."""
    alone: Any = dist.new_group([rank], use_local_synchronization=True)
    for way in (lambda: Accumulator(network := model(), sgd(network), steps=1), lambda: step(model())):
        (told,) = said(way)
        assert told.startswith("test_discovery.py: this process is one of 2, and nothing says")
        assert "group=torch.distributed.group.WORLD" in told
    ways: list[Callable[[], Any]] = [
        lambda: made(model(), group=dist.group.WORLD),
        lambda: made(model(), group=alone),
        lambda: made(Ddp(model())),
        lambda: made(Ddp(model(), process_group=alone)),
        lambda: verify(model(), mean, micro_batch(8, 1), micro_batch_size=4),
    ]
    assert [said(way) for way in ways] == [[]] * 5


def test_a_launched_process_without_a_group_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun starts it, and nobody called init_process_group; one process alone hears nothing."""
    assert said(lambda: made(model(), overlap=True)) == []
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert said(lambda: step(model())) == []
    monkeypatch.setenv("WORLD_SIZE", "4")
    (told,) = said(lambda: step(model()))
    assert "this process is one of 4" in told
    assert "Use: torch.distributed.init_process_group(), then" in told


DIVISORS = {(3, 2): True, (3, 3): True, (3, 6): True, (3, 7): False}  # of a loss: steps, and whether that is told


@on_ranks(2)
def test_a_loss_divided_by_the_number_of_ranks_is_told(rank: int) -> None:
    """Or by steps, or by both; and by nothing else."""
    for (steps, divisor), wrong in DIVISORS.items():
        network = Ddp(model())
        accumulator = made(network, steps=steps)
        told = "".join(said(lambda: accumulator.backward(mean(network, micro_batch(5, rank)) / divisor)))  # noqa: B023
        accumulator.discard()
        assert f"divided by steps or the number of ranks ({divisor}) already" in told or not wrong
        assert bool(told) == wrong


@on_ranks(1)
def test_ddp_of_one_process_is_kept_quiet_too(rank: int) -> None:
    """What goes on two ranks goes on one: DDP would refuse float32 sums, and parameters without a gradient."""
    found = []
    for wrapped in (True, False):
        plain = two_heads().bfloat16()
        network: Any = Ddp(plain) if wrapped else plain
        accumulator = made(network)
        for number in range(4):
            x, y = micro_batch(4, 10 * rank + number)
            accumulator.backward(nn.functional.cross_entropy(network(x.bfloat16(), number % 2).float(), y))
        found.append([p.tolist() for p in plain.parameters()])
    assert found[0] == found[1]
