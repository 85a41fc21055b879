"""Tasks in lock-step: one at a time, in a fixed order, meeting; no error is lost, and nothing ever hangs."""

import contextvars
import gc
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _device
from torch.utils._python_dispatch import TorchDispatchMode

from bigbatch.errors import ConfigurationError, PathsDiffer
from bigbatch.lockstep.round import Round
from bigbatch.lockstep.thread_state import Carried
from bigbatch.lockstep.threads import Crew, Worker, current

CPU = torch.device("cpu")
LIMIT = 20.0  # seconds after which something hangs
Result = TypeVar("Result")
Task = Callable[[Worker], Any]


def in_time(work: Callable[[], Result], limit: float = LIMIT) -> Result:
    """Do it on a thread of its own, so that a hang fails the test instead of joining it."""
    found: list[Result] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again below
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit)
    if thread.is_alive():
        pytest.fail(f"it hangs: still not through after {limit} seconds")
    if raised:
        raise raised.pop()
    return found[0]


def side_by_side(crew: Crew, tasks: Sequence[Task], round_: Round | None = None) -> list[Any]:
    """Run tasks that take their worker."""

    def plain(task: Task) -> Callable[[], Any]:
        def run() -> Any:
            worker = current()
            assert worker is not None
            return task(worker)

        return run

    return crew.run([plain(task) for task in tasks], Carried.here(CPU), round_ or Round((1,) * len(tasks)))


def works(crew: Crew, tasks: int = 3) -> bool:
    """Whether a crew does what it is there for."""
    return (
        in_time(lambda: side_by_side(crew, [lambda w: w.meet("again", w.number, sum)] * tasks))
        == [sum(range(tasks))] * tasks
    )


def fail(error: BaseException) -> None:
    """Have a frame of its own in the traceback, which does not hold the error."""
    try:
        raise error
    finally:
        del error


# One at a time, in their order.


@pytest.mark.parametrize("meetings", [0, 1, 3])
@pytest.mark.parametrize("tasks", [1, 2, 3, 7])
def test_the_order_is_fixed_and_one_runs_at_a_time(tasks: int, meetings: int) -> None:
    """All come to a meeting in their order, and go on in it; between two meetings nobody else runs."""
    seen: list[tuple[int, int]] = []
    inside: list[int] = []
    most: list[int] = []

    def task(worker: Worker) -> int:
        for meeting in range(meetings + 1):
            inside.append(worker.number)
            seen.append((meeting, worker.number))
            time.sleep(0.0005)  # whoever could run beside would do so now
            most.append(len(inside))
            inside.remove(worker.number)
            if meeting < meetings:
                worker.meet(f"meeting {meeting}", None, len)
        return worker.number * 10

    crew = Crew()
    for _ in range(2):
        seen.clear()
        assert in_time(lambda: side_by_side(crew, [task] * tasks)) == [number * 10 for number in range(tasks)]
        assert seen == [(meeting, number) for meeting in range(meetings + 1) for number in range(tasks)]
    assert set(most) == {1}


def test_what_a_meeting_makes_of_the_values() -> None:
    """`combine` is called once, on all values in their order, and all get the very same result."""
    called: list[list[str]] = []

    def combine(values: list[str]) -> list[str]:
        called.append(values)
        return ["".join(values)]

    found = in_time(lambda: side_by_side(Crew(), [lambda w: w.meet("all", "abc"[w.number], combine)] * 3))
    assert called == [["a", "b", "c"]]
    assert found == [["abc"]] * 3
    assert found[0] is found[1] is found[2]


def test_values_are_folded_as_they_come() -> None:
    """From the left."""

    def task(worker: Worker) -> str:
        return worker.meet("it", "abcd"[worker.number], lambda values: values[0], lambda a, b: f"({a}{b})")

    assert in_time(lambda: side_by_side(Crew(), [task] * 4)) == ["(((ab)c)d)"] * 4


def test_of_folded_values_only_one_is_kept() -> None:
    """The one before is let go when it is part of the sum."""
    alive: list[int] = []
    made: list[weakref.ref[Tensor]] = []

    def value(number: int) -> Tensor:
        alive.append(sum(ref() is not None for ref in made))
        tensor = torch.full((), float(number))
        made.append(weakref.ref(tensor))
        return tensor

    def task(worker: Worker) -> None:
        worker.meet("it", value(worker.number), lambda values: values[0], lambda a, b: a + b)

    in_time(lambda: side_by_side(Crew(), [task] * 4))
    assert max(alive) <= 1, alive


def test_tasks_know_their_number_their_fellows_and_what_they_have_in_common() -> None:
    """And outside of a task there is no worker."""

    def task(worker: Worker) -> tuple[int, int, tuple[int, ...], int]:
        worker.meet("once", None, len)
        return worker.number, worker.size, worker.round.sizes, worker.meetings

    assert current() is None
    found = in_time(lambda: side_by_side(Crew(), [task] * 3, Round((5, 5, 2))))
    assert found == [(number, 3, (5, 5, 2), 1) for number in range(3)]
    assert current() is None


def test_no_tasks_and_changing_numbers_of_them() -> None:
    """More than before, and fewer: the threads that are there serve again."""
    crew = Crew()
    for tasks in (1, 4, 2, 5, 1):
        assert works(crew, tasks)
    assert len(crew._seats) == 5


def test_threads_are_the_same_in_every_round() -> None:
    """A library's handles belong to a thread, so a task has the same one each time."""
    crew = Crew()
    first = in_time(lambda: side_by_side(crew, [lambda _: threading.get_ident()] * 3))
    again = in_time(lambda: side_by_side(crew, [lambda _: threading.get_ident()] * 3))
    assert first == again
    assert len(set(first)) == 3


# Errors.


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("meeting", [0, 1, 2])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_error_in_one_releases_all(number: int, meeting: int, moment: str) -> None:
    """Whoever raises, before or after whichever meeting: that very error comes out, and the crew goes on."""
    error = ValueError("of the task")
    ended: list[int] = []
    reached: list[tuple[int, int]] = []

    def task(worker: Worker) -> None:
        try:
            for at in range(3):
                if (worker.number, at, moment) == (number, meeting, "before"):
                    fail(error)
                worker.meet(f"meeting {at}", worker.number, sum)
                reached.append((worker.number, at))
                if (worker.number, at, moment) == (number, meeting, "after"):
                    fail(error)
        finally:
            ended.append(worker.number)

    crew = Crew()
    for _ in range(2):
        ended.clear()
        reached.clear()
        with pytest.raises(ValueError, match="of the task") as caught:
            in_time(lambda: side_by_side(crew, [task] * 3))
        assert caught.value is error
        assert "fail" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        never_began = {other for other in range(3) if other > number} if (meeting, moment) == (0, "before") else set()
        assert sorted(ended) == sorted({0, 1, 2} - never_began)
        further = meeting + (moment == "after")
        assert all(at < further for _, at in reached)  # nobody went beyond
        assert works(crew)


@pytest.mark.parametrize("where", ["combine", "fold of the second", "fold of the last"])
def test_an_error_in_what_a_meeting_makes_of_values(where: str) -> None:
    """It is raised in the task that was there last, and nobody goes on with half a result."""
    error = RuntimeError("sizes differ")
    reached: list[int] = []

    def combine(values: list[int]) -> int:
        if where == "combine":
            fail(error)
        return values[0]

    def fold(one: int, other: int) -> int:
        if other == {"fold of the second": 1, "fold of the last": 2}.get(where):
            fail(error)
        return one + other

    def task(worker: Worker) -> None:
        worker.meet("it", worker.number, combine, None if where == "combine" else fold)
        reached.append(worker.number)

    crew = Crew()
    with pytest.raises(RuntimeError, match="sizes differ") as caught:
        in_time(lambda: side_by_side(crew, [task] * 3))
    assert caught.value is error
    assert not reached
    assert "fail" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert works(crew)


@pytest.mark.parametrize("kept", [Exception, BaseException])
@pytest.mark.parametrize("where", ["a task", "combine"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_code_that_swallows_errors_still_ends(number: int, where: str, kept: type[BaseException]) -> None:
    """A task that catches what a meeting raises cannot meet again, and the first error comes out."""
    error = ValueError("the first")

    def combine(values: list[int]) -> int:
        if where == "combine":
            fail(error)
        return len(values)

    def task(worker: Worker) -> str:
        for _ in range(3):
            try:
                if where == "a task" and worker.number == number:
                    fail(error)
                worker.meet("it", 0, combine)
            except kept:  # noqa: PERF203 - as a user would
                if where == "a task" and worker.number == number:
                    raise
        return "through"

    crew = Crew()
    with pytest.raises(ValueError, match="the first") as caught:
        in_time(lambda: side_by_side(crew, [task] * 3))
    assert caught.value is error
    assert works(crew)


def test_code_that_tries_again_still_ends() -> None:
    """What ends a task is no `Exception`: nobody takes it for a failure that another try would mend."""
    tries: list[int] = []

    def task(worker: Worker) -> None:
        if worker.number == 2:
            fail(ValueError("the first"))
        while len(tries) < 100:
            tries.append(worker.number)
            try:
                worker.meet("it", 0, len)
            except Exception:  # noqa: BLE001, S112 - as a user would
                continue

    with pytest.raises(ValueError, match="the first"):
        in_time(lambda: side_by_side(Crew(), [task] * 3))
    assert tries == [0, 1]


def test_an_error_that_cleaning_up_raises_does_not_hide_the_first() -> None:
    """A task that is ended may fail in its `finally`."""

    def task(worker: Worker) -> None:
        try:
            worker.meet("it", 0, len)
            if worker.number == 1:
                raise ValueError("the first")
            worker.meet("it", 0, len)
        finally:
            if worker.number != 1:
                raise KeyError("while cleaning up")

    crew = Crew()
    with pytest.raises(ValueError, match="the first"):
        in_time(lambda: side_by_side(crew, [task] * 3))
    assert works(crew)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, StopIteration, MemoryError])
def test_errors_of_every_kind_come_out(error: type[BaseException]) -> None:
    """Also those that are no `Exception`."""

    def task(worker: Worker) -> None:
        worker.meet("it", 0, len)
        if worker.number == 1:
            raise error
        worker.meet("it", 0, len)

    crew = Crew()
    with pytest.raises(error):
        in_time(lambda: side_by_side(crew, [task] * 3))
    assert works(crew)


def test_an_error_in_hand_is_all_that_holds_its_frames() -> None:
    """Without a collection of garbage: what a failed window had in memory is free when its error is let go."""
    held: list[weakref.ref[Tensor]] = []

    def task(worker: Worker) -> None:
        activations = torch.ones(3)
        held.append(weakref.ref(activations))
        worker.meet("it", activations, lambda values: values[0], lambda a, b: a + b)
        if worker.number == 1:
            fail(ValueError("with activations in its frames"))
        worker.meet("it", activations, len)

    crew = Crew()
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            with pytest.raises(ValueError, match="with activations"):
                side_by_side(crew, [task] * 3)
        assert not any(ref() is not None for ref in held)
    finally:
        gc.enable()


# Different paths.


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_different_meetings_are_reported(odd: int) -> None:
    """With the meeting that each waits at."""

    def task(worker: Worker) -> None:
        worker.meet("the first", 0, sum)
        worker.meet("another" if worker.number == odd else "the second", 0, sum)

    crew = Crew()
    with pytest.raises(PathsDiffer, match="took different paths, and cannot meet") as caught:
        in_time(lambda: side_by_side(crew, [task] * 3))
    others = ", ".join(str(number) for number in range(3) if number != odd)
    assert f"micro-batch {odd} is at another" in str(caught.value)
    assert f"micro-batches {others} are at the second" in str(caught.value)
    assert works(crew)


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("early", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)])
def test_a_task_that_ends_early_is_reported(early: tuple[int, ...], after: int) -> None:
    """Whoever it is, and before the first meeting as well."""

    def task(worker: Worker) -> None:
        for at in range(after + 1):
            if worker.number in early and at == after:
                return
            worker.meet("the meeting", 0, sum)

    crew = Crew()
    with pytest.raises(PathsDiffer) as caught:
        in_time(lambda: side_by_side(crew, [task] * 3))
    told = "micro-batch {} is at" if len(early) == 1 else "micro-batches {} are at"
    assert f"{told.format(', '.join(map(str, early)))} its end" in str(caught.value)
    assert "at the meeting" in str(caught.value)
    assert works(crew)


@pytest.mark.parametrize("early", [0, 1, 2])
def test_a_task_that_ends_before_a_folded_meeting_is_reported(early: int) -> None:
    """Sums are folded as they come: one that is missing is missed, too."""

    def task(worker: Worker) -> None:
        if worker.number != early:
            worker.meet("the sum", 1, lambda values: values[0], lambda a, b: a + b)

    crew = Crew()
    with pytest.raises(PathsDiffer, match=f"micro-batch {early} is at its end"):
        in_time(lambda: side_by_side(crew, [task] * 3))
    assert works(crew)


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_values_of_different_meetings_are_not_folded(odd: int) -> None:
    """What one brings to another meeting fits no sum of this one: the paths are the error, not the sum."""

    def task(worker: Worker) -> None:
        if worker.number == odd:
            worker.meet("words", "a word", "".join)
        else:
            worker.meet("numbers", 1, lambda values: values[0], lambda a, b: a + b)

    crew = Crew()
    with pytest.raises(PathsDiffer, match=f"micro-batch {odd} is at words"):
        in_time(lambda: side_by_side(crew, [task] * 3))
    assert works(crew)


def test_one_task_alone_meets_itself() -> None:
    """Nobody to wait for."""
    assert in_time(lambda: side_by_side(Crew(), [lambda w: w.meet("it", 3, sum)])) == [3]


def test_a_crew_inside_of_another() -> None:
    """Its workers are its own."""

    def task(worker: Worker) -> list[int]:
        inner = side_by_side(Crew(), [lambda w: w.meet("inside", w.number + 1, sum)] * 2)
        return [*inner, worker.meet("outside", worker.number, sum)]

    assert in_time(lambda: side_by_side(Crew(), [task] * 2)) == [[3, 3, 1]] * 2


# What a worker's thread has of the caller's.

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="nothing")


def seen_by_workers(look: Callable[[], Result]) -> list[Result]:
    """Look on three workers, before and after a meeting."""

    def task(worker: Worker) -> list[Result]:
        first = look()
        worker.meet("it", 0, len)
        return [first, look()]

    return [each for found in side_by_side(Crew(), [task] * 3) for each in found]


def test_autocast_is_carried() -> None:
    """With its dtype, and with or without its cache of weights."""

    def look() -> tuple[bool, torch.dtype, bool, torch.dtype]:
        product = torch.ones(2, 2) @ torch.ones(2, 2)
        return (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
            product.dtype,
        )

    def work() -> None:
        for cached in (True, False):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
                assert seen_by_workers(look) == [(True, torch.bfloat16, cached, torch.bfloat16)] * 6
        assert [each[0] for each in seen_by_workers(look)] == [False] * 6

    in_time(work)


def test_grad_and_inference_mode_are_carried() -> None:
    """All three."""

    def look() -> tuple[bool, bool]:
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def work() -> None:
        assert seen_by_workers(look) == [(True, False)] * 6
        with torch.no_grad():
            assert seen_by_workers(look) == [(False, False)] * 6
        with torch.inference_mode():
            assert seen_by_workers(look) == [(False, True)] * 6
            assert seen_by_workers(torch.ones(1).is_inference) == [True] * 6

    in_time(work)


def test_context_variables_are_carried_and_stay_apart() -> None:
    """Each task has a copy: what one sets, neither the others nor the caller see."""

    def task(worker: Worker) -> list[str]:
        found = [variable.get()]
        variable.set(f"of {worker.number}")
        worker.meet("it", 0, len)
        return [*found, variable.get()]

    def work() -> None:
        variable.set("the caller's")
        assert side_by_side(Crew(), [task] * 3) == [["the caller's", f"of {number}"] for number in range(3)]
        assert variable.get() == "the caller's"

    in_time(work)


def test_saved_tensor_hooks_are_carried() -> None:
    """In their order, for what is saved and for what is taken back; the caller's stay in force."""
    packed: list[str] = []

    def pair(name: str) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        def pack(tensor: Tensor) -> Tensor:
            packed.append(f"pack {name}")
            return tensor * 2

        def unpack(tensor: Tensor) -> Tensor:
            packed.append(f"unpack {name}")
            return tensor / 2

        return pack, unpack

    def task(worker: Worker) -> float:
        x = torch.tensor(3.0, requires_grad=True)
        y = x.square()
        worker.meet("it", 0, len)
        y.backward()
        assert x.grad is not None
        return x.grad.item()

    def work() -> None:
        hooks = torch.autograd.graph.saved_tensors_hooks
        with hooks(*pair("outer")), hooks(*pair("inner")):
            assert side_by_side(Crew(), [task] * 2) == [6.0, 6.0]
            assert packed == ["pack inner"] * 2 + ["unpack inner"] * 2
            packed.clear()
            assert task(_Alone()) == 6.0
            assert packed == ["pack inner", "unpack inner"]
        packed.clear()
        with hooks(*pair("outer")):
            with hooks(*pair("inner")):
                side_by_side(Crew(), [lambda _: None])
            packed.clear()
            assert task(_Alone()) == 6.0
            assert packed == ["pack outer", "unpack outer"]
        packed.clear()
        task(_Alone())
        assert not packed

    in_time(work)


class _Alone(Worker):
    """Meets nobody."""

    def __init__(self) -> None:
        pass

    def meet(self, *_: Any) -> Any:
        """Go on."""
        return None


class _Counting(TorchFunctionMode):
    """Counts calls of functions."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count, and call."""
        del types
        self.calls.append(func.__name__)
        return func(*args, **(kwargs or {}))


class _Dispatching(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count, and call."""
        del types
        self.calls.append(str(func))
        return func(*args, **(kwargs or {}))


def test_function_and_dispatch_modes_are_carried() -> None:
    """They see what tasks do, and are out of force again for what the caller does afterwards."""
    counting, dispatching, ones = _Counting(), _Dispatching(), torch.ones(3)

    def work() -> None:
        with counting, dispatching:
            seen_by_workers(lambda: torch.add(ones, ones))
            assert counting.calls.count("add") == 6
            assert dispatching.calls.count("aten.add.Tensor") == 6
        torch.add(ones, ones)
        seen_by_workers(lambda: torch.add(ones, ones))
        assert counting.calls.count("add") == 6
        assert dispatching.calls.count("aten.add.Tensor") == 6

    in_time(work)


@pytest.fixture
def _device_of_the_compiler() -> Iterator[None]:
    """Torch keeps the default device once more, for its compiler, and for all threads."""
    before = _device.CURRENT_DEVICE
    yield
    _device.CURRENT_DEVICE = before


@pytest.mark.usefixtures("_device_of_the_compiler")
def test_the_default_device_is_carried() -> None:
    """As a `with`, and as set for the thread."""

    def work() -> None:
        with torch.device("meta"):
            assert seen_by_workers(lambda: torch.ones(1).device.type) == ["meta"] * 6
            assert torch.ones(1).device.type == "meta"
        assert seen_by_workers(lambda: torch.ones(1).device.type) == ["cpu"] * 6
        torch.set_default_device("meta")
        assert seen_by_workers(lambda: torch.ones(1).device.type) == ["meta"] * 6
        torch.set_default_device(None)
        assert torch.ones(1).device.type == "cpu"

    in_time(work)


@pytest.mark.usefixtures("_device_of_the_compiler")
def test_a_default_device_that_was_carried_is_gone_when_it_is_reset() -> None:
    """Also where torch keeps it for its compiler."""

    def work() -> None:
        torch.set_default_device("meta")
        try:
            seen_by_workers(lambda: None)
        finally:
            torch.set_default_device(None)

    before = _device.CURRENT_DEVICE
    in_time(work)
    assert before == _device.CURRENT_DEVICE


def test_what_a_task_leaves_behind_is_not_the_next_ones() -> None:
    """A thread serves again, in the state of whoever calls then."""
    crew = Crew()

    def untidy(worker: Worker) -> None:
        torch.set_grad_enabled(False)
        variable.set("left behind")
        worker.round.is_recomputing = True
        torch.set_autocast_enabled("cpu", True)

    def work() -> None:
        side_by_side(crew, [untidy] * 2)
        found = side_by_side(crew, [lambda w: (torch.is_grad_enabled(), variable.get(), w.round.is_recomputing)] * 2)
        assert found == [(True, "nothing", False)] * 2
        assert torch.is_grad_enabled()

    in_time(work)


def test_backward_runs_on_the_thread_of_its_task() -> None:
    """There it can wait for the others, as forward does."""

    class Meeting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, worker: Worker) -> Tensor:
            ctx.worker, ctx.thread = worker, threading.get_ident()
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
            assert threading.get_ident() == ctx.thread
            total: Tensor = ctx.worker.meet("backward", gradients[0], lambda values: torch.stack(values).sum(0))
            return total, None

    def task(worker: Worker) -> float:
        x = torch.tensor(1.0, requires_grad=True)
        y: Tensor = Meeting.apply(x, worker)  # type: ignore[no-untyped-call]
        worker.meet("the end of forward", 0, len)
        (y * (worker.number + 1)).backward()
        assert x.grad is not None
        return x.grad.item()

    assert in_time(lambda: side_by_side(Crew(), [task] * 3)) == [6.0] * 3


# Threads and memory.


def ours() -> list[threading.Thread]:
    """The threads of all crews."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("bigbatch-")]


def ended(threads: Sequence[threading.Thread]) -> bool:
    """Whether threads come to an end soon."""
    for thread in threads:
        thread.join(LIMIT)
    return not any(thread.is_alive() for thread in threads)


def test_threads_end_with_their_crew() -> None:
    """Dropped without a word, without a collection of garbage."""
    gc.collect()
    before = set(ours())
    crew: Crew | None = Crew()
    assert crew is not None
    assert set(ours()) == before  # none before the first task
    assert works(crew, 4)
    threads = list(set(ours()) - before)
    assert len(threads) == 4
    gc.disable()
    try:
        crew = None
        assert ended(threads)
    finally:
        gc.enable()
    assert not set(ours()) - before


def test_a_crew_that_failed_ends_as_well() -> None:
    """An error holds no crew, once it is gone."""
    gc.collect()
    before = set(ours())
    crew: Crew | None = Crew()
    assert crew is not None
    with pytest.raises(ValueError, match="of the task"):
        side_by_side(crew, [lambda _: fail(ValueError("of the task"))] * 3)
    threads = list(set(ours()) - before)
    assert len(threads) == 3
    crew = None
    assert ended(threads)


@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_while_a_thread_is_started_leaves_none(
    when: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that have started end with their crew; the next window works."""
    gc.collect()
    before = set(ours())
    crew = Crew()
    start = threading.Thread.start

    def interrupted(self: threading.Thread) -> None:
        if when == "after" or self.name != f"bigbatch-{number}":
            start(self)
        if self.name == f"bigbatch-{number}":
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        works(crew, 4)
    monkeypatch.undo()
    assert works(crew, 4)
    crew = None  # type: ignore[assignment]
    assert ended(list(set(ours()) - before))


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
        in_time(lambda: side_by_side(crew, [lambda w: w.number] * 5))
    assert works(crew, 2)
    monkeypatch.undo()
    assert works(crew, 5)


def test_results_and_values_are_held_by_nobody_else() -> None:
    """Threads that wait for the next round hold nothing of the last."""
    made: list[weakref.ref[Tensor]] = []

    def task(worker: Worker) -> Tensor:
        tensor = torch.full((4,), float(worker.number))
        made.append(weakref.ref(tensor))
        worker.round.shared.append((tensor, "it"))
        shared = worker.meet("it", tensor, torch.stack)
        made.append(weakref.ref(shared))
        return tensor

    crew = Crew()
    gc.disable()
    try:
        found = side_by_side(crew, [task] * 3)
        assert sum(ref() is not None for ref in made) == 3
        del found
        assert not any(ref() is not None for ref in made)
    finally:
        gc.enable()


def test_whoever_holds_a_worker_holds_nothing_of_its_round() -> None:
    """A graph that outlives its window has one; neither it nor a thread that waits keeps what the window had."""
    made: list[weakref.ref[Tensor]] = []
    workers: list[Worker] = []

    def task(worker: Worker) -> None:
        workers.append(worker)
        tensor = torch.ones(3)
        made.append(weakref.ref(tensor))
        worker.round.shared.append((tensor, "it"))
        worker.meet("it", tensor, lambda values: values[0] + 1)

    crew, carried = Crew(), Carried.here(CPU)
    held = weakref.ref(carried)
    gc.disable()
    try:
        crew.run([lambda: task(current())] * 3, carried, Round((1,) * 3))  # type: ignore[arg-type]
        del carried
        assert not any(ref() is not None for ref in made)
        workers.clear()
        assert held() is None
    finally:
        gc.enable()


def test_the_result_of_a_meeting_is_let_go_when_all_have_taken_it() -> None:
    """Not at the next one: there may be much to do in between."""
    made: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []

    def combine(values: list[int]) -> Tensor:
        found = torch.ones(len(values))
        made.append(weakref.ref(found))
        return found

    def task(worker: Worker) -> None:
        worker.meet("it", 0, combine)  # dropped at once
        alive.append(made[0]() is not None)

    in_time(lambda: side_by_side(Crew(), [task] * 3))
    assert alive == [True, True, False]


def test_a_thousand_rounds_leave_nothing_behind() -> None:
    """No thread, no tensor, no object more than after the first few; some of the rounds fail."""
    crew = Crew()
    made: list[weakref.ref[Tensor]] = []

    def task(worker: Worker) -> float:
        x = torch.ones(2, requires_grad=True)
        made.append(weakref.ref(x))
        total: Tensor = worker.meet("it", x, lambda values: torch.stack(values).sum(0))
        if f"{worker.number} fails" in worker.round.same_terms:
            fail(ValueError("of the task"))
        worker.meet("again", 0, len)
        total.sum().backward()
        return total.sum().item() / 2

    def rounds(number: int) -> None:
        for each in range(number):
            if each % 5:
                assert side_by_side(crew, [task] * 3) == [3.0] * 3
            else:
                with pytest.raises(ValueError, match="of the task"):
                    side_by_side(crew, [task] * 3, Round((1,) * 3, same_terms={f"{each % 3} fails"}))

    def work() -> None:
        rounds(10)
        gc.collect()
        made.clear()
        objects, threads = len(gc.get_objects()), set(threading.enumerate())
        for _ in range(10):
            rounds(99)
            gc.collect()
            assert not any(ref() is not None for ref in made)
            made.clear()
        assert set(threading.enumerate()) <= threads  # those of a test before may end meanwhile
        assert len(gc.get_objects()) <= objects + 50

    in_time(work, 60)


# Interrupts, forks and hangs: in a process of their own, with a limit.

_BEGINNING = """
import _thread, faulthandler, os, signal, sys, threading, time
import torch
from bigbatch.lockstep.round import Round
from bigbatch.lockstep.thread_state import Carried
from bigbatch.lockstep.round import Round
from bigbatch.lockstep.threads import Crew, current
faulthandler.dump_traceback_later(40, exit=True)
crew, here = Crew(), Carried.here(torch.device("cpu"))

def works():
    here = Carried.here(torch.device("cpu"))
    found = crew.run([lambda: current().meet("again", current().number, sum)] * 3, here, Round((1,) * 3))
    assert found == [3, 3, 3], found
"""


def in_a_process(script: str) -> str:
    """Run a script in a fresh interpreter; returns what it printed."""
    text = _BEGINNING + textwrap.dedent(script)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


_INTERRUPTED = """
for send in [SENDS]:
    for number in range(3):
        for times in (1, 2):
            ended, further = [], []

            def task():
                worker = current()
                try:
                    worker.meet("first", 0, len)
                    if worker.number == number:
                        for _ in range(times):
                            send()
                            time.sleep(0.3)  # the interrupt comes to the thread that waits, or it looks up
                    for _ in range(300):
                        worker.meet("further", 0, len)
                        further.append(worker.number)
                finally:
                    ended.append(worker.number)

            try:
                crew.run([task] * 3, here, Round((1,) * 3))
            except KeyboardInterrupt:
                assert sorted(ended) == [0, 1, 2], ended
                assert len(further) < 30, f"{len(further)} meetings more"
            else:
                raise AssertionError("nothing came out")
            works()
print("interrupted")
"""


def test_an_interrupt_ends_all_and_comes_out() -> None:
    """Ctrl-C in the thread that waits, while whichever task runs, also twice."""
    script = _INTERRUPTED.replace("SENDS", "lambda: os.kill(os.getpid(), signal.SIGINT)")
    assert in_a_process(script) == "interrupted\n"


def test_an_interrupt_at_any_line_of_waiting_leaves_no_task_running() -> None:
    """Wherever in the caller's part of a round it comes: when it is out no task runs, and the crew can be used."""
    printed = in_a_process("""
        import bigbatch.lockstep.threads as module
        waiting = {code.__code__ for code in (module.Crew.run, module._Turns.run, module._Turns._wait)}
        outcomes = []
        for line in range(60):
            at, came, running, closed = [0], [False], set(), []

            def trace(frame, event, argument):
                if frame.f_code not in waiting:
                    return None
                if event == "line":
                    at[0] += 1
                    if at[0] == line + 1:
                        came[0] = True
                        raise KeyboardInterrupt
                return trace

            def task():
                worker = current()
                running.add(worker.number)
                try:
                    for _ in range(20):
                        worker.meet("it", 0, len)
                        time.sleep(0.002)
                finally:
                    running.discard(worker.number)

            sys.settrace(trace)
            try:
                crew.run([task] * 2, here, Round((1,) * 2))
            except KeyboardInterrupt:
                sys.settrace(None)
                if running:
                    outcomes.append(f"line {line}: tasks {sorted(running)} still run")
                    time.sleep(1.0)
                    crew = Crew()
            finally:
                sys.settrace(None)
            if not came[0]:
                break
            try:
                works()
            except BaseException as error:
                outcomes.append(f"line {line}: cannot be used again: {error!r}")
                crew = Crew()
        assert 5 < line < 59, line
        print(outcomes)
    """)
    assert printed == "[]\n"


def test_no_path_hangs_nor_does_a_fork_nor_the_end_of_a_process() -> None:
    """Three tasks on any of ten paths of meetings, ends, errors and swallowed errors; then a fork; then the end.

    Threads do not live on in a forked process, and those that wait for work keep no process from ending, nor do tasks
    of a round that a daemon thread has begun.
    """
    printed = in_a_process("""
        import itertools
        from bigbatch.errors import PathsDiffer

        class Own(Exception):
            pass

        def act(worker, what):
            if what == "a":
                worker.meet("a", 1, sum)
            elif what == "b":
                worker.meet("b", 1, sum)
            elif what == "raise":
                raise Own
            elif what == "swallow":
                try:
                    worker.meet("a", 1, sum)
                except BaseException:
                    pass

        paths = [("a", "a"), ("a", "b"), ("b", "a"), ("a", "end"), ("end", "end"), ("raise", "end"), ("a", "raise"),
                 ("swallow", "a"), ("swallow", "swallow"), ("swallow", "raise")]
        count = 0
        for chosen in itertools.product(paths, repeat=3):
            def task():
                worker = current()
                for what in chosen[worker.number]:
                    if what == "end":
                        return "early"
                    act(worker, what)
                return "through"
            try:
                crew.run([task] * 3, here, Round((1,) * 3))
            except (Own, PathsDiffer):
                pass
            count += 1
        works()
        print(count, threading.active_count())
        child = os.fork()
        if not child:
            signal.alarm(20)
            works()
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        works()
        late = lambda: Crew().run([lambda: time.sleep(600)] * 2, here, Round((1,) * 2))
        threading.Thread(target=late, daemon=True).start()
        time.sleep(0.1)
        print("ended")
    """)
    assert printed == "1000 4\nended\n"
