"""Windows that are replayed whole: all their micro-batches, forward and backward, with the meetings between.

In lock-step the host launches kernels as in any loop, and wakes a thread at every meeting. With small micro-batches
that takes longer than the device computes. But all of it goes there in a fixed order: so a window whose shapes have
come before is captured as one CUDA graph, from the first forward to the last backward, and replayed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bigbatch.batch.tree import PLAIN, leaves, mapped
from bigbatch.execute.graph_guard import keeping_tables
from bigbatch.execute.graph_record import NotCapturable, Recorder
from bigbatch.execute.graph_replay import shape_of
from bigbatch.lockstep.surroundings import Surroundings
from bigbatch.state.oom import is_out_of_memory
from bigbatch.state.rng import Draws, Streams
from bigbatch.state.snapshot import devices_of
from bigbatch.window.gradients import Gradients
from bigbatch.window.stepper import Stepper
from bigbatch.window.window import Recorded, Window

_KEEP = 8  # graphs; all share the memory of activations, and each holds a batch
_SHAPES = 64  # windows that were launched before as many should have been replayed
_PATIENCE = 16  # windows that were captured before as many should have been replayed

State = Callable[[Gradients], object]
Launch = Callable[[Window, Iterator[Any]], list[Any]]


@dataclass
class _Captured:
    """A window of some shapes, ready to be replayed."""

    graph: torch.cuda.CUDAGraph
    inputs: list[dict[str, Tensor]]
    extras: list[Any]
    recorded: Recorded
    reads: list[Tensor]  # beside its inputs: held, or their memory might be another's

    def replay(self, micro_batches: Sequence[Any]) -> list[Any]:
        """Run it on other micro-batches of the same shapes; returns their extras."""
        for inputs, micro_batch in zip(self.inputs, micro_batches, strict=True):
            for path, leaf in leaves(micro_batch):
                if path in inputs:
                    inputs[path].detach().copy_(leaf.detach(), non_blocking=True)
        self.graph.replay()
        return [
            mapped(each, lambda _, leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf) for each in self.extras
        ]


class WholeWindows:
    """The captured windows of one `BigStep`."""

    def __init__(self, models: Sequence[nn.Module], device: torch.device, stepper: Stepper) -> None:
        """Have none yet."""
        self._models, self._stepper = models, stepper
        self._recorder = Recorder(device)
        self.held: Callable[[], list[Tensor]] = list  # what graphs read beside their inputs
        self._captured: dict[str, _Captured] = {}
        self._seen: set[str] = set()  # shapes
        self._state: object = None
        self._surroundings: Surroundings | None = None
        self._reached: list[bool] = []  # which parameters got a gradient in a window that was launched
        self._gradients: list[Tensor | None] = []
        self._held: list[Tensor | None] = []  # the same as parameters have them, perhaps of another type than they
        self._launches = self._captures = self._replays = 0

    def run(self, window: Window, micro_batches: Iterable[Any], kind: str, state: State, launch: Launch) -> list[Any]:
        """Add all micro-batches to a window by a replay, or `launch` them; returns their extras.

        Windows of another `kind` are captured for themselves. `state` tells what all depend on beside, as it is now.
        """
        given = list(micro_batches)
        shapes = "\n".join([kind, *map(shape_of, given)])
        self._settle(state(window.gradients))
        captured = self._captured.pop(shapes, None)
        if captured is None and shapes not in self._seen:
            return self._launched(window, given, shapes, state, launch)
        self._open(window.gradients)
        if captured is None:
            self._refuse_in_vain()
            captured, extras = self._capture(window, given, launch)
        else:
            extras = captured.replay(given)
            self._replays += 1
        while len(self._captured) >= _KEEP:
            del self._captured[next(iter(self._captured))]
        self._captured[shapes] = captured  # the one that was used last comes last
        window.take(captured.recorded)
        return extras

    def forget(self) -> bool:
        """Throw all graphs away, and the memory they hold; returns whether there were any."""
        found = bool(self._captured)
        self._captured.clear()
        self._seen.clear()
        self._gradients, self._held = [], []
        self._recorder.forget()
        return found

    def _settle(self, state: object) -> None:
        """Go on in a state; where it is another than before, all is new."""
        if self._surroundings is None:
            self._surroundings = Surroundings(self._models)
        stays = self._surroundings.stay()
        if state != self._state or not stays:
            self.forget()
            self._state = state

    def _launched(self, window: Window, given: list[Any], shapes: str, state: State, launch: Launch) -> list[Any]:
        """Run a window as it is: capturing takes longer, and what comes once is not worth it."""
        if self._stepper.scaler is not None and self._stepper.scaler.is_enabled():
            raise NotCapturable("a gradient scaler changes its scale, which a graph would keep")
        if self._launches >= _SHAPES and self._replays < self._launches:
            every = self._launches + self._captures + self._replays
            msg = f"of {every} batches {self._launches} were the first of their shape"
            raise NotCapturable(msg)
        devices = devices_of(self._models)
        if len(devices) > 1:
            raise NotCapturable(f"its parameters are on {len(devices)} devices")
        self._launches += 1
        extras = launch(window, iter(given))
        self._settle(state(window.gradients))  # a first forward may have made tables, and counted in its attributes
        self._seen.add(shapes)
        self._reached = [p.grad is not None for p in window.gradients.parameters]
        return extras

    def _open(self, gradients: Gradients) -> None:
        """Have gradients of zero at the addresses that the graphs know; none where none comes."""
        if not self._gradients:
            self._gradients = [
                torch.zeros_like(p, dtype=gradients.dtype_of(p), requires_grad=False) if used else None
                for p, used in zip(gradients.parameters, self._reached, strict=True)
            ]
        torch._foreach_zero_([g for g in self._gradients if g is not None])
        gradients.preset(self._gradients)
        self._held = [p.grad for p in gradients.parameters]

    def _refuse_in_vain(self) -> None:
        """Raise where capturing has taken more than it gave: each takes as long as launching some windows."""
        self._captures += 1
        if self._captures > _PATIENCE and self._replays < self._captures:
            msg = (
                f"{self._captures - 1} windows were captured and {self._replays} replayed: batches of more than "
                f"{_KEEP} shapes take turns, or something that modules keep (a number, a hook, a mode) changes all the "
                "time. Cut batches alike, and make what changes a tensor of the batch"
            )
            raise NotCapturable(msg)

    def _capture(self, window: Window, given: list[Any], launch: Launch) -> tuple[_Captured, list[Any]]:
        """Capture a window, and replay it for the first time: capturing computes nothing."""
        own = self._surroundings.generators if self._surroundings is not None else ()
        draws = Draws(Streams(devices_of(self._models), 1), own)
        try:
            with keeping_tables(self._models):  # where any of this is refused, models have what they had before
                captured = self._recorded(window, given, launch)
                found = captured.replay(given)
                _refuse_drawn(draws)
        except BaseException as error:
            draws.put_back()
            if isinstance(error, Exception) and is_out_of_memory(error):
                raise NotCapturable("there is no memory for its graph") from error
            raise
        return captured, found

    def _recorded(self, window: Window, given: list[Any], launch: Launch) -> _Captured:
        inputs = [
            {path: leaf.detach().clone().requires_grad_(leaf.requires_grad) for path, leaf in _tensors(each)}
            for each in given
        ]
        fixed = [mapped(each, _places(own)) for each, own in zip(given, inputs, strict=True)]
        versions = [None if g is None else g._version for g in self._held]  # noqa: SLF001 - torch's own counter

        def run() -> tuple[list[Any], Recorded]:
            extras = launch(window, iter(fixed))
            if isinstance(window.residual, Tensor) or window.residual != 1.0:
                raise NotCapturable("its loss is of low precision, which cannot hold a weight; compute it in float32")
            _refuse_hidden(extras)
            return extras, window.recorded()

        with self._recording(window):
            graph, (extras, recorded) = self._recorder.record(run)
        self._refuse_other_gradients(window.gradients, versions)
        return _Captured(graph, inputs, extras, recorded, self.held())

    @contextmanager
    def _recording(self, window: Window) -> Iterator[None]:
        """Inside, nothing is used that was made outside and kept for a while, and outside nothing of the inside."""
        window.recording = True
        self._stepper.start = None
        torch.clear_autocast_cache()
        try:
            yield
        finally:
            window.recording = False
            self._stepper.start = None
            torch.clear_autocast_cache()

    def _refuse_other_gradients(self, gradients: Gradients, versions: list[int | None]) -> None:
        """A replay adds to the gradients that are there; capturing counts as a change of theirs, so it tells whose."""
        for p, held, version in zip(gradients.parameters, self._held, versions, strict=True):
            if p.grad is not held or (held is not None and held._version == version):  # noqa: SLF001
                raise NotCapturable("another set of parameters gets gradients than in the window before")


def _tensors(micro_batch: Any) -> Iterator[tuple[str, Tensor]]:
    return ((path, leaf) for path, leaf in leaves(micro_batch) if isinstance(leaf, Tensor))


def _refuse_drawn(draws: Draws) -> None:
    """A replay draws other numbers on a device, of one stream for all, and the same ones again on the host."""
    draws.settle()
    if draws.drew:
        raise NotCapturable("it draws random numbers, of which each micro-batch has a stream of its own")


def _refuse_hidden(extras: list[Any]) -> None:
    """Raise where a tensor may be hidden in an object: it would be the graph's own memory."""
    for _, leaf in leaves(extras):
        if leaf is not None and not isinstance(leaf, (Tensor, *PLAIN, torch.dtype, torch.device)):
            raise NotCapturable(
                f"loss_fn returns a {type(leaf).__name__} among its extras, which a graph cannot look into; return "
                "tensors, in tuples, dicts or dataclasses"
            )


def _places(own: dict[str, Tensor]) -> Callable[[str, Any], Any]:
    return own.get
