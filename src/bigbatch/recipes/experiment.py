"""The textbook's experiment: five ways to train a linear classifier on the same samples in the same order.

Both loops are written as a person would write them in a script, and only there the arms differ. A loop trains on the
micro-batches of one epoch, and returns the norms of its gradients before they were clipped.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from bigbatch.accumulator import Accumulator
from bigbatch.learning_rate import scale_lr

MicroBatches: TypeAlias = Iterable[tuple[Tensor, Tensor]]
Loop: TypeAlias = Callable[[nn.Module, Optimizer, MicroBatches, int, float | None], list[Tensor]]


def textbook_loop(
    model: nn.Module, optimizer: Optimizer, batches: MicroBatches, steps: int, clip_norm: float | None
) -> list[Tensor]:
    """Accumulate as the teaching pages print it, with what is wrong in it; with 1 step, a plain loop.

    A leftover of fewer than `steps` micro-batches is never stepped and is cleared at the next epoch's start; and
    every micro-batch weighs 1 / `steps`, whatever its size.
    """
    norms = []
    optimizer.zero_grad(set_to_none=True)
    for i, (inputs, labels) in enumerate(batches):
        loss = cross_entropy(model(inputs), labels) / steps
        loss.backward()
        if (i + 1) % steps == 0:
            if clip_norm is not None:
                norms.append(clip_grad_norm_(model.parameters(), clip_norm))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return norms


def bigbatch_loop(
    model: nn.Module, optimizer: Optimizer, batches: MicroBatches, steps: int, clip_norm: float | None
) -> list[Tensor]:
    """Accumulate with an `Accumulator`: every sample counts once, and the last window is a window."""
    accumulator = Accumulator(model, optimizer, steps=steps, clip_norm=clip_norm)
    norms = []
    for inputs, labels in accumulator.over(batches):
        update = accumulator.backward(cross_entropy(model(inputs), labels))
        if update is not None and update.grad_norm is not None:
            norms.append(update.grad_norm)
    return norms


@dataclass(frozen=True)
class Arm:
    """One way to train: a loop, what goes through the model at once, and at which rate."""

    name: str
    loop: Loop
    micro_batch: int
    steps: int
    reference: str  # the true big batch at the same rate, whose weights this arm's are compared with
    rescaled: bool = False
    shown: bool = True


@dataclass(frozen=True)
class Recipe:
    """The task, the optimizer and the batch of one published example, on made-up samples."""

    name: str
    origin: str  # where it was published, as the beginning of a sentence
    title: str
    features: int
    classes: int
    labels: Callable[[Tensor, torch.Generator], Tensor]
    make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    micro_batch: int
    steps: int
    clip_norm: float | None = None
    epochs: int = 10
    samples: int = 1000
    validation: int = 1000
    claim: str = "give no figures for this example"

    @property
    def batch(self) -> int:
        """Samples behind one accumulated update."""
        return self.micro_batch * self.steps

    def arms(self) -> tuple[Arm, ...]:
        """Return what is compared, in the order of the table."""
        micro, steps, batch, true = self.micro_batch, self.steps, self.batch, f"true {self.batch}"
        return (
            Arm(f"batch {micro}", textbook_loop, micro, 1, true),
            Arm("textbook", textbook_loop, micro, steps, true),
            Arm("bigbatch", bigbatch_loop, micro, steps, true),
            Arm(true, textbook_loop, batch, 1, true),
            Arm("rescaled", bigbatch_loop, micro, steps, "true, rescaled", rescaled=True),
            Arm("true, rescaled", textbook_loop, batch, 1, "true, rescaled", rescaled=True, shown=False),
        )


@dataclass(frozen=True)
class Task:
    """The samples, the first weights and the order of the samples: equal for all arms of a seed."""

    recipe: Recipe
    inputs: Tensor
    labels: Tensor
    model: nn.Module
    orders: tuple[Tensor, ...]  # of the samples to train on, which come before those to validate on

    @classmethod
    def of(cls, recipe: Recipe, seed: int) -> "Task":
        """Draw everything from one seed, in float64, where rounding cannot hide a wrong weight."""
        generator = torch.Generator().manual_seed(seed)
        total = recipe.samples + recipe.validation
        inputs = torch.randn(total, recipe.features, generator=generator, dtype=torch.float64)
        labels = recipe.labels(inputs, generator)
        with torch.random.fork_rng(devices=[]):  # layers draw from the global generator
            torch.manual_seed(seed)
            model = nn.Linear(recipe.features, recipe.classes, dtype=torch.float64)
        orders = tuple(torch.randperm(recipe.samples, generator=generator) for _ in range(recipe.epochs))
        return cls(recipe, inputs, labels, model, orders)

    def start(self, arm: Arm) -> tuple[nn.Module, Optimizer]:
        """Return a model and the recipe's optimizer, at the recipe's rate or carried over to the big batch."""
        model = copy.deepcopy(self.model)
        optimizer = self.recipe.make_optimizer(model.parameters())
        if arm.rescaled:
            scale_lr(optimizer, self.recipe.micro_batch, self.recipe.batch)
        return model, optimizer

    def micro_batches(self, order: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the samples in this order, cut; the last cut may be short."""
        return ((self.inputs[chosen], self.labels[chosen]) for chosen in order.split(size))

    @torch.no_grad()
    def validate(self, model: nn.Module) -> tuple[float, float]:
        """Return loss and accuracy on samples that were not trained on."""
        logits, labels = model(self.inputs[self.recipe.samples :]), self.labels[self.recipe.samples :]
        accuracy = (logits.argmax(dim=1) == labels).double().mean()
        return cross_entropy(logits, labels).item(), accuracy.item()


def _sum_above_zero(inputs: Tensor, _: torch.Generator) -> Tensor:
    return (inputs.sum(dim=1) > 0).long()


def _of_a_random_teacher(inputs: Tensor, generator: torch.Generator) -> Tensor:
    """Return the largest output of a random linear map: classes that a linear model can learn."""
    teacher = torch.randn(inputs.shape[1], 10, generator=generator, dtype=inputs.dtype)
    return (inputs @ teacher).argmax(dim=1)


TEXTBOOK = Recipe(
    name="textbook",
    origin="The experiment of the teaching pages on gradient accumulation in PyTorch",
    title="1,000 samples of 10 features, label = whether they sum above 0; Linear(10, 2), SGD 0.1",
    features=10,
    classes=2,
    labels=_sum_above_zero,
    make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    micro_batch=16,
    steps=4,
    claim="claim about 70 % validation accuracy before accumulating and 78 % after, and faster training",
)
ADAMW = Recipe(
    name="adamw",
    origin="The second example of the teaching pages on gradient accumulation in PyTorch",
    title="1,000 samples of 100 features, 10 classes of a random linear teacher; Linear(100, 10), AdamW 0.001",
    features=100,
    classes=10,
    labels=_of_a_random_teacher,
    make_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    micro_batch=32,
    steps=4,
    clip_norm=1.0,
)
RECIPES = {recipe.name: recipe for recipe in (TEXTBOOK, ADAMW)}
