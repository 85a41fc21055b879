"""Put hand-written loops to the proof: a right one, and the textbook's with a short last micro-batch.

python -m examples.verify_hand_loop
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import verify

Batch = tuple[Tensor, Tensor]


def loss_fn(model: Any, batch: Batch) -> Tensor:
    """A mean over the samples."""
    return F.cross_entropy(model(batch[0]), batch[1])


def textbook(model: nn.Module, micro_batches: list[Batch]) -> None:
    """Divide by the number of micro-batches, as the textbooks do."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in micro_batches:
        (loss_fn(model, batch) / len(micro_batches)).backward()
    optimizer.step()
    optimizer.zero_grad()


def by_samples(model: nn.Module, micro_batches: list[Batch]) -> None:
    """Weigh by samples; the gradients are left in .grad."""
    total = sum(len(labels) for _, labels in micro_batches)
    for batch in micro_batches:
        (loss_fn(model, batch) * len(batch[1]) / total).backward()


def main() -> None:
    """Prove both on 30 samples, 8 at a time: the last micro-batch has 6."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
    batch = torch.randn(30, 10), torch.randint(0, 2, (30,))
    for train_window in (textbook, by_samples):
        print(f"--- {train_window.__name__}\n")
        print(verify(model, loss_fn, batch, micro_batch_size=8, train_window=train_window), "\n")


if __name__ == "__main__":
    main()
