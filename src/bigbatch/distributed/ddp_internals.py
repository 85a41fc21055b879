"""DistributedDataParallel kept quiet: it reduces where a window ends, and nowhere else."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

# Where a graph is said to be static, DDP reduces after its first backward, whatever it was told: unless it has.
_FIRST = "_static_graph_delay_allreduce_enqueued"


def silence(wrapper: DistributedDataParallel) -> bool:
    """Have a wrapper's forward and backward reduce nothing, and send no buffers; returns what `speak` is to restore."""
    before: bool = getattr(wrapper, _FIRST, False)
    wrapper.require_backward_grad_sync = wrapper.require_forward_param_sync = False
    setattr(wrapper, _FIRST, True)
    return before


def speak(wrapper: DistributedDataParallel, before: bool) -> None:  # noqa: FBT001 - what `silence` has returned
    """Leave a wrapper as it was."""
    wrapper.require_backward_grad_sync = wrapper.require_forward_param_sync = True
    setattr(wrapper, _FIRST, before)


def let_speak(wrapper: DistributedDataParallel) -> None:
    """Have its next backward reduce what has been added up until then; its forward sends no buffers."""
    wrapper.require_backward_grad_sync = True
    wrapper.require_forward_param_sync = False  # until its forward says that the backward will reduce
    setattr(wrapper, _FIRST, False)


def has_reduced(wrapper: DistributedDataParallel) -> bool:
    """Whether a backward that was to reduce has done so: all of it, after a forward through the wrapper."""
    if not wrapper.require_forward_param_sync:  # its forward says so here; no_sync() and .module leave it out
        return False
    try:
        wrapper._check_reducer_finalized()  # noqa: SLF001
    except RuntimeError:  # it waits for a gradient that has not come
        return False
    return True


def share_buffers(wrapper: DistributedDataParallel) -> None:
    """Send the first rank's buffers to all, where the wrapper was told to."""
    wanted = getattr(wrapper, "forward_sync_buffers", None)  # broadcast_buffers before torch 2.13
    if (wrapper.broadcast_buffers if wanted is None else wanted) and wrapper.modules_buffers:
        wrapper._sync_buffers()  # noqa: SLF001 - as its own forward does


def left_out(wrappers: Sequence[DistributedDataParallel], trained: Sequence[Tensor]) -> int:
    """Return how many of the parameters that are trained no wrapper reduces."""
    within = [p for wrapper in wrappers for p in wrapper._module_parameters if p.requires_grad]  # noqa: SLF001
    known = {id(p) for p in within}
    outside = sum(p.requires_grad and id(p) not in known for p in trained)
    # Those that were frozen when a wrapper was made are in its module, and it knows nothing of them.
    reduced: int = sum(_told(wrapper)["num_parameter_tensors"] for wrapper in wrappers)
    return outside + max(len(within) - reduced, 0)


def hooked(wrappers: Sequence[DistributedDataParallel]) -> int:
    """Return how many wrappers have a communication hook, one of torch's own included."""
    return sum(bool(_told(wrapper).get("comm_hook")) for wrapper in wrappers)


def _told(wrapper: DistributedDataParallel) -> dict[str, Any]:
    """Return what a wrapper says of itself, in some microseconds."""
    found: dict[str, Any] = wrapper._get_ddp_logging_data()  # noqa: SLF001 - no public name
    return found
