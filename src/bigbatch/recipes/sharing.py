"""Every rank's part of the data: together they are the batches that one process would have made, sample by sample.

A batch of 64 over three ranks is 22, 21 and 21 samples, in the order that one process would have drawn; each rank cuts
its own part into micro-batches. No sample comes twice and none is left out: the last batch of an epoch, too, is cut
into parts that differ by one at most, and some may be empty.
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler, default_collate

from bigbatch.errors import BatchError, ConfigurationError
from bigbatch.recipes.launching import Place
from bigbatch.setup import Setup


class Share:
    """One rank's part of a `Setup`."""

    _meets = False  # whether ranks meet in the midst of a batch, of which each then needs a sample
    _fewest: int | None = None  # samples of the smallest batch so far

    def __init__(self, setup: Setup, place: Place) -> None:
        """See that all ranks have the same, and begin with the first rank's weights."""
        self._setup, self.place, self.batch_size = setup, place, setup.batch_size
        self._seen = (0, 0)  # of a stream: how many samples, and a checksum of them
        place.refuse_another_device(setup.model)
        self._refuse_unlike_data()
        self._send(setup.model.parameters())
        self._send(setup.model.buffers())

    @property
    def group(self) -> dist.ProcessGroup:
        """Who makes a big batch together."""
        group = dist.group.WORLD
        assert group is not None  # noqa: S101 - a place is one in it
        return group

    @property
    def micro_batch_size(self) -> int:
        """The most samples that go through the model at once, on this rank."""
        return max((len(part) for part in self.own_parts(range(self.batch_size))), default=0)

    @property
    def steps(self) -> int:
        """How many micro-batches this rank has of every whole batch."""
        return max(len(self.own_parts(range(self.batch_size))), 1)

    @property
    def samples(self) -> int:
        """How many samples this rank has of every whole batch."""
        return len(_even(self.batch_size, self.place.size)[self.place.rank])

    def micro_batches(self) -> Iterator[Any]:
        """One pass over this rank's part of the data."""
        state = torch.get_rng_state()
        dist.broadcast(state, 0, group=self.place.talk)
        torch.set_rng_state(state)  # the first rank's, which draws the order of all
        if isinstance(self._setup.data, IterableDataset):
            return self._of_a_stream()
        plain = replace(self._setup, micro_batch_size=None).micro_batches()
        loader = DataLoader(plain.dataset, batch_sampler=_Own(self, plain.sampler), collate_fn=plain.collate_fn)
        return iter(loader)

    def end_epoch(self) -> None:
        """See that all have read the same stream, and have the first rank's buffers, as DDP would."""
        self._refuse_unlike("a stream that differs from rank to rank", *self._seen)
        self._send(self._setup.model.buffers())

    def any_says(self, yes: bool) -> bool:  # noqa: FBT001 - what this rank says
        """Whether this rank or another one says so."""
        found = torch.tensor([int(yes)])
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.place.talk)
        return bool(found)

    def meet(self) -> None:
        """Have ranks meet in the midst of a batch; refuse one that leaves a rank none, once that is known."""
        self._meets = True
        data: Any = self._setup.data
        last = 0 if isinstance(data, IterableDataset) else len(data) % self.batch_size
        self._refuse_too_few(min(self.batch_size, last or self.batch_size, self._fewest or self.batch_size))

    def own_parts(self, batch: Sequence[Any]) -> list[list[Any]]:
        """This rank's micro-batches of one batch."""
        self._fewest = min(len(batch), self._fewest or len(batch))
        if self._meets:
            self._refuse_too_few(len(batch))
        own = _even(len(batch), self.place.size)[self.place.rank]
        most = self._setup.micro_batch_size or self.batch_size
        pieces = _even(len(own), -(-len(own) // most))
        return [[batch[own.start + place] for place in piece] for piece in pieces]

    def draw_apart(self) -> None:
        """Draw other random numbers than the first rank from here on: its dropout is not that of another."""
        if self.place.rank:
            shared = torch.Generator()
            shared.set_state(torch.get_rng_state())
            seeds = torch.randint(2**62, (self.place.size,), generator=shared)
            torch.manual_seed(int(seeds[self.place.rank]))

    def _of_a_stream(self) -> Iterator[Any]:
        """Every rank reads all of it, in step with the others whatever it draws meanwhile, and keeps its own part."""
        batches = DataLoader(self._setup.data, batch_size=self.batch_size, collate_fn=list)  # type: ignore[arg-type]
        collate = self._setup.collate or default_collate
        source, of_the_stream = iter(batches), torch.get_rng_state()
        self.draw_apart()
        while True:
            own = torch.get_rng_state()
            torch.set_rng_state(of_the_stream)
            batch = next(source, None)
            of_the_stream = torch.get_rng_state()
            torch.set_rng_state(of_the_stream if batch is None else own)
            if batch is None:
                return
            number, checksum = self._seen
            for sample in batch:
                checksum = zlib.crc32(repr(_looks(sample)).encode(), checksum)
            self._seen = (number + len(batch), checksum)
            yield from map(collate, self.own_parts(batch))

    def _refuse_too_few(self, samples: int) -> None:
        """Raise, on all ranks, where a batch has fewer samples than there are ranks."""
        if samples >= self.place.size:
            return
        whole = self.batch_size
        what, instead = f"a batch of {whole}", f"Take a larger batch_size, or start no more than {samples} ranks."
        if samples < whole:
            what = f"the last batch of an epoch, {samples} samples of {whole},"
            instead = f"Take another batch_size, or leave samples out:  data=Subset(data, range(len(data) - {samples}))"
        raise BatchError(
            f"{what} cannot be shared by {self.place.size} ranks: samples are coupled (BatchNorm in training mode, or "
            f"across in the loss or the model), and every rank needs one at least.\n{instead}"
        )

    def _refuse_unlike_data(self) -> None:
        data: Any = self._setup.data
        length = len(data) if not isinstance(data, IterableDataset) else 0
        sizes = [p.numel() for p in self._setup.model.parameters()]
        self._refuse_unlike("data of different lengths, or different models", length, len(sizes), sum(sizes))

    def _refuse_unlike(self, what: str, *numbers: int) -> None:
        """Raise, on all ranks, where one has other numbers."""
        found = torch.tensor([*numbers, *(-number for number in numbers)])
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.place.talk)
        most, least = found[: len(numbers)], -found[len(numbers) :]
        if not torch.equal(most, least):
            raise ConfigurationError(
                f"the ranks have {what}; every process runs setup() by itself, and is to find the same.\n"
                "Take what differs from a seed or sort it: the order of a set, of files in a folder. A stream is to "
                "give all of its samples to every rank, which keeps its part."
            )

    def _send(self, tensors: Iterable[Tensor]) -> None:
        """Give all ranks the first one's, as bytes, since not every backend knows every dtype."""
        for tensor in tensors:
            if tensor.numel():
                whole = tensor.detach().contiguous()
                dist.broadcast(whole.view(-1).view(torch.uint8), 0, group=self.group)
                if whole.data_ptr() != tensor.data_ptr():  # one that is laid out in another way
                    tensor.detach().copy_(whole)


class _Own(Sampler[list[int]]):
    """The micro-batches of one rank, by the numbers of their samples, in the order that all have drawn."""

    def __init__(self, share: Share, order: Any) -> None:
        self._share, self._order = share, order

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self._order)  # drawn here, when one process would
        self._share.draw_apart()
        size = self._share.batch_size
        for first in range(0, len(order), size):
            yield from self._share.own_parts(order[first : first + size])


def _even(number: int, parts: int) -> list[range]:
    """Cut so many things into parts that differ by one at most, the larger ones first."""
    whole, more = divmod(number, parts) if parts else (0, 0)
    starts = [part * whole + min(part, more) for part in range(parts + 1)]
    return [range(a, b) for a, b in pairwise(starts)]


def _looks(sample: Any) -> Any:
    """What can be told of a sample at a glance, to see whether ranks have the same one."""
    if isinstance(sample, Tensor):
        return tuple(sample.shape), str(sample.dtype), sample.detach().to(torch.complex128).sum().item()
    if isinstance(sample, Mapping):
        return [(name, _looks(each)) for name, each in sample.items()]
    if isinstance(sample, list | tuple):
        return [_looks(each) for each in sample]
    if isinstance(sample, str | bytes | int | float | None):
        return sample
    return (type(sample).__name__, float(sample.sum())) if hasattr(sample, "sum") else type(sample).__name__
