"""Count the bytes of tensors: those alive at once, and those that autograd saves."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class OverLimit(MemoryError):
    """An action was stopped since it would have held more host memory than it may."""


class LiveBytes(TorchDispatchMode):
    """Inside `with LiveBytes() as live:` counts the bytes of tensors that operations return while they live.

    Activations, gradients, optimizer state and the batches cut out of the data count; what existed before does
    not, nor do buffers that a kernel allocates and frees within itself. The process's resident memory would hide a few
    KiB of activations; counting storages does not, and gives the same number in every run.

    Args:
        block: storages are rounded up to a multiple of so many bytes; CUDA's allocator hands out 512 at least.
        limit: the most bytes; more of them raise `OverLimit`.
    """

    def __init__(self, *, block: int = 1, limit: int | None = None) -> None:
        """Count nothing yet."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._block, self._limit = block, limit
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def add(self, tensors: Any) -> int:
        """Count tensors that are there already; return how many bytes that is."""
        before = self.now
        for tensor in tree_leaves(tensors):
            self._remember(tensor, new=True)
        return self.now - before

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and count the storages that it returned for the first time."""
        kwargs = kwargs or {}
        # An output may alias an input (a view, an in-place result), whose storage was there before.
        for tensor in tree_leaves((args, kwargs)):
            self._remember(tensor, new=False)
        outputs = self.computed(func, args, kwargs)
        self.add(outputs)
        self.peak = max(self.peak, self.now)
        if self._limit is not None and self.now > self._limit:
            raise OverLimit(f"{func} made this {self.now:,} bytes of at most {self._limit:,}")
        return outputs

    def computed(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation; a subclass may run another one."""
        return func(*args, **kwargs)

    def _remember(self, tensor: object, *, new: bool) -> None:
        if not isinstance(tensor, Tensor):
            return
        storage = tensor.untyped_storage()
        key = _identity(storage)
        if key in self._known:
            return
        size = -(-storage.nbytes() // self._block) * self._block if new else 0
        self.now += size

        def freed(_: object) -> None:
            self.now -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, freed)


def saved_bytes(run: Callable[[], object], models: Sequence[nn.Module], device: torch.device) -> int:
    """Return how much autograd saves of what runs beside the models' own: of memory on the device, each piece once."""
    every = [each for model in models for each in (*model.parameters(), *model.buffers())]
    own = {_identity(each.untyped_storage()) for each in every if each.layout == torch.strided}
    found: dict[int, tuple[StorageWeakRef, int]] = {}  # a storage that is referred to keeps its identity

    def pack(tensor: Tensor) -> Tensor:  # without its graph: an operation that held its own result would never go
        if tensor.device == device and tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            if _identity(storage) not in own:
                found[_identity(storage)] = (StorageWeakRef(storage), storage.nbytes())
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda packed: packed):
        kept = run()
    del kept
    return sum(size for _, size in found.values())


def _identity(storage: torch.UntypedStorage) -> int:
    """Return what tells a storage from others: each of its tensors makes a Python object of its own for it."""
    number: int = storage._cdata  # noqa: SLF001 - as torch.multiprocessing does
    return number
