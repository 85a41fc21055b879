"""One side of the gate: builds what it is told to and times it. It speaks JSON, a line each way.

It runs with the code of one checkout, found by PYTHONPATH: `gate.py` starts one of these for each side.

    {"build": "1x32 graph", "which": "ours"}   ->  {"peak": bytes}
    {"time": 2}                                ->  {"seconds": of that many updates}
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks import gpu_windows, lockstep_contrastive, lockstep_resnet
from benchmarks.gpu_scale import scale as gpu_scale
from benchmarks.lockstep_scale import scale as lockstep_scale
from benchmarks.peak_memory import peak_bytes
from benchmarks.racing import Contestant, release

WARM_UP = 6  # the fourth update looks whether samples are coupled; graphs are captured by then


def windows(micro_batch: int, steps: int) -> Callable[[str, bool], dict[str, Any]]:
    """A row of `gpu.py`, beside one full batch."""

    def builds(device: str, tiny: bool) -> dict[str, Any]:  # noqa: FBT001 - by place
        sizes = gpu_scale(device, tiny=tiny)
        found = gpu_windows.contestants(sizes, gpu_windows.workload(sizes, micro_batch, steps))
        return {
            "ours": found["bigbatch" if device == "cpu" else "bigbatch, CUDA graph"],
            "beside": found[gpu_windows.FULL],
        }

    return builds


def resnet(ours: str) -> Callable[[str, bool], dict[str, Any]]:
    """A row of `lockstep.py` with BatchNorm, beside plain accumulation."""

    def builds(device: str, tiny: bool) -> dict[str, Any]:  # noqa: FBT001 - by place
        work = lockstep_resnet.small_network(lockstep_scale(device, tiny=tiny))
        found, cut = work.entries(), work.cut(16)
        graph = f"bigbatch {ours}, {cut}, graph"
        return {"ours": found[graph if graph in found else f"bigbatch {ours}, {cut}"].build,
                "beside": found[f"plain (wrong), {cut}"].build}  # fmt: skip

    return builds


def towers(ours: str, *, wide: bool) -> Callable[[str, bool], dict[str, Any]]:
    """A row of `lockstep.py` with a contrastive loss, beside GradCache."""

    def builds(device: str, tiny: bool) -> dict[str, Any]:  # noqa: FBT001 - by place
        sizes = lockstep_scale(device, tiny=tiny)
        found = lockstep_contrastive.wide_entries(sizes) if wide else lockstep_contrastive.entries(sizes)
        name = ours if ours in found else ours.removesuffix(", graph")
        return {"ours": found[name].build, "beside": found[lockstep_contrastive.CACHED].build}

    return builds


ROWS: dict[str, Callable[[str, bool], dict[str, Any]]] = {
    "1x32 graph": windows(1, 32),
    "4x8 graph": windows(4, 8),
    "8x8 graph": windows(8, 8),
    "ResNet-18 kept, graph": resnet("keep"),
    "ResNet-18 offloaded, graph": resnet("offload"),
    "small towers recomputed, graph": towers("bigbatch recompute, graph", wide=False),
    "large towers recomputed": towers("bigbatch recompute", wide=True),
}


def answers(device: str, *, tiny: bool) -> Iterator[dict[str, Any]]:
    """Answer one line after the other."""
    contestant: Contestant | None = None
    number = 0
    for line in sys.stdin:
        asked = json.loads(line)
        if "build" in asked:
            if contestant is not None:
                contestant.close()
            contestant, number = None, WARM_UP
            release()

            def warm(asked: dict[str, Any] = asked) -> Contestant:
                built: Contestant = ROWS[asked["build"]](device, tiny)[asked["which"]]()
                for each in range(WARM_UP):
                    built.update(each)
                return built

            try:
                contestant, peak = peak_bytes(warm, device)
            except Exception as error:  # noqa: BLE001 - it is this row's outcome
                contestant = None
                yield {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
            else:
                yield {"peak": peak}
        elif contestant is None:
            yield {"error": "nothing was built"}
        else:
            _settle(device)
            start = time.perf_counter()
            for _ in range(asked["time"]):
                contestant.update(number)
                number += 1
            _settle(device)
            yield {"seconds": (time.perf_counter() - start) / asked["time"]}


def _settle(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def main() -> None:
    """Answer on what was stdout; whatever a library prints goes to stderr."""
    device, tiny = sys.argv[1], "--tiny" in sys.argv
    out, sys.stdout = sys.stdout, sys.stderr
    if device == "cpu":
        torch.set_num_threads(1)
    if device != "cpu":
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
    for answer in answers(device, tiny=tiny):
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
