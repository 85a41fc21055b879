"""One of several processes that a launcher such as torchrun has started: its place, and how they end together."""

import os
import random
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from bigbatch.errors import BigBatchError, ConfigurationError, RankFailed
from bigbatch.ranks.launcher import is_of_the_wire, started

_OURS = "bigbatch"  # begins our keys in the launcher's store
_PATIENCE = timedelta(days=1)  # others wait for the first rank's evaluate() without a word
_HEARD = timedelta(seconds=10)  # that the rank that failed first has had its say


@dataclass(frozen=True)
class Place:
    """This process among those that train one model together."""

    rank: int
    size: int
    local: int
    """Its number on this machine, which is the number of its GPU."""
    store: Any
    """A torch.distributed.Store, which all can write to and read."""
    talk: dist.ProcessGroup
    """For short messages between processors; who waits here has patience."""

    @property
    def speaks(self) -> bool:
        """Whether this is the one that prints."""
        return self.rank == 0

    def refuse_another_device(self, model: torch.nn.Module) -> None:
        """Raise where a model lies on a GPU that another process has."""
        found = {p.device for p in model.parameters() if p.device.type == "cuda"}
        wrong = next((device for device in found if device.index != self.local), None)
        if wrong is None:
            return
        have = torch.cuda.device_count()
        advice = (
            'Write "cuda" without a number, which is each process\'s own:  model.to("cuda")'
            if self.local < have
            else f"Start as many processes as there are GPUs:  torchrun --nproc-per-node {have} ..."
        )
        raise ConfigurationError(
            f"the model of process {self.local} on this machine is on {wrong}, which belongs to process {wrong.index}."
            f"\n{advice}"
        )

    def wait_for_all(self) -> None:
        """Wait until every process has come here."""
        dist.barrier(group=self.talk)

    def fails_first(self) -> bool:
        """Whether no other rank has failed before; only the first says why, since the others follow from it."""
        try:
            return bool(self.store.add(f"{_OURS}/failed", 1) == 1)
        except Exception:  # noqa: BLE001 - whoever kept the store is gone, and so cannot have said anything
            return True

    def has_said_why(self) -> None:
        """Let the other ranks end: a launcher kills all as soon as one does."""
        with suppress(Exception):
            self.store.set(f"{_OURS}/said", "why")

    def wait_for_the_first(self) -> None:
        """Wait until the rank that failed first has said why, for a while."""
        with suppress(Exception):
            self.store.wait([f"{_OURS}/said"], _HEARD)


def joined(seed: int = 0) -> Place | None:
    """Join the processes that a launcher has started with this one; None where it has started no other.

    Every process has the same random numbers then, those of Python and NumPy too, so that all make the same data set.
    """
    if started() == 1:
        return None
    # As init_process_group does it; but the store is wanted here.
    store, rank, size = next(iter(rendezvous("env://")))
    local = int(os.environ.get("LOCAL_RANK", rank))
    cuda = torch.cuda.is_available()
    if cuda and local < torch.cuda.device_count():
        torch.cuda.set_device(local)  # so that "cuda" in the user's file is this process's own
    # Of the two, the one that fits a tensor's device; connections are made when first used.
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    talk = dist.new_group(backend="gloo", timeout=_PATIENCE)
    torch.manual_seed(seed)
    random.seed(seed)
    with suppress(ImportError):
        import numpy as np  # noqa: PLC0415 - where there is one

        np.random.seed(seed % 2**32)  # noqa: NPY002 - the one that a user's file draws from
    return Place(rank, size, local, store, talk)


def lost_connection(error: BaseException | None) -> BigBatchError | None:
    """Say what an exception means that comes of a process that is gone; None of any other."""
    while error is not None:
        if is_of_the_wire(error):
            line = (str(error).splitlines() or [type(error).__name__])[0].split(". This is")[0]
            return RankFailed(
                f"the connection to another rank was lost: {line}\n"
                "It has ended without a word, as when the system kills it for its memory; its machine's log tells why."
            )
        error = error.__cause__ or error.__context__
    return None
