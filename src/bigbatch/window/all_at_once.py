"""Weights of micro-batches whose losses are all there before the first backward: their counts add up to the totals.

Where counts are on a device, those of all micro-batches are weighed at once: some kernels for a window, instead of some
for every term of every micro-batch.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bigbatch.loss import refusals
from bigbatch.loss.count import RATIO_TOLERANCE, Count, Term, TotalOfSum, finite
from bigbatch.window.same_loss import keep_factors, keep_names, names_of
from bigbatch.window.tally import Ledger, Weights, is_whole, over_data

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
        keep_names(names_of(every[0]), terms)
        keep_factors(ledger.factors, data)
        ledger.factors = [term.factors for term in data]
    columns = [_Column(column) for column in zip(*rows, strict=True)]
    totals = tuple(column.total for column in columns)
    ledger.totals, ledger.sure = totals if of_all is None else of_all(totals), True
    for column, total in zip(columns, ledger.totals, strict=True):
        column.share(total)
    shares = [tuple(column.shares[place] for column in columns) for place in range(len(every))]
    pairs = list(zip(every, rows, strict=True))
    ones = [_as_one(data, own) for data, own in zip(rows, shares, strict=True)]
    if any(len(data) < len(terms) for terms, data in pairs) and (None in ones or of_all is not None):
        # A term that counts once does so by one rule in all micro-batches, on other ranks, too.
        ones = [one if len(data) == 1 else None for one, data in zip(ones, rows, strict=True)]
    weights = [
        one or ledger.known(terms, data, own, first=not at)
        for at, (one, own, (terms, data)) in enumerate(zip(ones, shares, pairs, strict=True))
    ]
    return _with_value(ledger, weights, columns) if None in ones else weights


def is_hollow(loss: Tensor, terms: list[Term]) -> bool:
    """Whether a micro-batch is known to count nothing, and its loss is 0 / 0; that may stand in its gradient, too."""
    data = over_data(terms)
    if not data or any(isinstance(term.count, Tensor) or term.count or term.kind != "mean" for term in data):
        return False
    return not bool(loss.detach().isfinite())  # a device is waited for where a micro-batch counts nothing, alone


class _Column:
    """One term of the loss in all micro-batches."""

    def __init__(self, terms: Sequence[Term]) -> None:
        counts = [term.count for term in terms]
        self.is_mean = terms[0].kind != "sum"
        self._on_host = not any(isinstance(count, Tensor) for count in counts)
        self.row = _row(counts)
        total: Tensor = self.row.sum()
        self.total: Count = finite(total.item() if self._on_host else total) if self.is_mean else TotalOfSum(1.0)
        self.shares: Sequence[Count] = [1.0] * len(terms)

    def share(self, total: Count) -> None:
        """Give each micro-batch its part of a total, which may be that of all ranks; what counts nothing has none."""
        if self.is_mean:
            of = total if isinstance(total, Tensor) else torch.full_like(self.row[0], total)
            self.row = torch.where(of > 0, self.row / of, 0.0)
            self.shares = self.row.tolist() if self._on_host else self.row.unbind()


def _row(counts: Sequence[Count], like: Tensor | None = None) -> Tensor:
    """Put counts into one tensor, where any of them is one; in float64, in which they are added up."""
    where = next((count for count in counts if isinstance(count, Tensor)), like)
    if where is None:
        return torch.tensor(counts, dtype=torch.float64)
    precise = torch.float32 if where.device.type == "mps" else torch.float64
    alike = all(isinstance(count, Tensor) and count.dtype == where.dtype for count in counts)
    tensors = [
        count.to(count.dtype if alike else precise).reshape(())
        if isinstance(count, Tensor)
        else torch.full((), count, dtype=precise, device=where.device)
        for count in counts
    ]
    return torch.stack(tensors).to(precise)


def _as_one(data: list[Term], shares: tuple[Count, ...]) -> Weights | None:
    """Give one weight for a whole loss, where all its means were taken over the same things.

    Such weights add up to 1 over the micro-batches, so terms that count once come out right, too.
    """
    if not data or any(term.kind != "mean" for term in data):
        return None
    first = shares[0]
    same = all(not isinstance(n, Tensor) and (n - first) ** 2 <= (RATIO_TOLERANCE * first) ** 2 for n in shares)
    return Weights(first) if len(shares) == 1 or (same and not isinstance(first, Tensor)) else None


def _with_value(ledger: Ledger, weights: list[Weights], columns: list[_Column]) -> list[Weights]:
    """Where every term has a weight of its own, on a device: the loss's value is known if they turn out the same."""
    shares = [share for column in columns for share in column.shares]
    like = next((share for share in shares if isinstance(share, Tensor)), None)
    if (
        like is None
        or any(not column.is_mean for column in columns)
        or any(len(w.each) != len(columns) for w in weights)
    ):
        return weights
    every = torch.stack([_row(column.shares, like) for column in columns])
    same = ((every[1:] - every[0]) ** 2 <= (RATIO_TOLERANCE * every[0]) ** 2).all()
    ledger.loss_known = same & ledger.loss_known
    return [weight._replace(of_value=share) for weight, share in zip(weights, every[0].unbind(), strict=True)]
