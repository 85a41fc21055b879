"""The first check: is the loss of a piece of the batch the weighted loss of its parts?

What couples samples inside a model, or was computed of the batch without gradient, shows in no graph. Then the loss of
a piece is not that of its parts, and no split is exact. A piece is made of several micro-batches, as many as take no
more memory than training one does; its parts are micro-batches as they are. Both use the same random numbers.
"""

import math
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, saved_tensors_hooks
from torch.nn.modules.batchnorm import _NormBase as Statistics
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from bigbatch.batch.split import Division
from bigbatch.batch.transfer import Mover
from bigbatch.caller import outside
from bigbatch.errors import BatchError, BigBatchError, CoupledLoss, LossError, PathsDiffer
from bigbatch.execute.micro_step import Runner
from bigbatch.loss import refusals
from bigbatch.loss.count import Kind
from bigbatch.loss.terms import Term
from bigbatch.memory.meter import LiveBytes
from bigbatch.options import Options
from bigbatch.state import scope
from bigbatch.state.oom import is_out_of_memory, let_go
from bigbatch.state.scope import NeedsLockStep
from bigbatch.state.snapshot import Randomness, Snapshot, devices_of, untouched

_AGAIN = (1, 3, 15, 127)  # updates after which pieces are compared again
# How far two roundings of one loss may lie apart; what couples samples moves it by far more.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_LOW_PRECISION_TOLERANCE = 3e-2
_LOCKSTEP = 10  # times the tolerance: statistics of a few samples amplify rounding
_FLOOR = 0.1  # a loss near zero may be the difference of larger numbers, whose rounding it has
_COUNT_TOLERANCE = 1e-6  # class weights are added up in float32
_LITTLE = 1 << 25  # bytes that a piece may hold in any case
_PARTS = 64  # of a piece, at most
_FEW = 1024  # elements of a saved tensor that stays, for the reader of the graph
# A bit of each weight, an eighth of it or less: flipped twice it is what it was, in no memory of its own.
_BITS = {
    torch.float64: (torch.int64, 1 << 49),
    torch.float32: (torch.int32, 1 << 20),
    torch.float16: (torch.int16, 1 << 7),
    torch.bfloat16: (torch.int16, 1 << 4),
}
_SMALL = 1 / 32  # the most that weights that are all zero are moved by
# Arguments of fused kernels that draw inside, and the values that keep them from it.
_CALM = {"dropout_p": 0.0, "dropout": 0.0, "train": False, "training": False}


class SideBySide(Protocol):
    """Evaluates parts of one batch in lock-step."""

    def __call__(
        self, evaluate: Callable[[Any], "Part"], micro_batches: list[Any], sizes: list[int], *, resting: bool = False
    ) -> "list[Part]":
        """Evaluate each; `resting` BatchNorm uses its running statistics."""


@dataclass(frozen=True)
class Part:
    """The loss of some samples, and what it was averaged over."""

    value: float
    kinds: tuple[Kind, ...]  # of its terms
    counts: tuple[float, ...]
    terms: tuple[float, ...]  # what each adds to the value; nothing where that cannot be told
    tolerance: float  # how far rounding may move it, relatively
    norms: int  # how often BatchNorm was called in lock-step
    certain: bool  # whether it used the same random numbers as the whole
    peak: int  # bytes of tensors that its forward held at once


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
            with untouched(self._models), _evaluating(modules), _quiet():
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
                    with _moved(self._models):
                        found = self._compared(division, attempt)
                    if found.error is not None:
                        found = found._replace(error=_at_moved_weights(found.error))
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
        (whole,) = evaluate([every], widest, keeps=keeps, tape=tape)
        drawn = state.randomness.drawn()

        def parts(wide: Any, *, goes_on: bool = False) -> list[Part]:
            alone = self._side_by_side is None  # in lock-step all graphs are there at once
            found = evaluate(shares, wide, keeps=keeps or alone, tape=tape, state=state, goes_on=goes_on)
            return [part for part in found if part.kinds] or found  # a loss of zero adds nothing

        found = self._in_lockstep(lambda: parts(own), lambda: [evaluate([each], own[0]) for each in shares])
        if len({part.kinds for part in found}) == 1 and whole.norms == found[0].norms:
            if _is_sum_of(whole, found):
                return _Outcome(agrees=True, silent=_tells_nothing(found))
            if drawn and self._side_by_side is None and _is_sum_of(whole, parts(own, goes_on=True)):
                return _Outcome(agrees=True)
        if drawn and not all(part.certain for part in found):
            _seed_differently()
            (other,) = evaluate([every], widest, keeps=keeps)
            if not _is_near(whole.value, other.value, (whole, other)):  # the numbers are used, not only drawn
                return _Outcome()
        if whole.norms > found[0].norms:
            return _Outcome(_more_norms(whole, found, len(every)))
        if division.longest is not None and division.batch.collate is None and _is_sum_of(whole, parts(widest)):
            return _Outcome(_padded(whole, found))
        return _Outcome(_coupled(whole, found, len(every), in_lockstep=self._side_by_side is not None))

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
            with untouched(self._models), _quiet():
                state, evaluate = Snapshot(self._models), partial(self._evaluated, division, tape=tape)
                (whole,) = evaluate([[i for share in shares for i in share]], _widest(division))
                parts = evaluate(shares, [_width(division, share) for share in shares], state=state)
        except Exception as error:  # noqa: BLE001 - it proves nothing
            _forget(error)
            return
        division.batch.refuse_changed()
        if _counts_more(whole, parts) and all(part.certain for part in parts):
            raise self._dated(_padded(whole, parts))

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
        """
        sizes = [len(share) for share in shares]
        widths = wide if isinstance(wide, Sequence) else [wide] * len(shares)
        if state is not None:
            state.restore()

        def evaluate(number: int) -> Part:
            rows = None if state is None else _Rows(sum(sizes[:number]), sizes[number], sum(sizes))
            if state is not None and self._side_by_side is None:
                state.restore(randomness=not goes_on)
            micro_batch = self._mover.moved(division.part(shares[number], widths[number]))
            watch, values = _Watch([] if tape is None else tape, rows), _Values()
            before = Randomness(devices_of(self._models))
            hooks = nullcontext() if keeps else saved_tensors_hooks(_dropped, _kept)
            with hooks, torch.enable_grad(), watch if watched else nullcontext(), values:
                loss, _ = self._runner.loss(micro_batch)
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


# The arithmetic: what parts come to together.


def _combined(parts: Sequence[Part]) -> float | None:
    """Return the loss that the parts make together; None where their values do not tell."""
    parts = [part for part in parts if any(part.counts)] or parts  # a mean over nothing adds nothing
    kinds = {kind for kind in parts[0].kinds if kind != "once"}
    if len({part.kinds for part in parts}) > 1:
        return None
    if not kinds:
        return parts[0].value  # made of what all have in common: every part has all of it
    if all(part.terms for part in parts):
        columns = zip(*(zip(part.kinds, part.terms, part.counts, strict=True) for part in parts), strict=True)
        constant = parts[0].value - math.fsum(parts[0].terms)  # as of 1 - dice
        return constant + math.fsum(_added(*zip(*column, strict=True)) for column in columns)
    rows = [[n for n, kind in zip(part.counts, part.kinds, strict=True) if kind != "once"] for part in parts]
    ratios = [[number / row[0] if row[0] > 0 else math.nan for number in row] for row in rows]
    alike = all(math.isclose(a, b) for row in ratios for a, b in zip(row, ratios[0], strict=True))
    if len(kinds) != 1 or not alike or (kinds == {"sum"} and "once" in parts[0].kinds):
        return None
    return _added(tuple(kinds), [part.value for part in parts], [row[0] for row in rows])


def _added(kinds: Sequence[Kind], values: Sequence[float], counts: Sequence[float]) -> float:
    """Return what a term comes to in all parts."""
    if kinds[0] == "once":
        return values[0]
    if kinds[0] == "sum":
        return math.fsum(values)
    total = math.fsum(counts)
    return math.fsum(value * n for value, n in zip(values, counts, strict=True) if n) / total if total else 0.0


def _is_near(one: float, other: float, parts: Sequence[Part]) -> bool:
    """Whether two losses differ by rounding alone."""
    # Terms that cancel, as a critic's of real and of fake samples, leave the rounding of each.
    size = max(_FLOOR, abs(one), abs(other), *(max(abs(part.value), sum(map(abs, part.terms))) for part in parts))
    return abs(one - other) <= max(part.tolerance for part in parts) * size


def _is_sum_of(whole: Part, parts: Sequence[Part]) -> bool:
    """Whether the parts make the whole, or do not tell."""
    if not math.isfinite(whole.value):
        return True
    if any(math.isnan(part.value) and part.counts and all(n > 0 for n in part.counts) for part in parts):
        return False  # as of a standard deviation of one sample
    if all(part.kinds and set(part.kinds) == {"once"} for part in parts):
        return all(_is_near(whole.value, part.value, (whole, *parts)) for part in parts)
    together = _combined(parts)
    return together is None or not math.isfinite(together) or _is_near(whole.value, together, (whole, *parts))


def _tells_nothing(parts: Sequence[Part]) -> bool:
    """Whether a term is zero in every part, as that of PPO while the policy is the one that acted."""
    columns = zip(*(part.terms or (part.value,) for part in parts), strict=True)
    return any(all(abs(value) <= parts[0].tolerance * _FLOOR for value in column) for column in columns)


def _counts_more(whole: Part, parts: Sequence[Part]) -> bool:
    """Whether a loss is over more than those of its parts together.

    Less is no padding: counted(loss, 1) is the user's word for any number of samples.
    """
    if len({whole.kinds, *(part.kinds for part in parts)}) > 1:
        return False
    totals = [math.fsum(row) for row in zip(*(part.counts for part in parts), strict=True)]
    pairs = zip(whole.kinds, whole.counts, totals, strict=True)
    return any(kind == "mean" and number > total * (1 + _COUNT_TOLERANCE) for kind, number, total in pairs)


# What a forward shows: its memory, its precision, its terms, its random numbers.


class _Rows(NamedTuple):
    """Which samples of a piece a part has."""

    start: int
    size: int
    of: int


class _Watch(LiveBytes):
    """Watches a forward: its memory, the least precise numbers in it, and its random numbers, which it can repeat.

    A whole writes the numbers that it draws on a tape. Its part reads, at the same place, those of its own rows.
    """

    def __init__(self, tape: list[Tensor], rows: _Rows | None) -> None:
        """Write on the tape, or read it for some rows."""
        super().__init__()
        self.lowest: torch.dtype | None = None
        self.certain = True
        self._tape, self._rows, self._place = tape, rows, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; numbers that are less precise than those it was given are rounded."""
        is_random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        result = super().__torch_dispatch__(partial(self._drawn, func) if is_random else func, types, args, kwargs)
        given = [torch.finfo(each.dtype).eps for each in tree_leaves((args, kwargs)) if _is_real(each)]
        for each in tree_leaves(result) if given else ():
            if _is_real(each) and torch.finfo(each.dtype).eps > max(min(given), self._eps()):
                self.lowest = each.dtype
        return result

    def _eps(self) -> float:
        return 0.0 if self.lowest is None else torch.finfo(self.lowest).eps

    def _drawn(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Run an operation that draws random numbers."""
        names = [argument.name for argument in func._schema.arguments]  # noqa: SLF001 - no public name
        calm = {name: value for name, value in _CALM.items() if name in names}
        if calm:
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


class _Values(TorchFunctionMode):
    """Notes the numbers in a graph, so that each term of a loss is known by itself."""

    def __init__(self) -> None:
        """Know none yet."""
        super().__init__()
        self._of: dict[Node, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function and note its result, where that is one number."""
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.numel() == 1 and result.grad_fn is not None:
            self._of[result.grad_fn] = result.detach().clone()
        return result

    def of_terms(self, loss: Tensor, terms: Sequence[Term]) -> tuple[float, ...]:
        """Return what each term adds to a loss, which is linear in them; nothing where that cannot be told."""
        nodes = [term.node for term in terms if term.node is not None]
        values = [self._of.get(n) if term.value is None else term.value for term, n in zip(terms, nodes, strict=False)]
        known = [value for value in values if value is not None]
        if not terms or len(nodes) < len(terms) or len(known) < len(terms):
            return ()
        factors: Sequence[Tensor | None] = torch.autograd.grad(
            loss, [GradientEdge(n, 0) for n in nodes], retain_graph=True, allow_unused=True
        )
        # Of a term that is used twice, as in t + 0.5 * t, the first one stands for all.
        first = [node not in nodes[:place] for place, node in enumerate(nodes)]
        triples = zip(factors, known, first, strict=True)
        return tuple(float(f * value) if f is not None and is_first else 0.0 for f, value, is_first in triples)


def _generators(args: Any, kwargs: Any) -> list[torch.Generator]:
    """Return the default generators that an operation may draw from."""
    devices = {each.device for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
    devices |= {torch.device(kwargs["device"])} if kwargs.get("device") is not None else set()
    numbers = [device.index or 0 for device in devices if device.type == "cuda"]
    return [torch.default_generator, *(torch.cuda.default_generators[number] for number in numbers)]


def _seed_differently() -> None:
    seed = (torch.initial_seed() + 1) % 2**32
    torch.manual_seed(seed)
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


def _is_real(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


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


# The surroundings of a comparison.


@contextmanager
def _quiet() -> Iterator[None]:
    """Drop warnings of pieces, as of a variance of one sample; the step gives its own.

    What is compiled runs as it is written: under a mode dynamo would give it up for good.
    """
    eagerly: Any = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    with warnings.catch_warnings(), eagerly:
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _moved(models: Sequence[nn.Module]) -> Iterator[None]:
    """Move trained weights a little: what a loss of zero hides shows there.

    A flipped bit moves no zero: weights that are all zero, as of a head or an adapter that begins so, are filled.
    """
    weights = [p.data for p in dict.fromkeys(p for model in models for p in model.parameters() if p.requires_grad)]
    with ExitStack() as undoing:  # the latest first: weights may lie in each other
        undoing.callback(torch.clear_autocast_cache)
        for number, each in enumerate(weights):
            if type(each) is not Tensor or each.dtype not in _BITS or 0 in each.stride():  # one number for many
                continue
            dtype, bit = _BITS[each.dtype]
            bits = each.view(dtype)
            if bits.any():
                bits.bitwise_xor_(bit)
                undoing.callback(bits.bitwise_xor_, bit)
            else:
                undoing.callback(each.zero_)
                each.uniform_(-_SMALL, _SMALL, generator=torch.Generator(each.device).manual_seed(number))
        torch.clear_autocast_cache()
        yield


@contextmanager
def _evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put modules into eval mode."""
    before = [module.training for module in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, training in zip(modules, before, strict=True):
            module.training = training


# Which samples are compared.


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


# What is wrong, in words.

_UNSEEN = (
    "this loss draws random numbers that cannot be drawn again for a part of a batch, as torch.randperm, or numpy's "
    "for one sample after the other. So the check could not see, in training mode, whether samples are coupled: "
    "whether the loss of a batch is that of its parts. If no sample looks at another{}, all is well; "
    "Options(check=False) says that you know. To have it checked, "
    "draw them before the step and give them with the batch, a row for each sample."
)
_TURNS = (
    "Micro-batches take turns at BatchNorm and at `across`: what the model, a hook or the loss keeps outside of the "
    "call, as in self.features = x, is another micro-batch's after that. Return it, or pass it on as an argument."
)
_CAUSES = (
    "Common causes: attention, pooling or a statistic over the batch dimension, also without gradient (normalized "
    "advantages, class weights of the batch, a threshold); padding that the loss counts; a divisor that is no count, "
    "where the term is counted(term, 'sum'); a tensor that all samples share and that has as many rows as there are "
    "samples; an average, a queue or a counter that moves in every call, which belongs after step(batch)."
)
_CAUSES_IN_LOCKSTEP = (
    "Common causes: rows of own samples begin at across.offset(), and what is made of across.gather must be the same "
    "in each micro-batch. "
)


def shared_state(error: Exception) -> CoupledLoss:
    """Explain that a micro-batch fails beside others, though it runs alone."""
    said = str(error).strip().splitlines()
    return CoupledLoss(
        f"a micro-batch runs alone, and fails beside others with {type(error).__name__}: {said[0] if said else ''}\n"
        f"{_TURNS} Or only one side of a comparison was gathered: across.gather(features) goes with "
        "across.gather(labels)."
    )


def _coupled(whole: Part, parts: Sequence[Part], samples: int, *, in_lockstep: bool) -> LossError:
    numbers = [len(part.kinds) for part in parts]
    if len(set(numbers)) > 1:
        return CoupledLoss(
            f"the losses of {len(parts)} parts of {samples} samples have {', '.join(map(str, numbers))} terms: there "
            "are terms for single samples, or for what happens to be in a batch, and what they are averaged over does "
            "not show.",
            fix="one tensor of all samples' losses, reduced once; or counted(loss, n), counted(loss, 'sum')",
        )
    alike = all(_is_near(parts[0].value, part.value, parts) for part in parts)
    if not alike and all(set(part.kinds) == {"once"} for part in parts):
        return refusals.shared_alone([part.value for part in parts])
    together = _combined(parts)
    return CoupledLoss(
        f"the samples of this batch are coupled: {samples} of them have a loss of {whole.value:.6g}, and {len(parts)} "
        f"parts of them {math.nan if together is None else together:.6g} together, so no split into micro-batches "
        f"gives the big batch's gradient.\n{_CAUSES_IN_LOCKSTEP + _TURNS if in_lockstep else _CAUSES}",
        fix="print(bigbatch.verify(model, loss_fn, batch, micro_batch_size=...)) to find the cause; "
        "Options(check=False) where the loss only looks coupled, as with random numbers of its own",
    )


def _at_moved_weights(error: BigBatchError) -> BigBatchError:
    told = " These are losses with weights that were moved a little: as they are, they make a term zero."
    return type(error)(error.problem + told, fix=error.fix)


def _more_norms(whole: Part, parts: Sequence[Part], samples: int) -> CoupledLoss:
    return CoupledLoss(
        f"BatchNorm is called {whole.norms} times for {samples} samples, and {max(part.norms for part in parts)} times "
        "for a part of them: it normalizes by pieces of the batch (ghost or virtual batches, or one sample after the "
        "other), and which samples make a piece would change with the split.",
        fix='BigStep(..., micro_batch_size=128, options=Options(batch_norm="micro"))',
    )


def _padded(whole: Part, parts: Sequence[Part]) -> BatchError:
    together = _combined(parts)
    counts = [math.fsum(row) for row in zip(*(part.counts for part in parts), strict=False)]
    return BatchError(
        f"this loss counts padding: with it the loss is {whole.value:.6g}{_listed(whole.counts)}, without it "
        f"{math.nan if together is None else together:.6g}{_listed(counts)}, so packing would change it.",
        fix="a loss that ignores padding, as cross_entropy ignores labels of -100, and an attention mask for the "
        "model; or leave lengths= out",
    )


def _listed(counts: Sequence[float]) -> str:
    return " over " + " and ".join(f"{count:g}" for count in counts) if counts else ""
