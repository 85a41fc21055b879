"""Micro-batch sizes: does "auto" choose as well as trying every power of two by hand, and stay below its budget?

Each size is tried alone in a process that may have no more than the budget. "auto" gets the budget as `memory=` and
the whole device, so that going over it would show. All that fit are then timed together.
"""

import math
from dataclasses import replace

from torch import nn

from benchmarks import loops
from benchmarks.gpu_figures import Bar, Figure, figure
from benchmarks.gpu_ours import big_step, said
from benchmarks.gpu_scale import Scale, in_bytes
from benchmarks.gpu_windows import joined, token_loss, workload
from benchmarks.racing import Build, Contestant, Outcome, capped, race, try_alone
from benchmarks.workloads import Batch

NAME = "sizing"
SHARE = 0.95  # of the best throughput that was found by hand
SLOW = 1.5  # times the best: not timed further


def hand_build(scale: Scale, size: int) -> Build:
    """The tuned hand loop at one size."""
    work = workload(scale, size, scale.sizing // size)
    batches = work.micro_batches(1)

    def build() -> Contestant:
        runner = loops.hand_loop(work, 1.0)
        return Contestant(runner.model, lambda _: runner.run(batches))

    return build


def our_build(scale: Scale, batch: Batch, size: int | str, memory: str | None = None) -> Build:
    """Ours at one size, or at the one that it found when it was alone: beside others the budget is not its own."""
    state: dict[str, object] = {}

    def build() -> Contestant:
        work = workload(scale, scale.sizing, 1)
        model: nn.Module = work.fresh_model()
        return big_step(
            model,
            work.optimizer(model),
            token_loss(scale),
            [batch],
            micro_batch_size=size,
            memory=memory,
            state=state if size == "auto" else None,
        )

    return build


def measure(scale: Scale, *, rounds: int, seconds: float) -> dict[str, list[Figure]]:
    """Return the figures for each budget."""
    sizes = [2**power for power in range(scale.sizing.bit_length()) if 2**power <= scale.sizing]
    batch = joined(workload(scale, scale.sizing, 1).micro_batches(1))
    by_hand: dict[str, Build] = {}
    for size in sizes:
        by_hand[f"hand loop at {size}"] = hand_build(scale, size)
        by_hand[f"bigbatch at {size}"] = our_build(scale, batch, size)
    autos = {budget: f'bigbatch, "auto" in {budget}' for budget in scale.budgets}
    builds = by_hand | {name: our_build(scale, batch, "auto", budget) for budget, name in autos.items()}
    steps = {f"bigbatch at {size}": scale.sizing // size for size in sizes}
    fits = {budget: tried(by_hand, steps, scale.device, in_bytes(budget)) for budget in scale.budgets}
    outcomes = {name: Outcome() for name in builds}
    for name in by_hand:
        # What fits in no budget need not be timed; its reason is shown with the budget.
        if all(found[name].error for found in fits.values()):
            outcomes[name].error = fits[scale.budgets[0]][name].error
    for name in autos.values():
        try_alone(builds[name], scale.device, outcomes[name])
    race(builds, outcomes, scale.device, rounds=rounds, seconds=seconds, slack=dict.fromkeys(by_hand, SLOW))
    return {budget: _compared(budget, name, fits[budget], outcomes) for budget, name in autos.items()}


def tried(builds: dict[str, Build], steps: dict[str, int], device: str, budget: int) -> dict[str, Outcome]:
    """Try each alone under the cap. We do not crash where a size does not fit, but take another: found by `steps`."""
    found = {name: Outcome() for name in builds}
    with capped(budget, device):
        for name, build in builds.items():
            try_alone(build, device, found[name])
            note = found[name].note
            if name in steps and not found[name].error and note != said(steps[name]):
                found[name].error = f"does not fit: took {note}"
    return found


def _compared(budget: str, auto: str, fits: dict[str, Outcome], outcomes: dict[str, Outcome]) -> list[Figure]:
    """Compare with the best of what fits; the bar is for the one that chose by itself."""
    rows = {
        name: alone if alone.error else replace(outcomes[name], peak=alone.peak, reserved=alone.reserved)
        for name, alone in fits.items()
    }
    best = min(rows.values(), key=_fully_timed)
    work = f"{NAME} {budget}"
    bar = Bar(SHARE, below=False, peak_bytes=in_bytes(budget))
    figures = [figure(work, name, outcome, _share(outcome, best), bar=None) for name, outcome in rows.items()]
    return [*figures, figure(work, auto, outcomes[auto], _share(outcomes[auto], best), bar=bar)]


def _fully_timed(outcome: Outcome) -> float:
    return outcome.median if outcome.median is not None and len(outcome.seconds) > 1 else math.inf


def _share(outcome: Outcome, best: Outcome) -> float | None:
    ratio = outcome.ratio_to(best)
    return None if ratio is None else 1 / ratio
