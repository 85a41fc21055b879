"""Break the code on purpose, a little and by a seed: what share of the mutants does the suite kill?

    coverage run ... --context=test                  # tells which test runs which line (CONTRIBUTING has the command)
    python -m benchmarks.mutants --coverage FILE --packages loss window distributed lockstep --count 200

Each mutant changes one place: a comparison, an operator, a number, a condition, a statement left out. The tests that
run its line are tried, those that run fewest lines first. It is killed where one of them fails. Mutants of lines that
no test runs live. It goes on where it was stopped.
"""

import argparse
import ast
import contextlib
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[1]
TRIED = 12  # tests of each mutant, at most
LIMIT = 120  # seconds: who takes longer hangs, and is killed
_COMPARED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
             ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}  # fmt: skip
_OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}


@dataclass(frozen=True)
class Mutant:
    """One change: where, and what it does."""

    path: str
    line: int
    what: str
    number: int  # of the changes of this file


def changes(tree: ast.Module) -> Iterator[tuple[int, str, Callable[[], None]]]:
    """Yield each change of a file: its line, what it is, and what makes it, on this very tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARED:
            new = _COMPARED[type(node.ops[0])]
            yield node.lineno, f"{type(node.ops[0]).__name__} becomes {new.__name__}", _setting(node, "ops", [new()])
        elif isinstance(node, ast.BoolOp):
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield node.lineno, f"{type(node.op).__name__} becomes {type(other).__name__}", _setting(node, "op", other)
        elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS and not _is_text(node):
            operator = _OPERATORS[type(node.op)]
            what = f"{type(node.op).__name__} becomes {operator.__name__}"
            yield node.lineno, what, _setting(node, "op", operator())
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            value = (not node.value) if isinstance(node.value, bool) else node.value + 1
            yield node.lineno, f"{node.value!r} becomes {value!r}", _setting(node, "value", value)
        elif isinstance(node, ast.If | ast.IfExp):
            negated = ast.UnaryOp(ast.Not(), node.test)
            yield node.lineno, "a condition is negated", _setting(node, "test", negated)
        elif isinstance(node, ast.FunctionDef):
            for place, statement in enumerate(node.body):
                called = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
                if called or isinstance(statement, ast.Assign | ast.AugAssign | ast.Raise):
                    body = [*node.body[:place], ast.Pass(), *node.body[place + 1 :]]
                    yield statement.lineno, "a statement is left out", _setting(node, "body", body)


def _is_text(node: ast.BinOp) -> bool:
    return any(isinstance(each, ast.JoinedStr) or (isinstance(each, ast.Constant) and isinstance(each.value, str))
               for each in (node.left, node.right))  # fmt: skip


def _setting(node: ast.AST, name: str, value: object) -> Callable[[], None]:
    return lambda: setattr(node, name, value)


def drawn(packages: list[str], count: int, seed: int) -> list[Mutant]:
    """Draw as many mutants of each package, by the seed."""
    found: list[Mutant] = []
    by = random.Random(seed)  # noqa: S311 - to be drawn again
    for package in packages:
        every: list[Mutant] = []
        for path in sorted((ROOT / "src/bigbatch" / package).rglob("*.py")):
            tree = ast.parse(path.read_text())
            first = first_lines(tree)
            every += [
                Mutant(str(path.relative_to(ROOT)), first.get(line, line), what, number)
                for number, (line, what, _) in enumerate(changes(tree))
            ]
        found += by.sample(every, count // len(packages))
    return found


def first_lines(tree: ast.Module) -> dict[int, int]:
    """Return where the statement of each line begins: coverage knows statements by that."""
    found: dict[int, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            end = body[0].lineno - 1 if body else (node.end_lineno or node.lineno)
            found.update(dict.fromkeys(range(node.lineno, max(end, node.lineno) + 1), node.lineno))
    return found


def tests_by_line(coverage: Path) -> tuple[dict[tuple[str, int], set[str]], Counter[str]]:
    """Read which tests run a line, and how many lines each test runs."""
    database = sqlite3.connect(coverage)
    found: dict[tuple[str, int], set[str]] = defaultdict(set)
    lines: Counter[str] = Counter()
    query = """select distinct file.path, arc.fromno, context.context from arc
               join file on file.id = arc.file_id join context on context.id = arc.context_id where arc.fromno > 0"""
    for path, line, context in database.execute(query):
        test = context.rpartition("|")[0]
        if test:
            found["src/" + path.rpartition("/src/")[2], line].add(test)
            lines[test] += 1
    return found, lines


@contextlib.contextmanager
def applied(mutant: Mutant, root: Path) -> Iterator[None]:
    """Write the changed file, and the old one again afterwards."""
    path = root / mutant.path
    before = path.read_text()
    tree = ast.parse(before)
    for number, (_, _, change) in enumerate(changes(tree)):
        if number == mutant.number:
            change()
            break
    path.write_text(ast.unparse(ast.fix_missing_locations(tree)))
    try:
        yield
    finally:
        path.write_text(before)


def outcome(mutant: Mutant, tests: list[str], root: Path) -> str:
    """Run the tests on the changed code."""
    if not tests:
        return "no test runs it"
    environment = {**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1", "CI": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:benchmark", *tests]
    with applied(mutant, root):
        try:
            done = subprocess.run(command, cwd=root, env=environment, capture_output=True, timeout=LIMIT, check=False)  # noqa: S603
        except subprocess.TimeoutExpired:
            return "killed"
    return "lives" if done.returncode == 0 else "killed"


def copies(count: int, folder: Path) -> "SimpleQueue[Path]":
    """Copy the tree as often as there are jobs: each changes its own."""
    found: SimpleQueue[Path] = SimpleQueue()
    for number in range(count):
        target = folder / str(number)
        for each in ("src", "tests", "benchmarks", "examples", "docs"):
            shutil.copytree(ROOT / each, target / each, ignore=shutil.ignore_patterns("__pycache__"))
        for path in ROOT.iterdir():
            if path.is_file():
                shutil.copy(path, target)
        found.put(target)
    return found


def main() -> None:
    """Try the mutants that were not tried yet, and say what share was killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--coverage", type=Path, required=True)
    parser.add_argument("--packages", nargs="+", default=["loss", "window", "distributed", "lockstep"])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=15)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--failing", type=Path, help="a log of pytest: tests that fail without mutants are left out")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/mutants.json")
    chosen = parser.parse_args()
    by_line, lines = tests_by_line(chosen.coverage)
    log = chosen.failing.read_text().splitlines() if chosen.failing else []
    failing = {line.split()[1] for line in log if line.startswith(("FAILED", "ERROR"))}
    done: dict[str, str] = json.loads(chosen.out.read_text())["mutants"] if chosen.out.exists() else {}

    def keep() -> None:
        shares = {p: Counter(each for key, each in done.items() if f"/{p}/" in key) for p in chosen.packages}
        table = {p: {**c, "share": round(c["killed"] / max(sum(c.values()), 1), 3)} for p, c in shares.items()}
        chosen.out.write_text(json.dumps({"seed": chosen.seed, "packages": table, "mutants": done}, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(chosen.jobs) as pool:
        trees = copies(chosen.jobs, Path(folder))

        def tried(mutant: Mutant) -> None:
            name = f"{mutant.path}:{mutant.line} {mutant.what} #{mutant.number}"
            if name in done:
                return
            tests = sorted(
                by_line.get((mutant.path, mutant.line), set()) - failing, key=lambda test: (lines[test], test)
            )
            root = trees.get()
            try:
                done[name] = outcome(mutant, tests[:TRIED], root)
            finally:
                trees.put(root)
            print(f"{done[name]}: {name}", flush=True)
            keep()

        list(pool.map(tried, drawn(chosen.packages, chosen.count, chosen.seed)))
    keep()
    print(json.dumps(json.loads(chosen.out.read_text())["packages"], indent=1))


if __name__ == "__main__":
    main()
