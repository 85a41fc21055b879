"""The windows of a training loop: which micro-batches went into each step, and what happened before it."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Literal

from bigbatch_lint.reading.module import Module
from bigbatch_lint.reading.names import announces_steps, role_of
from bigbatch_lint.running.values import Division, Event, Kind

_ACCUMULATING = {"accumulate", "sync_gradients", "_do_sync", "gradient_state"}
_MOST = 0.9  # of the rounds: a step in nearly each is a step in each
# In an unknown loop, steps happen elsewhere, or in turns, as a GAN's; an engine divides and steps; a plain one has a
# step per batch; "each" has one per micro-batch, though a window was announced.
Shape = Literal["unknown", "engine", "plain", "each", "accumulating"]


@dataclass(eq=False)
class Window:
    """One step, and what led to it since the one before."""

    step: Event
    is_inside: bool  # the step is in the loop
    backwards: list[Event]
    reached: list[Event]  # also those whose gradients were cleared
    events: list[Event]

    @cached_property
    def size(self) -> int:
        """Return the number of micro-batches."""
        return rounds_in(self.backwards)

    @property
    def place(self) -> ast.AST:
        """Return the condition that decides on the step, or the step."""
        return self.step.guard or self.step.node


class TrainingLoop:
    """One loop over micro-batches, with all that happened in it and around it."""

    def __init__(
        self, node: ast.AST, module: Module, events: list[Event], own: list[Event], steps: int, *, is_cleared: bool
    ) -> None:
        self.node, self.module, self.events, self.backwards = node, module, events, own
        self.steps = steps  # that a window should have
        self.is_cleared = is_cleared  # gradients are, somewhere in the same run
        self.inside = [event for event in events if event.round_of(node) is not None]
        self.within = set(self.inside)
        self.stepped = {event.subject for event in self.of("step")}
        self.first_round = own[0].round_of(node)
        self.kind = self.first_round.kind if self.first_round is not None else ""
        self.divides = any(event.divides for event in own)
        accumulates = any(each.context == "accumulate" for event in own for each in event.contexts)
        self.has_framework = accumulates or any(event.via == "lightning" for event in own)
        rounds = (event.round_of(node) for event in own)
        self.passes = len({each.passage for each in rounds if each is not None})
        self.windows: list[Window] = []
        # What is left of a window when a pass through the loop ends, the end, and how many windows are before it.
        self.leftovers: list[tuple[list[Event], Event, int]] = []
        self.lost: list[tuple[list[Event], Event]] = []  # gradients, and what cleared them
        self._divide_into_windows()
        self.steps_inside = [window for window in self.windows if window.is_inside]

    def _divide_into_windows(self) -> None:
        own, pending, reached, since = set(self.backwards), list[Event](), list[Event](), list[Event]()
        for event in self.events:
            if event in own:
                pending, reached = [*pending, event], [*reached, event]
            elif event.kind == "zero" and not self._is_of_another(event):
                self.lost += [(pending, event)] if pending else []
                pending = []
            elif event.kind == "step" and (reached or event in self.within):
                self.windows.append(Window(event, event in self.within, pending, reached, since))
                pending, reached, since = [], [], []
            elif event.kind == "end" and event.node is self.node:
                self.leftovers += [(reached, event, len(self.windows))] if reached else []
            else:
                since.append(event)

    def _is_of_another(self, zero: Event) -> bool:
        """Tell whether one of several optimizers is cleared that does not step here."""
        cleared = role_of(zero.subject) == "optimizer" and any(each.subject in self.stepped for each in self.of("zero"))
        own = not self.stepped or zero.subject in self.stepped
        return not own and (cleared or (len(self.stepped) > 1 and zero in self.within))

    def of(self, kind: Kind, *, around: bool = False) -> list[Event]:
        """Return what happened in the loop, or also around it."""
        return [event for event in (self.events if around else self.inside) if event.kind == kind]

    @cached_property
    def steps_text(self) -> str:
        """Return the length of a window as the file has it."""
        if not self.module.is_guess:
            return str(self.steps)
        return self.module.steps_text or str(max((window.size for window in self.windows), default=self.steps))

    @cached_property
    def is_announced(self) -> bool:
        """Tell whether a loss is divided by something that is called like a number of steps."""
        divisions = [each for event in self.backwards for each in event.loss.divisions]
        each_pass = len(self.backwards) / self.passes if self.kind in {"while", "range", "pieces"} else 0
        return any(announces_steps(each.text) or each.value == each_pass > 1 for each in divisions)

    @cached_property
    def shape(self) -> Shape:
        """Return what kind of loop it is."""
        if any(event.via == "engine" for event in self.inside):
            return "engine"
        often = {sum(event.subject == each for event in self.of("step")) for each in self.stepped}
        if len(often) > 1 or not (self.windows or self.has_framework):
            return "unknown"
        several = any(window.size > 1 for window in self.windows)
        outside = self.divides and not self.has_framework and not self.module.words & _ACCUMULATING
        unprepared = self.has_framework and any(window.step.is_unprepared for window in self.windows)
        rounds = {(each.number, each.passage) for event in self.backwards for each in event.rounds}
        nearly_all = max(2, _MOST * min(len(rounds), rounds_in(self.backwards)))
        announced = self.is_announced or outside or unprepared
        if announced and not several and len(self.steps_inside) >= nearly_all:
            return "each"
        return "accumulating" if self.has_framework or self.zeroed or several else "plain"

    @cached_property
    def zeroed(self) -> tuple[Event, bool] | None:
        """Return what clears gradients before they are stepped, and whether that is right before the step."""
        each = [zero for _, zero in self.lost if zero in self.within]
        if not self.lost or not self.windows or (self.windows[0].is_inside and not each):
            return None
        largest = max(window.size for window in self.windows)
        if len(each) > 1 and largest == 1 and len(self.steps_inside) < len(self.backwards):
            return each[0], False
        empty = [window for window in self.windows if not window.backwards]
        stepped = any(window.is_inside for window in empty) or len(empty) == len(self.windows)
        zero = self.lost[0][1]
        # Gradients may come from elsewhere between a clear and the step after it.
        kinds = {"step", "forward", "handed", "rescale", "backward"}
        after = next((each for each in self.events[self.events.index(zero) + 1 :] if each.kind in kinds), None)
        is_refilled = after is not None and (after.kind != "step" or after.has_closure)
        return (zero, True) if empty and stepped and not is_refilled else None

    @cached_property
    def whole(self) -> list[Window]:
        """Return the windows that are as large as announced."""
        any_size = self.kind == "pieces" or not self.steps_inside
        return [window for window in self.windows if (window.size > 1 if any_size else window.size == self.steps)]

    def is_of_steps(self, division: Division) -> bool:
        """Tell whether a division is meant to be by the number of micro-batches."""
        known = {self.steps, self.backwards[0].steps, *(window.size for window in self.whole[:1])}
        return not division.is_weight and (announces_steps(division.text) or division.value in known)


def weight_of(events: Sequence[Event]) -> float | None:
    """Return the sum of the weights of some losses; None if it cannot be computed."""
    known = [event.loss.weight for event in events if event.loss.weight is not None]
    return sum(known) if len(known) == len(events) else None


def rounds_in(events: Sequence[Event]) -> int:
    """Return in how many rounds something happened."""
    return len({event.place for event in events})


def training_loops(events: list[Event], module: Module, steps: int) -> Iterator[TrainingLoop]:
    """Find the loops over micro-batches, each with the events up to its neighbors."""
    order: list[tuple[ast.AST, int]] = []
    for place, event in enumerate(events):
        micro = [each.loop for each in event.rounds if each.is_micro] if event.kind == "backward" else []
        order += [(loop, place) for loop in micro[-1:]]
    runs = [(loop, [place for _, place in run]) for loop, run in groupby(order, key=lambda each: each[0])]
    starts = [0, *(places[-1] for _, places in runs)]
    ends = [*(places[0] for _, places in runs[1:]), len(events)]
    found: dict[ast.AST, tuple[int, int, list[int]]] = {}
    for (loop, places), start, end in zip(runs, starts, ends):  # noqa: B905 - there is one start more
        first, _, before = found.get(loop, (start, end, []))
        found[loop] = first, end, before + places
    is_cleared = any(event.kind == "zero" for event in events)
    for loop, (start, end, places) in found.items():
        own = [events[place] for place in places]
        yield TrainingLoop(loop, module, events[start:end], own, steps, is_cleared=is_cleared)
