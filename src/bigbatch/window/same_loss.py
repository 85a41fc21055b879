"""A window is one big batch of one loss: what must not change from one of its micro-batches to the next."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import Node

from bigbatch.errors import LossError, SeveralCounts
from bigbatch.loss import refusals
from bigbatch.loss.count import RATIO_TOLERANCE, Count, Term
from bigbatch.window.disagreements import listed, several

Factors = tuple[float | None, ...]


def names_of(terms: list[Term]) -> tuple[str, ...]:
    """Return what the terms of a loss are called."""
    return tuple([term.name for term in terms])


def keep_names(before: tuple[str, ...], terms: list[Term]) -> None:
    """Raise where the terms are others than those before."""
    now = names_of(terms)
    if before and now and now != before and "count=" not in (*now, *before):
        raise LossError(
            f"the loss changed within a window: its terms were {', '.join(before)} and are {', '.join(now)} now. A "
            "window makes one big batch, which has one loss.\n"
            "Use one accumulator per loss, or add the losses of a batch; accumulator.flush() ends a window early."
        )


def keep_factors(before: Sequence[Factors] | None, data: list[Term], *, zero: bool = False) -> None:
    """A constant factor is constant: one that changes with the micro-batch may be a count in disguise.

    So may one beside a loss of `zero`: it may be the factor that was zero.
    """
    if zero and any(every := [*(before or ()), *(term.factors for term in data)]):
        raise refusals.changing_factor("the loss", "0", shown(max(every, key=len)))
    if before is None or len(data) != len(before):
        return
    for then, term in zip(before, data, strict=True):
        if then == term.factors or without_ones(then) == without_ones(term.factors):
            continue
        raise refusals.changing_factor(term.name, shown(then), shown(term.factors))


def in_ratio(reference: list[Count], data: list[Term], terms: list[Term]) -> Tensor | None:
    """Several counts in constant ratio are as good as one; raise where it is another than that of `reference`.

    On a device that is not known yet: what tells is returned.
    """
    if len(data) == 1 and len(reference) <= 1:
        return None
    counts = [term.count for term in data]
    if not reference:
        if not isinstance(counts[0], Tensor) and not counts[0] and any(counts):
            raise SeveralCounts(several(terms, "counts not in constant ratio"))
        return None
    if len(counts) != len(reference):
        raise SeveralCounts(several(terms, f"another number of terms, {len(counts)} here and {len(reference)} before,"))
    first, *others = counts
    found: Tensor | None = None
    for now, then in zip(others, reference[1:], strict=True):
        here, there = now * reference[0], then * first
        if isinstance(here, Tensor) or isinstance(there, Tensor):
            kept = torch.as_tensor((here - there) ** 2 <= (RATIO_TOLERANCE * here) ** 2)
            found = kept if found is None else found & kept
        elif abs(here - there) > RATIO_TOLERANCE * max(here, there):
            refuse_doubtful(data)
            raise SeveralCounts(several(terms, "counts not in constant ratio"))
    return found


def refuse_doubtful(data: list[Term]) -> None:
    """Raise where a term may be one over data, or a constant: then that is what is to be told first."""
    for term in data:
        if term.doubtful:
            raise refusals.data_or_constant(term.name)


def refuse_shared_nodes(terms: list[Term], weights: list[tuple[Node, Count]]) -> None:
    """One learned factor over terms of different counts leaves no place for two weights."""
    seen: dict[Node, Count] = {}
    for node, weight in weights:
        if node in seen and seen[node] is not weight and seen[node] != weight:
            raise SeveralCounts(
                f"terms with different counts stand under one learned factor: {listed(terms)}.\n"
                "Multiply it into each term: a * x + a * y instead of a * (x + y)."
            )
        seen[node] = weight


def without_ones(factors: Factors) -> Factors:
    """Return the factors that change something."""
    return tuple(factor for factor in factors if factor != 1.0)


def shown(factors: Factors) -> str:
    """Return the factors of a term in words."""
    numbers = without_ones(factors)
    return " x ".join("a tensor" if factor is None else f"{factor:g}" for factor in numbers) or "none"
