"""What a rank says when its window closes, and what all of them come to."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from bigbatch.errors import LossError, SeveralCounts, WindowError
from bigbatch.ranks.ranks import Ranks
from bigbatch.reading.counts import Count

_KINDS = {"": 0.0, "mean": 1.0, "sum": 2.0, "known": 3.0}
_SAME = 1e-9


class Statement(NamedTuple):
    """One rank's window, in numbers that add up."""

    total: Count = 0.0  # what it counted
    loss: Count = 0.0  # its value times that
    micro_batches: int = 0
    kind: str = ""  # of its terms
    loss_unknown: Count = 0.0
    missing: int = 0  # parameters that got no gradient
    goes_on: bool = False  # whether this rank has batches for another window
    shares_once: bool = False  # whether it has added its share of a term that counts once
    ratio: Count = 1.0  # of its several counts to the first
    several: bool = False  # whether its counts must be known in advance
    precise: bool = False  # whether its loss is of float64
    left_out: int = 0  # gradients that DDP has not reduced in the last backward, though it should have
    overlapped: bool = False  # whether it has reduced there


class Agreement(NamedTuple):
    """All ranks' windows: one big batch."""

    total: float
    loss: float
    micro_batches: int
    kind: str
    loss_known: bool
    missing: int
    others_go_on: bool
    precise: bool


def agreed(ranks: Ranks, mine: Statement, device: torch.device) -> Agreement:
    """Make a statement and hear those of all others. This waits: for the slowest rank, and for the device.

    Where ranks cannot make one batch of what they have, all of them raise the same error.
    """
    kind, empty = _KINDS[mine.kind], mine.micro_batches == 0
    numbers: Sequence[Count] = [
        mine.total,
        mine.loss,
        float(mine.micro_batches),
        kind,
        kind * kind,
        mine.loss_unknown,
        float(mine.missing),
        float(mine.goes_on),
        float(mine.shares_once),
        0.0 if empty else mine.ratio,
        0.0 if empty else mine.ratio * mine.ratio,
        float(empty),
        float(mine.several),
        float(mine.precise),
        float(mine.left_out),
        float(mine.overlapped),
    ]
    ranks.spoken = True
    found = ranks.added(numbers, device)
    total, loss, micro_batches, kinds, squares, unknown, missing, going, shares, ratios, ratios2, *rest = found
    empties, several, precise, left_out, overlapped = rest
    if left_out:
        raise LossError(
            f"{left_out:g} gradients came in earlier micro-batches of this window and not in its last one, on this "
            "rank or another, so DDP has not reduced them. Nothing was stepped.\n"
            "Take overlap=True out:  Accumulator(...) reduces all of them after the last backward."
        )
    if overlapped and (overlapped != ranks.size or 0 < going < ranks.size):
        raise WindowError(
            f"{ranks.size - overlapped:g} of {ranks.size} ranks have not reduced in their last backward, or have no "
            "window after this one, and overlap=True needs all of them.\n"
            "Take overlap=True out: ranks may then have any number of micro-batches, or none."
        )
    there = ranks.size - empties
    if several and not mine.several:
        raise SeveralCounts(
            "the terms of this loss were averaged over different things, on this rank or another: their totals must be "
            "known in advance.\n"
            "Give the counts of a batch:  Accumulator(..., counts=lambda batch: (tokens, samples))"
        )
    if there and abs(there * squares - kinds * kinds) > _SAME * squares:
        raise LossError(
            "the ranks of this window have different losses: a mean here and a sum there. One big batch has one loss; "
            "compute the same on every rank."
        )
    if there and abs(there * ratios2 - ratios * ratios) > _SAME * ratios2:
        raise SeveralCounts(
            "the terms of this loss were averaged over different things, and the ratio of their counts is another on "
            "every rank.\n"
            "Give the counts of a batch in advance:  Accumulator(..., counts=lambda batch: (tokens, samples))"
        )
    if shares and empties:
        raise WindowError(
            f"this loss is a sum with a term of parameters alone, which every rank adds its share of, and "
            f"{empties:g} of {ranks.size} ranks have no micro-batch in this window.\n"
            "Give every rank a micro-batch, or use a mean over data, whose weights need no share."
        )
    code = kinds / there if there else 0.0
    return Agreement(
        total,
        loss,
        round(micro_batches),
        next(name for name, number in _KINDS.items() if abs(number - code) < 0.5),  # noqa: PLR2004 - whole numbers
        not unknown,
        round(missing),
        going - float(mine.goes_on) > 0.5,  # noqa: PLR2004
        precise > 0,
    )
