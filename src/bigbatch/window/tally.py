"""The counts of one window: weigh each micro-batch, add up, correct at the end.

Counts are known only after each forward, the total only after the last. So a micro-batch is weighed against a
provisional total, as if all were like the first, and the whole sum is corrected once:

    sum over i of (d_i / provisional) * gradient_i     times     provisional / (sum over i of d_i)

On a CPU the counts are Python numbers; elsewhere they are 0-d tensors that are never waited for.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from bigbatch.distributed.statement import Statement
from bigbatch.distributed.team import Team
from bigbatch.errors import SeveralCounts
from bigbatch.loss import refusals
from bigbatch.loss.count import Count, Term
from bigbatch.window import same_loss
from bigbatch.window.same_loss import Factors, is_whole, over_data

_COUNT_TOLERANCE = 1e-6  # class weights are added up in float32
_ALONE = Team()
_PENDING = 64  # losses kept on a device before they are added up; a scalar takes 512 bytes there


class Weights(NamedTuple):
    """What to multiply into a micro-batch's gradient: one weight for the whole loss, or one per term."""

    whole: Count = 1.0
    each: tuple[tuple[Node, Count], ...] = ()
    of_value: Count | None = None  # what the loss's value counts with, where that is one number in spite of `each`

    @property
    def nothing(self) -> bool:
        """Whether this micro-batch is known to contribute nothing."""
        return isinstance(self.whole, float) and self.whole == 0.0


class Ledger:
    """The running totals of one window. They begin as the class has them: a window opens without copies."""

    totals: tuple[Count, ...] | None = None  # each data term's total, where it is known in advance
    own_totals: tuple[Count, ...] | None = None  # of `totals`, where other ranks have a part in them
    sure: bool = False  # the totals are sums of what comes: nothing to compare
    came: Sequence[Count] = ()  # what has come of totals that were counted in advance
    micro_batches: int = 0
    provisional: Count | None = None
    total: Count = 0.0
    loss: Count = 0.0
    plain: Count = 0.0  # the sum of the losses, where their terms have weights of their own
    loss_known: bool | Tensor = True
    kind: str = ""  # of the data terms: "mean", "sum", "known"
    reference: Sequence[Count] = ()  # counts of the first micro-batch that had any
    names: tuple[str, ...] = ()  # of the first micro-batch's terms
    factors: list[Factors] | None = None  # constants of the window's first micro-batch
    in_ratio: bool | Tensor = True  # whether counts could be told, and have kept their ratio; a device knows later
    zeros: bool = False  # whether a micro-batch's loss was zero, by a factor
    whole: bool = False  # whether a mean was over all samples
    nothings: Count = 0.0  # micro-batches that a device has found to count nothing, when they were added; with ranks
    precise: bool = False  # whether the latest loss was of float64
    first_count: Tensor | None = None  # on its way to the host
    told = 0  # micro-batches that the user knows of
    shares_once: bool = False  # whether this rank's share of a term that counts once has been added

    def __init__(self, steps: int, team: Team = _ALONE, *, small: bool = False) -> None:
        """Begin a window; `small` keeps weights below 1, for a gradient scaler that is tuned to means."""
        self.steps, self.small, self.provisional = steps, small, team.unit
        self.in_common = team.in_common  # whether other ranks' gradients are added to these before the window ends
        self.once = 1.0 / team.size  # this rank's share of a term that counts once
        self.pending: list[tuple[Tensor, Count]] = []  # losses on a device, with their counts

    def weigh(self, terms: list[Term]) -> Weights:
        """Return the weights of the next micro-batch, or raise; nothing is entered yet."""
        data = over_data(terms)
        zero = self.zeros or not terms
        same_loss.keep_factors(self.factors, data, zero=zero)
        if zero and (self.whole or is_whole(data)):
            raise refusals.zero_beside_mean()
        is_first = not self.names and not self.kind  # of those that have any terms
        if self.totals is not None and terms:
            return self.known(terms, data, is_first=is_first)
        if len({term.kind for term in data} | {self.kind if data else ""} - {""}) > 1:
            same_loss.refuse_several(terms, "a mean beside a sum")
        is_mean = bool(data) and data[0].kind == "mean"
        if is_mean:
            self.in_ratio = same_loss.in_ratio(self.reference, terms, self.in_ratio)
        same_loss.keep_names(self.names, terms)
        if is_mean:
            return Weights(self._share(data[0]))
        self.shares_once = self.shares_once or len(data) < len(terms)
        share = self.once if is_first else 0.0
        once = tuple((term.node, share) for term in terms if term.kind == "once" and term.node is not None)
        if not data:
            return Weights(share)
        if once:  # once per window, and in every micro-batch
            same_loss.refuse_shared_nodes(
                terms, [(t.node, float(t.kind == "sum")) for t in terms if t.node is not None]
            )
        return Weights(1.0, once)

    def _share(self, term: Term) -> Count:
        """Return the part of the provisional total that a mean counts; the first one decides what that is."""
        count, unit = term.count, self.provisional
        on_device = isinstance(count, Tensor)
        if not on_device and not count:
            return 0.0
        if unit is None and (self.in_common or (on_device and not self.small)):
            unit = 1.0  # with others it is the same for all
        elif unit is None:  # what it will be if all are alike: then nothing is left to correct
            unit = ((term.about or count.clamp(min=1.0)) if isinstance(count, Tensor) else count) * self.steps
        self.provisional = unit
        return count if isinstance(unit, float) and unit == 1.0 else count / unit  # no kernel where it is itself

    def known(
        self, terms: list[Term], data: list[Term], shares: tuple[Count, ...] | None = None, *, is_first: bool
    ) -> Weights:
        """Weigh by totals that were counted in advance: nothing is left to correct.

        `shares` are the terms' parts of them, where those are known, too.
        """
        totals = self.totals or ()
        if len(totals) != len(data):
            raise SeveralCounts(
                f"there are {len(totals)} counts in advance, and the loss has {len(data)} terms over data: "
                f"{same_loss.listed(data)}.",
                fix="one count per term in counts=, in the order in which they are written",
                fix_in_step=same_loss.COUNTED_TWICE,
            )
        if shares is None:
            pairs = zip(data, totals, strict=True)
            shares = tuple([1.0 if term.kind == "sum" else _ratio(term.count, total) for term, total in pairs])
        self.shares_once = self.shares_once or len(data) < len(terms)
        weights = [(term.node, share) for term, share in zip(data, shares, strict=True)]
        weights += [(term.node, self.once if is_first else 0.0) for term in terms if term.kind == "once"]
        if len(weights) == 1:
            return Weights(weights[0][1])
        each = tuple([(node, weight) for node, weight in weights if node is not None])
        same_loss.refuse_shared_nodes(terms, each)
        return Weights(1.0, each)

    def enter(self, terms: list[Term], weights: Weights, loss: Tensor, factors: dict[Node, Tensor]) -> None:
        """Enter a micro-batch whose gradient has been added; `factors` are those of terms with weights of their own."""
        self.micro_batches += 1
        self.precise = loss.dtype == torch.float64
        if not terms:
            self.zeros = True
            return
        value, data = _value(loss), over_data(terms)
        self._note(terms, data)
        is_mean = self.totals is None and bool(data) and data[0].kind == "mean"
        of_value = data[0].count if is_mean else weights.of_value if weights.each else weights.whole
        if isinstance(value, Tensor) and of_value is not None:
            self.pending.append((value, of_value))  # added up later, with others
            if len(self.pending) >= _PENDING:
                self.fold()
            return
        if is_mean:
            self.total += data[0].count
        else:
            self.plain = self.plain + value
            if isinstance(value, float) and not math.isfinite(value):  # perhaps 0 / 0, times a learned factor
                self.nothings = self.nothings + float(any(t.kind == "mean" and t.count == 0.0 for t in terms))
        if of_value is not None:
            self.loss = self.loss + _weighed(value, of_value)
        else:
            self._enter_parts(terms, weights, value, factors)

    def _note(self, terms: list[Term], data: list[Term]) -> None:
        """Note what later micro-batches must have in common with this one, and what came of totals given in advance."""
        for term in terms:
            if term.divisor is not None and isinstance(term.count, Tensor):
                self.in_ratio = term.count.isfinite() & self.in_ratio
        self.whole = self.whole or is_whole(data)
        self.names = self.names or tuple([term.name for term in terms])
        if self.totals is not None:
            self.kind = "known"
            if not self.sure:
                counts = [term.count if term.kind == "mean" else 0.0 for term in data]
                self.came = [a + b for a, b in zip(self.came, counts, strict=True)] if self.came else counts
        if not data:
            return
        if not self.kind:
            self.kind, self.total = data[0].kind, float(data[0].kind == "sum")
        if self.factors is None:
            self.factors = [term.factors for term in data]
        if not self.reference and (isinstance(data[0].count, Tensor) or data[0].count):
            self.reference = [term.count for term in data]

    def begin_alike(self, before: "Ledger", count: float) -> None:
        """Begin with a mean over a `count` that was read as those of the ledger `before`, which is plain."""
        self.kind, self.names, self.factors, self.whole = before.kind, before.names, before.factors, before.whole
        self.reference, self.provisional, self.precise = [count], count * self.steps, before.precise

    @property
    def is_plain(self) -> bool:
        """Whether all losses so far were one mean with a count on the host: the next one may skip what they passed."""
        is_one = self.kind == "mean" and len(self.names) == len(self.reference) == 1 and not self.zeros
        return is_one and isinstance(self.provisional, float) and isinstance(self.total, float)

    def _enter_parts(self, terms: list[Term], weights: Weights, value: Count, factors: dict[Node, Tensor]) -> None:
        """Add up a loss whose terms have weights of their own: counted terms tell their value, one may be the rest."""
        of, rest = dict(weights.each), value
        others = [weights.whole] if any(term.node not in of for term in terms) else []  # weights of unknown values
        for term in terms:
            if term.node is None or term.node not in of:
                continue
            if term.value is None:
                others.append(of[term.node])
                continue
            part = factors[term.node] * term.value
            amount: Count = part.item() if part.is_cpu else part.double()
            rest, self.loss = rest - amount, self.loss + _weighed(amount, of[term.node])
        if len(others) > 1 and any(isinstance(weight, Tensor) or weight != 1.0 for weight in of.values()):
            self.loss_known = False
        if others:
            self.loss = self.loss + _weighed(rest, others[-1])

    def fold(self) -> None:
        """Add up what is pending on the device: a few kernels for a window instead of some for each micro-batch."""
        if not self.pending:
            return
        values, counts = [value for value, _ in self.pending], [count for _, count in self.pending]
        precise = precise_type(values[0].device)
        if self.kind == "known":
            self.plain = self.plain + torch.stack(values).sum(dtype=precise)
        if any(isinstance(count, Tensor) for count in counts):
            numbers = in_a_row(counts, values[0])
            # The loss of a micro-batch without targets is NaN, and counts nothing.
            self.loss = self.loss + torch.where(numbers > 0, torch.stack(values).to(precise) * numbers, 0.0).sum()
            if self.kind == "mean":
                self.total = self.total + numbers.sum()
            if self.in_common or self.once < 1.0:  # other ranks will hear of it
                self.nothings = self.nothings + (numbers <= 0).sum()
        elif known := [(value, float(count)) for value, count in self.pending if count]:
            if self.kind == "mean":
                self.total += sum(number for _, number in known)
            weighed = torch._foreach_mul([v for v, _ in known], [n for _, n in known])  # noqa: SLF001
            self.loss = self.loss + torch.stack(list(weighed)).sum(dtype=precise)
        self.pending.clear()

    def refuse_late(self) -> None:
        """Raise where counts are not those given in advance, or have lost their ratio: this waits for a device."""
        if self.totals is not None and not self.sure:
            expected = self.totals if self.own_totals is None else self.own_totals
            for place, (came, total) in enumerate(zip(self.came, expected, strict=True) if self.came else (), 1):
                apart = came - total
                if (isinstance(came, Tensor) or came) and bool(apart * apart > (_COUNT_TOLERANCE * total) ** 2):
                    raise SeveralCounts(
                        f"term {place} of {len(self.came)}: the counts in advance came to {float(total):g} for this "
                        f"window, and its losses to {float(came):g}. Nothing was stepped.",
                        fix="for this term in counts=, what its mean is over: targets that are not ignored, the sum of "
                        "their class weights, all elements (prediction.numel()), or the n of counted(term, n); and no "
                        "batch that the loop passes over. accumulator.discard() drops this window",
                        fix_in_step=same_loss.COUNTED_TWICE,
                    )
        if not self.in_ratio:
            if len(self.names) == 1:
                raise refusals.scaled_sum("Div", "a tensor")
            raise same_loss.several(", ".join(self.names), "counts in no constant ratio")

    def statement(self) -> Statement:
        """Return what this window came to."""
        ratio: Count = -1.0  # one number for the ratios of several counts to the first: ranks must have the same
        if self.once < 1.0 and self.kind == "mean" and self.reference:
            rest = enumerate(self.reference[1:], 1)
            ratio = sum((math.sqrt(place + 1.0) * count / self.reference[0] for place, count in rest), start=1.0)
        mine = self.kind, self.total, self.loss, self.plain, self.micro_batches, self.loss_known, self.precise
        return Statement(*mine, self.nothings, shares_once=self.shares_once and self.kind != "mean", ratio=ratio)

    def correction(self, agreement: Statement | None = None) -> Count:
        """Return what the summed gradient is to be multiplied with; `agreement` is that of all ranks."""
        found = agreement or self
        # A window that counted nothing makes no update.
        return (self.provisional or 1.0) / found.total if found.kind == "mean" else 1.0

    def count_of(self, agreement: Statement) -> Count | tuple[Count, ...]:
        """Return what the loss was averaged over; several numbers for several terms, on a rank without any, too."""
        if agreement.kind in {"mean", "sum"}:
            return agreement.total if agreement.kind == "mean" else 1.0
        if self.totals is None:
            return self.total
        first = self.totals[0] if self.totals else 1.0
        alike = all(isinstance(total, float) and total == first for total in self.totals)
        return first if self.sure and (alike or len(self.totals) == 1) else self.totals

    def form(self) -> str:
        """Return what a loss is made of, in words that all ranks must have in common; nothing where they may differ."""
        if not self.names or "count=" in self.names:
            return ""
        names = "its terms" if self.totals is not None else ", ".join(self.names)  # counted in advance by place alone
        factors = [same_loss.without_ones(each) for each in self.factors or []]
        return f"{names} times {' and '.join(map(same_loss.shown, factors))}" if any(factors) else names

    def take(self, other: "Ledger") -> None:
        """Be as another one, with copies of its totals."""
        vars(self).update({name: copied(value) for name, value in vars(other).items()})

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the running totals."""
        self.fold()
        return {name: copied(getattr(self, name)) for name in Ledger.__annotations__}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with totals that were saved; older states lack some, or have none."""
        for name in Ledger.__annotations__.keys() & state.keys():
            if state[name] is not None:
                setattr(self, name, tuple(copied(state[name])) if name == "totals" else copied(state[name]))


def copied(value: Any) -> Any:
    """Return a copy of a number, or of several."""
    if isinstance(value, list | tuple):
        return type(value)([copied(each) for each in value])
    return value.clone() if isinstance(value, Tensor) else value


def precise_type(device: torch.device) -> torch.dtype:
    """Return what numbers are added up in on a device."""
    return torch.float32 if device.type == "mps" else torch.float64


def in_a_row(counts: Sequence[Count], like: Tensor) -> Tensor:
    """Put counts into one tensor, on the device of `like`, as precise as that can hold them."""
    precise = precise_type(like.device)
    alike = all(isinstance(count, Tensor) and count.dtype == like.dtype for count in counts)
    tensors = [
        count.to(count.dtype if alike else precise).reshape(())
        if isinstance(count, Tensor)
        else torch.full((), count, dtype=precise, device=like.device)
        for count in counts
    ]
    return torch.stack(tensors).to(precise)


def _value(loss: Tensor) -> Count:
    """Return a number that is here, or a tensor that is not waited for."""
    return loss.item() if loss.is_cpu else loss.detach().reshape(())


def _weighed(value: Count, weight: Count) -> Count:
    """Multiply; what weighs nothing may be NaN."""
    if isinstance(weight, Tensor):
        return torch.where(weight > 0, value * weight, 0.0)
    return value * weight if weight else 0.0


def _ratio(count: Count, total: Count) -> Count:
    if isinstance(count, Tensor) or isinstance(total, Tensor):
        share = torch.as_tensor(count / total)
        return torch.where(torch.as_tensor(total) > 0, share, torch.zeros_like(share))
    return count / total if total else 0.0
