"""The first check: is the loss of a piece of the batch the weighted loss of its parts?

What couples samples inside a model, or was computed of the batch without gradient, shows in no graph. Then the loss of
a piece is not that of its parts, and no split is exact. A piece is made of several micro-batches, as many as take no
more memory than training one does; its parts are micro-batches as they are. Both use the same random numbers.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _NormBase as Statistics

from bigbatch.batch.split import Division
from bigbatch.batch.transfer import Mover
from bigbatch.caller import outside
from bigbatch.errors import BigBatchError, LossError, PathsDiffer
from bigbatch.execute.micro_step import Runner
from bigbatch.first_step_parts import (
    Part,
    at_moved_weights,
    counts_more,
    coupled,
    is_near,
    is_sum_of,
    more_norms,
    padded,
    shared_state,
    tells_nothing,
)
from bigbatch.first_step_watch import Rows, Values, Watch, evaluating, moved, quiet, seed_differently
from bigbatch.loss.count import Term
from bigbatch.options import Options
from bigbatch.state import scope
from bigbatch.state.oom import is_out_of_memory, let_go
from bigbatch.state.rng import Randomness
from bigbatch.state.scope import NeedsLockStep
from bigbatch.state.snapshot import Snapshot, devices_of, untouched

_AGAIN = (1, 3, 15, 127)  # updates after which pieces are compared again
# How far two roundings of one loss may lie apart; what couples samples moves it by far more.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_LOW_PRECISION_TOLERANCE = 3e-2
_LOCKSTEP = 10  # times the tolerance: statistics of a few samples amplify rounding
_LITTLE = 1 << 25  # bytes that a piece may hold in any case
_PARTS = 64  # of a piece, at most
_FEW = 1024  # elements of a saved tensor that stays, for the reader of the graph
_UNSEEN = (
    "this loss draws random numbers that cannot be drawn again for a part of a batch, as torch.randperm, or numpy's "
    "for one sample after the other. So the check could not see, in training mode, whether samples are coupled: "
    "whether the loss of a batch is that of its parts. If no sample looks at another{}, all is well; "
    "Options(check=False) says that you know. To have it checked, "
    "draw them before the step and give them with the batch, a row for each sample."
)


class SideBySide(Protocol):
    """Evaluates parts of one batch in lock-step."""

    def __call__(
        self, evaluate: Callable[[Any], "Part"], micro_batches: list[Any], sizes: list[int], *, resting: bool = False
    ) -> "list[Part]":
        """Evaluate each; `resting` BatchNorm uses its running statistics."""


class _Attempt(NamedTuple):
    """How a piece is compared with its parts."""

    samples: int  # in the piece, at most
    uneven: bool  # whether the last part is smaller: equal parts hide how they are weighed
    keeps: bool = False  # whether graphs are kept, as a loss with a gradient inside needs them
    watched: bool = True  # whether operations are watched: a few cannot be


class _Outcome(NamedTuple):
    """What a comparison shows: that all is well, an error, or nothing, where random numbers hide it."""

    error: BigBatchError | None = None
    agrees: bool = False
    silent: bool = False  # it agrees, because a term is zero


class FirstCheck:
    """Compares pieces of a batch with their parts, before updates 1, 2, 4, 16 and 128.

    It compares again where other modules are in training mode than before. Later updates matter: a gate that begins at
    zero hides at first what couples samples. A check that cannot run proves nothing, and raises nothing.
    """

    def __init__(self, models: Sequence[nn.Module], runner: Runner, mover: Mover, options: Options) -> None:
        """Begin with nothing compared."""
        self._models, self._runner, self._mover, self._options = models, runner, mover, options
        self._modules = list(dict.fromkeys(module for model in models for module in model.modules()))
        self._updates = 0
        self._due: tuple[int, ...] = _AGAIN
        self._modes, self._mode = set[bytes](), b""  # which modules were in training mode when pieces were compared
        self._warned = False
        self._side_by_side: SideBySide | None = None

    def __call__(self, division: Division, side_by_side: SideBySide | None = None) -> bool:
        """Refuse what cannot be cut or trimmed; returns whether pieces were compared (see `passed`)."""
        trimmed = division.longest is not None and min(division.longest) < division.width
        self._mode = bytes([trimmed, *(module.training for module in self._modules)])
        due = self._mode not in self._modes or self._updates >= min(self._due, default=math.inf)
        if not due or (len(division) == 1 and not trimmed):  # one micro-batch is the big batch
            return False
        # Statistics of a few samples amplify rounding, and are exact by themselves, except where they see padding.
        self._side_by_side = side_by_side and partial(side_by_side, resting=division.longest is None)
        if trimmed:
            self._refuse_counted_padding(division)
        if self._options.check and self._is_hidden(division) and not self._warned:
            self._warned = True
            warnings.warn(_UNSEEN.format(" or at padding" if trimmed else ""), stacklevel=outside())
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
            with untouched(self._models), evaluating(modules), quiet():
                found = self._first_that_runs(division)
            division.batch.refuse_changed()  # or the step would use other samples than were compared
            if found.agrees:
                return hidden
            if found.error is not None and not (accepts and modules is resting):  # accepted statistics, not torch's own
                raise self._dated(found.error)
            hidden = True
        return hidden

    def _dated(self, error: BigBatchError) -> BigBatchError:
        """Name the updates that were made before a coupling was seen."""
        if not self._updates:
            return error
        since = f" This did not show at first: the updates before this one, {self._updates} by now, may not be right."
        return type(error)(error.problem + since, fix=error.fix)

    def _first_that_runs(self, division: Division) -> _Outcome:
        """Compare what can be evaluated: a large piece, in uneven and in even parts; else smaller ones."""
        agreed = _Outcome(agrees=True)
        for number, attempt in enumerate(self._attempts(division)):
            try:
                found = self._compared(division, attempt)
                if found.silent:
                    with moved(self._models):
                        found = self._compared(division, attempt)
                    if found.error is not None:
                        found = found._replace(error=at_moved_weights(found.error))
                if number or not found.agrees:
                    return found
            except Exception as error:  # noqa: PERF203 - it proves nothing; what is the user's own comes in the step
                ours = self._side_by_side is not None and isinstance(error, BigBatchError)
                if isinstance(error, NeedsLockStep) or (ours and not isinstance(error, PathsDiffer)):
                    raise
                _forget(error)
            finally:
                torch.clear_autocast_cache()  # copies of weights that were made without a graph
        return agreed

    def _attempts(self, division: Division) -> Iterator[_Attempt]:
        """Yield pieces to try, the largest first; all but the first end the check where they can be evaluated."""
        groups = _groups(division)
        size, longest = len(groups[0]), max(division.longest) if division.longest is not None else None
        samples = 2 * size
        try:
            kept, held = (self._evaluated(division, groups[:1], longest, keeps=each)[0].peak for each in (True, False))
            # Half of the memory: what kernels take for themselves is not counted.
            samples = max(size * max(kept // 2, _LITTLE) // max(held, 1), 2)
        except NeedsLockStep:
            raise
        except BigBatchError:
            return  # a refusal of the micro-batch itself, which comes in the step
        except Exception as error:  # noqa: BLE001 - as above
            _forget(error)
        yield _Attempt(samples, uneven=True)
        yield _Attempt(samples, uneven=False)
        yield _Attempt(2 * size, uneven=False)
        yield _Attempt(max(size, 2), uneven=True, keeps=True)
        yield _Attempt(max(size, 2), uneven=False, keeps=True)
        yield _Attempt(2 * size, uneven=False, watched=False)

    def _compared(self, division: Division, attempt: _Attempt) -> _Outcome:
        """Compare the loss of a piece with that of its parts."""
        shares = _shares(_groups(division), attempt)
        every = [i for share in shares for i in share]
        keeps, widest, own = attempt.keeps, _widest(division), [_width(division, share) for share in shares]
        evaluate = partial(self._evaluated, division, watched=attempt.watched)
        state, tape = Snapshot(self._models), list[Tensor]()
        (whole,) = evaluate([every], widest, keeps=keeps, tape=tape, whole=True)
        drawn = state.randomness.drawn()

        def parts(wide: Any, *, goes_on: bool = False) -> list[Part]:
            alone = self._side_by_side is None  # in lock-step all graphs are there at once
            found = evaluate(shares, wide, keeps=keeps or alone, tape=tape, state=state, goes_on=goes_on)
            return [part for part in found if part.kinds] or found  # a loss of zero adds nothing

        found = self._in_lockstep(lambda: parts(own), lambda: [evaluate([each], own[0]) for each in shares])
        if len({part.kinds for part in found}) == 1 and whole.norms == found[0].norms:
            if is_sum_of(whole, found):
                return _Outcome(agrees=True, silent=tells_nothing(found))
            if drawn and self._side_by_side is None and is_sum_of(whole, parts(own, goes_on=True)):
                return _Outcome(agrees=True)
        if drawn and not all(part.certain for part in found):
            seed_differently()
            (other,) = evaluate([every], widest, keeps=keeps, whole=True)
            if not is_near(whole.value, other.value, (whole, other)):  # the numbers are used, not only drawn
                return _Outcome()
        if whole.norms > found[0].norms:
            return _Outcome(more_norms(whole, found, len(every)))
        if division.longest is not None and division.batch.collate is None and is_sum_of(whole, parts(widest)):
            return _Outcome(padded(whole, found))
        return _Outcome(coupled(whole, found, len(every), in_lockstep=self._side_by_side is not None))

    def _in_lockstep(self, together: Callable[[], list[Part]], alone: Callable[[], object]) -> list[Part]:
        """Evaluate parts; raise an error of its own where they fail in lock-step and run alone."""
        try:
            return together()
        except Exception as error:
            if self._side_by_side is None or isinstance(error, BigBatchError) or is_out_of_memory(error):
                raise
            alone()  # raises where lock-step is not the reason
            try:
                return together()
            except type(error):  # again: an error that comes once is the user's own
                raise shared_state(error) from error

    def _refuse_counted_padding(self, division: Division) -> None:
        """Compare what a loss is over with and without padding, whatever its value is."""
        groups = _groups(division)
        shares = [groups[0][:1], *([groups[1][-1:]] if len(groups) > 1 else ())]
        tape: list[Tensor] = []
        try:
            with untouched(self._models), quiet():
                state, evaluate = Snapshot(self._models), partial(self._evaluated, division, tape=tape)
                (whole,) = evaluate([[i for share in shares for i in share]], _widest(division))
                parts = evaluate(shares, [_width(division, share) for share in shares], state=state)
        except Exception as error:  # noqa: BLE001 - it proves nothing
            _forget(error)
            return
        division.batch.refuse_changed()
        if counts_more(whole, parts) and all(part.certain for part in parts):
            raise self._dated(padded(whole, parts))

    def _evaluated(
        self,
        division: Division,
        shares: Sequence[list[int]],
        wide: int | Sequence[int | None] | None,
        *,
        keeps: bool = False,
        watched: bool = True,
        tape: list[Tensor] | None = None,
        state: Snapshot | None = None,
        goes_on: bool = False,
        whole: bool = False,
    ) -> list[Part]:
        """Evaluate parts of one batch: each by itself, or in lock-step where their losses ask for each other.

        Args:
            division: what they are cut from.
            shares: the samples of each.
            wide: what they are trimmed to, all or each.
            keeps: whether graphs are kept, or only what their reader needs.
            watched: whether operations are watched.
            tape: random numbers, to be written, or to be read where there is a `state`.
            state: what each part begins with.
            goes_on: whether random numbers go on from part to part, instead.
            whole: whether it may be larger than a micro-batch: its value is compared, though its graph may be refused.
        """
        sizes = [len(share) for share in shares]
        widths = wide if isinstance(wide, Sequence) else [wide] * len(shares)
        if state is not None:
            state.restore()

        def evaluate(number: int) -> Part:
            rows = None if state is None else Rows(sum(sizes[:number]), sizes[number], sum(sizes))
            if state is not None and self._side_by_side is None:
                state.restore(randomness=not goes_on)
            micro_batch = self._mover.moved(division.part(shares[number], widths[number]))
            watch, values = Watch([] if tape is None else tape, rows), Values()
            before = Randomness(devices_of(self._models))
            hooks = nullcontext() if keeps else saved_tensors_hooks(_dropped, _kept)
            with hooks, torch.enable_grad(), watch if watched else nullcontext(), values:
                loss, _ = self._runner.loss(micro_batch)
            terms = list[Term]()
            with suppress(LossError) if whole else nullcontext():
                terms = self._runner.read(loss)
            worker = scope.worker()
            return Part(
                float(loss.detach()),
                tuple(term.kind for term in terms),
                tuple(float(term.count) for term in terms),
                values.of_terms(loss, terms),
                self._tolerance(loss, watch.lowest) * (_LOCKSTEP if worker is not None else 1),
                worker.visits.get("BatchNorm", 0) if worker is not None else 0,
                watch.certain and not (rows is not None and before.drawn()),
                watch.peak,
            )

        if self._side_by_side is None:
            return [evaluate(number) for number in range(len(shares))]
        return self._side_by_side(evaluate, list(range(len(shares))), sizes)

    def _tolerance(self, loss: Tensor, lowest: torch.dtype | None) -> float:
        """Return how far the least precise numbers of a forward may move its loss, relatively."""
        device = loss.device.type
        used = {loss.dtype, *(p.dtype for model in self._models for p in model.parameters() if p.is_floating_point())}
        used |= {lowest} if lowest is not None else set()
        used |= {torch.get_autocast_dtype(device)} if torch.is_autocast_enabled(device) else set()
        return max(_TOLERANCE.get(each, _LOW_PRECISION_TOLERANCE) for each in used)


def _dropped(tensor: Tensor) -> Tensor | None:
    """Let go of what a backward would need, and keep what a reader of the graph looks at."""
    kept = tensor.grad_fn is None or not tensor.is_floating_point() or tensor.numel() <= _FEW
    return tensor.detach() if kept else None


def _kept(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        msg = "this graph is for reading"
        raise RuntimeError(msg)
    return tensor


_kept.shows = True  # type: ignore[attr-defined]  # reading it does nothing


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


def _shares(groups: Sequence[list[int]], attempt: _Attempt) -> list[list[int]]:
    """Take the samples of a piece: parts of at most a micro-batch each."""
    if len(groups) == 1:  # trimmed, and not cut
        return [groups[0][: attempt.samples]]
    left, found = attempt.samples, list[list[int]]()
    for group in groups[:_PARTS]:
        room = left if found else left - max(left // (3 if attempt.uneven else 2), 1)
        if room < 1 or (len(found) > 1 and not attempt.uneven and room < len(group)):
            break
        found.append(group[:room])
        left -= len(found[-1])
    if attempt.uneven and len({len(share) for share in found}) == 1:
        found[-1] = found[-1][: max(math.ceil(len(found[-1]) / 3), 1)]
    return found
