"""Sequences of log-normal length, as text has it: many short ones and a few that are as long as the context."""

import math

import torch
from torch import Tensor

IGNORED = -100  # the label of padding; torch's own ignore_index
SIGMA = 1.0  # of the logarithm: the longest of some hundred is about ten times the median


def log_normal_lengths(samples: int, mean: float, longest: int, seed: int) -> list[int]:
    """Draw lengths with that mean; none is longer than `longest`, and one is exactly that long."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(samples, generator=generator, dtype=torch.float64)
    # What is cut off at `longest` lowers the mean, so the middle is searched rather than computed.
    low, high = 0.0, math.log(longest)
    for _ in range(50):
        middle = (low + high) / 2
        if _cut(normal, middle, longest).double().mean() < mean:
            low = middle
        else:
            high = middle
    return [int(length) for length in _cut(normal, low, longest)]


def _cut(normal: Tensor, middle: float, longest: int) -> Tensor:
    lengths = (middle + SIGMA * normal).exp().round().clamp(4, longest).long()
    lengths[normal.argmax()] = longest
    return lengths


def sequences(lengths: list[int], vocabulary: int, seed: int) -> list[Tensor]:
    """Random tokens: time and memory do not depend on what they say."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocabulary, (length,), generator=generator) for length in lengths]


def padded(rows: list[Tensor], value: int, length: int | None = None) -> Tensor:
    """Stack rows, right-padded to the longest of them, or to `length`."""
    width = max(len(row) for row in rows) if length is None else length
    table = torch.full((len(rows), width), value, dtype=torch.long)
    for place, row in enumerate(rows):
        table[place, : len(row)] = row
    return table


def padding_share(micro_batches: list[list[int]], width: int | None = None) -> float:
    """Return which share of the tokens that go through the model is padding.

    Takes the lengths in each micro-batch, padded to the longest of them or to `width`.
    """
    through = sum(len(lengths) * (width or max(lengths)) for lengths in micro_batches)
    return 1 - sum(map(sum, micro_batches)) / through
