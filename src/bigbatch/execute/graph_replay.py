"""Replay a call instead of launching it: at small sizes the host takes longer to launch kernels than they run.

A call is one micro-step, or all micro-batches of a window in lock-step. It is captured when its shapes come for the
second time. Its inputs and the gradients lie at fixed addresses; what it returns is entered into the window.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bigbatch.batch.tree import PLAIN, leaves, mapped
from bigbatch.execute.graph_record import Guard, NotCapturable, Recorder
from bigbatch.state.oom import is_out_of_memory
from bigbatch.window.gradients import Gradients


class Limits(NamedTuple):
    """When captures are no longer worth their while."""

    kept: int  # graphs; each holds its own inputs, all share the memory of activations
    fresh: int  # after so many first launches and captures ...
    replays: int  # ... each capture should have been replayed so often


_SHOWN = (*PLAIN, torch.dtype, torch.device)  # what `repr` shows in full
MICRO_STEPS = Limits(kept=64, fresh=256, replays=16)
WINDOWS = Limits(kept=8, fresh=32, replays=1)


class Call(NamedTuple):
    """What is launched, or captured and replayed, with the same inputs."""

    launch: Callable[[Any], Any]  # returns extras
    record: Callable[[Any], Any]  # is captured: each replay writes the tensors of its result anew
    enter: Callable[[Any], Any]  # takes that result into the window; returns extras
    before: Callable[[Any], object] = id  # gets it before each replay
    reads: Callable[[], Sequence[Tensor]] = tuple  # tensors that it reads and nobody else holds


@dataclass
class Captured:
    """A call of some shapes, ready to be replayed."""

    graph: torch.cuda.CUDAGraph
    inputs: dict[str, Tensor]
    result: Any  # its tensors lie where each replay writes them
    reached: list[bool]  # which parameters it adds a gradient to
    reads: Sequence[Tensor]  # held, or their memory might be another's

    def replay(self, inputs: Any) -> None:
        """Run it on other inputs of the same shapes."""
        for path, leaf in leaves(inputs):
            if path in self.inputs:
                self.inputs[path].detach().copy_(leaf.detach(), non_blocking=True)
        self.graph.replay()


class Replayed:
    """A call that is replayed where its inputs have the shapes of a capture, and launched elsewhere."""

    def __init__(self, models: Sequence[nn.Module], device: torch.device, limits: Limits, *, draws: bool) -> None:
        """Have no captures yet; `draws`: a replay may draw random numbers of the device."""
        self._guard, self._recorder, self._limits = Guard(models, device, draws=draws), Recorder(device), limits
        self.captured: dict[str, Captured] = {}
        self._seen: set[str] = set()  # shapes, of which some never come again
        self._gradients: list[Tensor | None] = []  # at the addresses that graphs know
        self._held: list[Tensor | None] = []  # the same as parameters have them, perhaps of another type than they
        self._opened: list[int] = []  # their versions at first; -1 of those that replays of this window have added to
        self._known: dict[int, bool] = {}  # by their ids: which parameters got a gradient in a window that was launched
        self.launches = self.captures = self.replays = 0

    @contextmanager
    def window(self, call: Call, gradients: Gradients, settings: object) -> Iterator[Callable[[str, Any], Any]]:
        """Between two updates; yields what runs the call with inputs of a shape, which is "" if it won't come again."""
        if self._guard.changed(gradients.parameters, settings):
            self.forget()
        opened = self._open(gradients)

        def run(shape: str, inputs: Any) -> Any:
            is_new = shape not in self._seen
            if shape and is_new:  # capturing it takes longer than launching it some times
                self._seen.add(shape)
                self.launches += 1
                self._refuse_waste()
            if shape and not is_new and opened:
                return call.enter(self._replayed(shape, inputs, call, gradients))
            extras = call.launch(inputs)
            # A table may have been made, for a longer micro-batch: graphs are captured anew, the window goes on.
            if self._guard.changed(gradients.parameters, settings):
                self.captured.clear()
                self._recorder.forget()
            return extras

        yield run
        (self._close if opened else self._note)(gradients)

    def forget(self) -> bool:
        """Drop all graphs, and the memory they hold; returns whether there were any."""
        found, self.captured, self._seen = bool(self.captured), {}, set()
        self._gradients, self._held = [], []
        self._recorder.forget()
        return found

    def _refuse_waste(self) -> None:
        worth = self.replays >= self._limits.replays * self.captures and self.captures + self.replays >= self.launches
        if self.launches + self.captures > self._limits.fresh and not worth:
            raise NotCapturable(
                f"of {self.launches + self.captures + self.replays} calls {self.launches} were the first of their "
                f"shape, {self.captures} were captured, and {self.replays} replayed: shapes take turns, or something "
                "that modules keep (a number, a hook, a mode) or a number in the batch changes all the time. Cut "
                "batches alike, and make what changes a tensor of the batch"
            )

    def _note(self, gradients: Gradients) -> None:
        self._known = {id(p): p.grad is not None for p in gradients.parameters}

    def _open(self, gradients: Gradients) -> bool:
        """Have gradients of zero at the addresses that graphs know; returns whether it is known who gets one.

        Other parameters have none, not one of zero, which an optimizer would step with.
        """
        if self._known.keys() != {id(p) for p in gradients.parameters}:
            return False
        if not self._gradients:
            self._gradients = [
                torch.zeros_like(p, dtype=gradients.dtype_of(p), requires_grad=False) if self._known[id(p)] else None
                for p in gradients.parameters
            ]
        torch._foreach_zero_([g for g in self._gradients if g is not None])
        gradients.preset(self._gradients)
        self._held = [p.grad for p in gradients.parameters]
        self._opened = self._versions()
        return True

    def _close(self, gradients: Gradients) -> None:
        """Take gradients of zero back that nothing was added to: an optimizer would let their parameters decay."""
        others = self._others(gradients)
        for p, now, before, other in zip(gradients.parameters, self._versions(), self._opened, others, strict=True):
            if now == before and not other:
                p.grad = None
        if any(others):  # a launch has reached more parameters than any before
            self._note(gradients)
            self.captured.clear()
            self._gradients, self._held = [], []
        gradients.remember()

    def _replayed(self, shape: str, inputs: Any, call: Call, gradients: Gradients) -> Any:
        """Return the result of a replay; its tensors are written by the next one. Captures where there is no graph."""
        captured = self.captured.pop(shape, None)
        if captured is None:
            try:
                captured = self._capture(inputs, call, gradients)
            except Exception as error:
                if is_out_of_memory(error):
                    raise NotCapturable("there is no memory for its graph") from error
                raise
        else:
            self.replays += 1
            call.before(captured.result)
            captured.replay(inputs)
        while len(self.captured) >= self._limits.kept:
            del self.captured[next(iter(self.captured))]
        self.captured[shape] = captured  # the one that was used last comes last
        self._opened = [-1 if reached else was for was, reached in zip(self._opened, captured.reached, strict=True)]
        return captured.result

    def _capture(self, inputs: Any, call: Call, gradients: Gradients) -> Captured:
        """Capture a call, and replay it for the first time: capturing computes nothing."""
        self._refuse_waste()
        self.captures += 1
        fixed = {
            path: leaf.detach().clone().requires_grad_(leaf.requires_grad)
            for path, leaf in leaves(inputs)
            if isinstance(leaf, Tensor)
        }
        given, versions = mapped(inputs, fixed.get), self._versions()
        with self._guard.capturing():
            # Weights that autocast has cast outside are not used inside; those of the inside are the graph's.
            torch.clear_autocast_cache()
            try:
                graph, result = self._recorder.record(partial(call.record, given))
            finally:
                torch.clear_autocast_cache()
            if any(self._others(gradients)):
                raise NotCapturable("another set of parameters gets gradients than before")
            # What is captured changes no value, but counts as a change in place: so it tells who gets a gradient.
            reached = [now != then for now, then in zip(self._versions(), versions, strict=True)]
            gradients.remember()
            captured = Captured(graph, fixed, result, reached, call.reads())
            call.before(result)
            captured.replay(inputs)
        return captured

    def _others(self, gradients: Gradients) -> list[bool]:
        return [p.grad is not held for p, held in zip(gradients.parameters, self._held, strict=True)]

    def _versions(self) -> list[int]:
        return [0 if g is None else g._version for g in self._held]  # noqa: SLF001 - torch's own counter


def shape_of(inputs: Any) -> str:
    """Name the shapes and kinds of all tensors; anything else by its value, which a graph bakes in."""
    return "; ".join(f"{path} {_named(leaf)}" for path, leaf in leaves(inputs))


def _named(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype} {tuple(leaf.shape)}{' wants a gradient' if leaf.requires_grad else ''}"
    if hasattr(leaf, "tobytes"):  # numpy shows large arrays in part
        return f"{type(leaf).__name__} {getattr(leaf, 'dtype', '')} {getattr(leaf, 'shape', '')} {leaf.tobytes()!r}"
    _refuse_unknown("its batch holds", leaf)
    return repr(leaf)


def refuse_hidden(extras: Any) -> None:
    """Raise where a tensor may be hidden in an object: it would be the graph's own memory."""
    for _, leaf in leaves(extras):
        if not isinstance(leaf, Tensor):
            _refuse_unknown("among its extras loss_fn returns", leaf)


def _refuse_unknown(where: str, leaf: Any) -> None:
    of_many = isinstance(leaf, list | tuple)
    if not all(each is None or isinstance(each, _SHOWN) for each in (leaf if of_many else [leaf])):
        raise NotCapturable(
            f"{where} a {type(leaf).__name__}, which a graph cannot look into; use tensors and numbers, in tuples, "
            "dicts or dataclasses"
        )


def copied(extras: Any) -> Any:
    """Return copies of all tensors: the next replay writes to the same places."""
    return mapped(extras, lambda _, leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)
