"""Put Lightning to the proof: its Trainer, and a loop with Fabric.

python -m examples.verify_lightning
"""

import logging
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from bigbatch import verify

Batch = tuple[Tensor, Tensor]


def loss_fn(model: Any, batch: Batch) -> Tensor:
    """A mean over the samples."""
    return F.cross_entropy(model(batch[0]), batch[1])


class Module(LightningModule):
    """A model as Lightning wants it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Batch) -> Tensor:
        """Return the loss; Lightning divides it by `accumulate_grad_batches`."""
        return loss_fn(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Make an optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def with_trainer(model: nn.Module, micro_batches: list[Batch]) -> None:
    """Fit one window. The loader takes the micro-batches as they are: batch_size=None."""
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        accumulate_grad_batches=len(micro_batches),
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader: DataLoader[Any] = DataLoader(micro_batches, batch_size=None)  # type: ignore[arg-type]  # a list serves
    trainer.fit(Module(model), loader)


def with_fabric(model: nn.Module, micro_batches: list[Batch]) -> None:
    """Accumulate by hand: Fabric leaves the division to its user."""
    fabric = Fabric(accelerator="cpu", devices=1)
    wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for number, batch in enumerate(micro_batches, start=1):
        last = number == len(micro_batches)
        with fabric.no_backward_sync(wrapped, enabled=not last):
            fabric.backward(loss_fn(wrapped, batch) / len(micro_batches))
        if last:
            optimizer.step()
            optimizer.zero_grad()


def main() -> None:
    """Prove both on 30 samples: the last micro-batch is short, and weighs as much as the others."""
    warnings.simplefilter("ignore")  # advice on workers and batch sizes
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
    batch = torch.randn(30, 10), torch.randint(0, 2, (30,))
    for train_window in (with_trainer, with_fabric):
        print(f"--- {train_window.__name__}\n")
        print(verify(model, loss_fn, batch, micro_batch_size=8, train_window=train_window), "\n")


if __name__ == "__main__":
    main()
