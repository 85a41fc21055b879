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
from typer.testing import CliRunner, Result

from bigbatch.cli import app
from bigbatch.errors import BatchError, ConfigurationError
from bigbatch.memory.search import Choice, Probe
from bigbatch.planner.measure import make_plan, plan
from bigbatch.planner.plan_report import Plan, advice
from tests.bombs import seed

Batch = tuple[Tensor, Tensor]
GIB = 1 << 30

FILE = """\
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset
from bigbatch import Setup

def setup():
    print("a file that prints")
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    return Setup(
        model=model,
        loss_fn=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=torch.optim.AdamW(model.parameters()),
        data=TensorDataset(torch.randn(128, 64), torch.randint(10, (128,))),
        batch_size=32,
    )
"""


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


def test_a_plan_leaves_everything_as_it_was() -> None:
    """Parameters, gradients, buffers, generators; an optimizer without state still has none."""
    network, samples = model(), batch()
    optimizer = torch.optim.AdamW(network.parameters())
    gradient = network[0].weight.grad = torch.ones(256, 64)
    before = {name: t.clone() for name, t in network.state_dict().items()}
    random = torch.get_rng_state()
    found = plan(network, loss_fn, samples, optimizer=optimizer)
    assert found.measured
    assert all(torch.equal(t, before[name]) for name, t in network.state_dict().items())
    assert network[0].weight.grad is gradient
    assert network[4].weight.grad is None
    assert (gradient == 1).all()
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), random)


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
def test_a_plan_leaves_the_generators_as_they_were(memory: str | None) -> None:
    """Whoever draws from them: the model, the loss or the optimizer."""
    network, given = nn.Sequential(nn.Linear(64, 8), nn.Dropout(0.5)), batch()

    def noisy(m: nn.Module, samples: Batch) -> Tensor:
        return (m(samples[0]) * (1 + random.random() + np.random.rand())).square().mean()  # noqa: NPY002, S311

    seed()
    numbers = draw()
    seed()
    plan(network, noisy, given, optimizer=Restless(network.parameters(), lr=0.1), memory=memory)
    assert draw() == numbers


def draw() -> tuple[float, float, float]:
    """One number of each generator."""
    return float(torch.rand(())), random.random(), float(np.random.rand())  # noqa: NPY002, S311 - those that are restored


def test_a_plan_that_is_measured() -> None:
    """At most six probes, sizes up to the batch, peaks and times for each."""
    asked: list[int] = []
    found = make_plan(model(), loss_fn, batch(), on_probe=asked.append)
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
    chosen = next(row for row in tight.rows if row.size == tight.size)
    assert chosen.waiting_bytes is not None
    assert tight.peak_bytes + chosen.waiting_bytes <= 0.9 * tight.budget
    assert any("Predicted by tracing" in note for note in tight.notes)
    assert "measured peak" not in str(tight)
    assert "ms/sample" not in str(tight)


def test_weights_that_do_not_fit_are_told_from_activations() -> None:
    """Each with its numbers, and with what helps."""
    wide = nn.Linear(4096, 4096)
    samples = torch.empty(8, 4096)
    heavy = plan(
        wide, lambda m, x: m(x).sum(), samples, optimizer=torch.optim.AdamW(wide.parameters()), memory="100MiB"
    )
    assert heavy.size is None
    assert heavy.advice[0].startswith(
        "Weights, gradients, optimizer state and all else that this process holds take 320 MiB, 230 MiB more than"
    )
    assert "LoRA" in heavy.advice[1]
    light = nn.Linear(16, 16)
    long = torch.empty(8, 1 << 20, 16)
    deep = plan(light, lambda m, x: m(x).relu().sum(), long, memory="150MiB")
    assert deep.size is None
    assert "one sample does not fit into" in deep.advice[0]
    assert "checkpoint" in deep.advice[1]
    assert "Not one sample" in str(deep)


def choice(size: int, largest: int, probes: list[Probe], limit: int = 100) -> Choice:
    """A choice as it would have been made."""
    return Choice(size, largest, tuple(probes), limit, limit)


def test_advice() -> None:
    """Each sentence where it is due, and no other."""
    whole = choice(8, 8, [Probe(1, 20, 1.0), Probe(8, 90, 2.0)])
    assert advice(whole, 10) == ("The whole batch fits and nothing is faster: no accumulation is needed.",)
    slower = choice(2, 8, [Probe(1, 20, 1.0), Probe(2, 30, 1.0), Probe(8, 90, 6.0)])
    (said,) = advice(slower, 10)
    assert "The whole batch fits, too, and is 50% slower" in said
    single = choice(1, 8, [Probe(1, 90, 1.0), Probe(2, None, 0.0)])
    (said,) = advice(single, 20)
    assert said.startswith("One sample takes 70 B of the 80 B")
    assert "checkpoint" in said
    falling = choice(8, 16, [Probe(1, 20, 1.0), Probe(8, 90, 1.1), Probe(16, 160, 1.2)])
    (said,) = advice(falling, 10)
    assert said.startswith("Time per sample is still falling")
    many = choice(8, 1024, [Probe(1, 20, 0.1), Probe(8, 90, 0.8), Probe(9, 101, 1.0)])
    (said,) = advice(many, 10)
    assert said.startswith("128 steps make one update")
    assert "2507.07101" in said


def test_what_cannot_be_planned() -> None:
    """Errors say what was found and what to write."""
    network = nn.Linear(64, 10)
    with pytest.raises(BatchError, match=r"model\(\*\*batch\)\.loss, but this batch is a tuple"):
        plan(network, None, batch())
    with pytest.raises(ConfigurationError, match="20 of what"):
        plan(network, loss_fn, batch(), memory="20")
    with pytest.raises(ConfigurationError, match=r"one device\. Got no parameters"):
        plan(nn.ReLU(), loss_fn, batch())


def test_a_model_that_knows_its_loss() -> None:
    """As Hugging Face's do: no loss_fn."""

    class Output:
        def __init__(self, loss: Tensor) -> None:
            self.loss = loss

    class Knowing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(64, 10)

        def forward(self, x: Tensor, labels: Tensor) -> Output:
            return Output(F.cross_entropy(self.inner(x), labels))

    inputs, labels = batch(16)
    assert plan(Knowing(), None, {"x": inputs, "labels": labels}, memory="1GiB").batch_size == 16


def run(*arguments: str) -> Result:
    """One command."""
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "80", "NO_COLOR": "1"})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A user's own training."""
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


def test_the_command_prints_table_advice_and_what_is_next(file: Path) -> None:
    """In this order, inside eighty columns."""
    result = run("plan", str(file))
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    places = [text.index(part) for part in ("mine.py: Batch of 32", "micro-batch steps", "<- take this", "Next: ")]
    assert places == sorted(places)
    assert max(len(line) for line in result.stdout.splitlines() if not line.startswith("Next")) <= 80


def test_json_is_all_that_is_on_stdout(file: Path) -> None:
    """Also where the file prints."""
    result = run("plan", str(file), "--json", "--batch-size", "16", "--memory", "0.9")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    assert (found["batch_size"], found["measured"]) == (16, True)
    assert set(found) == {"file", *Plan.__dataclass_fields__}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would be measured")
def test_memory_of_a_gpu_on_the_command_line(file: Path) -> None:
    """Traced; and where nothing fits, the exit status says so."""
    result = run("plan", str(file), "--memory", "24GiB")
    assert result.exit_code == 0, result.output
    assert "Predicted by tracing" in " ".join(result.stdout.split())
    assert run("plan", str(file), "--memory", "1MiB").exit_code == 1
    misused = run("plan", str(file), "--memory", "24")
    assert misused.exit_code == 2
    assert "24 of what?" in misused.stderr
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


def test_batch_norm_is_planned_for_and_what_waits_is_said() -> None:
    """One sample at a time is tried, too, as it would run beside others; its activations wait for each other."""
    network = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
    batch = torch.randn(4096, 4)

    def loss_fn(network: nn.Module, batch: Tensor) -> Tensor:
        found: Tensor = network(batch).square().mean()
        return found

    large = plan(network, loss_fn, batch)
    assert large.rows[0].size == 1
    assert large.size == len(batch)  # as BigStep does
    assert "an Accumulator refuses it" in str(large)
    small = plan(network, loss_fn, batch, memory="72MiB")
    assert small.steps is None or small.steps > 1
    assert "micro-batches run in lock-step" in str(small)
    assert not network[1].num_batches_tracked


def test_a_loss_that_a_step_would_refuse_is_said() -> None:
    """A plan for a contrastive loss that does not meet."""
    network = nn.Linear(4, 3)
    found = plan(network, lambda m, b: F.cross_entropy(m(b) @ m(b).T, torch.arange(len(b))), torch.randn(8, 4))
    assert any(
        note.startswith("A step would refuse this loss: the samples of this loss are coupled") for note in found.notes
    )
    assert found.refused
