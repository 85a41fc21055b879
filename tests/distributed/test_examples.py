"""The examples on several ranks end with the weights of one process."""

import os
import socket
import subprocess
import sys
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
from tests.support.ranks import exactly
from tests.support.reference import distance

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[2]
# A thread of gloo (torch 2.13) that lets go of its last tensors when Python has ended asks for an interpreter that is
# gone, and aborts; DDP's less often than FSDP's, whose caches hold the group, so that destroying it does not wait for
# that thread. A barrier before that nearly always does (1 of 60 runs here still aborted, 3 of 20 without it). All work
# is done by then: whoever asks this looks at what came of it, too. With several launchers the one whose process aborted
# ends at once, and with it the others, who have lost the store that it kept.
_ABORTED = "terminate called without an active exception"


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


def torchrun(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Start fsdp2.py as a user does, on gloo, and wait for its end."""
    ours = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "NO_COLOR": "1"}
    ours["PYTHONUNBUFFERED"] = "1"  # where one process aborts as above, the launcher ends the others, print or not
    ours["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", *arguments]
    env = {**os.environ, **ours}
    return subprocess.run(command, capture_output=True, text=True, timeout=120.0, check=False, cwd=ROOT, env=env)


def test_two_nodes_end_with_the_weights_of_one_process(tmp_path: Path, one: tuple[Path, str]) -> None:
    """Two launchers that find each other at a port, as on two machines; the first process prints, once."""
    several = tmp_path / "several.pt"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = f"127.0.0.1:{free.getsockname()[1]}"
    nodes = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", meeting, "--local-addr", "127.0.0.1")
    with ThreadPoolExecutor(2) as launchers:
        results = list(launchers.map(lambda _: torchrun(*nodes, "examples/ranks/fsdp2.py", str(several)), range(2)))
    if not any(_ABORTED in result.stderr for result in results):
        assert [result.returncode for result in results] == [0, 0], results
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
