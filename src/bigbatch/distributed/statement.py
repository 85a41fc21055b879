"""What a rank says when its window closes, and what all of them come to.

Each rank contributes one row of numbers, and all ranks get all rows. `agree` is a pure function of these: where ranks
cannot make one big batch, all raise the same error, which names the ranks that differ.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bigbatch.errors import BigBatchError, ConfigurationError, LossError, SeveralCounts, WindowError
from bigbatch.loss.count import RATIO_TOLERANCE, Count

KINDS = ("", "mean", "sum", "known")  # of the terms over data
_SAME = 1e-6  # relative: sums of weights in float32, and learning rates that machines compute
_IN_ADVANCE = "Accumulator(..., counts=lambda batch: (tokens, samples))"


class Agreement(NamedTuple):
    """What a window came to: on one rank, or on all of them together."""

    kind: str = ""
    total: Count = 0.0  # what its one term over data counted
    loss: Count = 0.0  # the losses times their counts, summed
    plain: Count = 0.0  # the losses, summed, where their terms have weights of their own
    micro_batches: int = 0
    loss_known: bool | Tensor = True  # whether `loss` is, or `plain` has to do
    precise: bool = False  # whether a loss is of float64
    going: int = 0  # ranks that have batches for another window
    hooks: bool = False  # whether any rank calls some before the step
    missing: bool = False  # whether a parameter has no gradient on some rank
    nothings: bool = False  # whether a micro-batch counts nothing, and was added all the same

    def big_loss(self) -> Count:
        """Return the big batch's own loss; where it cannot be known, the average of the micro-batches'."""
        if self.kind == "mean":
            return self.loss / self.total if isinstance(self.total, Tensor) or self.total else math.nan
        if self.loss_known is True:
            return self.loss
        average = self.plain / max(self.micro_batches, 1)
        return torch.where(self.loss_known, self.loss, average) if isinstance(self.loss_known, Tensor) else average


class Row(NamedTuple):
    """What a rank says, in numbers; words are their fingerprints."""

    kind: Count = 0.0
    total: Count = 0.0
    loss: Count = 0.0
    plain: Count = 0.0
    micro_batches: Count = 0.0
    unknown: Count = 0.0  # whether its loss is not known
    precise: Count = 0.0
    going: Count = 0.0  # whether this rank has batches for another window
    shares_once: Count = 0.0  # whether it has added its share of a term that counts once
    ratio: Count = -1.0  # of its several counts to the first, where it has counted anything
    several: Count = 0.0  # whether its counts must be known in advance
    form: Count = 0.0  # its terms and their factors, where those are the same in every micro-batch
    missing: Count = 0.0  # parameters that got no gradient
    left_out: Count = 0.0  # gradients that DDP has not reduced in the last backward, though it should have
    overlapped: Count = 0.0  # whether it has reduced there
    sparse: Count = 0.0  # gradients that are, and should be added up
    hooked: Count = 0.0  # wrappers with a communication hook that is not called
    hooks: Count = 0.0  # whether it has any of its own to call before the step
    nothings: Count = 0.0  # micro-batches that count nothing, and were added all the same
    reached: Count = 0.0  # which shards its backwards have reached
    replica: Count = 0.0  # with whom it scatters them
    windows: Count = 0.0  # made until now
    parameters: Count = 0.0  # which are trained
    weights: Count = 0.0  # their values, before the first window
    settings: Count = 0.0  # before the first window
    rates: Count = 0.0  # the learning rates


class Statement(NamedTuple):
    """What a window says of itself: a row, and the words behind its fingerprints, exchanged only where those differ."""

    row: Row
    words: Mapping[str, Any] = {}

    def with_totals(self, mine: Agreement) -> Row:
        """Return the row with what this rank's window came to."""
        known = mine.loss_known
        return self.row._replace(
            kind=float(KINDS.index(mine.kind)),
            total=mine.total if mine.kind == "mean" else 0.0,
            loss=mine.loss,
            plain=mine.plain,
            micro_batches=float(mine.micro_batches),
            unknown=1.0 - known.double() if isinstance(known, Tensor) else float(not known),
            precise=float(mine.precise),
        )


def fingerprint(*words: str) -> float:
    """Return one number of some words, the same in every process, which a float64 holds exactly; 0 of none."""
    if not any(words):
        return 0.0
    return float(1 + int.from_bytes(hashlib.blake2b("\n".join(words).encode(), digest_size=6).digest(), "big"))


def agree(
    rows: Sequence[Row], exchange: Callable[[str], list[Any]], ranks: Sequence[int] | None = None, *, sharded: bool
) -> Agreement:
    """Return what the windows of all ranks come to. All ranks have the same rows, so all raise the same, or none.

    `exchange` returns the words of all ranks behind a fingerprint; `ranks` are their numbers.
    """
    _Comparison(rows, exchange, range(len(rows)) if ranks is None else ranks, sharded=sharded).refuse()
    kinds = [row.kind for row in rows if row.micro_batches]
    return Agreement(
        kind=KINDS[int(kinds[0])] if kinds else "",
        total=sum(row.total for row in rows),
        loss=sum(row.loss for row in rows),
        plain=sum(row.plain for row in rows),
        micro_batches=sum(int(row.micro_batches) for row in rows),
        loss_known=not any(row.unknown for row in rows),
        precise=any(row.precise for row in rows),
        going=sum(bool(row.going) for row in rows),
        hooks=any(row.hooks for row in rows),
        missing=any(row.missing for row in rows),
        nothings=any(row.nothings for row in rows),
    )


class _Comparison:
    """The rows of all ranks, side by side."""

    def __init__(
        self, rows: Sequence[Row], exchange: Callable[[str], list[Any]], ranks: Sequence[int], *, sharded: bool
    ) -> None:
        self._rows, self._exchange, self._ranks, self._sharded = rows, exchange, ranks, sharded

    def refuse(self) -> None:
        """Raise where ranks cannot make one batch of what they have."""
        self._refuse_what_any_has()
        self._refuse_overlap()
        several = self._having("several")
        if several:
            raise SeveralCounts(
                f"the terms of this loss were averaged over different things, on {several}: their totals must be "
                "known in advance.",
                fix=_IN_ADVANCE,
            )
        self._refuse_unlike_ranks()
        self._refuse_unlike_losses()
        self._refuse_lone_shares()
        if any(self._differ(row for row in self._rows if row.replica == each) for each in self._of("replica")):
            raise WindowError(
                "micro-batches of this window have reached other parameters on one rank than on another, or one rank "
                "has dropped a window that others go on with: gradients of one parameter may be in another's shards.",
                fix="the same parts of the model in every pass on all ranks, and discard() on all; or "
                "DistributedDataParallel",
            )

    def _refuse_what_any_has(self) -> None:
        for name, kind, problem, fix in _REFUSED:
            if found := self._having(name):
                said = _SHARDS_HOOKED if name == "hooked" and self._sharded else problem
                raise kind(f"{said}, on {found}. Nothing was stepped.", fix=fix)

    def _refuse_overlap(self) -> None:
        overlapped, going = self._having("overlapped", other=True), self._having("going", other=True)
        if len(self._of("overlapped")) > 1:
            raise WindowError(_OVERLAP.format(f"{overlapped} has not reduced in its last backward"), fix=_NO_OVERLAP)
        if self._rows[0].overlapped and len(self._of("going")) > 1:
            raise WindowError(_OVERLAP.format(f"{going} has no batch after this window"), fix=_NO_OVERLAP)

    def _refuse_unlike_ranks(self) -> None:
        """Raise where ranks have something else that they should have in common."""
        if len(self._of("windows")) > 1:
            raise WindowError(
                f"ranks have made different numbers of windows together ({self._each('windows')}): one of them failed "
                "in its step, and went on, so their weights may differ.",
                fix="a checkpoint of the model and the optimizer, loaded on every rank",
            )
        if len(self._of("parameters")) > 1:
            raise WindowError(
                f"the ranks of this window train different parameters ({self._apart('parameters')}), so their "
                "gradients cannot be added up.",
                fix="the same model on every rank, with the same parameters frozen, all of them in the optimizer",
            )
        if not self._close("weights"):
            raise WindowError(
                f"the ranks of this window began with different weights ({self._apart('weights')}), or with the same "
                "in another order, so each would train a model of its own.",
                fix="torch.manual_seed(0) before the model is made, one checkpoint on every rank, or "
                "DistributedDataParallel; and one order in the optimizer",
            )
        if len(self._of("settings")) > 1:
            raise ConfigurationError(
                "the ranks of this window have different settings, so each would make a step of its own. Nothing was "
                "stepped.",
                found=_shown(self._exchange("settings"), self._ranks),
                fix="the same settings on every rank, and the checkpoint loaded on every rank",
            )
        if not self._close("rates"):
            raise ConfigurationError(
                f"the ranks of this window have different learning rates ({self._apart('rates')}), so each would make "
                "a step of its own. Nothing was stepped.",
                fix="one rate on every rank; where a validation loss sets it, torch.distributed.broadcast(loss, 0)",
            )

    def _refuse_unlike_losses(self) -> None:
        there = [row for row in self._rows if row.micro_batches]
        if len({row.kind for row in there}) > 1:
            kinds = ", ".join(
                f"a {KINDS[int(row.kind)] or 'constant'} on rank {rank}"
                for rank, row in zip(self._ranks, self._rows, strict=True)
                if row.micro_batches
            )
            raise LossError(
                f"the ranks of this window have different losses: {kinds}. One big batch has one loss.",
                fix="the same loss on every rank",
            )
        if len(self._of("form") - {0.0}) > 1:
            said = self._exchange("form")
            named = ", ".join(f"{each} on rank {rank}" for rank, each in zip(self._ranks, said, strict=True) if each)
            raise LossError(
                f"the ranks of this window have different losses: other terms, or other factors of them, {named}. A "
                "factor that differs may be a count in disguise. Nothing was stepped.",
                fix="the same loss on every rank; where it is meant to differ (mixup), "
                "accumulator.backward(loss, count=n)",
                fix_in_step="the same loss on every rank; where it is meant to differ (mixup), return counted(loss, n)",
            )
        ratios = [row.ratio for row in self._rows if row.ratio >= 0]
        if ratios and max(ratios) - min(ratios) > RATIO_TOLERANCE * max(ratios):
            raise SeveralCounts(
                "the terms of this loss were averaged over different things, and the ratio of their counts is not the "
                f"same on all ranks ({self._each('ratio')}).",
                fix=_IN_ADVANCE,
            )

    def _refuse_lone_shares(self) -> None:
        """A term that counts once is shared between ranks: a rank without a micro-batch adds no share."""
        empty = self._named(not row.micro_batches for row in self._rows)
        if not empty or not any(row.shares_once for row in self._rows):
            return
        known = any(row.kind == KINDS.index("known") for row in self._rows)
        beside = "terms whose counts are known in advance" if known else "a sum"
        instead = "weight_decay= of the optimizer" if known else "a mean over data in the sum's place"
        raise WindowError(
            f"this loss has a term of parameters alone beside {beside}: every rank adds its share of that, and {empty} "
            "has no micro-batch in this window.",
            fix=f"a micro-batch on every rank; or {instead}",
        )

    def _of(self, name: str) -> set[Count]:
        return {getattr(row, name) for row in self._rows}

    def _close(self, name: str) -> bool:
        """Whether ranks have the same number, but for rounding."""
        found = [abs(getattr(row, name)) for row in self._rows]
        return not max(found) - min(found) > _SAME * max(found)

    @staticmethod
    def _differ(rows: Any) -> bool:
        return len({row.reached for row in rows}) > 1

    def _having(self, name: str, *, other: bool = False) -> str:
        """Name the ranks that have something, or the `other` ones."""
        return self._named(bool(getattr(row, name)) != other for row in self._rows)

    def _named(self, flags: Any) -> str:
        found = [str(rank) for rank, flag in zip(self._ranks, flags, strict=True) if flag]
        return f"rank{'s' if len(found) > 1 else ''} {', '.join(found)}" if found else ""

    def _each(self, name: str) -> str:
        numbers = (getattr(row, name) for row in self._rows)
        return ", ".join(f"{each:.15g} on rank {rank}" for rank, each in zip(self._ranks, numbers, strict=True))

    def _apart(self, name: str) -> str:
        """Name the ranks that have another number than the first."""
        first = getattr(self._rows[0], name)
        return f"those of {self._named(getattr(row, name) != first for row in self._rows)} differ"


def _shown(settings: Sequence[Mapping[str, str]], ranks: Sequence[int]) -> str:
    """Name the settings that differ, with what each rank has."""
    names = [name for name in settings[0] if len({each.get(name) for each in settings}) > 1]
    return "; ".join(
        f"{name}: {', '.join(f'{each.get(name)} on rank {rank}' for rank, each in zip(ranks, settings, strict=True))}"
        for name in names
    )


_NO_OVERLAP = "Accumulator(...) without overlap=True: ranks may then have any number of micro-batches, or none"
_OVERLAP = "overlap=True needs all ranks in every window, and {}."
_SHARDS_HOOKED = (
    "this sharded model has an all-reduce hook, set_all_reduce_hook(...), which changes what ranks have added up"
)
_SPARSE = "gradients are sparse, and cannot be added up over ranks here"
_HOOKED = (
    "this DistributedDataParallel has a communication hook, and gradients are reduced without DDP, so it would not be "
    "called"
)
_NO_HOOK = (
    "the model without the hook; or Accumulator(..., overlap=True), which has DDP reduce in a window's last backward"
)
_LEFT_OUT = (
    "DDP has not reduced all gradients in the last backward of this window: some came in earlier micro-batches alone "
    "or in none, or a forward was not that of DDP, or under its no_sync()"
)
_AFTERWARDS = "Accumulator(...) without overlap=True, which reduces all of them after the last backward"
_REFUSED: tuple[tuple[str, type[BigBatchError], str, str], ...] = (
    ("sparse", ConfigurationError, _SPARSE, "dense ones, nn.Embedding(..., sparse=False)"),
    ("hooked", ConfigurationError, _HOOKED, _NO_HOOK),
    ("left_out", LossError, _LEFT_OUT, _AFTERWARDS),
)
