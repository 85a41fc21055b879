"""Loaders: whatever yields micro-batches is trained to its end, also without a length."""

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from tests.support.samples import Batch
from tests.support.training import Training, micro_batches

BATCHES = micro_batches()  # of 3, 1, 4, 2, 5, 1 and 2 samples


class Stream(IterableDataset[Batch]):
    """A dataset without a length."""

    def __iter__(self) -> Iterator[Batch]:
        return iter(BATCHES)


class Sequenced:
    """Iterable by index alone, as old Python classes are."""

    def __getitem__(self, index: int) -> Batch:
        return BATCHES[index]


LOADERS: dict[str, Callable[[], Iterable[Any]]] = {
    "list": lambda: BATCHES,
    "tuple": lambda: tuple(BATCHES),
    "deque": lambda: deque(BATCHES),
    "iterator": lambda: iter(BATCHES),
    "generator": lambda: (batch for batch in BATCHES),
    "dict-values": lambda: dict(enumerate(BATCHES)).values(),
    "map": lambda: map(dict, BATCHES),
    "by-index": Sequenced,  # type: ignore[dict-item]  # Python iterates over it all the same
    "data-loader": lambda: DataLoader(BATCHES, batch_size=None),  # type: ignore[arg-type]  # a list is a dataset
    "stream-loader": lambda: DataLoader(Stream(), batch_size=None),
}


@pytest.mark.parametrize("loader", LOADERS.values(), ids=LOADERS)
def test_any_iterable_is_a_loader(loader: Callable[[], Iterable[Batch]]) -> None:
    """With or without a length: the last window, short and with a short micro-batch, is closed."""
    training = Training(steps=3)
    updates = training.train(loader())
    assert [update.micro_batches for update in updates] == [3, 3, 1]
    training.assert_big_batches(BATCHES[:3], BATCHES[3:6], BATCHES[6:])


def test_it_looks_one_batch_ahead_and_no_further() -> None:
    """Of a stream: nobody can tell its last batch otherwise."""
    source = iter(range(10))
    training = Training(steps=4)
    batches = iter(training.accumulator.over(source))
    assert [next(batches), next(batches)] == [0, 1]
    assert next(source) == 3


def test_an_empty_loader_makes_no_update() -> None:
    """No update and no error, and the next epoch is as ever."""
    training = Training(steps=3)
    assert training.train([]) == []
    assert training.accumulator.flush() is None
    training.assert_untouched()
    training.train(BATCHES)
    training.assert_big_batches(BATCHES[:3], BATCHES[3:6], BATCHES[6:])


def test_len_is_the_loaders() -> None:
    """`len` is forwarded, for progress bars."""
    accumulator = Training(steps=3).accumulator
    assert len(accumulator.over(BATCHES)) == 7
    assert len(accumulator.over(DataLoader(BATCHES, batch_size=None))) == 7  # type: ignore[arg-type]  # as above
    assert len(accumulator.over(accumulator.over(BATCHES))) == 7


@pytest.mark.parametrize("loader", ["generator", "stream-loader"])
def test_len_of_a_loader_without_one_is_a_type_error(loader: str) -> None:
    """As `len` of the loader itself."""
    with pytest.raises(TypeError, match="len"):
        len(Training(steps=3).accumulator.over(LOADERS[loader]()))


def test_a_loop_without_over() -> None:
    """Where the loader is not wrapped, `flush` ends the last window."""
    training = Training(steps=3)
    made = [training.backward(batch) for batch in BATCHES]
    assert [update is not None for update in made] == [False, False, True, False, False, True, False]
    assert training.accumulator.flush() is not None
    assert training.accumulator.flush() is None
    training.assert_big_batches(BATCHES[:3], BATCHES[3:6], BATCHES[6:])


class Sampled(list[Batch]):
    """A loader with attributes of its own."""

    batch_size = 7
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """As a distributed sampler has it."""
        self.epoch = epoch


def test_a_wrapped_loader_has_the_attributes_of_its_own() -> None:
    """`sampler`, `dataset`, `batch_size`, `set_epoch`: code that asks the loader may ask the wrapped one."""
    loader: DataLoader[Batch] = DataLoader(BATCHES, batch_size=None)  # type: ignore[arg-type]  # a list is a dataset
    wrapped = Training(steps=3).accumulator.over(loader)
    assert wrapped.dataset is BATCHES
    assert wrapped.sampler is loader.sampler
    other = Training(steps=3).accumulator.over(Training(steps=3).accumulator.over(Sampled(BATCHES)))
    assert other.batch_size == 7
    other.set_epoch(3)
    assert other.epoch == 3


def test_an_attribute_that_the_loader_lacks_is_named() -> None:
    """With the loader's type; and nothing private or special is looked for in it."""
    wrapped = Training(steps=3).accumulator.over(BATCHES)
    with pytest.raises(AttributeError, match="this loader is a list, which has no attribute 'sampler'"):
        _ = wrapped.sampler
    assert not hasattr(wrapped, "__array__")
    assert not hasattr(wrapped, "_index_sampler")
    assert copy.copy(wrapped).loop.last is False
