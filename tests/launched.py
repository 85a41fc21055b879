"""Start a program on several ranks as a user does, with torchrun, on gloo."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIMIT = 120.0  # seconds


def torchrun(ranks: int, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run `torchrun --nproc-per-node RANKS ...` and wait for its end; alone, unless nodes are named."""
    ours = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "NO_COLOR": "1"}
    alone = () if "--nnodes" in arguments else ("--standalone",)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *alone, "--nproc-per-node", str(ranks), *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
        cwd=ROOT,
        env={**os.environ, **ours, "PYTHONPATH": path, **environment},
    )
