# ruff: noqa: D102
"""What the tables of losses are made of: tiny models in float64, and data for any number of samples."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = dict[str, Tensor]
CLASSES = 4
STEPS = 6  # the length of a sequence


def join(batches: Sequence[Batch]) -> Batch:
    """The big batch behind these micro-batches: samples lie along the first dimension."""
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


@dataclass(frozen=True)
class Loss:
    """A loss someone may write, with a model and data to write it for.

    `count(batch)` is what the loss was averaged over, where a single term makes that one number.
    `counts(batch)` are the counts of several terms.
    `smallest`: the fewest samples of a micro-batch from which it must be read; with fewer it may be refused.
    `told`: the big batch's loss can be known from the micro-batches' losses; not so where a term that counts once
    stands beside a sum, or where several counts meet, since a graph keeps the sum of the terms and not their values.
    """

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    loss: Callable[[Any, Batch], Tensor]
    count: Callable[[Batch], float] | None = None
    counts: Callable[[Batch], tuple[float, ...]] | None = None
    join: Callable[[Sequence[Batch]], Batch] = join
    smallest: int = 1
    told: bool = True

    def __str__(self) -> str:
        return self.name

    def micro_batches(self, sizes: Sequence[int], seed: int = 0) -> list[Batch]:
        """Different samples for each size."""
        return [self.batch(size, 1000 * seed + index) for index, size in enumerate(sizes)]


# Data: `n` samples from a seed.


def generator(seed: int) -> torch.Generator:
    """A generator of its own, so that no test depends on another's draws."""
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, by: torch.Generator) -> Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(*shape, generator=by, dtype=torch.float64)


def uniform(*shape: int, by: torch.Generator) -> Tensor:
    """Numbers strictly between 0.05 and 0.95 in float64."""
    return 0.05 + 0.9 * torch.rand(*shape, generator=by, dtype=torch.float64)


def labels(*shape: int, by: torch.Generator, ignore: int | None = None) -> Tensor:
    """Class labels; with `ignore`, an uneven part of them is that value, never the first one."""
    made = torch.randint(CLASSES, shape, generator=by)
    if ignore is not None:
        part = 0.2 + 0.6 * torch.rand((), generator=by)
        ignored = torch.rand(shape, generator=by) < part
        ignored.view(-1)[0] = False
        made = made.masked_fill(ignored, ignore)
    return made


# fmt: off
def rows(n: int, seed: int) -> Batch:
    """One vector per sample, and a target of every kind that a loss of torch takes."""
    by = generator(seed)
    whole = functools.partial(torch.randint, generator=by, dtype=torch.float64)
    return {
        "x": normal(n, 3, by=by), "x2": normal(n, 3, by=by), "x3": normal(n, 3, by=by),
        "label": labels(n, by=by), "partly": labels(n, by=by, ignore=-100),
        "value": normal(n, CLASSES, by=by), "scalar": normal(n, by=by), "unit": uniform(n, CLASSES, by=by),
        "probs": normal(n, CLASSES, by=by).softmax(1), "signs": whole(2, (n, CLASSES)) * 2 - 1,
        "sign": whole(2, (n,)) * 2 - 1, "binary": whole(2, (n, CLASSES)), "events": whole(5, (n, CLASSES)),
        "many": labels(n, CLASSES, by=by),
    }


def sequences(n: int, seed: int) -> Batch:
    """Sequences of vectors and of tokens, of uneven length behind a mask, in the first two places never masked."""
    by = generator(seed)
    whole = functools.partial(torch.randint, generator=by)
    lengths, tokens, others = whole(2, STEPS + 1, (n,)), labels(n, STEPS, by=by), labels(n, STEPS, by=by)
    mask = torch.arange(STEPS) < lengths[:, None]
    return {
        "x": normal(n, STEPS, 3, by=by), "value": normal(n, STEPS, CLASSES, by=by), "reference": normal(n, 2, by=by),
        "tokens": tokens, "others": others, "mask": mask, "labels": tokens.masked_fill(~mask, -100), "lengths": lengths,
        "ctc": whole(1, CLASSES, (n, 2)), "ctc_lengths": whole(1, 3, (n,)), "ctc_inputs": whole(5, STEPS + 1, (n,)),
    }


def images(*size: int) -> Callable[[int, int], Batch]:
    """Samples with one, two or three dimensions of space, as `nn.Conv1d` to `nn.Conv3d` take them."""

    def make(n: int, seed: int) -> Batch:
        by = generator(seed)
        return {
            "x": normal(n, 2, *size, by=by), "value": normal(n, CLASSES, *size, by=by), "whole": labels(n, by=by),
            "label": labels(n, *size, by=by), "partly": labels(n, *size, by=by, ignore=-100),
            "probs": normal(n, CLASSES, *size, by=by).softmax(1),
            "binary": labels(n, CLASSES, *size, by=by).remainder(2).double(),
        }

    return make
# fmt: on


# Models: the same weights at each call, float64.


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A factory whose every model starts from the same weights."""

    def build() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return make().double()

    return build


def mlp(outputs: int = CLASSES) -> Callable[[], nn.Module]:
    """3 → 5 → outputs, for single vectors, batches of them, and sequences."""
    return seeded(lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs)))


def conv(dimensions: int) -> Callable[[], nn.Module]:
    """A convolution that keeps the size, 2 → 4 channels."""
    layer = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dimensions]
    return seeded(lambda: layer(2, CLASSES, 3, padding=1))


class Line(nn.Module):
    """The textbook's model: two raw parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3))
        self.b = nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x + self.b


class Tempered(nn.Module):
    """An encoder with a learned temperature, or any other scalar that a loss learns."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()()
        self.s = nn.Parameter(torch.tensor(0.3))
        self.t = nn.Parameter(torch.tensor(-0.2))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Recurrent(nn.Module):
    """An LSTM or a GRU whose hidden states are the output."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU], *, batch_first: bool) -> None:
        super().__init__()
        self.rnn = kind(3, CLASSES, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


class Attention(nn.Module):
    """Causal self-attention with two heads; the output projection may be frozen, as under LoRA, or absent."""

    def __init__(self, head: str = "learned") -> None:
        super().__init__()
        self.qkv = nn.Linear(3, 24)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, CLASSES) if head != "absent" else nn.Identity()
        if head == "frozen":
            self.head.requires_grad_(requires_grad=False)
            self.norm.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(self.norm(mixed.transpose(1, 2).flatten(2)))


class Tokens(nn.Module):
    """A language model without attention: an embedding and a head, the head tied, free or frozen."""

    def __init__(self, head: str = "free") -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, 5)
        self.mix = nn.Linear(5, 5)
        self.head = nn.Linear(5, CLASSES, bias=False)
        if head == "tied":
            self.head.weight = nn.Parameter(torch.randn(CLASSES, 5))
            self.embedding.weight = self.head.weight
        if head == "frozen":
            self.head.requires_grad_(requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        past = self.embedding(tokens).cumsum(1) / torch.arange(1, tokens.shape[1] + 1)[:, None]
        return self.head(torch.tanh(self.mix(past)))
