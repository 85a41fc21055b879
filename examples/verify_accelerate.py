"""Put a loop with Hugging Face Accelerate to the proof.

python -m examples.verify_accelerate
"""

from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn

from bigbatch import verify

Batch = tuple[Tensor, Tensor]


def loss_fn(model: Any, batch: Batch) -> Tensor:
    """A mean over the samples."""
    return F.cross_entropy(model(batch[0]), batch[1])


def train_window(model: nn.Module, micro_batches: list[Batch]) -> None:
    """One window, as Accelerate's documentation writes it: `accumulate` divides, and steps after the last."""
    # Accelerate keeps its settings for the whole process; each window here begins anew.
    AcceleratorState._reset_state(reset_partial_state=True)  # noqa: SLF001
    GradientState._reset_state()  # noqa: SLF001
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=len(micro_batches))
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for batch in micro_batches:
        with accelerator.accumulate(prepared):
            accelerator.backward(loss_fn(prepared, batch))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def main() -> None:
    """Prove it on 32 samples, and on 30, where the last micro-batch is short."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
    for samples in (32, 30):
        batch = torch.randn(samples, 10), torch.randint(0, 2, (samples,))
        print(f"--- {samples} samples\n")
        print(verify(model, loss_fn, batch, micro_batch_size=8, train_window=train_window), "\n")


if __name__ == "__main__":
    main()
