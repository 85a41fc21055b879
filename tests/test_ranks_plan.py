"""What a plan says several ranks cost is what they are seen to send and to hold."""

import inspect
import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.profiler_util import FunctionEvent
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from benchmarks.wire_counting import _BYTES as BYTES
from bigbatch import Accumulator, Setup, plan
from bigbatch.errors import ConfigurationError, RankFailed
from bigbatch.ranks.costs import Collective, Costs, Way, costs
from bigbatch.ranks.groups import local
from bigbatch.recipes.training import train_setup
from tests.launched import assert_ended, torchrun
from tests.ranks import run_on_ranks
from tests.test_ranks_sharded import shards

STATEMENT = 40 * 8  # bytes of what ranks tell each other when a window closes
Counted = Counter[tuple[str, int]]  # kind and bytes of each thing that ranks did together


def odd() -> nn.Sequential:
    """Sizes that no number of ranks divides, and a part that is not trained."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 3), nn.Linear(3, 3, bias=False))
    model[0].weight.requires_grad = False
    return model


def sharded(**named: Any) -> nn.Module:
    """Shard two layers by themselves, and the rest with the whole."""
    model = odd()
    return shards(model, [model[1], model[3]], **named)


def once() -> nn.Module:
    """Shard all of a model in one piece."""
    return shards(odd())


def replicas() -> nn.Module:
    """Have two replicas of two shards each."""
    return sharded(shape=(2, 2))


def kept() -> nn.Module:
    """Keep weights from a forward to its backward."""
    return sharded(reshard_after_forward=False)


def freed() -> nn.Module:
    """Free weights after the forward, those of the outermost module, too."""
    return sharded(reshard_after_forward=True)


def freed_in_part() -> nn.Module:
    """Share weights among fewer ranks between forward and backward."""
    return sharded(reshard_after_forward=2)


def mixed() -> nn.Module:
    """Compute in bfloat16 and reduce in float32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def low() -> nn.Module:
    """Compute and reduce in bfloat16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def offloaded() -> nn.Module:
    """Keep shards in the host's memory."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    return sharded(offload_policy=CPUOffloadPolicy(pin_memory=False))


def wrapped() -> nn.Module:
    """Wrap a whole model."""
    return DistributedDataParallel(odd())


Made = Callable[[], nn.Module]
EVERYWHERE: list[Made] = [sharded, once, kept, freed, mixed, low, offloaded, wrapped]
AMONG_FOUR: list[Made] = [sharded, replicas, freed_in_part, wrapped]


def counted(rank: int, make: Made, steps: int, overlap: bool) -> tuple[Costs, Counted, int]:
    """Foretell the costs of a model, then train it and count them: a window's collectives, and its gradients' bytes."""
    model = make()
    found = costs([model], [model] if isinstance(model, DistributedDataParallel) else [], steps)
    assert found is not None
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    accumulator = Accumulator(model, optimizer, steps=steps, overlap=overlap)
    held = [0]

    def window() -> None:
        for number in range(steps):
            accumulator.backward(F.cross_entropy(model(torch.randn(4, 5)).float(), torch.tensor([0, 1, 2, rank % 3])))
            if number == 0 and steps > 1:
                held.append(gradients_held(model))

    window()
    window()  # DDP lays out its buckets anew after the first
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as seen:
        window()
        dist.barrier()  # what is under way has arrived, and is written down
    return found, messages(seen), held[-1]


def messages(seen: Any) -> Counted:
    """Return all that was sent, by its kind and the bytes of the whole; gloo reduces for all what it then scatters."""
    made: Counted = Counter()
    reduced: Counter[int] = Counter()
    for event in seen.events():
        sizes = [
            math.prod(s) * BYTES[t] for s, t in zip(event.input_shapes, event.input_dtypes, strict=True) if t in BYTES
        ]
        if event.name == "c10d::_allgather_base_":
            made["all-gather", sizes[0]] += 1
        elif event.name == "c10d::_reduce_scatter_base_":
            made["reduce-scatter", sizes[1]] += 1
            reduced[sizes[1]] -= 1
        elif event.name == "gloo:all_reduce":
            reduced[sizes[0]] += 1
    for size, number in reduced.items():
        if number:
            made["all-reduce", size] += number
    return made


def gradients_held(model: Any) -> int:
    """Return the bytes of gradients between two micro-batches, on this rank: of all storages, as they are."""
    from bigbatch.ranks.groups import groups_of
    from bigbatch.ranks.groups import sharded as parts_of

    gradients: list[Any] = [p.grad for p in model.parameters()]
    for each in (p for part in parts_of([model]) for group in groups_of(part) for p in group.fsdp_params):
        gradients += [each.unsharded_accumulated_grad, getattr(getattr(each, "_unsharded_param", None), "grad", None)]
    plain = [g.to_local() if hasattr(g, "to_local") else g for g in gradients if g is not None]
    storages = {g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for g in plain}
    return sum(storages.values())


def foretold(way: Way) -> Counted:
    """Return what a way of reducing was said to send, and the message of every update."""
    made: Counted = Counter({("all-reduce", STATEMENT): 1})
    for each in way.collectives:
        made[each.kind, each.bytes] += each.times
    return made


def on_one(rank: int, makes: list[Made], steps: int) -> dict[tuple[Made, bool], Any]:
    """Do so with several models, in both ways."""
    return {(make, overlap): counted(rank, make, steps, overlap) for make in makes for overlap in (False, True)}


@pytest.fixture(scope="module")
def every() -> dict[int, list[dict[tuple[str, bool], tuple[Costs, Counted, int]]]]:
    """What was said and what was seen, by the number of ranks."""
    if "input_dtypes" not in inspect.signature(FunctionEvent.__init__).parameters:
        pytest.skip("this torch's profiler does not tell the types of what is sent, so bytes cannot be counted")
    found = {2: run_on_ranks(2, on_one, EVERYWHERE, 3), 4: run_on_ranks(4, on_one, AMONG_FOUR, 2)}
    for each in (each for of_all in found.values() for each in of_all):
        if isinstance(each, BaseException):
            raise each
    return found


WHERE = [(2, make) for make in EVERYWHERE] + [(4, make) for make in AMONG_FOUR]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("ranks", "make"), WHERE, ids=lambda what: getattr(what, "__name__", str(what)))
def test_ranks_send_and_hold_what_was_foretold(every: Any, ranks: int, make: Made, overlap: bool) -> None:
    """Every collective of a window, and gradients between two micro-batches; also where a rank's part is empty."""
    for said, sent, held in (each[make, overlap] for each in every[ranks]):
        way = said.ways[overlap and len(said.ways) > 1]
        assert sent == foretold(way)
        assert held == way.gradients_held
        assert (said.ranks, said.micro_batches) == (ranks, 3 if ranks == 2 else 2)


def planned(rank: int, kind: str, batches: list[int]) -> Any:
    """Plan on one rank; return what it says, and what has changed."""
    model = sharded() if kind == "fully_shard" else wrapped()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    before = [local(p.detach()).clone() for p in model.parameters()]
    accumulator = Accumulator(model, optimizer, steps=2, overlap=True)  # whose settings are to stay
    batch = torch.randn(batches[rank], 5)
    random = torch.get_rng_state()
    found = plan(model, lambda m, b: F.cross_entropy(m(b), torch.zeros(len(b)).long()), batch, optimizer=optimizer)
    assert torch.equal(random, torch.get_rng_state())
    assert all(
        torch.equal(local(p.detach()), was) and p.grad is None
        for p, was in zip(model.parameters(), before, strict=True)
    )
    assert not optimizer.state
    held = gradients_held(model)
    for _ in range(2):  # and go on as before
        accumulator.backward(F.cross_entropy(model(torch.randn(4, 5)), torch.tensor([0, 1, 2, 0])))
    return found, held


def results(found: list[Any]) -> list[Any]:
    """Raise what a rank has raised."""
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return found


def test_sharded_models_are_planned_by_all_ranks_together() -> None:
    """The same sizes, peaks and costs on all, for the largest of their parts; and nothing is left of it."""
    (one, held), (other, _) = results(run_on_ranks(2, planned, "fully_shard", [12, 16]))
    assert not held
    assert [(row.size, row.measured_bytes) for row in one.rows] == [
        (row.size, row.measured_bytes) for row in other.rows
    ]
    assert (one.batch_size, one.size, one.ranks) == (16, other.size, other.ranks)
    assert (one.ranks.wrapper, one.ranks.ranks) == ("fully_shard", 2)
    assert [way.how for way in one.ranks.ways] == ["the default", "overlap=True"]
    text = str(one)
    assert "Batch of 16 on each of 2 ranks" in text
    assert "each of 2 ranks sends these bytes for weights and for gradients" in text
    assert "overlap=True" in text


def test_models_in_ddp_are_planned_by_each_rank_alone() -> None:
    """Nothing is sent for it; one reduction per update is foretold."""
    (one, _), (other, _) = results(run_on_ranks(2, planned, "ddp", [16, 8]))
    assert (one.batch_size, other.batch_size) == (16, 8)
    (way,) = one.ranks.ways
    assert (way.name, way.weights_sent, way.sent) == ("once per update", 0, way.gradients_held)


def wanted_elsewhere(_: int) -> Any:
    """Plan a sharded model for a device that is not here."""
    return plan(once(), lambda m, b: m(b).sum(), torch.randn(4, 5), memory="24GiB")


def test_a_sharded_model_cannot_be_planned_for_a_device_that_is_not_here() -> None:
    """Its passes cannot be traced."""
    for error in run_on_ranks(2, wanted_elsewhere):
        assert isinstance(error, ConfigurationError), error
        assert "memory=0.8" in str(error)


def out_of_memory(rank: int, on: tuple[int, ...]) -> Any:
    """Plan where two samples are too many, on some ranks."""

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if len(batch) > 1 and rank in on:
            raise torch.OutOfMemoryError
        loss: torch.Tensor = model(batch).square().mean()
        return loss

    return plan(once(), loss_fn, torch.randn(64, 5))


def test_a_pass_of_all_ranks_that_runs_out_of_memory_ends_the_plan() -> None:
    """It cannot be taken back; a smaller budget keeps away from it."""
    for error in run_on_ranks(2, out_of_memory, (0, 1)):
        assert isinstance(error, RankFailed), error
        assert "a pass of 8 samples" in str(error)
        assert "memory=0.8" in str(error)


def test_a_rank_that_runs_out_of_memory_alone_ends_the_plan_of_all() -> None:
    """Others wait for it inside the model, and hear of it when its process ends: not when torch's patience does."""
    one, other = run_on_ranks(2, out_of_memory, (1,), limit=15.0)  # seconds: less than torch would wait
    assert isinstance(one, RankFailed), one
    assert "may have run out of memory" in str(one)
    assert isinstance(other, RankFailed), other
    assert "a pass of 8 samples" in str(other)
    assert "memory=0.8" in str(one)


def test_bytes_are_those_of_a_ring() -> None:
    """Three quarters of what four ranks gather or scatter, and twice that of what they reduce for all."""
    assert Collective("all-gather", 400, 4, 3).sent == 900
    assert Collective("reduce-scatter", 400, 4, 1).sent == 300
    assert Collective("all-reduce", 400, 4, 1).sent == 600


def test_fewer_micro_batches_cost_less_and_once_is_cheapest(every: Any) -> None:
    """The trade that a plan shows: what is sent falls, what is held rises."""
    for said, _, _ in (each[sharded, False] for each in every[2]):
        by_default, once_only = said.ways
        assert by_default.gradients_sent == 3 * once_only.gradients_sent
        assert by_default.weights_sent == once_only.weights_sent
        assert by_default.gradients_held < once_only.gradients_held


FILE = """\
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset
from bigbatch import Setup

def setup():
    print("a file that prints")
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    if SHARDED:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (model[0], model):
            fully_shard(part, mesh=mesh)
    return Setup(
        model=model,
        loss_fn=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=torch.optim.AdamW(model.parameters()),
        data=TensorDataset(torch.randn(128, 64), torch.randint(10, (128,))),
        batch_size=64,
    )
"""


def test_the_command_on_several_ranks_prints_once(tmp_path: Path) -> None:
    """A sharded model by all of them, as JSON and as a page."""
    file, page = tmp_path / "mine.py", tmp_path / "plan.html"
    file.write_text(FILE.replace("SHARDED", "True"))
    result = torchrun(2, "-m", "bigbatch", "plan", str(file), "--json", "--html", str(page))
    assert_ended(result)
    found = json.loads(result.stdout)
    assert found["batch_size"] == 32
    assert [way["name"] for way in found["ranks"]["ways"]] == ["every micro-batch", "once per update"]
    assert result.stderr.count("a file that prints") == 1
    assert "Between ranks" in page.read_text()
    assert "overlap=True" in page.read_text()


def test_the_command_says_what_ranks_with_a_whole_model_send(tmp_path: Path) -> None:
    """As `bigbatch train` shares it: one reduction per update."""
    file = tmp_path / "mine.py"
    file.write_text(FILE.replace("SHARDED", "False"))
    result = torchrun(2, "-m", "bigbatch", "plan", str(file))
    assert_ended(result)
    text = " ".join(result.stdout.split())
    assert text.count("Batch of 32 on each of 2 ranks") == 1
    assert "once per update 0 B 150 KiB 150 KiB 150 KiB the default" in text
    assert "Next: torchrun --nproc-per-node 2 -m bigbatch train" in text


def trained(_: int) -> Any:
    """Have a sharded model trained as a file is."""
    model = once()
    return train_setup(Setup(model=model, optimizer=torch.optim.SGD(model.parameters()), data=[0], batch_size=1))


def test_a_sharded_model_is_not_trained_by_the_command() -> None:
    """It says where to look."""
    for error in run_on_ranks(2, trained):
        assert isinstance(error, ConfigurationError), error
        assert "examples/ranks/fsdp2.py" in str(error)


def planned_on_a_gpu(_: int, offloads: bool) -> Any:
    """Plan a sharded model on a GPU that two processes share."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    torch.cuda.set_device(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 256)).cuda()
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for part in (model[0], model):
        fully_shard(part, mesh=mesh, offload_policy=CPUOffloadPolicy() if offloads else OffloadPolicy())
    optimizer, batch = torch.optim.AdamW(model.parameters()), torch.randn(4096, 256, device="cuda")
    return plan(model, lambda m, b: m(b).square().mean(), batch, optimizer=optimizer, memory=0.05)


@pytest.mark.cuda
@pytest.mark.parametrize("offloads", [False, True])
def test_a_sharded_model_is_measured_on_its_gpu(offloads: bool) -> None:
    """By all ranks; offloaded shards of gradients wait in host memory, and whole ones on the GPU."""
    one, other = results(run_on_ranks(2, planned_on_a_gpu, offloads, start="spawn"))
    assert one.measured
    assert one.rows[0].measured_bytes == other.rows[0].measured_bytes
    assert one.rows[0].measured_bytes < one.rows[-1].measured_bytes
    assert one.ranks == other.ranks
    assert one.ranks.ways[0].held_on == ("cpu" if offloads else "cuda")
