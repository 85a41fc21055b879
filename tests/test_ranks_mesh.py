"""Device meshes with a dimension of tensor parallelism: the final weights of one process on all batches."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import Accumulator, BigStep, Options, Setup, across, counted
from bigbatch.errors import BigBatchError, ConfigurationError, LossError, RankFailed, WindowError
from tests.ranks import run_on_ranks
from tests.reference import distance
from tests.test_ranks import CLASSES, OPTIMIZERS, Batch, assert_same
from tests.test_ranks_sharded import shards, whole

WIDTH, LENGTH = 6, 4
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # torch's, of outputs that are views


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Import once what every process would: they are forked from this one."""
    for name in ("torch.distributed.fsdp", "torch.distributed.tensor.parallel"):
        import_module(name)


class Blocks(nn.Module):
    """What transformers are made of, as far as their parameters may be spread: by rows, by columns, not at all."""

    def __init__(self) -> None:
        """Make the same on every rank."""
        super().__init__()
        torch.manual_seed(0)
        self.into, self.out_of = nn.Linear(5, 8), nn.Linear(8, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)
        self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """Samples x positions x features, to scores."""
        x = self.out_of(torch.tanh(self.into(x)))
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        scores: Tensor = self.head(self.last(x))
        return scores


def plan(kind: str) -> dict[str, Any]:
    """Return which parameters are spread: "some", where the rest are plain; or "all", in parts or on every rank."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    if kind == "some":
        return {
            "into": ColwiseParallel(),
            "out_of": RowwiseParallel(),
            "up": ColwiseParallel(),
            "down": RowwiseParallel(),
        }
    return {
        "into": ColwiseParallel(),
        "out_of": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "last": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def mesh_of(shape: tuple[int, ...] = (2, 2), names: tuple[str, ...] = ("dp", "tp")) -> Any:
    """Return the mesh of all ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def spread(mesh: Any, kind: str = "some", **named: Any) -> Blocks:
    """Make a model in parts over "tp"; sharded over "dp" as well, where `fully` is given."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    network = Blocks()
    parallelize_module(network, mesh["tp"], plan(kind))
    fully = named.pop("fully", None)
    if fully is not None:
        for part in (network.up, network.down):
            fully_shard(part, mesh=fully, **named)
        fully_shard(network, mesh=fully, **named)
    return network


def samples(size: int, seed: int) -> Batch:
    """Return samples, some of whose positions have no target."""
    by = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (size, LENGTH), generator=by)
    labels[torch.rand(size, LENGTH, generator=by) < 0.3] = -100
    return torch.randn(size, LENGTH, 5, generator=by, dtype=torch.float64), labels


def mean(network: nn.Module, batch: Batch) -> Tensor:
    """A masked mean."""
    return F.cross_entropy(network(batch[0]).flatten(0, 1), batch[1].flatten())


def summed(network: nn.Module, batch: Batch) -> Tensor:
    """A sum, with a term of parameters alone, of which each of those with samples adds its share."""
    scores = network(batch[0]).flatten(0, 1)
    every: list[Any] = list(network.parameters())
    squares = [p.pow(2).sum() for p in every]
    weight = torch.stack([p.full_tensor() if hasattr(p, "full_tensor") else p for p in squares]).sum()
    total = F.cross_entropy(scores, batch[1].flatten(), reduction="sum")
    return counted(total, "sum") + 0.01 * counted(weight, "once")


LOSSES = {"mean": mean, "summed": summed}
UNEVEN = [[3, 1, 2, 2, 1], [1, 4, 1]]  # micro-batches of those that have samples of their own, and their sizes
CLIP = 0.05


def told(update: Any) -> tuple[float, float, bool, float]:
    """Return what an update says."""
    return float(update.loss), float(update.grad_norm or 0), bool(update.skipped), float(update.count)


def truth(sizes: Sequence[Sequence[int]], steps: int = 2, loss: str = "mean", optimizer: str = "sgd") -> Any:
    """Train in one process, each big batch at once."""
    network = Blocks()
    chosen = OPTIMIZERS[optimizer](network.parameters())
    accumulator = Accumulator(network, chosen, steps=1, clip_norm=CLIP)
    updates = []
    every = [[samples(size, 100 * place + i) for i, size in enumerate(own)] for place, own in enumerate(sizes)]
    for k in range(max(-(-len(own) // steps) for own in every)):
        window = [batch for own in every for batch in own[k * steps : (k + 1) * steps]]
        update = accumulator.backward(LOSSES[loss](network, (_joined(window, 0), _joined(window, 1))))
        updates.append(told(update))
    assert all(norm > CLIP for _, norm, _, _ in updates)
    return [p.detach() for p in network.parameters()], updates


def _joined(window: Sequence[Batch], place: int) -> Tensor:
    return torch.cat([batch[place] for batch in window])


def weights(network: nn.Module) -> list[Tensor]:
    """Return all of every parameter, wherever it is."""
    every: list[Any] = list(network.parameters())
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in every]


def accumulated(rank: int, sizes: Sequence[Sequence[int]], how: dict[str, Any]) -> Any:
    """Train on one rank; `how` says in which way."""
    shape, names = how.get("mesh", ((2, 2), ("dp", "tp")))
    mesh = mesh_of(shape, names)
    data = mesh[tuple(name for name in names if name != "tp")]
    network = spread(mesh, how["kind"], **({"fully": data} if how["fully"] else {}))
    chosen = OPTIMIZERS[how.get("optimizer", "sgd")](network.parameters())
    given = {"mesh": data} if how["given"] == "mesh" else {"group": data.get_group()} if how["given"] == "group" else {}
    accumulator = Accumulator(
        network, chosen, steps=2, clip_norm=CLIP, overlap=how.get("overlap", False), skip_nonfinite=True, **given
    )
    place, updates = rank // shape[-1], []
    batches = [samples(size, 100 * place + number) for number, size in enumerate(sizes[place])]
    for batch in accumulator.over(batches):
        update = accumulator.backward(LOSSES[how.get("loss", "mean")](network, batch))
        if update is not None:
            updates.append(told(update))
    return weights(network), updates


@pytest.mark.parametrize(
    ("fully", "kind", "optimizer"),
    [(False, "some", "adamw"), (False, "all", "sgd"), (True, "some", "sgd"), (True, "all", "adamw")],
)
def test_two_dimensions_are_one_process(fully: bool, kind: str, optimizer: str) -> None:
    """Data x tensors: weights, losses, norms before clipping and counts, of uneven micro-batches and windows."""
    how = {"kind": kind, "fully": fully, "given": "mesh", "optimizer": optimizer}
    assert_same(run_on_ranks(4, accumulated, UNEVEN, how), truth(UNEVEN, optimizer=optimizer), all_updates=fully)


def test_a_sum_and_a_term_of_parameters_alone() -> None:
    """Those that have samples add their share of the term; ranks with other parts of the model add none beside it."""
    how = {"kind": "some", "fully": False, "given": "mesh", "loss": "summed"}
    sizes = [[3, 1, 2, 2], [1, 4, 1, 3]]
    assert_same(run_on_ranks(4, accumulated, sizes, how), truth(sizes, loss="summed"))


def test_a_term_of_shards_beside_the_model_is_refused() -> None:
    """Its gradient would not be added up over ranks, as that of the model is."""
    how = {"kind": "some", "fully": True, "given": "mesh", "loss": "summed"}
    for error in run_on_ranks(4, accumulated, UNEVEN, how):
        assert isinstance(error, LossError), error
        assert "inside the model's forward" in str(error)


def test_what_fully_shard_was_given_is_known() -> None:
    """Nothing need be said of a mesh that it has; reduced once per update, too."""
    how = {"kind": "all", "fully": True, "given": "", "overlap": True}
    assert_same(run_on_ranks(4, accumulated, UNEVEN, how), truth(UNEVEN))


def test_a_group_says_the_same() -> None:
    """By `group=`, where ranks have a different number of windows."""
    how = {"kind": "some", "fully": False, "given": "group"}
    sizes = [[3], [1, 4, 1, 2]]
    assert_same(run_on_ranks(4, accumulated, sizes, how), truth(sizes), all_updates=False)


def test_tensor_parallelism_alone_is_one_process() -> None:
    """All ranks hold parts of one model: its norm is that of all parts, and nothing need be said."""
    how = {"kind": "all", "fully": False, "given": "", "mesh": ((2,), ("tp",))}
    assert_same(run_on_ranks(2, accumulated, [UNEVEN[0]], how), truth([UNEVEN[0]]))


def test_data_over_two_dimensions() -> None:
    """Replicas of shards of parts: `mesh["replicas", "shards"]` is one group, and not all ranks."""
    how = {"kind": "some", "fully": True, "given": "mesh", "mesh": ((2, 1, 2), ("replicas", "shards", "tp"))}
    assert_same(run_on_ranks(4, accumulated, UNEVEN, how), truth(UNEVEN))


def replicas(rank: int, sizes: Sequence[Sequence[int]]) -> Any:
    """Shard over two dimensions, which `mesh=` names."""
    network = shards(Blocks(), shape=(2, 2))
    mesh = mesh_of((2, 2), ("replicas", "shards"))
    accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=2, clip_norm=CLIP, mesh=mesh)
    updates = []
    for batch in accumulator.over([samples(size, 100 * rank + number) for number, size in enumerate(sizes[rank])]):
        update = accumulator.backward(mean(network, batch))
        if update is not None:
            updates.append(told(update))
    return whole(network), updates


def test_replicas_of_shards_by_their_mesh() -> None:
    """HSDP: all ranks of both dimensions have samples of their own."""
    sizes = [[3, 1], [1, 2], [2, 2], [1, 1]]
    assert_same(run_on_ranks(4, replicas, sizes), truth(sizes))


def plain(rank: int, sizes: Sequence[Sequence[int]]) -> Any:
    """Train a model that is whole on every rank, over all of a mesh of two dimensions."""
    network, mesh = Blocks(), mesh_of((1, 2), ("nodes", "devices"))
    accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=2, clip_norm=CLIP, mesh=mesh)
    for batch in accumulator.over([samples(size, 100 * rank + number) for number, size in enumerate(sizes[rank])]):
        accumulator.backward(mean(network, batch))
    return weights(network), []


def test_a_mesh_needs_no_parts() -> None:
    """It names ranks, as `group=` does."""
    assert_same(run_on_ranks(2, plain, UNEVEN), truth(UNEVEN), all_updates=False)


def big_steps(_: int, sizes: Sequence[Sequence[int]], fully: bool) -> Any:
    """Give each batch of this rank as its part of a big batch; ranks with the same samples give the same."""
    mesh = mesh_of()
    network = spread(mesh, "all", **({"fully": mesh["dp"]} if fully else {}))
    chosen = OPTIMIZERS["adamw"](network.parameters())
    step = BigStep(network, chosen, mean, micro_batch_size=2, clip_norm=CLIP, options=Options(mesh=mesh["dp"]))
    place, updates = mesh["dp"].get_local_rank(), []
    for number, size in enumerate(sizes[place]):
        updates.append(told(step(samples(size, 100 * place + number) if size else None)))
    return weights(network), updates


@pytest.mark.parametrize("fully", [False, True], ids=["in parts", "and sharded"])
def test_big_steps_over_a_mesh(fully: bool) -> None:
    """Cut into micro-batches on every rank; without samples, where no pass is a meeting with those that have some."""
    sizes = [[3, 5, 2], [1, 4, 3 if fully else 0]]
    true = truth([[size for size in own if size] for own in sizes], steps=1, optimizer="adamw")
    assert_same(run_on_ranks(4, big_steps, sizes, fully), true)


def overflowing(rank: int, fully: bool, scaled: bool) -> Any:
    """Have an inf come up in one rank's part of one gradient, in the second of three windows."""
    mesh = mesh_of()
    network = spread(mesh, **({"fully": mesh["dp"]} if fully else {}))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=scaled)
    given: dict[str, Any] = {"scaler": scaler, "clip_norm": 1.0} if scaled else {"skip_nonfinite": True}
    accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=1, mesh=mesh["dp"], **given)
    skipped, number = [], 0
    weight: Any = network.up.weight
    bomb: Any = float("inf") if rank == 3 else 1.0

    def explode(parameter: Any) -> None:
        if number == 1:
            parameter.grad.to_local()[-1, -1] = bomb

    weight.register_post_accumulate_grad_hook(explode)
    for number in range(3):
        update = accumulator.backward(mean(network, samples(2, 10 * (rank // 2) + number)))
        assert update is not None
        skipped.append(bool(update.skipped))
    return weights(network), skipped, scaler.get_scale()


@pytest.mark.parametrize("scaled", [False, True], ids=["skip_nonfinite", "scaler"])
@pytest.mark.parametrize("fully", [False, True], ids=["in parts", "and sharded"])
def test_an_inf_in_one_part_skips_on_all(fully: bool, scaled: bool) -> None:
    """Also on ranks that neither share samples nor parts with the one that has it."""
    found = run_on_ranks(4, overflowing, fully, scaled)
    for each in found:
        if isinstance(each, BaseException):
            raise each
        assert each[1] == [False, True, False]
        assert each[2] == (2.0**7 if scaled else 1.0)
        assert distance(each[0], found[0][0]) == 0


def failing(rank: int, who: tuple[int, ...]) -> Any:
    """Have some ranks fail in their second update."""
    mesh = mesh_of()
    network = spread(mesh)
    calls = 0

    def loss(network: nn.Module, batch: Batch) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > 1 and rank in who:
            raise ValueError("my own")
        return mean(network, batch)

    options = Options(mesh=mesh["dp"], check=False)
    step = BigStep(network, OPTIMIZERS["sgd"](network.parameters()), loss, micro_batch_size=4, options=options)
    for number in range(2):
        before = weights(network)
        try:
            step(samples(3, 10 * (rank // 2) + number))
        except RankFailed as error:
            return str(error), distance(before, [p.detach() for p in weights(network)]) if len(who) > 1 else 0.0
    return "nothing has happened"


def test_ranks_with_the_same_samples_fail_together_and_all_hear() -> None:
    """A loss that raises for their samples."""
    found = run_on_ranks(4, failing, (0, 1))
    assert [type(each) for each in found[:2]] == [ValueError, ValueError]
    for each in found[2:]:
        assert "1 of 2 ranks failed" in each[0]


def test_a_rank_that_fails_alone_leaves_none_waiting() -> None:
    """The one that waits for it inside the model loses its connection, and the others hear of that."""
    found = run_on_ranks(4, failing, (0,))
    assert isinstance(found[0], ValueError)
    assert isinstance(found[1], Exception)
    assert not any(each == "nothing has happened" for each in found)


def other_samples(rank: int, what: str) -> Any:
    """Give ranks that hold parts of one model something different."""
    mesh = mesh_of()
    network = spread(mesh)
    if what == "weights" and rank == 1:
        with torch.no_grad():
            network.norm.weight[0] += 1e-3
    accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=1, mesh=mesh["dp"])
    x, y = samples(3, rank // 2)
    if what == "counts" and rank == 1:
        y[0] = -100
    if what == "samples":
        x, y = x.roll(rank, 0), y.roll(rank, 0)
    return accumulator.backward(mean(network, (x, y)))


@pytest.mark.parametrize("what", ["counts", "samples", "weights"])
def test_ranks_with_parts_of_one_model_need_the_same_samples(what: str) -> None:
    """Other counts, another loss, other weights that each should have whole: refused on all of them."""
    for error in run_on_ranks(4, other_samples, what):
        assert isinstance(error, WindowError), error
        assert 'mesh["dp"].get_local_rank()' in str(error)


def misused(what: str) -> Any:
    """Say something about a mesh that is not so."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_module

    mesh = mesh_of()
    wanted: dict[str, Any] = {"steps": 1}
    network: Any = Blocks()
    if what == "another sharding":
        fully_shard(network.up, mesh=mesh["tp"])
        fully_shard(network, mesh=mesh["dp"])
    elif what == "outside of shards":
        network = spread(mesh)
        fully_shard(network.up, mesh=mesh["dp"])
    elif what == "replicated by hand":
        network = distribute_module(Blocks(), mesh)
        wanted["mesh"] = mesh["dp"]
    elif what == "ddp":
        network = nn.parallel.DistributedDataParallel(spread(mesh), device_mesh=mesh["dp"])
    elif what.startswith("sharded"):
        network = spread(mesh, fully=mesh["dp"])
    else:
        network = spread(mesh)
    given = {
        "whole": {"mesh": mesh},
        "sharded, whole": {"mesh": mesh},
        "sharded, other": {"group": mesh["tp"].get_group()},
        "tensors": {"mesh": mesh["tp"]},
        "both": {"mesh": mesh["dp"], "group": mesh["dp"].get_group()},
        "a name": {"mesh": "dp"},
        "overlap": {"mesh": mesh["dp"], "overlap": True},
    }
    chosen = OPTIMIZERS["sgd"](network.parameters())
    if what == "a setup":
        return Setup(model=network, optimizer=chosen, data=[samples(1, 0)], batch_size=1)
    return Accumulator(network, chosen, **{**wanted, **given.get(what, {})})


MISUSED = {
    "nothing": 'mesh=mesh["dp"]',
    "whole": 'mesh=mesh["dp"]',
    "tensors": 'mesh=mesh["dp"]',
    "sharded, whole": 'mesh=mesh["dp"]',
    "sharded, other": 'mesh=mesh["dp"]',
    "both": "Give one of them",
    "a name": "DeviceMesh",
    "overlap": "Take overlap=True out",
    "ddp": 'Accumulator(model, optimizer, ..., mesh=mesh["dp"])',
    "another sharding": "shard all of it over one mesh",
    "outside of shards": "fully_shard(model)",
    "replicated by hand": "fully_shard",
    "a setup": "Give the plain model",
}


def all_misused(_: int) -> list[Any]:
    """Try all of them, one after the other."""
    found: list[Any] = []
    for what in MISUSED:
        try:
            found.append(misused(what))
        except BigBatchError as error:  # noqa: PERF203 - what is looked for
            found.append(error)
    return [each if isinstance(each, BigBatchError) else repr(each) for each in found]


def test_what_a_mesh_cannot_be_is_refused() -> None:
    """Each with what to type."""
    for found in run_on_ranks(4, all_misused):
        assert isinstance(found, list), found
        for (what, words), error in zip(MISUSED.items(), found, strict=True):
            assert isinstance(error, ConfigurationError), (what, error)
            assert words in str(error), (what, error)


def test_a_mesh_needs_processes() -> None:
    """Before they are there, nobody can be named."""
    network = Blocks()
    with pytest.raises(ConfigurationError, match=r"mesh= needs torch\.distributed"):
        Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=1, mesh="dp")  # type: ignore[arg-type]


def in_low_precision(_: int, fully: bool) -> Any:
    """Return the gradient of eight micro-batches of bf16 parameters, and the mean of those of each alone."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    mesh, network = mesh_of(), Blocks().to(torch.bfloat16)
    parallelize_module(network, mesh["tp"], plan("all"))
    if fully:
        fully_shard(network, mesh=mesh["dp"])
    accumulator = Accumulator(network, torch.optim.SGD(network.parameters(), lr=0.0), steps=1, mesh=mesh["dp"])
    seen: list[list[Tensor]] = []
    every: list[Any] = list(network.parameters())
    accumulator.before_step(lambda: seen.append([p.grad.full_tensor().clone() for p in every]))
    for steps in (1, 8):
        accumulator.steps = steps
        for number in range(8):
            x, y = samples(2, 10 * mesh["dp"].get_local_rank() + number)
            scores = network(x.bfloat16()).float().flatten(0, 1)
            accumulator.backward(F.cross_entropy(scores, y.flatten().clamp(min=0)))
    *alone, together = seen
    return [sum(each) / 8 for each in zip(*alone, strict=True)], together


@pytest.mark.parametrize("fully", [False, True], ids=["in parts", "and sharded"])
def test_low_precision_adds_up_in_float32(fully: bool) -> None:
    """Where a parameter is in parts, too, and its gradient in summands."""
    for each in run_on_ranks(4, in_low_precision, fully):
        if isinstance(each, BaseException):
            raise each
        alone, together = each
        assert all(gradient.dtype == torch.float32 for gradient in together)
        assert distance(together, alone) <= 1e-6


def parallel_loss(_: int, whole_value: bool) -> Any:
    """Have scores stay in parts up to the loss, which is then a DTensor."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

    mesh, network = mesh_of(), Blocks()
    head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(network, mesh["tp"], {**plan("all"), "head": head})
    chosen = OPTIMIZERS["sgd"](network.parameters())
    accumulator = Accumulator(network, chosen, steps=2, clip_norm=CLIP, mesh=mesh["dp"])
    place = mesh["dp"].get_local_rank()
    updates = []
    with loss_parallel():
        for number, size in enumerate([[3, 1], [1, 2]][place]):
            loss: Any = mean(network, samples(size, 100 * place + number))
            updates.append(accumulator.backward(loss.full_tensor() if whole_value else loss))
    return weights(network), [told(updates[-1])]


def test_a_loss_of_scores_in_parts() -> None:
    """Is read through its DTensors, given its value."""
    assert_same(run_on_ranks(4, parallel_loss, True), truth([[3, 1], [1, 2]]))


def test_a_loss_in_parts_is_refused() -> None:
    """With what to type."""
    for error in run_on_ranks(4, parallel_loss, False):
        assert isinstance(error, LossError), error
        assert "loss.full_tensor()" in str(error)


def coupled(rank: int) -> Any:
    """Have samples meet inside a model in parts."""
    mesh = mesh_of()
    network = spread(mesh)
    chosen = OPTIMIZERS["sgd"](network.parameters())
    step = BigStep(network, chosen, meeting, micro_batch_size=2, options=Options(mesh=mesh["dp"]))
    return step(samples(4, rank // 2))


def meeting(network: nn.Module, batch: Batch) -> Tensor:
    """A loss of a mean over all samples."""
    centre: Tensor = across.mean(network(batch[0]))
    return centre.pow(2).sum()


def test_coupled_samples_are_refused() -> None:
    """They would wait for each other where ranks already do."""
    for error in run_on_ranks(4, coupled):
        assert isinstance(error, ConfigurationError), error
        assert "tensor parallelism" in str(error)


def two_groups(rank: int) -> Any:
    """Have some ranks train a model of their own beside that of all."""
    pair = dist.new_group([0, 1])
    mine, ours = nn.Linear(2, 1), nn.Linear(2, 1)
    for each in (mine, ours):
        nn.init.ones_(each.weight)
        nn.init.ones_(each.bias)
    if rank < 2:
        alone = Accumulator(mine, torch.optim.SGD(mine.parameters(), lr=0.1), steps=1, group=pair)
        alone.backward(mine(torch.ones(rank + 1, 2)).mean())
    accumulator = Accumulator(ours, torch.optim.SGD(ours.parameters(), lr=0.1), steps=1, group=dist.group.WORLD)
    update = accumulator.backward(ours(torch.ones(rank + 1, 2)).mean())
    return None if update is None else float(update.count)  # type: ignore[arg-type]


def test_ranks_may_have_accumulators_that_others_have_no_part_in() -> None:
    """What closes is told apart by group."""
    assert run_on_ranks(3, two_groups) == [6.0] * 3
