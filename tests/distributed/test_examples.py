"""The examples on several ranks end with the weights of one process."""

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from examples.ranks import ddp, ddp_big_step, fsdp2, one_gpu
from tests.support.launched import assert_ended, torchrun
from tests.support.ranks import exactly
from tests.support.reference import distance

pytestmark = pytest.mark.ranks

FSDP2 = "examples/ranks/fsdp2.py"


def printed(_: int, main: Callable[[], None], path: str) -> str:
    """Run an example in a group that is there already; returns what it prints."""
    out = StringIO()
    with ExitStack() as stack:
        for name in ("init_process_group", "destroy_process_group"):
            stack.enter_context(patch.object(dist, name))
        stack.enter_context(patch.object(torch.cuda, "is_available", lambda: False))
        stack.enter_context(patch("sys.argv", ["", path]))
        stack.enter_context(redirect_stdout(out))
        main()
    return out.getvalue()


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The weights of one process, and what it prints."""
    path = tmp_path_factory.mktemp("one") / "one.pt"
    return path, printed(0, one_gpu.main, str(path))


def assert_same(several: Path, one: Path) -> None:
    """See that two files hold the same weights."""
    found, true = torch.load(several), torch.load(one)
    assert found.keys() == true.keys()
    assert distance(list(found.values()), list(true.values())) <= 1e-12


@pytest.mark.parametrize("main", [ddp.main, ddp_big_step.main, fsdp2.main], ids=lambda main: main.__module__)
def test_an_example_ends_with_the_weights_of_one_process(
    main: Callable[[], None], tmp_path: Path, one: tuple[Path, str]
) -> None:
    """To 1e-12, and prints what one process prints, once."""
    several = tmp_path / "several.pt"
    assert exactly(2, printed, main, str(several)) == [one[1], ""]
    assert one[1].count("16 updates") == 3
    assert_same(several, one[0])


def test_two_nodes_end_with_the_weights_of_one_process(tmp_path: Path, one: tuple[Path, str]) -> None:
    """Two launchers that find each other at a port, as on two machines; the first process prints, once."""
    several = tmp_path / "several.pt"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = f"127.0.0.1:{free.getsockname()[1]}"
    nodes = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", meeting, "--local-addr", "127.0.0.1")
    with ThreadPoolExecutor(2) as launchers:
        results = list(launchers.map(lambda _: torchrun(*nodes, FSDP2, str(several)), range(2)))
    assert_ended(*results)
    assert sorted(result.stdout for result in results) == ["", one[1]]
    assert_same(several, one[0])


def test_a_number_of_ranks_that_would_make_another_batch_is_refused() -> None:
    """Three ranks would make batches of 48."""
    for error in exactly(3, refused):
        assert "a batch of 64 has no equal shares for 3 ranks" in error


def refused(_: int) -> str:
    """Return why an example ends."""
    with pytest.raises(SystemExit) as ended:
        printed(0, fsdp2.main, "")
    return str(ended.value)
