"""A recipe: the task, the optimizer and the batch of one published example, and the arms to compare on it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bigbatch.learning_rate import scale_lr
from bigbatch.recipes.loops import Loop, bigbatch_loop, plain_loop, textbook_loop


@dataclass(frozen=True)
class Recipe:
    """A linear classifier on made-up samples, as teaching pages have them."""

    name: str
    origin: str
    """Where it was published, as the beginning of a sentence."""
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
    claim: str | None = None
    """What the teaching pages say came out, where they say so."""

    @property
    def batch(self) -> int:
        """Samples behind one accumulated update."""
        return self.micro_batch * self.steps

    def arms(self) -> tuple["Arm", ...]:
        """What is compared, in the order of the table."""
        micro, steps, batch = self.micro_batch, self.steps, self.batch
        true = Arm(f"true {batch}", plain_loop, batch, 1)
        true_rescaled = Arm(f"true {batch}, rescaled", plain_loop, batch, 1, rescaled=True, shown=False)
        return (
            Arm(f"batch {micro}", plain_loop, micro, 1, reference=true.name),
            Arm(f"textbook {micro} × {steps}", textbook_loop, micro, steps, reference=true.name),
            Arm(f"bigbatch {micro} × {steps}", bigbatch_loop, micro, steps, reference=true.name),
            true,
            Arm(
                f"bigbatch {micro} × {steps}, rescaled",
                bigbatch_loop,
                micro,
                steps,
                rescaled=True,
                reference=true_rescaled.name,
            ),
            true_rescaled,
        )


@dataclass(frozen=True)
class Arm:
    """One way to train: a loop, what goes through the model at once, and at which rate."""

    name: str
    loop: Loop
    micro_batch: int
    steps: int
    rescaled: bool = False
    reference: str | None = None
    """The true big batch at the same rate, whose weights this arm's are compared with."""
    shown: bool = True


@dataclass(frozen=True)
class Task:
    """The samples, the first weights and the order of the samples: equal for all arms of a seed."""

    inputs: Tensor
    labels: Tensor
    validation_inputs: Tensor
    validation_labels: Tensor
    model: nn.Module
    orders: tuple[Tensor, ...]

    @classmethod
    def of(cls, recipe: Recipe, seed: int, epochs: int) -> "Task":
        """Draw everything from one seed, in float64, where rounding cannot hide a wrong weight."""
        generator = torch.Generator().manual_seed(seed)
        total = recipe.samples + recipe.validation
        inputs = torch.randn(total, recipe.features, generator=generator, dtype=torch.float64)
        labels = recipe.labels(inputs, generator)
        with torch.random.fork_rng(devices=[]):  # layers draw from the global generator
            torch.manual_seed(seed)
            model = nn.Linear(recipe.features, recipe.classes, dtype=torch.float64)
        orders = tuple(torch.randperm(recipe.samples, generator=generator) for _ in range(epochs))
        split = recipe.samples
        return cls(inputs[:split], labels[:split], inputs[split:], labels[split:], model, orders)

    def optimizer_for(self, model: nn.Module, recipe: Recipe, arm: Arm) -> Optimizer:
        """The recipe's optimizer, at the recipe's rate or carried over to the big batch."""
        optimizer = recipe.make_optimizer(model.parameters())
        if arm.rescaled:
            scale_lr(optimizer, recipe.micro_batch, recipe.batch)
        return optimizer

    @torch.no_grad()
    def validate(self, model: nn.Module) -> tuple[float, float]:
        """Loss and accuracy on samples that were not trained on."""
        model.eval()
        logits = model(self.validation_inputs)
        model.train()
        loss = nn.functional.cross_entropy(logits, self.validation_labels)
        accuracy = (logits.argmax(dim=1) == self.validation_labels).double().mean()
        return loss.item(), accuracy.item()
