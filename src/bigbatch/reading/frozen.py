"""Which tensors are the model's own: a frozen weight has no place in the graph, so it is known by its memory."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn


class FrozenWeights:
    """Answers whether a tensor is a parameter or buffer of the models, perhaps cast by autocast."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        """Take note of the models; their tensors are looked up when asked for."""
        self._models = models
        self._addresses: set[int] = set()
        self._casts: set[tuple[torch.Size, torch.dtype]] = set()

    def __call__(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is one of the models' own."""
        address = _address(tensor)
        if address not in self._addresses:  # perhaps moved or loaded anew since
            self._addresses = {_address(own) for own in self._tensors()}
        return address in self._addresses or self._is_cast(tensor)

    def _tensors(self) -> Iterator[Tensor]:
        for model in self._models:
            yield from model.parameters()
            yield from model.buffers()

    def _is_cast(self, tensor: Tensor) -> bool:
        """Autocast copies a frozen weight; the copy is compared with it once per shape, which waits for the device."""
        key = (tensor.shape, tensor.dtype)
        if key in self._casts:
            return True
        for own in self._tensors():
            if own.dtype != tensor.dtype and own.shape in {tensor.shape, tensor.shape[::-1]}:
                same = own if own.shape == tensor.shape else own.t()
                if torch.equal(same.to(tensor.dtype), tensor):
                    self._casts.add(key)
                    return True
        return False


def _address(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a wrapper without storage of its own
        return -id(tensor)
