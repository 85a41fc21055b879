"""One pass over the samples of a `Setup`, micro-batch by micro-batch; what was given out first can be had again."""

import dataclasses
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

from torch.utils.data import default_collate

from bigbatch.recipes.sharing import Share
from bigbatch.recipes.user_code import calling
from bigbatch.setup import Setup


class Feed:
    """The samples of one epoch, in lists: each is a micro-batch that is not made yet."""

    def __init__(self, setup: Setup, share: Share | None, epoch: int) -> None:
        """Read nothing yet; of several ranks, each has its `share`."""
        self._collate: Callable[[list[Any]], Any] = setup.collate or default_collate
        self._epoch = epoch
        self._size = setup.batch_size if share is None else share.samples
        lists = dataclasses.replace(setup, collate=list)
        self._lists = self._named(lambda: lists.micro_batches() if share is None else share.micro_batches())
        self._first: list[list[Any]] | None = []  # those given out while it is not settled how they are used
        self._ahead: list[list[Any]] = []

    def is_empty(self) -> bool:
        """Whether there is no sample, or no more."""
        if not self._ahead:
            self._ahead = list(islice(self._lists, 1))
        return not self._ahead

    def settle(self) -> None:
        """Keep no more of what is given out."""
        self._first = None

    def micro_batches(self) -> Iterator[Any]:
        """Make one after the other."""
        while not self.is_empty():
            samples = self._ahead.pop()
            if self._first is not None:
                self._first.append(samples)
            with self._naming():
                batch = self._collate(samples)
            yield batch

    def batches(self) -> Iterator[list[Any]]:
        """Give the samples of one whole batch after the other, from the first on that was not settled."""
        lists = chain(self._first or (), self._ahead, self._lists)
        self._first, self._ahead = None, []
        samples = chain.from_iterable(lists)
        while batch := list(islice(samples, self._size)):
            yield batch

    def _named(self, made: Callable[[], Any]) -> Iterator[list[Any]]:
        with self._naming():
            yield from made()

    def _naming(self) -> Any:
        return calling("making a batch of data", f"in epoch {self._epoch}")
