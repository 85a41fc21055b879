"""A user's training loop that meets one fault and goes on as errors and documentation say."""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from bigbatch.errors import BigBatchError, LossError, OutOfMemory, SeveralCounts, WindowBroken
from bigbatch.update import Update
from tests.faults import snapshots
from tests.faults.injecting import OUT_OF_MEMORY, Fault, chain
from tests.faults.programs import Batch, Draws, Program, Stream

Result = TypeVar("Result")
POLICIES = ("discard", "retry", "flush")
_STEPPED = re.compile(
    r"(?i)(has|have) (been )?stepped|may have changed|step (has|had) beg[au]n|step began|from a checkpoint"
    r"|could not be (put back|restored)"
)
_PATIENCE = 10  # tries


class Trouble(Exception):
    """A promise that was not kept."""

    def __init__(self, kind: str, words: str) -> None:
        super().__init__(kind, words)
        self.kind, self.words = kind, words


def told(error: BaseException) -> bool:
    """Whether an error, or what it was raised from, says that a step was made, or may have been."""
    texts = ["\n".join([str(each), *getattr(each, "__notes__", ())]) for each in chain(error, "__cause__")]
    return any(map(_STEPPED.search, texts))


def look_at(error: BaseException, fault: Fault) -> None:
    """See that an error is the fault's own, or says what came of it."""
    accused = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:160]}"
    if fault.is_own(error) or (isinstance(error, OutOfMemory) and fault.error_name in OUT_OF_MEMORY):
        return
    if fault.printed and "a thread of this window ended" in str(error):
        return
    if not fault.is_behind(error):
        raise Trouble("unclear", f"an error of something else: {accused}") from error
    if isinstance(error, LossError) or not isinstance(error, BigBatchError | RuntimeError):
        raise Trouble("unclear", f"accuses the loss, or came out as another: {accused}") from error


class Run:
    """One run of a program, with what its updates said.

    `ends` are positions at which a window is to end early: those of a run that is to be compared with.
    """

    def __init__(self, program: Program, fault: Fault, policy: str, ends: Sequence[int] = ()) -> None:
        self.program, self.fault, self.policy, self._ends = program, fault, policy, list(ends)
        self.said: list[dict[str, float]] = []  # of each update
        self.kept: list[BaseException] = []  # as a notebook keeps the last one
        self.position = self.start = self.given = 0  # of micro-batches: added, in earlier windows, given out
        self.cuts: list[int] = []  # where a window ended early
        self._saved: dict[str, Any] = {}  # the checkpoint at the start of the window
        self._before: dict[str, Any] = {}
        kinds: dict[str, Any] = {"stream": Stream, "iterator": Draws}
        self._loader: Any = kinds.get(program.loop, lambda *_: None)(program.batches, fault)

    def train(self) -> None:
        """Train to the end."""
        if hasattr(self.program.entrance, "over"):
            self._accumulate()
        else:
            for batch in self.program.batches:
                self._step(batch)

    # BigStep.

    def _step(self, batch: Any) -> None:
        step = self.program.entrance
        with self.fault.paused():
            saved = self.program.checkpoint()
            before = snapshots.numbers(self.program) | snapshots.randomness()
        for _ in range(_PATIENCE):
            try:
                if self.program.loop == "saved":
                    step.load_state_dict(step.state_dict())
                self._hear(step(batch))
            except BaseException as error:  # noqa: BLE001, PERF203 - looked at
                self.kept.append(error)
                with self.fault.paused():
                    look_at(error, self.fault)
                    if told(error):
                        self.program.restore(saved)
                        self._see_no_gradient()
                    else:
                        self._see_same(snapshots.numbers(self.program) | snapshots.randomness(), before, error)
            else:
                return
        raise Trouble("lost", "the batch is refused again and again")

    # Accumulator.

    def _accumulate(self) -> None:
        self._close(None)
        for _ in range(_PATIENCE + len(self._ends)):
            try:
                self._loop()
            except Trouble:
                raise
            except BaseException as error:  # noqa: BLE001 - looked at
                self.kept.append(error)
                self._recover(error)
            if self.position == len(self.program.batches):
                return
        raise Trouble("lost", f"the loop ended after batch {self.position} of {len(self.program.batches)}")

    def _source(self) -> Any:
        """Return the batches that are still to come, or those up to the next end."""
        program, batches = self.program, self.program.batches
        if self._ends:
            return program.entrance.over(batches[self.position : self._ends[0]])
        if program.loop in {"plain", "saved"}:
            return batches[self.position :]
        if isinstance(self._loader, Stream):
            self._loader.load_state_dict({"given": self.position})
        return program.entrance.over(program.source(self.position) if self._loader is None else self._loader)

    def _loop(self) -> None:
        source = self._source()
        for batch in source:
            if batch is not self.program.batches[self.position]:
                raise Trouble("lost", f"another batch than {self.position} was given out")
            self.given = max(self.given, self.position + 1)
            self._one(batch)
            if isinstance(self._loader, Stream) and not self._ends:
                state = self._insist(lambda: source.state_dict())  # noqa: PLW0108 - to look it up may fail
                if state != {"given": self.position}:
                    raise Trouble("lost", f"a loop at batch {self.position} would be resumed at {state}")
        if self._ends:
            self.cuts.append(self._ends.pop(0))
        update = None
        if self.program.loop in {"plain", "saved"}:
            update = self.program.entrance.flush()
        if self.start != self.position:  # or `over` made the update of the last window; it has nobody to tell
            self._close(update)

    def _one(self, batch: Batch) -> None:
        """One micro-batch; one that fails is tried again, where that is the policy."""
        try:
            self._add(batch)
        except BaseException as error:
            if self.policy != "retry" or told(error):
                raise
            self.kept.append(error)
            self._look(error)
            self._add(batch)
        if self.program.loop == "saved":
            state = self._insist(self.program.entrance.state_dict)
            self._insist(lambda: self.program.entrance.load_state_dict(state))

    def _add(self, batch: Batch) -> None:
        program = self.program
        count = () if program.count is None else (program.count(batch),)
        update = program.entrance.backward(program.loss(program.model, batch), *count)
        self.position += 1
        if update is not None:
            self._close(update)

    def _close(self, update: Update | None) -> None:
        """A window has been closed."""
        if update is not None:
            if update.micro_batches != self.position - self.start:
                counted = f"{update.micro_batches} micro-batches, {self.position - self.start} were added"
                raise Trouble("wrong", f"an update of {counted}")
            self._hear(update)
        with self.fault.paused():
            self.start, self._saved = self.position, self.program.checkpoint()
            self._before = snapshots.numbers(self.program, buffers=False, gradients=False)

    def _recover(self, error: BaseException) -> None:
        """Go on after an error that has ended the loop."""
        lost = self._look(error)
        if self.policy == "flush" and not lost:
            try:
                update = self._insist(self.program.entrance.flush)
            except WindowBroken as broken:
                lost = self._look(broken) or True
            except SeveralCounts as short:  # counted in advance, it cannot end early, and says so
                if self.program.loop != "sized":
                    raise Trouble("unclear", f"flush() says {short}") from short
                lost = True
            else:
                if (update is None) != (self.start == self.position):
                    raise Trouble("lost", "flush() has lost the window")
                if update is not None:
                    self._close(update)
                    self.cuts.append(self.position)
        if lost or self.policy != "flush":
            self._insist(self.program.entrance.discard)
            self._see_no_gradient()
            self.position = self.start
        # An iterator does not give its batches out once more: they are windows alone.
        self._ends = [self.given] if self.given > self.position else []

    def _look(self, error: BaseException) -> bool:
        """See that the error is clear; where it tells of a step, go back to the checkpoint, and return True."""
        look_at(error, self.fault)
        with self.fault.paused():
            if told(error):
                self.program.restore(self._saved)
                return True
            self._see_same(snapshots.numbers(self.program, buffers=False, gradients=False), self._before, error)
        return False

    def _insist(self, call: Callable[[], Result]) -> Result:
        """Call it again where it meets the fault once more."""
        try:
            return call()
        except BaseException as error:
            if not self.fault.is_own(error):
                raise
            self.kept.append(error)
            return call()

    # Both.

    def _hear(self, update: Update) -> None:
        with self.fault.paused(), suppress(LossError):
            self.said.append({"skipped": float(update.skipped)})
            if update.grad_norm is not None:
                self.said[-1]["grad_norm"] = float(update.grad_norm)
            if getattr(update, "loss_is_exact", True):
                self.said[-1]["loss"] = float(update.loss)

    @staticmethod
    def _see_same(now: dict[str, Any], before: dict[str, Any], error: BaseException) -> None:
        if changed := snapshots.differing(now, before):
            raise Trouble("wrong", f"after {type(error).__name__}, without a word: {', '.join(changed[:4])}")

    def _see_no_gradient(self) -> None:
        if any(p.grad is not None for model in self.program.models for p in model.parameters()):
            raise Trouble("leaked", "gradients are left")
