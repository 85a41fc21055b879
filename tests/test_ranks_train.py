"""`bigbatch train FILE.py` on several ranks: the weights, losses and reports of one process."""

import json
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout
from torch.utils.data import IterableDataset, TensorDataset
from typer.testing import CliRunner

from bigbatch import Setup
from bigbatch.cli import app
from bigbatch.errors import BatchError, ConfigurationError, RankFailed
from bigbatch.recipes.launching import Place, lost_connection
from bigbatch.recipes.sharing import Share
from bigbatch.recipes.training import train_setup
from bigbatch.recipes.user_code import UserCodeError
from tests.launched import assert_ended, torchrun
from tests.ranks import run_on_ranks
from tests.reference import distance
from tests.test_setup import contrastive, make

FILE = """\
import os
import torch
from torch.utils.data import TensorDataset
from bigbatch import Setup

print("read by", os.environ.get("RANK", "0"))

def evaluate(model):
    assert os.environ.get("RANK", "0") == "0"
    torch.save([p.detach() for p in model.parameters()], os.environ["WEIGHTS"])
    return {"drawn": torch.rand(())}

def loss_fn(model, batch):
    if os.environ.get("FAILS", "none") == os.environ.get("RANK"):
        raise ValueError("only here")
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

def setup():
    model = torch.nn.Linear(5, 3, dtype=torch.float64)
    return Setup(
        model=model,
        loss_fn=loss_fn,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.1),
        data=TensorDataset(torch.randn(70, 5, dtype=torch.float64), torch.randint(3, (70,))),
        batch_size=32,
        micro_batch_size=8,
        epochs=3,
        clip_norm=1.0,
        evaluate=evaluate,
    )
"""


def here(rank: int) -> Place:
    """This process's place in a group that there is already."""
    talk = dist.group.WORLD
    assert talk is not None
    return Place(rank, dist.get_world_size(), rank, None, talk)


def masked(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A mean over the targets that are there."""
    return cross_entropy(model(batch[0]), batch[1].masked_fill(batch[0][:, 0] > 0.5, -100))


class Stream(IterableDataset[Any]):
    """Samples that come one by one, in an order of their own."""

    def __init__(self, number: int, *, unlike: int = 0) -> None:
        self.number, self.unlike = number, unlike

    def __iter__(self) -> Iterator[Any]:
        for place in range(self.number):
            x = torch.randn(5, dtype=torch.float64) + self.unlike
            yield x, place % 3


class Normed(nn.Linear):
    """A layer, and a norm by the batch."""

    def __init__(self) -> None:
        super().__init__(5, 3, bias=False, dtype=torch.float64)  # a norm's input has none that counts
        self.norm = nn.BatchNorm1d(3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise what it gives."""
        normed: Tensor = self.norm(super().forward(x))
        return normed


SETUPS: dict[str, dict[str, Any]] = {
    "sizes that do not divide": {"micro_batch_size": 5},
    "a loss that asks for all samples": {"micro_batch_size": 4, "loss_fn": contrastive},
    "a stream whose loss asks": {"micro_batch_size": 4, "loss_fn": contrastive, "data": Stream(45)},
    "a norm by the batch": {"micro_batch_size": 4, "kind": Normed},
    "whole micro-batches": {"micro_batch_size": 4},
    "one micro-batch a batch": {},
    "as the samples come": {"micro_batch_size": 8, "shuffle": False},
    "masked targets, clipped": {"micro_batch_size": 2, "loss_fn": masked, "clip_norm": 0.5},
    "fewer samples than ranks at the end": {"batch_size": 23, "epochs": 3},
    "batches smaller than some ranks can share": {"batch_size": 2, "epochs": 1},
    "counts in advance": {"micro_batch_size": 4, "counts": lambda batch: (len(batch[1]),)},
    "a stream": {"micro_batch_size": 4, "data": Stream(45)},
}


def trained(rank: int, settings: dict[str, Any]) -> Any:
    """Train as one of several; the model differs from rank to rank at first."""
    setup = made(settings)
    with torch.no_grad():
        for parameter in setup.model.parameters():
            parameter.add_(rank)
    training = train_setup(setup, place=here(rank))
    return state(setup), training


def made(settings: dict[str, Any]) -> Setup:
    """Make the same on every rank, from the same seed."""
    torch.manual_seed(3)
    settings = {"epochs": 2, **settings}
    kind = settings.pop("kind", None)
    model = make().model if kind is None else kind()
    return make(**{**settings, "model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.05)})


def state(setup: Setup) -> list[Tensor]:
    """Return weights and statistics."""
    return [each.detach().double() for each in setup.model.state_dict().values()]


@pytest.mark.parametrize(
    ("name", "ranks"), [*((name, 3) for name in SETUPS), ("whole micro-batches", 2), ("a stream", 2)]
)
def test_ranks_train_to_the_weights_of_one_process(name: str, ranks: int) -> None:
    """And tell the same of it."""
    setup = made(SETUPS[name])
    true = train_setup(setup)
    for rank, found in enumerate(run_on_ranks(ranks, trained, SETUPS[name])):
        if isinstance(found, BaseException):
            raise found
        weights, training = found
        assert distance(weights, state(setup)) <= 1e-12
        assert (training.ranks, training.lock_step) == (ranks, true.lock_step)
        if rank == 0:
            assert [epoch.updates for epoch in training.epochs] == [epoch.updates for epoch in true.epochs]
            assert [epoch.loss for epoch in training.epochs] == pytest.approx([epoch.loss for epoch in true.epochs])


def fails(rank: int, settings: dict[str, Any]) -> str:
    """Say what training raises."""
    setup = made(settings)
    before = [p.detach().clone() for p in setup.model.parameters()]
    with pytest.raises(BatchError) as caught:
        train_setup(setup, place=here(rank))
    assert distance(before, [p.detach() for p in setup.model.parameters()]) == 0
    return str(caught.value)


@pytest.mark.parametrize(
    ("settings", "what", "instead"),
    [
        (
            {"kind": Normed, "batch_size": 23},
            "the last batch of an epoch, 1 samples of 23, cannot",
            "range(len(data) - 1)",
        ),
        ({"loss_fn": contrastive, "batch_size": 23}, "the last batch of an epoch, 1 samples of 23, cannot", "Subset"),
        ({"kind": Normed, "batch_size": 2}, "a batch of 2 cannot be shared by 3 ranks", "no more than 2 ranks"),
    ],
)
def test_coupled_batches_too_small_for_all_ranks_are_refused_at_once(
    settings: dict[str, Any], what: str, instead: str
) -> None:
    """Ranks meet in the midst of a batch: none may be without a sample, and that is known before the first update."""
    for text in run_on_ranks(3, fails, settings):
        assert text.startswith(what)
        assert instead in text


@given(st.integers(0, 50), st.integers(1, 9), st.integers(1, 12))
def test_parts_are_the_whole(samples: int, ranks: int, micro_batch_size: int) -> None:
    """Every sample on one rank alone, parts that differ by one at most, no micro-batch too large."""
    batch = list(range(samples))
    parts = []
    for rank in range(ranks):
        share = Share.__new__(Share)
        share._setup = make(batch_size=12 * micro_batch_size, micro_batch_size=micro_batch_size)
        share.place = Place(rank, ranks, rank, None, None)  # type: ignore[arg-type]
        parts.append(share.own_parts(batch))
    assert [sample for part in parts for micro_batch in part for sample in micro_batch] == batch
    sizes = [sum(map(len, part)) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert all(1 <= len(each) <= micro_batch_size for part in parts for each in part)
    assert all(len(part) == math.ceil(size / micro_batch_size) for part, size in zip(parts, sizes, strict=True))


def drawn(rank: int) -> Any:
    """Draw in the loss, and an unequal number of times."""
    masks: list[Tensor] = []

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        masks.append(dropout(torch.ones(8)))
        seen.extend(batch[1].tolist())
        return cross_entropy(model(batch[0]), batch[1] % 3)

    seen: list[int] = []
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(21, 5, dtype=torch.float64), torch.arange(21))
    setup = make(data=data, batch_size=5, micro_batch_size=1, loss_fn=loss_fn, epochs=3)
    train_setup(setup, place=here(rank))
    return masks, seen


def test_ranks_draw_masks_of_their_own_and_one_order() -> None:
    """Every sample once in each epoch, though the ranks have drawn differently since."""
    (masks, seen), (others_masks, others_seen) = run_on_ranks(2, drawn)
    assert not any(torch.equal(one, other) for one, other in zip(masks, others_masks, strict=False))
    assert sorted(seen + others_seen) == sorted(list(range(21)) * 3)


def wrapped(_: int) -> Any:
    """Give a Setup what a loop of one's own would have."""
    setup = make()
    return make(model=nn.parallel.DistributedDataParallel(setup.model), optimizer=setup.optimizer)


def test_a_setup_has_a_plain_model() -> None:
    """It says which."""
    for error in run_on_ranks(2, wrapped):
        assert isinstance(error, ConfigurationError), error
        assert "Setup(model=model.module, ...)" in str(error)


def unlike(rank: int, what: str) -> Any:
    """Have something that another rank has not."""
    data: dict[str, Any] = {
        "length": TensorDataset(torch.zeros(7 + rank, 5).double(), torch.zeros(7 + rank).long()),
        "stream": Stream(9, unlike=rank),
        "shorter stream": Stream(9 - rank),
    }
    torch.manual_seed(0)
    return train_setup(make(data=data[what], batch_size=4), place=here(rank))


@pytest.mark.parametrize("what", ["length", "stream", "shorter stream"])
def test_ranks_with_other_data_are_refused(what: str) -> None:
    """On every rank."""
    for error in run_on_ranks(2, unlike, what):
        assert isinstance(error, ConfigurationError), error
        assert "every process runs setup() by itself" in str(error)


def test_a_model_on_another_process_s_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what to write, or how many to start."""
    model: Any = nn.Module()
    model.parameters = lambda: iter([torch.empty(0, device="meta")])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    place = Place(1, 2, 1, None, None)  # type: ignore[arg-type]
    place.refuse_another_device(model)

    class OnCuda:
        device = torch.device("cuda", 0)

    model.parameters = lambda: iter([OnCuda()])
    with pytest.raises(ConfigurationError, match=r'is on cuda:0(.|\n)*model\.to\("cuda"\)'):
        place.refuse_another_device(model)
    with pytest.raises(ConfigurationError, match="--nproc-per-node 2"):
        Place(3, 4, 3, None, None).refuse_another_device(model)  # type: ignore[arg-type]


def test_a_lost_connection_is_told_from_a_mistake() -> None:
    """By what torch raises, also inside what we raise of it."""
    error = UserCodeError("the update failed")
    error.__cause__ = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer. This is typically ...")
    lost = lost_connection(error)
    assert isinstance(lost, RankFailed)
    assert str(lost).startswith("the connection to another rank was lost: [gloo/transport/tcp/pair.cc:553] Connection")
    assert "typically" not in str(lost)
    assert lost_connection(ValueError("mine")) is None


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's file, as it would be for one process."""
    path = tmp_path_factory.mktemp("several") / "mine.py"
    path.write_text(FILE)
    return path


@pytest.mark.parametrize("ranks", [2, 3])
def test_torchrun_trains_a_file_unchanged(ranks: int, file: Path) -> None:
    """The weights of one process to 1e-12, reported once, evaluated once."""
    one, several = file.parent / "one.pt", file.parent / f"{ranks}.pt"
    if not one.exists():
        done = CliRunner().invoke(app, ["train", str(file)], env={"WEIGHTS": str(one)})
        assert done.exit_code == 0, done.output
    flags = ["--json"] if ranks == 2 else []
    result = torchrun(ranks, "-m", "bigbatch", "train", str(file), *flags, WEIGHTS=str(several))
    assert_ended(result)
    assert distance(torch.load(several), torch.load(one)) <= 1e-12
    if flags:
        data = json.loads(result.stdout)
        assert (data["ranks"], data["steps"], data["micro_batch_size"]) == (2, 2, 8)
        assert result.stderr.count("read by") == result.stderr.count("read by 0") == 1
    else:
        assert result.stdout.count("read by") == result.stdout.count("epoch  updates") == 1
        assert "mine.py: batch 32 = up to 6 × 2 on each of 3 ranks, clipped at 1, seed 0" in result.stdout
        assert f"\nNext: torchrun --nproc-per-node 3 -m bigbatch train {file} --seed 1\n" in result.stdout


def test_a_rank_that_fails_ends_all_and_says_why_once(file: Path) -> None:
    """What the others meet because of it is not shown."""
    result = torchrun(2, "-m", "bigbatch", "train", str(file), WEIGHTS=str(file.parent / "none.pt"), FAILS="1")
    assert result.returncode != 0
    assert result.stderr.count("error: rank 1: loss_fn failed in epoch 1, micro-batch 1 (mine.py, line ") == 1
    assert result.stderr.count("ValueError: only here") == 1
    assert "error: the connection" not in result.stderr
    assert "window was left open" not in result.stderr
    assert not (file.parent / "none.pt").exists()


def test_a_file_that_joins_by_itself_is_told_that_it_has(tmp_path: Path) -> None:
    """Ranks are joined before its setup() is called."""
    path = tmp_path / "joins.py"
    path.write_text("import torch.distributed as dist\ndef setup():\n    dist.init_process_group('gloo')\n")
    result = torchrun(2, "-m", "bigbatch", "train", str(path))
    assert result.returncode != 0
    assert re.search(r"^error: rank [01]: setup\(\) failed \(joins\.py, line 3", result.stderr, re.MULTILINE)
    assert result.stderr.count("hint: The processes that torchrun has started are joined before setup()") == 1


def test_of_several_processes_one_verifies(file: Path) -> None:
    """The others end without a word."""
    result = torchrun(2, "-m", "bigbatch", "verify", str(file), WEIGHTS=str(file.parent / "none.pt"))
    assert_ended(result)
    assert result.stdout.count("mine.py: ") == result.stdout.count("Next: ") == 1
    assert result.stdout.count("read by") == result.stdout.count("read by 0") == 1


def test_of_several_processes_one_reads(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`lint` says what it has found once, also what it cannot read of its command line."""
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("RANK", "1")
    for arguments in (["lint", str(file)], ["lint", "--none"], ["verify", "none.py"]):
        result = CliRunner().invoke(app, arguments)
        assert (result.exit_code, result.output) == (0, "")
    monkeypatch.setenv("RANK", "0")
    assert "All checks passed" in CliRunner().invoke(app, ["lint", str(file)]).output


def test_random_numbers_are_left_alone_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is joined, and Python's generator goes on where it was."""
    from bigbatch.recipes.launching import joined

    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    state = random.getstate()
    assert joined(7) is None
    assert random.getstate() == state
    assert not dist.is_initialized()
