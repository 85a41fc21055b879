"""Weights of micro-batches whose losses are all there before the first backward: their counts add up to the totals.

Where counts are on a device, those of all micro-batches are weighed at once: some kernels for a window, instead of some
for every term of every micro-batch.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bigbatch.errors import LossError
from bigbatch.loss.count import RATIO_TOLERANCE, Count, Term, TotalOfSum, finite
from bigbatch.window.gradients import Gradients
from bigbatch.window.same_loss import keep_factors, names_of
from bigbatch.window.tally import Ledger, Weights, over_data

OfAll = Callable[[tuple[Count, ...]], tuple[Count, ...]]


def weigh_together(ledger: Ledger, every: list[list[Term]], of_all: OfAll | None = None) -> list[Weights]:
    """Return the weights of all micro-batches; `of_all` makes the totals of all ranks, where there are others."""
    if not all(every):  # a loss of zero adds nothing
        some = iter(weigh_together(ledger, [terms for terms in every if terms], of_all))
        keep_factors(ledger.factors, [], zero=True)
        return [next(some) if terms else Weights() for terms in every]
    rows = [over_data(terms) for terms in every]
    for terms, data in zip(every, rows, strict=True):
        if names_of(terms) != names_of(every[0]):
            shown = f"{', '.join(names_of(every[0]))} in one and {', '.join(names_of(terms))} in another"
            msg = (
                f"the loss changes within a batch: its terms are {shown} micro-batch. A big batch has one loss: "
                "write every term for every micro-batch, as counted(term, n) with n = 0 where it does not "
                "apply."
            )
            raise LossError(msg)
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


def refuse_hollow(gradients: Gradients) -> None:
    """Raise where a micro-batch that counts nothing has left 0 / 0 in the gradient: all that it weighs is not less."""
    if all(bool(each.isfinite().all()) for each in gradients.dense()):
        return
    msg = (
        "the gradient is not finite, and a micro-batch of this batch counts nothing: where its loss divides by its "
        "count by hand, 0 / 0 stands in its gradient. Others wait for it, so it cannot be left out. Nothing was "
        "stepped.\n"
        "Divide by one at least:  counted((values * mask).sum() / mask.sum().clamp(min=1), mask.sum())"
    )
    raise LossError(msg)


class _Column:
    """One term of the loss in all micro-batches."""

    def __init__(self, terms: Sequence[Term]) -> None:
        counts = [term.count for term in terms]
        self.is_mean = terms[0].kind != "sum"
        self.row: Tensor | None = _row(counts) if self.is_mean else None  # what is on a device
        self.total: Count = TotalOfSum(1.0)
        if self.row is not None:
            self.total = self.row.sum()
        elif self.is_mean:
            self.total = finite(sum(counts, start=0.0))
        self.shares: Sequence[Count] = [1.0] * len(terms) if not self.is_mean else counts

    def share(self, total: Count) -> None:
        """Give each micro-batch its part of a total, which may be that of all ranks; what counts nothing has none."""
        if not self.is_mean:
            return
        if self.row is not None:
            # A total of all ranks is a number.
            is_any = total > 0 if isinstance(total, Tensor) else torch.full_like(self.row, total) > 0
            self.row = torch.where(is_any, self.row / total, 0.0)
            self.shares = self.row.unbind()
        elif isinstance(total, Tensor):
            self.shares = [torch.where(total > 0, count / total, 0.0) for count in self.shares]
        else:
            self.shares = [count / total if total else 0.0 for count in self.shares]


def _row(counts: Sequence[Count], like: Tensor | None = None) -> Tensor | None:
    """Put counts into one tensor, where any of them is one; in float64, in which they are added up."""
    where = next((count for count in counts if isinstance(count, Tensor)), like)
    if where is None:
        return None
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
    rows = [column.row for column in columns]
    means = all(column.is_mean for column in columns)
    like = next((row for row in rows if row is not None), None)
    if not means or like is None or any(len(weight.each) != len(rows) for weight in weights):
        return weights
    every = torch.stack([row for row in (_row(column.shares, like) for column in columns) if row is not None])
    same = ((every[1:] - every[0]) ** 2 <= (RATIO_TOLERANCE * every[0]) ** 2).all()
    ledger.loss_known = same & ledger.loss_known
    return [weight._replace(of_value=share) for weight, share in zip(weights, every[0].unbind(), strict=True)]
