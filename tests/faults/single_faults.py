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
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from bigbatch.errors import LossError
from tests.faults import snapshots
from tests.faults.driving import POLICIES, Run, Trouble
from tests.faults.injecting import ERRORS, OUT_OF_MEMORY, Fault, injecting
from tests.faults.outcomes import Case, Outcome
from tests.faults.programs import MODES, SPLIT_MATTERS
from tests.faults.workers import run_cases, serve

PART = "single"
KINDS = ("op", "place", "call", "op, twice")
TOLERANCE = 1e-12
_EXACT = re.compile(r"(.+) #(\d+)(?:, (\w+))?")  # a place that is not drawn: "scheduler after #2, retry"


def draw(seed: int, count: int) -> Iterator[Case]:
    """Draw cases; the same for the same seed, however many."""
    by = random.Random(f"single {seed}")  # noqa: S311 - no secret
    for number in range(count):
        entrance = by.choice(sorted(MODES))
        mode = by.choice(sorted(MODES[entrance]))
        place, error, at = by.choice(KINDS), by.choice(sorted(ERRORS)), by.randrange(10**6)
        if (entrance, mode) in SPLIT_MATTERS and error in OUT_OF_MEMORY:
            error = "RuntimeError"  # smaller micro-batches give other numbers there, and are no fault
        yield Case(PART, number, seed, entrance, mode, place, error, at)


def run(cases: Sequence[Case]) -> Iterator[Outcome]:
    """Run cases in a process of their own, which is started anew where one hangs or dies."""
    return run_cases("tests.faults.single_faults", cases)


class Laboratory:
    """Runs cases in this process; what an undisturbed run comes to is kept."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
        self._undisturbed: dict[tuple[str, str, tuple[int, ...]], Run] = {}
        self._left_behind: dict[tuple[str, str], dict[str, Any]] = {}
        self._stuck: list[threading.Thread] = []
        self._unseen: list[str] = []  # what Python could raise nowhere
        sys.unraisablehook = lambda args: self._unseen.append(f"{args.exc_type.__name__} in {args.object!r}"[:120])
        threading.excepthook = lambda args: self._unseen.append(f"thread: {args.exc_type.__name__}")
        for entrance, modes in MODES.items():
            for mode in modes:
                self.undisturbed(entrance, mode)
        self._undisturbed.clear()  # what imports and first calls left is there now
        gc.collect()
        gc.freeze()
        self._outside = snapshots.surroundings()

    def undisturbed(self, entrance: str, mode: str, cuts: tuple[int, ...] = ()) -> Run:
        """Return a run without a fault, in windows that end at `cuts`, too."""
        key = (entrance, mode, cuts)
        if key not in self._undisturbed:
            fault = Fault()
            _seed()
            program = MODES[entrance][mode](fault)
            run = Run(program, fault, "discard")
            with injecting(fault, "op", "call"):
                if cuts:
                    run.train_in_parts(cuts)
                else:
                    run.train()
            run.final = snapshots.numbers(program, gradients=False) | snapshots.randomness()
            run.surroundings = snapshots.surroundings(program)
            run.said = said(run)
            run.forget()
            self._undisturbed[key] = run
        return self._undisturbed[key]

    def try_out(self, case: Case) -> Outcome:
        """Run one case; nothing that it does ends this process."""
        by = random.Random(f"{case.seed} {case.number} {case.at}")  # noqa: S311 - no secret
        true = self.undisturbed(case.entrance, case.mode)
        name, at, policy = _chosen(case, true.fault, by)
        again = by.choice([1, 2, 3, by.randint(4, 40)]) if case.place == "op, twice" else 0
        fault = Fault(name, at, case.error, again)
        where = f"{name} #{at}"
        if again:
            where += f" and {again} later"
        if case.entrance == "Accumulator":
            where += f", {policy}"
        self._unseen.clear()
        _seed()
        try:
            outcome = self._tried(case, fault, policy)
        except Trouble as trouble:
            outcome = Outcome(trouble.kind, trouble.words)
        except BaseException as error:  # noqa: BLE001 - an outcome
            # What went wrong is told, and its frames are let go of.
            place = traceback.extract_tb(error.__traceback__)[-1]
            words = " ".join(str(error).split())[:160]
            outcome = Outcome("unclear", f"{type(error).__name__}: {words} ({place.filename}:{place.lineno})")
        kind, words = outcome.kind, outcome.words
        fault.raised.clear()  # its traceback holds everything
        left = self._left()
        if left and kind == "fine":
            kind, words = "leaked", left
        return Outcome(kind, "" if kind == "fine" else f"{where}: {words}")

    def _tried(self, case: Case, fault: Fault, policy: str) -> Outcome:  # noqa: PLR0911 - one for each promise
        program = MODES[case.entrance][case.mode](fault)
        batches = [snapshots.copied(batch) for batch in program.batches]
        run = Run(program, fault, policy)
        kinds = ["call"] if fault.name.startswith("call ") else ["op"] if fault.name == "op" else []
        with injecting(fault, *kinds):
            run.train()
        if not fault.raised:
            return Outcome("not reached", "the place was not passed as often as in the run before")
        if case.error == "KeyboardInterrupt" and not run.kept and not self._unseen:
            return Outcome("lost", "the interrupt came out nowhere")
        true = self.undisturbed(case.entrance, case.mode, tuple(run.cuts))
        final = snapshots.numbers(program, buffers=program.step is not None, gradients=False)
        changed = snapshots.differing(final, {k: v for k, v in true.final.items() if k in final}, TOLERANCE)
        changed += snapshots.differing(snapshots.randomness(), {k: true.final[k] for k in snapshots.randomness()})
        if not changed and len(run.updates) != len(true.said):
            return Outcome("lost", f"{len(run.updates)} updates were returned instead of {len(true.said)}")
        changed += [f"update {i}: {words}" for i, words in enumerate(_other(said(run), true.said)) if words]
        if changed:
            return Outcome("wrong", ", ".join(changed[:4]))
        if any(
            snapshots.differing({"b": a}, {"b": b}) for a, b in zip(_flat(batches), _flat(program.batches), strict=True)
        ):
            return Outcome("wrong", "the batches were changed")
        if any(p.grad is not None for model in program.models for p in model.parameters()):
            return Outcome("leaked", "gradients are left at the end")
        leaked = snapshots.patched(snapshots.surroundings(program), true.surroundings)
        if leaked:
            return Outcome("leaked", ", ".join(leaked[:4]))
        return Outcome("fine")

    def _left(self) -> str:
        """Say what is left where nobody holds anything any more."""
        gc.collect()
        leaked = snapshots.patched(snapshots.surroundings(), self._outside)
        deadline = time.monotonic() + 2.0
        while (left := [t for t in snapshots.workers() if t not in self._stuck]) and time.monotonic() < deadline:
            time.sleep(0.001)
        self._stuck += left  # told once
        leaked += [f"thread {thread.name}" for thread in left]
        return ", ".join(leaked[:4])


def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the one that is restored


def _flat(batches: Sequence[Any]) -> list[Any]:
    return [leaf for batch in batches for leaf in torch.utils._pytree.tree_leaves(batch)]


def _chosen(case: Case, seen: Fault, by: random.Random) -> tuple[str, int, str]:
    """Choose what to fail at, at which time, and how to go on, among all that an undisturbed run passes by."""
    exact = _EXACT.fullmatch(case.place)
    if exact is not None:
        return exact[1], int(exact[2]), exact[3] or "discard"
    calls = sorted(name for name in seen.seen if name.startswith("call "))
    places = sorted(name for name in seen.seen if name not in {"op", *calls})
    name = by.choice({"op": ["op"], "op, twice": ["op"], "place": places, "call": calls}[case.place])
    return name, by.randint(1, seen.seen[name]), by.choice(POLICIES)


def said(run: Run) -> list[dict[str, float]]:
    """Return what the updates of a run said."""
    found = []
    for update in run.updates:
        numbers = {"skipped": float(update.skipped)}
        if getattr(update, "loss_is_exact", True):
            with suppress(LossError):
                numbers["loss"] = float(update.loss)
        if update.grad_norm is not None:
            numbers["grad_norm"] = float(update.grad_norm)
        found.append(numbers)
    return found


def _other(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> Iterator[str]:
    if len(ours) != len(theirs):
        yield f"{len(ours)} updates instead of {len(theirs)}"
        return
    for mine, true in zip(ours, theirs, strict=True):
        off = [n for n in true if not abs(mine[n] - true[n]) <= TOLERANCE * max(1.0, abs(true[n]))]
        yield ", ".join(f"{name} {true[name]} -> {mine[name]}" for name in off)


if __name__ == "__main__":
    serve(Laboratory().try_out)
