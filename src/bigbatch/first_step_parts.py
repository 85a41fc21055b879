"""A piece of a batch and its parts in the first check: their losses and gradients, of the same random numbers."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils._pytree import tree_leaves

from bigbatch.batch.split import Division
from bigbatch.batch.transfer import Mover
from bigbatch.errors import LossError
from bigbatch.execute.micro_step import Runner
from bigbatch.loss import refusals
from bigbatch.loss.count import Term
from bigbatch.memory.meter import LiveBytes
from bigbatch.state import scope
from bigbatch.state.rng import Randomness
from bigbatch.state.snapshot import Snapshot, devices_of
from bigbatch.window.backward import weigh_terms
from bigbatch.window.gate import Scan
from bigbatch.window.tally import Weights

# How far rounding may move a gradient, relative to those of the parts; what couples samples moves it further.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}
_LOW_PRECISION_TOLERANCE = 0.03
_LOCKSTEP = 10  # times the tolerance: statistics of a few samples amplify rounding
COUNT_TOLERANCE = 1e-6  # class weights are added up in float32
# Arguments of fused kernels that draw random numbers inside, and the values that keep them from it.
_CALM = {"dropout_p": 0.0, "dropout": 0.0, "train": False, "training": False}
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
    certain: bool  # whether a piece has drawn no random numbers, and a part none but the piece's
    peak: int  # bytes of tensors that its forward held at once


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
        self._begins, self.tape, self.in_parts = Snapshot(self.models), list[Tensor](), False
        self.samples, widths = [i for share in self.shares for i in share.samples], self.division.longest
        # It is trimmed to what some of its parts are not.
        widest = None if widths is None else max(widths) if max(widths) > min(widths) else self.division.width
        with save_on_cpu() if self.is_away else nullcontext():
            (self.whole,) = self._evaluated([Share(self.samples, widest)], None)

    def parts(self) -> list[Part]:
        """Evaluate the parts, each with the piece's random numbers."""
        self.in_parts = True
        found = self._evaluated(self.shares, self.whole.counts)
        if self.side_by_side is None:  # else the counts of all were known before the first backward
            if any(part.is_over_all for part in found) and not all(part.kinds for part in found):
                raise refusals.zero_beside_mean()  # how many samples the zero was over is not known
            came = totals_of(part.counts for part in found)
            same = map(partial(math.isclose, rel_tol=COUNT_TOLERANCE), came, self.whole.counts)
            if len(came) != len(self.whole.counts) or not all(same):  # the piece has a graph of another kind
                found = self._evaluated(self.shares, came)
        return [part for part in found if part.kinds] or found  # a loss of zero adds nothing

    def _evaluated(self, shares: Sequence[Share], totals: Sequence[float] | None) -> list[Part]:
        """Evaluate samples: each share by itself, or in lock-step where their losses ask for each other."""
        self._begins.restore()
        if self.side_by_side is not None:
            sizes = [len(share.samples) for share in shares]
            return self.side_by_side(lambda number: _Forward(self, shares, number), _backwards, sizes)
        found = list[Part]()
        for number in range(len(shares)):
            self._begins.restore()
            is_first = not any(part.kinds for part in found)  # what counts once is not in a loss of zero
            found.append(_Forward(self, shares, number).backward(totals, is_first=is_first))
        return found


class _Forward:
    """Some samples between their forward and their backward."""

    def __init__(self, piece: Piece, shares: Sequence[Share], number: int) -> None:
        sizes = [len(share.samples) for share in shares]
        rows = _Rows(sum(sizes[:number]), sizes[number], sum(sizes)) if piece.in_parts else None
        micro_batch = piece.mover.moved(piece.division.part(*shares[number]))
        self._piece, self._watch = piece, _Watch(piece.tape, rows)
        self._numbers, self.terms = Randomness(devices_of(piece.models)), list[Term]()
        with torch.enable_grad(), self._watch if piece.is_watched else nullcontext():
            self._loss, _ = piece.runner.loss(micro_batch)
        with nullcontext() if rows is not None else suppress(LossError):  # a piece may be more than a micro-batch
            self.terms = piece.runner.read(self._loss)

    def backward(self, totals: Sequence[float] | None, *, is_first: bool) -> Part:
        """Compute the gradient, weighed by what the terms come to in all parts; None: of this one alone."""
        loss, terms, watch, probes = self._loss, self.terms, self._watch, self._piece.probes
        worker, weights = scope.worker(), Weights()
        if terms and totals is not None and len(totals) == len(terms):
            weights = _weights(terms, totals, is_first=is_first)
        # In lock-step others wait for its backward, whatever it counts.
        counts = probes and not (weights.nothing and worker is None)
        counts = counts and not Scan(loss).reentrant_checkpoint  # it knows no chosen parameters: values are compared
        gradient = self._gradient(weights) if counts else tuple(map(torch.zeros_like, probes))
        drawn = self._numbers.drawn()
        return Part(
            float(loss.detach()),
            tuple(term.kind for term in terms),
            tuple(float(term.count) for term in terms),
            any(term.kind == "mean" and not term.chosen for term in terms),
            math.nan if weights.each else float(weights.whole),
            gradient,
            self._tolerance(),
            worker.norms if worker is not None else 0,
            watch.certain and not drawn if self._piece.in_parts else not (watch.is_calmed or drawn),
            watch.peak,
        )

    def _gradient(self, weights: Weights) -> tuple[Tensor, ...]:
        loss, probes, scale = self._loss, self._piece.probes, self._piece.runner.scale()
        hooks = weigh_terms(weights, loss, self.terms, {}) if weights.each else ()
        try:
            start = torch.full_like(loss, float(weights.whole) * scale)
            found: Sequence[Tensor | None] = torch.autograd.grad(loss, probes, start, allow_unused=True)
        finally:
            for hook in hooks:
                hook.remove()
        known = (torch.zeros_like(p) if g is None else g for g, p in zip(found, probes, strict=True))
        return tuple(g.detach().to_dense().to(torch.promote_types(g.dtype, torch.float32)) / scale for g in known)

    def _tolerance(self) -> float:
        """Return how far the least precise numbers of a forward may move its gradient, relatively."""
        device, worker = self._loss.device.type, scope.worker()
        used = self._watch.rounded | {self._loss.dtype}
        used |= {p.dtype for model in self._piece.models for p in model.parameters()}
        used |= {torch.get_autocast_dtype(device)} if torch.is_autocast_enabled(device) else set()
        found = max(_TOLERANCE.get(each, _LOW_PRECISION_TOLERANCE) for each in used if each.is_floating_point)
        rests = worker is None or worker.round.mode == "resting"
        return found if rests else min(_LOCKSTEP * found, _LOW_PRECISION_TOLERANCE)


def _backwards(found: Sequence[_Forward]) -> list[Callable[[], Part]]:
    """Return the backward of each part in lock-step, where the counts of all are known before it."""
    known = totals_of([float(term.count) for term in each.terms] for each in found)
    first = next((number for number, each in enumerate(found) if each.terms), 0)
    return [partial(each.backward, known, is_first=number == first) for number, each in enumerate(found)]


def _weights(terms: Sequence[Term], totals: Sequence[float], *, is_first: bool) -> Weights:
    """Return what a part's terms count with among all parts: one weight where it is the same, else one for each."""
    shares = [
        (float(term.count) / total if total else 0.0) if term.kind == "mean" else float(term.kind == "sum" or is_first)
        for term, total in zip(terms, totals, strict=True)
    ]
    means = [share for term, share in zip(terms, shares, strict=True) if term.kind == "mean"]
    kinds = {term.kind for term in terms}
    # Shares of one mean add up to 1 over the parts, so terms that count once come out right, too. Of several means, all
    # may have one share in some parts alone.
    is_one = len(means) == 1 or (kinds == {"mean"} and math.isclose(min(means), max(means)))
    if len(terms) == 1 or kinds == {"sum"} or ("sum" not in kinds and is_one):
        return Weights((means or shares)[0])
    return Weights(1.0, tuple((term.node, share) for term, share in zip(terms, shares, strict=True) if term.node))


def totals_of(counts: Iterable[Sequence[float]]) -> list[float]:
    """Return what each term was averaged over in all parts; a loss of zero has none."""
    return [math.fsum(column) for column in zip(*filter(None, counts), strict=False)]


class _Rows(NamedTuple):
    """Which samples of a piece a part has."""

    start: int
    size: int
    of: int


class _Watch(LiveBytes):
    """Watches a forward: its memory, its least precise numbers, and its random ones.

    A piece writes the random numbers that it draws on a tape; a part reads those of its rows.
    """

    def __init__(self, tape: list[Tensor], rows: _Rows | None) -> None:
        super().__init__()
        self.rounded: set[torch.dtype] = set()  # to which numbers were rounded
        self.certain = True  # whether a part had the same random numbers as the piece
        self.is_calmed = False  # whether a kernel was kept from drawing some, which its backward does not know
        self._tape, self._rows, self._place = tape, rows, 0

    def computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation; numbers that are less precise than those it was given are rounded."""
        is_random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        result = self._drawn(func, args, kwargs) if is_random else func(*args, **kwargs)
        given, made = (
            [each.dtype for each in tree_leaves(tree) if isinstance(each, Tensor) and each.is_floating_point()]
            for tree in ((args, kwargs), result)
        )
        finest = min((torch.finfo(each).eps for each in given), default=1.0)
        self.rounded.update(each for each in made if torch.finfo(each).eps > finest)
        return result

    def _drawn(self, func: Any, args: Any, kwargs: Any) -> Any:
        names = [argument.name for argument in func._schema.arguments]  # noqa: SLF001 - no public name
        calm = {name: value for name, value in _CALM.items() if name in names}
        if calm:
            self.is_calmed = True
            return func(**{**dict(zip(names, args, strict=False)), **kwargs, **calm})
        source = kwargs.get("generator")
        generators = [source] if source is not None else _generators(args, kwargs)
        states = [each.get_state() for each in generators]
        result = func(*args, **kwargs)
        tensors = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        if self._rows is None:
            self._tape.extend(each.clone() for each in tensors)
            return result
        for each, state in zip(generators, states, strict=True):
            each.set_state(state)
        for each in tensors:
            place, self._place = self._place, self._place + 1
            known = place < len(self._tape) and "randperm" not in func.name()  # no part of an order is a part's order
            rows = self._own_rows(self._rows, self._tape[place], each) if known else None
            self.certain = self.certain and rows is not None
            if rows is not None:
                each.copy_(rows)
        return result

    def _own_rows(self, rows: _Rows, whole: Tensor, part: Tensor) -> Tensor | None:
        """Return the numbers of a part's rows, where they can be told."""
        if whole.dim() != part.dim():
            return None
        for dim, (many, few) in enumerate(zip(whole.shape, part.shape, strict=True)):
            times = few // rows.size
            if many == few:
                continue
            if many * rows.size == few * rows.of:
                whole = whole.narrow(dim, rows.start * times, few)
                self.certain = self.certain and times == 1  # or samples lie one behind the other, or they do not
            elif few < many:
                whole, self.certain = whole.narrow(dim, 0, few), False  # trimmed, perhaps
            else:
                return None
        return whole


def _generators(args: Any, kwargs: Any) -> list[torch.Generator]:
    devices = {each.device for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
    devices |= {torch.device(kwargs["device"])} if kwargs.get("device") is not None else set()
    numbers = [device.index or 0 for device in devices if device.type == "cuda"]
    return [torch.default_generator, *(torch.cuda.default_generators[number] for number in numbers)]
