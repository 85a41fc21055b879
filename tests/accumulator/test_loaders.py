"""Loaders: whatever yields micro-batches is trained to its end; nothing is read ahead that could be lost."""

import copy
import gc
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from bigbatch import Accumulator
from bigbatch.errors import BatchError, WindowDisturbed, WindowError
from tests.support.reference import sgd, trained
from tests.support.samples import Batch
from tests.support.training import PLAIN, Training, micro_batches

BATCHES = micro_batches(case=PLAIN)  # of 3, 1, 4, 2, 5, 1 and 2 samples
WINDOWS = BATCHES[:3], BATCHES[3:6], BATCHES[6:]


class Plain:
    """A loader that tells nothing, and notes how many batches were read of it."""

    given = 0

    def __iter__(self) -> Iterator[Batch]:
        for self.given, batch in enumerate(BATCHES, 1):
            yield batch


class Sequenced(Plain):
    """A sequence whose length may be wrong."""

    def __init__(self, claimed: int = 7) -> None:
        self.claimed = claimed

    def __len__(self) -> int:
        return self.claimed

    def __getitem__(self, place: int) -> Batch:
        return BATCHES[place]


class Stateful(Plain, IterableDataset[Batch]):
    """It can be stopped and gone on with, as torchdata's StatefulDataLoader, or a dataset that knows where it is."""

    def __iter__(self) -> Iterator[Batch]:
        while self.given < len(BATCHES):
            self.given += 1
            yield BATCHES[self.given - 1]
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        """How many were given out."""
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on."""
        self.given = state["given"]


class Wrapped:
    """As tqdm wraps a loader."""

    def __init__(self, iterable: Stateful) -> None:
        self.iterable = iterable

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.iterable)


class ByIndex:
    """Iterable by index alone, as old Python classes are."""

    __getitem__ = BATCHES.__getitem__


LOADERS: dict[str, Callable[[], Iterable[Any]]] = {
    "list": lambda: BATCHES,
    "deque": lambda: deque(BATCHES),
    "iterator": lambda: iter(BATCHES),
    "generator": lambda: (batch for batch in BATCHES),
    "dict-values": lambda: dict(enumerate(BATCHES)).values(),
    "by-index": ByIndex,  # type: ignore[dict-item]  # Python iterates over it all the same
    "data-loader": lambda: DataLoader(BATCHES, batch_size=None),  # type: ignore[arg-type]  # a list is a dataset
    "stream-loader": lambda: DataLoader(Stateful(), batch_size=None),
    "too long": lambda: Sequenced(claimed=9),
}


@pytest.mark.parametrize("counts", [None, lambda batch: batch["value"].numel()], ids=["", "counts"])
@pytest.mark.parametrize("loader", LOADERS.values(), ids=LOADERS)
def test_any_iterable_is_a_loader(loader: Callable[[], Iterable[Batch]], counts: Any) -> None:
    """With or without a length, which may be too long; the last window, short, is closed, and a loader may be empty."""
    training = Training(steps=3, case=PLAIN, counts=counts)
    assert training.train([]) == []
    assert training.accumulator.flush() is None
    training.assert_untouched()
    assert [update.micro_batches for update in training.train(loader())][:2] == [3, 3]
    training.assert_big_batches(*WINDOWS)


@pytest.mark.parametrize("counts", [None, lambda batch: batch["value"].numel()])
def test_a_loader_with_more_batches_than_its_length_is_refused(counts: Any) -> None:
    """Its last window was closed; the error says what to type."""
    training = Training(steps=5, case=PLAIN, counts=counts)
    with pytest.raises(BatchError, match=r"(?s)a length of 5, and gave out more.*accumulator.over\(iter\(loader\)\)"):
        training.train(Sequenced(claimed=5))
    training.assert_big_batches(BATCHES[:5])
    assert training.accumulator.flush() is None


def test_a_wrapped_loader_has_the_length_and_attributes_of_its_own() -> None:
    """For progress bars, and for code that asks the loader; nothing private or special is looked for in it."""
    loader: DataLoader[Batch] = DataLoader(BATCHES, batch_size=None)  # type: ignore[arg-type]  # a list is a dataset
    accumulator = Training(steps=3).accumulator
    wrapped = accumulator.over(Training(steps=2).accumulator.over(loader))
    assert len(wrapped) == len(accumulator.over(BATCHES)) == 7
    assert wrapped.sampler is loader.sampler
    assert copy.copy(wrapped).loop.last is False
    wrapped = accumulator.over(iter(BATCHES))
    assert wrapped
    with pytest.raises(TypeError, match="len"):
        len(wrapped)
    with pytest.raises(AttributeError, match="this loader is a list_iterator, which has no attribute 'sampler'"):
        _ = wrapped.sampler
    assert not hasattr(wrapped, "__array__")
    assert not hasattr(wrapped, "__length_hint__")


@pytest.mark.parametrize(
    ("make", "ahead"), [(Plain, 1), (Sequenced, 0), (Stateful, 0), (lambda: Wrapped(Stateful()), 0)]
)
def test_what_is_read_ahead(make: Callable[[], Any], ahead: int) -> None:
    """One batch, where nothing else tells that it is the last; none of a loader that has a state of its own."""
    loader, training = make(), Training(steps=3, case=PLAIN)
    made = []
    for place, batch in enumerate(training.accumulator.over(loader), 1):
        assert getattr(loader, "iterable", loader).given == min(place + ahead, 7)
        made.append(training.backward(batch) is not None)
    assert made[:6] == [False, False, True] * 2
    assert made[6] is not isinstance(getattr(loader, "iterable", loader), Stateful)
    training.assert_big_batches(*WINDOWS)


@pytest.mark.parametrize("stop", [2, 3, 7])
@pytest.mark.parametrize("make", [Stateful, lambda: DataLoader(Stateful(), batch_size=None)])
def test_a_stateful_loader_resumes_bitwise(make: Callable[[], Any], stop: int) -> None:
    """A checkpoint that is taken inside the loop holds what was trained on, and no batch more."""
    whole, first, second = (Training(steps=3, case=PLAIN) for _ in range(3))
    whole.train(BATCHES)
    loader, other = make(), make()
    for place, batch in enumerate(first.accumulator.over(loader), 1):
        first.backward(batch)
        if place == stop:
            for old, new in zip(*([t.model, t.optimizer, t.accumulator] for t in (first, second)), strict=True):
                new.load_state_dict(copy.deepcopy(old.state_dict()))
            getattr(other, "dataset", other).load_state_dict(getattr(loader, "dataset", loader).state_dict())
            break
    second.train(other)
    assert all(torch.equal(a, b) for a, b in zip(second.weights, whole.weights, strict=True))


def failing_once(at: int, error: BaseException) -> Iterator[Batch]:
    """An iterator that fails at one batch, and gives it out when it is asked again."""
    left: list[Any] = [*BATCHES[:at], error, *BATCHES[at:], None]

    def take() -> Any:
        found = left.pop(0)
        if found is error:
            raise error
        return found

    return iter(take, None)


@pytest.mark.parametrize("error", [OSError("no such host"), KeyboardInterrupt()])
@pytest.mark.parametrize("at", [0, 1, 3, 6])
def test_a_loader_that_fails_once_loses_no_batch(at: int, error: BaseException) -> None:
    """Those before it are trained on first; then its error comes."""
    training, source = Training(steps=3, case=PLAIN), failing_once(at, error)
    with pytest.raises(type(error)):
        training.train(source)
    assert training.accumulator.remaining == 3 - at % 3 or isinstance(error, KeyboardInterrupt)
    state = training.accumulator.state_dict()
    training.accumulator.load_state_dict(state)  # the next loop goes on with the open window
    training.train(source)
    training.assert_big_batches(*WINDOWS)


@pytest.mark.parametrize("counts", [None, len])
@pytest.mark.parametrize("leaving", ["break", "exception"])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_an_iterator_that_is_left_goes_on_where_it_was(after: int, leaving: str, counts: Any) -> None:
    """What was read ahead comes first in the next `over` of the same iterator."""
    accumulator = Training(steps=2, counts=counts).accumulator
    source = iter([[place] for place in range(8)])
    seen: list[list[int]] = []

    def loop(number: int) -> None:
        for batch in accumulator.over(source):
            seen.append(batch)
            if len(seen) == number and leaving == "exception":
                raise KeyboardInterrupt
            if len(seen) == number:
                break

    for number in (after, after + 2, 100):
        with suppress(KeyboardInterrupt):
            loop(number)
    assert seen == [[place] for place in range(8)]


# Memory that is used again.


class Holding:
    """A batch that is an object, as those of graph libraries."""

    def __init__(self, value: Any, other: Any = None) -> None:
        self.value, self.other = value, other


KINDS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda value: value,
    "array": lambda value: value.numpy(),
    "object": Holding,
    "object in a list": lambda value: [Holding(value.numpy(), lambda: None)],
}


def ring(number: int, given: Iterable[float], pack: Callable[[Tensor], Any]) -> Iterator[Any]:
    """Give out batches of one value each, in so many buffers by turns."""
    buffers = [torch.zeros(2, 3, dtype=torch.float64) for _ in range(number)]
    for place, value in enumerate(given):
        buffers[place % number].fill_(value)
        yield pack(buffers[place % number])


def values_given(batches: Iterable[Any], steps: int, counts: Callable[[Any], Any] | None = None) -> list[float]:
    """The value of each batch at the time that `over` gives it out; the weights then get its update."""
    model = torch.nn.Linear(3, 1, dtype=torch.float64)
    accumulator = Accumulator(model, sgd(trained(model)), steps=steps, counts=counts)
    seen = []
    for batch in accumulator.over(batches):
        one = batch[0] if isinstance(batch, list) else batch
        value = torch.as_tensor(one.value if isinstance(one, Holding) else one)
        seen.append(value.flatten()[0].item())
        accumulator.backward(model(value).mean())
    return seen


@pytest.mark.parametrize("counts", [None, lambda _: 2])
@pytest.mark.parametrize("kind", KINDS)
def test_reused_memory_of_any_kind_is_refused(kind: str, counts: Callable[[Any], Any] | None) -> None:
    """Before a batch that was written over is given out, also where the first are alike; a long enough ring is not."""
    for given in ([0, 1, 2, 3], [0, 0, 0, 1, 2]):
        with pytest.raises(BatchError, match=r"(?s)over the one before.*copy.deepcopy"):
            values_given(ring(1, given, KINDS[kind]), 2, counts)
    assert values_given(ring(5, range(12), KINDS[kind]), 4, counts) == list(range(12))


def test_what_can_be_neither_copied_nor_compared_is_not_read_ahead() -> None:
    """So it does not matter whether it is written over."""
    assert values_given(ring(1, range(4), lambda value: Holding(value, threading.Lock())), 2) == list(range(4))


ANCHORS = torch.ones(3)
ROWS = [torch.ones(size, 3, dtype=torch.float64) for size in (1, 2)]
NO_REUSE: dict[str, Callable[[int], Any]] = {
    "sparse": lambda value: (torch.eye(3)[:2] * value).to_sparse(),
    "nested": lambda value: torch.nested.nested_tensor([row * value for row in ROWS], layout=torch.jagged),
    "with a leaf that all share": lambda value: (torch.full((2, 3), value % 2), ANCHORS),
    "the same": lambda _: BATCHES[0],  # to overfit one batch is no mistake
}


@pytest.mark.parametrize("counts", [None, lambda _: 2])
@pytest.mark.parametrize("kind", NO_REUSE)
def test_batches_that_are_no_reuse(kind: str, counts: Callable[[Any], Any] | None) -> None:
    """Those that cannot be compared, and those that come again: their last one is known."""
    model = torch.nn.Linear(3, 1)
    accumulator = Accumulator(model, sgd(trained(model)), steps=2, counts=counts)
    loader = map(NO_REUSE[kind], (1, 2, 3))
    made = [accumulator.backward(model(ANCHORS).sum()) for _ in accumulator.over(loader)]
    assert [update is not None for update in made] == [False, True, True]


# Loops that outlive themselves, or have a backward of their own.


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


@pytest.mark.parametrize("counts", [None, lambda batch: batch["value"].numel()])
@pytest.mark.parametrize("number", [1, 7])
def test_a_loop_that_steps_by_itself_is_noticed(number: int, counts: Callable[[Any], Any] | None) -> None:
    """Our backward was forgotten, and nothing is left in `.grad`; a batch that was not given out comes first again."""
    training, source = Training(steps=2, case=PLAIN, counts=counts), iter(BATCHES[:number])

    def by_hand() -> None:
        for batch in training.accumulator.over(source):
            training.case.loss(training.model, batch).backward()
            training.optimizer.step()
            training.optimizer.zero_grad()

    with pytest.raises(WindowDisturbed, match=r"(?s)optimizer.step\(\) was called.*accumulator.backward\(loss\)"):
        by_hand()
    rest = list(training.accumulator.over(source))
    assert [batch is one for batch, one in zip(rest, BATCHES[1:number], strict=True)] == [True] * (number - 1)
