"""Faults in one process: draw them, run them, say what came of them."""

import gc
import random
import re
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tests.faults import snapshots
from tests.faults.driving import POLICIES, Run, Trouble
from tests.faults.injecting import ERRORS, OUT_OF_MEMORY, Fault, injecting
from tests.faults.outcomes import Case, Outcome, run_cases
from tests.faults.programs import MODES, SPLIT_MATTERS, program
from tests.support.bombs import seed

KINDS = ("op", "place", "call", "op, twice")
TOLERANCE = 1e-12
_EXACT = re.compile(r"(.+) #(\d+)(?:, (\w+))?")  # a place that is not drawn: "step after #2, retry"


def draw(seed: int, count: int) -> Iterator[Case]:
    """Draw cases; the same for the same seed, however many."""
    by = random.Random(f"single {seed}")  # noqa: S311 - no secret
    for number in range(count):
        entrance = by.choice(sorted(MODES))
        mode = by.choice(sorted(MODES[entrance]))
        place, error, at = by.choice(KINDS), by.choice(sorted(ERRORS)), by.randrange(10**6)
        if (entrance, mode) in SPLIT_MATTERS and error in OUT_OF_MEMORY:
            error = "RuntimeError"  # smaller micro-batches give other numbers there, and are no fault
        yield Case("single", number, seed, entrance, mode, place, error, at)


run = partial(run_cases, __name__)  # in a process of its own


class Laboratory:
    """Runs cases in this process; what an undisturbed run comes to is kept."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
        self._undisturbed: dict[tuple[str, str, tuple[int, ...]], _Undisturbed] = {}
        self._fault = Fault()
        self._stuck: list[threading.Thread] = []
        self._unseen: list[str] = []  # what Python could raise nowhere
        sys.unraisablehook = lambda args: self._unseen.append(f"{args.exc_type.__name__} in {args.object!r}"[:120])
        threading.excepthook = self._printed
        for entrance, modes in MODES.items():
            for mode in modes:
                _Undisturbed(entrance, mode)  # what imports and first calls leave is there then
        gc.collect()
        gc.freeze()
        self._outside = snapshots.surroundings()

    def try_out(self, case: Case) -> Outcome:
        """Run one case; nothing that it does ends this process."""
        by = random.Random(f"{case.seed} {case.number} {case.at}")  # noqa: S311 - no secret
        name, at, policy = _chosen(case, self._true(case).seen, by)
        again = by.choice([1, 2, 3, by.randint(4, 40)]) if case.place == "op, twice" else 0
        fault = Fault(name, at, case.error, again)
        self._unseen.clear()
        self._fault = fault
        try:
            outcome = self._tried(case, fault, policy)
        except Trouble as trouble:
            outcome = Outcome(trouble.kind, trouble.words)
        except BaseException as error:  # noqa: BLE001 - an outcome
            # What went wrong is told, and its frames are let go of.
            place = traceback.extract_tb(error.__traceback__)[-1]
            words = " ".join(str(error).split())[:160]
            outcome = Outcome("unclear", f"{type(error).__name__}: {words} ({place.filename}:{place.lineno})")
        fault.raised.clear()  # its traceback holds everything
        left = self._left()
        if left and outcome.kind == "fine":
            outcome = Outcome("leaked", left)
        where = f"{name} #{at}{f' and {again} later' if again else ''}, {policy}"
        return outcome if outcome.kind == "fine" else Outcome(outcome.kind, f"{where}: {outcome.words}")

    def _printed(self, of: threading.ExceptHookArgs) -> None:
        self._unseen.append(f"thread: {of.exc_type.__name__}")
        self._fault.printed = True

    def _true(self, case: Case, cuts: Sequence[int] = ()) -> "_Undisturbed":
        key = (case.entrance, case.mode, tuple(cuts))
        if key not in self._undisturbed:
            self._undisturbed[key] = _Undisturbed(*key)
        return self._undisturbed[key]

    def _tried(self, case: Case, fault: Fault, policy: str) -> Outcome:
        seed()
        tried = program(case.entrance, case.mode, fault)
        batches = snapshots.copied(tried.batches)
        run = Run(tried, fault, policy)
        with injecting(fault, "call" if fault.name.startswith("call ") else fault.name):
            run.train()
        if not fault.raised:
            return Outcome("not reached", "the place was not passed as often as in the run before")
        if case.error == "KeyboardInterrupt" and not run.kept and not self._unseen:
            return Outcome("lost", "the interrupt came out nowhere")
        random_numbers = snapshots.randomness()
        true = self._true(case, run.cuts)
        final = snapshots.numbers(tried, buffers=case.entrance == "BigStep", gradients=False)
        changed = snapshots.differing(final, {name: true.final[name] for name in final}, TOLERANCE)
        changed += snapshots.differing(random_numbers, true.random_numbers)
        changed += _other(run.said, true.said)
        for before, after in zip(pytree.tree_leaves(batches), pytree.tree_leaves(tried.batches), strict=True):
            changed += snapshots.differing({"batch": after}, {"batch": before})
        if changed:
            return Outcome("wrong", ", ".join(changed[:4]))
        leaked = snapshots.patched(snapshots.surroundings(tried), true.surroundings)
        if any(p.grad is not None for model in tried.models for p in model.parameters()):
            leaked.append("gradients are left at the end")
        return Outcome("leaked", ", ".join(leaked[:4])) if leaked else Outcome("fine")

    def _left(self) -> str:
        """Say what is left where nobody holds anything any more."""
        gc.collect()
        leaked = snapshots.patched(snapshots.surroundings(), self._outside)
        deadline = time.monotonic() + 2.0
        while (left := [t for t in threading.enumerate() if "bigbatch" in t.name and t not in self._stuck]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.001)
        self._stuck += left  # told once
        return ", ".join([*leaked, *(f"thread {thread.name}" for thread in left)][:4])


class _Undisturbed:
    """What a run without a fault comes to, in windows that end at `cuts`, too."""

    def __init__(self, entrance: str, mode: str, cuts: Sequence[int] = ()) -> None:
        fault = Fault()
        seed()
        made = program(entrance, mode, fault)
        run = Run(made, fault, "discard", [*cuts, len(made.batches)] if cuts and made.loop == "iterator" else cuts)
        with injecting(fault, "op", "call"):
            run.train()
        self.random_numbers = snapshots.randomness()
        self.seen, self.said = fault.seen, run.said
        self.final: dict[str, Any] = snapshots.numbers(made, gradients=False)
        self.surroundings = snapshots.surroundings(made)


def _chosen(case: Case, seen: dict[str, int], by: random.Random) -> tuple[str, int, str]:
    """Choose what to fail at, at which time, and how to go on, among all that an undisturbed run passes by."""
    exact = _EXACT.fullmatch(case.place)
    if exact is not None:
        return exact[1], int(exact[2]), exact[3] or "discard"
    calls = sorted(name for name in seen if name.startswith("call "))
    places = sorted(name for name in seen if name not in {"op", *calls})
    name = by.choice({"op": ["op"], "op, twice": ["op"], "place": places, "call": calls}[case.place])
    return name, by.randint(1, seen[name]), by.choice(POLICIES)


def _other(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> list[str]:
    """Name what updates said otherwise."""
    if len(ours) != len(theirs):
        return [f"{len(ours)} updates instead of {len(theirs)}"]
    told = [
        (number, name, mine.get(name, float("nan")), true[name])
        for number, (mine, true) in enumerate(zip(ours, theirs, strict=True))
        for name in true
    ]
    return [
        f"update {number}: {name} {b} -> {a}"
        for number, name, a, b in told
        if not abs(a - b) <= TOLERANCE * max(1.0, abs(b))
    ]
