"""The windows of a training loop: which micro-batches went into each step, and what happened before it."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from bigbatch_lint.reading.module import Module
from bigbatch_lint.reading.names import Role, announces_steps, role_of
from bigbatch_lint.running.trace import Event, Kind, Via
from bigbatch_lint.running.values import Division

_NOTED = {Kind.CLIP, Kind.UNSCALE, Kind.UPDATE, Kind.SCHEDULER}
_ACCUMULATING = {"accumulate", "sync_gradients", "_do_sync", "gradient_state"}
_MOST = 0.9  # of the rounds: a step in nearly each is a step in each


class Shape(Enum):
    """What kind of loop it is."""

    UNKNOWN = "unknown"  # steps happen elsewhere, or in turns, as a GAN's
    ENGINE = "engine"  # an engine divides and steps
    PLAIN = "plain"  # one step per batch
    EACH = "each"  # one step per micro-batch, though a window was announced
    ACCUMULATING = "accumulating"


@dataclass(eq=False)
class Window:
    """One step, and what led to it since the one before."""

    backwards: list[Event]
    reached: list[Event]  # also those whose gradients were cleared
    step: Event
    is_inside: bool  # the step is in the loop
    noted: dict[Kind, list[Event]]

    @cached_property
    def size(self) -> int:
        """Return the number of micro-batches."""
        return rounds_in(self.backwards)

    @cached_property
    def weight(self) -> float | None:
        """Return the sum of the losses' weights; None if it cannot be computed."""
        return weight_of(self.backwards)

    def place(self) -> ast.AST:
        """Return the condition that decides on the step, or the step."""
        return self.step.guard or self.step.node


@dataclass(eq=False)
class Leftover:
    """What is left of a window when a pass through the loop ends."""

    backwards: list[Event]
    end: Event
    following: int  # the number of the window that comes next


@dataclass(eq=False)
class TrainingLoop:
    """One loop over micro-batches, with all that happened in it and around it."""

    node: ast.AST
    module: Module
    events: list[Event]  # also from before and after the loop
    backwards: list[Event]
    steps: int  # that a window should have
    is_cleared: bool  # somewhere in the same run, gradients are
    windows: list[Window] = field(default_factory=list)
    leftovers: list[Leftover] = field(default_factory=list)
    lost: list[tuple[list[Event], Event]] = field(default_factory=list)  # gradients, and what cleared them
    spans: list[int] = field(default_factory=list)  # micro-batches between steps, cleared or not

    def __post_init__(self) -> None:
        self.inside = [event for event in self.events if event.is_in(self.node)]
        self.within = set(self.inside)
        self.stepped = {event.subject for event in self.of(Kind.STEP)}
        self._divide_into_windows()

    def _divide_into_windows(self) -> None:
        own = set(self.backwards)
        pending: list[Event] = []
        since: list[Event] = []
        noted: dict[Kind, list[Event]] = {kind: [] for kind in _NOTED}
        for event in self.events:
            if event in own:
                pending.append(event)
                since.append(event)
            elif event.kind is Kind.ZERO and not self._is_of_another(event):
                if pending:
                    self.lost.append((pending, event))
                pending = []
            elif event.kind is Kind.STEP and (since or event in self.within):
                self.windows.append(Window(pending, since, event, event in self.within, noted))
                self.spans.append(rounds_in(since))
                pending, since, noted = [], [], {kind: [] for kind in _NOTED}
            elif event.kind is Kind.END and event.node is self.node:
                self.leftovers.append(Leftover(list(since), event, len(self.windows)))
            elif event.kind in _NOTED:
                noted[event.kind].append(event)

    def _is_of_another(self, zero: Event) -> bool:
        """Tell whether one of several optimizers is cleared that does not step here."""
        if zero.subject in self.stepped or not self.stepped:
            return False
        others = role_of(zero.subject) is Role.OPTIMIZER and any(
            each.subject in self.stepped for each in self.of(Kind.ZERO)
        )
        return others or (len(self.stepped) > 1 and zero in self.within)

    def of(self, *kinds: Kind) -> list[Event]:
        """Return what happened in the loop."""
        return [event for event in self.inside if event.kind in kinds]

    def round_of(self, event: Event) -> int | None:
        """Return the number of the loop's round in which something happened; None outside."""
        return next((each.number for each in event.rounds if each.loop is self.node), None)

    def everywhere(self, *kinds: Kind) -> list[Event]:
        """Return what happened in the loop and around it."""
        return [event for event in self.events if event.kind in kinds]

    # What is announced.
    @cached_property
    def steps_text(self) -> str:
        """Return that number as the file has it."""
        if not self.module.is_guess:
            return str(self.steps)
        return self.module.steps_text or str(max((window.size for window in self.windows), default=self.steps))

    @cached_property
    def kind(self) -> str:
        """Return what the loop goes over."""
        return next(each.kind for each in self.backwards[0].rounds if each.loop is self.node)

    @cached_property
    def is_function(self) -> bool:
        """Tell whether the loop is not in the file: a function is called with every micro-batch."""
        return isinstance(self.node, (ast.FunctionDef, ast.AsyncFunctionDef))

    @cached_property
    def is_announced(self) -> bool:
        """Tell whether a loss is divided by something that is called like a number of steps."""
        divisions = [each for event in self.backwards for each in event.loss.divisions]
        each_pass = len(self.backwards) / self.passes if self.kind in {"while", "range", "pieces"} else 0
        return any(announces_steps(each.text) or each.value == each_pass > 1 for each in divisions)

    @cached_property
    def divides(self) -> bool:
        """Tell whether a framework divides."""
        return any(event.divides for event in self.backwards)

    @cached_property
    def has_framework(self) -> bool:
        """Tell whether a framework decides when a window is full."""
        inside = any(each.context == "accumulate" for event in self.backwards for each in event.contexts)
        return inside or any(event.via in {Via.LIGHTNING, Via.TRAINER} for event in self.backwards)

    @cached_property
    def passes(self) -> int:
        """Return how often the loop was entered."""
        return len({each.passage for event in self.backwards for each in event.rounds if each.loop is self.node})

    # What happened.
    def is_same_pass(self, previous: Window, window: Window) -> bool:
        """Tell whether a window comes after another one in the same pass through the loop."""
        steps = [each.passage for each in previous.step.rounds if each.loop is self.node]
        own = {each.passage for event in window.reached for each in event.rounds if each.loop is self.node}
        return own == set(steps)

    @cached_property
    def steps_inside(self) -> list[Window]:
        """Return the windows whose step is in the loop."""
        return [window for window in self.windows if window.is_inside]

    @cached_property
    def shape(self) -> Shape:
        """Return what kind of loop it is."""
        if any(event.via is Via.ENGINE for event in self.inside):
            return Shape.ENGINE
        often = {sum(event.subject == each for event in self.of(Kind.STEP)) for each in self.stepped}
        if len(often) > 1 or not (self.windows or self.has_framework):
            return Shape.UNKNOWN
        if self._steps_each():
            return Shape.EACH
        accumulates = self.has_framework or self.zeroed or any(window.size > 1 for window in self.windows)
        return Shape.ACCUMULATING if accumulates else Shape.PLAIN

    def _steps_each(self) -> bool:
        outside = self.divides and not self.has_framework and not self.module.words & _ACCUMULATING
        unprepared = self.has_framework and any(window.step.is_prepared is False for window in self.windows)
        if not (self.is_announced or outside or unprepared) or any(window.size > 1 for window in self.windows):
            return False
        rounds = {(each.number, each.passage) for event in self.backwards for each in event.rounds}
        return len(self.steps_inside) >= max(2, _MOST * min(len(rounds), rounds_in(self.backwards)))

    @cached_property
    def zeroed(self) -> list[tuple[Event, bool]]:
        """Return what clears gradients before they are stepped, and whether that is right before the step."""
        if not any(zero in self.within or not window.is_inside for _, zero in self.lost for window in self.windows[:1]):
            return []
        each = [zero for _, zero in self.lost if zero in self.within]
        largest = max((window.size for window in self.windows), default=0)
        if len(each) > 1 and largest == 1 and len(self.steps_inside) < len(self.backwards):
            return [(each[0], False)]
        empty = [window for window in self.windows if not window.backwards]
        stepped = any(window.is_inside for window in empty) or len(empty) == len(self.windows)
        zeros = [zero for lost, zero in self.lost if len(lost) > 1] or [zero for _, zero in self.lost]
        if empty and stepped and not self._is_refilled(zeros[0]):
            return [(zeros[0], True)]
        return []

    def _is_refilled(self, zero: Event) -> bool:
        """Tell whether gradients may come from elsewhere between a clear and the step after it."""
        place = self.events.index(zero)
        for event in self.events[place + 1 :]:
            if event.kind is Kind.STEP:
                return event.has_closure
            if event.kind in {Kind.FORWARD, Kind.HANDED, Kind.RESCALE, Kind.BACKWARD}:
                return True
        return False

    @cached_property
    def whole(self) -> list[Window]:
        """Return the windows that are as large as announced."""
        if self.kind == "pieces" or not self.steps_inside:
            return [window for window in self.windows if window.size > 1]
        return [window for window in self.windows if window.size == self.steps]

    def is_of_steps(self, division: Division) -> bool:
        """Tell whether a division is meant to be by the number of micro-batches."""
        if division.is_weight:
            return False
        known = {self.steps, self.whole[0].size if self.whole else 0, *(event.steps for event in self.backwards[:1])}
        return announces_steps(division.text) or division.value in known


def weight_of(events: Sequence[Event]) -> float | None:
    """Return the sum of the weights of some losses; None if it cannot be computed."""
    weights = [event.loss.weight for event in events]
    known = [weight for weight in weights if weight is not None]
    return sum(known) if len(known) == len(weights) else None


def rounds_in(events: Sequence[Event]) -> int:
    """Return in how many rounds something happened."""
    return len({event.place for event in events})


def training_loops(events: list[Event], module: Module, steps: int) -> Iterator[TrainingLoop]:
    """Find the loops over micro-batches, each with the events up to its neighbours."""
    backwards: dict[ast.AST, list[Event]] = {}
    places: dict[ast.AST, list[int]] = {}
    order: list[tuple[int, ast.AST]] = []
    for place, event in enumerate(events):
        micro = event.micro_round() if event.kind is Kind.BACKWARD else None
        if micro is not None:
            backwards.setdefault(micro.loop, []).append(event)
            places.setdefault(micro.loop, []).append(place)
            order.append((place, micro.loop))
    cleared = any(event.kind is Kind.ZERO for event in events)
    before, after = _neighbours(order, len(events))
    for loop, own in backwards.items():
        around = events[before[places[loop][0]] : after[places[loop][-1]]]
        yield TrainingLoop(loop, module, around, own, steps, cleared)


def _neighbours(order: list[tuple[int, ast.AST]], end: int) -> tuple[dict[int, int], dict[int, int]]:
    """Return for each backward where that of another loop was before, and where one comes after."""
    before: dict[int, int] = {}
    after: dict[int, int] = {}
    start = 0
    for (place, loop), (previous, other) in zip(order, [(0, None), *order], strict=False):
        start = previous if other is not loop and other is not None else start
        before[place] = start
    for (place, loop), (following, other) in zip(order[::-1], [(end, None), *order[::-1]], strict=False):
        end = following if other is not loop else end
        after[place] = end
    return before, after
