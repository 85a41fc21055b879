"""Values of all ranks, where samples are coupled: what micro-batches make of theirs on each rank, put together."""

import torch
import torch.distributed as dist
from torch import Tensor

from bigbatch.ranks.ranks import Ranks


def numbers(ranks: Ranks, own: int, device: torch.device) -> list[int]:
    """Return one whole number of every rank, in their order."""
    row = torch.zeros(ranks.size, dtype=torch.int64, device=device)
    row[ranks.rank] = own
    dist.all_reduce(row, group=ranks.group)
    found: list[int] = row.tolist()
    return found


def summed(ranks: Ranks, own: Tensor) -> Tensor:
    """Add up a tensor over all ranks."""
    found = own.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(found, group=ranks.group)
    return found


def each(ranks: Ranks, own: Tensor) -> Tensor:
    """Return a tensor of every rank, stacked."""
    found = [torch.empty_like(own) for _ in range(ranks.size)]
    dist.all_gather(found, own.detach().contiguous(), group=ranks.group)
    return torch.stack(found)


def gathered(ranks: Ranks, own: Tensor) -> tuple[Tensor, int]:
    """Return the rows of all ranks, and where this one's begin."""
    rows = numbers(ranks, own.shape[0], own.device)
    padded = own.new_zeros(max(rows), *own.shape[1:])
    padded[: own.shape[0]] = own.detach()
    every = each(ranks, padded)
    together = torch.cat([part[:number] for part, number in zip(every, rows, strict=True)])
    return together, sum(rows[: ranks.rank])
