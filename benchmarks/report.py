"""Say a result three ways: a table on the terminal, and JSON and Markdown files with the machine in them."""

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.machine import Machine

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Grid:
    """One table: its cells are text, ready to be read."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def markdown(self) -> str:
        """Return the table as GitHub reads it."""
        lines = [f"## {self.title}", "", _line(self.header), _line(("---",) * len(self.header))]
        return "\n".join([*lines, *map(_line, self.rows)])

    def rich(self) -> Table:
        """Return the table as a terminal shows it."""
        table = Table(title=self.title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for index, name in enumerate(self.header):
            table.add_column(name, justify="right" if index else "left", no_wrap=not index)
        for row in self.rows:
            table.add_row(*map(escape, row))  # an error's text may hold brackets
        return table


@dataclass(frozen=True)
class Report:
    """What was measured, how it reads, and where it was measured."""

    name: str
    machine: Machine
    grids: list[Grid]
    notes: list[str]
    measured: list[object] = field(default_factory=list)  # frozen dataclasses, as they go into the JSON file

    def json(self) -> str:
        """Return every figure, unrounded."""
        rows = [asdict(row) for row in self.measured]  # type: ignore[call-overload]
        return json.dumps({"machine": self.machine.as_dict(), "notes": self.notes, "measured": rows}, indent=2)

    def markdown(self) -> str:
        """Return the tables and what has to be known to read them."""
        parts = [f"# {self.name}", *(grid.markdown() for grid in self.grids), *self.notes, self.machine.sentence()]
        return "\n\n".join(parts) + "\n"

    def write(self, folder: Path) -> None:
        """Write `<name>.json` and `<name>.md`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.json").write_text(self.json() + "\n")
        (folder / f"{self.name}.md").write_text(self.markdown())

    def show(self, *, as_json: bool) -> None:
        """Print to stdout."""
        if as_json:
            print(self.json())
            return
        for grid in self.grids:
            show(grid)
        for note in (*self.notes, self.machine.sentence()):
            _console().print(note, style="dim", highlight=False)


def show(grid: Grid) -> None:
    """Print one table to stdout, at once: a long run is read while it goes on."""
    _console().print(grid.rich())
    sys.stdout.flush()


def _console() -> Console:
    # Into a pipe or a file there is no window to fit.
    return Console() if sys.stdout.isatty() else Console(width=140)


def progress() -> Progress:
    """Return a bar on stderr, so that stdout holds data alone."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
