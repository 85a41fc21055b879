"""Train every arm of a recipe from the same weights on the same samples in the same order; measure, and say so."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bigbatch.memory.meter import LiveBytes
from bigbatch.planner.plan_report import aligned
from bigbatch.recipes.experiment import RECIPES, Arm, Recipe, Task


@dataclass(frozen=True)
class Spread:
    """A mean over seeds and its standard deviation, which one seed does not have."""

    mean: float
    std: float | None

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        """Return that of one value per seed."""
        return cls(fmean(values), stdev(values) if len(values) > 1 else None)


@dataclass(frozen=True)
class ArmResult:
    """One column of the table."""

    name: str
    learning_rate: float
    updates: int
    clipped: Spread | None  # updates whose gradient was larger than the clip; None where nothing is clipped
    samples_used: int  # samples that went into an update, over all epochs
    loss: Spread
    accuracy_first: Spread  # after the first epoch
    accuracy_last: Spread
    ms_per_epoch: float
    peak_bytes: int
    distance: float  # of the final weights from the true big batch's at the same rate, relative; worst seed


@dataclass(frozen=True)
class Comparison:
    """The whole table, and what it was measured on."""

    recipe: str
    seeds: int
    epochs: int
    clip_norm: float | None
    arms: tuple[ArmResult, ...]  # of a small batch, textbook, bigbatch, true, bigbatch rescaled


@dataclass
class Run:
    """One arm with one seed; counts updates and samples from outside, so that loops stay as one would write them."""

    learning_rate: float = 0.0
    updates: int = 0
    samples_used: int = 0
    seconds: list[float] = field(default_factory=list)
    loss: float = 0.0
    accuracies: list[float] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)  # of the gradients, before clipping
    weights: Tensor = field(default_factory=lambda: torch.empty(0))
    _pending: int = 0

    def watch(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Count from now on."""
        model.register_forward_pre_hook(self._count_samples)
        optimizer.register_step_post_hook(self._count_update)

    def _count_samples(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if torch.is_grad_enabled():
            if all(parameter.grad is None for parameter in module.parameters()):
                self._pending = 0  # gradients that were cleared without a step: their samples are lost, not late
            self._pending += len(inputs[0])

    def _count_update(self, *_: object) -> None:
        self.updates, self.samples_used, self._pending = self.updates + 1, self.samples_used + self._pending, 0


def compare(
    recipe: Recipe,
    *,
    seeds: int,
    epochs: int | None = None,
    clip_norm: float | None = None,
    on_epoch: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Run the recipe with seeds 0 to `seeds` - 1; `on_epoch` is told of every epoch."""
    recipe = replace(recipe, epochs=epochs or recipe.epochs, clip_norm=clip_norm or recipe.clip_norm)
    runs: dict[str, list[Run]] = {arm.name: [] for arm in recipe.arms()}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # models this small gain nothing from more, which on a busy machine cost ten times as much
    try:
        for seed in range(seeds):  # seed by seed, so that a slow moment of the machine falls on all arms
            task = Task.of(recipe, seed)
            for arm in recipe.arms():
                runs[arm.name].append(_train(task, arm, on_epoch))
        task = Task.of(recipe, 0)
        results = tuple(_result(task, arm, runs[arm.name], runs[arm.reference]) for arm in recipe.arms() if arm.shown)
    finally:
        torch.set_num_threads(threads)
    return Comparison(recipe.name, seeds, recipe.epochs, recipe.clip_norm, results)


def _train(task: Task, arm: Arm, on_epoch: Callable[[str], None]) -> Run:
    """Train once; only the loops' own time is counted."""
    model, optimizer = task.start(arm)
    run = Run(float(optimizer.param_groups[0]["lr"]))
    run.watch(model, optimizer)
    for order in task.orders:
        batches, started = task.micro_batches(order, arm.micro_batch), time.perf_counter()
        run.norms += arm.loop(model, optimizer, batches, arm.steps, task.recipe.clip_norm)
        run.seconds.append(time.perf_counter() - started)
        run.loss, accuracy = task.validate(model)
        run.accuracies.append(accuracy)
        on_epoch(arm.name)
    run.weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    return run


def _peak(task: Task, arm: Arm) -> int:
    """Return the most tensor bytes alive at once in two updates: the second has the optimizer's state."""
    model, optimizer = task.start(arm)
    with LiveBytes() as live:
        first = islice(task.micro_batches(task.orders[0], arm.micro_batch), 2 * arm.steps)
        arm.loop(model, optimizer, first, arm.steps, task.recipe.clip_norm)
    return int(live.peak)


def _result(task: Task, arm: Arm, runs: list[Run], references: list[Run]) -> ArmResult:
    """Return one column: means over seeds; the time of the fastest epoch, which others disturbed least."""
    first, clip = runs[0], task.recipe.clip_norm  # rate, updates and samples are the same for every seed
    pairs = [(run.weights, true.weights) for run, true in zip(runs, references, strict=True)]
    return ArmResult(
        name=arm.name,
        learning_rate=first.learning_rate,
        updates=first.updates,
        clipped=Spread.of([sum(float(norm > clip) for norm in run.norms) for run in runs]) if clip else None,
        samples_used=first.samples_used,
        loss=Spread.of([run.loss for run in runs]),
        accuracy_first=Spread.of([run.accuracies[0] for run in runs]),
        accuracy_last=Spread.of([run.accuracies[-1] for run in runs]),
        ms_per_epoch=1e3 * min(seconds for run in runs for seconds in run.seconds),
        peak_bytes=_peak(task, arm),
        distance=max(float((one - true).norm() / true.norm()) for one, true in pairs),
    )


def report(found: Comparison) -> str:
    """Return the table of a comparison, and what it shows."""
    recipe = RECIPES[found.recipe]
    small, textbook, ours, true, rescaled = found.arms
    rows: dict[str, Callable[[ArmResult], str]] = {
        "": lambda arm: arm.name,
        "learning rate": lambda arm: f"{arm.learning_rate:g}",
        "updates": lambda arm: f"{arm.updates:,}",
        "updates clipped": lambda arm: "-" if arm.clipped is None else f"{arm.clipped.mean:.4g}",
        "samples used": lambda arm: f"{arm.samples_used:,}",
        "loss": lambda arm: f"{arm.loss.mean:.3f}",
        "± over seeds": lambda arm: "-" if arm.loss.std is None else f"{arm.loss.std:.3f}",
        "accuracy, epoch 1": lambda arm: f"{arm.accuracy_first.mean:.1%}",
        f"accuracy, epoch {found.epochs}": lambda arm: f"{arm.accuracy_last.mean:.1%}",
        "ms per epoch": lambda arm: f"{arm.ms_per_epoch:.1f}",
        "peak memory, KiB": lambda arm: f"{arm.peak_bytes / 1024:.1f}",
        f"distance from {true.name}": lambda arm: _relative(arm.distance),
    }
    left_out = (ours.samples_used - textbook.samples_used) // found.epochs
    lost = f"leaves {left_out:,} of {recipe.samples:,} samples out of every epoch"
    if not left_out:
        lost = "weighs the last micro-batch as much as the others, though it has fewer samples"
    clip = f", clipped at {found.clip_norm:g}" if found.clip_norm is not None else ""
    table = "\n".join(aligned([[label, *map(value, found.arms)] for label, value in rows.items()]))
    return (
        f"{recipe.origin}: {recipe.title}; {recipe.micro_batch} × {recipe.steps}{clip}.\n"
        f"Seeds: {found.seeds}, epochs: {found.epochs}. Loss and accuracy are of {recipe.validation:,} other samples. "
        "Memory: tensors alive at once in an update. Distance: of the final weights, relative, from the true batch's "
        f"at the same rate; worst seed.\n\n{table}\n\n"
        f"The textbook loop {lost}; its final weights are {_relative(textbook.distance)} from the true batch's, "
        f"bigbatch's {_relative(ours.distance)}.\n"
        f"At the same rate, accumulating makes {ours.updates:,} updates where batch {recipe.micro_batch} makes "
        f"{small.updates:,}, with a loss of {ours.loss.mean:.3f} against {small.loss.mean:.3f}; at "
        f"{rescaled.learning_rate:g}, which scale_lr gives, it has {rescaled.loss.mean:.3f}.\n"
        f"The teaching pages {recipe.claim}; measured: {small.accuracy_last.mean:.1%} before and "
        f"{textbook.accuracy_last.mean:.1%} after."
    )


def _relative(distance: float) -> str:
    """Write a relative distance: 0.45, 2e-16."""
    return f"{distance:.0e}" if 0 < distance < 1e-3 else f"{distance:.2g}"  # noqa: PLR2004
