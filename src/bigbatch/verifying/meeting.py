"""A loss that asks for all samples, and gets another gradient all the same: what it makes of them is changed, to see.

It is coupled by design, so that it looks across samples tells nothing. What can be wrong is where it looks for its own
rows among all, and how it adds up; or something that it keeps while micro-batches take turns.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bigbatch import across
from bigbatch.first_step_parts import shared_state
from bigbatch.lockstep.threads import current
from bigbatch.verifying.attributes import of_module
from bigbatch.verifying.samples import Samples
from bigbatch.verifying.subject import Standing
from bigbatch.verifying.verification import Cause
from bigbatch.verifying.ways import Accumulated, LossFunction, OwnWay

_LIKE_REFUSAL, _, _WHAT_TO_DO = str(shared_state(ValueError())).partition("\n")
TURNS = _WHAT_TO_DO  # as BigStep says it
ASKED = (
    "It asks for all samples already; look at what it does with them. Rows of own samples begin at across.offset(). "
    "across.sum(x) adds up sums, across.mean(x) averages means over samples, across.mean(x, count) those over other "
    "things. What else is compared, attended or normalised over samples is to go through across, too (docs/coupled.md)."
)
_COUPLED = frozenset({"batch-norm", "coupled-samples", "nonlinear-in-a-mean", "wrong-count"})


@dataclass(frozen=True)
class Changed:
    """One thing that a loss may have meant otherwise, and what to say where that takes a difference away."""

    kind: str
    where: str
    how: str
    remedy: str
    instead: Callable[[Standing], Mapping[str, Callable[..., Any]]]  # functions of across, by name, for a run


@dataclass(frozen=True)
class ChangedWay:
    """`BigStep`, with something else done at its meetings."""

    way: OwnWay
    changed: Changed
    name: str = "BigStep"

    def run(self, standing: Standing, loss: LossFunction, samples: Samples, dtype: torch.dtype | None) -> Accumulated:
        """Make one update."""
        with _in_place(self.changed.instead(standing)):
            return self.way.run(standing, loss, samples, dtype)


def tells_of_turns(refusal: Exception | None) -> bool:
    """Whether a step was refused since its micro-batches run alone, and not beside others."""
    begins = _LIKE_REFUSAL.partition(" with ")[0]
    return refusal is not None and str(refusal).startswith(begins)


def as_turns(causes: Sequence[Cause], refusal: Exception) -> list[Cause]:
    """Tell causes that look like coupled samples as what they are, where a step was refused for what is kept."""
    alike = sorted((each for each in causes if each.kind in _COUPLED), key=lambda each: -each.share)
    share = alike[0].share if alike else 0.0
    where = next((each.where for each in alike if each.kind == "batch-norm"), "")
    first = str(refusal).partition("\n")[0].rstrip(".")
    turns = Cause("shared-state", where, share, f"{first[:1].upper()}{first[1:]}.", TURNS)
    known = [each for each in causes if each.kind == "shared-state"]
    return [*(known or [turns]), *(each for each in causes if each not in alike and each not in known)]


def as_asked(causes: Sequence[Cause]) -> list[Cause]:
    """Advise a loss that asks for all samples on what to do with them, not to ask."""
    return [replace(each, remedy=ASKED) for each in causes]


def _own_rows_first(x: Tensor) -> Tensor:
    rows: Tensor = _plain["gather"](x)
    worker = current()
    if worker is None:
        return rows
    per_sample = len(x) // worker.round.sizes[worker.number]
    first: Tensor = rows.roll(-across.offset() * per_sample, 0)
    return first


def _summed(x: Tensor, count: object = None) -> Tensor:
    found: Tensor = _plain["sum"](x) if count is None else _plain["mean"](x, count)
    return found


def _averaged(x: Tensor) -> Tensor:
    found: Tensor = _plain["mean"](x)
    return found


def _keeping_own(standing: Standing) -> Mapping[str, Callable[..., Any]]:
    modules = list(standing.modules.values())

    def keeping(function: Callable[..., Any]) -> Callable[..., Any]:
        def asked(*args: Any, **kwargs: Any) -> Any:
            kept = [(module, of_module(module)) for module in modules]
            found = function(*args, **kwargs)  # others run meanwhile
            for module, own in kept:
                vars(module).update(own)
            return found

        return asked

    return {name: keeping(function) for name, function in _plain.items()}


_plain: dict[str, Any] = {name: getattr(across, name) for name in across.__all__}
CHANGES = (
    Changed(
        "coupled-samples",
        "across.gather",
        "with own rows before those of others in across.gather",
        (
            "Look for own rows where they are among all:  own = across.offset() + torch.arange(len(x)), and not "
            "torch.arange(len(x)), which are the first micro-batch's."
        ),
        lambda _: {"gather": _own_rows_first},
    ),
    Changed(
        "wrong-count",
        "across.mean",
        "with across.sum in its place",
        (
            "Add up what is a sum over samples:  across.sum(x). across.mean(x) weighs x of each micro-batch by its "
            "samples, as is right for a mean over them; of another mean, say over what:  across.mean(x, count)"
        ),
        lambda _: {"mean": _summed},
    ),
    Changed(
        "wrong-count",
        "across.sum",
        "with across.mean in its place",
        "Average what is a mean over samples:  across.mean(x). across.sum(x) adds up sums, one of each micro-batch.",
        lambda _: {"sum": _averaged},
    ),
    Changed("shared-state", "", "with its own attributes in the model after each turn", TURNS, _keeping_own),
)


@contextmanager
def _in_place(instead: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Put other functions in the place of some of across; who has imported one by name has the plain one."""
    before = {name: getattr(across, name) for name in instead}
    try:
        for name, function in instead.items():
            setattr(across, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(across, name, function)
