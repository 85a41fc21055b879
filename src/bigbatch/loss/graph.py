"""Autograd nodes as they stand: what they are called, how large they are, what they came from.

Everything here is read from a node's metadata. A saved tensor is looked at only where no hook guards it: unpacking
one of those may copy it from the host or recompute a checkpointed block.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor, overrides
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

Edge: TypeAlias = tuple[Node | None, int]
Shape: TypeAlias = tuple[int, ...]

_WRAP = 1 << 63  # torch shows a saved negative integer as unsigned 64-bit
_dispatching, _overriding = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack


def is_watched() -> bool:
    """Tell whether a mode sees what torch does: it counts operations, logs them, or does something else instead."""
    return _dispatching() > 0 or _overriding() > 0


@contextmanager
def unseen() -> Iterator[None]:
    """Read where no mode looks: it is about what the model does, and gets numbers of a graph that are no tensors."""
    modes = [overrides._pop_mode() for _ in range(_overriding())]
    try:
        with _disable_current_modes() if _dispatching() else nullcontext():
            yield
    finally:
        for mode in reversed(modes):
            overrides._push_mode(mode)


def operation(node: Node) -> str:
    """Give the operation behind a node: `NllLossBackward0` is `NllLoss`."""
    sort = type(node)
    if sort in _names:
        return _names[sort]
    name = node.name().rpartition("::")[2]
    found: str = getattr(sort, _STANDS_FOR, "")
    found = found or name.removesuffix("_copy").rstrip("0123456789").removesuffix("Backward")
    if sort.__name__ == name and not is_custom(node):  # a type of its own; asking for names is slow
        _names[sort] = found
    return found


_names: dict[type, str] = {}  # what torch calls its own types of nodes
_STANDS_FOR, _SHARED = "_bigbatch_stands_for", "_bigbatch_shared"


def stands_for(function: Any, name: str) -> None:
    """Have the nodes of an `autograd.Function` of ours read as those of the operation that it stands for."""
    setattr(function._backward_cls, _STANDS_FOR, name)


def is_stand_in(sort: type) -> bool:
    """Tell whether nodes of this type stand for an operation of torch."""
    return hasattr(sort, _STANDS_FOR)


def shared_by_all(function: Any) -> None:
    """Have the results of an `autograd.Function` of ours known as the same for all samples, in every micro-batch."""
    setattr(function._backward_cls, _SHARED, True)


def is_shared_by_all(node: Node) -> bool:
    """Tell whether a node's result was made of all micro-batches, with an exact gradient."""
    return hasattr(type(node), _SHARED)


_shared_values: dict[int, StorageWeakRef] = {}


def remember_shared(value: Tensor) -> None:
    """Have a tensor without gradient known as the same in every micro-batch: it has no place in a graph."""
    for key in [key for key, known in _shared_values.items() if known.expired()]:
        del _shared_values[key]
    storage = value.untyped_storage()
    _shared_values[storage._cdata] = StorageWeakRef(storage)  # as torch.multiprocessing has it


def is_shared_value(tensor: Tensor) -> bool:
    """Tell whether a tensor without gradient is the same in every micro-batch."""
    known = _shared_values.get(tensor.untyped_storage()._cdata) if _shared_values else None
    return known is not None and not known.expired()


def edges(node: Node) -> tuple[Edge, ...]:
    """Return the inputs of the operation; (None, 0) stands for one without gradient."""
    return node.next_functions


def shape(node: Node, output: int = 0) -> Shape:
    """Return the shape of one of the operation's results."""
    metadata: Any = node
    return tuple(metadata._input_metadata[output].shape)


def results(node: Node) -> int:
    """Return how many results an operation has."""
    metadata: object = getattr(node, "_input_metadata", ())
    return len(metadata) if isinstance(metadata, list | tuple) else 1


def size_of(edge: Edge) -> Shape:
    """Return the shape of an input; () for one without gradient."""
    node, output = edge
    return shape(node, output) if node is not None else ()


def is_leaf(node: Node) -> bool:
    """Tell whether the node is a tensor that gradients are added to."""
    return operation(node) == "AccumulateGrad"


def is_custom(node: Node) -> bool:
    """Tell whether the node is a Python `autograd.Function`; compiled code and checkpoints are, too."""
    found: Any = node
    return isinstance(found, BackwardCFunction) and not is_stand_in(type(node))


def variable(leaf: Node) -> Tensor:
    """Return the tensor that a leaf node adds gradients to."""
    accumulate: Any = leaf
    found: Tensor = accumulate.variable
    return found


def saved(node: Node, name: str, default: Any = None) -> Any:
    """Return a saved attribute that is not a tensor: a dimension, a size, a flag."""
    return getattr(node, "_saved_" + name, default)


def signed(number: int) -> int:
    """Return a saved integer as it was: torch shows negative ones as unsigned."""
    return number - 2 * _WRAP if number >= _WRAP else number


def saved_dim(node: Node, name: str, rank: int) -> int:
    """Return a saved dimension as an index into a shape of this rank."""
    dim = signed(getattr(node, "_saved_" + name))
    return dim % rank if rank else 0


def saved_dims(node: Node, rank: int) -> Shape:
    """Return the saved dimensions of a reduction; none saved means all."""
    dims = getattr(node, "_saved_dim", None)
    if dims is None or dims == ():
        return tuple(range(rank))
    return tuple(signed(dim) % rank for dim in ((dims,) if isinstance(dims, int) else dims))


def saved_tensor(node: Node, name: str) -> Tensor | None:
    """Return a saved tensor, or None where it was not saved or a hook guards it."""
    raw = getattr(node, "_raw_saved_" + name, None)
    if raw is None or is_guarded(node, name, raw):
        return None
    try:
        found = getattr(node, "_saved_" + name)
    except RuntimeError:  # the graph was freed by an earlier backward
        return None
    return found if isinstance(found, Tensor) else None


def saved_indices(node: Node) -> tuple[Tensor | None, ...]:
    """Return the indices of an Index operation, one per dimension; none where a hook guards one of them."""
    raw = getattr(node, "_raw_saved_indices", None) or ()
    if TELLS_ITS_HOOK and any(each is not None and hides(each.unpack_hook) for each in raw):
        return ()
    return tuple(getattr(node, "_saved_indices", ()))


TELLS_ITS_HOOK = hasattr(torch._C._autograd.SavedTensor, "unpack_hook")


def hides(hook: Any) -> bool:
    """Tell whether a hook of a saved tensor may do something when it is read; one of ours `shows` what it has."""
    return hook is not None and not getattr(hook, "shows", False)


def is_guarded(node: Node, name: str, raw: Any) -> bool:
    """Tell whether a hook guards a saved tensor, so that reading it would run the hook."""
    if TELLS_ITS_HOOK:
        return hides(raw.unpack_hook)
    # torch 2.9 does not tell, but takes one pair of hooks only: ours, which do nothing, where there are no others.
    metadata: Any = node.metadata
    marks = metadata.setdefault("bigbatch has looked at", set())
    if name not in marks:
        try:
            raw.register_hooks(Tensor.detach, lambda tensor: tensor)  # an output that held itself would never be freed
        except RuntimeError:
            return True
        marks.add(name)
    return False


def saved_number(node: Node, name: str) -> float | None:
    """Return a saved scalar, where reading it does not wait for a device."""
    plain = getattr(node, "_raw_saved_" + name, None)
    if plain is None:
        found = getattr(node, "_saved_" + name, None)
        return float(found) if isinstance(found, int | float) else None
    tensor = saved_tensor(node, name)
    if tensor is None or tensor.dim() or tensor.device.type != "cpu" or tensor.is_complex():
        return None
    return float(tensor.detach())


_WEAKER = {torch.float64: torch.empty((), dtype=torch.float16), torch.int64: torch.empty((), dtype=torch.uint8)}


def is_number(tensor: Tensor) -> bool:
    """Tell whether a saved 0-d tensor was a Python number: torch promotes those less than real 0-d tensors."""
    if tensor.dim() or tensor.dtype not in _WEAKER:
        return False
    return torch.result_type(_WEAKER[tensor.dtype], tensor) != tensor.dtype


def python_number(node: Node, name: str) -> float | None:
    """Return a saved scalar that was written as a Python number, not one that was computed."""
    if getattr(node, "_raw_saved_" + name, None) is None:
        return saved_number(node, name)
    tensor = saved_tensor(node, name)
    return float(tensor) if tensor is not None and is_number(tensor) else None


def is_parameter(node: Node | None, own: frozenset[int] = frozenset()) -> bool:
    """Tell whether a node is a parameter, perhaps seen through a transpose, a cast or a view."""
    for _ in range(8):
        if node is None:
            return False
        if is_leaf(node):
            found = variable(node)
            return isinstance(found, torch.nn.Parameter) or id(found) in own
        if operation(node) not in LOOKS_THROUGH:
            return False
        node = node.next_functions[0][0]
    return False


LOOKS_THROUGH = frozenset(
    "T Transpose Permute View ReshapeAlias UnsafeView Expand Unsqueeze Squeeze Clone Alias ToCopy Slice Select Split "
    "SplitWithSizes Unbind Chunk WeightNormInterface".split()
)
