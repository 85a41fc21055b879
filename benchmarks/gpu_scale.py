"""How large everything is: for an H200, or tiny, so that the script can be tried on any machine in seconds."""

from dataclasses import dataclass, field

import torch
from torch import nn

from benchmarks.lora import LlamaShape
from benchmarks.models import GPT


@dataclass(frozen=True)
class Ragged:
    """Batches of sequences of log-normal length."""

    samples: int
    mean: int
    longest: int


@dataclass(frozen=True)
class Scale:
    """Sizes of the models and of the work; the defaults are those of the issue that set the bars."""

    device: str
    vocabulary: int = 50304
    context: int = 1024
    layers: int = 12
    heads: int = 12
    width: int = 768
    windows: tuple[tuple[int, int], ...] = ((1, 32), (4, 8), (8, 8))  # micro-batch × steps
    ragged: Ragged = Ragged(256, 269, 1024)
    micro_batch: int = 8  # of the ragged work's hand loop
    sizing: int = 64  # samples in the batch that "auto" has to cut
    budgets: tuple[str, ...] = ("24GiB", "12GiB")
    llama: LlamaShape = field(default_factory=LlamaShape)
    llama_ragged: Ragged = Ragged(64, 721, 4096)
    llama_budget: str = "24GiB"

    def gpt(self) -> nn.Module:
        """Return the GPT: made on the device, where a hundred million random numbers take no time."""
        with torch.device(self.device):
            return GPT(
                vocabulary=self.vocabulary,
                context=self.context,
                layers=self.layers,
                heads=self.heads,
                width=self.width,
            )

    @property
    def token_budget(self) -> int:
        """What one micro-batch of the ragged work's hand loop has at most: the same peak."""
        return self.micro_batch * self.ragged.longest


def scale(device: str, *, tiny: bool) -> Scale:
    """Return the sizes for this run."""
    if not tiny:
        return Scale(device)
    return Scale(
        device,
        vocabulary=65,
        context=32,
        layers=2,
        heads=2,
        width=32,
        windows=((1, 8), (4, 2)),
        ragged=Ragged(16, 9, 32),
        micro_batch=2,
        sizing=8,
        budgets=("2GiB", "1GiB"),
        llama=LlamaShape(layers=2, width=32, intermediate=64, heads=4, key_value_heads=2, vocabulary=64, context=64),
        llama_ragged=Ragged(16, 12, 64),
        llama_budget="2GiB",
    )


def in_bytes(text: str) -> int:
    """Read "24GiB"."""
    return int(float(text.removesuffix("GiB")) * 2**30)
