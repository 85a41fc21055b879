"""What a rank says when its window closes, and what all of them come to.

Each rank contributes one row of numbers, and all ranks get all rows. `agree` is a pure function of these: where ranks
cannot make one big batch, all raise the same error, which names the ranks that differ.
"""

import hashlib
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from bigbatch.errors import BigBatchError, ConfigurationError, LossError, SeveralCounts, WindowError
from bigbatch.loss.count import RATIO_TOLERANCE, Count
from bigbatch.loss.refusals import zero_beside_mean

KINDS = ("", "mean", "sum", "known")  # of the terms over data
Words = Mapping[str, Mapping[str, str]]  # by the field of `Statement` that is their fingerprint
_WHOLE = {1: torch.uint8, 2: torch.int16}  # numbers by the size of others
_NOT_SAID = frozenset("lr params param_names fused foreach capturable differentiable initial_lr".split())


class Statement(NamedTuple):
    """What a window came to, on one rank or on all together, and what ranks compare; words are their fingerprints."""

    kind: str = ""
    total: Count = 0.0  # what its one term over data counted
    loss: Count = 0.0  # the losses times their counts, summed
    plain: Count = 0.0  # the losses, summed, where their terms have weights of their own
    micro_batches: int = 0
    loss_known: bool | Tensor = True  # whether `loss` is, or `plain` has to do
    precise: bool = False  # whether a loss is of float64
    nothings: Count = 0.0  # micro-batches that count nothing, and were added all the same
    going: int = 0  # ranks that have batches for another window
    missing: bool = False  # whether a parameter has no gradient on some rank
    shares_once: bool = False  # whether this rank has added its share of a term that counts once
    ratio: Count = -1.0  # of its several counts to the first, where it has counted anything
    form: float = 0.0  # its terms and their factors, where those are the same in every micro-batch
    common: float = 0.0  # what all must have alike: windows made, parameters trained, learning rates, settings
    weights: float = 0.0  # the parameters' bits, before the first window
    reduced: float = 0.0  # the gradients' bits, where DDP has averaged them: then all ranks have the same
    reached: float = 0.0  # which shards its backwards have reached
    replica: float = 0.0  # with whom it scatters them

    @property
    def numbers(self) -> list[Count]:
        """What is sent."""
        return [KINDS.index(self.kind), *self[1:]]

    def big_loss(self) -> Count:
        """Return the big batch's own loss; where it cannot be known, the average of the micro-batches'."""
        if self.kind == "mean":
            return self.loss / self.total if isinstance(self.total, Tensor) or self.total else math.nan
        if self.loss_known is True:
            return self.loss
        average = self.plain / max(self.micro_batches, 1)
        return torch.where(self.loss_known, self.loss, average) if isinstance(self.loss_known, Tensor) else average


def agree(numbers: Sequence[Any], exchange: Callable[[str], list[Any]], ranks: Sequence[int]) -> Statement:
    """Return what the windows of all ranks come to. All ranks have the same rows, so all raise the same, or none.

    `exchange` returns the words of all ranks behind a fingerprint; `ranks` are their numbers.
    """
    rows = [Statement(KINDS[int(each[0])], *each[1 : len(Statement._fields)]) for each in numbers]
    for check in _ALIKE:
        if others := check.others(rows, ranks):
            said = exchange(check.field) if check.field in {"common", "form"} else [{}]
            values = {name: [each.get(name) for each in said] for name in said[0]}
            parts = [
                f"{name}: {', '.join(f'{value} on rank {rank}' for rank, value in zip(ranks, every, strict=True))}"
                for name, every in values.items()
                if None not in every and len({*every}) > 1
            ]
            problem = f"the ranks of this window have {check.what}, and cannot make one update. Nothing was stepped."
            raise check.error(problem, found="; ".join(parts) or f"others on {_named(others)}", fix=_FIXES[check.field])
    empty = [rank for rank, row in zip(ranks, rows, strict=True) if not row.micro_batches]
    if empty and any(row.shares_once for row in rows):
        raise WindowError(
            "this loss has a term of parameters alone, of which every rank adds its share, and "
            f"{_named(empty)} has no micro-batch in this window.",
            fix="a micro-batch on every rank; or weight_decay= of the optimizer in the term's place",
        )
    kind = next((row.kind for row in rows if row.kind), "")
    if kind not in {"", "sum"} and any(row.micro_batches and not row.kind for row in rows):
        raise zero_beside_mean()
    return Statement(
        kind=kind,
        total=sum(row.total for row in rows) if kind == "mean" else 0.0,
        loss=sum(row.loss for row in rows),
        plain=sum(row.plain for row in rows),
        micro_batches=sum(int(row.micro_batches) for row in rows),
        loss_known=all(row.loss_known for row in rows),
        precise=any(row.precise for row in rows),
        nothings=sum(row.nothings for row in rows),
        going=sum(bool(row.going) for row in rows),
        missing=any(row.missing for row in rows),
    )


class _Alike(NamedTuple):
    """A field that all ranks must have alike, and the error where they do not."""

    field: str
    what: str
    error: type[BigBatchError]
    within: float = 0.0  # relative: numbers so close are the same
    none: float | None = None  # what a rank says that has nothing to compare

    def others(self, rows: Sequence[Statement], ranks: Sequence[int]) -> list[int]:
        """Return who differs from the first; in what backwards reached, from the first of its replica."""
        place, found = Statement._fields.index(self.field), []
        first: dict[float, Any] = {}
        for rank, row in zip(ranks, rows, strict=True):
            mine: Any = row.numbers[place]
            if mine != self.none:
                than = first.setdefault(row.replica * (self.field == "reached"), mine)
                found += [rank] if abs(mine - than) > self.within * max(abs(mine), abs(than)) else []
        return found


_LOSS = "the same loss on every rank; where its factor is meant to differ (mixup), count=n or counted(loss, n)"
_FIXES = {
    "common": "the same settings, parameters and checkpoint on every rank",
    "weights": "torch.manual_seed(0) before the model is made, or one checkpoint; and one order in the optimizer",
    "reduced": "a last micro-batch that uses all parameters, in a forward of DDP outside of no_sync(); or without "
    "overlap=True",
    "kind": _LOSS,
    "form": _LOSS,
    "ratio": "Accumulator(..., counts=lambda batch: (tokens, samples))",
    "reached": "the same parts of the model in every pass on all ranks, and discard() on all; or "
    "DistributedDataParallel",
}
_ALIKE = (
    _Alike("common", "different settings", ConfigurationError),
    _Alike("weights", "begun with different weights, or another order of them", WindowError),
    _Alike("reduced", "not reduced all gradients in the last backward, with overlap=True", LossError),
    _Alike("kind", "different losses (mean or sum)", LossError, none=0),
    _Alike("form", "different losses (terms or factors)", LossError, none=0),
    _Alike("ratio", "counts in different ratios", SeveralCounts, within=RATIO_TOLERANCE, none=-1.0),
    _Alike("reached", "reached different parameters, or dropped micro-batches", WindowError),
)


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


# What a rank says of itself.


def fingerprint(*words: str) -> float:
    """Return one number of some words, the same in every process, which a float64 holds exactly; 0 of none."""
    if not any(words):
        return 0.0
    return float(1 + int.from_bytes(hashlib.blake2b("\n".join(words).encode(), digest_size=6).digest(), "big"))


def rates(optimizers: Sequence[Optimizer]) -> str:
    """Return the learning rates in words."""
    return ", ".join(in_words(group["lr"]) for each in optimizers for group in each.param_groups if "lr" in group)


def of_optimizers(optimizers: Sequence[Optimizer]) -> dict[str, str]:
    """Return what else a step depends on, by names that are the same on every rank."""
    groups: list[dict[str, Any]] = [group for each in optimizers for group in each.param_groups]
    options = [{name: group[name] for name in sorted(group.keys() - _NOT_SAID)} for group in groups]
    return {
        "optimizer": " and ".join(f"{type(each).__name__} of {len(each.param_groups)} groups" for each in optimizers),
        "options of the optimizer": in_words(options),
        # What it holds may be each rank's own, as that of ZeroRedundancyOptimizer is.
        "state of the optimizer": "some" if any(each.state for each in optimizers) else "none",
    }


def in_words(value: object) -> str:
    """Return a setting in words; numbers without the digits in which machines may round differently."""
    if isinstance(value, Tensor):  # one on a device is not waited for
        return in_words(float(value)) if value.device.type == "cpu" and value.numel() == 1 else "on the device"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={in_words(each)}" for name, each in value.items()) or "None"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(in_words, value))})"
    return str(value) if value is None or isinstance(value, bool | int | str) else type(value).__name__


def trained(every: Sequence[Tensor]) -> str:
    """Return in words which parameters are trained, by their places in the optimizers and their sizes."""
    sizes = [p.numel() if p.requires_grad else -1 for p in every]
    return f"{sum(size >= 0 for size in sizes)} of {len(sizes)} (code {zlib.crc32(str(sizes).encode()):x})"


def bits_in_one(tensors: Sequence[Tensor]) -> float:
    """Return one number of the bits of some tensors, in whatever order a device adds them; this waits for it."""
    flat = [(torch.view_as_real(each) if each.is_complex() else each).detach().reshape(-1) for each in tensors]
    sums = [each.view(_WHOLE.get(each.element_size(), torch.int32)).sum().to(flat[0].device) for each in flat]
    return fingerprint(*map(str, torch.stack(sums).tolist() if sums else []))
