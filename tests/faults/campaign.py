"""Run many cases with a bar, go on where it was stopped, and leave a result file."""

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
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
    made_with: str = ""  # what its results depend on: with another one it begins anew


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
    made.add_argument("--jobs", type=int, default=1, help="how many processes run cases at once")
    return made


def main(name: str, given: argparse.Namespace, parts: Sequence[Part], notes: Sequence[str]) -> None:
    """Run what was asked for; a case that was not fine is a failure."""
    seed = seed_of(name, given.seed)
    if given.case is not None:
        case = list(parts[0].draw(seed, given.case + 1))[-1]
        print(case, *parts[0].run([case]), sep="\n")  # noqa: T201 - a runner's result
        return
    counts = Counter(outcome.kind for _, outcome in run(name, seed, parts, notes, given.jobs))
    print(", ".join(f"{counts[kind]:,} {kind}" for kind in OUTCOMES if counts[kind]))  # noqa: T201 - a runner's result
    sys.exit(int(any(Outcome(kind).is_bad for kind in counts)))


def seed_of(name: str, given: int | None) -> int:
    """Return the seed: the one that was given, the one that was stopped, or a new one."""
    latest = STATE / f"{name}-latest"
    if given is None and latest.exists():
        given = int(latest.read_text())
    seed = random.SystemRandom().randrange(10**6) if given is None else given
    STATE.mkdir(parents=True, exist_ok=True)
    latest.write_text(str(seed))
    return seed


def run(name: str, seed: int, parts: Sequence[Part], notes: Sequence[str], jobs: int = 1) -> list[tuple[Case, Outcome]]:
    """Run all cases that have not been run with this seed, and write the report."""
    done: list[tuple[Case, Outcome]] = []
    with progress() as bar:
        for part in parts:
            cases = list(part.draw(seed, part.count))
            path = STATE / f"{name}-{part.name}-{seed}{part.made_with}.jsonl"
            known = _read(path)
            left = [case for case in cases if case.number not in known]
            bad = sum(outcome.is_bad for outcome in known.values())
            task = bar.add_task(part.name, total=len(cases), completed=len(cases) - len(left))
            with path.open("a") as file:
                for case, outcome in _at_once(part.run, left, jobs):
                    file.write(json.dumps({"number": case.number, **asdict(outcome)}) + "\n")
                    file.flush()
                    known[case.number] = outcome
                    bad += outcome.is_bad
                    bar.update(task, advance=1, description=f"{part.name}, seed {seed}: {bad} not fine")
            done += [(case, known[case.number]) for case in cases]
    (STATE / f"{name}-latest").unlink(missing_ok=True)  # it is done: the next one takes a new seed
    _report(name, seed, done, notes).write(RESULTS)
    return done


def _at_once(
    run: Callable[[Sequence[Case]], Iterator[Outcome]], cases: Sequence[Case], jobs: int
) -> Iterator[tuple[Case, Outcome]]:
    """Share the cases out among threads, each of which waits for a process; give out what comes as it comes."""
    shares = [zip(cases[first::jobs], run(cases[first::jobs]), strict=True) for first in range(jobs)]
    with ThreadPoolExecutor(jobs) as pool:
        waiting = {pool.submit(next, share, None): share for share in shares}
        while waiting:
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                share, pair = waiting.pop(future), future.result()
                if pair is not None:
                    waiting[pool.submit(next, share, None)] = share
                    yield pair


def _read(path: Path) -> dict[int, Outcome]:
    """Return what is known from before, by number; a line that was cut off is taken out, and its case run again."""
    known = {}
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    whole = [line for line in lines if line.endswith("}\n")]
    if whole != lines:
        path.write_text("".join(whole))
    for line in whole:
        found = json.loads(line)
        known[found["number"]] = Outcome(found["kind"], found["words"])
    return known


def _report(name: str, seed: int, done: Sequence[tuple[Case, Outcome]], notes: Sequence[str]) -> Report:
    found = [outcome for outcome in OUTCOMES if outcome != "not reached" or any(o.kind == outcome for _, o in done)]

    def grid(title: str, field: str) -> Grid:
        counts = Counter(((f"{c.part}: {c.entrance}", str(getattr(c, field))), o.kind) for c, o in done)
        rows = sorted({row for row, _ in counts})
        return Grid(title, ("", field, *found), [(*row, *(str(counts[row, kind]) for kind in found)) for row in rows])

    told: list[tuple[str, ...]] = [(c.mode, c.entrance, o.words) for c, o in done if o.words and not o.is_bad]
    grids = [grid(f"{len(done):,} cases, seed {seed}", "place")]
    grids += (
        [Grid("What came out", ("mode", "entrance", "outcome"), told)]
        if told
        else [grid("By error", "error"), grid("By mode", "mode")]
    )
    bad = [(c, o) for c, o in done if o.is_bad]
    if bad:
        rows: list[tuple[str, ...]] = [
            (str(c.number), f"{c.entrance}, {c.mode}", c.error, o.kind, o.words) for c, o in bad[:_SHOWN]
        ]
        grids.append(Grid(f"Not fine ({len(bad)})", ("case", "mode", "error", "outcome", "what was seen"), rows))
    tally = Counter((c.part, c.entrance, c.mode, c.place, o.kind) for c, o in done)
    tallies = [Tally(*key, number) for key, number in sorted(tally.items())]
    return Report(name, this_machine(), grids, list(notes), list(tallies))
