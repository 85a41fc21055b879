"""The first check: is the gradient of a piece of the batch that of its parts together?

What couples samples inside a model, or was computed of the batch without gradient, shows in no graph. Then the gradient
of a piece is not the weighted sum of its parts' gradients, and no split is exact. A piece takes no more memory than
training one micro-batch does; it and its parts use the same random numbers.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _NormBase as Statistics

from bigbatch.batch.split import Division
from bigbatch.batch.transfer import Mover
from bigbatch.caller import outside
from bigbatch.errors import BatchError, BigBatchError, CoupledLoss, LossError, PathsDiffer
from bigbatch.execute.micro_step import Runner
from bigbatch.first_step_watch import Rows, Watch, quiet
from bigbatch.loss import refusals
from bigbatch.loss.count import Term
from bigbatch.options import Options
from bigbatch.state import scope
from bigbatch.state.oom import is_out_of_memory, let_go
from bigbatch.state.rng import Randomness
from bigbatch.state.scope import NeedsLockStep
from bigbatch.state.snapshot import Snapshot, untouched
from bigbatch.window.backward import weigh_terms
from bigbatch.window.tally import Weights

_AGAIN = (1, 3, 15, 127)  # updates after which pieces are compared again
# How far rounding may move a gradient, relative to those of the parts; what couples samples moves it further.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}
_LOW_PRECISION_TOLERANCE = 0.2
_LOCKSTEP = 10  # times the tolerance: statistics of a few samples amplify rounding
_OF_LOSS = 0.1  # times the tolerance: how far rounding may move a loss, relatively
_OF_NOTHING = 1e-3  # times the tolerance and the loss: a gradient that is rounding alone
_FLOOR = 0.1  # a loss near zero may be the difference of larger numbers, whose rounding it has
_COUNT_TOLERANCE = 1e-6  # class weights are added up in float32
_LITTLE = 1 << 25  # bytes that a piece may hold in any case, and the gradients that are compared
_PARTS = 64  # of a piece, at most

# An error, or that all is well, or that random numbers hide the losses, or the gradients alone.
Verdict = BigBatchError | Literal["agrees", "hidden", "unsure"]
SideBySide = Callable[..., "list[Part]"]  # runs forwards, then backwards, in lock-step


class Part(NamedTuple):
    """The loss and the gradient of some samples."""

    value: float
    kinds: tuple[str, ...]  # of the terms of the loss
    counts: tuple[float, ...]  # of what they were averaged over
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
    is_first: bool
    watch: Watch
    numbers: Randomness  # before it


class FirstCheck:
    """Compares pieces of a batch with their parts, before updates 1, 2, 4, 16 and 128.

    It compares again where other modules are in training mode than before. Later updates matter: a gate that begins at
    zero hides at first what couples samples. A check that cannot run proves nothing, and raises nothing.
    """

    def __init__(self, models: Sequence[nn.Module], runner: Runner, mover: Mover, options: Options) -> None:
        """Begin with nothing compared."""
        self.models, self.runner, self.mover = models, runner, mover
        self.side_by_side: SideBySide | None = None
        self.is_away = False  # whether what a backward needs waits in host memory
        self._options = options
        self._modules = list(dict.fromkeys(module for model in models for module in model.modules()))
        self._updates = 0
        self._due: tuple[int, ...] = _AGAIN
        self._modes, self._mode = set[bytes](), b""  # which modules were in training mode when pieces were compared
        self._warned = False

    def __call__(self, division: Division, side_by_side: SideBySide | None = None) -> bool:
        """Refuse what cannot be cut or trimmed; returns whether pieces were compared (see `passed`)."""
        trimmed = division.longest is not None and min(division.longest) < division.width
        self._mode = bytes([trimmed, *(module.training for module in self._modules)])
        due = self._mode not in self._modes or self._updates >= min(self._due, default=math.inf)
        if not due or (len(division) == 1 and not trimmed):  # one micro-batch is the big batch
            return False
        # Statistics of a few samples amplify rounding, and are exact by themselves, except where they see padding.
        self.side_by_side = side_by_side and partial(side_by_side, resting=division.longest is None)
        if trimmed:
            self._refuse_counted_padding(division)
        if self._options.check and self._is_hidden(division) and not self._warned:
            self._warned = True
            warnings.warn(_UNSEEN, stacklevel=outside())
        return True

    def passed(self, *, looked: bool, stepped: bool = True) -> None:
        """Note that an update was made, or at least not refused."""
        self._updates += stepped
        if looked:
            self._modes.add(self._mode)
            self._due = tuple(each for each in self._due if each >= self._updates)

    def _is_hidden(self, division: Division) -> bool:
        """Compare in training mode, and in eval mode what random numbers hide there; returns whether they hid it."""
        accepts, hidden = self._options.batch_norm == "micro", False
        resting = [module for module in self._modules if accepts and isinstance(module, Statistics)]
        for modules in (resting, self._modules):
            with untouched(self.models), quiet(modules):
                found = self._first_that_runs(division)
            division.batch.refuse_changed()  # or the step would use other samples than were compared
            if found == "agrees":
                return hidden
            if isinstance(found, BigBatchError) and not (accepts and modules is resting):
                raise self._dated(found)
            hidden = hidden or found != "unsure"  # an error: of statistics that were accepted, and are not torch's own
        return hidden

    def _dated(self, error: BigBatchError) -> BigBatchError:
        """Name the updates that were made before a coupling was seen."""
        since = f" This did not show at first: the updates before this one, {self._updates} by now, may not be right."
        return type(error)(error.problem + since, fix=error.fix_in_step) if self._updates else error

    def _first_that_runs(self, division: Division) -> Verdict:
        """Compare uneven parts and even parts; where neither can be evaluated, two micro-batches."""
        ran = False
        for shares, is_instead, watched in self._attempts(division):
            if is_instead and ran:
                break
            try:
                found = _Piece(self, division, shares, watched=watched).compared()
            except Exception as error:  # it proves nothing; what is the user's own comes in the step
                ours = self.side_by_side is not None and isinstance(error, BigBatchError)
                if isinstance(error, NeedsLockStep) or (ours and not isinstance(error, PathsDiffer)):
                    raise
                _forget(error)
                continue
            finally:
                torch.clear_autocast_cache()  # or the step would use copies of weights that were made here
            if found != "agrees":
                return found
            ran = True
        return "agrees"

    def _attempts(self, division: Division) -> Iterator[tuple[list[list[int]], bool, bool]]:
        """Yield the parts of pieces, whether they are tried instead of those before, and whether they are watched."""
        groups = _groups(division)
        size, peak = len(groups[0]), _LITTLE
        self.is_away = False
        try:
            peak = _Piece(self, division, groups[:1], probes=()).whole.peak
        except NeedsLockStep:
            raise
        except BigBatchError:
            return  # a refusal of the micro-batch itself, which comes in the step
        except Exception as error:  # noqa: BLE001 - as above
            _forget(error)
        samples = max(size * _LITTLE // max(peak, 1), size, 2)
        self.is_away = samples > size and samples * peak > size * _LITTLE  # two samples, where one is a micro-batch
        yield _shares(groups, samples, uneven=True), False, True
        yield _shares(groups, samples, uneven=False), False, True
        yield _shares(groups, 2 * size, uneven=False), True, True
        yield _shares(groups, 2 * size, uneven=False), True, False  # a few operations cannot be watched

    def _refuse_counted_padding(self, division: Division) -> None:
        """Compare what a loss is over with and without padding, whatever its value is."""
        groups = _groups(division)
        shares = [groups[0][:1], *([groups[1][-1:]] if len(groups) > 1 else ())]
        self.is_away = False
        try:
            with untouched(self.models), quiet():
                piece = _Piece(self, division, shares)
                parts = piece.parts()
        except Exception as error:  # noqa: BLE001 - it proves nothing
            _forget(error)
            return
        division.batch.refuse_changed()
        if piece.whole.kinds == parts[0].kinds and all(part.certain for part in parts):
            counts = zip(piece.whole.kinds, piece.whole.counts, _totals(parts), strict=True)
            # Less is no padding: counted(loss, 1) is the user's word for any number of samples.
            if any(kind == "mean" and number > total * (1 + _COUNT_TOLERANCE) for kind, number, total in counts):
                raise self._dated(_padded(piece.whole, parts))


class _Piece:
    """Some samples of a batch, evaluated together and in parts."""

    def __init__(
        self,
        check: FirstCheck,
        division: Division,
        shares: list[list[int]],
        *,
        watched: bool = True,
        probes: tuple[Tensor, ...] | None = None,
    ) -> None:
        """Evaluate them together; `probes` are the parameters whose gradients are compared."""
        self._check, self._division, self._shares, self._watched = check, division, shares, watched
        self._probes = check.runner.probes(_LITTLE) if probes is None else probes
        self._state, self._tape = Snapshot(check.models), list[Tensor]()
        self._samples = [i for share in shares for i in share]
        self._in_parts = False
        (self.whole,) = self._evaluated([self._samples], [_widest(division)], None)

    def parts(self, widths: Sequence[int | None] | None = None, *, goes_on: bool = False) -> list[Part]:
        """Evaluate the parts; their random numbers are those of the piece, or go on from part to part."""
        self._in_parts = True
        widths = widths or [_width(self._division, share) for share in self._shares]
        totals = self.whole.counts
        found = self._evaluated(self._shares, widths, totals, goes_on=goes_on)
        came = _totals(found)
        alike = len(came) == len(totals) and all(map(partial(math.isclose, rel_tol=_COUNT_TOLERANCE), came, totals))
        if not alike and self._check.side_by_side is None:  # the piece has another count, or a graph of another kind
            found = self._evaluated(self._shares, widths, came, goes_on=goes_on)
        return [part for part in found if part.kinds] or found  # a loss of zero adds nothing

    def compared(self) -> Verdict:
        """Compare the gradient of the piece with that of its parts."""
        whole, found, in_lockstep = self.whole, self.parts(), self._check.side_by_side is not None
        alike = len({part.kinds for part in found}) == 1 and whole.norms == found[0].norms
        goes_on = alike and whole.drew and not in_lockstep
        if (alike and _agree(whole, found)) or (goes_on and _agree(whole, self.parts(goes_on=True))):
            return "agrees"
        if whole.drew and not all(part.certain for part in found):
            return "hidden"
        if whole.norms > found[0].norms:
            return _more_norms(whole, found, len(self._samples))
        if self._is_of_padding():
            return _padded(whole, found)
        if whole.drew and _is_near(whole.value, _together(found), (whole, *found)):
            return "unsure"  # what is run again in backward, or a fused kernel, draws numbers of its own there
        return _coupled(whole, found, len(self._samples), _IN_LOCKSTEP if in_lockstep else _CAUSES)

    def _is_of_padding(self) -> bool:
        """Whether parts that have all of it make the piece."""
        if self._division.longest is None or self._division.batch.collate is not None:
            return False
        return _agree(self.whole, self.parts([_widest(self._division)] * len(self._shares)))

    def _evaluated(
        self,
        shares: Sequence[list[int]],
        widths: Sequence[int | None],
        totals: Sequence[float] | None,
        *,
        goes_on: bool = False,
    ) -> list[Part]:
        """Evaluate samples: each share by itself, or in lock-step where their losses ask for each other."""
        sizes = [len(share) for share in shares]
        together, in_parts = self._check.side_by_side, self._in_parts
        if in_parts:
            self._state.restore()

        def forward(number: int) -> _Forward:
            if in_parts and together is None:
                self._state.restore(randomness=not goes_on)
            rows = Rows(sum(sizes[:number]), sizes[number], sum(sizes)) if in_parts else None
            return self._forward(self._division.part(shares[number], widths[number]), rows, is_first=not number)

        def weighed(found: Sequence[_Forward]) -> list[Callable[[], Part]]:
            known = _sums([float(term.count) for term in each.terms] for each in found if each.terms)
            return [partial(self._backward, each, known) for each in found]

        if together is not None:
            return together(forward, weighed, sizes)
        return [self._backward(forward(number), totals) for number in range(len(shares))]

    def _forward(self, given: Any, rows: Rows | None, *, is_first: bool) -> _Forward:
        runner = self._check.runner
        micro_batch, watch = self._check.mover.moved(given), Watch(self._tape, rows)
        numbers = Snapshot(self._check.models).randomness
        away = saved_tensors_hooks(_to_host, _from_host) if self._check.is_away else nullcontext()
        with away, torch.enable_grad(), watch if self._watched else nullcontext():
            loss, _ = runner.loss(micro_batch)
        terms = list[Term]()
        with nullcontext() if self._in_parts else suppress(LossError):  # a piece may be more than a micro-batch
            terms = runner.read(loss)
        return _Forward(loss, terms, is_first, watch, numbers)

    def _backward(self, forward: _Forward, totals: Sequence[float] | None) -> Part:
        """Compute the gradient, weighed by what the terms come to in all parts; None: of this one alone."""
        loss, terms, is_first, watch, numbers = forward
        worker = scope.worker()
        weights = Weights()
        if terms and totals is not None and len(totals) == len(terms):
            weights = _weights(terms, totals, is_first=is_first)
        # In lock-step others wait for its backward, whatever it counts.
        counts = self._probes and not (weights.nothing and worker is None)
        return Part(
            float(loss.detach()),
            tuple(term.kind for term in terms),
            tuple(float(term.count) for term in terms),
            math.nan if weights.each else float(weights.whole),
            self._gradient(loss, terms, weights) if counts else tuple(map(torch.zeros_like, self._probes)),
            self._tolerance(loss, watch.lowest),
            worker.visits.get("BatchNorm", 0) if worker is not None else 0,
            watch.is_calmed or numbers.drawn(),
            watch.certain and not (self._in_parts and numbers.drawn()),
            watch.peak,
        )

    def _gradient(self, loss: Tensor, terms: list[Term], weights: Weights) -> tuple[Tensor, ...]:
        scale = self._check.runner.scale()
        hooks = weigh_terms(weights, loss, terms, {}) if weights.each else ()
        try:
            start = torch.full_like(loss, float(weights.whole) * scale)
            found: Sequence[Tensor | None] = torch.autograd.grad(loss, self._probes, start, allow_unused=True)
        finally:
            for hook in hooks:
                hook.remove()
        known = (torch.zeros_like(p) if g is None else g for g, p in zip(found, self._probes, strict=True))
        return tuple(g.detach().to_dense().to(torch.promote_types(g.dtype, torch.float32)) / scale for g in known)

    def _tolerance(self, loss: Tensor, lowest: torch.dtype | None) -> float:
        """Return how far the least precise numbers of a forward may move its gradient, relatively."""
        device = loss.device.type
        used = {
            loss.dtype,
            lowest or loss.dtype,
            *(p.dtype for model in self._check.models for p in model.parameters()),
        }
        used |= {torch.get_autocast_dtype(device)} if torch.is_autocast_enabled(device) else set()
        found = max(_TOLERANCE.get(each, _LOW_PRECISION_TOLERANCE) for each in used if each.is_floating_point)
        return found if scope.worker() is None else min(_LOCKSTEP * found, _LOW_PRECISION_TOLERANCE)


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


def _totals(parts: Sequence[Part]) -> list[float]:
    """Return what each term was averaged over in all parts."""
    return _sums(part.counts for part in parts if part.kinds)


def _agree(whole: Part, parts: Sequence[Part]) -> bool:
    """Whether the gradients of the parts make that of the whole, but for rounding, or do not tell."""
    if not math.isfinite(whole.value) or not math.isfinite(_norm(whole.gradient)):
        return True
    is_alone = all(set(part.kinds) == {"once"} for part in parts)
    if is_alone and not all(_is_near(whole.value, part.value, parts) for part in parts):
        return False
    broken = [part for part in parts if not math.isfinite(_norm(part.gradient))]
    if broken:  # as of a standard deviation of one sample; a mean over nothing does not tell
        return not all(all(part.counts) for part in broken)
    size, tolerance = sum(_norm(part.gradient) for part in parts), max(part.tolerance for part in (whole, *parts))
    return _apart(whole, parts) <= tolerance * (size + _OF_NOTHING * max(_FLOOR, abs(whole.value)))


def _apart(whole: Part, parts: Sequence[Part]) -> float:
    together = map(sum, zip(*(part.gradient for part in parts), strict=True))
    return _norm(one - other for one, other in zip(whole.gradient, together, strict=True))


def _norm(gradient: Iterable[Tensor]) -> float:
    return math.hypot(*(float(torch.linalg.vector_norm(each)) for each in gradient))


def _together(parts: Sequence[Part]) -> float:
    """Return the loss that the parts make together; NaN where their terms have weights of their own."""
    return math.fsum(part.value * part.weight for part in parts if part.weight)


def _is_near(one: float, other: float, parts: Sequence[Part]) -> bool:
    """Whether two losses differ by rounding alone, or one is not known."""
    size = max(_FLOOR, abs(one), *(abs(part.value) for part in parts))
    return not abs(one - other) > _OF_LOSS * max(part.tolerance for part in parts) * size


def _to_host(tensor: Tensor) -> tuple[torch.device, Tensor]:
    is_weight = tensor.is_leaf and tensor.requires_grad
    return tensor.device, tensor.detach() if is_weight else tensor.detach().to("cpu")


def _from_host(packed: tuple[torch.device, Tensor]) -> Tensor:
    return packed[1].to(packed[0])


_from_host.shows = True  # type: ignore[attr-defined]  # the reader of the graph may look


def _forget(error: Exception) -> None:
    """Free what a failure holds, where memory is what it lacked; that takes a while."""
    if is_out_of_memory(error):
        let_go(error)


def _groups(division: Division) -> list[list[int]]:
    """Return the samples of each micro-batch; where they are trimmed, of the widest, the narrowest, and so on."""
    found = [division.indices(group) for group in division.groups]
    if division.longest is None:
        return found
    order = sorted(range(len(found)), key=lambda number: -division.longest[number])  # type: ignore[index]
    return [found[number] for pair in zip(order, order[::-1], strict=True) for number in pair][: len(found)]


def _widest(division: Division) -> int | None:
    """Return what a piece is trimmed to, which some of its parts are not."""
    if division.longest is None:
        return None
    return max(division.longest) if max(division.longest) > min(division.longest) else division.width


def _width(division: Division, share: list[int]) -> int | None:
    """Return what a micro-batch is trimmed to that some samples are of."""
    groups = zip(division.groups, division.longest or (), strict=division.longest is not None)
    return next((wide for group, wide in groups if share[0] in division.indices(group)), None)


def _shares(groups: Sequence[list[int]], samples: int, *, uneven: bool) -> list[list[int]]:
    """Take the samples of a piece: parts of at most a micro-batch each; equal ones hide how they are weighed."""
    if len(groups) == 1:  # trimmed, and not cut
        return [groups[0][:samples]]
    left, found = samples, list[list[int]]()
    for group in groups[:_PARTS]:
        room = left if found else left - max(left // (3 if uneven else 2), 1)
        if room < 1 or (len(found) > 1 and not uneven and room < len(group)):
            break
        found.append(group[:room])
        left -= len(found[-1])
    if uneven and len({len(share) for share in found}) == 1:
        found[-1] = found[-1][: max(math.ceil(len(found[-1]) / 3), 1)]
    return found


_UNSEEN = (
    "this loss draws random numbers that cannot be drawn again for a part of a batch, as torch.randperm. So the check "
    "could not see, in training mode, whether samples are coupled.\n"
    "Use: numbers drawn before the step, a row for each sample of the batch; or Options(check=False)"
)
_CAUSES = (
    "Common causes: attention, pooling or a statistic over the batch dimension, also without gradient (normalized "
    "advantages, class weights of the batch, a threshold); padding that the loss counts; a divisor that is no count; a "
    "tensor that all samples share and that has as many rows as there are samples; a state that moves in every call."
)
_IN_LOCKSTEP = (
    "Common causes: rows of own samples begin at across.offset(); what is made of across.gather must be the same in "
    "each micro-batch; and what the model or the loss keeps outside of the call, as in self.features = x, is another "
    "micro-batch's after BatchNorm and `across`."
)


def _coupled(whole: Part, parts: Sequence[Part], samples: int, causes: str) -> LossError:
    """Say that the parts do not make the whole."""
    numbers = [len(part.kinds) for part in parts]
    if len(set(numbers)) > 1:
        return CoupledLoss(
            f"the losses of {len(parts)} parts of {samples} samples have {', '.join(map(str, numbers))} terms: there "
            "are terms for single samples, or for what happens to be in a batch.",
            fix="one tensor of all samples' losses, reduced once; or counted(loss, n), counted(loss, 'sum')",
        )
    alike = all(_is_near(parts[0].value, part.value, parts) for part in parts)
    if not alike and all(set(part.kinds) == {"once"} for part in parts):
        return refusals.shared_alone([part.value for part in parts])
    away = _apart(whole, parts) / max(_norm(whole.gradient), sum(_norm(part.gradient) for part in parts))
    return CoupledLoss(
        f"the samples of this batch are coupled: the gradient of {samples} of them is {away:.2g} of its norm away from "
        f"that of {len(parts)} parts of them together. Their losses are {whole.value:.6g} and {_together(parts):.6g}. "
        f"No split into micro-batches gives the big batch's gradient.\n{causes}",
        fix="print(bigbatch.verify(model, loss_fn, batch, micro_batch_size=...)) to find the cause; "
        "Options(check=False) where the loss only looks coupled, as with random numbers of its own",
    )


def _more_norms(whole: Part, parts: Sequence[Part], samples: int) -> CoupledLoss:
    """Say that BatchNorm is called more often for more samples."""
    return CoupledLoss(
        f"BatchNorm is called {whole.norms} times for {samples} samples, and {max(part.norms for part in parts)} times "
        "for a part of them: it normalizes by pieces of the batch (ghost or virtual batches, or one sample after the "
        "other), and which samples make a piece would change with the split.",
        fix='BigStep(..., micro_batch_size=128, options=Options(batch_norm="micro"))',
    )


def _padded(whole: Part, parts: Sequence[Part]) -> BatchError:
    """Say that a loss is another one without its padding."""
    over = [" over " + " and ".join(f"{count:g}" for count in counts) for counts in (whole.counts, _totals(parts))]
    return BatchError(
        f"this loss counts padding: with it the loss is {whole.value:.6g}{over[0]}, without it {_together(parts):.6g}"
        f"{over[1]}, so packing would change it.",
        fix="a loss that ignores padding, as cross_entropy ignores labels of -100, and an attention mask for the "
        "model; or leave lengths= out",
    )
