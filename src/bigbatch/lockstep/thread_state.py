"""What a thread of torch does not inherit, carried from the caller's into a worker's.

Grad mode, autocast, saved-tensor hooks, function and dispatch modes, the current device and stream all belong to one
thread. A micro-batch must run on its worker as it would have run on the thread that called the step.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import Context, copy_context
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_KINDS = ("cpu", "cuda")
_Hooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]


@dataclass(frozen=True)
class Carried:
    """The state of the thread that it was taken on."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    caching: bool  # whether autocast keeps its copies of weights
    hooks: tuple[_Hooks, ...]  # for saved tensors, outermost first
    function_modes: tuple[Any, ...]
    dispatch_modes: tuple[Any, ...]
    stream: torch.cuda.Stream | None
    context: Context

    @classmethod
    def here(cls, device: torch.device) -> "Carried":
        """Take the state of this thread."""
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _KINDS),
            caching=torch.is_autocast_cache_enabled(),
            hooks=_saved_tensor_hooks(),
            function_modes=tuple(_get_current_function_mode_stack()),
            dispatch_modes=tuple(_get_current_dispatch_mode_stack()),
            stream=torch.cuda.current_stream(device) if device.type == "cuda" else None,
            context=copy_context(),
        )

    @contextmanager
    def there(self) -> Iterator[None]:
        """Put the state into force on this thread, where nothing is in force yet."""
        with ExitStack() as stack:
            if self.stream is not None:
                stack.enter_context(torch.cuda.device(self.stream.device))
                stack.enter_context(torch.cuda.stream(self.stream))
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, enabled, dtype in self.autocast:
                if enabled:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self.caching))
            for pack, unpack in self.hooks:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, unpack))
            for mode in (*self.dispatch_modes, *self.function_modes):
                # A default device remembers what was before it: each thread has its own.
                stack.enter_context(copy(mode) if isinstance(mode, DeviceContext) else mode)
            # Backward runs on the thread that calls it, so that it can wait for the others there.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            yield


def _saved_tensor_hooks() -> tuple[_Hooks, ...]:
    """Return the hooks in force, outermost first. Only the innermost shows: each is taken off, and put back."""
    found: list[_Hooks] = []
    autograd: Any = torch._C._autograd  # noqa: SLF001 - no public name
    while (top := autograd._top_saved_tensors_default_hooks(True)) is not None:  # noqa: FBT003, SLF001
        found.insert(0, top)
        autograd._pop_saved_tensors_default_hooks()  # noqa: SLF001
    for pack, unpack in found:
        autograd._push_saved_tensors_default_hooks(pack, unpack)  # noqa: SLF001
    return tuple(found)
