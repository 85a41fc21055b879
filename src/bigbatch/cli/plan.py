"""`bigbatch plan`: which micro-batch size a user's file should take, and what it needs."""

import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bigbatch.cli.terminal import FAILED, AsJson, File, Html, Results, deliver, progress, running

if TYPE_CHECKING:
    from bigbatch.planner.plan_report import Plan


def plan(
    file: File,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="24GiB",
            help="What there is to use: 24GiB of a GPU, also of one that is not here, or 0.5 of this device. "
            "[default: what is free]",
        ),
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, metavar="N", help="Instead of the file's own.")] = None,
    as_json: AsJson = False,
    html: Html = None,
) -> None:
    """Find the micro-batch size for your own file.

    It is measured on the model's device in six probes or less, ten where memory runs out. For a GPU that is not here
    (--memory 24GiB) it is predicted by tracing.

    FILE.py: a file whose function setup() returns a bigbatch.Setup.
    """
    with running(as_json=as_json, page=html):
        found = _planned(file, memory, batch_size)

    def page() -> str:
        from bigbatch.report.plan_page import plan_page

        command, why = _next(found, Path(file.name))  # a page may be read elsewhere
        return plan_page(found, name=file.name, next_step=(f"bigbatch {command}", why))

    data = dataclasses.asdict(found) if as_json else None
    deliver(file, data, lambda results: _show(found, file, results), page, html)
    if found.size is None:
        raise typer.Exit(FAILED)


def _planned(file: Path, memory: str | None, batch_size: int | None) -> "Plan":
    """Plan the first batch of the file's data, under a progress bar."""
    from bigbatch.cli.setup_file import first_batch, read_setup, refuse_launcher, with_short_data
    from bigbatch.memory.search import PROBES
    from bigbatch.planner.measure import make_plan
    from bigbatch.setup import calling

    refuse_launcher("plan")
    setup = read_setup(file, "plan")
    batch, asked = first_batch(setup, batch_size)
    with progress(file.name, PROBES) as (_, advance), calling("loss_fn"):
        found = make_plan(
            setup.model,
            setup.loss_fn,
            batch,
            optimizer=setup.optimizer,
            memory=memory,
            on_probe=lambda size: advance(f"{size:,} samples at once"),
        )
    return dataclasses.replace(found, notes=with_short_data(found.notes, found.batch_size, asked))


def _show(found: "Plan", file: Path, results: Results) -> None:
    from bigbatch.planner.plan_report import table

    results.paragraph(f"{file.name}: {found.headline()}\n")
    results.plain("\n".join([*table(found.rows, found.size), ""]))
    for sentence in (*found.advice, *found.notes):
        results.paragraph(sentence)
    results.next_step(*_next(found, file))


def _next(found: "Plan", file: Path) -> tuple[str, str]:
    """Return what to type next, and why; a command is without its program's name."""
    name = shlex.quote(str(file))
    if found.refused:
        return f"verify {name}", "which looks for what it should be"
    if found.size is None:
        return f"plan {name}", "again, after making room as above"
    size = "no micro_batch_size" if found.steps == 1 else f"micro_batch_size={found.size}"
    return f"train {name}", f"with {size} in its Setup"
