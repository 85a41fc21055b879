"""A task for each micro-batch, in lock-step: one runs at a time, in a fixed order, until all are at the same barrier.

Each has a thread of its own, so that it can stop anywhere, in the midst of a model's forward or of a backward, and go
on when the others have come as far. A baton goes around, so no two ever run at once and nothing depends on chance. When
it has gone around, either all wait at the same barrier, or all are done, or an error says where each of them is.

Threads stay for the next window: a library's handles for matrix products and convolutions belong to a thread, and
making them takes longer than many a window.
"""

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from bigbatch.errors import ConfigurationError, PathsDiffer
from bigbatch.lockstep.round import Round
from bigbatch.lockstep.thread_state import Carried, wait_when_woken
from bigbatch.state import scope

_PATIENCE = 5.0  # seconds between two looks at whether a thread has died
Result = TypeVar("Result")
Value = TypeVar("Value")


class Abandoned(BaseException):
    """Ends a task whose window has failed elsewhere. No `except Exception` of the task's own code holds it up."""


class Worker:
    """One task on its way, as its own thread sees it."""

    meetings = 0  # how many this task has had
    norms = 0  # how often it has called BatchNorm

    def __init__(self, turns: "_Turns", number: int) -> None:
        self._turns, self.number, self.size = turns, number, len(turns.at)

    @property
    def round(self) -> Round:
        """What the workers of one window share; nothing once it is over."""
        return self._turns.round

    def meet(
        self,
        name: str,
        value: Value,
        combine: Callable[[list[Value]], Result],
        fold: Callable[[Value, Value], Value] | None = None,
    ) -> Result:
        """Wait until all have come here; returns what `combine`, called once, makes of their values, in their order.

        With `fold` each value is put into those before as it comes, so that only one is kept.
        """
        self.meetings += 1
        turns, is_last = self._turns, self.number + 1 == self.size
        self.round.free_workspaces()
        if turns.failure is not None:
            raise Abandoned
        try:
            turns.at[self.number] = name
            turns.are_alike = turns.are_alike and name == turns.at[0]
            if fold is not None and self.number and turns.are_alike:
                value = fold(turns.values.pop(), value)
            turns.values.append(value)
            del value  # where it is folded into others, nobody keeps it
            if is_last:
                turns.conclude(combine)
        except BaseException as error:
            turns.failure = error  # now, lest the task's own code catch it and go on
            raise
        turns.wait(self.number)
        if turns.failure is not None:
            raise Abandoned
        found: Result = turns.combined
        if is_last:
            turns.combined = None  # the last one has taken it
        return found


def current() -> Worker | None:
    """Return the task that this thread runs, where it runs one."""
    found: Worker | None = scope.worker()
    return found


class Crew:
    """Threads that run a task in lock-step, one for each micro-batch."""

    def __init__(self) -> None:
        self._seats: list[_Seat] = []
        weakref.finalize(self, _dismiss, self._seats)

    def run(self, task: Callable[[Worker], Result], carried: Carried, round_: Round) -> list[Result]:
        """Run a task for each micro-batch; returns their results. The first error ends all, and comes out."""
        number = len(round_.sizes)
        if not all(seat.is_alive() for seat in self._seats):
            _dismiss(self._seats)  # in a process that was forked, none is left
        for place in range(len(self._seats), number):
            self._seats.append(_Seat(place))  # first: an interrupt leaves no thread that nobody ends
            try:
                self._seats[-1].start()
            except RuntimeError as error:
                self._seats.pop()
                raise ConfigurationError(
                    f"micro-batches in lock-step have a thread each, and the system started {place:,} of {number:,}: "
                    f"{error}.",
                    fix="fewer, larger micro-batches:  BigStep(..., micro_batch_size=...); or ulimit -u",
                ) from error
        if number == 1:
            carried = replace(carried, processor=None)  # nobody takes turns with it
        return _Turns(task, self._seats[:number], carried, round_).run()


def _dismiss(seats: "list[_Seat]") -> None:
    for seat in seats:
        seat.is_dismissed = True
        seat.wake()
    seats.clear()


class _Seat(threading.Thread):
    """A thread that waits for work. It knows no crew, so that a crew that nobody holds can go."""

    def __init__(self, number: int) -> None:
        super().__init__(name=f"bigbatch-{number}", daemon=True)
        self._number = number
        self.go = threading.Lock()  # released by whoever passes the baton
        self.go.acquire()
        self.turns: _Turns | None = None  # that it has not yet taken part in
        self.is_dismissed = False

    def wake(self) -> None:
        with suppress(RuntimeError):  # it has been woken, and has not looked yet
            self.go.release()

    def run(self) -> None:
        with suppress(Exception):  # it saves time, and no more: without it the thread works as well
            wait_when_woken()
        while not self.is_dismissed:
            self.go.acquire()
            turns = self.turns
            if turns is None or turns.turn != self._number:
                continue  # woken for nothing
            self.turns = None
            try:
                turns.work(self._number)
            except BaseException as error:  # noqa: BLE001 - it comes out of `run`, and nobody waits for this one
                turns.failure = turns.failure or error
                turns.end(self._number)
            del turns  # it holds a window's tensors


class _Turns:
    """The tasks of one window, from the first baton to the last."""

    def __init__(self, task: Callable[[Worker], Any], seats: list[_Seat], carried: Carried, round_: Round) -> None:
        self._task, self._seats, self._carried = task, seats, carried
        self.round = round_
        self.at: list[str | None] = [None] * len(seats)  # the barrier that each waits at
        self.are_alike = True  # whether all that have come are at the same barrier
        self.values: list[Any] = []  # that they have come with
        self.combined: Any = None  # what was made of them
        self.failure: BaseException | None = None
        self.turn = -1  # whose it is to run
        self._done = [False] * len(seats)
        self._results: list[Any] = [None] * len(seats)
        self._is_over = False
        self._finished = threading.Lock()
        self._finished.acquire()

    def run(self) -> list[Any]:
        """Wait for the last task. An interrupt, as by Ctrl-C, ends each at its next barrier, and then comes out."""
        while not self._is_over:
            try:
                if self.turn < 0:
                    for seat in self._seats:
                        seat.turns = self
                    self.turn = 0
                self._seats[self.turn].wake()  # also where an interrupt came between a turn and its waking
                if not self._finished.acquire(timeout=_PATIENCE) and not self._seats[self.turn].is_alive():
                    self.failure = self.failure or RuntimeError("a thread of this window ended before its task")
                    self.end(self.turn)  # nobody else would
            except BaseException as interrupt:  # noqa: BLE001, PERF203 - raised below, when no task runs any more
                self.failure = self.failure or interrupt
        failure, results = self.failure, self._results
        # A graph that outlives its window has a worker, and must hold nothing of the window.
        del self._task, self._carried, self._results
        self.values, self.combined, self.failure, self.round = [], None, None, Round(())
        if failure is not None:
            try:
                raise failure
            finally:
                del failure, results  # a frame that holds its own error is never freed
        return results

    def work(self, number: int) -> None:
        """Run the task, on its thread."""
        try:
            worker = Worker(self, number)
            scope.become(worker)
            if self.failure is None:
                self._results[number] = self._carried.call(self._task, worker)
        except Abandoned:
            pass
        finally:
            scope.become(None)
        self.end(number)

    def conclude(self, combine: Callable[[list[Any]], Any]) -> None:
        """All have come to where they are: make of their values what they came for."""
        if len(set(self.at)) > 1:
            raise self._paths_differ()
        values, self.values, self.are_alike, self.at = self.values, [], True, [None] * len(self._seats)
        self.combined = combine(values)

    def wait(self, number: int) -> None:
        """Have the others run until it is this one's turn again."""
        if len(self._seats) > 1:
            self._hand_to((number + 1) % len(self._seats))
            while self.turn != number:
                self._seats[number].go.acquire()

    def end(self, number: int) -> None:
        """A task is over: the baton goes to the next, and from the last one to whoever still waits."""
        self._done[number] = True
        if self.failure is None and number + 1 < len(self._seats):
            self._hand_to(number + 1)
        elif all(self._done):
            self._is_over = True
            self._finished.release()
        else:
            self.failure = self.failure or self._paths_differ()
            self._hand_to(self._done.index(False))

    def _hand_to(self, number: int) -> None:
        self.turn = number
        self._seats[number].wake()

    def _paths_differ(self) -> PathsDiffer:
        places: dict[str, list[str]] = {}
        for number, at in enumerate(self.at):
            places.setdefault(at or "its end", []).append(str(number))
        listed = "\n".join(
            f"    micro-batch{'es' * (len(numbers) > 1)} {', '.join(numbers)} {'are' if numbers[1:] else 'is'} at {at}"
            for at, numbers in places.items()
        )
        return PathsDiffer(
            f"the micro-batches of this window took different paths, and cannot meet:\n{listed}\n"
            "All must run the same operations across micro-batches in the same order, also in backward. Look for an "
            "`if` on the data or on a random number, a layer that some skip, or tensors of different shapes."
        )
