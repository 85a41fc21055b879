"""Replicas of a model, in DistributedDataParallel or bare: gradients are added up once per update, after all agreed.

With `overlap` DDP itself reduces in a window's last backward, beside the computation.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bigbatch.distributed.ddp_internals import has_reduced, hooked, left_out, let_speak, share_buffers, silence
from bigbatch.distributed.fsdp_internals import held
from bigbatch.distributed.ranks import Ranks, naming_lost_ranks
from bigbatch.distributed.statement import REFUSED, Statement, weights_in_one
from bigbatch.distributed.team import adding_zeros
from bigbatch.errors import LossError, WindowDisturbed, WindowError
from bigbatch.loss.count import LOW_PRECISION, Count

if TYPE_CHECKING:
    from bigbatch.window.gradients import Gradients

_BUCKET = 32 << 20  # bytes that are sent at once: enough to fill a wire, and small beside a model
_IN_FLIGHT = 2  # buckets under way while the next one is filled


class Replicas(Ranks):
    """Processes that hold the whole model each."""

    joins_windows = True

    def __init__(
        self,
        group: dist.ProcessGroup,
        wrappers: Sequence[DistributedDataParallel],
        models: Sequence[nn.Module] = (),
        *,
        overlap: bool = False,
    ) -> None:
        """Belong to a group; `models` are those whose weights nobody has sent to all."""
        super().__init__(group, wrappers)
        self._models = models
        self.overlap = self.in_common = overlap
        self._reduces = self._reduced = False  # whether DDP reduces in the next backward; whether it has in the last
        self._left_out = 0  # gradients that the last backward has not added to

    def prepare(self, *, last: bool) -> None:
        """Before a forward: have DDP reduce in its backward if it is the window's last, and only where it should."""
        self._reduces = self.overlap and last
        for wrapper in self.wrappers:
            (let_speak if self._reduces else silence)(wrapper)

    def open_window(self) -> None:
        """Begin a window, of which nothing was said yet."""
        super().open_window()
        self._reduced = False

    def check_last_batch(self) -> None:
        """Raise where DDP of other ranks may wait inside of a backward that does not come."""
        if self.overlap:
            raise WindowError(
                "the last batch of `over` had no accumulator.backward(loss) on this rank, and with overlap=True DDP of "
                "other ranks may wait for it inside of theirs. Nothing was stepped.",
                fix="Accumulator(...) without overlap=True, or leave batches out before accumulator.over(loader)",
            )

    def check_loss(self, dtype: torch.dtype) -> None:
        """Before a backward: raise where DDP would reduce in it by itself; after its next forward it would not."""
        if not self._reduces and any(wrapper.require_backward_grad_sync for wrapper in self.wrappers):
            self.prepare(last=False)
            for wrapper in self.wrappers:  # or it waits for a backward since its forward
                getattr(wrapper.reducer, "_reset_state", bool)()
            raise WindowDisturbed(
                "DistributedDataParallel would reduce in this backward by itself: something has set "
                "require_backward_grad_sync, as the end of a no_sync() does. Nothing was added.",
                fix="the loop without no_sync(): DDP is kept quiet while this accumulator lives",
            )
        if self.in_common:
            refuse_rounded(dtype)

    @contextmanager
    def around_backward(self, own: Sequence[Tensor], *, adds: bool) -> Iterator[None]:
        """Note what DDP's own reduction leaves out."""
        reached = Reached(own) if self._reduces else None
        with naming_lost_ranks(), nullcontext() if adds else adding_zeros(own):
            yield
        self._reduced = reached is not None
        self._left_out = 0 if reached is None else reached.left_out()

    def _completed(self, mine: Statement, gradients: "Gradients") -> Statement:
        if not self.windows:
            mine = mine._replace(weights=weights_in_one([*gradients.parameters, *self._frozen()], gradients.device))
        if self._reduced:
            left = self._left_out + left_out(self.wrappers, gradients.parameters)
            wrong = "left out" if left or not all(map(has_reduced, self.wrappers)) else ""
        else:
            is_sparse = any(p.grad is not None and p.grad.is_sparse for p in gradients.parameters)
            wrong = "sparse" if is_sparse else "hooked" if not self.overlap and hooked(self.wrappers) else ""
        return mine._replace(refused=mine.refused or REFUSED[wrong])

    def _common(self, mine: Statement, gradients: "Gradients") -> dict[str, str]:
        reduced = {"batches left, with overlap=True": str(bool(mine.going))} if self._reduced else {}
        return {**super()._common(mine, gradients), **reduced}

    def _frozen(self) -> list[Tensor]:
        """Return the weights that nobody trains, and that all should have in common; but for packed ones (8 bits)."""
        every = (p for model in self._models for p in model.parameters() if not p.requires_grad)
        return [p for p in every if type(p) is nn.Parameter and p.is_floating_point() and p.element_size() > 1]

    def reduce(self, gradients: "Gradients", correction: Count, agreement: Statement) -> Count:
        """Correct the gradients and add them up over all ranks, unless DDP has."""
        if self._reduced:
            gradients.scale(correction * self.size)  # DDP has averaged
            return 1.0
        add_up_corrected(self, self.group, gradients, correction, agreement)
        return 1.0

    def share_buffers(self) -> None:
        """Send the first rank's buffers to all, as DDP does where it was told to."""
        for wrapper in self.wrappers:
            share_buffers(wrapper)


class Reached:
    """Which of some parameters a backward has added a gradient to."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        """Look at their gradients, before it. They are held, so that no new one can take an old one's place."""
        self._parameters = parameters
        self._before = self._gradients()

    def flags(self) -> bytes:
        """Return of each parameter whether something was added since."""
        both = zip(self._before, self._gradients(), strict=True)
        return bytes(now is not was or version != then for (was, then), (now, version) in both)

    def left_out(self) -> int:
        """Return how many gradients were there before, and got nothing."""
        return sum(was is not None and not flag for (was, _), flag in zip(self._before, self.flags(), strict=True))

    def _gradients(self) -> list[tuple[Tensor | None, int]]:
        every = [None if p.grad is None else held(p.grad) for p in self._parameters]
        return [(each, 0 if each is None else each._version) for each in every]  # noqa: SLF001 - torch's own counter


def refuse_rounded(dtype: torch.dtype) -> None:
    """Refuse a loss whose weight would be rounded where nothing can make it good."""
    if dtype in LOW_PRECISION:
        raise LossError(
            f"this loss is of {dtype}, which rounds its weight. Where gradients of all ranks are added up in backward "
            "(fully_shard, or overlap=True), nothing can correct that.",
            fix="a loss in float32:  criterion(logits.float(), labels)",
        )


def add_up_corrected(
    ranks: Ranks, group: dist.ProcessGroup, gradients: "Gradients", correction: Count, agreement: Statement
) -> None:
    """Correct the gradients, fill those that only other ranks have reached with zeros, and add all up over a group."""
    if agreement.missing:
        gradients.fill(ranks.anywhere([p.grad is not None for p in gradients.parameters], gradients.device))
    gradients.scale(correction)
    if dist.get_world_size(group) > 1:
        add_up(gradients.dense(), group, ranks.wire)


def add_up(gradients: Sequence[Tensor], group: dist.ProcessGroup, wire: Callable[[torch.device], torch.device]) -> None:
    """Add up tensors over a group, in place, bucket by bucket: some are sent while the next one is filled.

    `wire` says where to send from what is on a device.
    """
    under_way: list[tuple[dist.Work, Tensor, list[Tensor]]] = []
    for bucket in _buckets(gradients):
        if len(under_way) == _IN_FLIGHT:
            _arrived(*under_way.pop(0))
        # A lone tensor may be large, and is sent from where it is.
        flat = bucket[0].reshape(-1) if len(bucket) == 1 else torch.cat([gradient.reshape(-1) for gradient in bucket])
        flat = flat.to(wire(flat.device))
        work = dist.all_reduce(flat, group=group, async_op=True)
        assert work is not None  # noqa: S101 - it is async
        under_way.append((work, flat, bucket))
    for each in under_way:
        _arrived(*each)


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for group in groups.values():
        bucket: list[Tensor] = []
        size = 0
        for gradient in group:
            bytes_ = gradient.numel() * gradient.element_size()
            if bucket and size + bytes_ > _BUCKET:
                yield bucket
                bucket, size = [], 0
            bucket.append(gradient)
            size += bytes_
        if bucket:
            yield bucket


def _arrived(work: dist.Work, flat: Tensor, bucket: list[Tensor]) -> None:
    work.wait()
    if flat.data_ptr() == bucket[0].data_ptr():
        return
    pieces = flat.split([gradient.numel() for gradient in bucket])
    torch._foreach_copy_(bucket, [piece.view_as(g) for piece, g in zip(pieces, bucket, strict=True)])
