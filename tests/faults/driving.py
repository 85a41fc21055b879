"""A user's training loop that meets one fault and goes on as errors and documentation say."""

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeVar

from bigbatch import Accumulator
from bigbatch.errors import BigBatchError, LossError, OutOfMemory, SeveralCounts, WindowBroken
from bigbatch.update import Update
from tests.faults import snapshots
from tests.faults.injecting import OUT_OF_MEMORY, Fault
from tests.faults.programs import Batch, Draws, Program, Sized, Stream, loader_of

Result = TypeVar("Result")
POLICIES = ("discard", "retry", "flush")
_STEPPED = re.compile(
    r"(?i)(has|have) (been )?stepped|may have changed|step (has|had) beg[au]n|step began|from a checkpoint"
    r"|could not be (put back|restored)"
)
_PATIENCE = 4  # tries


class Trouble(Exception):
    """A promise that was not kept."""

    def __init__(self, kind: str, words: str) -> None:
        super().__init__(kind, words)
        self.kind, self.words = kind, words


class _Redo(Exception):
    """Leave the loop and begin the window again."""


def told(error: BaseException | None) -> bool:
    """Whether an error says that a step was made, or may have been."""
    found, seen = [error], set[int]()
    while found:
        each = found.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        if _STEPPED.search("\n".join([str(each), *getattr(each, "__notes__", ())])):
            return True
        found += [each.__cause__]
    return False


def look_at(error: BaseException, fault: Fault) -> None:
    """See that an error is the fault's own, or says what came of it."""
    if isinstance(error, OutOfMemory) and fault.error_name in OUT_OF_MEMORY:
        return
    if not fault.is_behind(error):
        if isinstance(error, BigBatchError):
            raise Trouble("unclear", f"{type(error).__name__} of something else: {_line(error)}") from error
        raise Trouble("unclear", f"an error of the inside: {type(error).__name__}: {_line(error)}") from error
    if fault.is_own(error):
        return
    if isinstance(error, LossError):
        raise Trouble("unclear", f"accuses the loss: {type(error).__name__}: {_line(error)}") from error
    if not isinstance(error, BigBatchError | RuntimeError):
        raise Trouble("unclear", f"came out as {type(error).__name__}: {_line(error)}") from error


def _line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:160]


class Run:
    """One run of a program, with what its updates said."""

    def __init__(self, program: Program, fault: Fault, policy: str) -> None:
        self.program, self.fault, self.policy = program, fault, policy
        self.updates: list[Update] = []
        self.kept: list[BaseException] = []  # as a notebook keeps the last one
        self.position = self.start = self.given = 0  # of micro-batches: added, in earlier windows, given out
        self.cuts: list[int] = []  # where a window was closed early, on purpose
        self.saved: dict[str, Any] = {}  # the checkpoint at the start of the window
        self.before: dict[str, Any] = {}
        self._loader: Stream | Draws | None = None
        self._states: dict[int, Any] = {}  # of the loader, by position
        # What an undisturbed run leaves, for others to be compared with.
        self.final: dict[str, Any] = {}
        self.surroundings: dict[str, Any] = {}
        self.said: list[dict[str, float]] = []

    @property
    def accumulator(self) -> Accumulator:
        """The one of an accumulating program."""
        assert self.program.accumulator is not None
        return self.program.accumulator

    def train(self) -> None:
        """Train to the end."""
        if self.program.step is not None:
            self._step_all()
        else:
            self._accumulate_all()

    def forget(self) -> None:
        """Let go of the program, and its threads; what it came to is kept."""
        del self.program
        self.updates.clear()

    def train_in_parts(self, cuts: tuple[int, ...]) -> None:
        """Train an undisturbed accumulator in windows that end at `cuts`, too."""
        for start, end in pairwise([0, *cuts, len(self.program.batches)]):
            for batch in self.accumulator.over(self.program.batches[start:end]):
                self._add(batch)

    # BigStep.

    def _step_all(self) -> None:
        step = self.program.step
        assert step is not None
        for batch in self.program.batches:
            with self.fault.paused():
                saved = self.program.checkpoint()
                before = snapshots.numbers(self.program) | snapshots.randomness()
            for _ in range(_PATIENCE):
                try:
                    if self.program.loop == "saved":
                        step.load_state_dict(step.state_dict())
                    update = step(batch)
                except BaseException as error:  # noqa: BLE001, PERF203 - looked at
                    self.kept.append(error)
                    with self.fault.paused():
                        self._restore_step(error, saved, before)
                else:
                    self.updates.append(update)
                    break
            else:
                raise Trouble("lost", "the batch is refused again and again")

    def _restore_step(self, error: BaseException, saved: dict[str, Any], before: dict[str, Any]) -> None:
        look_at(error, self.fault)
        if told(error):
            self.program.restore(saved)
            for p in (p for model in self.program.models for p in model.parameters()):
                if p.grad is not None:
                    raise Trouble("leaked", "a gradient is left after a step that failed")
            return
        changed = snapshots.differing(snapshots.numbers(self.program) | snapshots.randomness(), before)
        if changed:
            kind = "leaked" if all(c.startswith(("random", "gradient", "buffer")) for c in changed) else "wrong"
            raise Trouble(kind, f"after {type(error).__name__}, without a word: {', '.join(changed[:4])}")

    # Accumulator.

    def _accumulate_all(self) -> None:
        if self.program.loop == "stream":
            self._loader = Stream(self.program.batches, self.fault)
            self._states = {0: self._loader.state_dict()}
        elif self.program.loop == "iterator":
            self._loader = Draws(self.program.batches, self.fault)
        self._close(None)
        for _ in range(_PATIENCE):
            try:
                self._loop()
            except Trouble:  # noqa: PERF203 - a loop of tries
                raise
            except _Redo:
                self._begin_again()
            except BaseException as error:  # noqa: BLE001 - looked at
                self.kept.append(error)
                self._recover(error)
            else:
                break
        else:
            raise Trouble("lost", "the window is refused again and again")
        if self.position != len(self.program.batches):
            raise Trouble("lost", f"the loop ended after batch {self.position} of {len(self.program.batches)}")

    def _source(self) -> Any:
        """Return the batches that are still to come."""
        loop, left = self.program.loop, self.program.batches[self.position :]
        if loop in {"plain", "saved"}:
            return left
        if loop == "stream":
            assert isinstance(self._loader, Stream)
            self._loader.load_state_dict(self._states[self.position])
            return self.accumulator.over(self._loader)
        if loop == "DataLoader":
            return self.accumulator.over(loader_of(left, self.fault))
        return self.accumulator.over(Sized(left, self.fault) if self._loader is None else self._loader)

    def _loop(self) -> None:
        source = self._source()
        for batch in source:
            if batch is not self.program.batches[self.position]:
                index = next(i for i, b in enumerate(self.program.batches) if b is batch)
                raise Trouble("lost", f"batch {index} came after batch {self.position - 1}")
            self.given = self.position + 1
            self._one(batch)
            if self.program.loop == "stream":
                self._states[self.position] = self._insist(lambda: source.state_dict())  # noqa: PLW0108 - to look it up may fail
        if self.program.loop in {"plain", "saved"}:
            update = self.accumulator.flush()
            if update is not None:
                self._close(update)
        elif self.start != self.position:
            # `over` made the update of the last window; it has nobody to tell.
            self._close(None)

    def _one(self, batch: Batch) -> None:
        """One micro-batch; one that fails is tried again, where that is the policy."""
        try:
            self._add(batch)
        except BaseException as error:
            if self.policy != "retry":
                raise
            self.kept.append(error)
            self._look(error)
            try:
                self._add(batch)
            except WindowBroken as broken:
                if told(broken):
                    self._restore()
                self._discard()
                raise _Redo from None
        if self.program.loop == "saved":
            self._save()

    def _add(self, batch: Batch) -> None:
        count = () if self.program.count is None else (self.program.count(batch),)
        update = self.accumulator.backward(self.program.loss(batch), *count)
        self.position += 1
        if update is not None:
            self._close(update)

    def _save(self) -> None:
        """Save the window and go on with what was saved."""
        state = self._until_done(self.accumulator.state_dict)
        self._until_done(lambda: self.accumulator.load_state_dict(state))

    def _until_done(self, call: Callable[[], Result]) -> Result:
        """Call it again as long as it fails, and see that it changes nothing."""
        while True:
            try:
                return call()
            except BaseException as error:  # noqa: BLE001, PERF203 - looked at
                self.kept.append(error)
                self._look(error)

    def _close(self, update: Update | None) -> None:
        """A window has been closed."""
        if update is not None:
            if update.micro_batches != self.position - self.start:
                counted = f"{update.micro_batches} micro-batches, {self.position - self.start} were added"
                raise Trouble("wrong", f"an update of {counted}")
            self.updates.append(update)
        with self.fault.paused():
            self.start, self.saved = self.position, self.program.checkpoint()
            self.before = snapshots.numbers(self.program, buffers=False, gradients=False)

    def _look(self, error: BaseException) -> None:
        """See that the error is clear; go back to the checkpoint where it tells of a step."""
        look_at(error, self.fault)
        if told(error):
            self._restore()
            self._discard()
            raise _Redo from None
        self._see_unchanged(error)

    def _restore(self) -> None:
        """Load the checkpoint of the window's start."""
        with self.fault.paused():
            self.program.restore(self.saved)

    def _see_unchanged(self, error: BaseException) -> None:
        with self.fault.paused():
            now = snapshots.numbers(self.program, buffers=False, gradients=False)
            changed = snapshots.differing(now, self.before)
        if changed:
            raise Trouble("wrong", f"after {type(error).__name__}, without a word: {', '.join(changed[:4])}")

    def _insist(self, call: Callable[[], Result]) -> Result:
        """Call it again where it meets the fault once more."""
        try:
            return call()
        except BaseException as error:
            if not self.fault.is_own(error):
                raise
            self.kept.append(error)
            return call()

    def _discard(self) -> None:
        self._insist(self.accumulator.discard)
        if any(p.grad is not None for model in self.program.models for p in model.parameters()):
            raise Trouble("leaked", "gradients are left after discard()")

    def _recover(self, error: BaseException) -> None:
        """Leave the loop with an error, and go on."""
        try:
            self._look(error)
            if self.policy != "flush":
                self._discard()
                raise _Redo  # noqa: TRY301 - one way out
            try:
                update = self._insist(self.accumulator.flush)
            except WindowBroken as broken:
                if told(broken):
                    self._restore()
                self._discard()
                raise _Redo from None
            except SeveralCounts as short:  # counted in advance, it cannot end early, and says so
                if not self.program.counted_ahead:
                    raise Trouble("unclear", f"flush() says {_line(short)}") from short
                self._discard()
                raise _Redo from None
            if update is None and self.start != self.position:
                raise Trouble("lost", "the window is gone")
            if update is not None:
                self._cut(update)
            if self.program.loop == "iterator" and self.given > self.position:
                self._alone(self.given)
        except _Redo:
            self._begin_again()

    def _begin_again(self) -> None:
        """Begin the window again; an iterator does not give its batches out once more, so they are a window alone."""
        end, self.position = max(self.given, self.position), self.start
        if self.program.loop == "iterator":
            self._alone(end)

    def _alone(self, end: int) -> None:
        try:
            for batch in self.program.batches[self.position : end]:
                self._add(batch)
            update = self.accumulator.flush()
        except BaseException as error:
            if not self.fault.is_own(error):
                raise
            self.kept.append(error)
            if told(error):
                self._restore()
            self._discard()
            self.position = self.start
            self._alone(end)
        else:
            if update is not None:
                self._cut(update)

    def _cut(self, update: Update) -> None:
        self._close(update)
        self.cuts.append(self.position)
