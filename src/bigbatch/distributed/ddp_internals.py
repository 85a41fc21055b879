"""DistributedDataParallel kept quiet: it reduces where a window ends, and nowhere else."""

from torch.nn.parallel import DistributedDataParallel


def speak(wrapper: DistributedDataParallel, *, backward: bool = True, forward: bool = True) -> None:
    """Have a wrapper's next backward reduce what has been added up, and its forward send buffers; or not."""
    wrapper.require_backward_grad_sync, wrapper.require_forward_param_sync = backward, forward
    # Where a graph is said to be static, DDP reduces after its first backward, whatever it was told: unless it has.
    wrapper._static_graph_delay_allreduce_enqueued = not backward  # noqa: SLF001 - no public name


def silence(wrapper: DistributedDataParallel) -> None:
    """Have a wrapper's forward and backward reduce nothing, and send no buffers."""
    speak(wrapper, backward=False, forward=False)


def share_buffers(wrapper: DistributedDataParallel) -> None:
    """Send the first rank's buffers to all, where the wrapper was told to."""
    if wrapper.broadcast_buffers and wrapper.modules_buffers:
        wrapper._sync_buffers()  # noqa: SLF001 - as its own forward does


def has_hook(wrapper: DistributedDataParallel) -> bool:
    """Whether a wrapper has a communication hook, perhaps one of torch's own; this takes some microseconds."""
    return bool(wrapper._get_ddp_logging_data().get("comm_hook"))  # noqa: SLF001 - no public name
