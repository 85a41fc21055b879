"""A look through a whole graph, for what the walk to the model's edge does not see."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import Node

from bigbatch.loss.graph import edges, is_leaf, operation, saved, saved_tensor, shape, variable

_NODES_LOOKED_AT = 96
_BATCH_NORMS = frozenset("NativeBatchNorm CudnnBatchNorm MiopenBatchNorm SyncBatchNormFunction".split())


class Scan(NamedTuple):
    """What a whole graph holds."""

    reentrant_checkpoint: bool
    batch_norm: bool  # in training mode
    resting: frozenset[int] = frozenset()  # where running means of those in evaluation mode lie; 0: one cannot tell
    alone: bool = False  # it asked for other micro-batches where there were none
    leaves: Mapping[int, Tensor] = MappingProxyType({})  # the tensors that its gradient goes to, by their ids


def kind_of_graph(value: Tensor) -> int:
    """Tell graphs of different operations apart, whatever their sizes, by the part next to the loss."""
    found: dict[Node, None] = {} if value.grad_fn is None else {value.grad_fn: None}
    latest = list(found)
    while latest and len(found) < _NODES_LOOKED_AT:
        latest = [below for node in latest for below, _ in edges(node) if below is not None and below not in found]
        found.update(dict.fromkeys(latest))
    return hash(tuple(map(operation, found)))


def scan(value: Tensor) -> Scan:
    """Look through a whole graph."""
    stack, seen = [value.grad_fn], set[Node]()
    checkpoint = batch_norm_found = alone = False
    leaves, resting = dict[int, Tensor](), set[int]()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = operation(node)
        checkpoint = checkpoint or name == "CheckpointFunction"
        alone = alone or name == "_Alone"
        if is_leaf(node):
            leaves[id(variable(node))] = variable(node)
        if name in _BATCH_NORMS:
            batch_norm_found = batch_norm_found or _normalizes_by_batch(node)
            if not saved(node, "training"):
                mean = saved_tensor(node, "running_mean")
                resting.add(0 if mean is None else mean.data_ptr())
        stack.extend(below for below, _ in edges(node))
    return Scan(checkpoint, batch_norm_found, frozenset(resting), alone, leaves)


def _normalizes_by_batch(node: Node) -> bool:
    """Instance norm is a batch norm of one batch, (1, samples x channels, ...): that is none."""
    return bool(saved(node, "training")) and shape(node)[0] > 1
