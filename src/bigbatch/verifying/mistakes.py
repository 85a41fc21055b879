"""Weights that a loop used, beside those it should have: which of the usual mistakes is it?"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bigbatch.verifying.evidence import listed, proportion
from bigbatch.verifying.weights import Fit, is_zero, near

_NEVER = 1e-6  # of once: no more than rounding
_SCALES = 256.0  # a loss scale is a power of two, and at least this

BY_HAND = (
    "If that is clipping by hand, it may be right: clip with torch.nn.utils.clip_grad_norm_ or clip_grad_value_, which "
    "are left out of the comparison, or verify without it."
)
_EVERY = "Call backward for every micro-batch of the window, from its first one on:  for batch in micro_batches: ..."
_LAST = (
    "Step after the last micro-batch, too:  if (i + 1) % steps == 0 or i + 1 == len(loader), and divide by how many "
    "there really are; or  for batch in accumulator.over(loader), which loses none."
)


@dataclass(frozen=True)
class Mistake:
    """One thing that is wrong with some weights, and the weights without it."""

    kind: str
    where: str
    found: str
    repaired: tuple[float, ...]
    alone: float = 0.0  # what the term of parameters alone weighs then
    remedy: str = ""
    scale: float = 1.0  # what all weights are wrong by
    share: float = 1.0


def mistakes(
    taken: Fit,
    right: Fit,
    parts: Sequence[Mapping[str, Tensor]],
    truth: Mapping[str, Tensor],
    alone: Mapping[str, Tensor] | None = None,
    *,
    backwards: int | None = None,
) -> list[Mistake]:
    """Tell the mistakes apart, each with how much of the difference goes without it.

    Args:
        taken: by which weights the micro-batches were added up.
        right: by which they should have been.
        parts: the gradient of each.
        truth: the big batch's.
        alone: that of a term of parameters alone.
        backwards: how many came to the model in the window, where that is known.
    """
    found = list(_told(taken, right, backwards, counts_alone=alone is not None))
    columns = [*parts, alone] if alone is not None else list(parts)

    def apart(weights: Sequence[float], of_alone: float) -> float:
        return _distance([*weights, of_alone] if alone is not None else weights, columns, truth)

    before = apart(taken.weights, taken.alone)
    return [replace(each, share=_less(before, apart(each.repaired, each.alone))) for each in found]


def _told(taken: Fit, right: Fit, backwards: int | None, *, counts_alone: bool) -> Iterator[Mistake]:
    used, should = taken.weights, right.weights
    number = len(used)
    left_out = [i for i in range(number) if is_zero(used[i], used) and not is_zero(should[i], should)]
    kept = [i for i in range(number) if i not in left_out]
    ratio = taken.ratio(right)
    scale = ratio if ratio is not None else _scale(used, should, kept)
    shares = math.fsum(should[i] for i in kept) / (math.fsum(should) or 1.0)
    averaged = bool(left_out) and (near(scale, number / len(kept), 1e-3) or near(scale * shares, 1.0, 1e-3))
    if left_out and kept:
        cleared = backwards is None or backwards > len(kept)  # more came than are left
        yield _left_out(taken, right, left_out, kept, averaged=averaged, cleared=cleared)
    if averaged:  # over those that were left
        scale = 1.0
    if not near(scale, 1.0, 1e-3):
        yield _scaled(scale, taken, right)
    if ratio is None:
        yield Mistake(
            "wrong-count",
            "",
            f"micro-batches were weighed {proportion(used)}; the big batch weighs them {proportion(should)}",
            tuple(scale * weight if i in kept else 0.0 for i, weight in enumerate(should)),
            taken.alone,
        )
    if counts_alone and not left_out:
        times = (math.fsum(used) + taken.alone) / scale
        once = math.fsum(should) + right.alone
        if not near(times, once, 1e-3):
            kind, text = _of_alone(times, once, number)
            repaired = taken.alone + scale * (once - times)
            yield Mistake(kind, "a term of parameters alone", text, used, repaired)


def _of_alone(times: float, once: float, number: int) -> tuple[str, str]:
    """Say how often a term that no sample is in counts: a regulariser may be left out, too."""
    if abs(times) <= _NEVER * abs(once):
        return "missing-term", "a term that no sample is in counts in the big batch, and not in the window"
    text = f"a term that no sample is in counts {times:.3g} times in the window, and {once:.3g} times in the big batch"
    each = near(times, number * once, 1e-3)
    return "counted-per-micro-batch", text + (": it was added for each micro-batch" if each else "")


def _left_out(
    taken: Fit, right: Fit, left_out: Sequence[int], kept: Sequence[int], *, averaged: bool, cleared: bool
) -> Mistake:
    """Some micro-batches do not count: the first ones may have been cleared away, others never came to the step."""
    used, number, ratio = taken.weights, len(taken.weights), taken.ratio(right)
    repaired = tuple(
        weight if i in kept else used[kept[0]] if ratio is None else ratio * right.weights[i]
        for i, weight in enumerate(used)
    )
    if averaged:
        repaired = right.weights
    first = max(left_out) < min(kept)
    if first and cleared:
        which, verb, it = (f"last {len(kept)}", "count", "them") if len(kept) > 1 else ("last", "counts", "it")
        text = f"only the {which} of {number} micro-batches {verb}: gradients from before {it} were cleared inside"
        return Mistake("zeroed-inside", "zero_grad", f"{text} the window", repaired, taken.alone)
    which = listed([str(i + 1) for i in left_out])
    verb, its = ("does", "its gradient") if len(left_out) == 1 else ("do", "their gradients")
    text = f"micro-batch {which} of {number} {verb} not count: {its} did not come to the step"
    if not cleared:
        text += ", and nothing was cleared"
    remedy = _EVERY if first else _LAST
    return Mistake("dropped-micro-batch", f"micro-batch {which}", text, repaired, taken.alone, remedy)


def _scaled(scale: float, taken: Fit, right: Fit) -> Mistake:
    """All weights are wrong by one factor: which division is missing, or one too many?"""
    number, sums = len(taken.weights), all(near(weight, 1.0) for weight in right.weights)
    times = f"the gradient is {scale:.4g} times the big batch's"
    kind, where, remedy = "wrong-scale", "loss", ""
    if scale < 0:
        text = f"{times}: its sign is turned, so a step goes uphill"
        remedy = "Take the minus before the loss out; to climb on purpose:  torch.optim.SGD(..., maximize=True)"
        if not near(scale, -1.0, 1e-3):
            remedy += ", and divide by what the window really has, its count."
    elif near(scale, number, 1e-3) and not sums:
        kind, text = "not-divided", f"{times}, once for each of {number} micro-batches"
    elif near(scale, 1 / number, 1e-3) and not sums:
        kind, text = "divided-twice", f"{times}: divided by the number of micro-batches once too often"
        remedy = "the loss's own, or the framework's (gradient_accumulation_steps=, accumulate_grad_batches=)."
    elif near(scale, 1 / number, 1e-3):
        text = f"{times}: a sum was divided"
        remedy = "The loss is a sum, which adds up by itself: take the division by the number of micro-batches out."
    elif scale >= _SCALES and near(math.log2(scale), round(math.log2(scale)), 1e-9):
        where, text = "scaler", f"{times}, a power of two: a loss scale was left in"
        remedy = "Unscale before you read or clip gradients:  scaler.unscale_(optimizer)"
    else:
        divisor = number / scale
        whole = near(divisor, round(divisor), 1e-5)  # of many, one is near to anything
        text = times + (f", as if divided by {round(divisor)} instead of {number}" if whole else "")
        remedy = "Divide by what the window really has: the number of its micro-batches, or better its count."
        if 0 < scale < 1 and not whole:
            remedy += f" {BY_HAND}"
    repaired = tuple(weight / scale for weight in taken.weights)
    return Mistake(kind, where, text, repaired, taken.alone / scale, remedy, scale)


def _scale(used: Sequence[float], should: Sequence[float], kept: Sequence[int]) -> float:
    """Return the factor that all weights together are wrong by, where each is wrong by its own."""
    total = math.fsum(should[i] for i in kept)
    known = [i for i in kept if not is_zero(should[i], should)]  # what counts nothing does not show its weight
    even = all(near(used[i], used[known[0]]) for i in known) if known else False
    number = len(used)
    if even:  # one weight for all: is it 1/n, as a mean has it, or 1, or 1/n twice?
        return used[known[0]] * number
    return math.fsum(used[i] for i in kept) / total if total else 1.0


def _sum(weights: Sequence[float], parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    pairs = list(zip(weights, parts, strict=True))
    return {
        name: torch.stack([weight * part[name] for weight, part in pairs]).sum(0)
        for name in (parts[0] if parts else ())
    }


def _distance(weights: Sequence[float], parts: Sequence[Mapping[str, Tensor]], aim: Mapping[str, Tensor]) -> float:
    found = _sum(weights, parts)
    return math.sqrt(math.fsum(float((found[name] - aim[name]).square().sum()) for name in aim))


def _less(before: float, after: float) -> float:
    return 1 - after / before if before else 0.0
