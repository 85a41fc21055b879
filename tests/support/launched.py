"""Start a program on several ranks as a user does, with torchrun, on gloo."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT = 120.0  # seconds


def torchrun(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run `torchrun --nproc-per-node 1 ...` and wait for its end."""
    ours = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "NO_COLOR": "1"}
    ours["PYTHONUNBUFFERED"] = "1"  # where one process aborts as below, the launcher ends the others, print or not
    ours["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
        cwd=ROOT,
        env={**os.environ, **ours},
    )


# A thread of gloo (torch 2.13) that lets go of its last tensors when Python has ended asks for an interpreter that is
# gone, and aborts; DDP's less often than FSDP's, whose caches hold the group, so that destroying it does not wait for
# that thread. A barrier before that nearly always does (1 of 60 runs here still aborted, 3 of 20 without it). All work
# is done by then: whoever asks this looks at what came of it, too. With several launchers the one whose process aborted
# ends at once, and with it the others, who have lost the store that it kept.
_ABORTED = "terminate called without an active exception"


def assert_ended(*results: "subprocess.CompletedProcess[str]") -> None:
    """See that the launchers of one job have seen its processes end well, or in torch's own way."""
    if not any(_ABORTED in result.stderr for result in results):
        for result in results:
            assert result.returncode == 0, f"{result.args}: {result.stderr}"
