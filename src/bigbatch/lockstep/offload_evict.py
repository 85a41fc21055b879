"""What a micro-batch holds on the device while it waits at a norm; where that is too much, some wait without it.

Each of many micro-batches comes to a norm with a large tensor, and often with that of a shortcut as well: together more
than all activations of one. So beyond a limit, whichever their number, micro-batches leave the memory of what they hold
behind. In forward the host has a copy anyway; in backward a gradient is copied out and back. The tensors themselves
stay: autograd and the model's own code hold them, and find them as they were.
"""

from collections.abc import Callable, Iterable
from operator import is_

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from bigbatch.lockstep.offload_fetch import Held

_PLAIN = frozenset({Tensor, nn.Parameter})
_FEW = 8  # operations: more are a layer's


class Holdings:
    """The memory that each micro-batch is known to hold."""

    def __init__(self, limit: int | None, kept: Callable[[], Iterable[Tensor]]) -> None:
        """`limit`: bytes that may wait on the device; `kept`: tensors whose memory stays, whoever waits."""
        self._limit, self._kept = limit, kept
        self._of: dict[int, dict[int, Held]] = {}
        self._first: dict[int, tuple[int, Held]] = {}  # whose a piece of memory was first
        self._staying: set[int] = set()  # what more than one has come with
        self._known: tuple[list[Tensor], list[int], set[int]] = [], [], set()  # what was kept, where, and its memory

    def add(self, worker: int, tensor: Tensor, number: int | None = None) -> None:
        """Know of a tensor that a micro-batch has for itself alone, where its memory can go and come back."""
        storage = tensor.untyped_storage()
        if self._limit is None or not _is_all_of(tensor, storage) or _is_of_weights(tensor):
            return
        name, held = name_of(storage), Held(StorageWeakRef(storage), number)
        whose, first = self._first.get(name, (worker, held))
        if whose != worker and not first.reference.expired():
            self._staying.add(name)
        else:
            self._first[name] = worker, held
            self._staying.discard(name)  # a piece before it had its place
        self._of.setdefault(worker, {})[name] = held

    def may_go(self, held: Held) -> bool:
        """Whether nobody else has come with it."""
        return held.reference.cdata not in self._staying

    def leaving(self, worker: int, workers: int, beside: int, shared: Iterable[Tensor] = ()) -> list[Held]:
        """Return what a micro-batch leaves behind, `beside` being bytes that it can do without anyway.

        Of all `workers`, which hold about the same, as many leave as must, one here and one there; none leaves what is
        `shared` by all.
        """
        if self._limit is None:
            return []
        mine = self._of.get(worker, {})
        held, storage = beside, None
        for name, each in list(mine.items()):
            storage = each.taken()
            if storage is None:
                del mine[name]
            else:
                held += storage.nbytes()
        del storage
        share = 1 - self._limit / max(workers * held, 1)
        if share <= 0 or int((worker + 1) * share) == int(worker * share):
            return []
        staying = self._kept_memory() | {name_of(tensor.untyped_storage()) for tensor in shared} | self._staying
        return [each for name, each in mine.items() if name not in staying]

    def _kept_memory(self) -> set[int]:
        """Return the memory that is kept now. The tensors are looked at every time, but their memory takes longer."""
        now = list(self._kept())
        places = [each.data_ptr() if type(each) in _PLAIN else name_of(each.untyped_storage()) for each in now]
        before, where, found = self._known
        if len(now) != len(before) or places != where or not all(map(is_, now, before)):
            found = {name_of(each.untyped_storage()) for each in now}
            self._known = now, places, found
        return found

    def forget(self) -> None:
        """Forget all."""
        self._known = [], [], set()
        self._of.clear()
        self._first.clear()
        self._staying.clear()


def _is_all_of(tensor: Tensor, storage: torch.UntypedStorage) -> bool:
    """Whether this memory is of this tensor, value by value, and may be given up."""
    plain = not tensor.is_conj() and not tensor.is_neg() and not tensor.storage_offset()
    return plain and storage.nbytes() == tensor.numel() * tensor.element_size() and storage.resizable()


def _is_of_weights(tensor: Tensor) -> bool:
    """Whether a tensor is made of weights alone, in a few steps: autocast keeps its casts for all micro-batches."""
    nodes, seen = [tensor.grad_fn], 0
    while nodes:
        node = nodes.pop()
        seen += 1
        if node is None or seen > _FEW:  # of something that no gradient goes to, as samples are
            return False
        nodes += [below for below, _ in node.next_functions]
    return True


def name_of(storage: torch.UntypedStorage) -> int:
    """Return what tells a piece of memory from all others that live."""
    name: int = storage._cdata  # noqa: SLF001 - as torch.multiprocessing has it
    return name
