"""Several tasks in lock-step: one runs at a time, in a fixed order, until all have come to the same barrier.

Each task has a thread of its own, so that it can stop anywhere, in the midst of a model's forward or of a backward, and
go on when the others have come as far. A baton goes around, so no two ever run at once and nothing depends on chance.
When it has gone around, either all wait at the same barrier, or all are done, or an error says where each of them is.

Threads stay for the next window: a library's handles for matrix products and convolutions belong to a thread, and
making them takes longer than many a window.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from bigbatch.errors import ConfigurationError, PathsDiffer
from bigbatch.lockstep.round import Round
from bigbatch.lockstep.thread_state import Carried, staying_on, this_processor, wait_when_woken
from bigbatch.state import scope

_PATIENCE = 5.0  # seconds between two looks at whether a thread has died
Result = TypeVar("Result")
Value = TypeVar("Value")


class Abandoned(BaseException):
    """Ends a task whose window has failed elsewhere. No `except Exception` of the task's own code holds it up."""


class Worker:
    """One task on its way, as its own thread sees it."""

    def __init__(self, turns: "_Turns", number: int) -> None:
        """Take part in turns."""
        self._turns, self.number = turns, number
        self.meetings = 0  # how many this task has had
        self.visits: dict[str, int] = {}  # how often it has come by a place that wants to know

    @property
    def size(self) -> int:
        """How many tasks there are."""
        return len(self._turns.at)

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
        if self.round.free_workspaces is not None:
            self.round.free_workspaces()
        if turns.failure is not None:
            raise Abandoned
        try:
            turns.come(self.number, name, [value], fold)
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


def this_worker() -> Worker:
    """Return the task that this thread runs; there is one."""
    worker = current()
    assert worker is not None  # noqa: S101 - tasks run on workers
    return worker


class Crew:
    """Threads that run tasks in lock-step, as many as there are tasks."""

    def __init__(self) -> None:
        """Have no threads yet."""
        self._seats: list[_Seat] = []
        weakref.finalize(self, _dismiss, self._seats)

    def run(self, tasks: Sequence[Callable[[], Result]], carried: Carried, round_: Round) -> list[Result]:
        """Run all tasks; returns their results. The error of one ends all, and comes out as it was raised."""
        if not all(seat.is_alive() for seat in self._seats):
            _dismiss(self._seats)  # those that are left: in a process that was forked, none
        while len(self._seats) < len(tasks):
            _start_thread(self._seats, len(tasks))
        processor = this_processor() if carried.stream is not None and len(tasks) > 1 else None
        return _Turns(tasks, self._seats[: len(tasks)], carried, round_, processor).run()


def _dismiss(seats: "list[_Seat]") -> None:
    for seat in seats:
        seat.ended = True
        seat.wake()
    seats.clear()


def _start_thread(seats: "list[_Seat]", tasks: int) -> None:
    seats.append(_Seat(len(seats)))  # before it starts: an interrupt must not leave a thread that nobody ends
    try:
        seats[-1].start()
    except RuntimeError as error:
        seats.pop()
        raise ConfigurationError(
            f"micro-batches in lock-step have a thread each, and the system started {len(seats):,} of {tasks:,}: "
            f"{error}.",
            fix="fewer, larger micro-batches:  BigStep(..., micro_batch_size=...); or a higher limit (ulimit -u)",
        ) from error


class _Seat(threading.Thread):
    """A thread that waits for work. It knows no crew, so that a crew that nobody holds can go."""

    def __init__(self, number: int) -> None:
        super().__init__(name=f"bigbatch-{number}", daemon=True)
        self.go = threading.Lock()  # released by whoever passes the baton
        self.go.acquire()
        self.job: Callable[[], None] | None = None
        self.ended = False

    def wake(self) -> None:
        """Let the thread look whether it is its turn; once more does no harm."""
        with suppress(RuntimeError):  # it has been woken, and has not looked yet
            self.go.release()

    def run(self) -> None:
        """Work until there is no more."""
        with suppress(Exception):  # it saves time, and no more: without it the thread works as well
            wait_when_woken()
        while not self.ended:
            self.go.acquire()
            job = self.job
            if job is not None:
                job()
            del job  # it holds a window's tensors


class _Turns:
    """The tasks of one window, from the first baton to the last."""

    def __init__(
        self,
        tasks: Sequence[Callable[[], Any]],
        seats: list[_Seat],
        carried: Carried,
        round_: Round,
        processor: int | None,
    ) -> None:
        self._tasks, self._seats, self._carried, self._processor = list(tasks), seats, carried, processor
        self.at: list[str | None] = [None] * len(tasks)  # the barrier that each waits at
        self.round = round_
        self._values: list[Any] = []
        self._done = [False] * len(tasks)
        self._results: list[Any] = [None] * len(tasks)
        self.combined: Any = None
        self.failure: BaseException | None = None
        self._alike = True  # whether all that have come are at the same barrier
        self._over = False
        self._turn = -1  # whose it is to run
        self._finished = threading.Lock()
        self._finished.acquire()

    def run(self) -> list[Any]:
        self._wait()
        failure, results = self.failure, self._results
        self._tasks, self._values, self._results, self.combined, self.failure = [], [], [], None, None
        self.round = Round(())  # a graph that outlives its window has a worker, and must hold nothing else of it
        if failure is not None:
            try:
                raise failure
            finally:
                del failure, results  # a frame that holds its own error is never freed
        return results

    def _wait(self) -> None:
        """Wait for the last task. An interrupt, as by Ctrl-C, ends each at its next barrier, and then comes out."""
        try:  # around all of it: nothing has begun before this line, and all is over after it
            while not self._over:
                if self._turn < 0:
                    for number, seat in enumerate(self._seats):
                        seat.job = partial(self._job, number)
                    self._turn = 0
                self._seats[self._turn].wake()  # also where an interrupt came between a turn and its waking
                if not self._finished.acquire(timeout=_PATIENCE):
                    self._see_to_the_dead()
        except BaseException as interrupt:  # noqa: BLE001 - raised again when no task runs any more
            self.failure = self.failure or interrupt
            self._wait()

    def _see_to_the_dead(self) -> None:
        """Fail where the one whose turn it is has no thread any more: nobody else would tell."""
        number = self._turn
        if not self._over and not self._done[number] and not self._seats[number].is_alive():
            self._fail(number, RuntimeError("a thread of this window ended before its task"))

    def _fail(self, number: int, error: BaseException) -> None:
        self.failure = self.failure or error
        self._end(number)

    def _job(self, number: int) -> None:
        if self._turn != number or self._done[number]:
            return  # woken for nothing
        self._seats[number].job = None
        try:
            try:
                scope.become(Worker(self, number))
                if self.failure is None:
                    with staying_on(self._processor), self._carried.there():
                        self._results[number] = self._carried.context.copy().run(self._tasks[number])
            except Abandoned:
                pass
            finally:
                scope.become(None)
            self._end(number)
        except BaseException as error:  # noqa: BLE001 - it comes out of `run`, and the others must not wait for this one
            self._fail(number, error)

    def come(self, number: int, name: str, box: list[Any], fold: Callable[[Any, Any], Any] | None) -> None:
        """A task has come to a barrier, with a value in a box."""
        self.at[number] = name
        self._alike = self._alike and name == self.at[0]
        if fold is not None and number and self._alike:
            self._values = [fold(self._values.pop(), box.pop())]
        else:
            self._values.append(box.pop())

    def conclude(self, combine: Callable[[list[Any]], Any]) -> None:
        """All have come to where they are: make of their values what they came for."""
        if len(set(self.at)) > 1:
            raise self._paths_differ()
        values, self._values, self._alike = self._values, [], True
        self.at = [None] * len(self._seats)
        self.combined = combine(values)

    def wait(self, number: int) -> None:
        """Have the others run until it is this one's turn again."""
        if len(self._seats) > 1:
            self._hand_to((number + 1) % len(self._seats))
            while self._turn != number:
                self._seats[number].go.acquire()

    def _end(self, number: int) -> None:
        """A task is over: the baton goes to the next, and from the last one to whoever still waits."""
        self._done[number] = True
        if self.failure is None and number + 1 < len(self._seats):
            self._hand_to(number + 1)
            return
        left = [i for i, done in enumerate(self._done) if not done]
        if left:
            self.failure = self.failure or self._paths_differ()
            self._hand_to(left[0])
        else:
            self._over = True
            self._finished.release()

    def _hand_to(self, number: int) -> None:
        self._turn = number
        self._seats[number].wake()

    def _paths_differ(self) -> PathsDiffer:
        places: dict[str, list[int]] = {}
        for number, at in enumerate(self.at):
            places.setdefault(at or "its end", []).append(number)
        listed = "\n".join(
            f"    micro-batch{'es' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))} "
            f"{'are' if len(numbers) > 1 else 'is'} at {at}"
            for at, numbers in places.items()
        )
        return PathsDiffer(
            f"the micro-batches of this window took different paths, and cannot meet:\n{listed}\n"
            "All must run the same operations across micro-batches in the same order, also in backward. Look for an "
            "`if` on the data or on a random number, a layer that some skip, or tensors of different shapes."
        )
