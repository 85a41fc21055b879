"""What one reading of a graph looked at, so that it can be remembered."""

from dataclasses import dataclass, field

from torch.autograd.graph import Node


@dataclass
class Trail:
    """The nodes that were looked at, in order, and the saved tensors that were found to be frozen weights."""

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
