"""Which tensors are the model's own: a frozen weight has no place in the graph, so it is known by its memory."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from bigbatch.loss import refusals
from bigbatch.loss.count import Arrival
from bigbatch.loss.graph import is_shared_value

_COMPARED = 32  # numbers of a copy that are compared each time
_READ_EVERY = 16  # on a device, the result of comparisons is read once in as many


class FrozenWeights:
    """Answers whether a tensor is a parameter or buffer of the models, perhaps cast by autocast.

    Asked for every micro-batch, so what was found is kept: by weak reference, since memory that a weight has left
    may be given to a batch.
    """

    def __init__(self, models: Sequence[nn.Module], beside: Callable[[], Iterable[Tensor]] = tuple) -> None:
        """Take note of the models; their tensors are looked up when asked for, and those that they have `beside`."""
        self._models, self._beside = models, beside
        self._at: dict[int, weakref.ref[Tensor]] = {}
        self._casts: dict[tuple[torch.Size, torch.dtype], weakref.ref[Tensor]] = {}
        self._compared, self._same, self._arrival = 0, torch.tensor(data=True), Arrival()  # on a device

    def __call__(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is one of the models' own, or the same in every micro-batch as they are."""
        return (
            is_shared_value(tensor)
            or self._is_known(tensor)
            or self._is_known_cast(tensor)
            or self._is_own(tensor)
            or self._is_cast(tensor)
        )

    def _is_known(self, tensor: Tensor) -> bool:
        address = _address(tensor)
        known = self._at.get(address)
        own = known() if known is not None else None
        return own is not None and _address(own) == address

    def _is_own(self, tensor: Tensor) -> bool:
        """Look through the models: a weight may have been moved or loaded anew."""
        self._at = {_address(own): weakref.ref(own) for own in self._tensors()}
        return _address(tensor) in self._at

    def _is_known_cast(self, tensor: Tensor) -> bool:
        """Tell a new copy of a weight that was compared before, by some of its numbers (read later on a device)."""
        known = self._casts.get((tensor.shape, tensor.dtype))
        own = known() if known is not None else None
        if own is None:
            return False
        if tensor.is_cpu:
            return torch.equal(_some(own).to(tensor.dtype), _some(tensor))
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return True
        self._same = (_some(own).to(tensor.dtype) == _some(tensor)).all() & self._same.to(tensor.device)
        if self._compared % _READ_EVERY == 0:
            if self._compared and not self._arrival.read():
                raise refusals.other_weight(tuple(tensor.shape))
            self._arrival.start(self._same)
        self._compared += 1
        return True

    def _is_cast(self, tensor: Tensor) -> bool:
        """Autocast copies a frozen weight; the copy is compared with it once, which waits for the device."""
        for own in self._own():
            if own.dtype != tensor.dtype and own.shape in {tensor.shape, tensor.shape[::-1]}:
                same = own if own.shape == tensor.shape else own.t()
                if torch.equal(same.to(tensor.dtype), tensor):
                    self._casts[tensor.shape, tensor.dtype] = weakref.ref(own)
                    return True
        return False

    def _tensors(self) -> Iterator[Tensor]:
        yield from self._own()
        yield from self._beside()

    def _own(self) -> Iterator[Tensor]:
        for model in self._models:
            yield from model.parameters()
            yield from model.buffers()


def _some(tensor: Tensor) -> Tensor:
    """Take a few numbers, the same of a matrix and of its transpose."""
    return tensor.diagonal()[:_COMPARED] if tensor.dim() > 1 else tensor.reshape(-1)[:_COMPARED]


def _address(tensor: Tensor) -> int:
    try:
        storage = tensor.untyped_storage()
        # One that was freed, as by FSDP after a forward, has no address; what held it is the same, and has one.
        return storage.data_ptr() or -int(storage._cdata)  # noqa: SLF001 - no public name
    except (RuntimeError, NotImplementedError):  # a wrapper without storage of its own
        return -id(tensor)
