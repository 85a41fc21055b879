"""One pass over the samples of a `Setup`, micro-batch by micro-batch; what was given out first can be had again."""

import dataclasses
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

from torch.utils.data import default_collate

from bigbatch.recipes.user_code import calling
from bigbatch.setup import Setup


class Feed:
    """The samples of one epoch, in lists: each is a micro-batch that is not made yet."""

    def __init__(self, setup: Setup, epoch: int) -> None:
        """Read nothing yet."""
        self._collate: Callable[[list[Any]], Any] = setup.collate or default_collate
        self._epoch = epoch
        self._size = setup.batch_size
        self._lists = self._named(dataclasses.replace(setup, collate=list))
        self._first: list[list[Any]] | None = []  # those given out while it is not settled how they are used

    def settle(self) -> None:
        """Keep no more of what is given out."""
        self._first = None

    def micro_batches(self) -> Iterator[Any]:
        """Make one after the other."""
        for samples in self._lists:
            if self._first is not None:
                self._first.append(samples)
            with self._naming():
                batch = self._collate(samples)
            yield batch

    def batches(self) -> Iterator[list[Any]]:
        """Give the samples of one whole batch after the other, from the first on that was not settled."""
        samples = chain.from_iterable(chain(self._first or (), self._lists))
        self._first = None
        while batch := list(islice(samples, self._size)):
            yield batch

    def _named(self, lists: Setup) -> Iterator[list[Any]]:
        with self._naming():
            yield from lists.micro_batches()

    def _naming(self) -> Any:
        return calling("making a batch of data", f"in epoch {self._epoch}")
