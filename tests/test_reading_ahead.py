"""What `over` reads before it is asked for: nothing where the length tells, and nothing that is lost otherwise."""

import gc
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from bigbatch import Accumulator
from bigbatch.errors import BatchError, WindowDisturbed, WindowError
from tests.reference import sgd, trained
from tests.samples import Batch, mlp
from tests.training import PLAIN, Training, micro_batches

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


class StatefulSized(DataLoader[Batch]):
    """The same over a dataset with a length."""

    def __init__(self, batches: list[Batch]) -> None:
        super().__init__(batches, batch_size=None)  # type: ignore[arg-type]  # a list is a dataset
        self.inner = Stateful(batches)

    def __iter__(self) -> Any:
        """Give out what is left."""
        return iter(self.inner)

    def state_dict(self) -> dict[str, int]:
        """How many were given out."""
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on."""
        self.inner.load_state_dict(state)


class Stream(IterableDataset[Batch]):
    """A dataset without a length that knows where it is."""

    def __init__(self, batches: list[Batch]) -> None:
        self.inner = Stateful(batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.inner)

    def state_dict(self) -> dict[str, int]:
        """How many were given out."""
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on."""
        self.inner.load_state_dict(state)


def of_stream(batches: list[Batch]) -> tuple[Iterable[Batch], Any]:
    """A plain loader of a stream, and what is saved."""
    stream = Stream(batches)
    return DataLoader(stream, batch_size=None), stream


STATEFUL: dict[str, Callable[[list[Batch]], tuple[Iterable[Batch], Any]]] = {
    "unsized": lambda batches: (loader := Stateful(batches), loader),
    "sized": lambda batches: (loader := StatefulSized(batches), loader),
    "stream": of_stream,
}


@pytest.mark.parametrize("stop", [1, 2, 3, 6, 7])
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


SIZED: dict[str, Callable[[list[int]], Iterable[Any]]] = {
    "list": lambda numbers: numbers,
    "range": lambda numbers: range(len(numbers)),
    "keys": lambda numbers: dict.fromkeys(numbers).keys(),
    "data-loader": lambda numbers: DataLoader(numbers, batch_size=None),  # type: ignore[arg-type]
}


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


def test_a_loader_with_fewer_batches_than_its_length() -> None:
    """The last window is closed when it ends."""
    training = Training(steps=3, case=PLAIN)
    training.train(Watched(7, claimed=9))  # type: ignore[arg-type]
    training.assert_big_batches(BATCHES[:3], BATCHES[3:6], BATCHES[6:])


def test_a_loader_with_more_batches_than_its_length() -> None:
    """An error names the length, and what to type."""
    training = Training(steps=3, case=PLAIN)
    with pytest.raises(BatchError, match=r"(?s)a length of 5, and gave out more.*accumulator.over\(iter\(loader\)\)"):
        training.train(Watched(7, claimed=5))  # type: ignore[arg-type]
    training.assert_big_batches(BATCHES[:3], BATCHES[3:5])
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


def reusing(batches: list[Batch]) -> Iterator[Batch]:
    """Write every batch into the same memory, as loaders with pinned buffers do."""
    buffers = {name: torch.empty((8, *each.shape[1:]), dtype=each.dtype) for name, each in batches[0].items()}
    for batch in batches:
        size = len(next(iter(batch.values())))
        for name, each in batch.items():
            buffers[name][:size].numpy()[:] = each.numpy()  # no version tells
        yield {name: buffer[:size] for name, buffer in buffers.items()}


def test_a_loader_that_reuses_its_memory() -> None:
    """Each batch is trained on before the next is written over it."""
    training = Training(steps=3, case=PLAIN)
    training.train(reusing(BATCHES))
    training.assert_big_batches(BATCHES[:3], BATCHES[3:6], BATCHES[6:])


def test_a_loader_that_reuses_its_memory_cannot_be_counted_ahead() -> None:
    """It is said, with what to type."""
    training = Training(steps=3, case=PLAIN, counts=lambda batch: batch["value"].numel())
    with pytest.raises(BatchError, match=r"(?s)over the one before.*copy.deepcopy"):
        training.train(reusing(BATCHES))


def test_the_same_batch_again_is_no_reuse() -> None:
    """To overfit one batch is no mistake, and its last repetition is known."""
    training = Training(steps=2, case=PLAIN)
    assert len(training.train(itertools.repeat(BATCHES[0], 3))) == 2
    training.assert_big_batches([BATCHES[0]] * 2, [BATCHES[0]])


@pytest.mark.parametrize("loader", [(batch for batch in BATCHES), BATCHES, DataLoader(Stream(BATCHES))])
def test_a_wrapped_loader_is_true(loader: Any) -> None:
    """`if loader:` asks nothing that it does not know."""
    assert Training(steps=2).accumulator.over(loader)
    assert not Training(steps=2).accumulator.over([])


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


def test_a_step_of_the_users_own_beside_our_backward_is_theirs() -> None:
    """Between windows the optimizer is free, inside of `over`, too."""
    training = Training(steps=1, case=PLAIN)
    for batch in training.accumulator.over(BATCHES):
        training.backward(batch)
        training.optimizer.step()  # no gradients: nothing to do
    training.assert_big_batches(*([batch] for batch in BATCHES))
