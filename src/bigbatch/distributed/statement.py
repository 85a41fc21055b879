"""What a rank says when its window closes, and what all of them come to."""

import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from bigbatch.distributed import shards
from bigbatch.distributed.ranks import Ranks, alike
from bigbatch.distributed.wrappers import HOOKED
from bigbatch.errors import ConfigurationError, LossError, SeveralCounts, WindowError
from bigbatch.loss.count import RATIO_TOLERANCE, Count

_KINDS = {"": 0.0, "mean": 1.0, "sum": 2.0, "known": 3.0}
_SAME = 1e-9
_DIGESTS = 1 << 20
_NONE: Mapping[str, str] = {}


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
    form: str = ""  # its terms and their factors, where those are the same in every micro-batch
    precise: bool = False  # whether its loss is of float64
    left_out: int = 0  # gradients that DDP has not reduced in the last backward, though it should have
    overlapped: bool = False  # whether it has reduced there
    sparse: int = 0  # gradients that are, and should be added up
    hooked: int = 0  # wrappers with a communication hook that is not called
    hooks: bool = False  # whether it has any of its own to call before the step
    nothings: Count = 0.0  # micro-batches that count nothing, and were added all the same
    partial: int = 0  # backwards that have not reached all shards
    windows: int = 0  # made until now
    parameters: int = 0  # a number of which are trained
    weights: Count = 0.0  # one of their values, before the first window
    settings: Mapping[str, str] = _NONE  # before the first window: names in common, with what this rank has for each
    rates: float = 0.0  # a number of the learning rates


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
    hooks: bool  # whether any rank calls some before the step
    nothings: bool  # whether a micro-batch of any counts nothing, and was added all the same
    partial: bool  # whether a backward of any has not reached all shards


def agreed(ranks: Ranks, mine: Statement, device: torch.device) -> Agreement:
    """Make a statement and hear those of all others. This waits: for the slowest rank, and for the device.

    Where ranks cannot make one batch of what they have, all of them raise the same error.
    """
    ranks.spoken = True
    found = _Heard(*ranks.added(_numbers(mine), device, "statement"))
    _refuse(ranks, mine, found)
    if not found.several:
        _refuse_other_settings(ranks, mine, found, device)
        _refuse_other_ratios(ranks, mine, found, device)
    there = ranks.size - found.empties
    code = found.kinds / there if there else 0.0
    return Agreement(
        found.total,
        found.loss,
        round(found.micro_batches),
        next(name for name, number in _KINDS.items() if abs(number - code) < 0.5),  # noqa: PLR2004 - whole numbers
        not found.unknown,
        round(found.missing),
        found.going - float(mine.goes_on) > 0.5,  # noqa: PLR2004
        found.precise > 0,
        found.hooks > 0,
        found.nothings > 0,
        found.partial > 0,
    )


class _Heard(NamedTuple):
    """The numbers of all statements, added up."""

    total: float
    loss: float
    micro_batches: float
    kinds: float
    squares_of_kinds: float
    unknown: float
    missing: float
    going: float
    shares: float
    ratios: float
    with_ratio: float
    empties: float
    several: float
    forms: float
    squares_of_forms: float
    with_form: float
    precise: float
    left_out: float
    overlapped: float
    sparse: float
    hooked: float
    hooks: float
    nothings: float
    partial: float
    windows: float
    squares_of_windows: float
    parameters: float
    squares_of_parameters: float
    weights: float
    squares_of_weights: float
    settings: float
    squares_of_settings: float
    rates: float
    squares_of_rates: float


def _numbers(mine: Statement) -> Sequence[Count]:
    """Return what a rank says, in numbers that add up."""
    kind = _KINDS[mine.kind]
    form = _digest(mine.form) if mine.form else 0.0
    parameters = float(mine.parameters % _DIGESTS)
    return [
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
        float(mine.ratio is not None),
        float(mine.micro_batches == 0),
        float(mine.several),
        form,
        form * form,
        float(bool(mine.form)),
        float(mine.precise),
        float(mine.left_out),
        float(mine.overlapped),
        float(mine.sparse),
        float(mine.hooked),
        float(mine.hooks),
        mine.nothings,
        float(mine.partial),
        *(number for each in (mine.windows, parameters, mine.weights) for number in (each, each * each)),
        *(number for each in (_digest(*mine.settings.values()), mine.rates) for number in (each, each * each)),
    ]


def _refuse(ranks: Ranks, mine: Statement, found: _Heard) -> None:
    """Raise where ranks cannot make one batch of what they have; the same on all of them."""
    if found.sparse:
        raise ConfigurationError(_SPARSE)
    if found.hooked:
        raise ConfigurationError(shards.HOOKED if ranks.sharded else HOOKED)
    if found.left_out:
        raise LossError(_LEFT_OUT)
    if found.overlapped and (found.overlapped != ranks.size or 0 < found.going < ranks.size):
        what = (
            f"{ranks.size - found.overlapped:g} of {ranks.size} ranks have not reduced in their last backward"
            if found.overlapped != ranks.size
            else f"{ranks.size - found.going:g} of {ranks.size} ranks have no batch after this window, and others have"
        )
        raise WindowError(
            f"{what}; overlap=True needs all of them in every window.\n"
            "Take overlap=True out: ranks may then have any number of micro-batches, or none."
        )
    if found.several and not mine.several:
        raise SeveralCounts(_SEVERAL)
    if not found.several:
        _refuse_unlike(ranks, found[_Heard._fields.index("windows") :])
    there = ranks.size - found.empties
    if there and abs(there * found.squares_of_kinds - found.kinds * found.kinds) > _SAME * found.squares_of_kinds:
        raise LossError(_OTHER_LOSSES)
    if not found.several and not alike(round(found.with_form), found.forms, found.squares_of_forms):
        raise LossError(_OTHER_FORMS.format(f"; here {mine.form}" if mine.form else ""))
    if found.shares and found.empties:
        known = found.kinds > (_KINDS["sum"] + 0.5) * there
        beside, instead = (
            (
                "terms whose counts are known in advance",
                "weight_decay= of the optimizer, where it is a penalty on weights",
            )
            if known
            else ("a sum", "a mean over data in the sum's place, whose weights need no share")
        )
        raise WindowError(
            f"this loss has a term of parameters alone beside {beside}, every rank adds its share of that, and "
            f"{found.empties:g} of {ranks.size} ranks have no micro-batch in this window.\n"
            f"Give every rank a micro-batch, or use {instead}."
        )


_SPARSE = (
    "gradients are sparse, on this rank or another, and cannot be added up over ranks here. Nothing was stepped.\n"
    "Make them dense:  nn.Embedding(..., sparse=False)"
)
_LEFT_OUT = (
    "DDP has not reduced all gradients in the last backward of this window, on this rank or another: some came "
    "in earlier micro-batches alone or in none, or a forward was not that of DDP, or under its no_sync(). "
    "Nothing was stepped.\n"
    "Take overlap=True out:  Accumulator(...) reduces all of them after the last backward."
)
_SEVERAL = (
    "the terms of this loss were averaged over different things, on this rank or another: their totals must be "
    "known in advance.\n"
    "Give the counts of a batch:  Accumulator(..., counts=lambda batch: (tokens, samples))"
)
_OTHER_LOSSES = (
    "the ranks of this window have different losses: a mean here and a sum there. One big batch has one loss; "
    "compute the same on every rank."
)
_OTHER_FORMS = (
    "the ranks of this window have different losses: other terms, or other factors of them{}. One big batch has one "
    "loss, so a factor that differs may be a count in disguise. Nothing was stepped.\n"
    "Compute the same on every rank. If it is meant to differ (mixup), say what the loss was averaged over:\n"
    "    accumulator.backward(loss, count=n)"
)
_OTHER_RATIOS = (
    "the terms of this loss were averaged over different things, and the ratio of their counts is not the same on all "
    "ranks.\n"
    "Give the counts of a batch in advance:  Accumulator(..., counts=lambda batch: (tokens, samples))"
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
    "the ranks of this window began with different weights, or with the same in another order, so each would train a "
    "model of its own.\n"
    "Call torch.manual_seed(0) before the model is made, load the same checkpoint on every rank, or wrap the model in "
    "DistributedDataParallel, which sends the first rank's weights to all; and give them to the optimizer in one order."
)


def _refuse_unlike(ranks: Ranks, same: Sequence[float]) -> None:
    """Raise where ranks have something else that they should have in common."""
    for place, why in enumerate((_APART, _OTHER_PARAMETERS, _OTHER_WEIGHTS)):
        if not alike(ranks.size, same[2 * place], same[2 * place + 1]):
            raise WindowError(why)


_OTHER_SETTINGS = (
    "the ranks of this window have different settings, so each would make a step of its own: {}.\n"
    "Give every rank the same ones, and load a checkpoint on every rank. Nothing was stepped."
)
_OTHER_RATES = (
    "the ranks of this window have different learning rates, so each would make a step of its own. Nothing was "
    "stepped.\n"
    "Set the same on every rank; where a validation loss sets it, give all ranks the same one:  "
    "torch.distributed.broadcast(loss, 0)"
)


def _refuse_other_ratios(ranks: Ranks, mine: Statement, found: _Heard, device: torch.device) -> None:
    """Raise where several counts are in ratios that differ between ranks, by however little."""
    if found.ratios == found.with_ratio:  # all have one count
        return
    # Sums of squares would tell only what differs by a part of 1e-6.
    least, most = ranks.span(mine.ratio, device)
    if most - least > RATIO_TOLERANCE * most:
        raise SeveralCounts(_OTHER_RATIOS)


def _refuse_other_settings(ranks: Ranks, mine: Statement, found: _Heard, device: torch.device) -> None:
    """Raise where ranks would step in different ways, and say which setting it is, and what this rank has."""
    if not alike(ranks.size, found.settings, found.squares_of_settings):
        # All of them know by now, and come to ask which one it is.
        other = ranks.unlike([_digest(each) for each in mine.settings.values()], device)
        named = [
            f"{name} (here {own})" for (name, own), is_it in zip(mine.settings.items(), other, strict=True) if is_it
        ]
        # Two numbers of a million that are next to each other look alike: then all it could be is named.
        told = ", ".join(named) or "one of " + ", ".join(mine.settings)
        raise ConfigurationError(_OTHER_SETTINGS.format(told))
    if not alike(ranks.size, found.rates, found.squares_of_rates):
        raise ConfigurationError(_OTHER_RATES)


def _digest(*words: str) -> float:
    """Return one number of some words, the same in every process."""
    return float(zlib.crc32("\n".join(words).encode()) % _DIGESTS)
