"""The first check: is the gradient of a piece of the batch that of its parts together?

What couples samples inside a model, or was computed of the batch without gradient, shows in no graph. Then the gradient
of a piece is not the weighted sum of its parts' gradients, and no split is exact. A piece takes no more memory than
training one micro-batch does; it and its parts use the same random numbers.
"""

import math
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase as Statistics

from bigbatch.batch.split import Division
from bigbatch.batch.transfer import Mover
from bigbatch.caller import outside
from bigbatch.errors import BatchError, BigBatchError, CoupledLoss, PathsDiffer
from bigbatch.execute.micro_step import Runner
from bigbatch.first_step_parts import COUNT_TOLERANCE, Part, Piece, Share, SideBySide, totals_of
from bigbatch.options import Options
from bigbatch.state.oom import is_out_of_memory, let_go
from bigbatch.state.scope import NeedsLockStep
from bigbatch.state.snapshot import untouched

_AGAIN = (1, 3, 15, 127)  # updates after which pieces are compared again
_LITTLE = 1 << 25  # bytes that a piece may hold in any case, and the gradients that are compared
_PARTS = 64  # of a piece, at most
_FEWEST = 2  # samples of a piece
_OF_LOSS = 0.1  # times the tolerance: how far rounding may move a loss, relatively
_OF_NOTHING = 1e-3  # times the tolerance and the loss: a gradient that is rounding alone
_FLOOR = 0.1  # a loss near zero may be the difference of larger numbers, whose rounding it has

# An error; or that all is well, that random numbers hide the losses, or the gradients alone, that nothing could run, or
# that memory was short.
Verdict = BigBatchError | Literal["agrees", "hidden", "unsure", "blind", "short"]


class FirstCheck:
    """Compares pieces of batches with their parts, before updates 1, 2, 4, 16 and 128.

    It compares again where other modules are in training mode than before. Later updates matter: a gate that begins at
    zero hides at first what couples samples. A check that cannot run proves nothing; once the step is made, it warns.
    """

    def __init__(self, models: Sequence[nn.Module], runner: Runner, mover: Mover, options: Options) -> None:
        self._models, self._runner, self._mover, self._options = models, runner, mover, options
        self._modules = list(dict.fromkeys(module for model in models for module in model.modules()))
        self._updates, self._due = 0, math.inf  # the next comparison is due after so many of them
        self._modes, self._mode = set[bytes](), b""  # which modules were in training mode when pieces were compared
        self._looked, self._unseen, self._reason, self._has_warned = False, "", "", False

    def __call__(self, division: Division, side_by_side: SideBySide | None = None) -> bool:
        """Refuse what cannot be cut or trimmed; returns whether pieces were compared (see `passed`)."""
        trimmed = division.longest is not None and min(division.longest) < division.width
        self._mode = bytes([trimmed, *(module.training for module in self._modules)])
        self._unseen = ""
        due = self._mode not in self._modes or self._updates >= self._due
        self._looked = due and (len(division) > 1 or trimmed)  # one micro-batch is the big batch
        if self._looked:
            # Statistics of a few samples amplify rounding, and are exact by themselves, except where they see padding.
            together = side_by_side and partial(side_by_side, resting=division.longest is None)
            piece = partial(Piece, self._models, self._runner, self._mover, division, side_by_side=together)
            groups = _groups(division)
            try:
                if trimmed:
                    self._refuse_counted_padding(piece, groups)
                if self._options.check:
                    self._unseen = self._unseen_in(piece, groups)
            finally:
                division.batch.refuse_changed()  # or the step, and perhaps the parts, would use other samples
        return self._looked

    def passed(self, *, stepped: bool) -> None:
        """Note that an update was made, or at least not refused; warn once of what could not be compared."""
        self._updates += stepped
        if self._looked:
            self._modes.add(self._mode)
            self._due = min((each for each in _AGAIN if each >= self._updates), default=math.inf)
        if self._unseen and not self._has_warned:
            self._has_warned = True
            warnings.warn(self._unseen, stacklevel=outside())

    def _unseen_in(self, piece: partial[Piece], groups: Sequence[Share]) -> str:
        """Compare in training mode, and in eval mode what random numbers hide there; returns what was not seen."""
        accepts, unseen = self._options.batch_norm == "micro", ""
        resting = [module for module in self._modules if accepts and isinstance(module, Statistics)]
        for modules in (resting, self._modules):
            with untouched(self._models), _quiet(modules):
                found = self._first_that_runs(piece, groups)
            if found == "agrees":
                return unseen
            if found == "blind":
                return unseen or _BLIND.format(self._reason)
            if isinstance(found, BigBatchError) and not (accepts and modules is resting):
                raise self._dated(found)
            if found != "unsure":  # an error: of statistics that were accepted, and are not torch's own
                unseen = _UNSEEN
        return _UNSEEN

    def _dated(self, error: BigBatchError) -> BigBatchError:
        since = f" This did not show at first: the updates before this one, {self._updates} by now, may not be right."
        return type(error)(error.problem + since, fix=error.fix_in_step) if self._updates else error

    def _first_that_runs(self, piece: partial[Piece], groups: Sequence[Share]) -> Verdict:
        """Compare uneven parts and even parts; where neither can be evaluated, two micro-batches."""
        size, peak, is_watched = len(groups[0].samples), _LITTLE, True
        try:  # the memory of a micro-batch's forward says how many samples a piece may have
            peak = piece(groups[:1]).whole.peak
        except NeedsLockStep:
            raise
        except Exception as error:  # noqa: BLE001 - it proves nothing
            is_watched = self._is_short(error)  # a few operations cannot be watched
            if isinstance(error, BigBatchError):  # a refusal of the micro-batch itself, which comes in the step
                return "blind"
        fitting = max(size * _LITTLE // max(peak, 1), size)
        samples, is_away = max(fitting, _FEWEST), fitting < _FEWEST  # two samples, where one is a micro-batch
        piece = partial(piece, probes=self._runner.probes(_LITTLE), is_watched=is_watched)
        best: Verdict = "blind"
        for is_uneven, instead in ((True, 0), (False, 0), (False, 2 * size)):
            if instead and best == "agrees":
                break
            samples = instead or samples
            while True:
                found = self._verdict(piece, _shares(groups, samples, uneven=is_uneven), is_away=is_away)
                if found != "short":
                    break
                if samples <= _FEWEST and is_away:
                    return best
                samples, is_away = max(samples // 2, _FEWEST), True
            if found not in {"agrees", "blind"}:
                return found
            best = found if found == "agrees" else best
        return best

    def _verdict(self, piece: partial[Piece], shares: Sequence[Share], *, is_away: bool) -> Verdict:
        try:
            return _compared(piece(shares, is_away=is_away))
        except Exception as error:  # it proves nothing; what is the user's own comes in the step
            is_ours = piece.keywords["side_by_side"] is not None and isinstance(error, BigBatchError)
            if isinstance(error, NeedsLockStep) or (is_ours and not isinstance(error, PathsDiffer)):
                raise
            return "short" if self._is_short(error) else "blind"
        finally:
            torch.clear_autocast_cache()  # or the step would use copies of weights that were made here

    def _is_short(self, error: Exception) -> bool:
        """Note why a piece could not run; free what it holds where memory is what it lacked, which takes a while."""
        self._reason, short = f"{type(error).__name__}: {error}".splitlines()[0], is_out_of_memory(error)
        if short:
            let_go(error)
        return short

    def _refuse_counted_padding(self, piece: partial[Piece], groups: Sequence[Share]) -> None:
        """Compare what a loss is over with and without padding, whatever its value is."""
        first, *last = groups[:2]
        shares = [Share(first.samples[:1], first.width), *(Share(each.samples[-1:], each.width) for each in last)]
        try:
            with untouched(self._models), _quiet():
                found = piece(shares)
                whole, parts = found.whole, found.parts()
        except Exception as error:  # noqa: BLE001 - it proves nothing
            self._is_short(error)
            return
        if whole.kinds == parts[0].kinds and all(part.certain for part in parts):
            counts = zip(whole.kinds, whole.counts, totals_of(part.counts for part in parts), strict=True)
            # Less is no padding: counted(loss, 1) is the user's word for any number of samples.
            if any(kind == "mean" and number > total * (1 + COUNT_TOLERANCE) for kind, number, total in counts):
                raise self._dated(_padded(whole, parts))


def _compared(piece: Piece) -> Verdict:
    whole, parts = piece.whole, piece.parts()
    if _agree(whole, parts):
        return "agrees"
    if not whole.certain and not all(part.certain for part in parts):
        return "hidden"
    if whole.norms <= parts[0].norms and not whole.certain and _is_near(whole.value, _together(parts), (whole, *parts)):
        return "unsure"  # what is run again in backward, or a fused kernel, draws numbers of its own there
    return _coupled(piece, parts)


def _agree(whole: Part, parts: Sequence[Part]) -> bool:
    """Whether the gradients of the parts make that of the whole, but for rounding, or do not tell."""
    if len({part.kinds for part in parts}) > 1 or whole.norms != parts[0].norms:
        return False
    if not math.isfinite(whole.value) or not math.isfinite(_norm(whole.gradient)):
        return True
    is_alone = all(set(part.kinds) == {"once"} for part in parts)
    if is_alone and not all(_is_near(whole.value, part.value, parts) for part in parts):
        return False
    broken = [part for part in parts if not math.isfinite(_norm(part.gradient))]
    if broken:  # as of a standard deviation of one sample; a mean over nothing does not tell
        return not all(all(part.counts) for part in broken)
    size, tolerance = sum(_norm(part.gradient) for part in parts), max(part.tolerance for part in (whole, *parts))
    if not size and not _norm(whole.gradient):  # as where a gradient cannot be asked for: then the values tell
        return _is_near(whole.value, _together(parts), (whole, *parts))
    return _apart(whole, parts) <= tolerance * (size + _OF_NOTHING * max(_FLOOR, abs(whole.value)))


def _apart(whole: Part, parts: Sequence[Part]) -> float:
    together = map(sum, zip(*(part.gradient for part in parts), strict=True))
    return _norm(one - other for one, other in zip(whole.gradient, together, strict=True))


def _norm(gradient: Iterable[Tensor]) -> float:
    """Return the norm of tensors on any devices, as one vector."""
    return math.hypot(*(float(torch.linalg.vector_norm(each)) for each in gradient))


def _together(parts: Sequence[Part]) -> float:
    """Return the loss that the parts make together; NaN where their terms have weights of their own."""
    return math.fsum(part.value * part.weight for part in parts if part.weight)


def _is_near(one: float, other: float, parts: Sequence[Part]) -> bool:
    size = max(_FLOOR, abs(one), *(abs(part.value) for part in parts))
    return not abs(one - other) > _OF_LOSS * max(part.tolerance for part in parts) * size


def _groups(division: Division) -> list[Share]:
    """Return the samples of each micro-batch; where they are trimmed, of the widest, the narrowest, and so on."""
    widths = division.longest or (0,) * len(division)
    order = sorted(range(len(division)), key=lambda number: -widths[number])
    if division.longest is not None:
        order = [number for pair in zip(order, order[::-1], strict=True) for number in pair][: len(order)]
    return [Share(division.indices(division.groups[number]), widths[number] or None) for number in order]


def _shares(groups: Sequence[Share], samples: int, *, uneven: bool) -> list[Share]:
    """Take the samples of a piece: parts of at most a micro-batch each; equal ones hide how they are weighed."""
    if len(groups) == 1:  # trimmed, and not cut
        return [Share(groups[0].samples[:samples], groups[0].width)]
    left, found = samples, list[Share]()
    for group, width in groups[:_PARTS]:
        room = left if found else left - max(left // (3 if uneven else 2), 1)
        if room < 1 or (len(found) > 1 and not uneven and room < len(group)):
            break
        found.append(Share(group[:room], width))
        left -= len(found[-1].samples)
    if uneven and len({len(share.samples) for share in found}) == 1:
        last = found.pop()
        found.append(Share(last.samples[: max(math.ceil(len(last.samples) / 3), 1)], last.width))
    return found


@contextmanager
def _quiet(resting: Sequence[nn.Module] = ()) -> Iterator[None]:
    """Put modules into eval mode, and drop warnings of pieces, as of a variance of one sample.

    What is compiled runs as it is written: under a mode dynamo would give it up for good.
    """
    before = [module.training for module in resting]
    compiles = "torch._dynamo" in sys.modules
    eagerly: Any = torch.compiler.set_stance("force_eager") if compiles else nullcontext()
    with warnings.catch_warnings(), eagerly:
        warnings.simplefilter("ignore")
        try:
            for module in resting:
                module.training = False
            yield
        finally:
            for module, training in zip(resting, before, strict=True):
                module.training = training


_TO_VERIFY = "print(bigbatch.verify(model, loss_fn, batch, micro_batch_size=...))"
_UNSEEN = (
    "this loss draws random numbers that cannot be drawn again for a part of a batch, as torch.randperm. So the check "
    "could not see, in training mode, whether samples are coupled.\n"
    "Use: numbers drawn before the step, a row for each sample of the batch; or Options(check=False)"
)
_BLIND = (
    "the check of this batch could not run: no piece of the batch could be compared with its parts ({}). So it is not "
    "known whether the update is the big batch's. It is not where a model keeps a state from call to call, of the "
    "size of a micro-batch, as truncated backpropagation does.\n"
    f"Use: {_TO_VERIFY}; a state that begins anew in each call, or comes with the batch; or Options(check=False)"
)
_CAUSES = (
    "Common causes: attention, pooling or a statistic over the batch dimension, also without gradient (normalized "
    "advantages, class weights of the batch, a threshold); padding that the loss counts; a term for each "
    "sample (return counted(loss, n) for n samples); a divisor that is no count; a tensor that all samples share "
    "and that has as many rows as there are samples; a state that moves in every call."
)
_NO_SPLIT = "No split into micro-batches gives the big batch's gradient."
_LACKING = (
    "Some parts lack a term that others have. Give every micro-batch each term, as counted(term, n) for n things, and "
    "as counted(0 * loss, 0) where it does not apply. A loop with a loss for each sample is one term: "
    "counted(torch.stack(losses).mean(), len(losses))."
)
_IN_LOCKSTEP = (
    "Common causes: rows of own samples begin at across.offset(); what is made of across.gather must be the same in "
    "each micro-batch; and what the model or the loss keeps outside of the call, as in self.features = x, is another "
    "micro-batch's after BatchNorm and `across`."
)
_GHOST = (
    "BatchNorm is called {} times for them, and {} times for a part: it normalizes pieces of the batch (ghost or "
    'virtual batches, or one sample after the other), which change with the split. Options(batch_norm="micro") accepts '
    "that."
)


def _coupled(piece: Piece, parts: Sequence[Part]) -> CoupledLoss:
    whole, samples = piece.whole, len(piece.samples)
    causes = f"{_NO_SPLIT}\n{_CAUSES if piece.side_by_side is None else _IN_LOCKSTEP}"
    if whole.norms > parts[0].norms:
        causes = f"{_NO_SPLIT}\n{_GHOST.format(whole.norms, parts[0].norms)}"
    elif len({part.kinds for part in parts}) > 1:
        causes = _LACKING
    size = max(_norm(whole.gradient), sum(_norm(part.gradient) for part in parts))
    away = _apart(whole, parts) / size if size else 0.0
    return CoupledLoss(
        f"the samples of this batch are coupled: the gradient of {samples} of them is {away:.2g} of its norm away from "
        f"that of {len(parts)} parts together. Their losses are {whole.value:.6g} and {_together(parts):.6g}. {causes}",
        fix=f"{_TO_VERIFY} to find the cause; "
        "Options(check=False) where the loss only looks coupled, as with random numbers of its own",
    )


def _padded(whole: Part, parts: Sequence[Part]) -> BatchError:
    over = [
        " over " + " and ".join(f"{count:g}" for count in counts)
        for counts in (whole.counts, totals_of(part.counts for part in parts))
    ]
    return BatchError(
        f"this loss counts padding: with it the loss is {whole.value:.6g}{over[0]}, without it {_together(parts):.6g}"
        f"{over[1]}, so packing would change it.",
        fix="a loss that ignores padding, as cross_entropy ignores labels of -100, and an attention mask for the "
        "model; or leave lengths= out",
    )
