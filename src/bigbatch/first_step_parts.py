"""A piece of a batch and its parts in the first check: their losses and gradients, and whether those agree."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from bigbatch.batch.split import Division
from bigbatch.batch.transfer import Mover
from bigbatch.errors import LossError
from bigbatch.execute.micro_step import Runner
from bigbatch.first_step_watch import Rows, Watch
from bigbatch.loss import refusals
from bigbatch.loss.count import Term
from bigbatch.state import scope
from bigbatch.state.rng import Randomness
from bigbatch.state.snapshot import Snapshot, devices_of
from bigbatch.window.backward import weigh_terms
from bigbatch.window.gate import scan
from bigbatch.window.tally import Weights

# How far rounding may move a gradient, relative to those of the parts; what couples samples moves it further.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}
_LOW_PRECISION_TOLERANCE = 0.03
_LOCKSTEP = 10  # times the tolerance: statistics of a few samples amplify rounding
_OF_LOSS = 0.1  # times the tolerance: how far rounding may move a loss, relatively
_OF_NOTHING = 1e-3  # times the tolerance and the loss: a gradient that is rounding alone
_FLOOR = 0.1  # a loss near zero may be the difference of larger numbers, whose rounding it has
COUNT_TOLERANCE = 1e-6  # class weights are added up in float32
SideBySide = Callable[..., "list[Part]"]  # runs forwards, then backwards, in lock-step


class Share(NamedTuple):
    """Some samples, and what they are trimmed to where they have lengths."""

    samples: list[int]
    width: int | None


class Part(NamedTuple):
    """The loss and the gradient of some samples."""

    value: float
    kinds: tuple[str, ...]  # of the terms of the loss
    counts: tuple[float, ...]  # of what they were averaged over
    is_over_all: bool  # whether a term is the mean of all its samples, chosen or not
    weight: float  # of the loss among the other parts'; NaN where its terms have weights of their own
    gradient: tuple[Tensor, ...]  # times the weight
    tolerance: float  # how far rounding may move the gradient, relatively
    norms: int  # how often BatchNorm was called in lock-step
    drew: bool  # whether it has drawn random numbers
    certain: bool  # whether it used those of the piece
    peak: int  # bytes of tensors that its forward held at once


class _Forward(NamedTuple):
    """A part between its forward and its backward."""

    loss: Tensor
    terms: list[Term]
    watch: Watch
    numbers: Randomness  # before it


@dataclass
class Piece:
    """Some samples of a batch, evaluated together and then in parts."""

    models: Sequence[nn.Module]
    runner: Runner
    mover: Mover
    division: Division
    shares: Sequence[Share]
    side_by_side: SideBySide | None = None  # where parts wait for each other
    probes: tuple[Tensor, ...] = ()  # the parameters whose gradients are compared
    is_watched: bool = True
    is_away: bool = False  # whether what the backward of the piece needs waits in host memory

    def __post_init__(self) -> None:
        """Evaluate the piece as a whole."""
        self._begins, self._tape, self._in_parts = Snapshot(self.models), list[Tensor](), False
        self.samples = [i for share in self.shares for i in share.samples]
        with save_on_cpu() if self.is_away else nullcontext():
            (self.whole,) = self._evaluated([Share(self.samples, _widest(self.division))], None)

    def parts(self) -> list[Part]:
        """Evaluate the parts, each with the piece's random numbers."""
        self._in_parts = True
        totals = self.whole.counts
        found = self._evaluated(self.shares, totals)
        if self.side_by_side is None:  # else the counts of all were known before the first backward
            if any(part.is_over_all for part in found) and not all(part.kinds for part in found):
                raise refusals.zero_beside_mean()  # how many samples the zero was over is not known
            came = totals_of(found)
            same = map(partial(math.isclose, rel_tol=COUNT_TOLERANCE), came, totals)
            if len(came) != len(totals) or not all(same):  # the piece has another count, or a graph of another kind
                found = self._evaluated(self.shares, came)
        return [part for part in found if part.kinds] or found  # a loss of zero adds nothing

    def _evaluated(self, shares: Sequence[Share], totals: Sequence[float] | None) -> list[Part]:
        """Evaluate samples: each share by itself, or in lock-step where their losses ask for each other."""
        self._begins.restore()
        if self.side_by_side is not None:
            forward = lambda number: self._forward(shares, number)  # noqa: E731
            return self.side_by_side(forward, self._weighed, [len(share.samples) for share in shares])
        found = list[Part]()
        for number in range(len(shares)):
            self._begins.restore()
            is_first = not any(part.kinds for part in found)  # what counts once is not in a loss of zero
            found.append(self._backward(self._forward(shares, number), totals, is_first=is_first))
        return found

    def _weighed(self, found: Sequence[_Forward]) -> list[Callable[[], Part]]:
        """Return the backward of each part in lock-step, where the counts of all are known before it."""
        known = _sums([float(term.count) for term in each.terms] for each in found if each.terms)
        first = next((number for number, each in enumerate(found) if each.terms), 0)
        return [partial(self._backward, each, known, is_first=n == first) for n, each in enumerate(found)]

    def _forward(self, shares: Sequence[Share], number: int) -> _Forward:
        sizes = [len(share.samples) for share in shares]
        rows = Rows(sum(sizes[:number]), sizes[number], sum(sizes)) if self._in_parts else None
        micro_batch = self.mover.moved(self.division.part(*shares[number]))
        watch, numbers = Watch(self._tape, rows), Randomness(devices_of(self.models))
        with torch.enable_grad(), watch if self.is_watched else nullcontext():
            loss, _ = self.runner.loss(micro_batch)
        terms = list[Term]()
        with nullcontext() if self._in_parts else suppress(LossError):  # a piece may be more than a micro-batch
            terms = self.runner.read(loss)
        return _Forward(loss, terms, watch, numbers)

    def _backward(self, forward: _Forward, totals: Sequence[float] | None, *, is_first: bool) -> Part:
        """Compute the gradient, weighed by what the terms come to in all parts; None: of this one alone."""
        loss, terms, watch, numbers = forward
        worker, weights = scope.worker(), Weights()
        if terms and totals is not None and len(totals) == len(terms):
            weights = _weights(terms, totals, is_first=is_first)
        # In lock-step others wait for its backward, whatever it counts.
        counts = self.probes and not (weights.nothing and worker is None)
        counts = counts and not scan(loss).reentrant_checkpoint  # it knows no chosen parameters: values are compared
        return Part(
            float(loss.detach()),
            tuple(term.kind for term in terms),
            tuple(float(term.count) for term in terms),
            any(term.kind == "mean" and not term.chosen for term in terms),
            math.nan if weights.each else float(weights.whole),
            self._gradient(loss, terms, weights) if counts else tuple(map(torch.zeros_like, self.probes)),
            self._tolerance(loss, watch.lowest),
            worker.norms if worker is not None else 0,
            watch.is_calmed or numbers.drawn(),
            watch.certain and not (self._in_parts and numbers.drawn()),
            watch.peak,
        )

    def _gradient(self, loss: Tensor, terms: list[Term], weights: Weights) -> tuple[Tensor, ...]:
        scale = self.runner.scale()
        hooks = weigh_terms(weights, loss, terms, {}) if weights.each else ()
        try:
            start = torch.full_like(loss, float(weights.whole) * scale)
            found: Sequence[Tensor | None] = torch.autograd.grad(loss, self.probes, start, allow_unused=True)
        finally:
            for hook in hooks:
                hook.remove()
        known = (torch.zeros_like(p) if g is None else g for g, p in zip(found, self.probes, strict=True))
        return tuple(g.detach().to_dense().to(torch.promote_types(g.dtype, torch.float32)) / scale for g in known)

    def _tolerance(self, loss: Tensor, lowest: torch.dtype | None) -> float:
        """Return how far the least precise numbers of a forward may move its gradient, relatively."""
        device, worker = loss.device.type, scope.worker()
        used = {loss.dtype, lowest or loss.dtype, *(p.dtype for model in self.models for p in model.parameters())}
        used |= {torch.get_autocast_dtype(device)} if torch.is_autocast_enabled(device) else set()
        found = max(_TOLERANCE.get(each, _LOW_PRECISION_TOLERANCE) for each in used if each.is_floating_point)
        rests = worker is None or worker.round.mode == "resting"
        return found if rests else min(_LOCKSTEP * found, _LOW_PRECISION_TOLERANCE)


def _weights(terms: Sequence[Term], totals: Sequence[float], *, is_first: bool) -> Weights:
    """Return what a part's terms count with among all parts: one weight where it is the same, else one for each."""
    shares = [
        (float(term.count) / total if total else 0.0) if term.kind == "mean" else float(term.kind == "sum" or is_first)
        for term, total in zip(terms, totals, strict=True)
    ]
    means = [share for term, share in zip(terms, shares, strict=True) if term.kind == "mean"]
    kinds = {term.kind for term in terms}
    # Shares of means add up to 1 over the parts, so terms that count once come out right, too.
    if len(terms) == 1 or kinds == {"sum"} or ("sum" not in kinds and means and math.isclose(min(means), max(means))):
        return Weights((means or shares)[0])
    return Weights(1.0, tuple((term.node, share) for term, share in zip(terms, shares, strict=True) if term.node))


def _sums(rows: Iterable[Sequence[float]]) -> list[float]:
    return [math.fsum(column) for column in zip(*rows, strict=False)]


def totals_of(parts: Sequence[Part]) -> list[float]:
    """Return what each term was averaged over in all parts."""
    return _sums(part.counts for part in parts if part.kinds)


def agree(whole: Part, parts: Sequence[Part]) -> bool:
    """Whether the gradients of the parts make that of the whole, but for rounding, or do not tell."""
    if len({part.kinds for part in parts}) > 1 or whole.norms != parts[0].norms:
        return False
    if not math.isfinite(whole.value) or not math.isfinite(norm(whole.gradient)):
        return True
    is_alone = all(set(part.kinds) == {"once"} for part in parts)
    if is_alone and not all(is_near(whole.value, part.value, parts) for part in parts):
        return False
    broken = [part for part in parts if not math.isfinite(norm(part.gradient))]
    if broken:  # as of a standard deviation of one sample; a mean over nothing does not tell
        return not all(all(part.counts) for part in broken)
    size, tolerance = sum(norm(part.gradient) for part in parts), max(part.tolerance for part in (whole, *parts))
    if not size and not norm(whole.gradient):  # as where a gradient cannot be asked for: then the values tell
        return is_near(whole.value, together_of(parts), (whole, *parts))
    return apart(whole, parts) <= tolerance * (size + _OF_NOTHING * max(_FLOOR, abs(whole.value)))


def apart(whole: Part, parts: Sequence[Part]) -> float:
    """Return the norm of what lies between the gradient of the whole and that of its parts."""
    together = map(sum, zip(*(part.gradient for part in parts), strict=True))
    return norm(one - other for one, other in zip(whole.gradient, together, strict=True))


def norm(gradient: Iterable[Tensor]) -> float:
    """Return the norm of tensors on any devices, as one vector."""
    return math.hypot(*(float(torch.linalg.vector_norm(each)) for each in gradient))


def together_of(parts: Sequence[Part]) -> float:
    """Return the loss that the parts make together; NaN where their terms have weights of their own."""
    return math.fsum(part.value * part.weight for part in parts if part.weight)


def is_near(one: float, other: float, parts: Sequence[Part]) -> bool:
    """Whether two losses differ by rounding alone, or one is not known."""
    size = max(_FLOOR, abs(one), *(abs(part.value) for part in parts))
    return not abs(one - other) > _OF_LOSS * max(part.tolerance for part in parts) * size


def _widest(division: Division) -> int | None:
    """Return what a piece is trimmed to, which some of its parts are not."""
    if division.longest is None:
        return None
    return max(division.longest) if max(division.longest) > min(division.longest) else division.width
