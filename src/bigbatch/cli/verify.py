"""`bigbatch verify`: whether a user's file, accumulated, has the big batch's gradient, and if not, why not."""

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bigbatch.cli.terminal import FAILED, AsJson, File, Html, Results, deliver, progress, running

if TYPE_CHECKING:
    from rich.table import Table

    from bigbatch.verification.result import Verification

_ROWS = 10
_SHORTEST = 20  # letters of a parameter's name, whatever the terminal


def verify(  # noqa: PLR0917 - each is an option of the command
    file: File,
    batch_size: Annotated[int | None, typer.Option(min=2, metavar="N", help="Instead of the file's own.")] = None,
    micro_batch_size: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Instead of the file's own. [default: two fifths of the batch]"),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND", help="A kind of cause that is no failure, such as randomness; may be repeated."),
    ] = None,
    as_json: AsJson = False,
    html: Html = None,
) -> None:
    """Prove that your file's accumulated gradient is the big batch's, or find out why it is not.

    The first batch of its data runs as a whole and accumulated, in the model's own dtype and in float64. Where that
    makes a difference, experiments find the causes. A function train_window(model, micro_batches) in the file is put to
    the proof instead of BigStep: your own loop over one window. The exit status is 1 where the gradients differ.

    FILE.py: a file whose function setup() returns a bigbatch.Setup.
    """
    with running(as_json=as_json, page=html):
        from bigbatch.verification.result import refuse_unknown

        refuse_unknown(allow or ())
        found = _verified(file, batch_size, micro_batch_size)

    def page() -> str:
        from bigbatch.report.verify_page import verify_page

        return verify_page(found, name=file.name)

    data = found.to_dict() if as_json else None
    deliver(file, data, lambda results: _show(found, file, results), page, html)
    if not found.accepted(allow or ()):
        raise typer.Exit(FAILED)


def _verified(file: Path, batch_size: int | None, micro_batch_size: int | None) -> "Verification":
    """Verify the first batch of the file's data, under a progress bar."""
    from bigbatch.cli.setup_file import MODULE, first_batch, read_setup, with_short_data
    from bigbatch.options import Options
    from bigbatch.setup import calling
    from bigbatch.verification.api import run_verification

    setup = read_setup(file, "verify")
    train_window = getattr(sys.modules[MODULE], "train_window", None)
    batch, asked = first_batch(setup, batch_size)
    if not setup.model.training:  # as `bigbatch train` has it
        setup.model.train()
    called = "loss_fn" if train_window is None else "loss_fn or train_window"
    with progress(file.name, None) as (_, advance), calling(called):
        found = run_verification(
            setup.model,
            setup.loss_fn,
            batch,
            micro_batch_size or setup.micro_batch_size or max(1, asked * 2 // 5),
            train_window=train_window,
            options=Options(batch_norm=setup.batch_norm, gradient_dtype=setup.gradient_dtype),
            on_run=advance,
        )
    return dataclasses.replace(found, notes=with_short_data(found.notes, found.samples, asked))


def _show(found: "Verification", file: Path, results: Results) -> None:
    from bigbatch.verification.result import cause_text, headline

    results.paragraph(f"{file.name}: {headline(found)}\n")
    if found.differences:
        results.print(_table(found, results.width))
        left = len(found.differences) - _ROWS
        if left > 0:
            results.plain(f"and {left:,} more, each nearer to the big batch's")
        rounding = "what the big batch loses by itself, in another order (float64), and in {} against float64"
        text = rounding.format(found.dtype) if found.in_float64 else f"the big batch against itself, in {found.dtype}"
        results.paragraph(f"Differences are relative. rounding: {text}.")
    for text in (*(cause_text(found, place) for place in range(len(found.causes))), *found.notes):
        results.paragraph(f"\n{text}")
    results.plain("")
    results.next_step(*_next(found, shlex.quote(str(file))))


def _next(found: "Verification", name: str) -> tuple[str, str]:
    """Return what to type next, and why."""
    from bigbatch.verification.runner import uneven_size

    other = uneven_size(found.samples, max(found.micro_batches))
    if found.exact and found.accumulated_by == "BigStep":
        return f"train {name}", "with the gradients that were proved"
    if found.exact and len(set(found.micro_batches)) == 1 and other is not None:
        return f"verify {name} --micro-batch-size {other}", "with a short last micro-batch"
    if found.exact:  # `train` has a loop of its own
        return f"plan {name}", "for the micro-batch size that fits into memory"
    if found.accepted({"randomness"}):
        return f"verify {name} --allow randomness", "to accept what is equal in distribution alone"
    return f"verify {name}", "again, after the remedy above"


def _table(found: "Verification", width: int) -> "Table":
    """The worst parameters; of a name that does not fit, its end is shown, which tells it from its neighbors."""
    from rich.table import Table

    from bigbatch.verification.result import header, row

    head = header(found.dtype)
    rows = [row(each) for each in sorted(found.differences, key=lambda each: -each.excess)[:_ROWS]]
    others = sum(max(map(len, column)) + 2 for column in list(zip(head, *rows, strict=True))[1:])
    room = max(_SHORTEST, width - others)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for place, name in enumerate(head):
        table.add_column(name, justify="right" if place else "left", no_wrap=True)
    for name, *cells in rows:
        table.add_row(name if len(name) <= room else f"…{name[1 - room :]}", *cells)
    return table
