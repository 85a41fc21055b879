"""Count what is alive while fake tensors are computed with, as an allocator would hand it out."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from bigbatch.errors import ConfigurationError

_aten = torch.ops.aten


class LiveStorages(TorchDispatchMode):
    """Inside `with live:` counts the bytes of storages while they live, and the most there were in each phase.

    Args:
        block: storages are rounded up to a multiple of so many bytes; CUDA's allocator hands out 512 at least.
    """

    def __init__(self, block: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peaks: dict[str, int] = {}
        self.where: dict[str, str] = {}  # the operation that a phase's peak was reached in
        self._phase = ""
        self._block = block
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._stand_ins: dict[int, tuple[Tensor, Tensor]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Note the peak of what is done inside under this name."""
        outer, self._phase = self._phase, name
        self.peaks.setdefault(name, self.now)
        try:
            yield
        finally:
            self._phase = outer

    def add(self, tensors: Any) -> int:
        """Count what is there already; return how many bytes that is."""
        before = self.now
        for tensor in tree_leaves(tensors):
            self._remember(tensor, new=True)
        return self.now - before

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and count the storages that it returned for the first time."""
        if func is torch.ops.prim.device.default:
            return func(*args, **(kwargs or {}))
        args, kwargs = tree_map(self._on_the_cpu, (args, kwargs or {}))
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        # An output may alias an input (a view, an in-place result), whose storage was there before.
        for tensor in tree_leaves((args, kwargs)):
            self._remember(tensor, new=False)
        outputs = _data_dependent(func, args) if func in _DATA_DEPENDENT else func(*args, **kwargs)
        for tensor in tree_leaves(outputs):
            self._remember(tensor, new=True)
        self._note(func, args)
        return outputs

    def _note(self, func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        held = self.now + _scratch(func, args)
        if held > self.peaks.get(self._phase, 0):
            self.peaks[self._phase] = held
            self.where[self._phase] = str(func)

    def _on_the_cpu(self, value: Any) -> Any:
        """Take a stand-in for a real tensor on a device: all fake tensors here are on the CPU."""
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor) or value.device.type == "cpu":
            return value
        if id(value) not in self._stand_ins:
            fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
            self._stand_ins[id(value)] = (value, fake)
        return self._stand_ins[id(value)][1]

    def _remember(self, tensor: object, *, new: bool) -> None:
        if not isinstance(tensor, Tensor):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001 - the identity of a storage, which its Python wrapper has not
        if key in self._known:
            return
        size = -(-storage.nbytes() // self._block) * self._block if new else 0
        self.now += size

        def freed(_: object) -> None:
            self.now -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, freed)


def _scratch(func: Callable[..., Any], args: tuple[Any, ...]) -> int:
    """Return what a CUDA kernel allocates and frees within itself, where it is as large as what it returns."""
    if func is _aten._scaled_dot_product_flash_attention_for_cpu_backward.default:  # noqa: SLF001
        query = args[1]  # its gradient is added up in float32, beside a number per row
        return 4 * int(query.numel() + query.numel() // query.shape[-1])
    return 0


_DATA_DEPENDENT = frozenset(
    {
        _aten._local_scalar_dense.default,  # noqa: SLF001
        _aten.nonzero.default,
        _aten.masked_select.default,
        _aten.index.Tensor,
        _aten.equal.default,
    }
)


def _data_dependent(func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Answer for numbers that are not there: every mask is all true, which is the most memory it can ask for."""
    subject = args[0]
    if func is _aten.equal.default:
        return False
    if func is _aten._local_scalar_dense.default:  # noqa: SLF001
        if subject.is_floating_point():
            return 1.0  # a logged loss, a count of steps: no shape hangs on it
        if subject.dtype == torch.bool:
            return False
        raise ConfigurationError(
            "this model cannot be traced: it reads an integer out of a tensor, as .item() and int() do, and a trace "
            "has shapes alone.\n\nPlan on the device itself, where it is measured."
        )
    if func is _aten.nonzero.default:
        return subject.new_empty((subject.numel(), subject.dim()), dtype=torch.int64)
    if func is _aten.masked_select.default:
        return subject.new_empty(torch.broadcast_shapes(subject.shape, args[1].shape).numel())
    indices: list[Tensor | None] = []
    for index in args[1]:
        if index is not None and index.dtype in {torch.bool, torch.uint8}:
            indices += [index.new_empty(index.numel(), dtype=torch.int64) for _ in range(index.dim())]
        else:
            indices.append(index)
    return func(subject, indices)
