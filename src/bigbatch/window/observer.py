"""Whoever wants to see the gradient of a window while it grows; nothing is computed for it unless it asks."""

from typing import TYPE_CHECKING, Protocol

from bigbatch.loss.count import Count

if TYPE_CHECKING:
    from bigbatch.window.window import Window


class Witness(Protocol):
    """Sees a window twice."""

    def attends(self) -> bool:
        """Hear that a window opens; return whether to be shown it."""

    def first(self, window: "Window", start: Count, count: Count) -> None:
        """See a window when `.grad` holds its first micro-batch alone.

        `start` is what its backward was started with, loss scale included; `count` is what its loss was averaged over.
        """

    def whole(self, window: "Window") -> None:
        """See a window whose micro-batches are all there, before it is corrected, clipped and stepped with."""
