"""Tasks in lock-step: one at a time, in a fixed order, meeting; no error is lost, and nothing ever hangs."""

import contextvars
import gc
import itertools
import os
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _device

import bigbatch
from bigbatch.errors import ConfigurationError, PathsDiffer
from bigbatch.lockstep import thread_state, threads
from bigbatch.lockstep.round import Round
from bigbatch.lockstep.thread_state import Carried
from bigbatch.lockstep.threads import Crew, Worker, current
from bigbatch.memory.meter import LiveBytes

CPU = torch.device("cpu")
LIMIT = 20.0  # seconds after which a thread does not end
Task = Callable[[Worker], Any]


def side_by_side(crew: Crew, task: Task, tasks: int = 3, carried: Any = None) -> list[Any]:
    """Run a task so many times."""
    return crew.run(task, carried or Carried.here(CPU), Round((1,) * tasks))


def works(crew: Crew, tasks: int = 3) -> bool:
    """Whether a crew does what it is there for."""
    return side_by_side(crew, lambda w: w.meet("again", w.number, sum), tasks) == [sum(range(tasks))] * tasks


# One at a time, in their order.


@pytest.mark.parametrize("meetings", [0, 1, 3])
@pytest.mark.parametrize("tasks", [1, 2, 7])
def test_the_order_is_fixed_and_one_runs_at_a_time(tasks: int, meetings: int) -> None:
    """All come to a meeting in their order, and go on in it; between two meetings nobody else runs."""
    seen: list[tuple[int, int]] = []
    inside: list[int] = []

    def task(worker: Worker) -> int:
        for meeting in range(meetings + 1):
            inside.append(worker.number)
            seen.append((meeting, worker.number))
            time.sleep(0.0005)  # whoever could run beside would do so now
            assert inside == [worker.number]
            inside.clear()
            if meeting < meetings:
                worker.meet(f"meeting {meeting}", None, len)
        return worker.number * 10

    crew = Crew()
    for _ in range(2):
        seen.clear()
        assert side_by_side(crew, task, tasks) == [number * 10 for number in range(tasks)]
        assert seen == [(meeting, number) for meeting in range(meetings + 1) for number in range(tasks)]


def first(values: list[Any]) -> Any:
    """What folded values come to."""
    return values[0]


def test_what_a_meeting_makes_of_the_values() -> None:
    """`combine` is called once, on all values in their order, and all get the very same result; sums are folded."""
    called: list[list[str]] = []

    def task(worker: Worker) -> Any:
        own = "abc"[worker.number]
        folded: str = worker.meet("it", own, first, lambda a, b: f"({a}{b})")
        found = worker.meet("all", own, lambda values: (called.append(values), ["".join(values)])[1])  # type: ignore[func-returns-value]
        return found, folded, worker.number, worker.size, worker.meetings

    found = side_by_side(Crew(), task)
    assert current() is None
    assert called == [["a", "b", "c"]]
    assert len({id(each[0]) for each in found}) == 1
    assert [each[1:] for each in found] == [("((ab)c)", n, 3, 2) for n in range(3)]


@pytest.mark.parametrize("fails", [True, False])
def test_nobody_holds_more_than_must_be(fails: bool) -> None:
    """What a window has goes with it, or with its error, without a collection of garbage; a graph may hold workers."""
    made: list[weakref.ref[Any]] = []
    workers: list[Worker] = []

    def value() -> Tensor:
        made.append(weakref.ref(tensor := torch.ones(3)))
        return tensor

    def task(worker: Worker) -> Tensor:
        workers.append(worker)
        worker.meet("folded", value(), first, lambda a, b: a + b)
        worker.meet("combined", 0, lambda _: value())
        worker.round.shared.append((tensor := value(), "it"))
        if fails and worker.number == 1:
            raise ValueError("with activations in its frames")
        worker.meet("the end", tensor, len)
        return tensor

    crew, carried = Crew(), Carried.here(CPU)
    made.append(weakref.ref(carried))
    gc.disable()
    try:
        with pytest.raises(ValueError, match="with activations") if fails else nullcontext():
            side_by_side(crew, task, carried=carried)
        del carried
        assert not any(ref() is not None for ref in made)
        assert len(workers) == 3
    finally:
        gc.enable()


def test_threads_serve_again() -> None:
    """More tasks than before, and fewer; a library has handles of each thread, so a task has the same one each time."""
    crew = Crew()
    seen = [side_by_side(crew, lambda _: threading.get_ident(), tasks) for tasks in (1, 4, 2, 5, 4)]
    assert seen[1] == seen[4] == seen[3][:4]
    assert seen[0] == seen[1][:1]
    assert len(set(seen[3])) == 5


# Errors.


def fail(error: BaseException) -> None:
    """Have a frame of its own in the traceback, which does not hold the error."""
    try:
        raise error
    finally:
        del error


@pytest.mark.parametrize("moment", ["before", "after", "combine", "fold"])
@pytest.mark.parametrize("meeting", [0, 2])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_error_in_one_releases_all(number: int, meeting: int, moment: str) -> None:
    """Whoever raises, before, in or after whichever meeting: that very error comes out, and nobody goes beyond."""
    error = (ValueError, KeyboardInterrupt, SystemExit, GeneratorExit, StopIteration, MemoryError)[number + meeting]()
    reached: list[int] = []

    def fails(at: int, when: str, who: int) -> None:
        if (at, when, who) == (meeting, moment, number):
            fail(error)

    def task(worker: Worker) -> None:
        try:
            for at in range(3):
                fails(at, "before", worker.number)
                combine = lambda _, at=at: fails(at, "combine", number)  # noqa: E731
                fold: Any = lambda _, other, at=at: fails(at, "fold", other if number else 0)  # noqa: E731
                worker.meet(f"meeting {at}", worker.number, combine, fold if moment == "fold" else None)
                reached.append(at)
                fails(at, "after", worker.number)
        finally:
            if sys.exc_info()[0] is threads.Abandoned:
                fail(KeyError("while cleaning up"))  # it does not hide the error

    crew = Crew()
    with pytest.raises(type(error)) as caught:
        side_by_side(crew, task)
    assert caught.value is error
    assert "fail" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert all(at < meeting + (moment == "after") for at in reached)  # nobody went beyond
    assert works(crew)


@contextmanager
def failing_at(call: int, seen: list[str]) -> Iterator[None]:
    """Have a call of the library's own functions on a new thread fail; write down all of them."""

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(os.path.dirname(bigbatch.__file__)):  # noqa: PTH120
            seen.append(frame.f_code.co_name)
            if len(seen) == call:
                raise MemoryError

    threading.setprofile(profile)
    try:
        yield
    finally:
        threading.setprofile(None)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_no_failure_of_the_librarys_own_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a worker fails, between its turns, too: the error comes out, and the threads serve again."""
    monkeypatch.setattr(threads, "_PATIENCE", 0.1)

    def task(worker: Worker) -> int:
        return worker.meet("one", 1, first, lambda a, b: a + b) + worker.meet("other", 1, sum)

    calls: list[str] = []
    with failing_at(0, calls):
        side_by_side(Crew(), task, 2)
    for call in range(1, len(calls) + 1):
        seen: list[str] = []
        crew = Crew()
        with failing_at(call, seen):
            only_saves_time = calls[call - 1] == "wait_when_woken"
            with nullcontext() if only_saves_time else pytest.raises((MemoryError, RuntimeError)):
                assert side_by_side(crew, task, 2) == [4, 4]
        assert works(crew)


# The path of one, that of the others, and where each waits.
PATHS: list[tuple[str, str, str, str]] = [
    ("numbers words", "numbers other", "words", "other"),
    ("words", "a-sum", "words", "a-sum"),
    ("", "numbers", "its end", "numbers"),
    ("numbers", "numbers a-sum", "its end", "a-sum"),
]


@pytest.mark.parametrize("odd", [(0,), (1,), (0, 2)])
@pytest.mark.parametrize(("own", "others", "where", "elsewhere"), PATHS)
def test_different_paths_are_reported(own: str, others: str, where: str, elsewhere: str, odd: tuple[int, ...]) -> None:
    """With the meeting that each waits at; a sum is folded as it comes, and misses who is elsewhere."""

    def task(worker: Worker) -> None:
        for name in (own if worker.number in odd else others).split():
            value: Any = "a word" if name == "words" else 1
            worker.meet(name, value, first, (lambda a, b: a + b) if name == "a-sum" else None)

    crew = Crew()
    with pytest.raises(PathsDiffer, match="took different paths, and cannot meet") as caught:
        side_by_side(crew, task)
    told = "micro-batch {} is at {}" if len(odd) == 1 else "micro-batches {} are at {}"
    assert told.format(", ".join(map(str, odd)), where) in str(caught.value)
    assert f"at {elsewhere}" in str(caught.value)
    assert works(crew)


# What a worker's thread has of the caller's.

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="nothing")


def modes() -> tuple[Any, ...]:
    """What belongs to a thread, before and inside of a product."""
    product = torch.ones(2, 2) @ torch.ones(2, 2)
    cached = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()
    watched = torch._C._len_torch_dispatch_stack()
    return torch.is_grad_enabled(), product.dtype, product.device, *cached, watched, variable.get()


AROUND: dict[str, Callable[[], Any]] = {
    "nothing": ExitStack,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast without its cache": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    "no_grad": torch.no_grad,
    "a default device": lambda: torch.device("meta"),
    "a dispatch mode": LiveBytes,
}


@pytest.mark.parametrize("how", AROUND)
def test_modes_are_carried(how: str) -> None:
    """Autocast with its dtype and its cache, grad mode, the device; afterwards none is in force.

    What a task leaves behind is not the other tasks', nor the caller's, nor the next window's.
    """

    def task(worker: Worker) -> list[Any]:
        found = [modes()]
        worker.meet("it", 0, len)
        found.append(modes())
        torch.set_grad_enabled(False)
        variable.set(f"of {worker.number}")
        torch.set_autocast_enabled("cpu", True)
        worker.meet("it", 0, len)
        assert variable.get() == f"of {worker.number}"
        return found

    crew, before = Crew(), _device.CURRENT_DEVICE
    try:
        with AROUND[how]():
            assert side_by_side(crew, task) == [[modes()] * 2] * 3
        assert side_by_side(crew, task) == [[modes()] * 2] * 3
    finally:
        _device.CURRENT_DEVICE = before


@pytest.mark.parametrize("fails", [False, True])
def test_threads_end_with_their_crew(fails: bool) -> None:
    """Dropped without a word, without a collection of garbage; an error holds no crew, once it is gone."""
    gc.collect()
    before = set(threading.enumerate())
    crew: Crew | None = Crew()
    assert crew is not None
    assert set(threading.enumerate()) <= before  # none before the first task
    with pytest.raises(ValueError, match="of the task") if fails else nullcontext():
        side_by_side(crew, lambda _: fail(ValueError("of the task")) if fails else None, 4)
    made = [each for each in set(threading.enumerate()) - before if each.name.startswith("bigbatch-")]
    assert len(made) == 4
    gc.disable()
    try:
        crew = None
        for thread in made:
            thread.join(LIMIT)
            assert not thread.is_alive()
    finally:
        gc.enable()


def test_threads_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many were wanted, how many there are, and what to do; the next window finds what there is."""
    start, started = threading.Thread.start, [0]

    def refuse(self: threading.Thread) -> None:
        started[0] += self.name.startswith("bigbatch-")
        if started[0] > 2 and self.name.startswith("bigbatch-"):
            raise RuntimeError("can't start new thread")
        start(self)

    crew = Crew()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    told = r"(?s)the system started 2 of 5: can't start new thread.*larger micro-batches:  BigStep\("
    with pytest.raises(ConfigurationError, match=told):
        side_by_side(crew, lambda w: w.number, 5)
    assert works(crew, 2)
    monkeypatch.undo()
    assert works(crew, 5)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems have no such calls")
def test_on_a_device_all_turns_are_on_one_processor() -> None:
    """The caller itself and windows on a processor go where they like, also where no such processor is there."""

    def task(worker: Worker) -> tuple[frozenset[int], int]:
        worker.meet("here", 0, len)
        return frozenset(os.sched_getaffinity(0)), os.sched_getscheduler(0)

    before, scheduled = frozenset(os.sched_getaffinity(0)), os.sched_getscheduler(0)
    crew, plain = Crew(), Carried.here(CPU)
    with thread_state.staying_on(max(before)):
        here = thread_state.this_processor()
    assert here == max(before)
    on_one = frozenset({here})
    for tasks, processor, expected in ((3, None, before), (3, here, on_one), (3, 100_000, before), (1, here, before)):
        found = side_by_side(crew, task, tasks, replace(plain, processor=processor))
        assert found == [(expected, os.SCHED_BATCH)] * tasks
    assert (frozenset(os.sched_getaffinity(0)), os.sched_getscheduler(0)) == (before, scheduled)


# Interrupts, forks and hangs: in a process of their own, with a limit.

_BEGINNING = """
import faulthandler, os, signal, threading, time
import torch
from bigbatch.lockstep.round import Round
from bigbatch.lockstep.thread_state import Carried
from bigbatch.lockstep.threads import Crew
faulthandler.dump_traceback_later(40, exit=True)
crew, here = Crew(), Carried.here(torch.device("cpu"))

def works():
    here = Carried.here(torch.device("cpu"))
    found = crew.run(lambda worker: worker.meet("again", worker.number, sum), here, Round((1,) * 3))
    assert found == [3, 3, 3], found
"""


def in_a_process(script: str) -> str:
    """Run a script in a fresh interpreter; returns what it printed."""
    text = _BEGINNING + textwrap.dedent(script)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_interrupt_ends_all_and_comes_out() -> None:
    """Ctrl-C in the thread that waits, while whichever task runs, also twice."""
    printed = in_a_process("""
        for number in range(3):
            for times in (1, 2):
                ended, further = [], []

                def task(worker):
                    try:
                        worker.meet("first", 0, len)
                        if worker.number == number:
                            for _ in range(times):
                                os.kill(os.getpid(), signal.SIGINT)
                                time.sleep(0.2)  # the interrupt comes to the thread that waits
                        for _ in range(300):
                            worker.meet("further", 0, len)
                            further.append(worker.number)
                    finally:
                        ended.append(worker.number)

                try:
                    crew.run(task, here, Round((1,) * 3))
                except KeyboardInterrupt:
                    assert sorted(ended) == [0, 1, 2], ended
                    assert len(further) < 30, f"{len(further)} meetings more"
                else:
                    raise AssertionError("nothing came out")
                works()
        print("interrupted")
    """)
    assert printed == "interrupted\n"


def act(worker: Worker, what: str) -> None:
    """One step of a path."""
    if what in "ab":
        worker.meet(what, 1, sum)
    elif what == "raise":
        raise ValueError("own")
    elif what == "swallow":
        with suppress(BaseException):
            worker.meet("a", 1, sum)


WAYS = "a-a a-b b-a a-end end raise-end a-raise swallow-a swallow-swallow swallow-raise".split()


def test_no_path_hangs() -> None:
    """Three tasks on any of ten paths of meetings, ends, errors and swallowed errors."""
    crew = Crew()
    for chosen in itertools.product(WAYS, repeat=3):

        def task(worker: Worker, chosen: Sequence[str] = chosen) -> None:
            for what in chosen[worker.number].split("-"):
                if what == "end":
                    return
                act(worker, what)

        with suppress(ValueError, PathsDiffer):
            side_by_side(crew, task)
    assert works(crew)


def test_neither_a_fork_nor_the_end_of_a_process_hangs() -> None:
    """Threads do not live on in a forked process, and those that wait for work keep no process from ending.

    Nor do tasks of a round that a daemon thread has begun.
    """
    printed = in_a_process("""
        works()
        child = os.fork()
        if not child:
            signal.alarm(20)
            works()
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        works()
        print(threading.active_count())
        late = lambda: Crew().run(lambda _: time.sleep(600), here, Round((1,) * 2))
        threading.Thread(target=late, daemon=True).start()
        time.sleep(0.1)
    """)
    assert printed == "4\n"
