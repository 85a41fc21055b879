"""The first-step check: is a micro-batch's loss the weighted loss of its halves?

What couples samples inside a model shows in no graph: attention across the batch, a statistic of it, a tensor that was
cut and should not have been. Then a micro-batch's loss is not that of its halves, and no split is exact.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bigbatch.errors import BatchError, CoupledLoss
from bigbatch.reading.counts import LOW_PRECISION
from bigbatch.reading.terms import Term

# How far two roundings of one loss may lie apart; what couples samples moves it by far more.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_LOW_PRECISION_TOLERANCE = 3e-2


class Part(NamedTuple):
    """The loss of some samples, and what it was averaged over."""

    value: Tensor
    terms: Sequence[Term]


def combined(parts: Sequence[Part]) -> float | None:
    """Return the loss that the parts make together; None where their values do not tell."""
    rows = [[term for term in part.terms if term.kind != "once"] for part in parts]
    kinds = {term.kind for row in rows for term in row}
    if len({len(row) for row in rows}) != 1 or len(kinds) != 1 or not rows[0]:
        return None
    values = [float(part.value) for part in parts]
    if kinds == {"sum"}:
        alone = all(len(part.terms) == len(row) for part, row in zip(parts, rows, strict=True))
        return math.fsum(values) if alone else None
    counts = [[float(term.count) for term in row] for row in rows]
    ratios = [[number / row[0] if row[0] > 0 else math.nan for number in row] for row in counts]
    if not all(math.isclose(a, b) for row in ratios for a, b in zip(row, ratios[0], strict=True)):
        return None
    total = math.fsum(row[0] for row in counts)
    return math.fsum(value * row[0] for value, row in zip(values, counts, strict=True)) / total


def refuse_coupled(whole: Part, halves: Sequence[Part], samples: int) -> None:
    """Raise where the halves do not make the whole."""
    together, alone = combined(halves), float(whole.value)
    if together is None or not math.isfinite(alone) or not math.isfinite(together):
        return
    if abs(together - alone) <= tolerance(whole.value) * max(abs(alone), abs(together), 1e-3):
        return
    msg = (
        f"the samples of this batch are coupled: {samples} of them have a loss of {alone:.6g}, and their two halves "
        f"{together:.6g} together. Something in the model or the loss looks across samples, so no split into "
        "micro-batches gives the big batch's gradient. Nothing was changed.\n"
        "Look for attention, pooling or a statistic over the batch dimension, and for a tensor in the batch that all "
        "samples share and that has as many rows as there are samples.\n"
        "If the loss only looks so, as one with random numbers of its own:  Options(check=False)"
    )
    raise CoupledLoss(msg)


def refuse_counted_padding(padded: Part, cut: Part) -> None:
    """Raise where a loss is another one without its padding."""
    counts = [[float(term.count) for term in part.terms] for part in (padded, cut)]
    values = [float(padded.value), float(cut.value)]
    near = abs(values[0] - values[1]) <= tolerance(padded.value) * max(abs(values[0]), abs(values[1]), 1e-3)
    if counts[0] == counts[1] and (near or not math.isfinite(values[0])):
        return
    msg = (
        f"this loss counts padding: with it the loss is {values[0]:.6g} over {counts[0]}, without it {values[1]:.6g} "
        f"over {counts[1]}. Packing would change it, so it is refused; nothing was changed.\n"
        "Have the loss ignore padding, as cross_entropy ignores labels of -100, and give the model its attention mask; "
        "or take lengths= out."
    )
    raise BatchError(msg)


def tolerance(value: Tensor) -> float:
    """Return how far rounding may move a loss, relatively."""
    lowered = torch.is_autocast_enabled(value.device.type) or value.dtype in LOW_PRECISION
    return _LOW_PRECISION_TOLERANCE if lowered else _TOLERANCE.get(value.dtype, _LOW_PRECISION_TOLERANCE)


@contextmanager
def calm(models: Sequence[nn.Module]) -> Iterator[None]:
    """Turn dropout and its like off: the models are in evaluation mode inside."""
    training = [(module, module.training) for model in models for module in model.modules()]
    for module, _ in training:
        module.training = False
    try:
        yield
    finally:
        for module, was in training:
            module.training = was
