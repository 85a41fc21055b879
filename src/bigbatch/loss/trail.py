"""What one reading of a graph knows beside it, what it looked at, and what earlier readings have settled."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor
from torch.autograd.graph import Node

# How a kind of graph was read where it could be read in one way only: that holds where it might be two.
Precedents: TypeAlias = dict[tuple[Hashable, ...], Any]


@dataclass(frozen=True)
class Surroundings:
    """What the reader knows beside the graph: whose parameters these are, and which tensors are the model's."""

    own: frozenset[int] = frozenset()  # ids of the optimizers' parameters: a plain tensor may be one
    is_weight: Callable[[Tensor], bool] = lambda _: False  # a frozen weight has no place in the graph
    micro_batch_norm: bool = False  # the user accepts BatchNorm over micro-batches
    time_first: bool = False  # a layer takes (time, batch, ...), so that samples may lie second
    # A tensor that divides a sum is taken for its count, and what is set against samples for theirs: it is checked.
    divisors: bool = False


@dataclass
class Trail:
    """The nodes that a reading has looked at, in order, and the saved tensors that were found to be frozen weights."""

    known: Surroundings = field(default_factory=Surroundings)
    precedents: Precedents = field(default_factory=dict)
    nodes: dict[Node, None] = field(default_factory=dict)
    weights: list[tuple[Node, str]] = field(default_factory=list)
    unbound: set[Node] = field(default_factory=set)  # unbinds along the samples
    passing: bool = False  # what was found holds for this graph alone: it is not to be remembered

    def passed(self, node: Node) -> None:
        """Take note of a node."""
        self.nodes[node] = None

    def add(self, other: "Trail") -> None:
        """Take over what was looked at on a trail of its own."""
        self.nodes.update(other.nodes)
        self.weights.extend(other.weights)

    def kind(self, *about: Hashable) -> tuple[Hashable, ...]:
        """Return the key of a precedent: of what, in graphs that are of one kind so far."""
        return (*about, *map(type, self.nodes))

    def is_as_before(self, about: Hashable, answer: object) -> bool:
        """Tell whether graphs of this kind have had the same answer; the first one settles it."""
        return bool(self.precedents.setdefault(self.kind(about), answer) == answer)
