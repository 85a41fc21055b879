"""Several tasks in lock-step: one runs at a time, in a fixed order, until all have come to the same meeting.

Each task has a thread of its own, so that it can stop anywhere, in the midst of a model's forward or of a backward, and
go on when the others have come as far. No two ever run at once: a baton goes around. So nothing depends on chance, and
no task can wait for one that does not come: when the baton has gone around, either all wait at the same meeting, or all
are done, or it is an error that says where each of them is.

Threads stay for the next window: a library's handles for matrix products and convolutions belong to a thread, and
making them takes longer than many a window.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from bigbatch.errors import ConfigurationError, LossError, PathsDiffer
from bigbatch.lockstep.one_core import staying_on, this_processor, wait_when_woken
from bigbatch.lockstep.round import Round
from bigbatch.lockstep.thread_state import Carried
from bigbatch.state import scope

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
        if self.round.free_workspaces is not None:
            self.round.free_workspaces()
        box = [value]
        del value  # where it is folded into others, nobody keeps it
        found: Result = self._turns.meet(self.number, name, box, combine, fold)
        return found


def current() -> Worker | None:
    """Return the task that this thread runs, where it runs one."""
    found: Worker | None = scope.worker()
    return found


def refuse_other_threads(name: str) -> None:
    """Raise on a thread that a task's own code has started: it is nobody's worker."""
    thread = threading.current_thread()
    if any(isinstance(each, _Seat) and each.is_busy_since_before(thread) for each in threading.enumerate()):
        msg = (
            f"across.{name} was called on a thread that has begun while micro-batches run in lock-step, and other "
            "micro-batches cannot be met there: it would have answered for this one alone.\n"
            "Call it on the thread that loss_fn is called on, before or after threads of your own."
        )
        raise LossError(msg)


class Crew:
    """Threads that run tasks in lock-step, as many as there are tasks."""

    def __init__(self) -> None:
        """Have no threads yet."""
        self._seats: list[_Seat] = []
        self._latest: weakref.ref[_Turns] | None = None
        weakref.finalize(self, _dismiss, self._seats)

    def run(self, tasks: Sequence[Callable[[], Result]], carried: Carried, round_: Round) -> list[Result]:
        """Run all tasks; returns their results. The error of one ends all, and comes out as it was raised."""
        latest = self._latest() if self._latest is not None else None
        if latest is not None and latest.runs:
            msg = "a window in lock-step cannot be run inside of another with the same threads"
            raise RuntimeError(msg)
        if not all(seat.is_alive() for seat in self._seats):
            _dismiss(self._seats)  # those that are left: in a process that was forked, none
        while len(self._seats) < len(tasks):
            _start_thread(self._seats, len(tasks))
        processor = this_processor() if carried.stream is not None and len(tasks) > 1 else None
        turns = _Turns(tasks, self._seats[: len(tasks)], carried, round_, processor)
        self._latest = weakref.ref(turns)
        return turns.run()


def _dismiss(seats: "list[_Seat]") -> None:
    for seat in seats:
        seat.ended = True
        seat.wake()
    seats.clear()


def _start_thread(seats: "list[_Seat]", tasks: int) -> None:
    """Start one more, in a seat that is known before: an interrupt in here must not leave a thread that nobody ends."""
    number = len(seats)
    seats.append(_Seat(f"bigbatch-{number}"))
    try:
        seats[number].start()
    except RuntimeError as error:
        del seats[number:]
        msg = (
            f"micro-batches in lock-step have a thread each, and of {tasks:,} the system would start {number:,}: "
            f"{error}.\n"
            "Take fewer micro-batches, larger ones:  BigStep(..., micro_batch_size=...); or allow this process more "
            "threads (ulimit -u, or the limit on pids of its container)."
        )
        raise ConfigurationError(msg) from error


class _Seat(threading.Thread):
    """A thread that waits for work. It knows no crew, so that a crew that nobody holds can go."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.go = threading.Lock()  # released by whoever passes the baton
        self.go.acquire()
        self.job: Callable[[], None] | None = None
        self.ended = False
        self.others: frozenset[threading.Thread] | None = None  # those that were there when its window began

    def is_busy_since_before(self, thread: threading.Thread) -> bool:
        """Whether this one serves a window in which another thread has been started."""
        # One that Python has not started is first seen when it is asked.
        known = not isinstance(thread, threading._DummyThread)  # noqa: SLF001 - no public name
        return known and self.others is not None and thread not in self.others

    def wake(self) -> None:
        """Let the thread look whether it is its turn; once more does no harm."""
        with suppress(RuntimeError):  # it has been woken, and has not looked yet
            self.go.release()

    def run(self) -> None:
        """Work until there is no more."""
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
        seats: "list[_Seat]",
        carried: Carried,
        round_: Round,
        processor: int | None,
    ) -> None:
        self._tasks, self._seats, self._carried = list(tasks), seats, carried
        self.at: list[str | None] = [None] * len(tasks)  # the meeting that each waits at
        self.round = round_
        self._values: list[Any] = []
        self._done = [False] * len(tasks)
        self._results: list[Any] = [None] * len(tasks)
        self._combined: Any = None
        self._failure: BaseException | None = None
        self._alike = True  # whether all that have come are at the same meeting
        self._over = self._begun = False
        self._processor = processor
        self._turn = -1  # whose it is to run
        self._finished = threading.Lock()
        self._finished.acquire()

    @property
    def runs(self) -> bool:
        """Whether a task may run."""
        return self._turn >= 0 and not self._over

    def run(self) -> list[Any]:
        self._wait()
        failure, results = self._failure, self._results
        self._tasks, self._values, self._results, self._combined, self._failure = [], [], [], None, None
        self.round = Round(())  # a graph that outlives its window has a worker, and must hold nothing else of it
        if failure is not None:
            try:
                raise failure
            finally:
                del failure, results  # a frame that holds its own error is never freed
        return results

    def _wait(self) -> None:
        """Wait for the last task. An interrupt, as by Ctrl-C, ends each at its next meeting, and then comes out."""
        try:  # around all of it: nothing has begun before this line, and all is over after it
            while not self._over:
                if self._turn < 0:
                    others = frozenset(threading.enumerate())
                    for number, seat in enumerate(self._seats):
                        seat.job, seat.others = self._job(number), others
                    self._hand_to(0)
                elif not self._begun:
                    self._seats[0].wake()  # an interrupt came between its turn and its waking
                self._finished.acquire()
        except BaseException as interrupt:  # noqa: BLE001 - raised again when no task runs any more
            self._failure = self._failure or interrupt
            self._wait()

    def meet(
        self,
        number: int,
        name: str,
        box: list[Any],
        combine: Callable[[list[Any]], Any],
        fold: Callable[[Any, Any], Any] | None,
    ) -> Any:
        if self._failure is not None:
            raise Abandoned
        self.at[number] = name
        try:
            self._alike = self._alike and name == self.at[0]
            if fold is not None and number and self._alike:
                self._values = [fold(self._values.pop(), box.pop())]
            else:
                self._values.append(box.pop())
            if number + 1 == len(self._seats):
                self._conclude(combine)
        except BaseException as error:
            self._failure = error  # now, lest the task's own code catch it and go on
            raise
        if len(self._seats) > 1:
            self._hand_to((number + 1) % len(self._seats))
            while self._turn != number:
                self._seats[number].go.acquire()
        if self._failure is not None:
            raise Abandoned
        result = self._combined
        if number + 1 == len(self._seats):
            self._combined = None  # the last one has taken it
        return result

    def _conclude(self, combine: Callable[[list[Any]], Any]) -> None:
        """All have come to where they are: make of their values what they came for."""
        if len(set(self.at)) > 1:
            raise self._paths_differ()
        values, self._values, self._alike = self._values, [], True
        self.at = [None] * len(self._seats)
        self._combined = combine(values)

    def _paths_differ(self) -> PathsDiffer:
        places: dict[str, list[int]] = {}
        for number, at in enumerate(self.at):
            places.setdefault(at or "its end", []).append(number)
        listed = "\n".join(f"    {_numbered(numbers)} at {at}" for at, numbers in places.items())
        msg = (
            "the micro-batches of this window took different paths, and cannot meet:\n"
            f"{listed}\n"
            "All must run the same operations across micro-batches in the same order, also in backward. Look for an "
            "`if` on the data or on a random number, a layer that is skipped for some, a value that only some "
            "micro-batches' losses use, or tensors of different shapes."
        )
        return PathsDiffer(msg)

    def _job(self, number: int) -> Callable[[], None]:
        def job() -> None:
            if self._turn != number or self._done[number]:
                return  # woken for nothing
            self._begun = True
            self._seats[number].job = None
            try:
                scope.become(Worker(self, number))
                with staying_on(self._processor):
                    if self._failure is None:
                        with self._carried.there():
                            self._results[number] = self._carried.context.copy().run(self._tasks[number])
            except Abandoned:
                pass
            except BaseException as error:  # noqa: BLE001 - it comes out of `run`
                if self._failure is None:
                    self._failure = error
            finally:
                scope.become(None)
            self._seats[number].others = None
            self._end(number)

        return job

    def _end(self, number: int) -> None:
        """A task is over: the baton goes to the next, and from the last one to whoever still waits."""
        self._done[number] = True
        seats = len(self._seats)
        if self._failure is None:
            if number + 1 < seats:
                self._hand_to(number + 1)
                return
            if not all(self._done):
                self._failure = self._paths_differ()
        left = next((i for i in range(seats) if not self._done[i]), None)
        if left is None:
            self._over = True
            self._finished.release()
        else:
            self._hand_to(left)

    def _hand_to(self, number: int) -> None:
        self._turn = number
        self._seats[number].wake()


def _numbered(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"micro-batch {numbers[0]} is"
    return f"micro-batches {', '.join(map(str, numbers))} are"
