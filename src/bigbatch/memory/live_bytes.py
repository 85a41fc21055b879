"""The peak of tensor memory, counted exactly, on any device.

The process's resident memory hides a few KiB of activations; counting storages does not, and gives the same number in
every run.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Inside `with LiveBytes() as live:` counts the bytes of tensors that operations return while they live.

    Activations, gradients, optimizer state and the batches cut out of the data count; what existed before does
    not, nor do buffers that a kernel allocates and frees within itself.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation and count the storages that it returned for the first time."""
        # An output may alias an input (a view, an in-place result), whose storage was there before.
        kwargs = kwargs or {}
        for tensor in tree_leaves((args, kwargs)):
            self._remember(tensor, new=False)
        outputs = func(*args, **kwargs)
        for tensor in tree_leaves(outputs):
            self._remember(tensor, new=True)
        self.peak = max(self.peak, self.now)
        return outputs

    def _remember(self, tensor: object, *, new: bool) -> None:
        if not isinstance(tensor, torch.Tensor):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001 - the identity of a storage, which its Python wrapper has not
        if key in self._known:
            return
        size = storage.nbytes() if new else 0
        self.now += size

        def freed(_: object) -> None:
            self.now -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, freed)
