"""What `over` reads before it is asked for: nothing where the length tells, and nothing that is lost otherwise."""

import gc
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from bigbatch import Accumulator
from bigbatch.errors import BatchError, WindowDisturbed, WindowError
from tests.support.reference import sgd, trained
from tests.support.samples import Batch, mlp
from tests.support.training import PLAIN, Training, micro_batches

BATCHES = micro_batches(case=PLAIN)  # of 3, 1, 4, 2, 5, 1 and 2 samples


class Stateful:
    """A loader that can be stopped and gone on with, as torchdata's StatefulDataLoader."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches, self.given = batches, 0

    def __iter__(self) -> Iterator[Batch]:
        """Give out what is left."""
        while self.given < len(self.batches):
            self.given += 1
            yield self.batches[self.given - 1]
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        """How many were given out."""
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on."""
        self.given = state["given"]


class Stream(Stateful, IterableDataset[Batch]):
    """A dataset without a length that knows where it is."""


def of_stream(batches: list[Batch]) -> tuple[Iterable[Batch], Any]:
    """A plain loader of a stream, and what is saved."""
    stream = Stream(batches)
    return DataLoader(stream, batch_size=None), stream


STATEFUL: dict[str, Callable[[list[Batch]], tuple[Iterable[Batch], Any]]] = {
    "unsized": lambda batches: (loader := Stateful(batches), loader),
    "stream": of_stream,
}


@pytest.mark.parametrize("stop", [2, 3, 7])
@pytest.mark.parametrize("kind", STATEFUL)
def test_a_stateful_loader_resumes_bitwise(kind: str, stop: int) -> None:
    """A checkpoint that is taken inside the loop holds what was trained on, and no batch more."""
    whole, first, second = (Training(steps=3, case=PLAIN) for _ in range(3))
    whole.train(BATCHES)
    loader, stateful = STATEFUL[kind](BATCHES)
    saved: dict[str, Any] = {}
    for place, batch in enumerate(first.accumulator.over(loader), 1):
        first.backward(batch)
        if place == stop:
            saved = {
                "model": {name: each.clone() for name, each in first.model.state_dict().items()},
                "optimizer": first.optimizer.state_dict(),
                "accumulator": first.accumulator.state_dict(),
                "loader": dict(stateful.state_dict()),
            }
            break
    first.accumulator.discard()
    second.model.load_state_dict(saved["model"])
    second.optimizer.load_state_dict(saved["optimizer"])
    second.accumulator.load_state_dict(saved["accumulator"])
    loader, stateful = STATEFUL[kind](BATCHES)
    stateful.load_state_dict(saved["loader"])
    second.train(loader)
    assert all(torch.equal(a, b) for a, b in zip(second.weights, whole.weights, strict=True))


class Watched:
    """A sequence that notes what was read of it."""

    def __init__(self, length: int, claimed: int | None = None) -> None:
        self.length, self.claimed = length, length if claimed is None else claimed
        self.seen: list[int] = []

    def __len__(self) -> int:
        return self.claimed

    def __getitem__(self, place: int) -> Batch:
        if place >= self.length:
            raise IndexError
        self.seen.append(place)
        return BATCHES[place]


def test_a_loader_with_a_length_is_not_read_ahead() -> None:
    """The last batch is known all the same: its backward returns the Update."""
    loader, training = Watched(7), Training(steps=3, case=PLAIN)
    made = []
    batches: Any = training.accumulator.over(loader)  # type: ignore[arg-type]
    for place, batch in enumerate(batches):
        assert loader.seen == list(range(place + 1))
        made.append(training.backward(batch))
    assert [update is not None for update in made] == [False, False, True, False, False, True, True]
    training.assert_big_batches(BATCHES[:3], BATCHES[3:6], BATCHES[6:])


@pytest.mark.parametrize("counts", [None, lambda batch: batch["value"].numel()])
def test_a_loader_whose_length_is_wrong(counts: Callable[[Any], Any] | None) -> None:
    """With fewer batches the last window is closed at the end; more are an error that says what to type."""
    training = Training(steps=3, case=PLAIN, counts=counts)
    training.train(Watched(7, claimed=9))  # type: ignore[arg-type]
    training.assert_big_batches(BATCHES[:3], BATCHES[3:6], BATCHES[6:])
    training = Training(steps=5, case=PLAIN, counts=counts)
    with pytest.raises(BatchError, match=r"(?s)a length of 5, and gave out more.*accumulator.over\(iter\(loader\)\)"):
        training.train(Watched(7, claimed=5))  # type: ignore[arg-type]
    training.assert_big_batches(BATCHES[:5])
    assert training.accumulator.flush() is None


@pytest.mark.parametrize("counts", [None, len])
@pytest.mark.parametrize("leaving", ["break", "exception"])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_an_iterator_that_is_left_goes_on_where_it_was(
    after: int, leaving: str, counts: Callable[[Any], int] | None
) -> None:
    """What was read ahead comes first in the next `over` of the same iterator."""
    model = mlp()()
    accumulator = Accumulator(model, sgd(trained(model)), steps=2, counts=counts)
    source = iter([[place] for place in range(8)])
    seen: list[list[int]] = []

    def loop(number: int) -> None:
        for batch in accumulator.over(source):
            seen.append(batch)
            if len(seen) == number:
                if leaving == "break":
                    break
                message = "the user's own"
                raise ValueError(message)

    for number in (after, after + 2, 100):
        if leaving == "break" or number == 100:
            loop(number)
        else:
            with pytest.raises(ValueError, match="own"):
                loop(number)
    assert seen == [[place] for place in range(8)]


class FailsOnce:
    """An iterator that fails at one batch, and gives it out when it is asked again."""

    def __init__(self, at: int, error: BaseException) -> None:
        self.place, self.at, self.error = -1, at, error

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self.place + 1 == self.at:
            self.at = -1
            raise self.error
        self.place += 1
        if self.place == len(BATCHES):
            raise StopIteration
        return BATCHES[self.place]


@pytest.mark.parametrize("error", [OSError("no such host"), KeyboardInterrupt()])
@pytest.mark.parametrize("at", [0, 1, 3, 6])
def test_a_loader_that_fails_once_loses_no_batch(at: int, error: BaseException) -> None:
    """Those before it are trained on first; then its error comes."""
    training, source = Training(steps=3, case=PLAIN), FailsOnce(at, error)
    made: list[Any] = []
    with pytest.raises(type(error)):
        made.extend(training.backward(batch) for batch in training.accumulator.over(source))
    state = training.accumulator.state_dict()
    training.accumulator.load_state_dict(state)  # the next loop goes on with the open window
    training.train(source)
    training.assert_big_batches(BATCHES[:3], BATCHES[3:6], BATCHES[6:])


def test_the_same_batch_again_is_no_reuse() -> None:
    """To overfit one batch is no mistake, and its last repetition is known."""
    training = Training(steps=2, case=PLAIN)
    assert len(training.train(itertools.repeat(BATCHES[0], 3))) == 2
    training.assert_big_batches([BATCHES[0]] * 2, [BATCHES[0]])


class Holding:
    """A batch that is an object, as those of graph libraries."""

    def __init__(self, value: Any, other: Any = None) -> None:
        self.value, self.other = value, other


def as_array(value: Tensor) -> Any:
    """The memory of a tensor, as numpy sees it."""
    return value.numpy()


KINDS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda value: value,
    "array": as_array,
    "object": Holding,
    "object in a list": lambda value: [Holding(value.numpy(), lambda: None)],
}


def ring(number: int, given: Iterable[float], pack: Callable[[Tensor], Any] = as_array) -> Iterator[Any]:
    """Give out batches of one value each, in so many buffers by turns."""
    buffers = [torch.zeros(2, 3, dtype=torch.float64) for _ in range(number)]
    for place, value in enumerate(given):
        buffer = buffers[place % number]
        buffer.numpy()[:] = value
        yield pack(buffer)


def values_given(batches: Iterable[Any], steps: int, counts: Callable[[Any], Any] | None = None) -> list[float]:
    """The value of each batch at the time that `over` gives it out; the weights then get its update."""
    model = torch.nn.Linear(3, 1, dtype=torch.float64)
    accumulator = Accumulator(model, sgd(trained(model)), steps=steps, counts=counts)
    seen = []
    for batch in accumulator.over(batches):
        one = batch[0] if isinstance(batch, list) else batch
        value = torch.as_tensor(one.value if isinstance(one, Holding) else one)
        seen.append(value.flatten()[0].item())
        accumulator.backward(model(value.nan_to_num()).mean())
    return seen


def with_lock(value: Tensor) -> Holding:
    """A batch that can be neither copied nor compared."""
    return Holding(value, threading.Lock())


@pytest.mark.parametrize("counts", [None, lambda _: 2])
@pytest.mark.parametrize("kind", KINDS)
def test_reused_memory_of_any_kind_is_refused(kind: str, counts: Callable[[Any], Any] | None) -> None:
    """Before a batch that was written over is given out, also where the first are alike; a long enough ring is not."""
    for given in ([0, 1, 2, 3], [0, 0, 0, 1, 2]):
        batches = ring(1, given, KINDS[kind])
        with pytest.raises(BatchError, match=r"(?s)over the one before.*copy.deepcopy"):
            values_given(batches, 2, counts)
    assert values_given(ring(5, range(12), KINDS[kind]), 4, counts) == list(range(12))
    assert values_given(ring(1, range(4), with_lock), 2) == list(range(4))  # not read ahead: nothing could be told


def sparse(value: float) -> Tensor:
    """A batch of mostly zeros."""
    return (torch.eye(3, dtype=torch.float64)[:2] * value).to_sparse()


def nested(value: float) -> Tensor:
    """A batch of two samples of different lengths."""
    rows = [torch.full((size, 3), value, dtype=torch.float64) for size in (1, 2)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


@pytest.mark.parametrize("counts", [None, lambda _: 2])
@pytest.mark.parametrize("make", [sparse, nested])
def test_batches_that_cannot_be_compared_are_read_ahead(
    make: Callable[[float], Tensor], counts: Callable[[Any], Any] | None
) -> None:
    """Their last one is known."""
    model = torch.nn.Linear(3, 1, dtype=torch.float64)
    accumulator = Accumulator(model, sgd(trained(model)), steps=2, counts=counts)
    made = []
    for batch in accumulator.over(make(value) for value in (1.0, 2.0, 3.0)):
        dense = batch.values() if batch.is_nested else batch.to_dense()
        made.append(accumulator.backward(model(dense).sum(), count="sum" if counts is None else None))
    assert [update is not None for update in made] == [False, True, True]


def test_a_leaf_that_all_batches_share_is_no_reuse() -> None:
    """Nor is a batch that comes twice in a window."""
    anchors, rows = torch.ones(3), [torch.full((2, 3), float(place), dtype=torch.float64) for place in range(2)]
    model = torch.nn.Linear(3, 1, dtype=torch.float64)
    accumulator = Accumulator(model, sgd(trained(model)), steps=4, counts=lambda batch: len(batch[0]))
    made = [
        accumulator.backward(model(row).mean()) for row, _ in accumulator.over((rows[i % 2], anchors) for i in range(6))
    ]
    assert [place for place, update in enumerate(made) if update is not None] == [3, 5]


class Wrapped:
    """As tqdm wraps a loader."""

    def __init__(self, iterable: Stateful) -> None:
        self.iterable = iterable

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.iterable)


def test_a_wrapped_stateful_loader_is_not_read_ahead() -> None:
    """Its state says what was trained on."""
    loader = Stateful(BATCHES)
    for place, _ in enumerate(Training(steps=3, case=PLAIN).accumulator.over(Wrapped(loader)), 1):
        assert loader.given == place


# Loops that outlive themselves.


def test_an_old_loop_ends_nothing_but_itself() -> None:
    """A notebook's traceback keeps the generator of a loop that failed, and drops it in the next loop."""
    training = Training(steps=2, case=PLAIN)
    old = iter(training.accumulator.over(BATCHES))
    training.backward(next(old))
    training.accumulator.discard()
    made = []
    for place, batch in enumerate(training.accumulator.over(BATCHES)):
        if place == 2:
            del old
            gc.collect()
        made.append(training.backward(batch))
        with pytest.raises(WindowError, match="second time for one batch"):
            training.backward(batch)
    assert [update is not None for update in made] == [False, True, False, True, False, True, True]
    training.assert_big_batches(BATCHES[:2], BATCHES[2:4], BATCHES[4:6], BATCHES[6:])


# Loops with a backward of their own.


def by_hand(training: Training, batch: Batch) -> Tensor:
    """As `accelerator.backward(loss); optimizer.step(); optimizer.zero_grad()`."""
    loss = training.case.loss(training.model, batch)
    loss.backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    return loss


@pytest.mark.parametrize("number", [1, 2])
def test_a_loop_that_steps_by_itself_is_noticed(number: int) -> None:
    """Our backward was forgotten, and nothing is left in `.grad`."""
    training = Training(steps=2, case=PLAIN)
    with pytest.raises(WindowDisturbed, match=r"(?s)optimizer.step\(\) was called.*accumulator.backward\(loss\)"):
        deque(by_hand(training, batch) for batch in training.accumulator.over(BATCHES[:number]))


@pytest.mark.parametrize("counts", [None, lambda batch: batch["value"].numel()])
def test_a_batch_that_was_not_given_out_is_not_lost(counts: Callable[[Any], Any] | None) -> None:
    """What `over` raises before a batch, the next `over` of the iterator begins with that batch."""
    training, source = Training(steps=2, case=PLAIN, counts=counts), iter(BATCHES)
    with pytest.raises(WindowDisturbed, match="was called"):
        deque(by_hand(training, batch) for batch in training.accumulator.over(source))
    rest = list(training.accumulator.over(source))
    assert [batch is one for batch, one in zip(rest, BATCHES[1:], strict=True)] == [True] * 6
