"""`bigbatch plan`: which micro-batch size a user's file should take, and what it needs."""

import dataclasses
import json
import shlex
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bigbatch.cli.failures import FAILED
from bigbatch.cli.html import prepare, wrote
from bigbatch.cli.several import one_of_several
from bigbatch.cli.terminal import next_step, paragraph, progress, results, typed

if TYPE_CHECKING:
    from bigbatch.planning.report import Plan
    from bigbatch.recipes.launching import Place

_WHOLE = ("Accumulator", "torchrun")  # begin what is no command of ours


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

    FILE.py: a file whose function setup() returns a bigbatch.Setup. On several devices, with what they send and hold:
    torchrun --nproc-per-node 2 -m bigbatch plan FILE.py
    """
    with one_of_several(0) as place:
        speaks = place is None or place.speaks
        # What their code prints must not stand among the JSON.
        with redirect_stdout(sys.stderr) if as_json and speaks else nullcontext():
            if html is not None and speaks:
                prepare(html)
            found = _planned(file, memory, batch_size, place)
    if found is None:
        return
    if as_json:
        typer.echo(json.dumps({"file": str(file), **dataclasses.asdict(found)}, indent=2))
    else:
        _print(found, file)
    if html is not None:
        from bigbatch.pages.plan_page import plan_page

        command, why = _next(found, Path(file.name))  # a page may be read elsewhere
        command = command if command.startswith(_WHOLE) else f"bigbatch {command}"
        wrote(plan_page(found, name=file.name, next_step=(command, why)), html)
    if found.size is None:
        raise typer.Exit(FAILED)


def _planned(file: Path, memory: str | None, batch_size: int | None, place: "Place | None") -> "Plan | None":
    """Plan the first batch of the file's data, under a progress bar; of several processes, the first has it."""
    from bigbatch.cli.setup_file import read_setup
    from bigbatch.memory.sizing import PROBES
    from bigbatch.planning.plan import make_plan
    from bigbatch.ranks.groups import sharded
    from bigbatch.recipes.user_code import calling

    setup = read_setup(file, "plan")
    ranks = 1 if place is None else place.size
    if place is not None:
        place.refuse_another_device(setup.model)
        if not place.speaks and not sharded([setup.model]):
            return None  # it has a whole model, as the first rank has, and would find what that one finds
    mine = -(-(batch_size or setup.batch_size) // ranks)  # the largest of the parts that ranks have of a batch
    whole = dataclasses.replace(setup, batch_size=mine, micro_batch_size=None)
    with calling("making a batch of data"):
        batch = next(iter(whole.micro_batches()))
    speaks = place is None or place.speaks
    with progress(quiet=not speaks) as bar:
        task = bar.add_task(file.name, total=PROBES)

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
                ranks=ranks,
            )
    if not speaks:
        return None
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
    from bigbatch.planning.report import ranks_headline, ranks_table, table

    console = results()
    paragraph(console, f"{file.name}: {found.headline()}")
    console.print()
    for line in table(found.rows, found.size):
        console.print(line, markup=False, soft_wrap=True)
    console.print()
    if found.ranks is not None:
        paragraph(console, ranks_headline(found.ranks))
        console.print()
        for line in ranks_table(found.ranks):
            console.print(line, markup=False, soft_wrap=True)
        console.print()
    for sentence in (*(found.ranks.notes if found.ranks else ()), *found.advice, *found.notes):
        paragraph(console, sentence)
    command, why = _next(found, file)
    if command.startswith(_WHOLE):
        console.print(f"Next: {command}, {why}", markup=False, soft_wrap=True)
    else:
        next_step(console, command, why)


def _next(found: "Plan", file: Path) -> tuple[str, str]:
    """Return what to type next, and why; a command is without its program's name."""
    if found.refused:
        return f"verify {shlex.quote(str(file))}", "which looks for what it should be"
    train = f"train {shlex.quote(str(file))}"
    if found.size is None:
        return f"plan {shlex.quote(str(file))}", "again, after making room as above"
    if found.ranks is not None and found.ranks.wrapper == "fully_shard":
        return (
            f"Accumulator(model, optimizer, steps={found.steps})",
            f"on micro-batches of {found.size:,} on every rank",
        )
    if found.ranks is not None:
        train = typed(train, found.ranks.ranks)
    if found.steps == 1:
        return train, "with no micro_batch_size in its Setup"
    return train, f"with micro_batch_size={found.size} in its Setup"
