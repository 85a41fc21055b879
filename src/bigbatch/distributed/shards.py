"""Models that are sharded with `fully_shard` (FSDP2): every pass through them is a collective of all ranks.

Gradients are reduced and sharded in every backward, so what ranks weigh their losses with must be in one unit, and all
must make as many passes. Nothing is averaged on the way: weights say it all. Which ranks they are, and so who has
samples of its own, is known from the mesh that `fully_shard` got.
"""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from bigbatch.distributed import fsdp_internals as fsdp
from bigbatch.distributed.ranks import Ranks, naming_lost_ranks
from bigbatch.distributed.replicas import add_up, refuse_hooks
from bigbatch.distributed.statement import Statement, Words
from bigbatch.distributed.team import adding_zeros, restore_after
from bigbatch.errors import ConfigurationError, WindowError
from bigbatch.loss.count import Count

if TYPE_CHECKING:
    from bigbatch.window.gradients import Gradients


class Shards(Ranks):
    """Processes that hold a part of the model each: all that `fully_shard` has made of it."""

    sharded = in_common = True

    def __init__(self, parts: Sequence[Any], *, overlap: bool = False) -> None:
        """Find out who they are."""
        self._parts = parts
        self._groups = [group for part in parts for group in fsdp.groups_of(part)]
        super().__init__(fsdp.flat(_one_mesh(self._groups)))
        self.within: dist.ProcessGroup = self._groups[0].mesh_info.shard_process_group  # the ranks of one replica
        self.device = torch.device(self._groups[0].device)  # where they compute; shards may wait in host memory
        self.overlap, self._last = overlap, False  # whether the next backward is the window's last
        self._apart = None if overlap else fsdp.replicas_of(self._groups)  # added up when the window closes

    def serve(self, owner: object) -> None:
        """Begin: nothing is averaged on the way while `owner` lives, since weights say it all."""
        super().serve(owner)
        for part in self._parts:
            fsdp.set_average(part, averages=False)
            restore_after(owner, part, partial(fsdp.set_average, averages=True))

    def prepare(self, *, last: bool) -> None:
        """Before a forward: say whether its backward is the window's last."""
        self._last = last

    @contextmanager
    def around_backward(self, own: Sequence[Tensor], *, adds: bool) -> Iterator[None]:
        """Have a backward inside reduce the shards of some parameters, or keep their gradients whole."""
        reduces = self._last or not self.overlap
        before = _versions(own) if reduces else []
        fsdp.reduce_in_backward(self._groups, set(map(id, own)), reduces=reduces)
        with (
            naming_lost_ranks(),
            nullcontext() if self._apart is None else fsdp.within_a_replica(self._groups),
            nullcontext() if adds else adding_zeros(fsdp.whole_weights(self._parts)),
        ):
            yield
        self.holds_back = not reduces
        if reduces:
            fsdp.reduce_left(self._parts)
            both = zip(before, _versions(own), strict=True)
            reached = bytes(now is not was or version != then for (was, then), (now, version) in both)
            self._reached = zlib.crc32(reached, self._reached)

    def open_window(self) -> None:
        """Begin a window, of which nothing was said yet."""
        super().open_window()
        self.holds_back = False

    def agree(self, mine: Statement, words: Words, gradients: "Gradients") -> Statement:
        """Check that backwards have reduced all, and agree; ranks of a replica have reached the same."""
        if self.holds_back:
            raise WindowError(
                "this window ends before its last backward, in which alone overlap=True reduces a sharded model.",
                fix="accumulator.discard(), then Accumulator(...) without overlap=True; or shorter windows by steps=",
            )
        refuse_hooks(found=any(getattr(group, "_all_reduce_hook", None) is not None for group in self._groups))
        replica = min(dist.get_process_group_ranks(self.group if self._apart is None else self.within))
        mine = mine._replace(reached=float(self._reached), replica=float(replica))
        self._reached = 0  # compared once, whatever comes of it
        return super().agree(mine, words, gradients)

    def reduce(self, gradients: "Gradients", correction: Count, agreement: Statement) -> Count:
        """Correct what backwards have added up; replicas of shards are added up here."""
        if self._apart is not None:
            add_up(self, self._apart, gradients, correction, agreement)
        else:
            gradients.scale(correction)
        return 1.0

    def norm(self, gradients: "Gradients") -> Tensor:
        """Return the norm of the whole gradient: over the ranks of one replica, which has all of it."""
        own = gradients.norm()
        square = own.to(self.wire(own.device), torch.float64).square()
        dist.all_reduce(square, group=self.within)
        return square.sqrt().to(gradients.device, own.dtype)

    def drop(self, own: Sequence[Tensor]) -> None:
        """Drop gradients that were kept whole and never reduced; all must drop what all have parts of."""
        if self.overlap:
            fsdp.drop_waiting(self._parts, set(map(id, own)))
        elif self._reached:
            self._reached = zlib.crc32(b"dropped", self._reached)


def _versions(parameters: Sequence[Tensor]) -> list[tuple[Tensor | None, int]]:
    """Return the gradients of some parameters, held so that no new one takes an old one's place, and their versions."""
    every = [None if p.grad is None else fsdp.local(p.grad) for p in parameters]
    return [(each, 0 if each is None else each._version) for each in every]  # noqa: SLF001 - torch's own counter


def _one_mesh(groups: Sequence[Any]) -> DeviceMesh:
    """Return the mesh that all of a model is sharded over."""
    meshes: list[DeviceMesh] = [group.mesh_info.mesh for group in groups]
    if len({(tuple(mesh.shape), *mesh.mesh.flatten().tolist()) for mesh in meshes}) != 1:
        fix = "the same mesh in every call:  fully_shard(part, mesh=mesh)"
        raise ConfigurationError("a model is sharded over one mesh.", found=f"{len(meshes)} parts: {meshes}", fix=fix)
    return meshes[0]
