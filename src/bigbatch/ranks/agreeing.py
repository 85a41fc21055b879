"""What a rank says when its window closes, and what all of them come to."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from bigbatch.errors import LossError, SeveralCounts, WindowError
from bigbatch.ranks.ranks import Ranks, alike
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
    ratio: Count | None = None  # of its several counts to the first, where it has counted anything
    several: bool = False  # whether its counts must be known in advance
    precise: bool = False  # whether its loss is of float64
    left_out: int = 0  # gradients that DDP has not reduced in the last backward, though it should have
    overlapped: bool = False  # whether it has reduced there
    windows: int = 0  # made until now
    parameters: int = 0  # a number of those that are trained
    weights: Count = 0.0  # one of their values, before the first window


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
        0.0 if mine.ratio is None else mine.ratio,
        0.0 if mine.ratio is None else mine.ratio * mine.ratio,
        float(mine.ratio is not None),
        float(empty),
        float(mine.several),
        float(mine.precise),
        float(mine.left_out),
        float(mine.overlapped),
        *(number for each in (mine.windows, mine.parameters, mine.weights) for number in (each, each * each)),
    ]
    ranks.spoken = True
    found = ranks.added(numbers, device, "statement")
    total, loss, micro_batches, kinds, squares, unknown, missing, going, shares, ratios, ratios2, with_ratio, *rest = (
        found
    )
    empties, several, precise, left_out, overlapped, *same = rest
    if left_out:
        raise LossError(
            "DDP has not reduced all gradients in the last backward of this window, on this rank or another: some came "
            "in earlier micro-batches alone or in none, or a forward was not that of DDP, or under its no_sync(). "
            "Nothing was stepped.\n"
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
    if not several:
        _refuse_unlike(ranks, same)
    if there and abs(there * squares - kinds * kinds) > _SAME * squares:
        raise LossError(
            "the ranks of this window have different losses: a mean here and a sum there. One big batch has one loss; "
            "compute the same on every rank."
        )
    if abs(with_ratio * ratios2 - ratios * ratios) > _SAME * ratios2:
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


_APART = (
    "the ranks of this window have made different numbers of windows together: one of them failed in its step, and "
    "went on, so their weights may differ.\n"
    "End the training where a step fails, and load the model and the optimizer from a checkpoint."
)
_OTHER_PARAMETERS = (
    "the ranks of this window train different parameters, so their gradients cannot be added up.\n"
    "Make the same model on every rank, freeze the same of its parameters, and give all of them to the optimizer."
)
_OTHER_WEIGHTS = (
    "the ranks of this window began with different weights, so each would train a model of its own.\n"
    "Call torch.manual_seed(0) before the model is made, load the same checkpoint on every rank, or wrap the model in "
    "DistributedDataParallel, which sends the first rank's weights to all."
)


def _refuse_unlike(ranks: Ranks, same: Sequence[float]) -> None:
    """Raise where ranks have something else that they should have in common."""
    for place, why in enumerate((_APART, _OTHER_PARAMETERS, _OTHER_WEIGHTS)):
        if not alike(ranks.size, same[2 * place], same[2 * place + 1]):
            raise WindowError(why)
