"""The first-step check at work: which samples to look at, how to evaluate them, and when enough was seen."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import nn

from bigbatch.batches.division import Division
from bigbatch.batches.moving import Mover
from bigbatch.errors import BatchError, BigBatchError, CoupledLoss, LossError
from bigbatch.lockstep.needing import NeedsLockStep
from bigbatch.micro_steps.calming import evaluating, without_dropout, without_statistics
from bigbatch.micro_steps.coupling import (
    Part,
    refuse_counted_padding,
    refuse_coupled,
    refuse_more_together,
    refuse_padding,
    refused_together,
    shared_state,
)
from bigbatch.micro_steps.doubting import rounding
from bigbatch.micro_steps.restoring import Randomness, devices_of, untouched
from bigbatch.micro_steps.running import Runner
from bigbatch.micro_steps.survival import is_out_of_memory, let_go
from bigbatch.options import Options

_WHY_NOT = {
    "random": "this loss draws random numbers that evaluation mode does not turn off, so the first step could not see",
    "failed": "this loss draws random numbers, and in evaluation mode it fails ({}), so the first step could not see",
    "evaluated": (
        "this model could be looked at without random numbers in evaluation mode alone, so the first step did not see "
        "what it does only in training, as in `if self.training: x = x - x.mean(0)`, nor"
    ),
}
_CUT = " whether samples are coupled: whether a micro-batch's loss is that of its parts"
_PACKED = ", and that of a packed one the same without its padding"
_HELPS = {
    "random": (
        "To have it looked at, draw them before the step and give them with the batch, a row for each sample (then any "
        "split has the same ones), or draw only where `self.training` is set"
    ),
    "failed": "To have it looked at, let the model run in evaluation mode, or give random numbers with the batch",
    "evaluated": "To have it looked at, draw random numbers by dropout alone, or give them with the batch",
}
_SINGLES = 4  # samples that are looked at together where one at a time goes through the model
_MEETING = 10  # times the rounding: statistics of a few samples amplify it
_AGAIN = (3, 15, 127)  # updates after which samples are looked at once more
_LOOKS = 8  # at counts that may be random: chance hardly makes so many the same
Circumstances: TypeAlias = tuple[Callable[[Sequence[nn.Module]], AbstractContextManager[None]], ...]


class SideBySide(Protocol):
    """Evaluates parts of one batch that may ask for each other."""

    def __call__(
        self, evaluate: Callable[[Any], Part], micro_batches: list[Any], sizes: list[int], *, resting: bool = False
    ) -> list[Part]:
        """Evaluate each; `resting` BatchNorm uses what it has learned."""


class _Unseen(NamedTuple):
    """Why something could not be looked at as it is in training, if it could not."""

    why: str = ""
    cause: str = ""  # the error that it fails with, or why it had to be evaluation mode

    @property
    def at_all(self) -> bool:
        """Whether nothing was seen, in evaluation mode either."""
        return self.why in {"random", "failed"}


class _Comparison(NamedTuple):
    """What to evaluate, and how to refuse it: by all that it tells, or by its counts alone."""

    evaluate: Callable[[], list[Part]]
    refuse: Callable[[list[Part]], None]
    refuse_counts: Callable[[list[Part]], None] = lambda _: None
    controls: tuple[Callable[[], list[Part]], ...] = ()  # what to evaluate of samples that are there twice


class FirstCheck:
    """Looks, before a first update, whether a batch may be cut and trimmed at all.

    Not every batch has two samples, or padding: what one does not show is looked for in the next. Samples are looked at
    once more where other modules are in training mode than before, and now and then: a gate that begins at zero, or a
    teacher that begins as a copy, hides at first what couples them.
    """

    def __init__(self, models: Sequence[nn.Module], runner: Runner, mover: Mover, options: Options) -> None:
        """Have seen nothing yet."""
        self._models, self._runner, self._mover = models, runner, mover
        # Statistics of the micro-batch were accepted: they are no accusation.
        self._accepting = options.batch_norm == "micro"
        self._as_it_is: Circumstances = (without_statistics,) if self._accepting else ()
        self._compares = options.check
        # Padding is looked at in any case: nobody says check=False for it.
        self._left = set[str]() if options.lengths is None else {"padding"}
        self._packs = options.lengths is not None
        self._told: set[str] = set()
        self._unsaid: list[_Unseen] = []  # of batches that were not cut
        self._side_by_side: SideBySide | None = None
        self._modules = list(dict.fromkeys(module for model in models for module in model.modules()))
        self._updates = 0  # that were made
        self._to_come: tuple[int, ...] = _AGAIN
        self._again = False  # whether this is not the first look
        self._modes: set[bytes] = set()  # which of them were in training mode, when samples were looked at
        self._looked_in = b""  # which when they last were: a loss may change it

    def __call__(self, division: Division, side_by_side: SideBySide | None = None) -> set[str]:
        """Refuse what cannot be cut; returns what was looked at, to be `passed` when the update is made.

        `side_by_side` evaluates parts of one batch that may ask for each other.
        """
        self._side_by_side = side_by_side
        seen: set[str] = set()
        self._overdue(division)
        if "padding" in self._left and self._padding(division):
            seen.add("padding")
        # What was frozen at first may couple samples now.
        mode = bytes([module.training for module in self._modules]) if self._compares else b""
        again = mode in self._modes
        due = bool(self._to_come) and self._updates >= self._to_come[0]
        if self._compares and division.batch.size > 1 and (not again or due):
            if side_by_side is not None:  # statistics of a few samples amplify rounding, and are exact by themselves
                self._side_by_side = partial(side_by_side, resting=True)
            self._again = again
            with self._as_a_second_look() if again else nullcontext():
                self._samples(division)
            self._looked_in = mode
            seen.add("samples")
            if again:
                seen.add("again")
        return seen

    def passed(self, seen: set[str], *, stepped: bool = True) -> None:
        """An update was made, or at least not refused: look for these no more."""
        self._updates += stepped
        self._left -= seen
        if "again" in seen:
            self._to_come = tuple(each for each in self._to_come if each > self._updates)
        if "samples" in seen:
            self._modes.add(self._looked_in)

    @contextmanager
    def _as_a_second_look(self) -> Iterator[None]:
        """Tell of updates that were made before something was seen; what fails will fail in the step, and says more."""
        try:
            yield
        except CoupledLoss as error:
            msg = (
                f"{error}\nThis did not show at first: the weights, or what a batch holds, have come to matter since. "
                f"The updates before this one, {self._updates} by now, may not have been the big batch's."
            )
            raise CoupledLoss(msg) from error
        except Exception as error:  # noqa: BLE001 - it proves nothing
            let_go(error)

    def _overdue(self, division: Division) -> None:
        """Say what could not be seen, now that it matters."""
        if self._unsaid and len(division) > 1:
            self._tell(self._unsaid.pop(), division)

    def _samples(self, division: Division) -> None:
        """See that a micro-batch's loss is that of its parts."""
        number = max(range(len(division)), key=division.sizes.__getitem__)
        group, longest = division.indices(division.groups[number]), None
        if division.longest is not None:
            longest = division.longest[number]
        single = len(group) == 1
        if single:  # two at a time may be too many, but hardly without a graph
            group = [i for one in division.groups[:_SINGLES] for i in division.indices(one)]
            if division.longest is not None:
                longest = max(division.longest[:_SINGLES])

        def evaluate(shares: list[list[int]]) -> list[Part]:
            whole = [i for share in shares for i in share]
            return [
                *self._parts([division.part(share, longest) for share in shares], [len(share) for share in shares]),
                *self._parts([division.part(whole, longest)], [len(whole)], self._value if single else self._measured),
            ]

        def comparison(shares: list[list[int]]) -> _Comparison:
            return _Comparison(
                lambda: evaluate(shares),
                lambda parts: refuse_coupled(
                    parts[-1], parts[:-1], len(group), side_by_side=self._side_by_side is not None
                ),
                controls=(
                    lambda: evaluate([shares[0]] * len(shares)),
                    lambda: evaluate([shares[-1][: len(shares[0])]] * len(shares)),
                ),
            )

        if single:
            self._tell(self._compare(division, comparison([[i] for i in group]), self._as_it_is), division)
            return
        # Equal parts hide how they are weighed; but samples may come in pairs.
        third, half = ([group[:middle], group[middle:]] for middle in (max(len(group) // 3, 1), len(group) // 2))
        try:
            untold = self._compare(division, comparison(third), self._as_it_is)
        except Exception as error:
            if isinstance(error, BigBatchError) or is_out_of_memory(error):
                raise
            let_go(error)
            untold = self._compare(division, comparison(half), self._as_it_is)
        if untold.at_all and self._accepting:  # there no failure comes out
            untold = self._compare(division, comparison(half), self._as_it_is)
        self._tell(untold, division)

    def _padding(self, division: Division) -> bool:
        """See that a loss does not change when padding is cut off; False where there is none to cut."""
        if division.longest is None or min(division.longest) == division.width:
            return False
        # Two of the longest may be too many, where no micro-batch has as many tokens.
        most = max(number * wide for number, wide in zip(division.sizes, division.longest, strict=True))
        roomy = most >= 2 * max(division.longest)
        comparison = self._trimmed if division.batch.collate is None else self._collated
        found = comparison(division, division.longest, roomy=roomy)
        untold = self._compare(division, found, self._as_it_is) if self._compares else _Unseen()
        if not self._compares or untold.at_all:
            self._count(division, found.evaluate, found.refuse_counts)
        self._tell(untold, division)
        return True

    def _trimmed(self, division: Division, longest: Sequence[int], *, roomy: bool) -> _Comparison:
        """Compare the shortest samples with and without padding."""
        shortest, number = min(zip(longest, range(len(longest)), strict=True))
        group = division.indices(division.groups[number])[-2 if roomy else -1 :]
        widest = max(longest) if max(longest) > shortest else division.width
        return _Comparison(
            lambda: [self._part(division.part(group, wide), len(group)) for wide in (widest, shortest)],
            lambda parts: refuse_padding(*parts),
            lambda parts: refuse_counted_padding(*parts),
        )

    def _collated(self, division: Division, longest: Sequence[int], *, roomy: bool) -> _Comparison:
        """Compare the shortest sample alone and beside the longest: collate pads as far as its samples need."""
        first, last = (division.groups[longest.index(each)] for each in (max(longest), min(longest)))
        pair = [division.indices(first)[0], division.indices(last)[-1]]
        together = self._measured if roomy else self._measured_or_value

        def refuse(parts: list[Part]) -> None:
            refuse_coupled(parts[2], parts[:2], 2)
            refuse_more_together(parts[2], parts[:2])

        return _Comparison(
            lambda: [
                *self._parts([division.part([i], None) for i in pair], [1, 1]),
                *self._parts([division.part(pair, None)], [2], together),
            ],
            refuse,
            lambda parts: refuse_more_together(parts[2], parts[:2]),
        )

    def _parts(
        self, micro_batches: list[Any], sizes: list[int], measure: Callable[[Any], Part] | None = None
    ) -> list[Part]:
        """Evaluate parts of one batch: each by itself, or side by side where their losses ask for each other."""
        measure = measure or self._measured
        if self._side_by_side is None:
            return [measure(each) for each in micro_batches]
        try:
            found = self._side_by_side(measure, micro_batches, sizes)
        except Exception as error:
            other = isinstance(error, BigBatchError) and not isinstance(error, CoupledLoss)
            if other or is_out_of_memory(error) or len(sizes) == 1 or self._again:
                raise
            for each, size in zip(micro_batches, sizes, strict=True):
                self._side_by_side(measure, [each], [size])  # raises where it is not for the others
            raise shared_state(error) from error
        return [part._replace(tolerance=_MEETING * part.tolerance) for part in found]

    def _part(self, micro_batch: Any, size: int) -> Part:
        return self._parts([micro_batch], [size])[0]

    def _measured(self, micro_batch: Any) -> Part:
        loss, _ = self._runner.loss(self._mover.moved(micro_batch))
        return Part.of(loss, self._runner.read(loss))

    def _value(self, micro_batch: Any) -> Part:
        for graph in (torch.no_grad, torch.enable_grad):  # a loss may want its graph, as for a hook
            try:
                with graph():
                    loss, _ = self._runner.loss(self._mover.moved(micro_batch))
                    return Part.of(loss, ())
            except Exception as error:  # noqa: PERF203 - two rounds at most
                if isinstance(error, BigBatchError):
                    raise
                if is_out_of_memory(error):  # two at a time are more than was asked for
                    let_go(error)
                    break
                if graph is torch.enable_grad and not self._again:
                    raise refused_together(error) from error
                if graph is torch.enable_grad:
                    raise
        return Part.unknown()

    def _measured_or_value(self, micro_batch: Any) -> Part:
        try:
            return self._measured(micro_batch)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            let_go(error)
        return self._value(micro_batch)

    def _compare(self, division: Division, comparison: _Comparison, as_it_is: Circumstances) -> _Unseen:
        """Evaluate losses without random numbers: as things are, without dropout, or in evaluation mode.

        Returns what there is to say of that: nothing, where it could be done in training mode.
        """
        unseen = _Unseen()
        for circumstances in (as_it_is, (*as_it_is, without_dropout), (evaluating,)):
            with self._under(circumstances):
                randomness = Randomness(devices_of(self._models))
                try:
                    parts = comparison.evaluate()
                except Exception as error:
                    # As things are it is the user's error; otherwise a model may do something else.
                    told = isinstance(error, NeedsLockStep) or (isinstance(error, LossError) and not self._accepting)
                    if not circumstances or told or is_out_of_memory(error):
                        raise
                    unseen = _Unseen("failed", type(error).__name__)
                    continue
                if randomness.drawn():
                    unseen = _Unseen("random")
                    continue
            division.batch.refuse_changed()  # by collating: what is compared would not be the same samples
            accusation = _accusation(comparison, parts)
            if accusation is not None:
                with self._under(circumstances):
                    tolerance = rounding(parts, comparison.evaluate, comparison.controls)
                looser = [part._replace(tolerance=max(part.tolerance, tolerance)) for part in parts]
                accusation = _accusation(comparison, looser)
            if accusation is not None:
                # Statistics of the micro-batch that no layer of torch's takes are accepted, too.
                if not self._accepting or evaluating in circumstances:
                    raise accusation
                continue
            return _Unseen("evaluated", unseen.why) if evaluating in circumstances else _Unseen()
        return unseen

    @contextmanager
    def _under(self, circumstances: Circumstances) -> Iterator[None]:
        """Look at models in some circumstances, and leave them as they were."""
        with untouched(self._models), ExitStack() as stack:
            for each in circumstances:
                stack.enter_context(each(self._models))
            yield

    def _count(
        self, division: Division, evaluate: Callable[[], list[Part]], refuse: Callable[[list[Part]], None]
    ) -> None:
        """Refuse by counts alone, which are hardly ever random; where they are, nothing can be said."""
        with self._under(self._as_it_is):
            randomness = Randomness(devices_of(self._models))
            parts = evaluate()
            division.batch.refuse_changed()
            try:
                refuse(parts)
            except BatchError:
                found = [part.counts for part in parts]
                looks = range(_LOOKS if randomness.drawn() else 0)
                if any([part.counts for part in evaluate()] != found for _ in looks):
                    return
                raise

    def _tell(self, unseen: _Unseen, division: Division) -> None:
        """Say it once, at the line that called for a step; of a batch in one piece, when the first one is cut."""
        if not unseen.why:
            return
        if len(division) == 1 and not self._packs:
            self._unsaid = [unseen]
            return
        helps = f" {_HELPS[unseen.why]}." if unseen.why != "evaluated" or unseen.cause == "random" else ""
        what = (
            f"{_WHY_NOT[unseen.why].format(unseen.cause)}{_CUT}{_PACKED if self._packs else ''}. If no sample looks at "
            f"another{' or at padding' if self._packs else ''}, all is well; Options(check=False) says that you know."
            f"{helps}"
        )
        if what not in self._told:
            self._told.add(what)
            warnings.warn(what, stacklevel=7)


def _accusation(comparison: _Comparison, parts: list[Part]) -> Exception | None:
    """Return what there is to refuse."""
    try:
        comparison.refuse(parts)
    except (CoupledLoss, BatchError) as error:
        return error
    return None
