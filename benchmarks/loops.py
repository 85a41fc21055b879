"""The loops that are timed, each written as its documentation writes it and none with a `.item()`.

Each function builds what trains and returns a `Runner`; only `Runner.run` is timed. All of them get the same list
of micro-batches, so that no one pays for a loader.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

from torch import nn

from benchmarks.silence import silence
from benchmarks.workloads import Batch, Workload
from bigbatch import Accumulator


@dataclass(frozen=True)
class Runner:
    """A model, and the training of it on some micro-batches."""

    model: nn.Module
    run: Callable[[list[Batch]], None]


Loop = Callable[[Workload, float | None], Runner]


def hand_loop(work: Workload, clip: float | None) -> Runner:
    """Tuned: gradients set to None, one division, no synchronisation with the device."""
    model = work.fresh_model()
    optimizer = work.optimizer(model)
    parameters = list(model.parameters())

    def run(batches: list[Batch]) -> None:
        for number, batch in enumerate(batches, start=1):
            (work.loss(model, batch) / work.steps).backward()
            if number % work.steps == 0:
                if clip is not None:
                    nn.utils.clip_grad_norm_(parameters, clip)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

    return Runner(model, run)


def accelerate(work: Workload, clip: float | None) -> Runner:
    """Hugging Face Accelerate, model and optimizer prepared."""
    from accelerate import Accelerator

    bare = work.fresh_model()
    accelerator = Accelerator(cpu=work.device == "cpu", gradient_accumulation_steps=work.steps)
    model, optimizer = accelerator.prepare(bare, work.optimizer(bare))

    def run(batches: list[Batch]) -> None:
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(work.loss(model, batch))
                if clip is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()

    return Runner(bare, run)


def fabric(work: Workload, clip: float | None) -> Runner:
    """Lightning Fabric, model and optimizer set up."""
    from lightning.fabric import Fabric

    bare = work.fresh_model()
    with silence("lightning.fabric", "lightning.pytorch"):
        manager = Fabric(accelerator="cpu" if work.device == "cpu" else "cuda", devices=1)
        model, optimizer = manager.setup(bare, work.optimizer(bare))

    def run(batches: list[Batch]) -> None:
        for number, batch in enumerate(batches, start=1):
            accumulating = number % work.steps != 0
            with manager.no_backward_sync(model, enabled=accumulating):
                manager.backward(work.loss(model, batch) / work.steps)
            if not accumulating:
                if clip is not None:
                    manager.clip_gradients(model, optimizer, max_norm=clip)
                optimizer.step()
                optimizer.zero_grad()

    return Runner(bare, run)


def bigbatch(work: Workload, clip: float | None) -> Runner:
    """The three lines."""
    model = work.fresh_model()
    accumulator = Accumulator(model, work.optimizer(model), steps=work.steps, clip_norm=clip)

    def run(batches: list[Batch]) -> None:
        for batch in accumulator.over(batches):
            accumulator.backward(work.loss(model, batch))

    return Runner(model, run)


HAND = "hand loop"


def all_loops() -> dict[str, Loop]:
    """Every contestant that is installed; the hand loop runs twice, and its second ratio is the noise."""
    loops: dict[str, Loop] = {HAND: hand_loop, f"{HAND} again": hand_loop}
    if find_spec("accelerate"):
        loops["Accelerate"] = accelerate
    if find_spec("lightning"):
        loops["Fabric"] = fabric
    return {**loops, "bigbatch": bigbatch}
