"""A window is one big batch of one loss: what must not change from one of its micro-batches to the next."""

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import Node

from bigbatch.errors import LossError, SeveralCounts
from bigbatch.loss import refusals
from bigbatch.loss.count import RATIO_TOLERANCE, Count, Term

Factors = tuple[float | None, ...]
COUNTED_TWICE = "a loss_fn with the same terms and counts each time: it is called twice for the same samples"


def over_data(terms: list[Term]) -> list[Term]:
    """Return those that depend on data."""
    return terms if len(terms) == 1 and terms[0].kind != "once" else [t for t in terms if t.kind != "once"]


def is_whole(data: list[Term]) -> bool:
    """Whether some term is a mean over all samples: one that is zero in another micro-batch would count there, too."""
    return any(term.kind == "mean" and not term.chosen for term in data)


def keep_names(before: tuple[str, ...], terms: list[Term]) -> None:
    """Raise where the terms are others than those before."""
    now = tuple([term.name for term in terms])
    if before and now and now != before and "count=" not in (*now, *before):
        raise LossError(
            f"the loss changed within a window: its terms were {', '.join(before)} and are {', '.join(now)} now. A "
            "window makes one big batch, which has one loss.",
            fix="one accumulator per loss, or the sum of a batch's losses; accumulator.flush() ends a window early",
            fix_in_step="every term for every micro-batch, as counted(term, n) with n = 0 where it does not apply; "
            "or a BigStep for each loss",
        )


def keep_factors(before: Sequence[Factors] | None, data: list[Term], *, zero: bool = False) -> None:
    """A constant factor is constant: one that changes with the micro-batch may be a count in disguise.

    So may one beside a loss of `zero`: it may be the factor that was zero.
    """
    if zero and any(every := [*(before or ()), *(term.factors for term in data)]):
        raise refusals.changing_factor("the loss", "0", shown(max(every, key=len)))
    for then, term in zip(before, data, strict=True) if before is not None and len(data) == len(before) else ():
        if then != term.factors and without_ones(then) != without_ones(term.factors):
            raise refusals.changing_factor(term.name, shown(then), shown(term.factors))


def without_ones(factors: Factors) -> Factors:
    """Return the factors that change something."""
    return tuple(factor for factor in factors if factor != 1.0)


def shown(factors: Factors) -> str:
    """Return the factors of a term in words."""
    return " x ".join("a tensor" if each is None else f"{each:g}" for each in without_ones(factors)) or "none"


def in_ratio(reference: Sequence[Count], terms: list[Term], before: bool | Tensor) -> bool | Tensor:  # noqa: FBT001
    """Several counts in constant ratio are as good as one; raise where it is another than that of `reference`.

    On a device that is not known yet: what tells is returned, of micro-batches `before`, too.
    """
    counts, found = [term.count for term in over_data(terms)], before
    if not reference or len(counts) == len(reference) == 1:
        if len(counts) > 1 and not isinstance(counts[0], Tensor) and not counts[0] and any(counts):
            refuse_several(terms, "counts not in constant ratio")
        return before
    if len(counts) != len(reference):
        refuse_several(terms, f"another number of terms, {len(counts)} here and {len(reference)} before,")
    for now, then in zip(counts[1:], reference[1:], strict=True):
        here, there = now * reference[0], then * counts[0]
        if isinstance(here, Tensor) or isinstance(there, Tensor):
            found = torch.as_tensor((here - there) ** 2 <= (RATIO_TOLERANCE * here) ** 2) & found
        elif abs(here - there) > RATIO_TOLERANCE * max(here, there):
            refuse_several(terms, "counts not in constant ratio")
    return found


def refuse_shared_nodes(terms: list[Term], weights: Sequence[tuple[Node, Count]]) -> None:
    """One learned factor over terms of different counts leaves no place for two weights."""
    seen: dict[Node, Count] = {}
    for node, weight in weights:
        if seen.setdefault(node, weight) is not weight and seen[node] != weight:
            raise SeveralCounts(
                f"terms with different counts stand under one learned factor: {listed(terms)}.\n"
                "Multiply it into each term: a * x + a * y instead of a * (x + y)."
            )


def listed(terms: list[Term]) -> str:
    """Show terms with their counts, without waiting for a device."""
    told = [f" over {t.count:g}" if t.kind == "mean" and not isinstance(t.count, Tensor) else "" for t in terms]
    return ", ".join(f"{term.name} ({term.kind}{over})" for term, over in zip(terms, told, strict=True))


def refuse_several(terms: list[Term], found: str) -> NoReturn:
    """Raise: several counts must be known before the first backward. A term that may be a constant is told of first."""
    for term in over_data(terms):
        if term.doubtful:
            raise refusals.data_or_constant(term.name)
    raise several(listed(terms), found)


def several(terms: str, found: str) -> SeveralCounts:
    """Explain that several counts must be known before the first backward."""
    return SeveralCounts(
        f"the terms of this loss were averaged over different things: found {found} in {terms}. Nothing was stepped.\n"
        "Their gradients share one buffer, so each term's total over the window must be known before its first "
        "backward. Give the counts of a batch, one per term in the order in which they are written:\n"
        "    Accumulator(..., counts=lambda batch: ((batch['labels'] != -100).sum(), len(batch['labels'])))\n"
        "The wrapped loader then looks a window ahead. A mean over elements counts elements; a sum counts as 'sum'."
    )
