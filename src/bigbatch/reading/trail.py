"""What one reading of a graph looked at, so that it can be remembered."""

from dataclasses import dataclass, field

from torch.autograd.graph import Node


@dataclass
class Trail:
    """The nodes that were looked at, in order, and whether a tensor's identity or content decided anything."""

    nodes: dict[Node, None] = field(default_factory=dict)
    by_tensor: bool = False

    def passed(self, node: Node) -> None:
        """Take note of a node."""
        self.nodes[node] = None
