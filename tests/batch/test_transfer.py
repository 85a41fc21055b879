"""Micro-batches on their way to the device: which one is out, and how many at once."""

from typing import Any

import pytest
import torch

from bigbatch.batch import transfer
from bigbatch.batch.batch import Batch
from bigbatch.batch.split import Division
from bigbatch.batch.transfer import Mover


def divided(number: int) -> Division:
    """A batch of so many micro-batches."""
    return Division.even(Batch.of(torch.zeros(number, 2)), 1)


def test_a_mover_knows_which_micro_batch_is_out() -> None:
    """None before the first and after the last: what fails then was none of them."""
    mover = Mover(torch.device("cpu"))
    assert mover.at is None
    assert [mover.at for _ in mover.micro_batches(divided(3))] == [0, 1, 2]
    assert mover.at is None


def test_what_all_share_is_moved_once() -> None:
    """And the samples each time."""
    batch = Batch.of({"x": torch.zeros(3, 2), "y": torch.zeros(3), "shared": torch.zeros(7)})
    made = list(Mover(torch.device("meta")).micro_batches(Division.even(batch, 1)))
    assert {each["x"].device.type for each in made} == {each["shared"].device.type for each in made} == {"meta"}
    assert [len({id(each[name]) for each in made}) for name in ("x", "shared")] == [3, 1]


def test_the_host_runs_eight_micro_batches_ahead_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the ninth is moved, it waits for the event that the first was used: for no stream, and no device."""
    said: list[str] = []

    class Event:
        made = 0

        def __init__(self) -> None:
            Event.made += 1
            self.number = Event.made

        def record(self, _stream: Any) -> None:
            said.append(f"{self.number} used")

        def synchronize(self) -> None:
            said.append(f"wait for {self.number}")

    class Stream:
        def wait_stream(self, _other: Any) -> None:
            """The device waits, not the host."""

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: Stream())
    mover: Any = Mover(torch.device("cpu"))
    mover._stream = Stream()
    for _ in mover.micro_batches(divided(20)):
        pass
    assert transfer._AHEAD == 8
    assert said[:8] == [f"{number} used" for number in range(1, 9)]
    waits = [f"wait for {number}" for number in range(1, 13)]
    assert said[8:] == [each for pair in zip(waits, [f"{n} used" for n in range(9, 21)], strict=True) for each in pair]
