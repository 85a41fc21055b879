"""`bigbatch plan`: which micro-batch size a user's file should take, and what it needs."""

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from bigbatch.cli.terminal import FAILED, AsJson, File, Html, progress, running, show, show_json, write_page

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
        from bigbatch.cli.setup_file import first_batch, read_setup, refuse_launcher
        from bigbatch.memory.search import PROBES
        from bigbatch.planner import measure
        from bigbatch.setup import calling

        refuse_launcher("plan")
        setup = read_setup(file)
        batch = first_batch(setup, batch_size)
        with progress(PROBES) as advance, calling("loss_fn"):
            found = measure.plan(
                setup.model,
                setup.loss_fn,
                batch,
                optimizer=setup.optimizer,
                memory=memory,
                on_probe=lambda size: advance(f"{size:,} samples at once"),
            )
    next_step = _next(found)
    if as_json:
        show_json({"file": str(file), **dataclasses.asdict(found)})
    else:
        show(f"{file.name}: {found}\n\nNext: {next_step}")
    if html is not None:
        from bigbatch.report.pages import plan_page

        write_page(html, plan_page(found, name=file.name, next_step=next_step))
    if found.size is None:
        raise typer.Exit(FAILED)


def _next(found: "Plan") -> str:
    if found.refused:
        return "bigbatch verify, which looks for what the loss should be."
    if found.size is None:
        return "make room as above, and plan again."
    size = "no micro_batch_size" if found.steps == 1 else f"micro_batch_size={found.size}"
    return f"bigbatch train, with {size} in the Setup."
