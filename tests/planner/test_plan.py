"""A plan, in Python and on the command line."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import across
from bigbatch.errors import BigBatchError
from bigbatch.memory.search import Choice, Probe
from bigbatch.planner.measure import plan
from bigbatch.planner.plan_report import Plan, advice
from tests.support.bombs import seed
from tests.support.commands import assert_in_order, run, written
from tests.support.messages import approve

Batch = tuple[Tensor, Tensor]
on_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would be measured")


def model() -> nn.Sequential:
    """A model that draws."""
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 10))


def normed() -> nn.Sequential:
    """A model with BatchNorm."""
    return nn.Sequential(nn.Linear(64, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 4))


class Asking(nn.Module):
    """Takes the batch's mean from each sample between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 512), nn.Linear(512, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 64) → (n, 4)."""
        h = torch.tanh(self.first(x))
        found: Tensor = self.last(h - across.mean(h.mean(0)))
        return found


def batch(size: int = 64) -> Batch:
    """One big batch."""
    return torch.randn(size, 64), torch.randint(4, (size,))


def loss_fn(network: Any, samples: Batch) -> Tensor:
    """A mean over the samples."""
    return F.cross_entropy(network(samples[0]), samples[1])


def contrast(network: Any, samples: Batch) -> Tensor:
    """A contrastive loss that asks for the others."""
    out = network(samples[0])
    return F.cross_entropy(out @ across.gather(out).T, across.offset() + torch.arange(len(out)))


class Restless(torch.optim.SGD):
    """An optimizer whose step draws from every generator, as one that samples weights does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Move, and add noise."""
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=random.random() * np.random.rand())  # noqa: NPY002, S311 - those restored


def draw() -> tuple[float, float, float]:
    """One number of each generator."""
    return float(torch.rand(())), random.random(), float(np.random.rand())  # noqa: NPY002, S311 - those restored


@pytest.mark.parametrize("memory", [None, "1GiB"], ids=["measured", "traced"])
def test_a_plan_leaves_everything_as_it_was(memory: str | None) -> None:
    """Parameters, gradients, buffers and generators, whoever draws from them; an optimizer without state has none."""
    network: Any = nn.Sequential(*normed(), nn.Dropout(0.1))
    optimizer = Restless(network.parameters(), lr=0.1, momentum=0.9)
    gradient = network[0].weight.grad = torch.ones(512, 64)
    before = {name: t.clone() for name, t in network.state_dict().items()}
    samples = batch()
    seed()
    numbers = draw()
    seed()
    plan(network, lambda m, b: loss_fn(m, b) * (1 + sum(draw())), samples, optimizer=optimizer, memory=memory)
    assert draw() == numbers
    assert all(torch.equal(t, before[name]) for name, t in network.state_dict().items())
    assert network[0].weight.grad is gradient
    assert network[3].weight.grad is None
    assert (gradient == 1).all()
    assert not optimizer.state


def test_a_plan_that_is_measured() -> None:
    """At most six probes, sizes up to the batch, peaks and times for each."""
    asked: list[int] = []
    found = plan(model(), loss_fn, batch(), on_probe=asked.append)
    assert 1 <= len(asked) <= 6
    assert [row.size for row in found.rows] == sorted(asked)
    assert found.size in asked
    assert all(row.peak_bytes and row.seconds_per_sample for row in found.rows)
    assert found.budget > found.resident_bytes > 0
    assert "measured peak" in str(found)


@on_a_cpu
def test_a_plan_for_a_gpu_that_is_not_here() -> None:
    """Bytes without a GPU are traced: the largest size that fits, inside its margin."""
    network = model()
    optimizer = torch.optim.AdamW(network.parameters())
    whole = plan(network, loss_fn, batch(100_000), optimizer=optimizer, memory="24GiB")
    assert (whole.measured, whole.size, whole.steps) == (False, 100_000, 1)
    assert whole.peak_bytes is not None
    tight = plan(network, loss_fn, batch(100_000), optimizer=optimizer, memory=whole.peak_bytes // 2)
    assert 1 < (tight.steps or 0) < 10
    assert 0 < (tight.peak_bytes or 0) <= 0.9 * tight.budget
    assert "Predicted by tracing" in str(tight)
    assert "measured peak" not in str(tight)
    assert "ms/sample" not in str(tight)


@on_a_cpu
@pytest.mark.parametrize(("make", "loss"), [(Asking, loss_fn), (normed, loss_fn), (lambda: nn.Linear(64, 4), contrast)])
def test_coupled_samples_are_taken_whole_or_wait_for_each_other(make: Any, loss: Any) -> None:
    """As BigStep does; one sample at a time is tried, too, as it would run beside others. The model is as before."""
    network = make()
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    for memory in ("4GiB", None):
        whole = plan(network, loss, batch(256), memory=memory)
        assert (whole.size, whole.steps, whole.refused) == (256, 1, False)
        assert "BigStep takes all at once" in str(whole)
    if loss is loss_fn:
        cut = plan(network, loss, batch(4096), memory="90MiB")
        assert cut.rows[0].size == 1
        assert (cut.steps or 0) > 1
        assert not cut.refused
        assert "couples the samples" in str(cut)
        assert "BigStep runs micro-batches in lock-step" in str(cut)
    assert all(torch.equal(tensor, state[name]) for name, tensor in network.state_dict().items())


def test_what_does_not_fit_or_would_be_refused_is_said() -> None:
    """As a step would say it: one sample too many, and a contrastive loss that does not ask for others."""
    network = nn.Linear(4, 3)
    found = plan(network, lambda m, b: F.cross_entropy(m(b) @ m(b).T, torch.arange(len(b))), torch.randn(8, 4))
    assert found.refused
    assert any(note.startswith("A step would refuse this loss: the samples of") for note in found.notes)
    deep = plan(nn.Linear(16, 16), lambda m, x: m(x).relu().sum(), torch.empty(8, 1 << 20, 16), memory="150MiB")
    assert deep.size is None
    assert "Not one sample" in str(deep)
    approve("plan", "nothing fits", "\n".join(deep.advice))


@pytest.mark.parametrize(("name", "size"), [("all fits", 8), ("a part is faster", 2)])
def test_advice(name: str, size: int) -> None:
    """Where accumulation is not needed."""
    probes = Probe(1, 20, 1.0), Probe(2, 30, 1.0), Probe(8, 90, 6.0)
    (said,) = advice(Choice(size, 8, probes, 100))
    approve("plan", name, said)


REFUSED: dict[str, tuple[nn.Module, Any, str | None]] = {
    "no names": (nn.Linear(64, 10), None, None),
    "no unit": (nn.Linear(64, 10), loss_fn, "20"),
    "no parameters": (nn.ReLU(), loss_fn, None),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_planned(name: str) -> None:
    """Errors say what was found and what to write."""
    network, loss, memory = REFUSED[name]
    with pytest.raises(BigBatchError) as caught:
        plan(network, loss, batch(), memory=memory)
    approve("plan", name, caught.value)


def test_the_command_prints_table_advice_and_what_is_next(tmp_path: Path) -> None:
    """In this order, inside eighty columns; as JSON all that is on stdout is one object, also where the file prints."""
    file = written(tmp_path)
    assert_in_order(run("plan", file), "mine.py: Batch of 16", "micro-batch steps", "<- take this", "Next: ")
    result = run("plan", file, "--json", "--batch-size", "12", "--memory", "0.9")
    found: dict[str, Any] = json.loads(result.stdout)
    assert (found["batch_size"], found["measured"]) == (12, True)
    assert set(found) == {"file", *Plan.__dataclass_fields__}


@on_a_cpu
def test_memory_of_a_gpu_on_the_command_line(tmp_path: Path) -> None:
    """Traced; and where nothing fits, the exit status says so."""
    file = written(tmp_path)
    assert_in_order(run("plan", file, "--memory", "24GiB"), "Predicted by tracing")
    assert run("plan", file, "--memory", "1MiB").exit_code == 1
    assert_in_order(run("plan", file, "--memory", "24"), "is neither a fraction", "hint:", status=2)


@pytest.mark.cuda
def test_a_gpu_is_measured_inside_its_budget() -> None:
    """A budget is kept, and one larger than the device is traced."""
    network = model().to("cuda")
    found = plan(network, loss_fn, batch(4096), memory="1GiB")
    assert found.measured
    assert 0 < (found.peak_bytes or 0) <= 1 << 30
    assert not plan(network, loss_fn, batch(64), memory="4TiB").measured
