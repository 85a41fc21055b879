"""What an operation does to samples: given the layout of its result, the layouts of its inputs.

One rule per kind of operation.
"""

from collections.abc import Callable
from typing import TypeAlias

from torch.autograd.graph import Node

from bigbatch.loss.graph import Edge, Shape, edges, operation, saved, saved_dim, saved_dims, shape, signed
from bigbatch.loss.layout import PICKED, SHARED, Axis, Dim, Layout, broadcast, mixed, reshaped, without_slivers

Inputs: TypeAlias = list[tuple[Edge, Layout]]
Rule: TypeAlias = Callable[[Node, int, Layout], Inputs]

NONE, MEAN, SUM = range(3)  # how torch writes a fused loss's reduction


MATMULS: dict[str, tuple[int, int]] = {  # which inputs are the left and the right factor
    "Mm": (0, 1),
    "Addmm": (1, 2),
    "Bmm": (0, 1),
    "Baddbmm": (1, 2),
    "Mv": (0, 1),
    "Addmv": (1, 2),
    "Cdist": (0, 1),
    "EuclideanDist": (0, 1),  # of many rows
    "Linear": (0, 1),  # ours, in micro_steps.casting; its right factor lies transposed, and is always a parameter
}


def size_of(edge: Edge) -> Shape:
    """Return the shape of an input; () for one without gradient."""
    node, output = edge
    return shape(node, output) if node is not None else ()


def only_input(node: Node) -> Edge:
    """Return the first input, of an operation that has one."""
    return edges(node)[0]


def pointwise(node: Node, output: int, layout: Layout) -> Inputs:
    """Each element comes from the elements at its place."""
    out, name = shape(node, output), operation(node)
    return [(edge, broadcast(layout, size_of(edge), out, name) if edge[0] else ()) for edge in edges(node)]


def fused_loss(node: Node, output: int, layout: Layout) -> Inputs:
    """Elementwise losses; with a reduction of their own they mix everything."""
    if saved(node, "reduction") == NONE:
        return pointwise(node, output, layout)
    return everything(node, output, layout)


def everything(node: Node, _output: int, _layout: Layout) -> Inputs:
    """Each element comes from all elements."""
    return [(edge, mixed(size_of(edge), operation(node))) for edge in edges(node)]


def view(node: Node, _output: int, layout: Layout) -> Inputs:
    """Reshapes: the same elements in the same order."""
    edge = only_input(node)
    return [(edge, reshaped(layout, size_of(edge), operation(node)))]


def unsqueeze(node: Node, _output: int, layout: Layout) -> Inputs:
    """Remove the dimension that was put in."""
    dim = saved_dim(node, "dim", len(layout))
    return [(only_input(node), layout[:dim] + layout[dim + 1 :])]


def squeeze(node: Node, _output: int, layout: Layout) -> Inputs:
    """Put the dimensions of size 1 back that were dropped."""
    edge = only_input(node)
    sizes = size_of(edge)
    dims = saved_dims(node, len(sizes))
    dropped = {d for d in dims if sizes[d] == 1}
    kept = iter(layout)
    return [(edge, tuple(((1, PICKED),) if d in dropped else next(kept) for d in range(len(sizes))))]


def transpose(node: Node, _output: int, layout: Layout) -> Inputs:
    """Swap two dimensions back."""
    rank = len(layout)
    if operation(node) == "T":
        return [(only_input(node), layout[::-1])]
    a, b = saved_dim(node, "dim0", rank), saved_dim(node, "dim1", rank)
    order = list(layout)
    order[a], order[b] = order[b], order[a]
    return [(only_input(node), tuple(order))]


def permute(node: Node, _output: int, layout: Layout) -> Inputs:
    """Put permuted dimensions back."""
    rank = len(layout)
    order: list[Dim] = [()] * rank
    for place, dim in enumerate(saved(node, "dims")):
        order[signed(dim) % rank] = layout[place]
    return [(only_input(node), tuple(order))]


def reduction(node: Node, _output: int, layout: Layout) -> Inputs:
    """Sums, norms, maxima over some dimensions: those are mixed."""
    edge, name = only_input(node), operation(node)
    sizes = size_of(edge)
    if not layout:
        return everything(node, 0, layout)
    dims = saved_dims(node, len(sizes))
    keep = bool(saved(node, "keepdim")) or len(layout) == len(sizes)
    rest = iter(layout)
    result: list[Dim] = []
    for d, size in enumerate(sizes):
        if d in dims:
            result.append(((size, name),))
            if keep:
                next(rest)
        else:
            result.append(next(rest))
    return [(edge, tuple(result))]


def along(node: Node, _output: int, layout: Layout) -> Inputs:
    """Softmax, sorting, cumulative sums, gathering: one dimension is mixed."""
    name = operation(node)
    mixing: Inputs = []
    for edge in edges(node):
        sizes = size_of(edge)
        if edge[0] is None or not sizes:
            mixing.append((edge, layout if edge[0] else ()))
            continue
        dim = saved_dim(node, "dim", len(sizes))
        mixing.append((edge, (*layout[:dim], ((sizes[dim], name),), *layout[dim + 1 :])))
    return mixing


def spatial(node: Node, _output: int, layout: Layout) -> Inputs:
    """Pooling, padding and interpolation: batch and channel stay, positions are mixed; a grid's, too."""
    name, result = operation(node), list[tuple[Edge, Layout]]()
    for place, edge in enumerate(edges(node)):
        sizes = size_of(edge)
        batched = f"{len(sizes) - 2}D" in name or "D" not in name  # an image alone is (channels, height, width)
        kept = 2 if place == 0 and batched and shape(node)[1:2] == sizes[1:2] else 1
        result.append((edge, (*layout[:kept], *mixed(sizes[kept:], name)) if edge[0] else ()))
    return result


def renorm(node: Node, _output: int, layout: Layout) -> Inputs:
    """Each slice along one dimension gets a norm of its own: all the others are mixed."""
    name, dim = operation(node), saved_dim(node, "dim", len(layout))
    other = mixed(shape(node), name)
    return [(only_input(node), tuple(layout[d] if d == dim else other[d] for d in range(len(layout))))]


def attention(node: Node, _output: int, layout: Layout) -> Inputs:
    """Scaled dot products: batch and head stay, positions are mixed."""
    name = operation(node)
    return [
        (edge, (*layout[:2], *(((size, name),) for size in size_of(edge)[2:]))) if edge[0] else (edge, ())
        for edge in edges(node)
    ]


def matmul(node: Node, _output: int, layout: Layout) -> Inputs:
    """Rows of the left factor, columns of the right one; the inner dimension is mixed."""
    name = operation(node)
    left, right = MATMULS[name]
    layout = (*without_slivers(layout[:-2]), *layout[-2:])  # an einsum may be a batch of one product
    result: Inputs = []
    for place, edge in enumerate(edges(node)):
        sizes = size_of(edge)
        if edge[0] is None:
            result.append((edge, ()))
        elif place == left:
            result.append((edge, (*layout[: len(sizes) - 1], ((sizes[-1], name),))))
        elif place == right and len(sizes) > 1:
            # Rows of one factor against rows of the other: what mixes them further up is not to blame.
            rows = layout[-1] if any(isinstance(tag, Axis) for _, tag in layout[-1]) else ((sizes[-1], name),)
            inner: Dim = ((sizes[-2], name),)
            last = (rows, inner) if name in {"Cdist", "EuclideanDist"} else (inner, rows)
            result.append((edge, (*_batch(layout, len(sizes), name, sizes), *last)))
        elif place == right:
            result.append((edge, (((sizes[0], name),),)))
        else:  # what was added
            result.append((edge, broadcast(layout, sizes, shape(node), name)))
    return result


def _batch(layout: Layout, rank: int, name: str, sizes: Shape) -> Layout:
    """Give the leading dimensions of a batched right factor; a plain matrix has none."""
    return layout[: rank - 2] if len(layout) == rank else mixed(sizes[:-2], name)


BY_CONSTANT = "Solve"


def matrices(node: Node, _output: int, layout: Layout) -> Inputs:
    """Inverses, determinants, solutions: what is done to each matrix of a batch; rows and columns are mixed.

    Each column of a right side has a solution of its own; a matrix without gradient may be a constant, or a sample's.
    """
    name, result, inputs = operation(node), list[tuple[Edge, Layout]](), edges(node)
    batch = max(len(size_of(edge)) for edge in inputs) - 2
    columns = name == "LinalgSolveTriangular" and saved(node, "left")
    last = without_slivers(layout[-1:]) if inputs[0][0] is not None else mixed(shape(node)[-1:], BY_CONSTANT)
    for place, edge in enumerate(inputs):
        sizes = size_of(edge)
        apart = len(sizes) > batch and sizes[:batch] == shape(node)[:batch]
        below = (*layout[:batch], *mixed(sizes[batch:], name)) if apart else mixed(sizes, name)
        below = (*below[:-1], *last) if columns and place else below
        result.append((edge, below))
    return result


def diag_embed(node: Node, _output: int, layout: Layout) -> Inputs:
    """A dimension put on the diagonal of two, which mix it."""
    edge, rank = only_input(node), len(layout)
    dims = saved_dim(node, "dim1", rank), saved_dim(node, "dim2", rank)
    return [
        (edge, (*(dim for d, dim in enumerate(layout) if d not in dims), *mixed(size_of(edge)[-1:], operation(node))))
    ]


def view_as_real(node: Node, _output: int, layout: Layout) -> Inputs:
    """A complex tensor as pairs of numbers, put last."""
    return [(only_input(node), layout[:-1])]


def view_as_complex(node: Node, _output: int, layout: Layout) -> Inputs:
    """Pairs of numbers as complex ones."""
    return [(only_input(node), (*layout, *mixed((2,), operation(node))))]


def nll(node: Node, _output: int, layout: Layout) -> Inputs:
    """Pick each row's target: samples stay, classes are mixed."""
    edge, name = only_input(node), operation(node)
    sizes = size_of(edge)
    if saved(node, "reduction") != NONE:
        return everything(node, 0, layout)
    if len(sizes) == 1:
        return [(edge, mixed(sizes, name))]
    return [(edge, (layout[0], ((sizes[1], name),), *layout[1:]))]


def per_sample(node: Node, _output: int, layout: Layout) -> Inputs:
    """Multi-class margins: one value a row, from the whole row."""
    if saved(node, "reduction") != NONE:
        return everything(node, 0, layout)
    edge, name = only_input(node), operation(node)
    return [(edge, (*layout[:1], *(((size, name),) for size in size_of(edge)[1:])))]


def ctc(node: Node, _output: int, layout: Layout) -> Inputs:
    """One value a sequence, from log-probabilities of shape (time, batch, classes)."""
    edge, name = only_input(node), operation(node)
    sizes = size_of(edge)
    if len(sizes) != len(("time", "batch", "classes")) or not layout:
        return everything(node, 0, layout)
    # Time comes first here, and is known not to hold samples: these lie behind it.
    return [(edge, (((sizes[0], SHARED),), layout[0], ((sizes[2], name),)))]


def convolution(node: Node, _output: int, layout: Layout) -> Inputs:
    """Samples stay; channels and positions are mixed."""
    name = operation(node)
    first, *rest = edges(node)
    sizes = size_of(first)
    return [
        (first, (*layout[:1], *(((size, name),) for size in sizes[1:]))),
        *((e, mixed(size_of(e), name)) for e in rest),
    ]


def flip(node: Node, _output: int, layout: Layout) -> Inputs:
    """Rows in another order."""
    name, rank = operation(node), len(layout)
    dims = {signed(d) % rank for d in saved(node, "dims") or range(rank)}
    return [(only_input(node), tuple(((shape(node)[d], name),) if d in dims else dim for d, dim in enumerate(layout)))]


def pad(node: Node, _output: int, layout: Layout) -> Inputs:
    """Padded dimensions no longer line up."""
    edge, name = only_input(node), operation(node)
    sizes = size_of(edge)
    return [
        (edge, tuple(((n, name),) if n != m else dim for n, m, dim in zip(sizes, shape(node), layout, strict=True)))
    ]


def unfold(node: Node, _output: int, layout: Layout) -> Inputs:
    """Windows over one dimension, put last: that dimension is mixed."""
    edge, name = only_input(node), operation(node)
    sizes = size_of(edge)
    dim = saved_dim(node, "dimension", len(sizes))
    return [(edge, (*layout[:dim], ((sizes[dim], name),), *layout[dim + 1 : -1]))]


def layer_norm(node: Node, _output: int, layout: Layout) -> Inputs:
    """Normalise over the last dimensions: those are mixed."""
    name = operation(node)
    kept = len(layout) - len(saved(node, "normalized_shape", (0,)))
    return _normalised(node, layout, kept, name)


def group_norm(node: Node, _output: int, layout: Layout) -> Inputs:
    """Normalise within a sample: all but the first dimension is mixed."""
    return _normalised(node, layout, 1, operation(node))


def batch_norm(node: Node, _output: int, layout: Layout) -> Inputs:
    """Batch statistics mix the samples; running statistics do not."""
    name = operation(node)
    if saved(node, "training"):
        sizes = shape(node)
        # instance_norm is a batch_norm of one batch with all samples' channels side by side
        layout = (((sizes[0], name if sizes[0] > 1 else PICKED),), layout[1], *(((size, name),) for size in sizes[2:]))
    return _normalised(node, layout, len(layout), name)


def _normalised(node: Node, layout: Layout, kept: int, name: str) -> Inputs:
    first, *rest = edges(node)
    inner = tuple(((size, name),) for size in shape(node)[kept:])
    return [(first, (*layout[:kept], *inner)), *((edge, mixed(size_of(edge), name)) for edge in rest)]
