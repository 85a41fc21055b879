"""Values of all ranks, where samples are coupled: what micro-batches make of theirs on each rank, put together.

Ranks that come to different collectives would send each other tensors of other sizes, and end in torch or never. So
each says first, in a row of its own, which one it has come to: where they differ, all raise.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from bigbatch.distributed.ranks import Ranks


@contextmanager
def collective(ranks: Ranks, title: str, device: torch.device) -> Iterator[None]:
    """Inside, run a collective that all ranks run under one title, if any: they would take a message for a part of it.

    They wait for it as soon as the title was sent, so a rank that fails from then on cannot tell them.
    """
    was, ranks.elsewhere = ranks.elsewhere, True
    if title:
        ranks.announce(title, device)
    yield
    ranks.elsewhere = was


def numbers(ranks: Ranks, own: int, device: torch.device) -> list[int]:
    """Return one whole number of every rank, in their order."""
    row = torch.zeros(ranks.size, dtype=torch.int64, device=device)
    row[ranks.rank] = own
    dist.all_reduce(row, group=ranks.group)
    found: list[int] = row.tolist()
    return found


def summed(ranks: Ranks, own: Tensor, title: str = "") -> Tensor:
    """Add up a tensor over all ranks, who say the title of this collective before, where it has one."""
    with collective(ranks, title, own.device):
        found = own.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(found, group=ranks.group)
    return found


def each(ranks: Ranks, own: Tensor) -> Tensor:
    """Return a tensor of every rank, stacked."""
    found = [torch.empty_like(own) for _ in range(ranks.size)]
    dist.all_gather(found, own.detach().contiguous(), group=ranks.group)
    return torch.stack(found)


def gathered(ranks: Ranks, own: Tensor, title: str) -> tuple[Tensor, int]:
    """Return the rows of all ranks, who say the title of this collective before, and where this one's begin."""
    with collective(ranks, title, own.device):
        rows = numbers(ranks, own.shape[0], own.device)
        padded = own.new_zeros(max(rows), *own.shape[1:])
        padded[: own.shape[0]] = own.detach()
        every = each(ranks, padded)
    together = torch.cat([part[:number] for part, number in zip(every, rows, strict=True)])
    return together, sum(rows[: ranks.rank])
