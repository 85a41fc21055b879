"""The examples on several ranks, started as their first lines say, end with the weights of one process."""

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from examples.ranks import fsdp2, one_gpu
from tests.support.launched import assert_ended, torchrun
from tests.support.reference import distance

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[2]
FSDP2 = "examples/ranks/fsdp2.py"
REPLICAS = ["examples/ranks/ddp.py", "examples/ranks/ddp_big_step.py"]


@pytest.fixture
def one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[Path, str]:
    """The weights of one process, and what it prints."""
    path = tmp_path / "one.pt"
    with monkeypatch.context() as patch:
        patch.setattr("sys.argv", ["one_gpu.py", str(path)])
        patch.setattr(torch.cuda, "is_available", lambda: False)
        one_gpu.main()
    return path, capsys.readouterr().out


def assert_same(several: Path, one: Path) -> None:
    """See that two files hold the same weights."""
    found, true = torch.load(several), torch.load(one)
    assert found.keys() == true.keys()
    assert distance(list(found.values()), list(true.values())) <= 1e-12


@pytest.mark.parametrize("example", REPLICAS)
def test_an_example_ends_with_the_weights_of_one_process(example: str, tmp_path: Path, one: tuple[Path, str]) -> None:
    """To 1e-12, and prints what one process prints, once."""
    several = tmp_path / "several.pt"
    result = torchrun(2, example, str(several))
    assert_ended(result)
    assert result.stdout == one[1]
    assert result.stdout.count("16 updates") == 3
    assert_same(several, one[0])


def test_two_nodes_end_with_the_weights_of_one_process(tmp_path: Path, one: tuple[Path, str]) -> None:
    """Two launchers that find each other at a port, as on two machines; the first process prints, once."""
    several = tmp_path / "several.pt"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = f"127.0.0.1:{free.getsockname()[1]}"
    nodes = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", meeting, "--local-addr", "127.0.0.1")
    with ThreadPoolExecutor(2) as launchers:
        results = list(launchers.map(lambda _: torchrun(1, *nodes, FSDP2, str(several)), range(2)))
    assert_ended(*results)
    assert sorted(result.stdout for result in results) == ["", one[1]]
    assert_same(several, one[0])


@pytest.mark.parametrize("example", [*REPLICAS, FSDP2, "examples/ranks/one_gpu.py"])
def test_an_example_says_how_to_start_it(example: str) -> None:
    """In its docstring, by its own path."""
    text = (ROOT / example).read_text().split('"""')[1]
    launcher = "python " if example.endswith("one_gpu.py") else "torchrun --nproc-per-node 2 "
    assert f"\n{launcher}{example} [weights.pt]\n" in text


def test_a_number_of_ranks_that_would_make_another_batch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks would make batches of 48."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name, found in {"init_process_group": None, "get_rank": 0, "get_world_size": 3}.items():
        monkeypatch.setattr(dist, name, lambda *_, found=found: found)
    with pytest.raises(SystemExit, match="a batch of 64 has no equal shares for 3 ranks"):
        fsdp2.main()
