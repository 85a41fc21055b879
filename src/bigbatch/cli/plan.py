"""`bigbatch plan`: which micro-batch size a user's file should take, and what it needs."""

import dataclasses
import shlex
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bigbatch.cli.failures import FAILED, errors_as_text
from bigbatch.cli.html import prepare, wrote
from bigbatch.cli.terminal import escaped, next_step, paragraph, print_json, progress, results

if TYPE_CHECKING:
    from bigbatch.planner.plan_report import Plan


def plan(
    file: Annotated[Path, typer.Argument(metavar="FILE.py", help="A file with setup().")],
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="24GiB",
            help="What there is to use: 24GiB of a GPU, also of one that is not here, or 0.5 of this device. "
            "[default: what is free]",
        ),
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, metavar="N", help="Instead of the file's own.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="PAGE", help="Write a page with plots, too; needs matplotlib.")
    ] = None,
) -> None:
    """Find the micro-batch size for your own file.

    It is measured on the model's device in six probes or less, ten where memory runs out. For a GPU that is not here
    (--memory 24GiB) it is predicted by tracing.

    FILE.py: a file whose function setup() returns a bigbatch.Setup.
    """
    # What their code prints must not stand among the JSON.
    with errors_as_text(), redirect_stdout(sys.stderr) if as_json else nullcontext():
        from bigbatch.cli.setup_file import refuse_launcher

        refuse_launcher("plan")
        if html is not None:
            prepare(html)
        found = _planned(file, memory, batch_size)
    if as_json:
        print_json({"file": str(file), **dataclasses.asdict(found)})
    else:
        _print(found, file)
    if html is not None:
        from bigbatch.report.plan_page import plan_page

        command, why = _next(found, Path(file.name))  # a page may be read elsewhere
        wrote(plan_page(found, name=file.name, next_step=(f"bigbatch {command}", why)), html)
    if found.size is None:
        raise typer.Exit(FAILED)


def _planned(file: Path, memory: str | None, batch_size: int | None) -> "Plan":
    """Plan the first batch of the file's data, under a progress bar."""
    from bigbatch.cli.setup_file import read_setup
    from bigbatch.memory.search import PROBES
    from bigbatch.planner.measure import make_plan
    from bigbatch.recipes.user_code import calling

    setup = read_setup(file, "plan")
    whole = dataclasses.replace(setup, batch_size=batch_size or setup.batch_size, micro_batch_size=None)
    with calling("making a batch of data"):
        batch = next(iter(whole.micro_batches()))
    with progress() as bar:
        task = bar.add_task(escaped(file.name), total=PROBES)

        def on_probe(size: int) -> None:
            bar.update(task, advance=1, description=f"{size:,} samples at once")

        with calling("loss_fn"):
            found = make_plan(
                setup.model,
                setup.loss_fn,
                batch,
                optimizer=setup.optimizer,
                memory=_fraction(memory) or memory,
                on_probe=on_probe,
            )
    if found.batch_size < whole.batch_size:
        short = (
            f"The file's data has {found.batch_size:,} samples in all: no batch of {whole.batch_size:,} can be made."
        )
        found = dataclasses.replace(found, notes=(short, *found.notes))
    return found


def _fraction(memory: str | None) -> float | None:
    """Read `--memory 0.8`, which has no unit since it is a fraction."""
    try:
        number = float(memory or "")
    except ValueError:
        return None
    return number if 0 < number <= 1 and "." in str(memory) else None


def _print(found: "Plan", file: Path) -> None:
    from bigbatch.planner.plan_report import table

    console = results()
    paragraph(console, f"{file.name}: {found.headline()}")
    console.print()
    for line in table(found.rows, found.size):
        console.print(line, markup=False, soft_wrap=True)
    console.print()
    for sentence in (*found.advice, *found.notes):
        paragraph(console, sentence)
    next_step(console, *_next(found, file))


def _next(found: "Plan", file: Path) -> tuple[str, str]:
    """Return what to type next, and why; a command is without its program's name."""
    if found.refused:
        return f"verify {shlex.quote(str(file))}", "which looks for what it should be"
    train = f"train {shlex.quote(str(file))}"
    if found.size is None:
        return f"plan {shlex.quote(str(file))}", "again, after making room as above"
    if found.steps == 1:
        return train, "with no micro_batch_size in its Setup"
    return train, f"with micro_batch_size={found.size} in its Setup"
