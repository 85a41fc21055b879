"""What is timed: a model, its micro-batches, its optimizer, and the overhead that is allowed on it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import models

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Workload:
    """A training step that is repeated; `bar` is the most that bigbatch may take, as a ratio to a hand loop."""

    name: str
    model: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]  # from a number of samples
    classes: int
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    bar: float
    micro_batch: int
    updates: int  # per timed region, at least
    rounds: int
    steps: int = 4
    device: str = "cpu"
    autocast: bool = False

    def fresh_model(self) -> nn.Module:
        """Return the same model for every contestant."""
        torch.manual_seed(1)
        return self.model().to(self.device)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross-entropy: one label a sample, or one a token."""
        inputs, labels = batch
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.autocast):
            return F.cross_entropy(model(inputs).view(-1, self.classes), labels)

    def micro_batches(self, updates: int) -> list[Batch]:
        """Make what a loader would yield, already where the model is: loading is no contestant's."""
        torch.manual_seed(0)
        batches = []
        for _ in range(updates * self.steps):
            inputs = self.inputs(self.micro_batch)
            # A label for every prediction; tokens are integers, features are not.
            predictions = self.micro_batch if inputs.is_floating_point() else inputs.numel()
            labels = torch.randint(self.classes, (predictions,))
            batches.append((inputs.to(self.device), labels.to(self.device)))
        return batches


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The textbook experiment's optimizer."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Fused, as a tuned loop has it."""
    return torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)


def workloads(device: str) -> list[Workload]:
    """Everything that is timed on this kind of device."""
    timed = [
        Workload(
            "linear 10→2",
            models.linear,
            lambda samples: torch.randn(samples, 10),
            classes=2,
            optimizer=sgd,
            bar=1.10,
            micro_batch=16,
            updates=20,
            rounds=150,
            device=device,
        ),
        Workload(
            "MLP 784→512→512→10",
            models.perceptron,
            lambda samples: torch.randn(samples, 784),
            classes=10,
            optimizer=adamw,
            bar=1.03,
            micro_batch=32,
            updates=8,
            rounds=60,
            device=device,
        ),
        Workload(
            "GPT, 4 layers of 128",
            models.small_gpt,
            lambda samples: torch.randint(65, (samples, 64)),
            classes=65,
            optimizer=adamw,
            bar=1.03,
            micro_batch=3,
            updates=1,
            rounds=40,
            device=device,
        ),
    ]
    if device.startswith("cuda"):
        timed.append(
            Workload(
                "GPT-124M, bf16 autocast",
                models.gpt_124m,
                lambda samples: torch.randint(50304, (samples, 1024)),
                classes=50304,
                optimizer=adamw,
                bar=1.03,
                micro_batch=4,
                updates=1,
                rounds=20,
                steps=8,
                device=device,
                autocast=True,
            )
        )
    return timed
