"""Train every arm of a recipe from the same weights on the same samples in the same order, and measure."""

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bigbatch.errors import ConfigurationError
from bigbatch.memory.meter import LiveBytes
from bigbatch.recipes.loops import MicroBatches
from bigbatch.recipes.recipe import Arm, Recipe, Task
from bigbatch.recipes.results import ArmResult, Clipped, Comparison, Spread


@dataclass
class Tally:
    """Counts updates and the samples in them from outside, so that the loops stay as they would be written."""

    updates: int = 0
    samples_used: int = 0
    _pending: int = 0

    def watch(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Count from now on."""
        model.register_forward_pre_hook(self._forward)
        optimizer.register_step_post_hook(self._stepped)

    def _forward(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not module.training:
            return
        if all(parameter.grad is None for parameter in module.parameters()):
            self._pending = 0  # what was not stepped has been cleared: it is lost, not late
        self._pending += len(inputs[0])

    def _stepped(self, *_: object) -> None:
        self.updates += 1
        self.samples_used += self._pending
        self._pending = 0


@dataclass
class Run:
    """One arm with one seed."""

    tally: Tally = field(default_factory=Tally)
    seconds: list[float] = field(default_factory=list)
    loss: float = 0.0
    accuracies: list[float] = field(default_factory=list)
    learning_rate: float = 0.0
    norms: list[Tensor] = field(default_factory=list)
    """Of the gradients, before clipping."""
    weights: Tensor = field(default_factory=lambda: torch.empty(0))


def compare(
    recipe: Recipe,
    *,
    seeds: int,
    epochs: int | None = None,
    clip_norm: float | None = None,
    on_epoch: Callable[[int, str], None] = lambda seed, arm: None,  # noqa: ARG005
) -> Comparison:
    """Run the recipe with seeds 0 to `seeds` - 1; `on_epoch(seed, arm)` is told of every epoch trained."""
    epochs = recipe.epochs if epochs is None else epochs
    clip_norm = recipe.clip_norm if clip_norm is None else clip_norm
    if seeds < 1 or epochs < 1:
        raise ConfigurationError(f"compare(seeds={seeds}, epochs={epochs}): both are at least 1.")
    with _one_thread():
        runs = _train_all(recipe, range(seeds), epochs, clip_norm, on_epoch)
    task = Task.of(recipe, 0, 1)
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
            _result(
                arm, runs[arm.name], runs[arm.reference or arm.name], clip_norm, _peak(recipe, task, arm, clip_norm)
            )
            for arm in recipe.arms()
            if arm.shown
        ),
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Models this small gain nothing from threads, which on a busy machine cost ten times their work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _train_all(
    recipe: Recipe,
    seeds: range,
    epochs: int,
    clip_norm: float | None,
    on_epoch: Callable[[int, str], None],
) -> dict[str, list[Run]]:
    """Every arm with every seed; seed by seed, so that a slow moment of the machine falls on all arms."""
    runs: dict[str, list[Run]] = {arm.name: [] for arm in recipe.arms()}
    for seed in seeds:
        task = Task.of(recipe, seed, epochs)
        for arm in recipe.arms():
            told = partial(on_epoch, seed, arm.name)
            runs[arm.name].append(_train(recipe, task, arm, clip_norm, told))
    return runs


def _train(recipe: Recipe, task: Task, arm: Arm, clip_norm: float | None, on_epoch: Callable[[], None]) -> Run:
    """One training; only the loops' own time is counted."""
    run = Run()
    model = copy.deepcopy(task.model)
    optimizer = task.optimizer_for(model, recipe, arm)
    run.tally.watch(model, optimizer)
    run.learning_rate = float(optimizer.param_groups[0]["lr"])
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
    """The samples in this order, cut as they are asked for; the last cut may be short."""
    for chosen in order.split(size):
        yield task.inputs[chosen], task.labels[chosen]


def _peak(recipe: Recipe, task: Task, arm: Arm, clip_norm: float | None) -> int:
    """Most tensor bytes alive at once in two updates (the second has the optimizer's state), in a run of its own."""
    model = copy.deepcopy(task.model)
    optimizer = task.optimizer_for(model, recipe, arm)
    live = LiveBytes()
    with live:
        first: MicroBatches = islice(_micro_batches(task, task.orders[0], arm.micro_batch), 2 * arm.steps)
        for _ in arm.loop(model, optimizer, [first], arm.steps, clip_norm):
            pass
    return live.peak


def _result(arm: Arm, runs: list[Run], references: list[Run], clip_norm: float | None, peak: int) -> ArmResult:
    """One column: means over seeds; the time of the fastest epoch, which others on the machine disturbed least."""
    per_epoch = min(seconds for run in runs for seconds in run.seconds)
    tally = runs[0].tally  # the same for every seed: the sizes do not depend on it
    return ArmResult(
        name=arm.name,
        micro_batch=arm.micro_batch,
        steps=arm.steps,
        learning_rate=runs[0].learning_rate,
        rescaled=arm.rescaled,
        updates=tally.updates,
        clipped=None if clip_norm is None else _clipped([torch.stack(run.norms) for run in runs], clip_norm),
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


def _clipped(norms: list[Tensor], clip_norm: float) -> Clipped:
    """How often clipping did anything, from the norms before it, one tensor per seed."""
    return Clipped(
        updates=Spread.of([float((of_a_seed > clip_norm).sum()) for of_a_seed in norms]),
        largest_norm=max(float(of_a_seed.max()) for of_a_seed in norms),
    )
