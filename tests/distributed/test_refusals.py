"""Programs of several ranks that would part, or add up unlike things: all ranks get the same error, and none steps."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel as Ddp
from torch.nn.parallel.distributed import _MixedPrecision

from bigbatch import BigStep, Options, counted, errors, verify
from bigbatch.window.tally import Ledger
from tests.support import rank_loops as loops
from tests.support.messages import approve
from tests.support.rank_loops import heard, made, mean, micro_batch, model, sgd, shards, train, two_counts, two_heads
from tests.support.ranks import exactly

pytestmark = pytest.mark.ranks

CASES: dict[str, Callable[[int], Any]] = {}
WORLD: Any = lambda: {"group": dist.group.WORLD}  # noqa: E731


def refused(name: str) -> Callable[[Callable[[int], Any]], None]:
    """Put a program of one rank into the table."""
    return partial(CASES.__setitem__, name)


def after(network: Any, change: Callable[[Any], object]) -> Any:
    """Return a model after a change."""
    change(network)
    return network


def alone(rank: int) -> Any:
    """Return a group of this process."""
    return dist.new_group([rank], use_local_synchronization=True)


def step(rank: int, network: nn.Module, size: Any = 2, **options: Any) -> Any:
    """Make one big step."""
    return BigStep(network, sgd(network), mean, micro_batch_size=size, options=Options(**options))(micro_batch(4, rank))


# What ranks must have in common.


@refused("freezing others later")
def _(rank: int) -> None:
    network = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)).double()
    accumulator = made(network, steps=1, **WORLD())
    for number in range(3):
        network[2 * rank].requires_grad_(number < 2)
        accumulator.backward(mean(network, micro_batch(4, number)))


@refused("another order")
def _(rank: int) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)).double()
    found = list(network.parameters())
    train(rank, network, optimizer=torch.optim.SGD(found[2:] + found[:2] if rank else found, lr=0.1), **WORLD())


def of_other_seeds(rank: int, *, frozen: bool) -> None:
    """Begin with other weights, without a wrapper that would send them; perhaps of a frozen layer alone."""
    network = model()
    torch.manual_seed(rank)
    network[0] = nn.Linear(5, 8).double().requires_grad_(not frozen)
    train(rank, network, optimizer=sgd(network[2] if frozen else network), **WORLD())


@refused("other rates later")
def _(rank: int) -> None:
    network = Ddp(model())
    optimizer = torch.optim.AdamW(network.parameters(), lr=torch.tensor(0.1))
    accumulator = made(network, optimizer, steps=1)
    for _ in range(2):
        accumulator.backward(mean(network, micro_batch(4, rank)))
        optimizer.param_groups[0]["lr"] *= 1 + rank


@refused("break")
def _(rank: int) -> None:
    network = model()
    accumulator = made(network, steps=1, **WORLD())
    for epoch in range(2):
        for number in accumulator.over(range(3)):
            accumulator.backward(mean(network, micro_batch(3, number)))
            if (rank, epoch, number) == (1, 0, 0):
                break


@refused("an accumulator that others have not")
def _(rank: int) -> None:
    network = Ddp(model())
    if rank == 0:  # refused on one rank alone, which does not count; what is made there does
        assert "must be" in heard(lambda: step(rank, network, 0))
        assert "must be" in heard(lambda: made(network, batch_norm="other"))
    step(rank, network)
    more = [made(network, steps=7)] if rank == 0 else []
    made(network, steps=1).backward(mean(network, micro_batch(3, rank)))
    assert more


def nearly_in_ratio(net: Any, batch: loops.Batch, rank: int) -> Tensor:
    """Have two counts in nearly the same ratio on both ranks."""
    out = net(batch[0])
    return counted(out.pow(2).mean(), 50_000 - rank) + counted(out.abs().mean(), 100_000 - rank)


def with_once(loss: Any, network: nn.Module, batch: loops.Batch) -> Tensor:
    """Add a term of parameters alone."""
    penalty = torch.stack([p.pow(2).sum() for p in network.parameters()]).sum()
    found: Tensor = loss(network, batch) + 0.01 * counted(penalty, "once")
    return found


def loaded(network: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that goes on from a checkpoint."""
    found = sgd(network)
    moments = {0: {"momentum_buffer": torch.ones_like(next(network.parameters()))}}
    found.load_state_dict({"state": moments, "param_groups": found.state_dict()["param_groups"]})
    return found


UNLIKE: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "clip_norm": lambda _: {"clip_norm": 2.0},
    "skip_nonfinite": lambda _: {"skip_nonfinite": True},
    "gradient_dtype": lambda _: {"gradient_dtype": None},
    "scheduler": lambda net: {"optimizer": (o := sgd(net)), "scheduler": torch.optim.lr_scheduler.StepLR(o, 1)},
    "lr": lambda network: {"optimizer": sgd(network, lr=0.2)},
    "weight_decay": lambda network: {"optimizer": sgd(network, weight_decay=0.5)},
    "scaler": lambda _: {"scaler": torch.amp.GradScaler("cpu")},
    "state": lambda network: {"optimizer": loaded(network)},
    "optimizer": lambda net: {"optimizer": torch.optim.Adagrad(net.parameters(), lr=0.1)},
}


def unlike(rank: int, name: str) -> None:
    """Give one rank another setting."""
    network = Ddp(model())
    train(rank, network, **(UNLIKE[name](network) if rank else {}))


def ddp(loss: Callable[[int], Any], *given: Any, **named: Any) -> Callable[[int], None]:
    """Return a program that trains in DDP, with a loss that depends on the rank."""
    return lambda rank: train(rank, Ddp(model()), loss(rank), *given, **named)


CASES |= {
    "other seeds": partial(of_other_seeds, frozen=False),
    "other frozen weights": partial(of_other_seeds, frozen=True),
    "mean or sum": ddp(lambda rank: mean if rank else loops.summed),
    "zero on one rank": ddp(lambda rank: lambda *each: mean(*each) * (1 - rank)),
    "other factors": ddp(lambda rank: lambda *each: mean(*each) * (2 + rank)),
    "other terms": ddp(lambda rank: lambda net, b: (F.l1_loss if rank else F.mse_loss)(net(b[0]), b[0][:, :4])),
    "other ratios": ddp(lambda rank: partial(nearly_in_ratio, rank=rank), steps=1),
    "other numbers of counts": lambda rank: train(
        rank, Ddp(model()), two_counts, counts=lambda batch: loops.counts(batch)[: 2 - rank]
    ),
    "a share of two counts is missing": ddp(
        lambda _: partial(with_once, two_counts), [[3, 5], []], counts=loops.counts
    ),
    "a share of a sum is missing": ddp(
        lambda _: partial(with_once, lambda *each: counted(loops.summed(*each), "sum")), [[3, 5], []]
    ),
    **{f"unlike {name}": partial(unlike, name=name) for name in UNLIKE},
    "unlike settings of a big step": lambda rank: step(rank, Ddp(model()), skip_nonfinite=bool(rank)),
}

# DDP's own reduction, in the last backward.


def reducing(
    rank: int, network: Any, loss: Any = mean, sizes: Any = loops.SIZES, parameters: Any = None, **given: Any
) -> None:
    """Train with overlap=True."""
    optimizer = torch.optim.SGD(parameters or [*network.parameters()], lr=0.1)
    train(rank, network, loss, sizes, optimizer=optimizer, overlap=True, **given)


@refused("used first alone")
def _(rank: int) -> None:
    plain, turns = two_heads(), iter((0, 1))
    plain.unused.requires_grad_(False)
    reducing(rank, Ddp(plain), lambda net, b: F.cross_entropy(net(b[0], next(turns)), b[1]), [[3, 5], [6, 1]])


@refused("a parameter beside")
def _(rank: int) -> None:
    network, scale = Ddp(model()), nn.Parameter(torch.ones((), dtype=torch.float64))
    reducing(rank, network, lambda net, batch: mean(net, batch) * scale, parameters=[*network.parameters(), scale])


CASES |= {
    "unfrozen since": lambda rank: reducing(
        rank, Ddp(after(model(), lambda net: net[0].requires_grad_(False))).requires_grad_(True)
    ),
    "past the wrapper": lambda rank: reducing(rank, Ddp(model()), lambda net, batch: mean(net.module, batch)),
    "find_unused_parameters": lambda rank: reducing(rank, Ddp(model(), find_unused_parameters=True)),
    "no wrapper": lambda rank: reducing(rank, model(), **WORLD()),
    "some parameters": lambda rank: reducing(rank, n := Ddp(model()), parameters=[next(n.parameters())]),
    "some shards": lambda rank: reducing(rank, n := shards(model()), parameters=[next(n.parameters())]),
    "bf16 parameters": lambda rank: reducing(rank, Ddp(model().bfloat16())),
    "a low loss": lambda rank: reducing(
        rank, Ddp(model().float()), lambda net, b: mean(net, (b[0].float(), b[1])).bfloat16()
    ),
    "another number of windows": lambda rank: reducing(rank, Ddp(model()), sizes=[[3, 5, 2], [6, 1]]),
    "no batch": lambda rank: reducing(rank, Ddp(model()), sizes=[[3, 5, 2], []]),
}

# Sharded models.


def through_heads(rank: int, path: Any, shape: Any = None, **named: Any) -> None:
    """Make an update of two micro-batches, each through one head."""
    network = shards(two_heads(), (), shape)
    accumulator = made(network, **named)
    for head, (x, y) in zip(path[rank], loops.batches_of(rank, loops.SIZES * 2), strict=False):
        accumulator.backward(F.cross_entropy(network(x, head), y))


@refused("dropped on one")
def _(rank: int) -> None:
    network = shards(model())
    accumulator = made(network, steps=4)
    for number, batch in enumerate(loops.batches_of(rank, loops.SIZES)):
        accumulator.backward(mean(network, batch))
        if number == 0 and rank:
            accumulator.discard()
    accumulator.flush()


@refused("flush before the last backward")
def _(rank: int) -> None:
    network = loops.parts_of(model())
    accumulator = made(network, overlap=True)
    accumulator.backward(mean(network, micro_batch(3, rank)))
    assert all(p.grad is None for p in network.parameters())
    accumulator.flush()


def sharded_later(rank: int, *, big: bool) -> None:
    """Make an object first, and shard its model then."""
    network = model()
    there: Any = BigStep(network, sgd(network), mean, micro_batch_size=2) if big else made(network)
    shards(network)
    there(micro_batch(4, rank)) if big else there.backward(mean(network, micro_batch(4, rank)))


def beside_shards(rank: int, *, bare: bool) -> None:
    """Use a parameter that is not sharded, or one that is, outside of the model's forward."""
    network: Any = shards(model())
    scale = nn.Parameter(torch.ones((), dtype=torch.float64))
    accumulator = made(network, torch.optim.SGD([*network.parameters(), *[scale] * bare], lr=0.1, foreach=False))
    penalty = torch.stack([p.full_tensor().pow(2).sum() for p in network.parameters()]).sum()
    loss = mean(network, micro_batch(3, rank))
    accumulator.backward(loss * scale if bare else loss + 0.1 * counted(penalty, "once"))


@refused("0 / 0")
def _(rank: int) -> None:
    network = shards(model())
    accumulator = made(network)
    x, _ = micro_batch(3, rank)
    accumulator.backward(network(x).pow(2).mean() * (float("nan") if rank else 1.0), count=torch.tensor(3.0))
    window: Any = accumulator._window
    window.ledger.nothings = torch.tensor(float(rank))  # as a device would find it
    accumulator.backward(network(x).pow(2).mean(), count=torch.tensor(3.0))


CASES |= {
    "each rank its own head": lambda rank: through_heads(rank, [[0, 0], [1, 1]]),
    "each rank its own head, overlap": lambda rank: through_heads(rank, [[0, 0], [1, 1]], overlap=True),
    "heads in turn": lambda rank: through_heads(rank, [[0, 1], [1, 0]]),
    "all-reduce hook": lambda rank: train(
        rank, after(shards(model()), lambda net: net.set_all_reduce_hook(lambda gradient: gradient.mul_(2.0)))
    ),
    "partly sharded": lambda _: made(nn.Sequential(shards(nn.Linear(5, 4)), nn.Linear(4, 4))),
    "other steps": lambda rank: train(rank, shards(model()), steps=2 + rank),
}

# DDP, hooks and other wrappers.


class DeepSpeedEngine(nn.Sequential):
    """What a model is in after deepspeed.initialize(), by its name."""


@refused("sparse gradients")
def _(_: int) -> None:
    torch.manual_seed(0)
    network = Ddp(nn.EmbeddingBag(5, 4, sparse=True))
    made(network, steps=1).backward(mean(network, (torch.randint(5, (4, 2)), torch.randint(4, (4,)))))


@refused("reducing again")
def _(rank: int) -> None:
    network = Ddp(model())
    with network.no_sync():  # which sets DDP's flag when it ends
        accumulator = made(network)
    accumulator.backward(mean(network, micro_batch(4, rank)))


def in_mid_window(rank: int, *, saves: bool) -> None:
    """Save where a window is open, or load one that a process alone has left open."""
    network = Ddp(model()) if saves else model()
    accumulator = made(network, **({} if saves else {"group": alone(rank)}))
    accumulator.backward(mean(network, micro_batch(4, 7)))
    state = accumulator.state_dict()
    accumulator.discard()
    made(shards(model())).load_state_dict(state)


CASES |= {
    "FSDP1": lambda _: made(nn.Sequential(FullyShardedDataParallel(model(), device_id=torch.device("cpu")))),
    "DeepSpeed": lambda _: made(DeepSpeedEngine(model())),
    "DataParallel": lambda rank: step(rank, nn.DataParallel(model())),
    "mixed precision": lambda _: made(Ddp(model(), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))),
    "hook": lambda rank: train(rank, after(Ddp(model()), lambda net: net.register_comm_hook(None, allreduce_hook))),
    "hidden DDP": lambda _: (network := Ddp(model()), made(network.module)),
    "two groups": lambda rank: made(nn.ModuleList([Ddp(model()), Ddp(model(), process_group=alone(rank))])),
    "no group": lambda _: made(Ddp(model()), group=[0, 1]),
}
OTHERS: dict[str, Callable[[int], Any]] = {  # whose texts belong to other parts of the library
    "loops inside out": lambda _: made(shards(model())).over(made(Ddp(model())).over([])),
    "sharded later": partial(sharded_later, big=False),
    "sharded later, big step": partial(sharded_later, big=True),
    "a bare parameter": partial(beside_shards, bare=True),
    "a penalty of shards": partial(beside_shards, bare=False),
    "no batch for shards": lambda rank: train(rank, shards(model()), sizes=[[3, 5], []]),
    "uneven counts in advance": lambda rank: train(
        rank, shards(model()), two_counts, [[3, 5, 2], [6]], counts=loops.counts
    ),
    "sizes for shards": lambda rank: step(rank, shards(model()), "auto"),
    "packing for shards": lambda rank: step(rank, shards(model()), lengths=len),
    "graphs for shards": lambda rank: step(rank, shards(model()), cuda_graph=True),
    "verify shards": lambda rank: verify(shards(model()), mean, micro_batch(4, rank), 2),
    "saved in mid-window": partial(in_mid_window, saves=True),
    "an open window of one process": partial(in_mid_window, saves=False),
    "verify DDP": lambda rank: verify(Ddp(model()), mean, micro_batch(4, rank), 2),
}
OWN_WORDS = {"no batch for shards", "uneven counts in advance", "two groups"}  # which say what is so on the rank itself


def told(rank: int, names: list[str]) -> list[str]:
    """Return what each raises; a step that was made all the same is none."""
    return [heard({**CASES, **OTHERS}[name], rank) for name in names]


def refused_alike(names: list[str]) -> list[str]:
    """Return what all ranks say, each the same."""
    one, other = exactly(2, told, names)
    for name, mine, theirs in zip(names, one, other, strict=True):
        assert mine == theirs or (mine and name in OWN_WORDS), name
        assert mine.partition(": ")[0] in vars(errors), name
    return list(one)


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_refuse(name: str) -> None:
    """With the same error."""
    approve("distributed", name, *refused_alike([name]))


def test_all_ranks_refuse_what_other_parts_do() -> None:
    """One after the other."""
    refused_alike(list(OTHERS))


def apart(rank: int, heads: list[int]) -> str:
    """Have each rank of two replicas of two shards run a head."""
    return heard(lambda: through_heads(rank, [[head] for head in heads], (2, 2), steps=1))


def test_replicas_are_apart_and_their_ranks_are_not() -> None:
    """Replicas may reach other parameters, ranks of one may not."""
    assert exactly(4, apart, [0, 0, 1, 1]) == [""] * 4
    for each in exactly(4, apart, [0, 1, 0, 1]):
        assert "have reached different parameters" in each


def test_a_count_that_a_device_finds_to_be_nothing() -> None:
    """It is noted beside the totals."""
    ledger = Ledger(steps=2)
    ledger.in_common = True
    ledger.pending = [(torch.tensor(float("nan")), torch.tensor(0.0)), (torch.tensor(2.0), torch.tensor(3.0))]
    ledger.fold()
    assert (float(ledger.nothings), float(ledger.loss)) == (1.0, 6.0)
