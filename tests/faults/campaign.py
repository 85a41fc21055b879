"""Run many cases with a bar, go on where it was stopped, and leave a result file."""

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import this_machine
from benchmarks.report import RESULTS, Grid, Report, progress
from tests.faults.outcomes import OUTCOMES, Case, Outcome

STATE = Path(__file__).parents[2] / "build" / "campaigns"
_SHOWN = 40  # cases that were not fine


@dataclass(frozen=True)
class Part:
    """One kind of cases: how they are drawn and run."""

    name: str
    count: int
    draw: Callable[[int, int], Iterable[Case]]
    run: Callable[[Sequence[Case]], Iterator[Outcome]]


@dataclass(frozen=True)
class Tally:
    """How often something came of a kind of case."""

    part: str
    entrance: str
    mode: str
    place: str
    outcome: str
    cases: int


def parser(description: str) -> argparse.ArgumentParser:
    """Return what every campaign takes."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--seed", type=int, help="draws the cases; the latest one goes on, or else a new one is taken")
    made.add_argument("--count", type=int, help="how many cases in one process")
    made.add_argument("--case", type=int, help="run this case alone and tell what came of it")
    return made


def seed_of(name: str, given: int | None) -> int:
    """Return the seed: the one that was given, the one that was stopped, or a new one."""
    latest = STATE / f"{name}-latest"
    if given is None and latest.exists():
        given = int(latest.read_text())
    seed = random.SystemRandom().randrange(10**6) if given is None else given
    STATE.mkdir(parents=True, exist_ok=True)
    latest.write_text(str(seed))
    return seed


def run(name: str, seed: int, parts: Sequence[Part], notes: Sequence[str]) -> list[tuple[Case, Outcome]]:
    """Run all cases that have not been run with this seed, and write the report."""
    done: list[tuple[Case, Outcome]] = []
    with progress() as bar:
        for part in parts:
            cases = list(part.draw(seed, part.count))
            path = STATE / f"{name}-{part.name}-{seed}.jsonl"
            known = _read(path, cases)
            task = bar.add_task(f"{part.name}, seed {seed}", total=len(cases), completed=len(known))
            left, bad = cases[len(known) :], sum(outcome.kind not in {"fine", "not reached"} for outcome in known)
            with path.open("a") as file:
                for case, outcome in zip(left, part.run(left), strict=True):
                    file.write(json.dumps({"number": case.number, "kind": outcome.kind, "words": outcome.words}) + "\n")
                    file.flush()
                    known.append(outcome)
                    bad += outcome.kind not in {"fine", "not reached"}
                    bar.update(task, advance=1, description=f"{part.name}, seed {seed}: {bad} not fine")
            done += zip(cases, known, strict=True)
    (STATE / f"{name}-latest").unlink(missing_ok=True)  # it is done: the next one takes a new seed
    _report(name, seed, done, notes).write(RESULTS)
    return done


def _read(path: Path, cases: Sequence[Case]) -> list[Outcome]:
    """Return what is known from before; a line that was cut off is run again."""
    known: list[Outcome] = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found = json.loads(line)
        except ValueError:
            break
        if len(known) == len(cases) or found["number"] != cases[len(known)].number:
            break
        known.append(Outcome(found["kind"], found["words"]))
    if path.exists():
        kept = path.read_text().splitlines(keepends=True)[: len(known)]
        path.write_text("".join(kept))
    return known


def _report(name: str, seed: int, done: Sequence[tuple[Case, Outcome]], notes: Sequence[str]) -> Report:
    found = [outcome for outcome in OUTCOMES if outcome != "not reached" or any(o.kind == outcome for _, o in done)]

    def grid(title: str, key: Callable[[Case], tuple[str, ...]], header: tuple[str, ...]) -> Grid:
        counts = Counter((key(case), outcome.kind) for case, outcome in done)
        rows = sorted({key(case) for case, _ in done})
        return Grid(title, (*header, *found), [(*row, *(f"{counts[row, kind]:,}" for kind in found)) for row in rows])

    tally = Counter((c.part, c.entrance, c.mode, c.place, o.kind) for c, o in done)
    grids = [
        grid(f"{len(done):,} cases, seed {seed}", lambda c: (f"{c.part}: {c.entrance}", c.place), ("", "place")),
        grid("By error", lambda c: (f"{c.part}: {c.entrance}", c.error), ("", "error")),
        grid("By mode", lambda c: (f"{c.part}: {c.entrance}", c.mode), ("", "mode")),
    ]
    bad = [(c, o) for c, o in done if o.kind not in {"fine", "not reached"}]
    if bad:
        rows: list[tuple[str, ...]] = [
            (str(c.number), f"{c.entrance}, {c.mode}", c.error, o.kind, o.words) for c, o in bad[:_SHOWN]
        ]
        grids.append(Grid(f"Not fine ({len(bad)})", ("case", "mode", "error", "outcome", "what was seen"), rows))
    return Report(
        name, this_machine(), grids, list(notes), [Tally(*key, number) for key, number in sorted(tally.items())]
    )


def end(done: Sequence[tuple[Case, Outcome]]) -> None:
    """Say what came of it; a case that was not fine is a failure."""
    counts = Counter(outcome.kind for _, outcome in done)
    print(", ".join(f"{counts[kind]:,} {kind}" for kind in OUTCOMES if counts[kind]))  # noqa: T201 - a runner's result
    sys.exit(int(any(counts[kind] for kind in OUTCOMES if kind not in {"fine", "not reached"})))
