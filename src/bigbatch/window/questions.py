"""Whether a loss has asked for other micro-batches, with `across`, where an accumulator has none to ask."""

import weakref

from torch import Tensor

from bigbatch.loss import refusals
from bigbatch.state.scope import asked_anywhere, times_asked
from bigbatch.window.graph_scan import scan


class Questions:
    """What was asked since a batch was given out, or since a loss last passed."""

    def __init__(self) -> None:
        """Begin now."""
        self.anywhere = asked_anywhere[0]  # when it was last looked at: a number to be had quickly
        self._in_training = times_asked(in_training=True)  # when a loss last passed
        self._refused: weakref.ref[Tensor] | None = None  # the loss that was refused for it

    def check(self, loss: Tensor, since: int | None) -> None:
        """Refuse a loss that may have asked, perhaps for a value without a place in its graph.

        In `over` it may `since` its batch was given out, else since the last backward, with gradients enabled.
        """
        if since is not None:
            if times_asked() != since:
                raise refusals.alone()
        elif times_asked(in_training=True) != self._in_training or (self._refused and self._refused() is loss):
            self._in_training, self.anywhere = times_asked(in_training=True), -1  # look again
            self._refused = weakref.ref(loss)
            raise refusals.alone() if scan(loss).alone else refusals.asked_since()
        self.anywhere, self._refused = asked_anywhere[0], None
