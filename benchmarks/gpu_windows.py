"""Equal micro-batches: what cutting a batch costs beside one forward and backward over all of it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import loops
from benchmarks.gpu_figures import OURS, Bar, Figure, figure
from benchmarks.gpu_ours import big_step
from benchmarks.gpu_scale import Scale
from benchmarks.hf_trainer import SharedState, trainer
from benchmarks.loops import HAND
from benchmarks.racing import Build, Contestant, Outcome, race, try_alone
from benchmarks.workloads import Batch, Workload, adamw

FULL = "one full batch"
# At most this many times the full batch; what is hoped for.
BARS = {(1, 32): (2.0, 1.4), (4, 8): (1.2, 1.08), (8, 8): (1.10, 1.03)}
PEAK_BAR = 1.05
SAME_LOSS = 5e-3  # of the first batch when it was trained on twice, relative; bf16 rounds to 4e-3, averaged over tokens


def name_of(micro_batch: int, steps: int) -> str:
    """Return how a window is called, also on the command line."""
    return f"{micro_batch}x{steps}"


def workload(scale: Scale, micro_batch: int, steps: int) -> Workload:
    """GPT on random tokens."""
    return Workload(
        f"GPT, {micro_batch} × {scale.context:,} tokens × {steps}",
        scale.gpt,
        lambda samples: torch.randint(scale.vocabulary, (samples, scale.context)),
        classes=scale.vocabulary,
        optimizer=adamw,
        bar=1.0,
        micro_batch=micro_batch,
        updates=1,
        rounds=1,
        steps=steps,
        device=scale.device,
        autocast=True,
    )


def joined(batches: list[Batch]) -> Batch:
    """Put a window's micro-batches back together: tokens and labels, one row per sequence."""
    tokens = torch.cat([inputs for inputs, _ in batches])
    return tokens, torch.cat([labels for _, labels in batches]).view_as(tokens)


def token_loss(scale: Scale) -> Callable[[nn.Module, Batch], Tensor]:
    """Return the mean cross-entropy over tokens, with labels in rows."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        tokens, labels = batch
        with torch.autocast(scale.device, dtype=torch.bfloat16):
            return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())

    return loss


class WithLoss(nn.Module):
    """What Trainer wants of a model: it returns its own loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Trainer's autocast is around this."""
        return {"loss": F.cross_entropy(self.model(tokens).flatten(0, 1), labels.flatten())}


@dataclass(frozen=True)
class Window:
    """One window, trained on over and over; each method builds one contestant."""

    scale: Scale
    work: Workload
    batches: list[Batch]
    whole: Batch

    def looped(self, loop: loops.Loop) -> Contestant:
        """A loop over micro-batches, from `loops.py`."""
        return _running(loop(self.work, 1.0), self.batches)

    def full(self) -> Contestant:
        """One forward and backward: what accumulation replaces."""
        alone = workload(self.scale, self.work.micro_batch * self.work.steps, 1)
        tokens, labels = self.whole
        return _running(loops.hand_loop(alone, 1.0), [(tokens, labels.flatten())])

    def accelerate(self) -> Contestant:
        """Accelerate, apart from the Accelerator inside Trainer: both believe to be alone in the process."""
        SharedState.clear()
        runner = loops.accelerate(self.work, 1.0)
        state = SharedState()

        def update(_: int) -> None:
            with state.own():
                runner.run(self.batches)

        return Contestant(runner.model, update)

    def trainer(self) -> Contestant:
        """Trainer, with a dataset in host memory."""
        model = WithLoss(self.work.fresh_model())
        tokens, labels = (part.cpu() for part in self.whole)
        return trainer(
            model,
            self.work.optimizer(model),
            [{"tokens": row, "labels": row_labels} for row, row_labels in zip(tokens, labels, strict=True)],
            micro_batch=self.work.micro_batch,
            steps=self.work.steps,
            device=self.work.device,
        )

    def compiled(self) -> Contestant:
        """The hand loop on a compiled model."""
        model = self.work.fresh_model()
        faster = replace(self.work, model=lambda: cast("nn.Module", torch.compile(model, dynamic=False)))
        return _running(loops.hand_loop(faster, 1.0), self.batches)

    def ours(self, *, graph: bool) -> Contestant:
        """BigStep at the same micro-batch size."""
        model = self.work.fresh_model()
        return big_step(
            model,
            self.work.optimizer(model),
            token_loss(self.scale),
            [self.whole],
            micro_batch_size=self.work.micro_batch,
            options={"cuda_graph": graph},
        )


def _running(runner: loops.Runner, batches: list[Batch]) -> Contestant:
    return Contestant(runner.model, lambda _: runner.run(batches))


def contestants(scale: Scale, work: Workload, *, compiled: bool = False) -> dict[str, Build]:
    """Everyone that is installed."""
    batches = work.micro_batches(1)
    window = Window(scale, work, batches, joined(batches))
    builds: dict[str, Build] = {HAND: partial(window.looped, loops.hand_loop), FULL: window.full}
    if find_spec("accelerate"):
        builds["Accelerate"] = window.accelerate
    if find_spec("lightning"):
        builds["Fabric"] = partial(window.looped, loops.fabric)
    if find_spec("transformers"):
        builds["HF Trainer"] = window.trainer
    if compiled:
        builds["torch.compile hand loop"] = window.compiled
    return {
        **builds,
        "bigbatch": partial(window.ours, graph=False),
        "bigbatch, CUDA graph": partial(window.ours, graph=True),
    }


def measure(scale: Scale, micro_batch: int, steps: int, *, rounds: int, seconds: float, compiled: bool) -> list[Figure]:
    """Memory first, each alone; then time, all together."""
    work = workload(scale, micro_batch, steps)
    builds = contestants(scale, work, compiled=compiled)
    outcomes = {name: Outcome() for name in builds}
    first = work.micro_batches(1)[0]

    def probe(model: nn.Module) -> Tensor:
        return work.loss(model.model if isinstance(model, WithLoss) else model, first)

    # The first pass on a GPU allocates the libraries' workspaces, which are nobody's.
    try_alone(builds[HAND], scale.device, Outcome())
    for name, build in builds.items():
        try_alone(build, scale.device, outcomes[name], probe=probe)
    refuse_strangers(outcomes, outcomes[HAND].loss_after)
    race(builds, outcomes, scale.device, rounds=rounds, seconds=seconds)
    must, stretch = BARS.get((micro_batch, steps), (2.0, 1.4))
    bar = Bar(must, stretch, peak_ratio=PEAK_BAR)
    return [
        figure(
            name_of(micro_batch, steps),
            name,
            outcome,
            outcome.ratio_to(outcomes[FULL]),
            hand=outcomes[HAND],
            bar=bar if name.startswith(OURS) else None,
        )
        for name, outcome in outcomes.items()
    ]


def refuse_strangers(outcomes: dict[str, Outcome], truth: float | None) -> None:
    """Fail whoever trained something else: its time means nothing."""
    for outcome in outcomes.values():
        found = outcome.loss_after
        if truth is not None and found is not None and not abs(found - truth) <= SAME_LOSS * abs(truth):
            outcome.error = f"trains something else: its loss becomes {found:.4f}, the hand loop's {truth:.4f}"
