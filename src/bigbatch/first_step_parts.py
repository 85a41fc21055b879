"""What parts of a batch come to together, beside the whole, and the words for where they differ."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bigbatch.errors import BatchError, BigBatchError, CoupledLoss, LossError
from bigbatch.loss import refusals
from bigbatch.loss.count import Kind

_FLOOR = 0.1  # a loss near zero may be the difference of larger numbers, whose rounding it has
_COUNT_TOLERANCE = 1e-6  # class weights are added up in float32


@dataclass(frozen=True)
class Part:
    """The loss of some samples, and what it was averaged over."""

    value: float
    kinds: tuple[Kind, ...]  # of its terms
    counts: tuple[float, ...]
    terms: tuple[float, ...]  # what each adds to the value; nothing where that cannot be told
    tolerance: float  # how far rounding may move it, relatively
    norms: int  # how often BatchNorm was called in lock-step
    certain: bool  # whether it used the same random numbers as the whole
    peak: int  # bytes of tensors that its forward held at once


def combined(parts: Sequence[Part]) -> float | None:
    """Return the loss that the parts make together; None where their values do not tell."""
    parts = [part for part in parts if any(part.counts)] or parts  # a mean over nothing adds nothing
    kinds = {kind for kind in parts[0].kinds if kind != "once"}
    if len({part.kinds for part in parts}) > 1:
        return None
    if not kinds:
        return parts[0].value  # made of what all have in common: every part has all of it
    if all(part.terms for part in parts):
        columns = zip(*(zip(part.kinds, part.terms, part.counts, strict=True) for part in parts), strict=True)
        constant = parts[0].value - math.fsum(parts[0].terms)  # as of 1 - dice
        return constant + math.fsum(_added(*zip(*column, strict=True)) for column in columns)
    rows = [[n for n, kind in zip(part.counts, part.kinds, strict=True) if kind != "once"] for part in parts]
    ratios = [[number / row[0] if row[0] > 0 else math.nan for number in row] for row in rows]
    alike = all(math.isclose(a, b) for row in ratios for a, b in zip(row, ratios[0], strict=True))
    if len(kinds) != 1 or not alike or (kinds == {"sum"} and "once" in parts[0].kinds):
        return None
    return _added(tuple(kinds), [part.value for part in parts], [row[0] for row in rows])


def _added(kinds: Sequence[Kind], values: Sequence[float], counts: Sequence[float]) -> float:
    """Return what a term comes to in all parts."""
    if kinds[0] == "once":
        return values[0]
    if kinds[0] == "sum":
        return math.fsum(values)
    total = math.fsum(counts)
    return math.fsum(value * n for value, n in zip(values, counts, strict=True) if n) / total if total else 0.0


def is_near(one: float, other: float, parts: Sequence[Part]) -> bool:
    """Whether two losses differ by rounding alone."""
    # Terms that cancel, as a critic's of real and of fake samples, leave the rounding of each.
    size = max(_FLOOR, abs(one), abs(other), *(max(abs(part.value), sum(map(abs, part.terms))) for part in parts))
    return abs(one - other) <= max(part.tolerance for part in parts) * size


def is_sum_of(whole: Part, parts: Sequence[Part]) -> bool:
    """Whether the parts make the whole, or do not tell."""
    if not math.isfinite(whole.value):
        return True
    if any(math.isnan(part.value) and part.counts and all(n > 0 for n in part.counts) for part in parts):
        return False  # as of a standard deviation of one sample
    if all(part.kinds and set(part.kinds) == {"once"} for part in parts):
        return all(is_near(whole.value, part.value, (whole, *parts)) for part in parts)
    together = combined(parts)
    return together is None or not math.isfinite(together) or is_near(whole.value, together, (whole, *parts))


def tells_nothing(parts: Sequence[Part]) -> bool:
    """Whether a term is zero in every part, as that of PPO while the policy is the one that acted."""
    columns = zip(*(part.terms or (part.value,) for part in parts), strict=True)
    return any(all(abs(value) <= parts[0].tolerance * _FLOOR for value in column) for column in columns)


def counts_more(whole: Part, parts: Sequence[Part]) -> bool:
    """Whether a loss is over more than those of its parts together.

    Less is no padding: counted(loss, 1) is the user's word for any number of samples.
    """
    if len({whole.kinds, *(part.kinds for part in parts)}) > 1:
        return False
    totals = [math.fsum(row) for row in zip(*(part.counts for part in parts), strict=True)]
    pairs = zip(whole.kinds, whole.counts, totals, strict=True)
    return any(kind == "mean" and number > total * (1 + _COUNT_TOLERANCE) for kind, number, total in pairs)


_TURNS = (
    "Micro-batches take turns at BatchNorm and at `across`: what the model, a hook or the loss keeps outside of the "
    "call, as in self.features = x, is another micro-batch's after that. Return it, or pass it on as an argument."
)
_CAUSES = (
    "Common causes: attention, pooling or a statistic over the batch dimension, also without gradient (normalized "
    "advantages, class weights of the batch, a threshold); padding that the loss counts; a divisor that is no count, "
    "where the term is counted(term, 'sum'); a tensor that all samples share and that has as many rows as there are "
    "samples; an average, a queue or a counter that moves in every call, which belongs after step(batch)."
)
_CAUSES_IN_LOCKSTEP = (
    "Common causes: rows of own samples begin at across.offset(), and what is made of across.gather must be the same "
    "in each micro-batch. "
)


def shared_state(error: Exception) -> CoupledLoss:
    """Explain that a micro-batch fails beside others, though it runs alone."""
    said = str(error).strip().splitlines()
    return CoupledLoss(
        f"a micro-batch runs alone, and fails beside others with {type(error).__name__}: {said[0] if said else ''}\n"
        f"{_TURNS} Or only one side of a comparison was gathered: across.gather(features) goes with "
        "across.gather(labels)."
    )


def coupled(whole: Part, parts: Sequence[Part], samples: int, *, in_lockstep: bool) -> LossError:
    """Say that the parts do not make the whole."""
    numbers = [len(part.kinds) for part in parts]
    if len(set(numbers)) > 1:
        return CoupledLoss(
            f"the losses of {len(parts)} parts of {samples} samples have {', '.join(map(str, numbers))} terms: there "
            "are terms for single samples, or for what happens to be in a batch, and what they are averaged over does "
            "not show.",
            fix="one tensor of all samples' losses, reduced once; or counted(loss, n), counted(loss, 'sum')",
        )
    alike = all(is_near(parts[0].value, part.value, parts) for part in parts)
    if not alike and all(set(part.kinds) == {"once"} for part in parts):
        return refusals.shared_alone([part.value for part in parts])
    together = combined(parts)
    return CoupledLoss(
        f"the samples of this batch are coupled: {samples} of them have a loss of {whole.value:.6g}, and {len(parts)} "
        f"parts of them {math.nan if together is None else together:.6g} together, so no split into micro-batches "
        f"gives the big batch's gradient.\n{_CAUSES_IN_LOCKSTEP + _TURNS if in_lockstep else _CAUSES}",
        fix="print(bigbatch.verify(model, loss_fn, batch, micro_batch_size=...)) to find the cause; "
        "Options(check=False) where the loss only looks coupled, as with random numbers of its own",
    )


def at_moved_weights(error: BigBatchError) -> BigBatchError:
    """Say that the losses told are not those of the weights as they are."""
    told = " These are losses with weights that were moved a little: as they are, they make a term zero."
    return type(error)(error.problem + told, fix=error.fix)


def more_norms(whole: Part, parts: Sequence[Part], samples: int) -> CoupledLoss:
    """Say that BatchNorm is called more often for more samples."""
    return CoupledLoss(
        f"BatchNorm is called {whole.norms} times for {samples} samples, and {max(part.norms for part in parts)} times "
        "for a part of them: it normalizes by pieces of the batch (ghost or virtual batches, or one sample after the "
        "other), and which samples make a piece would change with the split.",
        fix='BigStep(..., micro_batch_size=128, options=Options(batch_norm="micro"))',
    )


def padded(whole: Part, parts: Sequence[Part]) -> BatchError:
    """Say that a loss is another one without its padding."""
    together = combined(parts)
    counts = [math.fsum(row) for row in zip(*(part.counts for part in parts), strict=False)]
    return BatchError(
        f"this loss counts padding: with it the loss is {whole.value:.6g}{_listed(whole.counts)}, without it "
        f"{math.nan if together is None else together:.6g}{_listed(counts)}, so packing would change it.",
        fix="a loss that ignores padding, as cross_entropy ignores labels of -100, and an attention mask for the "
        "model; or leave lengths= out",
    )


def _listed(counts: Sequence[float]) -> str:
    return " over " + " and ".join(f"{count:g}" for count in counts) if counts else ""
