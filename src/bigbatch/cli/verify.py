"""`bigbatch verify`: whether a user's file, accumulated, has the big batch's gradient, and if not, why not."""

import dataclasses
import json
import shlex
import sys
from contextlib import nullcontext, redirect_stdout
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bigbatch.cli.failures import FAILED, errors_as_text
from bigbatch.cli.html import prepare, wrote
from bigbatch.cli.terminal import escaped, next_step, paragraph, progress, results

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console
    from rich.table import Table

    from bigbatch.setup import Setup
    from bigbatch.verification.result import Difference, Verification

_ROWS = 10
_NEAR = 0.65  # of 1: a name as near as this to train_window may be a slip
_SHORTEST = 20  # letters of a parameter's name, whatever the terminal


def verify(  # noqa: PLR0917 - each is an option of the command
    file: Annotated[Path, typer.Argument(metavar="FILE.py", help="A file with setup(), and perhaps train_window().")],
    batch_size: Annotated[int | None, typer.Option(min=2, metavar="N", help="Instead of the file's own.")] = None,
    micro_batch_size: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Instead of the file's own. [default: two fifths of the batch]"),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND", help="A kind of cause that is no failure, such as randomness; may be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="PAGE", help="Write a page with plots, too; needs matplotlib.")
    ] = None,
) -> None:
    """Prove that your file's accumulated gradient is the big batch's, or find out why it is not.

    The first batch of its data runs as a whole and accumulated, in the model's own dtype and in float64. Where that
    makes a difference, experiments find the causes. A function train_window(model, micro_batches) in the file is put to
    the proof instead of BigStep: your own loop over one window. The exit status is 1 where the gradients differ.

    FILE.py: a file whose function setup() returns a bigbatch.Setup.
    """
    # What their code prints must not stand among the JSON.
    with errors_as_text(), redirect_stdout(sys.stderr) if as_json else nullcontext():
        from bigbatch.verification.result import refuse_unknown

        refuse_unknown(allow or ())
        if html is not None:
            prepare(html)
        found = _verified(file, batch_size, micro_batch_size)
    if as_json:
        typer.echo(json.dumps({"file": str(file), **found.to_dict()}, indent=2))
    else:
        _print(found, file)
    if html is not None:
        from bigbatch.report.verify_page import verify_page

        wrote(verify_page(found, name=file.name), html)
    if not found.accepted(allow or ()):
        raise typer.Exit(FAILED)


def _verified(file: Path, batch_size: int | None, micro_batch_size: int | None) -> "Verification":
    """Verify the first batch of the file's data, under a progress bar."""
    from bigbatch.cli.setup_file import read_setup
    from bigbatch.options import Options
    from bigbatch.recipes.user_code import calling
    from bigbatch.verification.api import run_verification

    setup = read_setup(file, "verify")
    names = vars(sys.modules["bigbatch_setup_file"])
    train_window = names.get("train_window")
    whole = dataclasses.replace(setup, batch_size=batch_size or setup.batch_size, micro_batch_size=None)
    with calling("making a batch of data"):
        batch = next(iter(whole.micro_batches()))
    if not setup.model.training:  # as `bigbatch train` has it
        setup.model.train()
    size = micro_batch_size or setup.micro_batch_size or max(1, whole.batch_size * 2 // 5)
    with progress() as bar:
        task = bar.add_task(escaped(file.name), total=None)
        with calling("loss_fn" if train_window is None else "loss_fn or train_window"):
            found = run_verification(
                setup.model,
                setup.loss_fn,
                batch,
                size,
                train_window=train_window,
                options=Options(batch_norm=setup.batch_norm, gradient_dtype=setup.gradient_dtype),
                on_run=lambda what: bar.update(task, advance=1, description=what),
            )
    return _with_notes(found, setup, whole.batch_size, [] if train_window is not None else _misspelt(names))


def _misspelt(names: "Mapping[str, object]") -> list[str]:
    """Name functions that may have been meant as train_window: BigStep was proved in the place of one."""
    lower = {name.lower(): name for name, value in names.items() if callable(value)}
    near = [lower[name] for name in get_close_matches("train_window", lower, cutoff=_NEAR)]
    return [
        f"The file's {name}() was not put to the proof: your own loop is called train_window. Rename it:  "
        "def train_window(model, micro_batches): ..."
        for name in near[:1]
    ]


def _with_notes(found: "Verification", setup: "Setup", asked: int, notes: list[str]) -> "Verification":
    if found.samples < asked:
        notes.append(f"The file's data has {found.samples:,} samples in all: no batch of {asked:,} can be made.")
    if setup.counts is not None:
        notes.append("Setup(counts=...) is an Accumulator's; what was verified reads the counts of the loss itself.")
    return dataclasses.replace(found, notes=(*notes, *found.notes))


def _print(found: "Verification", file: Path) -> None:
    from bigbatch.verification.result import cause_text, headline

    console = results()
    paragraph(console, f"{file.name}: {headline(found)}")
    console.print()
    if found.differences:
        worst = sorted(found.differences, key=lambda each: -each.excess)
        console.print(_table(found, worst[:_ROWS], console.width))
        left = len(worst) - _ROWS
        if left > 0:
            console.print(f"and {left:,} more, each nearer to the big batch's", soft_wrap=True)
        paragraph(console, _legend(found))
    for place in range(len(found.causes)):
        console.print()
        paragraph(console, cause_text(found, place))
    for note in found.notes:
        console.print()
        paragraph(console, note)
    console.print()
    _next(found, file, console)


def _next(found: "Verification", file: Path, console: "Console") -> None:
    from bigbatch.verification.runner import uneven_size

    name = shlex.quote(str(file))
    other = uneven_size(found.samples, max(found.micro_batches))
    if found.exact and found.accumulated_by == "BigStep":
        next_step(console, f"train {name}", "with the gradients that were proved")
    elif found.exact and len(set(found.micro_batches)) == 1 and other is not None:
        next_step(console, f"verify {name} --micro-batch-size {other}", "with a short last micro-batch")
    elif found.exact:  # `train` has a loop of its own
        next_step(console, f"plan {name}", "for the micro-batch size that fits into memory")
    elif found.accepted({"randomness"}):
        next_step(console, f"verify {name} --allow randomness", "to accept what is equal in distribution alone")
    else:
        next_step(console, f"verify {name}", "again, after the remedy above")


def _table(found: "Verification", shown: "list[Difference]", width: int) -> "Table":
    """The worst parameters; of a name that does not fit, its end is shown, which tells it from its neighbours."""
    from rich.table import Table

    from bigbatch.verification.result import header, row

    head = header(found.dtype)
    rows = [row(each) for each in shown]
    others = sum(max(len(cell) for cell in column) + 2 for column in list(zip(head, *rows, strict=True))[1:])
    room = max(_SHORTEST, width - others)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(head[0], no_wrap=True)
    for name in head[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    for cells in rows:
        name = cells[0] if len(cells[0]) <= room else f"…{cells[0][1 - room :]}"
        table.add_row(name, *cells[1:])
    return table


def _legend(found: "Verification") -> str:
    if not found.in_float64:
        return f"Differences are relative, in {found.dtype}; rounding: the big batch against itself."
    return (
        f"Differences are relative. rounding: what the big batch loses by itself, in another order (float64), and in "
        f"{found.dtype} against float64."
    )
