"""How ranks add up the gradients of a window: those of replicas of a model, or of its shards."""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bigbatch.distributed import fsdp_internals as fsdp
from bigbatch.distributed.ranks import Ranks, naming_lost_ranks
from bigbatch.distributed.statement import Statement, Words, bits_in_one
from bigbatch.distributed.team import adding_zeros, restore_after
from bigbatch.errors import ConfigurationError, WindowDisturbed, WindowError

if TYPE_CHECKING:
    from bigbatch.window.gradients import Gradients


class Replicas(Ranks):
    """Processes that hold the whole model each, in DistributedDataParallel or bare.

    Gradients are added up once per update, after all have agreed. With `overlap` DDP itself reduces them in a window's
    last backward, beside the computation. `models` are those whose weights nobody has sent to all.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        wrappers: Sequence[DistributedDataParallel],
        models: Sequence[nn.Module] = (),
        *,
        overlap: bool = False,
    ) -> None:
        super().__init__(group, wrappers, overlap=overlap)
        self._models = models

    def check_last_batch(self) -> None:
        """After a loop whose last batch had no backward: raise where DDP of others may wait inside of theirs."""
        if self.overlap:
            raise WindowError(
                "the last batch of `over` had no accumulator.backward(loss) on this rank, and with overlap=True others "
                "may wait for it inside of theirs. Nothing was stepped.",
                fix="Accumulator(...) without overlap=True, or leave batches out before accumulator.over(loader)",
            )

    def check_loss(self, dtype: torch.dtype) -> None:
        """Before a backward: raise where DDP would reduce in it by itself."""
        if not (self.overlap and self._last) and any(wrapper.require_backward_grad_sync for wrapper in self.wrappers):
            raise WindowDisturbed(
                "DistributedDataParallel would reduce in this backward: its flag require_backward_grad_sync was set, "
                "as by the end of a no_sync(). Nothing was added.",
                fix="the loop without no_sync(): DDP is kept quiet while this accumulator lives",
            )
        super().check_loss(dtype)

    @contextmanager
    def around_backward(self, own: Sequence[Tensor], *, adds: bool) -> Iterator[None]:
        """Have DDP reduce in a window's last backward."""
        with naming_lost_ranks(), nullcontext() if adds else adding_zeros(own):
            yield
        self.reduced = self.overlap and self._last

    def agree(self, mine: Statement, words: Words, gradients: "Gradients") -> Statement:
        """Check what is to be added up, or what DDP has, and agree, at first on the weights, too; then share buffers.

        They are the first rank's, as DDP's own forward sends them where it was told to.
        """
        if self.reduced:
            mine = mine._replace(reduced=bits_in_one(gradients.dense()))
        elif any(p.grad is not None and p.grad.is_sparse for p in gradients.parameters):
            raise ConfigurationError(
                "sparse gradients cannot be added up over ranks. Nothing was stepped.",
                fix="dense gradients, nn.Embedding(..., sparse=False)",
            )
        if not self.overlap:  # it takes some microseconds, and torch has no public name
            _refuse_hooks(each._get_ddp_logging_data().get("comm_hook") for each in self.wrappers)  # noqa: SLF001
        if not self.windows:
            frozen = (p for model in self._models for p in model.parameters() if not p.requires_grad)
            plain = [p for p in frozen if type(p) is nn.Parameter and p.is_floating_point() and p.element_size() > 1]
            mine = mine._replace(weights=bits_in_one([*gradients.parameters, *plain]))
        found = super().agree(mine, words, gradients)
        for wrapper in self.wrappers:  # before the step, which may fail on one rank: the others would wait here
            if wrapper.broadcast_buffers and wrapper.modules_buffers:
                wrapper._sync_buffers()  # noqa: SLF001 - no public name
        return found


class Shards(Ranks):
    """Processes that hold a part of the model each: all that `fully_shard` (FSDP2) has made of it.

    Every pass through it is a collective of all. Gradients are reduced and sharded in every backward, so what ranks
    weigh their losses with must be in one unit, and all must make as many passes. Nothing is averaged on the way:
    weights say it all. Which ranks they are, and so who has samples of its own, the mesh of `fully_shard` tells.
    """

    sharded = True

    def __init__(self, parts: Sequence[Any], *, overlap: bool = False) -> None:
        self._parts = parts
        self._groups = [group for part in parts for group in fsdp.groups_of(part)]
        meshes = [group.mesh_info.mesh for group in self._groups]
        if len({(tuple(mesh.shape), *mesh.mesh.flatten().tolist()) for mesh in meshes}) != 1:
            found, fix = f"{len(meshes)} parts: {meshes}", "the same mesh in every call:  fully_shard(part, mesh=mesh)"
            raise ConfigurationError("a model is sharded over one mesh.", found=found, fix=fix)
        super().__init__(fsdp.flat(meshes[0]), overlap=overlap)
        self.within: dist.ProcessGroup = self._groups[0].mesh_info.shard_process_group  # the ranks of one replica
        self.device = torch.device(self._groups[0].device)  # where they compute; shards may wait in host memory
        self.apart = None if overlap else fsdp.replicas_of(self._groups)

    def serve(self, owner: object) -> None:
        """Begin: nothing is averaged on the way while `owner` lives, since weights say it all."""
        super().serve(owner)
        for part in self._parts:
            fsdp.set_average(part, averages=False)
            restore_after(owner, part, partial(fsdp.set_average, averages=True))

    @contextmanager
    def around_backward(self, own: Sequence[Tensor], *, adds: bool) -> Iterator[None]:
        """Have a backward inside reduce the shards of some parameters, or keep their gradients whole."""
        reduces = self._last or not self.overlap
        before = _versions(own) if reduces else []
        fsdp.reduce_in_backward(self._groups, set(map(id, own)), reduces=reduces)
        with (
            naming_lost_ranks(),
            nullcontext() if self.apart is None else fsdp.within_a_replica(self._groups),
            nullcontext() if adds else adding_zeros(fsdp.whole_weights(self._parts)),
        ):
            yield
        self.holds_back = not reduces
        if reduces:
            fsdp.reduce_left(self._parts)
            both = zip(before, _versions(own), strict=True)
            reached = bytes(now is not was or version != then for (was, then), (now, version) in both)
            self._reached = zlib.crc32(reached, self._reached)

    def agree(self, mine: Statement, words: Words, gradients: "Gradients") -> Statement:
        """Check that backwards have reduced all, and agree; ranks of a replica have reached the same."""
        if self.holds_back:
            raise WindowError(
                "this window ends before its last backward, in which alone overlap=True reduces a sharded model.",
                fix="accumulator.discard(), then Accumulator(...) without overlap=True; or shorter windows by steps=",
            )
        _refuse_hooks(getattr(group, "_all_reduce_hook", None) for group in self._groups)
        replica = min(dist.get_process_group_ranks(self.group if self.apart is None else self.within))
        mine = mine._replace(reached=float(self._reached), replica=float(replica))
        self._reached = 0  # compared once, whatever comes of it
        return super().agree(mine, words, gradients)

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


def _refuse_hooks(hooks: Iterator[object]) -> None:
    if any(hooks):
        raise ConfigurationError(
            "the model has a communication hook, and bigbatch adds up gradients without it.",
            fix="the model without a hook; or, with DDP, Accumulator(..., overlap=True), which has DDP reduce",
        )
