"""Threads that take turns stay on one processor, where a window runs on a device."""

import os
import sys
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from bigbatch.lockstep import thread_state as one_core
from bigbatch.lockstep.round import Round
from bigbatch.lockstep.thread_state import Carried
from bigbatch.lockstep.threads import Crew, current

needs_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems have no such calls")


def places(crew: Crew, carried: Any) -> list[set[int]]:
    """Return where each of three tasks may run, after they have met."""

    def task() -> set[int]:
        worker = current()
        assert worker is not None
        worker.meet("here", 0, len)
        return os.sched_getaffinity(0)

    return crew.run([task] * 3, carried, Round((1,) * 3))


@needs_linux
def test_on_a_device_all_turns_are_on_one_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's own; the caller itself, torch's own threads and windows on a processor go where they like."""
    before = os.sched_getaffinity(0)
    crew, plain = Crew(), Carried.here(torch.device("cpu"))
    assert places(crew, plain) == [before] * 3
    elsewhere: Any = object()  # a stream, for whoever asks whether there is one
    there = plain.there
    monkeypatch.setattr(Carried, "there", lambda _: there())
    (here,) = {frozenset(each) for each in places(crew, replace(plain, stream=elsewhere))}
    assert len(here) == 1
    assert here <= before
    assert places(crew, plain) == [before] * 3
    assert os.sched_getaffinity(0) == before


@needs_linux
def test_where_this_thread_runs() -> None:
    """Of a thread with one place to be, that one; a name with brackets and spaces does not matter."""
    found: list[int | None] = []

    def stay() -> None:
        with one_core.staying_on(max(os.sched_getaffinity(0))):
            found.append(one_core.this_processor())

    thread = threading.Thread(target=stay, name="a) b (c")
    thread.start()
    thread.join()
    assert found == [max(os.sched_getaffinity(0))]


def test_a_system_that_does_not_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """There threads go where they like."""
    monkeypatch.setattr(one_core, "_STAT", tmp_path / "none")
    assert one_core.this_processor() is None
    monkeypatch.setattr(one_core, "_STAT", tmp_path / "odd")
    (tmp_path / "odd").write_text("1 (name) S 1 2 3")
    assert one_core.this_processor() is None


@needs_linux
def test_a_processor_that_may_not_be_used() -> None:
    """Is no error."""
    with one_core.staying_on(100_000):
        assert os.sched_getaffinity(0)


@needs_linux
def test_a_thread_that_takes_turns_waits_when_it_is_woken() -> None:
    """As a batch job does; the caller stays as it is."""

    def task() -> int:
        worker = current()
        assert worker is not None
        worker.meet("here", 0, len)
        return os.sched_getscheduler(0)

    before = os.sched_getscheduler(0)
    assert Crew().run([task] * 3, Carried.here(torch.device("cpu")), Round((1,) * 3)) == [os.SCHED_BATCH] * 3
    assert os.sched_getscheduler(0) == before
