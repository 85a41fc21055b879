"""Train every arm of a recipe from the same weights on the same samples in the same order; measure, and say so."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
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
        model.register_forward_pre_hook(self._count_samples)
        optimizer.register_step_post_hook(self._count_update)

    def _count_samples(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if torch.is_grad_enabled():
            if all(parameter.grad is None for parameter in module.parameters()):
                self._pending = 0  # gradients that were cleared without a step: their samples are lost, not late
            self._pending += len(inputs[0])

    def _count_update(self, *_: object) -> None:
        self.updates, self.samples_used, self._pending = self.updates + 1, self.samples_used + self._pending, 0


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
        peaks = [_peak(recipe, task, arm, clip_norm) for arm in shown]
    finally:
        torch.set_num_threads(threads)
    results = (
        _result(arm, runs[arm.name], runs[arm.reference or arm.name], clip_norm, peak)
        for arm, peak in zip(shown, peaks, strict=True)
    )
    given: dict[str, Any] = {each.name: getattr(recipe, each.name, None) for each in fields(Comparison)}
    dtype = str(task.inputs.dtype).removeprefix("torch.")
    given |= {"recipe": recipe.name, "seeds": seeds, "epochs": epochs, "clip_norm": clip_norm, "arms": tuple(results)}
    return Comparison(**{**given, "dtype": dtype, "torch": torch.__version__})


def _train(recipe: Recipe, task: Task, arm: Arm, clip_norm: float | None, on_epoch: Callable[[], None]) -> _Run:
    """Train once; only the loops' own time is counted."""
    model, optimizer = task.start(recipe, arm)
    run = _Run(float(optimizer.param_groups[0]["lr"]))
    run.tally.watch(model, optimizer)
    epochs = (task.micro_batches(order, arm.micro_batch) for order in task.orders)
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


def _peak(recipe: Recipe, task: Task, arm: Arm, clip_norm: float | None) -> int:
    """Return the most tensor bytes alive at once in two updates: the second has the optimizer's state."""
    model, optimizer = task.start(recipe, arm)
    with LiveBytes() as live:
        first: MicroBatches = islice(task.micro_batches(task.orders[0], arm.micro_batch), 2 * arm.steps)
        for _ in arm.loop(model, optimizer, [first], arm.steps, clip_norm):
            pass
    return int(live.peak)


def _result(arm: Arm, runs: list[_Run], references: list[_Run], clip_norm: float | None, peak: int) -> ArmResult:
    """Return one column: means over seeds; the time of the fastest epoch, which others disturbed least."""
    per_epoch = min(seconds for run in runs for seconds in run.seconds)
    tally = runs[0].tally  # the same for every seed: the sizes do not depend on it
    clipped = None
    if clip_norm is not None:
        norms = [torch.stack(run.norms) for run in runs if run.norms]
        updates = Spread.of([float((of_a_seed > clip_norm).sum()) for of_a_seed in norms])
        clipped = Clipped(updates, max(float(of_a_seed.max()) for of_a_seed in norms))
    pairs = [(run.weights, true.weights) for run, true in zip(runs, references, strict=True)]
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
        distance=max(float((one - true).norm() / true.norm()) for one, true in pairs),
    )


def findings(comparison: Comparison) -> tuple[str, ...]:
    """Say what the textbook loop lost, what the old rate costs, what clipping did, what was claimed and measured."""
    small, textbook, ours, true, rescaled = comparison.arms
    micro, samples, steps = comparison.micro_batch, comparison.samples, comparison.steps
    lost = "lost nothing here, where all windows are full"
    if left_out := (ours.samples_used - textbook.samples_used) // comparison.epochs:
        lost = (
            f"left {left_out:,} of {samples:,} samples out of every epoch, since {-(-samples // micro)} micro-batches "
            f"are not a multiple of {steps}: {textbook.updates:,} updates where the true batch makes {true.updates:,}"
        )
    elif last := samples % micro:
        lost = (
            f"used every sample, but its last micro-batch has {last} of them instead of {micro} and weighs as much, so "
            f"each of these counts {micro / last:g} times"
        )
    distances = f"{relative(textbook.distance)} from the true batch's, bigbatch's {relative(ours.distance)}"
    said = [f"The textbook loop {lost}; its final weights are {distances}."]
    learns = "learns slower, since" if ours.loss.mean > small.loss.mean else "did not learn slower here, though"
    said.append(
        f"At the same rate of {ours.learning_rate:g}, accumulating {learns} it makes {ours.updates:,} updates where "
        f"batch {micro} makes {small.updates:,}: {ours.accuracy_first.mean:.1%} against "
        f"{small.accuracy_first.mean:.1%} after the first epoch and a loss of {ours.loss.mean:.3f} against "
        f"{small.loss.mean:.3f} after the last; at {rescaled.learning_rate:g}, which scale_lr gives for a batch "
        f"{steps} times the size, it has {rescaled.accuracy_first.mean:.1%} and {rescaled.loss.mean:.3f}."
    )
    if small.clipped is not None and ours.clipped is not None:
        said.append(
            f"Clipping at {comparison.clip_norm:g} changed {small.clipped.updates.mean:.4g} of {small.updates:,} "
            f"updates in {small.name} and {ours.clipped.updates.mean:.4g} of {ours.updates:,} accumulated ones, as "
            f"means over seeds; the largest norm of a gradient was {small.clipped.largest_norm:.2g} in {small.name} "
            f"and {ours.clipped.largest_norm:.2g} accumulated."
        )
    claim = f"claim {comparison.claim}" if comparison.claim else "give no figures for this example"
    said.append(
        f"The teaching pages that this is from {claim}; measured: {small.accuracy_last.mean:.1%} before and "
        f"{textbook.accuracy_last.mean:.1%} after, in {small.ms_per_epoch:.1f} ms an epoch before and "
        f"{textbook.ms_per_epoch:.1f} ms after, where the true batch of {comparison.batch} takes "
        f"{true.ms_per_epoch:.1f} ms."
    )
    return tuple(said)


def relative(distance: float) -> str:
    """Write a relative distance: 0.45, 2e-16."""
    return f"{distance:.0e}" if 0 < distance < 1e-3 else f"{distance:.2g}"  # noqa: PLR2004
