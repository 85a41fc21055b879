"""Models that are sharded with `fully_shard` (FSDP2): every pass through them is a collective of all ranks.

Gradients are reduced and sharded in every backward, so what ranks weigh their losses with must be in one unit, and all
must make as many passes. Nothing is averaged on the way: weights say it all. Which ranks they are, and so who has
samples of its own, is known from the mesh that `fully_shard` got.
"""

import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from bigbatch.distributed.fsdp_internals import flat, groups_of, members, parameters_of, tensors_of, whole_weights
from bigbatch.distributed.hybrid import replicas_of, within_a_replica
from bigbatch.distributed.ranks import Ranks, naming_lost_ranks
from bigbatch.distributed.reached import Reached, adding_zeros
from bigbatch.distributed.replicas import add_up_corrected, refuse_rounded
from bigbatch.distributed.statement import Agreement, Row, Statement
from bigbatch.distributed.team import Gradients
from bigbatch.errors import ConfigurationError, RankFailed, WindowError
from bigbatch.loss.count import Count


class Shards(Ranks):
    """Processes that hold a part of the model each: all that `fully_shard` has made of it."""

    sharded = in_common = looks_ahead = True

    def __init__(self, parts: Sequence[Any], given: dist.ProcessGroup | None, *, overlap: bool = False) -> None:
        """Find out who they are; `given` by `group=` must say the same."""
        self._parts = parts
        self._groups = [group for part in parts for group in groups_of(part)]
        super().__init__(flat(_one_mesh(self._groups)))
        self.replicas = replicas_of(self._groups)
        self.within: dist.ProcessGroup = self._groups[0].mesh_info.shard_process_group  # the ranks of one replica
        self.device = self._wire = torch.device(self._groups[0].device)  # where they compute; shards may be elsewhere
        self.overlap, self._last = overlap, False  # whether the next backward is the window's last
        self._kept = False  # whether gradients are still whole, elsewhere
        self._digest = 0  # one number of all that backwards have reached since the ranks compared it
        if self._hooked():
            raise ConfigurationError(
                "this sharded model has an all-reduce hook, set_all_reduce_hook(...), which changes what ranks have "
                "added up.",
                fix='the model without it; for replicas of shards, fully_shard(model, mesh=mesh["replicas", "shards"])',
            )
        if given is not None and members(given) != members(self.group):
            raise ConfigurationError(
                f"fully_shard adds up this model's gradients over ranks {list(members(self.group))}, so those have "
                "samples of their own.",
                found=f"group= of ranks {list(members(given))}",
                fix="the model without group=",
            )

    def serve(self, owner: object) -> None:
        """Begin: nothing is averaged on the way while `owner` lives, since weights say it all."""
        super().serve(owner)
        _sum_only(self._parts)
        for part in self._parts:
            _owners[part] = _owners.get(part, 0) + 1
            weakref.finalize(owner, _average, weakref.ref(part))

    def wire(self, device: torch.device) -> torch.device:
        """Return where to send from: shards may wait in host memory, and their group may know no way from there."""
        del device
        return self._wire

    def prepare(self, *, last: bool) -> None:
        """Before a forward: say whether its backward is the window's last."""
        self._last = last

    @property
    def _reduces(self) -> bool:
        return self._last or not self.overlap

    @property
    def _apart(self) -> bool:
        """Whether replicas of shards are added up when the window closes, and not in a backward."""
        return self.replicas is not None and not self.overlap

    def _hooked(self) -> int:
        """Count groups that call a function of the user's own for what they have reduced."""
        return sum(getattr(group, "_all_reduce_hook", None) is not None for group in self._groups)

    def check_loss(self, dtype: torch.dtype) -> None:
        """Refuse a loss whose weight would be rounded."""
        refuse_rounded(dtype)

    def around_backward(self, own: Sequence[Tensor], *, adds: bool) -> AbstractContextManager[None]:
        """Have a backward inside reduce the shards of some parameters, or keep their gradients whole."""
        return self._around(own, adds=adds)

    @contextmanager
    def _around(self, own: Sequence[Tensor], *, adds: bool) -> Iterator[None]:
        reduces = self._reduces
        reached = Reached(own) if reduces else None
        mine = _ids(own)
        for group in self._groups:  # other accumulators may want theirs otherwise: this is said anew every time
            if any(id(each.sharded_param) in mine for each in group.fsdp_params):
                group.reduce_grads = group.all_reduce_grads = reduces
        with (
            naming_lost_ranks(),
            within_a_replica(self._groups) if self._apart else nullcontext(),
            nullcontext() if adds else adding_zeros(whole_weights(self._parts)),
        ):
            yield
        self._kept = not reduces
        if reached is not None:
            self._reduce_left()
            self._digest = zlib.crc32(reached.flags(), self._digest)

    def _reduce_left(self) -> None:
        """Reduce what was kept whole and not reached by the last backward: that of a model which it did not run."""
        for part in self._parts:
            if any(map(_waits, parameters_of([part]))):
                # What FSDP calls at the end of a backward, for all modules of a model at once.
                part._get_fsdp_state()._root_post_backward_final_callback()  # noqa: SLF001 - no public name

    @property
    def holds_back(self) -> bool:
        """Whether gradients are still whole, elsewhere: they are sharded in the last backward of the window."""
        return self._kept

    def open_window(self) -> None:
        """Begin a window, of which nothing was said yet."""
        super().open_window()
        self._kept = False

    def agree(self, mine: Agreement, statement: Callable[..., Statement], gradients: Gradients) -> Agreement:
        """Raise first where gradients are kept whole until a last backward that did not come."""
        if self._kept:
            raise WindowError(
                "this window ends before its last micro-batch, by flush() or a batch of `over` without a backward, and "
                "with overlap=True a sharded model reduces its gradients in the last backward alone. Nothing was "
                "stepped.",
                fix="Accumulator(...) without overlap=True, or accumulator.steps set before a shorter window. Drop "
                "this one:  accumulator.discard()",
            )
        return super().agree(mine, statement, gradients)

    def _completed(self, row: Row, gradients: Gradients) -> Row:
        digest, self._digest = self._digest, 0  # compared once, whatever comes of it
        return (
            super()
            ._completed(row, gradients)
            ._replace(
                reached=float(digest),
                replica=float(min(members(self.within if self._apart else self.group))),
                hooked=float(self._hooked()),
            )
        )

    def fail(self, device: torch.device) -> None:
        """Tell the others; what backwards have reached until now is compared no more."""
        self._digest = 0
        super().fail(device)

    def reduce(self, gradients: Gradients, correction: Count, agreement: Agreement) -> Count:
        """Correct what backwards have added up; replicas of shards are added up here."""
        if self._apart and self.replicas is not None:
            add_up_corrected(self, self.replicas, gradients, correction, agreement)
        else:
            gradients.scale(correction)
        return 1.0

    def norm(self, gradients: Gradients) -> Tensor:
        """Return the norm of the whole gradient: over the ranks of one replica, which has all of it."""
        own = gradients.norm()
        wire = self.wire(own.device)
        square = own.to(wire, torch.float32 if wire.type == "mps" else torch.float64).square()
        dist.all_reduce(square, group=self.within)
        return square.sqrt().to(gradients.device, own.dtype)

    def check_hooks(self, device: torch.device, *, failed: bool) -> None:
        """Raise where hooks have failed on another rank, which would leave this one waiting for its norm."""
        if self.failed_anywhere(here=failed, device=device) and not failed:
            raise RankFailed(
                "a before_step hook failed on another rank, and the norm of the gradient needs all of them. Nothing "
                "was stepped on any. The error is in that rank's own output."
            )

    def drop(self, own: Sequence[Tensor]) -> None:
        """Drop gradients that were kept whole and never reduced; all must drop what all have parts of."""
        if self.overlap:
            mine = _ids(own)
            for each in parameters_of(self._parts):
                if id(each.sharded_param) in mine:
                    _set_waiting(each, None)
                    for whole in tensors_of(each)[1:]:
                        whole.grad = None
        elif self._digest:
            self._digest = zlib.crc32(b"dropped", self._digest)


def _one_mesh(groups: Sequence[Any]) -> DeviceMesh:
    """Return the mesh that all of a model is sharded over."""
    found: dict[Any, DeviceMesh] = {}
    for group in groups:
        mesh: DeviceMesh = group.mesh_info.mesh
        found[tuple(mesh.shape), tuple(mesh.mesh.flatten().tolist())] = mesh
    if len(found) != 1:
        raise ConfigurationError(
            "a model is sharded over one mesh.",
            found=" and ".join(str(mesh) for mesh in found.values()) or "nothing",
            fix="the same mesh in every call:  fully_shard(part, mesh=mesh)",
        )
    (mesh,) = found.values()
    return mesh


def _ids(parameters: Iterable[Tensor]) -> set[int]:
    return {id(parameter) for parameter in parameters}


def _waits(each: Any) -> bool:
    """Whether a gradient of this parameter is kept whole."""
    return each.unsharded_accumulated_grad is not None or any(p.grad is not None for p in tensors_of(each)[1:])


def _set_waiting(each: Any, gradient: Tensor | None) -> None:
    """Set what a parameter has added up whole; from torch 2.15 on, that is the `.grad` of the whole one itself."""
    if not isinstance(getattr(type(each), "unsharded_accumulated_grad", None), property):
        each.unsharded_accumulated_grad = gradient


@contextmanager
def leaving_alone(parts: Iterable[Any], own: Iterable[Tensor]) -> Iterator[None]:
    """Inside, a backward reduces no group of parameters that has none of `own`, nor adds to what others have waiting.

    Their `.grad` is left to whoever calls this, that of whole ones, too.
    """
    mine = _ids(own)
    groups, waiting = [], []
    for group in (group for part in parts for group in groups_of(part)):
        others = [each for each in group.fsdp_params if id(each.sharded_param) not in mine]
        waiting += [(each, each.unsharded_accumulated_grad) for each in others]
        if len(others) == len(group.fsdp_params):
            groups.append((group, group.reduce_grads))
            group.reduce_grads = False
    for each, _ in waiting:
        _set_waiting(each, None)
    try:
        yield
    finally:
        for group, reduces in reversed(groups):  # modules that share a group name it twice
            group.reduce_grads = reduces
        for each, gradient in reversed(waiting):
            _set_waiting(each, gradient)


def _sum_only(parts: Sequence[Any]) -> None:
    """Have a reduction add up and not average."""
    for module in parts:
        module.set_gradient_divide_factor(1.0)
        if hasattr(module, "set_force_sum_reduction_for_comms"):  # other ways of adding up are NCCL's alone
            module.set_force_sum_reduction_for_comms(True)
        module.set_requires_gradient_sync(True)


_owners: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()


def _average(reference: "weakref.ref[Any]") -> None:
    part = reference()
    if part is None:
        return
    _owners[part] -= 1
    if not _owners[part]:
        del _owners[part]
        part.set_gradient_divide_factor(None)
        if hasattr(part, "set_force_sum_reduction_for_comms"):
            part.set_force_sum_reduction_for_comms(False)
        part.set_requires_gradient_sync(True)
