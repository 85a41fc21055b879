"""What micro-batches hold while they wait for each other inside of a model, at a norm or at `across`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from bigbatch.batch.tree import leaves
from bigbatch.lockstep.threads import current
from bigbatch.state.scope import heard_by

# As `lockstep` has it where activations are offloaded.
_MOST = 1.25  # times what autograd saves of one micro-batch: more of all others does not wait at norms
_WORTH_MOVING = 1 << 16  # bytes; smaller tensors stay on the device


class Asking:
    """Whether models ask for other samples between their layers; where they do, activations wait."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        """Not that we knew."""
        self._models = models
        self.inside = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look at the calls of the models inside."""
        calls = [0]

        def begin(*_: Any) -> None:
            calls[0] += 1

        def end(*_: Any) -> None:
            calls[0] -= 1

        def heard() -> None:
            self.inside = self.inside or calls[0] > 0

        with ExitStack() as stack:
            for model in self._models:
                stack.callback(model.register_forward_pre_hook(begin).remove)
                stack.callback(model.register_forward_hook(end, always_call=True).remove)
            stack.enter_context(_listening(heard))
            yield


@contextmanager
def _listening(heard: Callable[[], None]) -> Iterator[None]:
    """Be told of meetings, on a worker and elsewhere."""
    worker = current()
    if worker is None:
        with heard_by(heard):
            yield
        return
    try:
        worker.notes["leaving"] = heard
        yield
    finally:
        worker.notes.pop("leaving", None)


@dataclass(frozen=True)
class Saved:
    """What autograd saves of one micro-batch, in bytes, piece by piece."""

    size: int  # samples
    pieces: tuple[int, ...]
    held: tuple[int, ...]  # of these, what its own code holds at the meeting where that is most


@dataclass(frozen=True)
class Waiting:
    """What waits of a whole batch whose micro-batches meet inside of a model."""

    of_one: Saved
    samples: int  # bytes of the batch, where it is copied to a device
    batch_size: int
    limited: bool  # whether they meet at norms, where beyond a limit they wait without what they hold

    @property
    def whole(self) -> int:
        """Bytes of the whole batch's activations, which wait in host memory where the device has no room."""
        return sum(self.of_one.pieces) * self.batch_size // self.of_one.size + self.samples

    def beside(self, size: int) -> int:
        """Return what waits on the device beside a micro-batch of a size, where activations go to the host.

        The samples of the others are in the hands of the loss function, what is too small to move stays, and of the
        rest what their own code holds.
        """
        others = -(-self.batch_size // size) - 1
        scale = size / self.of_one.size
        pieces, held = ([piece * scale for piece in each] for each in (self.of_one.pieces, self.of_one.held))
        small = others * sum(piece for piece in pieces if piece < _WORTH_MOVING)
        moved = others * sum(piece for piece in held if piece >= _WORTH_MOVING)
        if self.limited:
            moved = min(moved, _MOST * sum(pieces))
        samples = self.samples * max(0, self.batch_size - size) / self.batch_size
        return int(samples + small + moved)


def saved(
    loss: Callable[[Any], object],
    samples: Any,
    size: int,
    models: Sequence[nn.Module],
    device: torch.device | None,
    *,
    norms: bool,
) -> Saved:
    """Run a forward whose graph keeps nothing, as where activations are elsewhere, and see what it would have kept.

    Beside weights, and the samples themselves. `norms`: it is these that micro-batches meet at.
    """
    given = [leaf for _, leaf in leaves(samples) if isinstance(leaf, Tensor)]
    given += [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
    own = {tensor.untyped_storage()._cdata for tensor in given}  # noqa: SLF001 - as torch.multiprocessing has it
    found: dict[int, tuple[StorageWeakRef, int]] = {}
    meetings: list[list[int]] = []  # the pieces that live at each, by their place

    def pack(tensor: Tensor) -> Any:
        if tensor.layout != torch.strided or tensor.device != (device or tensor.device):
            return tensor.detach()
        storage = tensor.untyped_storage()
        if storage._cdata not in own:  # noqa: SLF001
            found.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))  # noqa: SLF001
        return tensor.shape, tensor.dtype, tensor.device

    def unpack(packed: Any) -> Tensor:  # for a derivative inside of the loss: of no interest
        return packed if isinstance(packed, Tensor) else torch.zeros(packed[0], dtype=packed[1], device=packed[2])

    def heard() -> None:
        alive = [place for place, (reference, _) in enumerate(found.values()) if not reference.expired()]
        meetings.append([*alive, len(found)] if norms else alive)  # a norm saves its input when it is through

    with _listening(heard), saved_tensors_hooks(pack, unpack):
        loss(samples)
    pieces = tuple(size for _, size in found.values())
    held = [tuple(pieces[place] for place in places if place < len(pieces)) for places in meetings]
    return Saved(size, pieces, max(held, key=sum, default=()))


def bytes_of(batch: Any) -> int:
    """Return what the tensors of a batch take, which all are on the device at once."""
    return sum(leaf.numel() * leaf.element_size() for _, leaf in leaves(batch) if isinstance(leaf, Tensor))
