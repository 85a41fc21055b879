"""Weights of micro-batches whose losses are all there before the first backward: their counts add up to the totals.

Where counts are on a device, those of all micro-batches are weighed at once: some kernels for a window, instead of some
for every term of every micro-batch.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bigbatch.loss import refusals
from bigbatch.loss.count import RATIO_TOLERANCE, Count, Term, TotalOfSum, finite
from bigbatch.window.same_loss import is_whole, keep_factors, keep_names, over_data
from bigbatch.window.tally import Ledger, Weights, in_a_row

OfAll = Callable[[tuple[Count, ...]], tuple[Count, ...]]


def weigh_together(ledger: Ledger, every: list[list[Term]], of_all: OfAll | None = None) -> list[Weights]:
    """Return the weights of all micro-batches; `of_all` makes the totals of all ranks, where there are others."""
    if not all(every):  # a loss of zero adds nothing
        if any(is_whole(over_data(terms)) for terms in every):
            raise refusals.zero_beside_mean()
        some = iter(weigh_together(ledger, [terms for terms in every if terms], of_all))
        keep_factors(ledger.factors, [], zero=True)
        return [next(some) if terms else Weights() for terms in every]
    rows = [over_data(terms) for terms in every]
    for terms, data in zip(every, rows, strict=True):
        keep_names(tuple(term.name for term in every[0]), terms)
        keep_factors(ledger.factors, data)
        ledger.factors = [term.factors for term in data]
    columns = [_Column(column) for column in zip(*rows, strict=True)]
    totals = tuple(column.total for column in columns)
    ledger.totals, ledger.sure = totals if of_all is None else of_all(totals), True
    of_columns = [column.shares(total) for column, total in zip(columns, ledger.totals, strict=True)]
    shares = [tuple(each[place] for each in of_columns) for place in range(len(every))]
    ones = [_as_one(data, own) for data, own in zip(rows, shares, strict=True)]
    if any(len(data) < len(terms) for terms, data in zip(every, rows, strict=True)) and (None in ones or of_all):
        # A term that counts once does so by one rule in all micro-batches, on other ranks, too.
        ones = [one if len(data) == 1 else None for one, data in zip(ones, rows, strict=True)]
    weights = [ones[at] or ledger.known(terms, rows[at], shares[at], is_first=not at) for at, terms in enumerate(every)]
    like = next((share for each in of_columns for share in each if isinstance(share, Tensor)), None)
    has_parts = all(column.is_mean for column in columns) and all(len(w.each) == len(columns) for w in weights)
    if like is None or None not in ones or not has_parts:
        return weights
    # Every term has a weight of its own, on a device: the loss's value is known if they turn out the same.
    parts = torch.stack([in_a_row(each, like) for each in of_columns])
    same = ((parts[1:] - parts[0]) ** 2 <= (RATIO_TOLERANCE * parts[0]) ** 2).all()
    ledger.loss_known = same & ledger.loss_known
    return [weight._replace(of_value=share) for weight, share in zip(weights, parts[0].unbind(), strict=True)]


def is_hollow(loss: Tensor, terms: list[Term]) -> bool:
    """Whether a micro-batch is known to count nothing, and its loss is 0 / 0; that may stand in its gradient, too."""
    data = over_data(terms)
    if not data or any(isinstance(term.count, Tensor) or term.count or term.kind != "mean" for term in data):
        return False
    return not bool(loss.detach().isfinite())  # a device is waited for where a micro-batch counts nothing, alone


class _Column:
    """One term of the loss in all micro-batches."""

    def __init__(self, terms: Sequence[Term]) -> None:
        self.is_mean, counts = terms[0].kind != "sum", [term.count for term in terms]
        like = next((count for count in counts if isinstance(count, Tensor)), None)
        self._on_host = like is None
        self._row = torch.tensor(counts, dtype=torch.float64) if like is None else in_a_row(counts, like)
        total: Tensor = self._row.sum()
        self.total: Count = finite(total.item() if self._on_host else total) if self.is_mean else TotalOfSum(1.0)

    def shares(self, total: Count) -> Sequence[Count]:
        """Return each micro-batch's part of a total, perhaps that of all ranks; what counts nothing has none."""
        if not self.is_mean:
            return [1.0] * len(self._row)
        of = total if isinstance(total, Tensor) else torch.full_like(self._row[0], total)
        row = torch.where(of > 0, self._row / of, 0.0)
        return row.tolist() if self._on_host else row.unbind()


def _as_one(data: list[Term], shares: tuple[Count, ...]) -> Weights | None:
    """Give one weight for a whole loss, where all its means were taken over the same things.

    Such weights add up to 1 over the micro-batches, so terms that count once come out right, too.
    """
    if not data or any(term.kind != "mean" for term in data):
        return None
    first = shares[0]
    same = all(not isinstance(n, Tensor) and (n - first) ** 2 <= (RATIO_TOLERANCE * first) ** 2 for n in shares)
    return Weights(first) if len(shares) == 1 or (same and not isinstance(first, Tensor)) else None
