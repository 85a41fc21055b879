"""Plans, a `Setup` and the commands are one process's work, also where torchrun has started several."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typer.testing import CliRunner

from bigbatch import Accumulator, Setup, plan
from bigbatch.cli import app
from bigbatch.errors import ConfigurationError
from tests.support.rank_loops import shards
from tests.support.ranks import run_on_ranks


def small() -> nn.Sequential:
    """Return the same model on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 3))


def planned(rank: int, samples: list[int]) -> Any:
    """Plan a model in DDP on one rank, see that nothing has changed, and train an update."""
    model = DistributedDataParallel(small())
    optimizer = torch.optim.AdamW(model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    accumulator = Accumulator(model, optimizer, steps=2, overlap=True)  # whose settings are to stay
    batch, random = torch.randn(samples[rank], 5), torch.get_rng_state()
    found = plan(model, lambda m, b: F.cross_entropy(m(b), torch.zeros(len(b)).long()), batch, optimizer=optimizer)
    assert not optimizer.state
    assert torch.equal(random, torch.get_rng_state())
    for parameter, was in zip(model.parameters(), before, strict=True):
        assert parameter.grad is None
        assert torch.equal(parameter, was)
    for _ in range(2):
        accumulator.backward(F.cross_entropy(model(torch.randn(4, 5)), torch.tensor([0, 1, 2, 0])))
    return found.batch_size, [p.detach() for p in model.parameters()]


def test_a_model_in_ddp_is_planned_by_each_rank_alone() -> None:
    """Ranks may make different numbers of probes, and train on together afterwards."""
    (one, weights), (other, others) = run_on_ranks(2, planned, [16, 1])
    assert (one, other) == (16, 1)
    assert all(map(torch.equal, weights, others))


def setup_of(model: nn.Module) -> Setup:
    """Give a Setup what a loop of one's own would have."""
    return Setup(model=model, optimizer=torch.optim.SGD(model.parameters()), data=[0], batch_size=1)


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: plan(shards(small()), lambda m, b: m(b).sum(), torch.ones(4, 5)), 'loss_fn, batch, memory="24GiB")'),
    (lambda: setup_of(shards(small())), "examples/ranks/ddp.py"),
    (lambda: setup_of(DistributedDataParallel(small())), "examples/ranks/ddp.py"),
]


def refused(_: int) -> list[str]:
    """Return what is said of each."""
    said = []
    for make, _text in REFUSED:
        with pytest.raises(ConfigurationError) as caught:
            make()
        said.append(str(caught.value))
    return said


def test_what_one_process_does_is_refused_on_several() -> None:
    """A model whose every pass needs other ranks is planned before; a Setup names a loop for several devices."""
    for said in run_on_ranks(2, refused):
        assert all(text in each for each, (_, text) in zip(said, REFUSED, strict=True)), said


def launch(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Set what torchrun tells one of two processes."""
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "RANK": str(rank)}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("arguments", [["train", __file__], ["train"], ["plan", __file__]])
def test_a_command_under_torchrun_names_the_examples(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is not read."""
    launch(monkeypatch, 0)
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "300"})
    assert result.exit_code == 2
    said = " ".join(result.stderr.split())
    assert f"error: `bigbatch {arguments[0]}` runs in one process, and torchrun has started 2" in said
    assert f"hint: bigbatch {arguments[0]} FILE.py, without torchrun" in said
    assert "examples/ranks/ddp.py" in said


@pytest.mark.parametrize("arguments", [["train"], ["plan", "mine.py"], ["verify", "none.py"], ["lint", "--none"]])
def test_of_several_processes_the_first_speaks(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the command, the others end at once and are silent."""
    launch(monkeypatch, 1)
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.output) == (0, "")
