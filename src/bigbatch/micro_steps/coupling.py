"""The first-step check: is a micro-batch's loss the weighted loss of its halves?

What couples samples inside a model shows in no graph: attention across the batch, a statistic of it, a tensor that was
cut and should not have been. Then a micro-batch's loss is not that of its halves, and no split is exact.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from bigbatch.errors import BatchError, CoupledLoss
from bigbatch.reading.counts import LOW_PRECISION, Kind
from bigbatch.reading.graph import edges
from bigbatch.reading.terms import Term

# How far two roundings of one loss may lie apart; what couples samples moves it by far more.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_LOW_PRECISION_TOLERANCE = 3e-2
_FLOOR = 1e-2
_COUNT_TOLERANCE = 1e-6  # class weights are added up in float32


class Part(NamedTuple):
    """The loss of some samples, and what it was averaged over; its graph is let go."""

    value: float
    kinds: tuple[Kind, ...]  # of its terms
    counts: tuple[float, ...]
    tolerance: float  # how far rounding may move it, relatively

    @classmethod
    def of(cls, loss: Tensor, terms: Sequence[Term]) -> "Part":
        """Take the numbers of a loss."""
        kinds, counts = tuple(term.kind for term in terms), tuple(float(term.count) for term in terms)
        return cls(float(loss.detach()), kinds, counts, _tolerance(loss))

    @classmethod
    def unknown(cls) -> "Part":
        """Stand for samples whose loss could not be had; it refuses nothing."""
        return cls(math.nan, (), (), 0.0)


def combined(parts: Sequence[Part]) -> float | None:
    """Return the loss that the parts make together; None where their values do not tell."""
    counts = [[n for n, kind in zip(part.counts, part.kinds, strict=True) if kind != "once"] for part in parts]
    kinds = {kind for part in parts for kind in part.kinds if kind != "once"}
    values = [part.value for part in parts]
    if not kinds and all(part.kinds for part in parts):
        return values[0]  # made of what all have in common: every part has all of it
    if len({len(row) for row in counts}) != 1 or len(kinds) != 1:
        return None
    if kinds == {"sum"}:
        return math.fsum(values) if not any("once" in part.kinds for part in parts) else None
    ratios = [[number / row[0] if row[0] > 0 else math.nan for number in row] for row in counts]
    if not all(math.isclose(a, b) for row in ratios for a, b in zip(row, ratios[0], strict=True)):
        return None
    total = math.fsum(row[0] for row in counts)
    return math.fsum(value * row[0] for value, row in zip(values, counts, strict=True)) / total


def refused_together(error: Exception) -> CoupledLoss:
    """Explain that two samples fail together, though each runs alone: something was cut that should not have been."""
    said = str(error).strip().splitlines()
    return CoupledLoss(
        f"one sample at a time runs, and two at a time fail with {type(error).__name__}: {said[0] if said else ''}\n"
        "So micro-batches may not be parts of one batch: a tensor that all samples share, and that has as many rows as "
        "there are samples, is cut with them. Nothing was changed.\n"
        "Give such a tensor another shape, as (1, n), or put it into the model. If the model takes one sample at a "
        "time by design:  Options(check=False)"
    )


def shared_state(error: Exception) -> CoupledLoss:
    """Explain that a micro-batch fails beside others, though it runs alone."""
    said = str(error).strip().splitlines()
    return CoupledLoss(
        f"a micro-batch runs alone, and fails beside others with {type(error).__name__}: {said[0] if said else ''}\n"
        f"{_SHARED_STATE} Or rows of all are set against a micro-batch's own, where only one side was gathered: "
        "across.gather(features) goes with across.gather(labels). Nothing was changed."
    )


_SHARED_STATE = (
    "Micro-batches take turns at BatchNorm and at `across`: what the model, a hook or the loss keeps outside of the "
    "call for later, as in self.features = x or features['teacher'] = x, is another micro-batch's after that. Return "
    "it, or pass it on as an argument."
)


def refuse_coupled(whole: Part, halves: Sequence[Part], samples: int, *, side_by_side: bool = False) -> None:
    """Raise where the parts do not make the whole."""
    numbers = [len(part.kinds) for part in (whole, *halves) if part.kinds]
    if len(set(numbers)) > 1:
        msg = (
            f"the loss of {samples} samples has {numbers[0]} terms, and those of two parts of it {numbers[1]} and "
            f"{numbers[-1]}: it has terms for single samples or for what happens to be in a batch, and how they were "
            "averaged does not show. Nothing was changed.\n"
            "Compute all samples' losses in one tensor and reduce it once, or say what the loss is over:  "
            "counted(loss, n), counted(loss, 'sum')"
        )
        raise CoupledLoss(msg)
    together, alone = combined(halves), whole.value
    broken = [part for part in halves if math.isnan(part.value) and part.counts and all(n > 0 for n in part.counts)]
    if not math.isfinite(alone):
        return
    if broken:
        together = math.nan  # as of a standard deviation of one sample
    elif together is None or not math.isfinite(together) or _near(alone, together, (whole, *halves)):
        return
    msg = (
        f"the samples of this batch are coupled: {samples} of them have a loss of {alone:.6g}, and two parts of them "
        f"{together:.6g} together. Something in the model or the loss looks across samples, so no split into "
        "micro-batches gives the big batch's gradient. Nothing was changed.\n"
        "Look for attention, pooling or a statistic over the batch dimension (in a loss: of across.gather, across.sum "
        "or across.mean; rows of own samples begin at across.offset()), for padding that the loss counts, and "
        "for a tensor in the batch that all samples share and that has as many rows as there are samples. Or a call "
        "finds what another has left: an average of weights, a queue, a counter, which is to move once per update: do "
        "that after step(batch), from update.extras where it needs outputs. bigbatch.verify(model, loss_fn, batch) "
        "looks for the cause.\n"
        f"{_turns(side_by_side)}"
        "If the loss only looks so, as one with random numbers of its own:  Options(check=False)"
    )
    raise CoupledLoss(msg)


def _turns(side_by_side: bool) -> str:  # noqa: FBT001 - a part of a sentence
    return f"{_SHARED_STATE}\n" if side_by_side else ""


def refuse_padding(padded: Part, cut: Part) -> None:
    """Raise where a loss is another one without its padding."""
    refuse_counted_padding(padded, cut)
    if not _near(padded.value, cut.value, (padded, cut)) and math.isfinite(padded.value):
        raise BatchError(_of_padding(padded, cut))


def refuse_counted_padding(padded: Part, cut: Part) -> None:
    """Raise where a loss is over something else without its padding, whatever its value."""
    same = len(padded.counts) == len(cut.counts) and all(
        math.isclose(a, b, rel_tol=_COUNT_TOLERANCE) for a, b in zip(padded.counts, cut.counts, strict=True)
    )
    if not same:
        raise BatchError(_of_padding(padded, cut))


def refuse_more_together(together: Part, alone: Sequence[Part]) -> None:
    """Raise where a loss is over more when samples are padded to one length than when each is alone.

    Less is no padding: counted(loss, 1) is the user's word for any number of samples.
    """
    if len({together.kinds, *(part.kinds for part in alone)}) > 1:
        return
    added = (math.fsum(row) for row in zip(*(part.counts for part in alone), strict=True))
    counts = tuple(
        total if kind == "mean" and number > total * (1 + _COUNT_TOLERANCE) else number
        for kind, number, total in zip(together.kinds, together.counts, added, strict=True)
    )
    value = combined(alone)
    refuse_counted_padding(together, together._replace(value=math.nan if value is None else value, counts=counts))


def _of_padding(padded: Part, cut: Part) -> str:
    return (
        f"this loss counts padding: with it the loss is {padded.value:.6g} over {_listed(padded.counts)}, without it "
        f"{cut.value:.6g} over {_listed(cut.counts)}. Packing would change it, so it is refused; nothing was changed.\n"
        "Have the loss ignore padding, as cross_entropy ignores labels of -100, and give the model its attention mask; "
        "or take lengths= out."
    )


def apart(whole: Part, halves: Sequence[Part]) -> float:
    """Return how far the halves are from making the whole, relatively; infinite where their values do not tell."""
    together = combined(halves)
    values = [whole.value, math.nan if together is None else together, *(part.value for part in halves)]
    return abs(values[0] - values[1]) / sized(*values) if all(map(math.isfinite, values)) else math.inf


def sized(*values: float) -> float:
    """Return what differences of losses are measured by."""
    # A loss near zero may be the difference of larger numbers, whose rounding it has.
    return max(_FLOOR, *map(abs, values))


def _near(one: float, other: float, parts: Sequence[Part]) -> bool:
    size = sized(one, other, *(part.value for part in parts))
    return abs(one - other) <= max(part.tolerance for part in parts) * size


def _listed(counts: Sequence[float]) -> str:
    return " and ".join(f"{count:g}" for count in counts)


def _tolerance(loss: Tensor) -> float:
    """Return how far rounding may move a loss, relatively."""
    lowered = torch.is_autocast_enabled(loss.device.type) or _low_inside(loss)
    return _LOW_PRECISION_TOLERANCE if lowered else tolerance_of(loss.dtype)


def tolerance_of(dtype: torch.dtype) -> float:
    """Return how far rounding to a dtype may move a loss, relatively."""
    return _TOLERANCE.get(dtype, _LOW_PRECISION_TOLERANCE)


def _low_inside(loss: Tensor) -> bool:
    """Whether a loss that looks precise was computed with less: in a bf16 model, or under autocast inside of it."""
    stack, seen = [loss.grad_fn], set[Node]()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        metadata: Any = node
        if any(each.dtype in LOW_PRECISION for each in metadata._input_metadata):  # noqa: SLF001 - as reading.graph has it
            return True
        stack.extend(below for below, _ in edges(node))
    return False
