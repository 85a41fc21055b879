"""However ranks are wrapped and their windows begin and end: the weights of one process on the union of the batches."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel as Ddp
from torch.utils.checkpoint import checkpoint

from bigbatch import Accumulator, BigStep, Options
from bigbatch.distributed import ranks as of_ranks
from tests.support import rank_loops as loops
from tests.support.rank_loops import SIZES, WRAPPERS, Sizes, batches_of, mean, model, parts_of, shards, weights
from tests.support.ranks import exactly, on_ranks
from tests.support.reference import distance

pytestmark = pytest.mark.ranks

UNEVEN = [[3, 5, 2], [6]]
LATE = [[3], [6, 2, 2, 4, 1]]
FOUR = [[3, 5, 2, 1], [6, 1, 1, 2], [2, 2, 3, 3], [4, 3, 5, 1]]
FOUR_UNEVEN = [[3, 5, 2, 1, 4], [6, 1], [2, 2, 3], [4, 3, 1, 2]]
PARTS = [[3, 5, 4], [7, 1, 6]]


class Case(NamedTuple):
    """A row of the table."""

    kind: str  # of wrapper
    way: str
    sizes: Sizes
    loss: str = "mean"
    optimizer: str = "adamw"


STEPS = {"flushed": 4, "shortened": 3, "without_the_last": 8}
BY_HAND = {"by_hand", "flushed", "shortened"}
MODELS: dict[str, Callable[[Any], nn.Module]] = {
    "ddp, unused": lambda plain: Ddp(plain, find_unused_parameters=True),
    **{f"ddp, static{each}": lambda plain: Ddp(plain, static_graph=True) for each in ("", ", overlap")},
    **{f"ddp, views{each}": lambda plain: Ddp(plain, gradient_as_bucket_view=True) for each in ("", ", overlap")},
    "shards, freed": lambda plain: parts_of(plain, reshard_after_forward=True),
    "hsdp, freed": lambda plain: parts_of(plain, shape=(2, 2), reshard_after_forward=True),
    "shards, host": lambda plain: shards(plain, offload_policy=CPUOffloadPolicy(pin_memory=False)),
}
CASES = [
    *[Case(kind, "over", SIZES) for kind in WRAPPERS if kind != "hsdp"],
    *[Case(kind, "over", SIZES) for kind in MODELS if "hsdp" not in kind],
    *[Case("ddp", "over", SIZES, loss, "sgd") for loss in loops.LOSSES],
    *[Case("ddp", "over", sizes) for sizes in (UNEVEN, LATE, [[3, 2, 2], []], [[2], [3, 1], [], [4, 4, 4]])],
    *[Case("ddp", "over", sizes, "two_counts") for sizes in ([[3, 5, 2], []], LATE)],
    *[Case("ddp, overlap", way, SIZES) for way in ("over", "by_hand", "flushed", "shortened")],
    *[Case("ddp, static, overlap", "by_hand", SIZES), Case("ddp, overlap", "over", [[3, 5, 2], [6, 1, 1, 7]])],
    *[Case("ddp", "big_steps", PARTS, loss) for loss in loops.LOSSES],
    *[Case(kind, "big_steps", [[3, 0, 4], [7, 5, 0]], optimizer="sgd") for kind in ("ddp", "group")],
    *[Case("ddp", "big_steps", [[4, 4, 0], [7, 3, 5]], "two_counts"), Case("shards", "over", SIZES, "summed", "sgd")],
    *[Case("shards", "big_steps", sizes) for sizes in (PARTS, [[1, 9], [8, 2], [4, 4], [2, 1]])],
    *[Case("shards", "over", sizes, optimizer="sgd") for sizes in (UNEVEN, LATE, [[2], [3, 1], [1], [4, 4, 4]])],
    *[Case("shards, overlap", way, SIZES) for way in ("over", "shortened")],
    *[Case("shards, overlap", "over", UNEVEN), Case("outermost, overlap", "over", SIZES)],
    *[Case("inner, overlap", "over", SIZES), Case("shards, freed", "recomputed", SIZES)],
    *[Case("hsdp", "over", FOUR_UNEVEN), Case("hsdp", "over", FOUR_UNEVEN, "summed", "sgd")],
    *[Case("hsdp", way, FOUR) for way in ("flushed", "shortened", "big_steps")],
    *[Case("hsdp", "without_the_last", [each[:2] for each in FOUR]), Case("hsdp, overlap", "over", FOUR)],
    Case("hsdp, freed", "recomputed", FOUR_UNEVEN),
]


def accumulated(network: nn.Module, batches: list[loops.Batch], case: Case, **named: Any) -> list[Any]:
    """Train in windows of two: in a loop over `over` or by hand, some ended or begun in another way."""
    accumulator = Accumulator(
        network,
        loops.OPTIMIZERS[case.optimizer](network.parameters()),
        steps=STEPS.get(case.way, 2),
        clip_norm=1.0,
        overlap="overlap" in case.kind,
        counts=loops.counts if case.loss == "two_counts" else None,
        **named,
    )
    loss = loops.LOSSES[case.loss]
    called: Any = partial(checkpoint, network, use_reentrant=False) if case.way == "recomputed" else network
    if case.way == "shortened":  # begin with a longer window, and drop it
        for batch in batches[:2]:
            accumulator.backward(loss(called, batch))
        accumulator.discard()
        accumulator.steps = 2
    found: list[Any] = []
    given = [*batches, *batches] if case.way == "without_the_last" else batches
    for number, batch in enumerate(given if case.way in BY_HAND else accumulator.over(given)):
        if case.way != "without_the_last" or number < len(batches):
            found.append(accumulator.backward(loss(called, batch)))
        if case.way == "flushed" and number % 2:
            found.append(accumulator.flush())
    return found


def trained(rank: int, case: Case) -> Any:
    """Train on one rank: micro-batch by micro-batch, or each batch as a part of a big one, which may be none."""
    network = (MODELS.get(case.kind) or WRAPPERS[case.kind.partition(",")[0]])(model())
    batches = batches_of(rank, case.sizes)
    group: dict[str, Any] = {"group": dist.group.WORLD} if case.kind == "group" else {}
    with patch.object(of_ranks, "_BUCKET", 64):  # some gradients are larger, and sent from where they are
        if case.way == "big_steps":
            optimizer, options = loops.OPTIMIZERS[case.optimizer](network.parameters()), Options(**group)
            named: Any = {"micro_batch_size": 2, "clip_norm": 1.0, "options": options}
            _, step = (BigStep(network, optimizer, loops.LOSSES[case.loss], **named) for _ in range(2))
            updates: list[Any] = [step(each if len(each[0]) else None) for each in batches]
        else:
            updates = accumulated(network, batches, case, **group)
    return weights(network), [loops.told(each) for each in updates if each is not None]


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case)))
def test_ranks_are_one_process(case: Case) -> None:
    """Weights, losses, norms and counts, on every rank."""
    found = exactly(len(case.sizes), trained, case)
    true = loops.truth(case.sizes, 1 if case.way == "big_steps" else 2, case.loss, case.optimizer)
    joins = any(len(own) != len(case.sizes[0]) for own in case.sizes) and case.kind == "ddp"
    loops.assert_same(found, true, all_updates=not joins and case.way != "without_the_last")


@pytest.mark.parametrize("steps", [1, 5])
@on_ranks(4)
def test_what_replicas_send_does_not_depend_on_the_number_of_micro_batches(rank: int, steps: int) -> None:
    """One all-reduce of what a rank holds; the row of every update is gathered."""
    network = WRAPPERS["hsdp"](model())
    accumulator = loops.made(network, steps=steps)
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as counted:
        for number in range(steps):
            accumulator.backward(mean(network, loops.micro_batch(4, rank + number)))
    assert counted.call_count == 1


@on_ranks(2)
def test_a_count_in_advance_is_that_of_all_ranks(rank: int) -> None:
    """One number."""
    network, sizes = Ddp(model()), [[3], [5]]
    accumulator = loops.made(network, steps=1, counts=lambda batch: (batch[1] != -100).sum())
    (update,) = [accumulator.backward(mean(network, each)) for each in accumulator.over(batches_of(rank, sizes))]
    assert update is not None
    number = sum(int((y != -100).sum()) for each in range(2) for _, y in batches_of(each, sizes))
    assert update.count in (number, (number,))


# What a loss makes of several models, heads and counts: one by one on ranks, and all at once in plain PyTorch.


class Program(NamedTuple):
    """Models that are trained together, and their loss; with its count, where it does not tell."""

    make: Callable[[], list[Any]]
    wrap: Callable[[Any], nn.Module]
    loss: Callable[[list[Any], loops.Batch, int, int], tuple[Tensor, ...]]  # of a rank's micro-batch of some number
    sizes: Sizes
    scaled: bool = False  # by a gradient scaler
    overlap: bool = False
    within: float = 1e-12


def both(models: list[Any], batch: loops.Batch, _: int, number: int) -> tuple[Tensor]:
    """Use the second model in the first micro-batch of a window alone."""
    one, two = models
    return (F.cross_entropy(one(batch[0]) if number % 2 else one(batch[0]) + two(batch[0]), batch[1]),)


def plain(models: list[Any], batch: loops.Batch, *_: int) -> tuple[Tensor]:
    """A masked mean."""
    return (F.cross_entropy(models[0](batch[0]).double(), batch[1]),)


def divided(models: list[Any], batch: loops.Batch, rank: int, number: int) -> tuple[Tensor, Tensor]:
    """Return a mean that divides by its count by hand, 0 / 0 in some micro-batches, and the count."""
    values = models[0](batch[0]).pow(2).mean(1)
    mask = torch.full_like(values.detach(), float((rank, number) not in {(0, 1), (1, 2)}))
    return (values * mask).sum() / mask.sum(), mask.sum()


def headed(wrap: Callable[[Any], nn.Module], paths: Sequence[Sequence[int]], unused: bool = False, **named: Any) -> Any:
    """Return a program that runs each micro-batch through one head; the rest gets no gradient, and no weight decay."""

    def make() -> list[Any]:
        network = loops.two_heads()
        network.unused.requires_grad_(unused)
        return [network]

    def loss(models: list[Any], batch: loops.Batch, rank: int, number: int) -> tuple[Tensor]:
        return (F.cross_entropy(models[0](batch[0], paths[rank][number % len(paths[rank])]), batch[1]),)

    return Program(make, wrap, loss, FOUR[: len(paths)], **named)


def half_frozen() -> list[Any]:
    """Freeze a layer, which FSDP frees from its forward to its backward."""
    network = model()
    network[2].requires_grad_(False)
    return [network]


def one_model() -> list[Any]:
    """Return a model alone."""
    return [model()]


def small(out: int = 4, seed: int = 3) -> nn.Module:
    """Return another model, the same on every rank."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, out)).double()


def two_models() -> list[Any]:
    """Return models of which only some micro-batches use the second."""
    return [model(), small()]


RAGGED = [[3, 5, 2, 1, 4], [6, 1, 1]]
hsdp = partial(shards, shape=(2, 2))
in_low_precision = partial(parts_of, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
PROGRAMS: dict[str, Program] = {
    "heads in ddp": headed(MODELS["ddp, unused"], [[0], [1]], unused=True),
    "heads in turn": headed(shards, [[0, 1], [0, 1]]),
    "one head": headed(shards, [[0], [0]]),
    "heads in turn, overlap": headed(shards, [[0, 1], [0, 1]], overlap=True),
    "heads crossed, overlap": headed(shards, [[0, 1], [1, 0]], overlap=True),
    "heads of replicas": headed(hsdp, [[0, 1], [0, 1], [1, 1], [1, 1]]),
    "models": Program(two_models, shards, both, SIZES),
    "models, overlap": Program(two_models, shards, both, SIZES, overlap=True),
    "models of replicas": Program(two_models, hsdp, both, FOUR),
    "models of replicas, overlap": Program(two_models, hsdp, both, FOUR, overlap=True),
    "frozen": Program(half_frozen, parts_of, plain, SIZES),
    "frozen, bf16": Program(half_frozen, in_low_precision, plain, SIZES, within=1e-2),
    "scaler": Program(one_model, shards, plain, RAGGED, scaled=True),
    "scaler, overlap": Program(one_model, shards, plain, RAGGED, scaled=True, overlap=True),
    "nothing": Program(one_model, Ddp, divided, SIZES, overlap=True),
    "nothing in shards": Program(one_model, parts_of, divided, [[3, 5, 2, 4], [6, 1, 1]]),
}


def stepping(models: Sequence[nn.Module]) -> torch.optim.Optimizer:
    """Return an optimizer of all that is trained."""
    every = [p for each in models for p in each.parameters() if p.requires_grad]
    return torch.optim.SGD(every, lr=0.2, momentum=0.9, weight_decay=0.1)


def one_by_one(rank: int, name: str) -> Any:
    """Train on one rank, in windows of two."""
    program = PROGRAMS[name]
    models = [program.wrap(each) for each in program.make()]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8) if program.scaled else None
    named: dict[str, Any] = {"clip_norm": 1.0, "scaler": scaler, "overlap": program.overlap}
    accumulator = Accumulator(models, stepping(models), steps=2, **named)
    for number, batch in enumerate(accumulator.over(batches_of(rank, program.sizes))):
        accumulator.backward(*program.loss(models, batch, rank, number))
    return [w for each in models for w in weights(each)], [float(b) for each in models for b in each.buffers()]


@pytest.mark.parametrize("name", PROGRAMS)
def test_ranks_are_plain_torch(name: str) -> None:
    """On all micro-batches of a window at once; buffers are the first rank's, where DDP sends them."""
    program = PROGRAMS[name]
    models, batches = program.make(), [batches_of(rank, program.sizes) for rank in range(len(program.sizes))]
    optimizer = stepping(models)
    for start in range(0, max(map(len, batches)), 2):
        found = []
        for rank, own in enumerate(batches):
            for number, batch in list(enumerate(own))[start : start + 2]:
                loss, *count = program.loss(models, batch, rank, number)
                found.append((loss, count[0] if count else (batch[1] != -100).sum()))
        optimizer.zero_grad()
        (torch.stack([loss * n for loss, n in found if n]).sum() / sum(n for _, n in found)).backward()
        nn.utils.clip_grad_norm_([p for each in models for p in each.parameters()], 1.0)
        optimizer.step()
    for each, buffers in exactly(len(program.sizes), one_by_one, name):
        assert distance(each, [w for network in models for w in weights(network)]) <= program.within
        assert name != "heads in ddp" or buffers == [sum(program.sizes[0])]


# Several models and loops.

PLAYERS: dict[str, Callable[[Any], nn.Module]] = {
    **WRAPPERS,  # gradients of the next wait in another type than they are made in, where they wait for the last
    "reduced in float32": partial(shards, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)),
}


def played_at_once(sizes: Sizes) -> list[Tensor]:
    """Train a generator and a discriminator on the micro-batches of all ranks, in the same order."""
    one, two = small(5, 0), small()
    first, second = (Accumulator(each, loops.OPTIMIZERS["sgd"](each.parameters()), steps=99) for each in (one, two))
    most = max(map(len, sizes))
    for number in range(most):
        every = [batches_of(rank, sizes)[number] for rank in range(len(sizes)) if number < len(sizes[rank])]
        made = [one(x) for x, _ in every]
        for accumulator, inputs in ((first, made), (second, [each.detach() for each in made])):
            for each, (_, y) in zip(inputs, every, strict=True):
                accumulator.backward(F.cross_entropy(two(each), y))
            if number % 2 or number == most - 1:
                accumulator.flush()
    return [*weights(one), *weights(two)]


APART, ONE, OTHER, BOTH = (False, False), (True, False), (False, True), (True, True)
UNEVEN_BY_ONE = [[3, 5, 2, 4, 3], [6, 1, 1]]


@pytest.mark.parametrize(
    ("kind", "sizes", "given", "overlap"),
    [
        *[("outermost", SIZES, given, how) for given, how in ((0, APART), (0, OTHER), (0, ONE), (1, OTHER), (0, BOTH))],
        *[("outermost", UNEVEN_BY_ONE, 0, how) for how in (APART, BOTH)],
        *[("reduced in float32", UNEVEN_BY_ONE, 0, OTHER), ("ddp", SIZES, 0, APART)],
    ],
    ids=str,
)
@on_ranks(2)
def test_a_loss_leaves_alone_what_another_trains(
    rank: int, kind: str, sizes: Sizes, given: bool, overlap: tuple[bool, bool]
) -> None:
    """The gradients of one player run through the other, and add nothing there; the first may be given both."""
    one, two = (PLAYERS[kind](each) for each in (small(5, 0), small()))
    optimizers = [loops.OPTIMIZERS["sgd"](each.parameters()) for each in (one, two)]
    first = Accumulator([one, two] if given else one, optimizers[0], steps=2, overlap=overlap[0])
    second = Accumulator(two, optimizers[1], steps=2, overlap=overlap[1])
    for x, y in first.over(second.over(batches_of(rank, sizes))):
        made = one(x)
        before = [p.grad for p in two.parameters()]
        first.backward(F.cross_entropy(two(made), y))
        assert all(p.grad is gradient for p, gradient in zip(two.parameters(), before, strict=True))
        second.backward(F.cross_entropy(two(made.detach()), y))
    within = 1e-6 if kind == "reduced in float32" else 1e-12
    assert distance([*weights(one), *weights(two)], played_at_once(sizes)) <= within


# Numbers of low precision, scalers, and micro-batches that count nothing.


@pytest.mark.parametrize(("kind", "ranks"), [("ddp", 2), ("group", 2), ("outermost", 2), ("hsdp", 4)])
@on_ranks()
def test_low_precision_is_added_up_in_float32(rank: int, kind: str, ranks: int) -> None:
    """Over micro-batches, each of which adds what bf16 would round away, and over ranks."""
    network: Any = WRAPPERS[kind](nn.Sequential(nn.Linear(5, 4, bias=False), nn.Identity(), nn.Identity()).bfloat16())
    nn.init.zeros_(next(network.parameters()))
    found: list[Any] = []
    if kind == "group":  # as a model has that was quantized
        network[0].packed = nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn), requires_grad=False)
    accumulator = loops.made(network, steps=64, **({"group": dist.group.WORLD} if kind == "group" else {}))
    accumulator.before_step(lambda: found.extend(p.grad for p in network.parameters()))
    for number in range(64):
        accumulator.backward(network(torch.full((1, 5), 1.0 + number / 128, dtype=torch.bfloat16)).float().sum())
    gradient = found[0].full_tensor() if hasattr(found[0], "full_tensor") else found[0]
    assert gradient.dtype == torch.float32
    assert torch.equal(gradient, torch.full_like(gradient, ranks * sum(1.0 + n / 128 for n in range(64)))), rank


@pytest.mark.parametrize(("kind", "ranks"), [("ddp", 2), ("shards", 2), ("hsdp", 4)])
@on_ranks()
def test_what_is_not_finite_on_one_rank_skips_on_all(rank: int, kind: str, ranks: int) -> None:
    """And all go on with the same scale and weights."""
    network = WRAPPERS[kind](model())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    accumulator = loops.made(network, scaler=scaler)
    skipped = []
    for number, (x, y) in enumerate(accumulator.over(batches_of(rank, [[3, 5, 2, 1, 1, 2]] * 4))):
        broken = x.fill_(float("nan")) if (rank, number) == (1, 2) else x
        update = accumulator.backward(F.cross_entropy(network(broken), y.clamp(min=0)))
        skipped += [update.skipped] if update is not None else []
    assert (skipped, scaler.get_scale()) == ([False, True, False], 2.0**7)
    every: list[Any] = [None] * ranks
    dist.all_gather_object(every, weights(network))
    assert all(distance(each, every[0]) == 0 for each in every)


@pytest.mark.parametrize(
    ("kind", "way"), [("ddp", ""), ("ddp", "overlap"), ("shards", ""), ("shards", "overlap"), ("shards", "big step")]
)
@on_ranks(2)
def test_weights_do_not_overflow(rank: int, kind: str, way: str) -> None:
    """In float16, with the scale that a scaler begins with, they are those of a mean, in a unit that ranks agree on."""
    torch.manual_seed(0)
    network = WRAPPERS[kind](nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 4)))
    optimizer, scaler = torch.optim.SGD(network.parameters(), lr=0.1), torch.amp.GradScaler("cpu")

    def loss(net: Any, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return F.cross_entropy(net(batch[0].float()), batch[1])

    batches = batches_of(rank, [[512] * 4] * 2)
    if way == "big step":
        step = BigStep(network, optimizer, loss, micro_batch_size=256, scaler=scaler)
        updates: list[Any] = [step(batch) for batch in batches]
    else:
        accumulator = Accumulator(network, optimizer, steps=2, scaler=scaler, overlap=way == "overlap")
        updates = [accumulator.backward(loss(network, batch)) for batch in batches]
    assert not any(each.skipped for each in updates if each is not None)
    assert scaler.get_scale() == 2.0**16
