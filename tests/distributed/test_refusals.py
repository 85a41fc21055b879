"""Programs of several ranks that would part, or add up unlike things: all ranks get the same error, and none steps."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as Ddp
from torch.nn.parallel.distributed import _MixedPrecision

from bigbatch import Accumulator, BigStep, Options, counted, errors, verify
from bigbatch.window.tally import Ledger
from tests.support.messages import approve
from tests.support.rank_loops import (
    SIZES,
    Batch,
    batches_of,
    counts,
    heard,
    mean,
    micro_batch,
    model,
    parts_of,
    shards,
    summed,
    two_counts,
    two_heads,
)
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.ranks

Program = Callable[[int], Any]
WORLD = {"group": lambda: dist.group.WORLD}


def sgd(network: nn.Module, **named: Any) -> torch.optim.Optimizer:
    """Return an optimizer."""
    return torch.optim.SGD(network.parameters(), **{"lr": 0.1, **named})


def of(network: nn.Module, optimizer: Any = None, **named: Any) -> Accumulator:
    """Return an accumulator, of windows of two."""
    return Accumulator(network, optimizer or sgd(network), **{"steps": 2, **named})


def train(rank: int, network: nn.Module, loss: Any = mean, sizes: Any = SIZES, **named: Any) -> None:
    """Train from `over`."""
    accumulator = of(network, **named)
    for batch in accumulator.over(batches_of(rank, sizes)):
        accumulator.backward(loss(network, batch))


def step(rank: int, network: nn.Module, loss: Any = mean, optimizer: Any = None, **named: Any) -> Any:
    """Make one big step; `none` has the second rank have no samples."""
    batch = None if named.pop("none", False) and rank else micro_batch(4, rank)
    options = named.pop("options", Options())
    made = BigStep(network, optimizer or sgd(network), loss, **{"micro_batch_size": 2, **named}, options=options)
    return made(batch)


def in_group(rank: int, network: nn.Module, loss: Any = mean, **named: Any) -> None:
    """Train a model without a wrapper."""
    train(rank, network, loss, group=dist.group.WORLD, **named)


# What ranks must have in common.


def freezing(rank: int, since: int) -> None:
    """Freeze a layer, each rank its own, in some window."""
    network = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)).double()
    accumulator = of(network, steps=1, group=dist.group.WORLD)
    for number in range(3):
        network[2 * rank].requires_grad_(number < since)
        accumulator.backward(mean(network, micro_batch(4, number)))


def reordered(rank: int) -> None:
    """Give the optimizer the same parameters, on every rank in another order."""
    network = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)).double()
    torch.manual_seed(0)
    for p in network.parameters():
        nn.init.normal_(p)
    found = list(network.parameters())
    in_group(rank, network, optimizer=torch.optim.SGD(found[2:] + found[:2] if rank else found, lr=0.1))


def with_a_frozen_part(rank: int) -> None:
    """Begin with a frozen layer that every rank has drawn by itself."""
    network = model()
    torch.manual_seed(rank)
    network[0] = nn.Linear(5, 8).double().requires_grad_(False)
    in_group(rank, network, optimizer=sgd(network[2]))


def of_other_seeds(rank: int) -> None:
    """Begin with other weights, without a wrapper that would send them."""
    torch.manual_seed(rank)
    in_group(rank, nn.Linear(5, 4).double())


def other_rates(rank: int) -> None:
    """Set another learning rate on one rank after the first window."""
    network = Ddp(model())
    optimizer = torch.optim.AdamW(network.parameters(), lr=torch.tensor(0.1))
    accumulator = of(network, optimizer, steps=1)
    accumulator.backward(mean(network, micro_batch(4, rank)))
    optimizer.param_groups[0]["lr"] *= 1 + rank
    accumulator.backward(mean(network, micro_batch(4, rank)))


def failed_in_a_hook(rank: int) -> None:
    """Go on after a step that one rank alone has not made."""
    network = Ddp(model())
    accumulator = of(network, steps=1)
    hook = accumulator.before_step(lambda: 1 / (1 - rank))  # type: ignore[arg-type]
    heard(accumulator.backward, mean(network, micro_batch(4, rank)))
    hook()
    accumulator.discard()
    accumulator.backward(mean(network, micro_batch(4, rank)))


def left_by_break(rank: int) -> None:
    """Have one rank leave its first epoch between two windows, and begin the second."""
    network = model()
    accumulator = of(network, steps=1, group=dist.group.WORLD)
    for epoch in range(2):
        for number in accumulator.over(range(3)):
            accumulator.backward(mean(network, micro_batch(3, number)))
            if (rank, epoch, number) == (1, 0, 0):
                break


def two_players(rank: int) -> None:
    """Train two models in turn, one `over` inside the other, with fewer batches on one rank."""
    one, two = Ddp(nn.Linear(5, 5).double()), Ddp(nn.Linear(5, 4).double())
    first, second = of(one), of(two)
    for x, y in first.over(second.over(batches_of(rank, [[3, 5, 2, 4, 1], [6]]))):
        made = one(x)
        first.backward(F.cross_entropy(two(made), y))
        second.backward(F.cross_entropy(two(made.detach()), y))


def made_on_one(rank: int) -> None:
    """Have objects refused on one rank alone, which does not count, and then one made there, which does."""
    network = Ddp(model())
    if rank == 0:
        assert "must be" in heard(lambda: step(rank, network, micro_batch_size=0))
        assert "must be" in heard(lambda: of(network, batch_norm="other"))
    step(rank, network)
    more = [of(network, steps=7)] if rank == 0 else []
    of(network, steps=1).backward(mean(network, micro_batch(3, rank)))
    assert more


def with_counts_in_ratio(rank: int, first: tuple[int, int], second: tuple[int, int]) -> None:
    """Have two counts in nearly the same ratio on both ranks."""

    def loss(network: Any, batch: Batch) -> Tensor:
        out, (one, other) = network(batch[0]), (first, second)[rank]
        return counted(out.pow(2).mean(), one) + counted(out.abs().mean(), other)

    train(rank, Ddp(model()), loss, steps=1)


def once(loss: Any) -> Any:
    """Add a term of parameters alone."""

    def found(network: nn.Module, batch: Batch) -> Tensor:
        penalty = torch.stack([p.pow(2).sum() for p in network.parameters()]).sum()
        return loss(network, batch) + 0.01 * counted(penalty, "once")

    return found


def as_sum(network: nn.Module, batch: Batch) -> Tensor:
    """Count a loss as a sum."""
    return counted(summed(network, batch), "sum")


def times(rank: int, network: nn.Module, batch: Batch) -> Tensor:
    """Multiply a mean with a number of each rank's own."""
    return mean(network, batch) * (2 + rank)


COMMON: dict[str, Program] = {
    "freezing others": lambda rank: freezing(rank, 0),
    "freezing others later": lambda rank: freezing(rank, 2),
    "another order": reordered,
    "other seeds": of_other_seeds,
    "other frozen weights": with_a_frozen_part,
    "other rates later": other_rates,
    "a step that one rank has not made": failed_in_a_hook,
    "break": left_by_break,
    "fewer batches for two players": two_players,
    "an accumulator that others have not": made_on_one,
    "mean or sum": lambda rank: train(rank, Ddp(model()), mean if rank else summed),
    "other factors": lambda rank: train(rank, Ddp(model()), lambda *each: times(rank, *each)),
    "other factors, counted": lambda rank: train(
        rank, Ddp(model()), lambda *each: times(rank, *each), counts=lambda batch: (batch[1] != -100).sum()
    ),
    "other factors in a big step": lambda rank: step(rank, Ddp(model()), lambda *each: times(rank, *each)),
    "other terms": lambda rank: train(
        rank, Ddp(model()), lambda net, b: (F.l1_loss if rank else F.mse_loss)(net(b[0]), b[0][:, :4])
    ),
    "other ratios": lambda rank: with_counts_in_ratio(rank, (50_000, 49_999), (100_000, 99_999)),
    "a share of two counts is missing": lambda rank: train(
        rank, Ddp(model()), once(two_counts), [[3, 5], []], counts=counts
    ),
    "a share of a sum is missing": lambda rank: train(rank, Ddp(model()), once(as_sum), [[3, 5], []]),
}

# Settings of one rank, each in turn.


def scaler(tracker: int) -> torch.amp.GradScaler:
    """Return a scaler that has seen some steps."""
    found = torch.amp.GradScaler("cpu")
    found.load_state_dict({**found.state_dict(), "_growth_tracker": tracker})
    return found


def loaded(network: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that goes on from a checkpoint."""
    found = sgd(network)
    moments = {0: {"momentum_buffer": torch.ones_like(next(network.parameters()))}}
    found.load_state_dict({"state": moments, "param_groups": found.state_dict()["param_groups"]})
    return found


def scheduled(network: nn.Module) -> dict[str, Any]:
    """Return an optimizer with its scheduler."""
    optimizer = sgd(network)
    return {"optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


UNLIKE: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "clip_norm": lambda _: {"clip_norm": 2.0},
    "skip_nonfinite": lambda _: {"skip_nonfinite": True},
    "gradient_dtype": lambda _: {"gradient_dtype": None},
    "scheduler": scheduled,
    "lr": lambda network: {"optimizer": sgd(network, lr=0.2)},
    "weight_decay": lambda network: {"optimizer": sgd(network, weight_decay=0.5)},
    "scaler": lambda _: {"scaler": scaler(7)},
    "state": lambda network: {"optimizer": loaded(network)},
    "optimizers": lambda net: {"optimizer": [torch.optim.SGD([p], lr=0.1) for p in net.parameters()]},
}


def unlike(rank: int, name: str) -> None:
    """Give one rank another setting."""
    network = Ddp(model())
    given = UNLIKE[name](network) if rank else {"scaler": scaler(0)} if name == "scaler" else {}
    train(rank, network, **given)


def unlike_step(rank: int) -> None:
    """Give a big step another setting on one rank."""
    step(rank, Ddp(model()), options=Options(skip_nonfinite=bool(rank)))


COMMON.update({f"unlike {name}": partial(unlike, name=name) for name in UNLIKE})
COMMON["unlike settings of a big step"] = unlike_step

# DDP's own reduction, in the last backward.


def first_alone(rank: int) -> None:
    """Use a head in the first micro-batch of a window only."""
    plain = two_heads()
    plain.unused.requires_grad_(False)
    network = Ddp(plain)
    accumulator = of(network, overlap=True)
    for number, (x, y) in enumerate(accumulator.over(batches_of(rank, [[3, 5], [6, 1]]))):
        accumulator.backward(F.cross_entropy(network(x, number), y))


def past_the_wrapper(rank: int, since: int) -> None:
    """Call the module inside, from some micro-batch on."""
    network = Ddp(model())
    accumulator = of(network, steps=1, overlap=True)
    for number, batch in enumerate(accumulator.over(batches_of(rank, SIZES))):
        accumulator.backward(mean(network.module if number >= since else network, batch))


def under_no_sync(rank: int) -> None:
    """Have the user's loop keep DDP quiet."""
    network = Ddp(model())
    accumulator = of(network, overlap=True)
    for batch in accumulator.over(batches_of(rank, SIZES)):
        with network.no_sync():
            accumulator.backward(mean(network, batch))


def frozen_at(rank: int, now: Callable[[int], bool], at_first: bool) -> None:
    """Have a layer be frozen or not when DDP is made, and in each micro-batch."""
    plain = model()
    plain[0].requires_grad_(at_first)
    network = Ddp(plain)
    accumulator = of(network, overlap=True)
    for number, batch in enumerate(batches_of(rank, SIZES)):
        plain[0].requires_grad_(now(number))
        accumulator.backward(mean(network, batch))


def beside(rank: int, which: str) -> None:
    """Train what DDP does not reduce."""
    plain, scale = model(), nn.Parameter(torch.ones((), dtype=torch.float64))
    if which == "ignored":
        Ddp._set_params_and_buffers_to_ignore_for_model(plain, ["2.weight"])
    network: Any = nn.Sequential(Ddp(plain[0]), plain[1], plain[2]) if which == "a module" else Ddp(plain)
    parameters = [*network.parameters(), scale] if which == "a parameter" else [*network.parameters()]
    accumulator = of(network, torch.optim.SGD(parameters, lr=0.1), overlap=True)
    for x, y in accumulator.over(batches_of(rank, SIZES)):
        accumulator.backward(F.cross_entropy(network(x) * scale, y))


def without_the_last(rank: int) -> None:
    """Pass over the last batch."""
    network = Ddp(model())
    accumulator = of(network, overlap=True)
    for number, batch in enumerate(accumulator.over(batches_of(rank, SIZES))):
        if number < 3:
            accumulator.backward(mean(network, batch))


def low_loss(rank: int, network: nn.Module, **named: Any) -> None:
    """Compute a loss of bf16."""
    train(rank, network, lambda net, batch: mean(net, (batch[0].float(), batch[1])).bfloat16(), **named)


def with_an_unused_layer(rank: int) -> None:
    """Have a layer that no micro-batch uses: its bucket is never full."""
    train(rank, Ddp(two_heads()), lambda net, batch: F.cross_entropy(net(batch[0], 0), batch[1]), overlap=True)


OVERLAP: dict[str, Program] = {
    "used first alone": first_alone,
    "past the wrapper": lambda rank: past_the_wrapper(rank, 0),
    "past the wrapper later": lambda rank: past_the_wrapper(rank, 1),
    "no_sync": under_no_sync,
    "an unused layer": with_an_unused_layer,
    "frozen since": lambda rank: frozen_at(rank, lambda _: False, at_first=True),
    "unfrozen since": lambda rank: frozen_at(rank, lambda number: number > 1, at_first=False),
    "a module beside": lambda rank: beside(rank, "a module"),
    "a parameter beside": lambda rank: beside(rank, "a parameter"),
    "ignored": lambda rank: beside(rank, "ignored"),
    "find_unused_parameters": lambda _: of(Ddp(model(), find_unused_parameters=True), overlap=True),
    "no wrapper": lambda _: of(model(), overlap=True, group=dist.group.WORLD),
    "some parameters": lambda _: of(n := Ddp(model()), torch.optim.SGD([next(n.parameters())], lr=1.0), overlap=True),
    "some shards": lambda _: of(n := shards(model()), torch.optim.SGD([next(n.parameters())], lr=1.0), overlap=True),
    "bf16 parameters": lambda _: of(Ddp(model().bfloat16()), overlap=True),
    "a low loss": lambda rank: low_loss(rank, Ddp(model().float()), overlap=True),
    "another number of windows": lambda rank: train(rank, Ddp(model()), sizes=[[3, 5, 2], [6, 1]], overlap=True),
    "no batch": lambda rank: train(rank, Ddp(model()), sizes=[[3, 5, 2], []], overlap=True),
    "no backward of the last batch": without_the_last,
}

# Sharded models.


def through_heads(rank: int, path: Any, shape: Any = None, **named: Any) -> None:
    """Make an update of two micro-batches, each through one head."""
    network = shards(two_heads(), (), shape)
    accumulator = of(network, **named)
    for head, (x, y) in zip(path[rank], batches_of(rank, SIZES * 2), strict=False):
        accumulator.backward(F.cross_entropy(network(x, head), y))


def dropping(rank: int) -> None:
    """Drop the first micro-batch on one rank alone."""
    network = shards(model())
    accumulator = of(network, steps=4)
    for number, batch in enumerate(batches_of(rank, SIZES)):
        accumulator.backward(mean(network, batch))
        if number == 0 and rank:
            accumulator.discard()
    accumulator.flush()


def breaking(rank: int) -> None:
    """Leave the loop early on one rank, and make an update of what there is."""
    network = shards(model())
    accumulator = of(network)
    for batch in accumulator.over(batches_of(rank, SIZES)):
        accumulator.backward(mean(network, batch))
        if rank:
            break
    accumulator.flush()


def early(rank: int) -> None:
    """End a window before its last backward, which alone would have reduced."""
    network = parts_of(model())
    accumulator = of(network, overlap=True)
    accumulator.backward(mean(network, micro_batch(3, rank)))
    accumulator.flush()


def hooked(rank: int, *, before: bool) -> None:
    """Have FSDP call a function of one's own for what it has reduced."""
    network: Any = shards(model())
    made = None if before else of(network, steps=1)
    network.set_all_reduce_hook(lambda gradient: gradient.mul_(2.0))
    (made or of(network, steps=1)).backward(mean(network, micro_batch(4, rank)))


def sharded_later(rank: int, *, big: bool) -> None:
    """Make an object first, and shard its model then."""
    network, batch = model(), micro_batch(4, rank)
    made: Any = BigStep(network, sgd(network), mean, micro_batch_size=2) if big else of(network)
    shards(network)
    made(batch) if big else made.backward(mean(network, batch))


def partly(_: int) -> None:
    """Shard a part of a model."""
    network = model()
    shards(network[0])
    of(network)


def inside_out(_: int) -> None:
    """Put a loop that has nobody wait around one that does."""
    of(shards(model())).over(of(Ddp(model())).over([]))


def beside_shards(rank: int, *, bare: bool) -> None:
    """Use a parameter that is not sharded, or one that is, outside of the model's forward."""
    network: Any = shards(model())
    scale = nn.Parameter(torch.ones((), dtype=torch.float64))
    accumulator = of(network, torch.optim.SGD([*network.parameters(), *[scale] * bare], lr=0.1, foreach=False))
    x, y = micro_batch(3, rank)
    penalty = torch.stack([p.full_tensor().pow(2).sum() for p in network.parameters()]).sum()
    loss = F.cross_entropy(network(x), y)
    accumulator.backward(loss * scale if bare else loss + 0.1 * counted(penalty, "once"))


def found_late(rank: int) -> None:
    """Have a count that only a device knows, which is 0 on one rank, and a gradient of 0 / 0."""
    network = shards(model())
    accumulator = of(network)
    x, _ = micro_batch(3, rank)
    accumulator.backward(network(x).pow(2).mean() * (float("nan") if rank else 1.0), count=torch.tensor(3.0))
    window: Any = accumulator._window
    window.ledger.nothings = torch.tensor(float(rank))  # as it would be there
    accumulator.backward(network(x).pow(2).mean(), count=torch.tensor(3.0))


SHARDS: dict[str, Program] = {
    "each rank its own head": lambda rank: through_heads(rank, [[0, 0], [1, 1]]),
    "each rank its own head, overlap": lambda rank: through_heads(rank, [[0, 0], [1, 1]], overlap=True),
    "heads in turn": lambda rank: through_heads(rank, [[0, 1], [1, 0]]),
    "dropped on one": dropping,
    "break in shards": breaking,
    "flush before the last backward": early,
    "all-reduce hook": lambda rank: hooked(rank, before=True),
    "all-reduce hook later": lambda rank: hooked(rank, before=False),
    "sharded later": lambda rank: sharded_later(rank, big=False),
    "sharded later, big step": lambda rank: sharded_later(rank, big=True),
    "partly sharded": partly,
    "loops inside out": inside_out,
    "a bare parameter": lambda rank: beside_shards(rank, bare=True),
    "a penalty of shards": lambda rank: beside_shards(rank, bare=False),
    "a low loss of shards": lambda rank: low_loss(rank, shards(model().float())),
    "other steps": lambda rank: train(rank, shards(model()), steps=2 + rank),
    "no batch for shards": lambda rank: train(rank, shards(model()), sizes=[[3, 5], []]),
    "uneven counts in advance": lambda rank: train(rank, shards(model()), two_counts, [[3, 5, 2], [6]], counts=counts),
    "0 / 0": found_late,
    "sizes for shards": lambda rank: step(rank, shards(model()), micro_batch_size="auto"),
    "packing for shards": lambda rank: step(rank, shards(model()), options=Options(lengths=len)),
    "graphs for shards": lambda rank: step(rank, shards(model()), options=Options(cuda_graph=True)),
    "verify shards": lambda rank: verify(shards(model()), mean, micro_batch(4, rank), 2),
}

# DDP, hooks and other wrappers.


class DeepSpeedEngine(nn.Module):
    """What a model is in after deepspeed.initialize(), by its name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def fsdp1() -> nn.Module:
    """Wrap a model as before FSDP2."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    return nn.Sequential(FullyShardedDataParallel(model(), device_id=torch.device("cpu")))


def with_a_hook(rank: int, hook: Any, *, later: bool) -> None:
    """Give DDP a communication hook."""
    network = Ddp(model())
    made = of(network) if later else None
    network._register_builtin_comm_hook(hook) if isinstance(hook, BuiltinCommHookType) else network.register_comm_hook(
        None, hook
    )
    accumulator = made or of(network)
    for batch in accumulator.over(batches_of(rank, SIZES)):
        accumulator.backward(mean(network, batch))


def sparse(rank: int, *, big: bool) -> None:
    """Train an embedding with sparse gradients, perhaps on one rank alone."""
    torch.manual_seed(0)
    network = nn.EmbeddingBag(5, 4, sparse=True)
    batch = torch.randint(5, (4, 2)), torch.randint(4, (4,))
    if big:
        options = Options(group=dist.group.WORLD)
        BigStep(network, sgd(network), mean, micro_batch_size=2, options=options)(None if rank else batch)
    else:
        wrapped = Ddp(network)
        of(wrapped, steps=1).backward(mean(wrapped, batch))


def hidden(_: int) -> Any:
    """Give the model without DDP, which is still there."""
    network = Ddp(model())
    return of(network.module), network


def reducing_again(rank: int) -> None:
    """Have something set DDP's flag, as the end of a no_sync() does that began before the accumulator was made."""
    network = Ddp(model())
    with network.no_sync():
        accumulator = of(network)
    accumulator.backward(mean(network, micro_batch(4, rank)))


def in_mid_window(rank: int) -> None:
    """Save where a window is open."""
    network = Ddp(model())
    accumulator = of(network)
    accumulator.backward(mean(network, micro_batch(4, rank)))
    accumulator.state_dict()


def loading_a_window(_: int) -> None:
    """Load a window that one process has left open."""
    alone = model()
    one = of(alone)
    one.backward(mean(alone, micro_batch(6, 7)))
    state = one.state_dict()
    one.discard()
    of(shards(model())).load_state_dict(state)


def of_two_groups(_: int) -> None:
    """Train models together that are wrapped for different processes."""
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    models = [Ddp(model()), Ddp(model(), process_group=alone)]
    Accumulator(models, [sgd(each) for each in models], steps=1)


WRAPPERS: dict[str, Program] = {
    "FSDP1": lambda _: of(fsdp1()),
    "DeepSpeed": lambda _: of(DeepSpeedEngine(model())),
    "DataParallel": lambda rank: step(rank, nn.DataParallel(model())),
    "hidden DDP": hidden,
    "hook": lambda rank: with_a_hook(rank, allreduce_hook, later=False),
    "hook of torch": lambda rank: with_a_hook(rank, BuiltinCommHookType.FP16_COMPRESS, later=False),
    "hook later": lambda rank: with_a_hook(rank, allreduce_hook, later=True),
    "mixed precision": lambda _: of(Ddp(model(), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))),
    "reducing again": reducing_again,
    "sparse gradients": lambda rank: sparse(rank, big=False),
    "sparse gradients on one": lambda rank: sparse(rank, big=True),
    "saved in mid-window": in_mid_window,
    "an open window of one process": loading_a_window,
    "two groups": of_two_groups,
    "no group": lambda _: of(Ddp(model()), group=[0, 1]),
    "verify DDP": lambda rank: verify(Ddp(model()), mean, micro_batch(4, rank), 2),
}
CASES = {**COMMON, **OVERLAP, **SHARDS, **WRAPPERS}
# Which say what is so on the rank itself.
OWN_WORDS = {"no batch for shards", "uneven counts in advance", "two groups", "sparse gradients on one"}
# Whose texts belong to other parts of the library.
OF_OTHERS = {
    *("sizes for shards", "packing for shards", "graphs for shards", "verify shards", "verify DDP", "loops inside out"),
    *("saved in mid-window", "an open window of one process", "no batch for shards", "uneven counts in advance"),
    *("sharded later", "sharded later, big step", "a bare parameter", "a penalty of shards"),
}


def run(rank: int, name: str) -> str:
    """Return what is raised; a step that was made all the same is none."""
    return heard(CASES[name], rank)


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_refuse(name: str) -> None:
    """With the same error."""
    one, other = run_on_ranks(2, run, name)
    assert one == other or name in OWN_WORDS
    assert one.partition(": ")[0] in vars(errors)
    if name not in OF_OTHERS:
        approve("distributed", name, one)


def within_a_replica(rank: int) -> str:
    """Have ranks of one replica of two shards run a head each."""
    return heard(lambda: through_heads(rank, [[0], [1], [0], [1]], (2, 2), steps=1))


def test_replicas_are_apart_and_their_ranks_are_not() -> None:
    """Replicas may reach other parameters, ranks of one may not."""
    for each in run_on_ranks(4, within_a_replica):
        assert "have reached different parameters" in each


def test_a_count_that_a_device_finds_to_be_nothing() -> None:
    """It is noted beside the totals."""
    ledger = Ledger(steps=2, in_common=True)
    ledger.pending = [(torch.tensor(float("nan")), torch.tensor(0.0)), (torch.tensor(2.0), torch.tensor(3.0))]
    ledger.fold()
    assert (float(ledger.nothings), float(ledger.loss)) == (1.0, 6.0)
