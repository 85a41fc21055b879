"""Values of all ranks, where samples are coupled: what micro-batches make of theirs on each rank, put together.

Ranks that come to different meetings would send each other tensors of other sizes, and end in torch or never. So each
says first, in a message of its own, which meeting it has come to: where they differ, all raise.
"""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from bigbatch.distributed.ranks import Ranks, alike
from bigbatch.errors import PathsDiffer

_SHOWN = 200  # letters of a title


def announce(ranks: Ranks, title: str, device: torch.device) -> None:
    """Say which meeting this rank has come to; raise on all ranks where they have come to different ones."""
    if _is_the_same(ranks, title, device):
        return
    titles = _titles(ranks, title, device)
    ranks.spoken = True  # all have heard that something is wrong
    listed = "\n".join(f"    rank {rank} is at {each}" for rank, each in enumerate(titles))
    msg = (
        "the ranks of this window took different paths, and cannot meet:\n"
        f"{listed}\n"
        "All must run the same operations across micro-batches in the same order, also in backward. Look for an `if` "
        "on the rank or on the data, a layer that is skipped for some, or tensors of different shapes."
    )
    raise PathsDiffer(msg)


@contextmanager
def collective(ranks: Ranks, title: str, device: torch.device) -> Iterator[None]:
    """Inside, run a collective that all ranks run under one title, if any: they would take a message for a part of it.

    They wait for it as soon as the title was sent, so a rank that fails from then on cannot tell them.
    """
    was, ranks.elsewhere = ranks.elsewhere, True
    if title:
        announce(ranks, title, device)
    yield
    ranks.elsewhere = was


def _is_the_same(ranks: Ranks, title: str, device: torch.device) -> bool:
    """Whether all ranks have the same title, by four small numbers that are made of it, and their squares."""
    code = zlib.crc32(title.encode())
    numbers = [1.0 + (code >> shift & 255) for shift in (0, 8, 16, 24)]
    found = ranks.added([*numbers, *(number * number for number in numbers)], device, "meeting")
    return all(alike(ranks.size, found[place], found[place + 4]) for place in range(4))


def _titles(ranks: Ranks, title: str, device: torch.device) -> list[str]:
    """Return the titles of all ranks, where they are known to differ."""
    letters = title.encode("ascii", "replace")[:_SHOWN].ljust(_SHOWN)
    every = each(ranks, torch.tensor(list(letters), dtype=torch.uint8, device=device))
    return [bytes(row).decode("ascii").rstrip() for row in every.tolist()]


def numbers(ranks: Ranks, own: int, device: torch.device) -> list[int]:
    """Return one whole number of every rank, in their order."""
    row = torch.zeros(ranks.size, dtype=torch.int64, device=device)
    row[ranks.rank] = own
    dist.all_reduce(row, group=ranks.group)
    found: list[int] = row.tolist()
    return found


def summed(ranks: Ranks, own: Tensor, title: str = "") -> Tensor:
    """Add up a tensor over all ranks, who say the title of this meeting before, where it has one."""
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
    """Return the rows of all ranks, who say the title of this meeting before, and where this one's begin."""
    with collective(ranks, title, own.device):
        rows = numbers(ranks, own.shape[0], own.device)
        padded = own.new_zeros(max(rows), *own.shape[1:])
        padded[: own.shape[0]] = own.detach()
        every = each(ranks, padded)
    together = torch.cat([part[:number] for part, number in zip(every, rows, strict=True)])
    return together, sum(rows[: ranks.rank])
