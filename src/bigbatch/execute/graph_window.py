"""Windows in lock-step that are replayed whole: forward and backward of all micro-batches, with what they exchange.

In lock-step the host launches kernels as in any loop, and wakes a thread at every exchange. With small micro-batches
that takes longer than the device computes. But the order is fixed, so a window whose shapes come again is one graph.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bigbatch.execute.graph_record import NotCapturable
from bigbatch.execute.graph_replay import WINDOWS, Replayed, copied, refuse_hidden, shape_of
from bigbatch.state.snapshot import devices_of
from bigbatch.window.stepper import Stepper
from bigbatch.window.window import Recorded, Window

Launch = Callable[[Window, Iterator[Any]], list[Any]]


class WholeWindows:
    """The captured windows of one `BigStep`."""

    def __init__(self, models: Sequence[nn.Module], device: torch.device, stepper: Stepper) -> None:
        """Have none yet. A replay may draw no numbers: each micro-batch has a stream of its own."""
        self._models, self._stepper = models, stepper
        self.graphs = Replayed(models, device, WINDOWS, draws=False)

    def run(
        self,
        window: Window,
        micro_batches: Iterable[Any],
        launch: Launch,
        *,
        settings: object,
        kind: str,
        reads: Callable[[], Sequence[Tensor]],
    ) -> list[Any]:
        """Add all micro-batches to a window by a replay, or `launch` them; returns their extras.

        Windows of another `kind` are captured for themselves; `settings` are what all depend on beside; `reads` returns
        tensors that they read and nobody else holds.
        """
        try:
            return self._run(window, list(micro_batches), launch, settings, kind, reads)
        except NotCapturable as error:
            error.of_window = True
            raise

    def _run(  # noqa: PLR0917 - as above
        self,
        window: Window,
        given: list[Any],
        launch: Launch,
        settings: object,
        kind: str,
        reads: Callable[[], Sequence[Tensor]],
    ) -> list[Any]:
        graphs, gradients = self.graphs, window.gradients
        shape = f"{kind}; {shape_of(given)}"
        graphs.settle(gradients, settings)
        if graphs.is_new(shape) or not graphs.open(gradients):
            self._refuse()
            extras = launch(window, iter(given))
            graphs.renew(gradients, settings)  # a first forward may have made tables, and counted in its attributes
            graphs.note(gradients)
            return extras

        def call(fixed: list[Any]) -> tuple[list[Any], Recorded]:
            with self._recording(window):
                extras = launch(window, iter(fixed))
                if isinstance(window.residual, Tensor) or window.residual != 1.0:
                    raise NotCapturable(
                        "its loss is of low precision, which cannot hold a weight; compute it in float32"
                    )
                refuse_hidden(extras)
                return extras, window.recorded()

        extras, recorded = graphs.run(shape, given, call, gradients, reads=reads)
        window.take(recorded)
        graphs.close(gradients)
        found: list[Any] = copied(extras)
        return found

    def _refuse(self) -> None:
        if self._stepper.scaler is not None and self._stepper.scaler.is_enabled():
            raise NotCapturable("a gradient scaler changes its scale, which a graph would keep")
        devices = devices_of(self._models)
        if len(devices) > 1:
            raise NotCapturable(f"its parameters are on {len(devices)} devices")

    @contextmanager
    def _recording(self, window: Window) -> Iterator[None]:
        """Use no start of a backward that was made outside, and leave none of the inside."""
        window.recording, self._stepper.start = True, None
        try:
            yield
        finally:
            window.recording, self._stepper.start = False, None
