"""Try the whole zoo and write down what came out: `python -m tests.zoo --seed 1`, or `make zoo`.

It goes on where it was stopped, as long as neither the code nor the libraries have changed.
"""

import argparse
import collections
import hashlib
import json
import logging
import os
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import bigbatch
from tests.zoo.libraries import missing, version
from tests.zoo.program import Program
from tests.zoo.table import OPEN, PROGRAMS
from tests.zoo.trial import Result, attempt, is_met

ENTRANCES = ("accumulator", "big_step", "verify")
_INTRODUCTION = """# The zoo

Other people's models and losses, three updates each of unequal micro-batches, compared with true big batches in float64
(`make zoo`; the table is [tests/zoo](../../tests/zoo)). *exact*: with the largest relative distance of steps, gradient
norms, losses and buffers. *unseen*: the batch makes values without gradient, which no graph shows to an `Accumulator`;
`BigStep` refuses them and `verify` names them.
"""
Table = dict[str, dict[str, Any]]  # what came out, by program


def main() -> None:
    """Read the arguments, try what is not yet in the result file, and write it after each program."""
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the batches")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[2] / "benchmarks/results/zoo.json")
    parser.add_argument("--fresh", action="store_true", help="begin anew")
    parser.add_argument("words", nargs="*", help="only programs with one of these in their names; writes nothing")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("torch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    programs = [p for p in PROGRAMS if not chosen.words or any(word in p.name for word in chosen.words)]
    made_with = _made_with(chosen.seed, chosen.device)
    state = json.loads(chosen.out.read_text()) if chosen.out.exists() and not (chosen.fresh or chosen.words) else {}
    table: Table = state["programs"] if state.get("made_with") == made_with else {}
    for number, program in enumerate(programs, 1):
        if program.name in table:
            continue
        row = table[program.name] = _row(program, chosen.seed, torch.device(chosen.device))
        print(f"[{number}/{len(programs)}] {_cells(program.name, row)}", flush=True)
        if not chosen.words:
            _write(chosen.out, made_with, table)
        for trial in (row[entrance] for entrance in ENTRANCES if chosen.words and entrance in row):
            print(f"  due: {trial['expected']}\n  {trial['text']}\n  {trial['warnings']}")
    print(_summary(table))
    # Neither as expected nor known to be open, or open no longer.
    surprises = [
        f"{name}/{each}: {_told(trial)}"
        for name, each, trial in _tried(table)
        if trial["met"] == (f"{name}/{each}" in OPEN)
    ]
    if surprises:
        raise SystemExit("\n".join(["Not as the table says:", *surprises]))


def _row(program: Program, seed: int, device: torch.device) -> dict[str, Any]:
    row: dict[str, Any] = {"library": program.library, "tolerance": program.tolerance, "unseen": program.unseen}
    if reason := missing(program.library):
        return {**row, "left_out": reason}
    for entrance in program.entrances():
        try:
            result = attempt(program, entrance, seed=seed, device=device)
        except Exception as error:  # noqa: BLE001 - the program itself does not run here, without us
            return {**row, "left_out": f"does not run as one big batch: {type(error).__name__}: {error}"}
        due = program.unseen if entrance == "verify" else str(program.due(entrance))
        row[entrance] = {**asdict(result), "expected": due, "met": is_met(program, entrance, result)}
    return row


def _made_with(seed: int, device: str) -> dict[str, Any]:
    """Return what a result depends on."""
    code = hashlib.sha256()
    for path in sorted([*Path(bigbatch.__file__).parent.rglob("*.py"), *Path(__file__).parent.glob("*.py")]):
        code.update(path.read_bytes())
    return {
        "seed": seed,
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else device,
        "code": code.hexdigest()[:16],
        "versions": {library: version(library) for library in sorted({program.library for program in PROGRAMS})},
    }


def _write(out: Path, made_with: dict[str, Any], table: Table) -> None:
    versions = ", ".join(f"{library} {number}" for library, number in made_with["versions"].items())
    unmet = [
        f"- {name}, {entrance}: {_told(trial)}, expected {trial['expected']}: {OPEN.get(f'{name}/{entrance}', 'new')}"
        for name, entrance, trial in _tried(table)
        if not trial["met"]
    ]
    head = [_INTRODUCTION, *(f"- {line}" for line in _summary(table).splitlines())]
    head += [f"- Seed {made_with['seed']}, {made_with['device']}; {versions}.", "\n## Not as expected\n"]
    head += [*(unmet or ["Nothing."]), "\n## All\n", "| program | library | Accumulator | BigStep | verify |"]
    new = out.with_suffix(".new")
    new.write_text(json.dumps({"made_with": made_with, "programs": table}, indent=1) + "\n")
    new.replace(out)
    page = [*head, "|---|---|---|---|---|", *(_cells(*row) for row in table.items()), ""]
    out.with_suffix(".md").write_text("\n".join(page))


def _tried(table: Table) -> list[tuple[str, str, dict[str, Any]]]:
    """Every trial: program, entrance, what came out."""
    return [(name, entrance, row[entrance]) for name, row in table.items() for entrance in ENTRANCES if entrance in row]


def _summary(table: Table) -> str:
    lines = []
    for entrance in ENTRANCES:
        ours = [trial for _, each, trial in _tried(table) if each == entrance]
        outcomes = collections.Counter(trial["outcome"] for trial in ours)
        told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
        lines.append(f"{entrance}: {told}; as expected: {sum(trial['met'] for trial in ours)} of {len(ours)}.")
    left_out = sum("left_out" in row for row in table.values())
    return "\n".join([*lines, f"{len(table)} programs, {left_out} of them left out."])


def _cells(name: str, row: dict[str, Any]) -> str:
    shown = name + (" (unseen)" if row["unseen"] else "")
    left_out = [f"left out: {row['left_out'].splitlines()[0]}", "", ""] if "left_out" in row else []
    told = left_out or [_told(row[entrance]) if entrance in row else "" for entrance in ENTRANCES]
    return f"| {shown} | {row['library']} | {' | '.join(told)} |"


def _told(trial: dict[str, Any]) -> str:
    shown = str(Result(trial["outcome"], trial["distance"], trial["kind"]))
    return shown if trial["met"] else f"**{shown}**"


if __name__ == "__main__":
    main()
