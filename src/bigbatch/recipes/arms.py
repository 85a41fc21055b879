"""Train every arm of a recipe from the same weights on the same samples in the same order; measure, and say so."""

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bigbatch.errors import ConfigurationError
from bigbatch.memory.meter import LiveBytes
from bigbatch.recipes.experiment import Arm, MicroBatches, Recipe, Task


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
class Clipped:
    """What clipping did."""

    updates: Spread  # whose gradient was larger than the clip
    largest_norm: float  # of a gradient before clipping, in any update of any seed


@dataclass(frozen=True)
class ArmResult:
    """One column of the table."""

    name: str
    micro_batch: int
    steps: int
    learning_rate: float
    rescaled: bool
    updates: int
    clipped: Clipped | None  # None where nothing is clipped
    samples_used: int  # samples that went into an update, over all epochs
    loss: Spread
    accuracy_first: Spread
    accuracy_last: Spread
    ms_per_update: float
    ms_per_epoch: float
    peak_bytes: int
    distance: float  # of the final weights from the true big batch's at the same rate, relative; worst seed


@dataclass(frozen=True)
class Comparison:
    """The whole table, and what it was measured on."""

    recipe: str
    origin: str
    title: str
    claim: str | None
    seeds: int
    epochs: int
    samples: int
    validation: int
    micro_batch: int
    steps: int
    clip_norm: float | None
    dtype: str
    torch: str
    arms: tuple[ArmResult, ...]  # of a small batch, textbook, bigbatch, true, bigbatch rescaled

    @property
    def batch(self) -> int:
        """Samples behind one accumulated update."""
        return self.micro_batch * self.steps


@dataclass
class Tally:
    """Counts updates and the samples in them from outside, so that the loops stay as they would be written."""

    updates: int = 0
    samples_used: int = 0
    _pending: int = 0

    def watch(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Count from now on."""

        def count_samples(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            if torch.is_grad_enabled():
                if all(parameter.grad is None for parameter in module.parameters()):
                    self._pending = 0  # gradients that were cleared without a step: their samples are lost, not late
                self._pending += len(inputs[0])

        def count_update(*_: object) -> None:
            self.updates, self.samples_used, self._pending = self.updates + 1, self.samples_used + self._pending, 0

        model.register_forward_pre_hook(count_samples)
        optimizer.register_step_post_hook(count_update)


@dataclass
class _Run:
    """One arm with one seed."""

    learning_rate: float
    tally: Tally = field(default_factory=Tally)
    seconds: list[float] = field(default_factory=list)
    loss: float = 0.0
    accuracies: list[float] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)  # of the gradients, before clipping
    weights: Tensor = field(default_factory=lambda: torch.empty(0))


def compare(
    recipe: Recipe,
    *,
    seeds: int,
    epochs: int | None = None,
    clip_norm: float | None = None,
    on_epoch: Callable[[int, str], None] = lambda seed, arm: None,  # noqa: ARG005
) -> Comparison:
    """Run the recipe with seeds 0 to `seeds` - 1; `on_epoch(seed, arm)` is called after every epoch."""
    epochs = recipe.epochs if epochs is None else epochs
    clip_norm = recipe.clip_norm if clip_norm is None else clip_norm
    if seeds < 1 or epochs < 1:
        raise ConfigurationError("seeds and epochs are at least 1.", found=f"seeds={seeds}, epochs={epochs}")
    runs: dict[str, list[_Run]] = {arm.name: [] for arm in recipe.arms()}
    shown = [arm for arm in recipe.arms() if arm.shown]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # models this small gain nothing from more, which on a busy machine cost ten times as much
    try:
        for seed in range(seeds):  # seed by seed, so that a slow moment of the machine falls on all arms
            task = Task.of(recipe, seed, epochs)
            for arm in recipe.arms():
                runs[arm.name].append(_train(recipe, task, arm, clip_norm, partial(on_epoch, seed, arm.name)))
        task = Task.of(recipe, 0, 1)
        peaks = {arm.name: _peak(recipe, task, arm, clip_norm) for arm in shown}
    finally:
        torch.set_num_threads(threads)
    return Comparison(
        recipe=recipe.name,
        origin=recipe.origin,
        title=recipe.title,
        claim=recipe.claim,
        seeds=seeds,
        epochs=epochs,
        samples=recipe.samples,
        validation=recipe.validation,
        micro_batch=recipe.micro_batch,
        steps=recipe.steps,
        clip_norm=clip_norm,
        dtype=str(task.inputs.dtype).removeprefix("torch."),
        torch=torch.__version__,
        arms=tuple(
            _result(arm, runs[arm.name], runs[arm.reference or arm.name], clip_norm, peaks[arm.name]) for arm in shown
        ),
    )


def _train(recipe: Recipe, task: Task, arm: Arm, clip_norm: float | None, on_epoch: Callable[[], None]) -> _Run:
    """Train once; only the loops' own time is counted."""
    model = copy.deepcopy(task.model)
    optimizer = task.optimizer_for(model, recipe, arm)
    run = _Run(float(optimizer.param_groups[0]["lr"]))
    run.tally.watch(model, optimizer)
    epochs = (_micro_batches(task, order, arm.micro_batch) for order in task.orders)
    training = arm.loop(model, optimizer, epochs, arm.steps, clip_norm)
    for _ in task.orders:
        started = time.perf_counter()
        norms = next(training)
        run.seconds.append(time.perf_counter() - started)
        run.norms += norms
        run.loss, accuracy = task.validate(model)
        run.accuracies.append(accuracy)
        on_epoch()
    run.weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    return run


def _micro_batches(task: Task, order: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the samples in this order, cut; the last cut may be short."""
    for chosen in order.split(size):
        yield task.inputs[chosen], task.labels[chosen]


def _peak(recipe: Recipe, task: Task, arm: Arm, clip_norm: float | None) -> int:
    """Return the most tensor bytes alive at once in two updates: the second has the optimizer's state."""
    model = copy.deepcopy(task.model)
    optimizer = task.optimizer_for(model, recipe, arm)
    live = LiveBytes()
    with live:
        first: MicroBatches = islice(_micro_batches(task, task.orders[0], arm.micro_batch), 2 * arm.steps)
        for _ in arm.loop(model, optimizer, [first], arm.steps, clip_norm):
            pass
    return live.peak


def _result(arm: Arm, runs: list[_Run], references: list[_Run], clip_norm: float | None, peak: int) -> ArmResult:
    """Return one column: means over seeds; the time of the fastest epoch, which others disturbed least."""
    per_epoch = min(seconds for run in runs for seconds in run.seconds)
    tally = runs[0].tally  # the same for every seed: the sizes do not depend on it
    norms = [torch.stack(run.norms) for run in runs if run.norms]
    clipped = None
    if clip_norm is not None:
        updates = Spread.of([float((of_a_seed > clip_norm).sum()) for of_a_seed in norms])
        clipped = Clipped(updates, max(float(of_a_seed.max()) for of_a_seed in norms))
    return ArmResult(
        name=arm.name,
        micro_batch=arm.micro_batch,
        steps=arm.steps,
        learning_rate=runs[0].learning_rate,
        rescaled=arm.rescaled,
        updates=tally.updates,
        clipped=clipped,
        samples_used=tally.samples_used,
        loss=Spread.of([run.loss for run in runs]),
        accuracy_first=Spread.of([run.accuracies[0] for run in runs]),
        accuracy_last=Spread.of([run.accuracies[-1] for run in runs]),
        ms_per_update=1e3 * per_epoch * len(runs[0].seconds) / tally.updates,
        ms_per_epoch=1e3 * per_epoch,
        peak_bytes=peak,
        distance=max(
            float((run.weights - true.weights).norm() / true.weights.norm())
            for run, true in zip(runs, references, strict=True)
        ),
    )


def findings(comparison: Comparison) -> tuple[str, ...]:
    """Say what the textbook loop lost, what the old rate costs, what clipping did, what was claimed and measured."""
    clipping = (_clipping(comparison),) if comparison.clip_norm is not None else ()
    return _lost(comparison), _slower(comparison), *clipping, _claimed(comparison)


def relative(distance: float) -> str:
    """Write a relative distance: 0.45, 2e-16."""
    return f"{distance:.0e}" if 0 < distance < 1e-3 else f"{distance:.2g}"  # noqa: PLR2004


def _lost(comparison: Comparison) -> str:
    _, textbook, ours, true, _ = comparison.arms
    micro, samples = comparison.micro_batch, comparison.samples
    left_out = (ours.samples_used - textbook.samples_used) // comparison.epochs
    last = samples % micro or micro
    what = "The textbook loop lost nothing here, where all windows are full"
    if left_out:
        what = (
            f"The textbook loop left {left_out:,} of {samples:,} samples out of every epoch, since "
            f"{-(-samples // micro)} micro-batches are not a multiple of {comparison.steps}: "
            f"{textbook.updates:,} updates where the true batch makes {true.updates:,}"
        )
    elif last < micro:
        what = (
            f"The textbook loop used every sample, but its last micro-batch has {last} of them instead of {micro} "
            f"and weighs as much, so each of these counts {micro / last:g} times"
        )
    distances = f"{relative(textbook.distance)} from the true batch's, bigbatch's {relative(ours.distance)}"
    return f"{what}; its final weights are {distances}."


def _slower(comparison: Comparison) -> str:
    small, _, ours, _, rescaled = comparison.arms
    learns = "learns slower, since" if ours.loss.mean > small.loss.mean else "did not learn slower here, though"
    return (
        f"At the same rate of {ours.learning_rate:g}, accumulating {learns} it makes {ours.updates:,} updates where "
        f"batch {small.micro_batch} makes {small.updates:,}: {ours.accuracy_first.mean:.1%} against "
        f"{small.accuracy_first.mean:.1%} after the first epoch and a loss of {ours.loss.mean:.3f} against "
        f"{small.loss.mean:.3f} after the last; at {rescaled.learning_rate:g}, which scale_lr gives for a batch "
        f"{comparison.steps} times the size, it has {rescaled.accuracy_first.mean:.1%} and {rescaled.loss.mean:.3f}."
    )


def _clipping(comparison: Comparison) -> str:
    small, ours = comparison.arms[0], comparison.arms[2]
    if small.clipped is None or ours.clipped is None:
        return ""
    return (
        f"Clipping at {comparison.clip_norm:g} changed {small.clipped.updates.mean:.4g} of {small.updates:,} updates "
        f"in {small.name} and {ours.clipped.updates.mean:.4g} of {ours.updates:,} accumulated ones, as means over "
        f"seeds; the largest norm of a gradient was {small.clipped.largest_norm:.2g} in {small.name} and "
        f"{ours.clipped.largest_norm:.2g} accumulated."
    )


def _claimed(comparison: Comparison) -> str:
    small, textbook, _, true, _ = comparison.arms
    what = f"claim {comparison.claim}" if comparison.claim else "give no figures for this example"
    return (
        f"The teaching pages that this is from {what}; measured: {small.accuracy_last.mean:.1%} before and "
        f"{textbook.accuracy_last.mean:.1%} after, in {small.ms_per_epoch:.1f} ms an epoch before and "
        f"{textbook.ms_per_epoch:.1f} ms after, where the true batch of {comparison.batch} takes "
        f"{true.ms_per_epoch:.1f} ms."
    )
