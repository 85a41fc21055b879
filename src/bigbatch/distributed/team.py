"""What a window asks of the processes that make its big batch. One process is a team of one: nothing waits."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from bigbatch.distributed.statement import Statement, Words
from bigbatch.loss.count import Count

if TYPE_CHECKING:
    from bigbatch.window.gradients import Gradients

_NOTHING: AbstractContextManager[None] = nullcontext()


class Team:
    """One process, perhaps with wrappers that have nothing to reduce; several override what they do otherwise."""

    size, rank = 1, 0
    is_alone = True
    windows = 0  # made until now
    sharded = False  # whether every pass through the model needs all ranks
    overlap = False  # whether gradients are reduced in a window's last backward
    in_common = False  # whether a backward adds up what ranks have: then weights need one unit, and loops look ahead
    others_go_on = False  # whether they have batches for another one
    holds_back = False  # whether the latest backward has left gradients elsewhere, until the last one of the window
    reduced = False  # whether DDP has reduced in the latest backward
    device: torch.device | None = None  # where sharded weights compute
    unit: float | None = None  # of weights, where a gradient scaler needs one that all have agreed on
    spoken = False  # whether others have heard of how the window at hand ends
    elsewhere = False  # whether others wait for this rank inside of a model or a loss

    def __init__(self, wrappers: Sequence[DistributedDataParallel] = ()) -> None:
        self.wrappers = list(wrappers)

    def serve(self, owner: object) -> None:
        """Begin, when nothing of `owner` can be refused any more; wrappers reduce nothing by themselves."""
        for wrapper in self.wrappers:
            speak(wrapper, backward=False, forward=False)
            restore_after(owner, wrapper, speak)

    def _tell_nobody(self, *_: Any, **__: Any) -> Any:
        """Do nothing, at what several processes check, say or send; `Ranks`, `Replicas` and `Shards` say what."""

    prepare = open_window = drop = most = begin_loop = announce = _tell_nobody
    tell_of_several = check_loss = check_last_batch = _tell_nobody

    def totals(self, own: tuple[Count, ...], device: torch.device) -> tuple[Count, ...]:
        """Add up totals that were counted in advance."""
        del device
        return own

    def around_backward(self, own: Sequence[Tensor], *, adds: bool) -> AbstractContextManager[None]:
        """Have a backward inside reduce as the window at hand wants it; one that is not to add adds zeros."""
        return _NOTHING if adds else adding_zeros(own)

    def agree(self, mine: Statement, _words: Words, _gradients: "Gradients") -> Statement:
        """Return what the windows of all come to. One process knows, and its numbers stay on the device."""
        return mine

    def reduce(self, _gradients: "Gradients", correction: Count, _agreement: Statement) -> Count:
        """Correct the gradients and add them up; returns what is still to be multiplied in."""
        return correction

    def norm(self, gradients: "Gradients") -> Tensor:
        """Return the norm of the whole gradient."""
        return gradients.norm()

    def telling_of_failure(self, _device: torch.device) -> AbstractContextManager[None]:
        """Tell others, who wait for this rank's statement, of an error inside."""
        return _NOTHING


@contextmanager
def adding_zeros(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Inside, a backward adds zeros to the leaves: a loss that counts nothing may have a gradient of 0 / 0."""
    hooks: list[Any] = [leaf.register_hook(torch.zeros_like) for leaf in leaves if leaf.requires_grad]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


_owners: "weakref.WeakKeyDictionary[Any, weakref.WeakSet[object]]" = weakref.WeakKeyDictionary()  # by their wrapper


def restore_after(owner: object, wrapper: Any, restore: Callable[[Any], None]) -> None:
    """Restore a wrapper when `owner` and all others who have changed it are gone."""
    _owners.setdefault(wrapper, weakref.WeakSet()).add(owner)
    reference = weakref.ref(wrapper)

    def restored() -> None:
        if (there := reference()) is not None and not [*_owners[there]]:
            restore(there)

    weakref.finalize(owner, restored)


def speak(wrapper: DistributedDataParallel, *, backward: bool = True, forward: bool = True) -> None:
    """Have a wrapper's next backward reduce what has been added up, and its forward send buffers; or not."""
    wrapper.require_backward_grad_sync, wrapper.require_forward_param_sync = backward, forward
    # Where a graph is said to be static, DDP reduces after its first backward, whatever it was told: unless it has.
    wrapper._static_graph_delay_allreduce_enqueued = not backward  # noqa: SLF001 - no public name
