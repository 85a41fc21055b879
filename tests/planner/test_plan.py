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

from bigbatch.errors import BigBatchError
from bigbatch.memory.search import Choice, Probe
from bigbatch.planner.measure import plan
from bigbatch.planner.plan_report import Plan, advice
from tests.support.bombs import seed
from tests.support.commands import run, written
from tests.support.messages import approve

Batch = tuple[Tensor, Tensor]
GIB = 1 << 30


def model() -> nn.Sequential:
    """A model that draws and keeps statistics."""
    return nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 10))


def batch(size: int = 64) -> Batch:
    """One big batch."""
    return torch.randn(size, 64), torch.randint(10, (size,))


def loss_fn(network: nn.Module, samples: Batch) -> Tensor:
    """A mean over the samples; a BatchNorm wants two."""
    network.train(len(samples[1]) > 1)
    return F.cross_entropy(network(samples[0]), samples[1])


class Restless(torch.optim.SGD):
    """An optimizer whose step draws from every generator, as one that samples weights does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Move, and add noise."""
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=random.random() * np.random.rand())  # noqa: NPY002, S311 - those restored


@pytest.mark.parametrize("memory", [None, "1GiB"], ids=["measured", "traced"])
def test_a_plan_leaves_everything_as_it_was(memory: str | None) -> None:
    """Parameters, gradients, buffers and generators, whoever draws from them; an optimizer without state has none."""
    network = model()
    optimizer = Restless(network.parameters(), lr=0.1, momentum=0.9)
    gradient = network[0].weight.grad = torch.ones(256, 64)
    before = {name: t.clone() for name, t in network.state_dict().items()}

    def noisy(network: nn.Module, samples: Batch) -> Tensor:
        return loss_fn(network, samples) * (1 + random.random() + np.random.rand())  # noqa: NPY002, S311

    def draw() -> tuple[float, float, float]:
        return float(torch.rand(())), random.random(), float(np.random.rand())  # noqa: NPY002, S311

    samples = batch()
    seed()
    numbers = draw()
    seed()
    plan(network, noisy, samples, optimizer=optimizer, memory=memory)
    assert draw() == numbers
    assert all(torch.equal(t, before[name]) for name, t in network.state_dict().items())
    assert network[0].weight.grad is gradient
    assert network[4].weight.grad is None
    assert (gradient == 1).all()
    assert not optimizer.state


def test_a_plan_that_is_measured() -> None:
    """At most six probes, sizes up to the batch, peaks and times for each."""
    asked: list[int] = []
    found = plan(model(), loss_fn, batch(), on_probe=asked.append)
    assert 1 <= len(asked) <= 6
    assert [row.size for row in found.rows] == sorted(asked)
    assert found.size in asked
    assert all(row.measured_bytes and row.seconds_per_sample for row in found.rows)
    assert found.budget > found.resident_bytes > 0
    text = str(found)
    assert "measured peak" in text
    assert "<- take this" in text
    assert "The whole batch fits" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would be measured")
def test_a_plan_for_a_gpu_that_is_not_here() -> None:
    """Bytes without a GPU are traced: the largest size that fits, inside its margin."""
    network = model()
    optimizer = torch.optim.AdamW(network.parameters())
    whole = plan(network, loss_fn, batch(100_000), optimizer=optimizer, memory="24GiB")
    assert (whole.measured, whole.size, whole.steps) == (False, 100_000, 1)
    assert whole.peak_bytes is not None
    tight = plan(network, loss_fn, batch(100_000), optimizer=optimizer, memory=whole.peak_bytes // 2)
    assert tight.size is not None
    assert tight.steps is not None
    assert tight.peak_bytes is not None
    assert 1 < tight.steps < 10
    assert tight.peak_bytes <= 0.9 * tight.budget
    assert any("Predicted by tracing" in note for note in tight.notes)
    assert "measured peak" not in str(tight)
    assert "ms/sample" not in str(tight)


def test_what_does_not_fit_is_said() -> None:
    """As a step would say it."""
    deep = plan(nn.Linear(16, 16), lambda m, x: m(x).relu().sum(), torch.empty(8, 1 << 20, 16), memory="150MiB")
    assert deep.size is None
    assert "Not one sample" in str(deep)
    approve("plan", "nothing fits", "\n".join(deep.advice))


# The size, the largest, and probes of (size, peak, seconds).
CHOICES: dict[str, tuple[int, int, list[tuple[int, int | None, float]]]] = {
    "all fits": (8, 8, [(1, 20, 1.0), (8, 90, 2.0)]),
    "a part is faster": (2, 8, [(1, 20, 1.0), (2, 30, 1.0), (8, 90, 6.0)]),
}


@pytest.mark.parametrize("name", CHOICES)
def test_advice(name: str) -> None:
    """Where accumulation is not needed."""
    size, largest, probes = CHOICES[name]
    (said,) = advice(Choice(size, largest, tuple(Probe(*each) for each in probes), 100, 100))
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


def test_a_loss_that_a_step_would_refuse_is_said() -> None:
    """A plan for a contrastive loss that does not ask for others."""
    network = nn.Linear(4, 3)
    found = plan(network, lambda m, b: F.cross_entropy(m(b) @ m(b).T, torch.arange(len(b))), torch.randn(8, 4))
    assert found.refused
    assert any(note.startswith("A step would refuse this loss: the samples of") for note in found.notes)


def test_the_command_prints_table_advice_and_what_is_next(tmp_path: Path) -> None:
    """In this order, inside eighty columns."""
    file = written(tmp_path)
    result = run("plan", file)
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    places = [text.index(part) for part in ("mine.py: Batch of 16", "micro-batch steps", "<- take this", "Next: ")]
    assert places == sorted(places)
    assert max(len(line) for line in result.stdout.splitlines() if not line.startswith("Next")) <= 80


def test_json_is_all_that_is_on_stdout(tmp_path: Path) -> None:
    """Also where the file prints."""
    file = written(tmp_path)
    result = run("plan", file, "--json", "--batch-size", "12", "--memory", "0.9")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    assert (found["batch_size"], found["measured"]) == (12, True)
    assert set(found) == {"file", *Plan.__dataclass_fields__}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would be measured")
def test_memory_of_a_gpu_on_the_command_line(tmp_path: Path) -> None:
    """Traced; and where nothing fits, the exit status says so."""
    file = written(tmp_path)
    result = run("plan", file, "--memory", "24GiB")
    assert result.exit_code == 0, result.output
    assert "Predicted by tracing" in " ".join(result.stdout.split())
    assert run("plan", file, "--memory", "1MiB").exit_code == 1
    misused = run("plan", file, "--memory", "24")
    assert misused.exit_code == 2
    assert "is neither a fraction" in misused.stderr
    assert "hint:" in misused.stderr


@pytest.mark.cuda
def test_a_gpu_is_measured_inside_its_budget() -> None:
    """A budget is kept, and one larger than the device is traced."""
    network = model().to("cuda")
    found = plan(network, loss_fn, batch(4096), memory="1GiB")
    assert found.measured
    assert found.peak_bytes is not None
    assert found.peak_bytes <= GIB
    assert not plan(network, loss_fn, batch(64), memory="4TiB").measured
