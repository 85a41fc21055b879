"""The first check: is the loss of a piece of the batch the weighted loss of its parts?

What couples samples inside a model, or was computed of the batch without gradient, shows in no graph: attention across
the batch, a statistic of it, a tensor that was cut and should not have been. Then the loss of a piece is not that of
its parts, and no split is exact. A piece is made of several micro-batches, as many as take no more memory than training
one does; its parts are micro-batches as they are. Both draw the same random numbers.
"""

import math
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, saved_tensors_hooks
from torch.nn.modules.batchnorm import _NormBase as Statistics
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from bigbatch.batch.split import Division
from bigbatch.batch.transfer import Mover
from bigbatch.caller import outside
from bigbatch.errors import BatchError, BigBatchError, LossError, PathsDiffer
from bigbatch.execute.micro_step import Runner
from bigbatch.first_step_coupling import (
    Part,
    counts_more,
    coupled,
    is_near,
    is_sum_of,
    more_norms,
    padded,
    shared_state,
    tells_nothing,
    tolerance_of,
)
from bigbatch.loss.terms import Term
from bigbatch.memory.meter import LiveBytes
from bigbatch.options import Options
from bigbatch.state import scope
from bigbatch.state.oom import is_out_of_memory, let_go
from bigbatch.state.scope import NeedsLockStep
from bigbatch.state.snapshot import Buffers, Randomness, devices_of, untouched

_AGAIN = (1, 3, 15, 127)  # updates after which pieces are compared once more
_MEETING = 10  # times the rounding: statistics of a few samples amplify it
_LITTLE = 1 << 25  # bytes that a piece may hold in any case
_PARTS = 64  # of a piece, at most
_OWN = -1  # a width: that which a micro-batch is trimmed to
_FEW = 1024  # elements of a tensor that is kept for whoever reads a graph
_UNSEEN = (
    "this loss draws random numbers that cannot be drawn again for a part of a batch, as torch.randperm, or numpy's "
    "for one sample after the other. So the check could not see, in training mode, whether samples are coupled: "
    "whether the loss of a batch is that of its parts. If no sample looks at another{}, all is well; "
    "Options(check=False) says that you know. To have it checked, "
    "draw them before the step and give them with the batch, a row for each sample."
)
# Numbers that are only moved are not rounded; a batch may well be in less than the model that it is cast for.
_MOVES = frozenset(
    "_to_copy clone copy_ detach alias lift_fresh index index_select gather embedding cat stack where flip roll "
    "empty empty_like empty_strided new_empty new_empty_strided zeros zeros_like new_zeros ones ones_like new_ones "
    "full full_like new_full fill_ zero_ scalar_tensor arange".split()
)
# A bit of each weight, an eighth of it or less: turned over twice it is what it was, in no memory of its own.
_BITS = {
    torch.float64: (torch.int64, 1 << 49),
    torch.float32: (torch.int32, 1 << 20),
    torch.float16: (torch.int16, 1 << 7),
    torch.bfloat16: (torch.int16, 1 << 4),
}
_SMALL = 1 / 32  # what weights that are all zero are moved by, at most
# Arguments of fused kernels that draw inside, and what keeps them from it.
_CALM = {"dropout_p": 0.0, "dropout": 0.0, "train": False, "training": False}


class SideBySide(Protocol):
    """Evaluates parts of one batch that may ask for each other."""

    def __call__(
        self, evaluate: Callable[[Any], Part], micro_batches: list[Any], sizes: list[int], *, resting: bool = False
    ) -> list[Part]:
        """Evaluate each; `resting` BatchNorm uses what it has learned."""


_Graph = Literal["keep", "read", "none"]


class _Rows(NamedTuple):
    """Which samples of a piece a part has."""

    start: int
    size: int
    of: int


class _Attempt(NamedTuple):
    """A piece to compare with its parts."""

    samples: int  # in the piece, at most
    uneven: bool  # whether the last part is smaller: equal parts hide how they are weighed
    large: bool  # whether it is more than is trained on at once, so that no graph is kept
    confirms: bool = False  # whether it is compared, too, where one before it has agreed
    watched: bool = True  # whether operations are watched: a few cannot be


class FirstCheck:
    """Compares pieces of a batch with their parts, before updates 1, 2, 4, 16 and 128.

    Not every batch is cut: the first that is, is looked at. Once more where other modules are in training mode than
    before, and now and then: a gate that begins at zero, or a teacher that begins as a copy, hides at first what
    couples samples. A check that cannot run proves nothing, and raises nothing.
    """

    def __init__(self, models: Sequence[nn.Module], runner: Runner, mover: Mover, options: Options) -> None:
        """Have seen nothing yet."""
        self._models, self._runner, self._mover, self._options = models, runner, mover, options
        self._modules = list(dict.fromkeys(module for model in models for module in model.modules()))
        self._updates = 0  # that were made
        self._to_come: tuple[int, ...] = _AGAIN
        self._modes: set[bytes] = set()  # which modules were in training mode, when pieces were compared
        self._mode = b""  # which are now
        self._told = False
        self._side_by_side: SideBySide | None = None

    def __call__(self, division: Division, side_by_side: SideBySide | None = None) -> bool:
        """Refuse what cannot be cut or trimmed; returns whether this was looked at, to be told when it has `passed`.

        `side_by_side` evaluates parts of one batch that may ask for each other.
        """
        trimmed = division.longest is not None and min(division.longest) < division.width
        if len(division) == 1 and not trimmed:
            return False  # it is the big batch
        # Statistics of a few samples amplify rounding, and are exact by themselves, but where padding is in them.
        self._side_by_side = side_by_side and partial(side_by_side, resting=division.longest is None)
        self._mode = bytes([trimmed, *(module.training for module in self._modules)])
        again = self._mode in self._modes
        if again and not (self._to_come and self._updates >= self._to_come[0]):
            return False
        if trimmed:
            self._count(division)
        unseen = self._options.check and self._compare(division)
        if unseen and not self._told:
            self._told = True
            beside = " or at padding" if division.longest is not None else ""
            warnings.warn(_UNSEEN.format(beside), stacklevel=outside())
        return True

    def passed(self, *, looked: bool, stepped: bool = True) -> None:
        """An update was made, or at least not refused."""
        self._updates += stepped
        if looked:
            self._modes.add(self._mode)
            self._to_come = tuple(each for each in self._to_come if each >= self._updates)

    def _compare(self, division: Division) -> bool:
        """Compare a piece with its parts; returns whether random numbers have hidden something.

        Where they cannot be drawn again in training mode, evaluation mode shows the rest.
        """
        unseen, accepts = False, self._options.batch_norm == "micro"
        resting = [module for module in self._modules if accepts and isinstance(module, Statistics)]
        for modules in (resting, self._modules):
            with untouched(self._models), _evaluating(modules), _quiet():
                found = self._first_that_runs(division)
            division.batch.refuse_changed()  # what was compared would not be the same samples
            if found is None or found.agrees:
                break
            # Accepted statistics of the micro-batch may be those of a layer that is not torch's.
            if found.accusation is not None and not (accepts and modules is resting):
                raise self._in_time(found.accusation)
            unseen = True
        return unseen

    def _in_time(self, error: LossError | BatchError) -> LossError | BatchError:
        """Tell of updates that were made before something was seen."""
        if not self._updates:
            return error
        return type(error)(
            f"{error}\nThis did not show at first: the weights, or what a batch holds, have come to matter since. "
            f"The updates before this one, {self._updates} by now, may not have been the big batch's."
        )

    def _first_that_runs(self, division: Division) -> "_Outcome | None":
        """Compare what can be evaluated: parts of different sizes, and micro-batches as they are; else smaller ones."""
        agreed: _Outcome | None = None
        for attempt in self._attempts(division):
            if agreed is not None and not attempt.confirms:
                break
            try:
                found = self._tried(division, attempt)
                if found.silent:
                    with _moved(self._models):
                        found = self._tried(division, attempt).at_moved_weights()
                if not found.agrees:
                    return found
                agreed = found
            except Exception as error:  # it proves nothing; what is the user's own comes in the step
                told = self._side_by_side and isinstance(error, BigBatchError)
                if isinstance(error, NeedsLockStep) or (told and not isinstance(error, PathsDiffer)):
                    raise
                _forget(error)
            finally:
                torch.clear_autocast_cache()  # copies of weights that were made without a graph
        return agreed

    def _attempts(self, division: Division) -> Iterator[_Attempt]:
        groups = _groups(division)
        size, longest = len(groups[0]), max(division.longest) if division.longest is not None else None
        try:
            kept, held = (
                self._evaluated(division, [groups[0]], longest, graph=each)[0].peak for each in ("keep", "none")
            )
        except NeedsLockStep:
            raise
        except BigBatchError:
            return  # a refusal of the micro-batch itself, which comes in the step
        except Exception as error:  # noqa: BLE001 - as below
            _forget(error)
        else:
            # Half of it: what kernels take for themselves is not counted.
            samples = max(size * max(kept // 2, _LITTLE) // max(held, 1), 2)
            yield _Attempt(samples, uneven=True, large=True)
            yield _Attempt(samples, uneven=False, large=True, confirms=True)
        yield _Attempt(2 * size, uneven=False, large=True)
        yield _Attempt(max(size, 2), uneven=True, large=False)
        yield _Attempt(max(size, 2), uneven=False, large=False)
        yield _Attempt(2 * size, uneven=False, large=True, watched=False)

    def _tried(self, division: Division, attempt: _Attempt) -> "_Outcome":
        shares = _shares(_groups(division), attempt)
        every = [i for share in shares for i in share]
        widest = _widest(division)
        evaluate = partial(self._evaluated, division, watched=attempt.watched)
        of_parts: _Graph = "read" if attempt.large and self._side_by_side is not None else "keep"
        state, tape = _State(self._models), list[Tensor]()
        (whole,) = evaluate([every], widest, graph="none" if attempt.large else "keep", tape=tape)
        drawn = state.randomness.drawn()

        def parts(wide: int | None, *, goes_on: bool = False) -> list[Part]:
            found = evaluate(shares, wide, graph=of_parts, tape=tape, state=state, goes_on=goes_on)
            return [part for part in found if part.kinds] or found  # a loss of zero adds nothing

        found = self._met(partial(parts, _OWN), lambda: [evaluate([each], _OWN, graph="read") for each in shares])
        if len({len(part.kinds) for part in found}) == 1 and whole.norms == found[0].norms:
            if is_sum_of(whole, found):
                return _Outcome(agrees=True, silent=tells_nothing(found))
            if drawn and self._side_by_side is None and is_sum_of(whole, parts(_OWN, goes_on=True)):
                return _Outcome(agrees=True)
        certain = not drawn or all(part.certain for part in found)
        if not certain and self._changes_with_seed(whole, every, widest, evaluate):
            return _Outcome()
        if whole.norms > found[0].norms:
            return _Outcome(more_norms(whole, found, len(every)))
        if division.longest is not None and division.batch.collate is None and is_sum_of(whole, parts(widest)):
            return _Outcome(padded(whole, found))
        return _Outcome(coupled(whole, found, len(every), side_by_side=self._side_by_side is not None))

    def _met(self, together: Callable[[], list[Part]], alone: Callable[[], object]) -> list[Part]:
        """Evaluate parts; say so where they fail beside each other alone."""
        try:
            return together()
        except Exception as error:
            if self._side_by_side is None or isinstance(error, BigBatchError) or is_out_of_memory(error):
                raise
            alone()  # raises where it is not for the others
            try:
                return together()
            except type(error):  # again: one that comes once is the user's own
                raise shared_state(error) from error

    def _changes_with_seed(
        self, whole: Part, every: list[int], widest: int | None, evaluate: Callable[..., list[Part]]
    ) -> bool:
        """Tell random numbers that are used from those that are only drawn."""
        seed = (torch.initial_seed() + 1) % 2**32
        torch.manual_seed(seed)
        random.seed(seed)
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed)
        (other,) = evaluate([every], widest, graph="keep" if whole.kinds else "none")
        return not is_near(whole.value, other.value, (whole, other))

    def _count(self, division: Division) -> None:
        """See that padding is not counted, whatever the value is: more than one sample after the other counts."""
        groups, widest = _groups(division), _widest(division)
        shares = [groups[0][:1], groups[1][-1:]] if len(groups) > 1 else [groups[0][:1]]
        tape: list[Tensor] = []
        try:
            with untouched(self._models), _quiet():
                state = _State(self._models)
                every = [i for share in shares for i in share]
                (whole,) = self._evaluated(division, [every], widest, graph="read", tape=tape)
                parts = self._evaluated(division, shares, _OWN, graph="read", tape=tape, state=state)
        except Exception as error:  # noqa: BLE001 - it proves nothing
            _forget(error)
            return
        division.batch.refuse_changed()
        if counts_more(whole, parts) and all(part.certain for part in parts):
            raise self._in_time(padded(whole, parts))

    def _evaluated(
        self,
        division: Division,
        shares: Sequence[list[int]],
        wide: int | None,
        *,
        graph: _Graph,
        watched: bool = True,
        tape: list[Tensor] | None = None,
        state: "_State | None" = None,
        goes_on: bool = False,
    ) -> list[Part]:
        """Evaluate parts of one batch: each by itself, or side by side where their losses ask for each other.

        Args:
            division: what they are cut from.
            shares: the samples of each.
            wide: what they are trimmed to; `_OWN`: each as in training.
            graph: "keep" it, let go of all but what is to "read", or build "none".
            watched: whether operations are watched.
            tape: random numbers, to be written, or to be read where there is a `state` to begin each part with.
            state: what each begins with.
            goes_on: whether random numbers go on from part to part, instead.
        """
        sizes = [len(share) for share in shares]
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        rows = [_Rows(start, size, sum(sizes)) if state else None for start, size in zip(starts, sizes, strict=True)]
        if state is not None:
            state.restore()

        def evaluate(given: tuple[list[int], _Rows | None]) -> Part:
            share, own = given
            if state is not None and self._side_by_side is None:
                state.restore(randomness=not goes_on)
            micro_batch = self._mover.moved(division.part(share, _width(division, share) if wide == _OWN else wide))
            watch = _Watch([] if tape is None else tape, own)
            before = Randomness(devices_of(self._models))
            hooks = saved_tensors_hooks(_dropped, _kept) if graph == "read" else nullcontext()
            values = _Values()
            with hooks, torch.set_grad_enabled(graph != "none"), watch if watched else nullcontext(), values:
                loss, _ = self._runner.loss(micro_batch)
            terms = self._runner.read(loss) if graph != "none" else []
            device = loss.device.type
            lowest = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else watch.lowest
            lowered = max(tolerance_of(lowest), tolerance_of(watch.lowest), tolerance_of(loss.dtype))
            worker = scope.worker()
            return Part(
                float(loss.detach()),
                tuple(term.kind for term in terms),
                tuple(float(term.count) for term in terms),
                lowered * (_MEETING if worker is not None else 1),
                worker.visits.get("BatchNorm", 0) if worker is not None else 0,
                watch.certain and not (own is not None and before.drawn()),
                watch.peak,
                values.of_terms(loss, terms),
            )

        given = list(zip(shares, rows, strict=True))
        if self._side_by_side is None:
            return [evaluate(each) for each in given]
        return self._side_by_side(evaluate, given, sizes)


class _State:
    """What a forward finds: buffers, which the power iteration of a spectral norm moves, and random numbers."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        """Take it down as it is."""
        self.randomness, self._buffers = Randomness(devices_of(models)), Buffers(models)

    def restore(self, *, randomness: bool = True) -> None:
        """Go back to it."""
        self._buffers.restore()
        if randomness:
            self.randomness.restore()


class _Outcome(NamedTuple):
    """What a comparison has shown: that all is well, what is not, or nothing."""

    accusation: LossError | BatchError | None = None
    agrees: bool = False
    silent: bool = False  # it agrees, since there is a term of zero

    def at_moved_weights(self) -> "_Outcome":
        """Say that the losses told are not those of the weights as they are."""
        told = self.accusation
        hidden = "\nThese are losses with weights that were moved a little: as they are, they make a term zero."
        return self if told is None else self._replace(accusation=type(told)(f"{told}{hidden}"))


class _Watch(LiveBytes):
    """Watches a forward: its memory, the least precise numbers in it, and the random ones, which it can repeat.

    A whole writes the numbers that it draws on a tape. Its part draws, at the same place, those of its own rows.
    """

    def __init__(self, tape: list[Tensor], rows: _Rows | None) -> None:
        """Write on the tape, or read it for some rows."""
        super().__init__()
        self.lowest: torch.dtype | None = None
        self.certain = True
        self._tape, self._rows, self._place = tape, rows, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do it, and look at what came out."""
        is_random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        run = partial(self._drawn, func) if is_random else func
        result = super().__torch_dispatch__(run, types, args, kwargs)
        given = {each.dtype for each in tree_leaves((args, kwargs)) if _is_real(each)}
        moves = getattr(func, "is_view", False) or getattr(func, "overloadpacket", func).__name__ in _MOVES
        for dtype in {each.dtype for each in tree_leaves(result) if _is_real(each)}:
            rounds = not moves or any(_is_lower(dtype, each) for each in given)
            if rounds and (self.lowest is None or _is_lower(dtype, self.lowest)):
                self.lowest = dtype
        return result

    def _drawn(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Run an operation that draws random numbers."""
        names = [argument.name for argument in func._schema.arguments]  # noqa: SLF001 - no public name
        calm = {name: value for name, value in _CALM.items() if name in names}
        if calm:
            given = {**dict(zip(names, args, strict=False)), **kwargs, **calm}
            return func(**given)
        if self._rows is None:
            result = func(*args, **kwargs)
            self._tape.extend(each.clone() for each in tree_leaves(result) if isinstance(each, Tensor))
            return result
        source = kwargs.get("generator")
        generators = [source] if source is not None else _generators(args, kwargs)
        states = [each.get_state() for each in generators]
        result = func(*args, **kwargs)
        for each, state in zip(generators, states, strict=True):
            each.set_state(state)
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                self._repeat(each, is_order="randperm" in func.name())
        return result

    def _repeat(self, drawn: Tensor, *, is_order: bool) -> None:
        """Put the numbers of the whole's rows in the place of what a part has drawn."""
        place, self._place = self._place, self._place + 1
        rows = None if is_order or place >= len(self._tape) else self._own_rows(self._tape[place], drawn)
        if rows is None:
            self.certain = False
        else:
            drawn.copy_(rows)

    def _own_rows(self, whole: Tensor, part: Tensor) -> Tensor | None:
        assert self._rows is not None  # noqa: S101 - of a part
        if whole.dim() != part.dim():
            return None
        start, size, of = self._rows
        for dim, (many, few) in enumerate(zip(whole.shape, part.shape, strict=True)):
            if many == few:
                continue
            times = few // size
            if many * size == few * of:
                whole = whole.narrow(dim, start * times, few)
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
        """Do it, and note what came out."""
        del types
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.numel() == 1 and result.grad_fn is not None:
            self._of[result.grad_fn] = result.detach().clone()
        return result

    def of_terms(self, loss: Tensor, terms: Sequence[Term]) -> tuple[float, ...]:
        """Return what each term adds to a loss, which is linear in them; nothing where that cannot be told."""
        nodes = [term.node for term in terms if term.node is not None]
        found = [
            term.value if term.value is not None else self._of.get(n) for term, n in zip(terms, nodes, strict=False)
        ]
        if not terms or len(nodes) < len(terms) or any(each is None for each in found):
            return ()
        factors = torch.autograd.grad(loss, [GradientEdge(n, 0) for n in nodes], retain_graph=True, allow_unused=True)
        pairs: Iterable[tuple[Tensor | None, Tensor | None]] = zip(factors, found, strict=True)
        return tuple(float(f * v) if f is not None and v is not None else 0.0 for f, v in pairs)


def _generators(args: Any, kwargs: Any) -> list[torch.Generator]:
    """Return the default generators that an operation may draw from."""
    devices = {each.device for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
    devices |= {torch.device(kwargs["device"])} if kwargs.get("device") is not None else set()
    numbers = [device.index or 0 for device in devices if device.type == "cuda"]
    return [torch.default_generator, *(torch.cuda.default_generators[number] for number in numbers)]


def _is_real(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _is_lower(one: torch.dtype, other: torch.dtype) -> bool:
    return torch.finfo(one).eps > torch.finfo(other).eps


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


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep warnings of pieces to ourselves, as of a variance of one sample; the step gives its own.

    What is compiled runs as it is written: under a mode dynamo would give it up for good.
    """
    eagerly: Any = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    with warnings.catch_warnings(), eagerly:
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _moved(models: Sequence[nn.Module]) -> Iterator[None]:
    """Be with trained weights that are a little off: what a loss of zero hides shows there.

    A bit moves no zero: weights that are all zero, as of a head or an adapter that begins so, are filled.
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
    """Be in evaluation mode: what training alone does is hidden."""
    before = [module.training for module in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, training in zip(modules, before, strict=True):
            module.training = training


def _groups(division: Division) -> list[list[int]]:
    """Return the samples of each micro-batch; where they are trimmed, of the widest, the narrowest, and so on."""
    found = [division.indices(group) for group in division.groups]
    if division.longest is None:
        return found
    wide = dict(zip(map(id, found), division.longest, strict=True))
    found.sort(key=lambda group: -wide[id(group)])
    return [group for pair in zip(found, found[::-1], strict=True) for group in pair][: len(found)]


def _widest(division: Division) -> int | None:
    """Return what a piece is trimmed to, which some of its parts are not."""
    if division.longest is None:
        return None
    return max(division.longest) if max(division.longest) > min(division.longest) else division.width


def _width(division: Division, share: list[int]) -> int | None:
    """Return what a group is trimmed to that some samples are of."""
    if division.longest is None:
        return None
    return next(
        wide
        for group, wide in zip(division.groups, division.longest, strict=True)
        if share[0] in division.indices(group)
    )


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
