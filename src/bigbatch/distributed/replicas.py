"""Replicas of a model, in DistributedDataParallel or bare: gradients are added up once per update, after all agreed.

With `overlap` DDP itself reduces in a window's last backward, beside the computation.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bigbatch.distributed.ddp_internals import has_reduced, hooked, left_out, let_speak, share_buffers, silence
from bigbatch.distributed.fingerprint import weights_in_one
from bigbatch.distributed.ranks import Ranks, naming_lost_ranks
from bigbatch.distributed.reached import Reached, adding_zeros
from bigbatch.distributed.statement import Agreement, Row
from bigbatch.distributed.team import Gradients
from bigbatch.errors import LossError, WindowDisturbed, WindowError
from bigbatch.loss.count import LOW_PRECISION, Count

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
        self.overlap = self.in_common = self.looks_ahead = overlap
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
                "the last batch of `over` had no accumulator.backward(loss) on this rank, and with overlap=True DDP "
                "reduces in that backward: other ranks may be waiting for it inside. Nothing was stepped.",
                fix="Accumulator(...) without overlap=True, or leave batches out before accumulator.over(loader)",
            )

    def check_loss(self, dtype: torch.dtype) -> None:
        """Before a backward: raise where DDP would reduce in it by itself; after its next forward it would not."""
        if not self._reduces and any(wrapper.require_backward_grad_sync for wrapper in self.wrappers):
            self.prepare(last=False)
            for wrapper in self.wrappers:  # or it waits for a backward since its forward
                getattr(wrapper.reducer, "_reset_state", bool)()
            raise WindowDisturbed(
                "DistributedDataParallel is about to reduce in this backward, and bigbatch reduces once per update: "
                "something has set require_backward_grad_sync since, as the end of a no_sync() does. Nothing was "
                "added.",
                fix="the loop without no_sync(): DDP is kept quiet while this accumulator lives",
            )
        if self.in_common:
            refuse_rounded(dtype)

    def around_backward(self, own: Sequence[Tensor], *, adds: bool) -> AbstractContextManager[None]:
        """Note what DDP's own reduction leaves out."""
        return self._around(own, adds=adds)

    @contextmanager
    def _around(self, own: Sequence[Tensor], *, adds: bool) -> Iterator[None]:
        reached = Reached(own) if self._reduces else None
        with naming_lost_ranks(), nullcontext() if adds else adding_zeros(own):
            yield
        self._reduced = reached is not None
        self._left_out = 0 if reached is None else reached.left_out()

    def _completed(self, row: Row, gradients: Gradients) -> Row:
        row = super()._completed(row, gradients)
        if not self.windows:
            row = row._replace(weights=weights_in_one([*gradients.parameters, *self._frozen()], gradients.device))
        if not self._reduced:
            sparse = sum(p.grad is not None and p.grad.is_sparse for p in gradients.parameters)
            return row._replace(sparse=float(sparse), hooked=0.0 if self.overlap else float(hooked(self.wrappers)))
        left = self._left_out + sum(not has_reduced(wrapper) for wrapper in self.wrappers)
        left += left_out(self.wrappers, gradients.parameters)
        return row._replace(left_out=float(left), overlapped=float(row.micro_batches > 0))

    def _frozen(self) -> list[Tensor]:
        """Return the weights that nobody trains, and that all should have in common; but for packed ones (8 bits)."""
        every = (p for model in self._models for p in model.parameters() if not p.requires_grad)
        return [p for p in every if type(p) is nn.Parameter and p.is_floating_point() and p.element_size() > 1]

    def reduce(self, gradients: Gradients, correction: Count, agreement: Agreement) -> Count:
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


def refuse_rounded(dtype: torch.dtype) -> None:
    """Refuse a loss whose weight would be rounded where nothing can make it good."""
    if dtype in LOW_PRECISION:
        raise LossError(
            f"this loss is of {dtype}, which would round its weight, and what is left over cannot be made good where "
            "gradients of all ranks are added up in backward (fully_shard, or overlap=True).",
            fix="a loss in float32:  criterion(logits.float(), labels)",
        )


def add_up_corrected(
    ranks: Ranks, group: dist.ProcessGroup, gradients: Gradients, correction: Count, agreement: Agreement
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
