"""Replicas of a model, in DistributedDataParallel or bare: gradients are added up once per update, after all agreed.

With `overlap` DDP itself reduces in a window's last backward, beside the computation.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _take_tensors, _unflatten_dense_tensors
from torch.nn.parallel import DistributedDataParallel

from bigbatch.distributed.ddp_internals import has_hook, share_buffers, speak
from bigbatch.distributed.ranks import Ranks, naming_lost_ranks
from bigbatch.distributed.statement import Statement, Words, bits_in_one, in_one
from bigbatch.distributed.team import adding_zeros
from bigbatch.errors import ConfigurationError, WindowDisturbed, WindowError
from bigbatch.loss.count import Count

if TYPE_CHECKING:
    from bigbatch.window.gradients import Gradients

_BUCKET = 32 << 20  # bytes that are sent at once: enough to fill a wire, and small beside a model


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

    def prepare(self, *, last: bool) -> None:
        """Before a forward: have DDP reduce in its backward if it is the window's last, and only where it should."""
        self._reduces = self.overlap and last
        for wrapper in self.wrappers:
            speak(wrapper, backward=self._reduces, forward=False)

    def open_window(self) -> None:
        """Begin a window, of which nothing was said yet, and nothing was reduced."""
        super().open_window()
        self._reduced = False

    def check_last_batch(self) -> None:
        """After a loop whose last batch had no backward: raise where DDP of others may wait inside of theirs."""
        if self.overlap:
            raise WindowError(
                "the last batch of `over` had no accumulator.backward(loss) on this rank, and with overlap=True DDP of "
                "other ranks may wait for it inside of theirs. Nothing was stepped.",
                fix="Accumulator(...) without overlap=True, or leave batches out before accumulator.over(loader)",
            )

    def check_loss(self, dtype: torch.dtype) -> None:
        """Before a backward: raise where DDP would reduce in it by itself."""
        if not self._reduces and any(wrapper.require_backward_grad_sync for wrapper in self.wrappers):
            raise WindowDisturbed(
                "DistributedDataParallel would reduce in this backward by itself: something has set "
                "require_backward_grad_sync, as the end of a no_sync() does. Nothing was added.",
                fix="the loop without no_sync(): DDP is kept quiet while this accumulator lives",
            )
        super().check_loss(dtype)

    @contextmanager
    def around_backward(self, own: Sequence[Tensor], *, adds: bool) -> Iterator[None]:
        """Have DDP reduce in a window's last backward."""
        with naming_lost_ranks(), nullcontext() if adds else adding_zeros(own):
            yield
        self._reduced = self._reduces

    def agree(self, mine: Statement, words: Words, gradients: "Gradients") -> Statement:
        """Check what is to be added up, or what DDP has, and agree; at first compare the weights, too."""
        if self._reduced:
            mine = mine._replace(reduced=bits_in_one(gradients.dense()))
        elif any(p.grad is not None and p.grad.is_sparse for p in gradients.parameters):
            raise ConfigurationError(
                "sparse gradients cannot be added up over ranks. Nothing was stepped.",
                fix="dense gradients, nn.Embedding(..., sparse=False)",
            )
        refuse_hooks(found=not self.overlap and any(map(has_hook, self.wrappers)))
        if not self.windows:
            frozen = (p for model in self._models for p in model.parameters() if not p.requires_grad)
            plain = [p for p in frozen if type(p) is nn.Parameter and p.is_floating_point() and p.element_size() > 1]
            mine = mine._replace(weights=in_one([*gradients.parameters, *plain], gradients.device))
        return super().agree(mine, words, gradients)

    def reduce(self, gradients: "Gradients", correction: Count, agreement: Statement) -> Count:
        """Correct the gradients and add them up over all ranks, unless DDP has."""
        if self._reduced:
            gradients.scale(correction * self.size)  # DDP has averaged
        else:
            add_up(self, self.group, gradients, correction, agreement)
        return 1.0

    def share_buffers(self) -> None:
        """Send the first rank's buffers to all, as DDP does where it was told to."""
        for wrapper in self.wrappers:
            share_buffers(wrapper)


def refuse_hooks(*, found: bool) -> None:
    """Raise where a model has a communication hook, which is not called."""
    if found:
        raise ConfigurationError(
            "the model has a communication hook, and bigbatch adds up gradients without it.",
            fix="the model without a hook; or, with DDP, Accumulator(..., overlap=True), which has DDP reduce",
        )


def add_up(
    ranks: Ranks, group: dist.ProcessGroup, gradients: "Gradients", correction: Count, agreement: Statement
) -> None:
    """Correct the gradients, fill those that only other ranks have reached with zeros, and add all up over a group."""
    if agreement.missing:
        came = [p.grad is not None for p in gradients.parameters]
        anywhere = torch.tensor(came, dtype=torch.uint8, device=ranks.wire(gradients.device))
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=ranks.group)
        gradients.fill(anywhere.bool().tolist())
    gradients.scale(correction)
    dense = gradients.dense()
    for device in dict.fromkeys(gradient.device for gradient in dense):
        for bucket in _take_tensors([gradient for gradient in dense if gradient.device == device], _BUCKET):
            # A lone tensor may be large, and is sent from where it is.
            flat = bucket[0].reshape(-1) if len(bucket) == 1 else torch.cat([each.reshape(-1) for each in bucket])
            flat = flat.to(ranks.wire(flat.device))
            dist.all_reduce(flat, group=group)
            if flat.data_ptr() != bucket[0].data_ptr():
                torch._foreach_copy_(bucket, _unflatten_dense_tensors(flat, bucket))
