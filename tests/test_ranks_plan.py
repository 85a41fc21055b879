"""What a plan says several ranks cost is what they are seen to send and to hold."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from benchmarks.wire_counting import _BYTES as BYTES
from bigbatch import Accumulator
from bigbatch.ranks.costs import Costs, Way, costs
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
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
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
