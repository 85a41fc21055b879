"""What a user's file needs, and whether it is right, before it is trained: `bigbatch plan` and `bigbatch verify`."""

import dataclasses
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from bigbatch.cli.terminal import FAILED, AsJson, File, Html, answer, progress, running

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
        from bigbatch.report.pages import plan_page
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
    next_step = _next(found, file.name)
    data, text = {"file": str(file), **dataclasses.asdict(found)}, f"{file.name}: {found}\n\nNext: {next_step}"
    answer(data, text, plan_page(found, name=file.name, next_step=next_step), as_json=as_json, html=html)
    if found.size is None:
        raise typer.Exit(FAILED)


def _next(found: "Plan", name: str) -> str:
    if found.refused:
        return f"bigbatch verify {name}, which looks for what the loss should be."
    if found.size is None:
        return "make room as above, and plan again."
    size = "no micro_batch_size" if found.steps == 1 else f"micro_batch_size={found.size}"
    return f"bigbatch train {name}, with {size} in the Setup."


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
        from bigbatch.cli.setup_file import MODULE, first_batch, read_setup
        from bigbatch.options import Options
        from bigbatch.report.pages import verify_page
        from bigbatch.setup import calling
        from bigbatch.verification.api import verify as verify_batch
        from bigbatch.verification.result import refuse_unknown

        refuse_unknown(allow or ())
        setup = read_setup(file)
        train_window = getattr(sys.modules[MODULE], "train_window", None)
        if not setup.model.training:  # as `bigbatch train` has it
            setup.model.train()
        with calling("loss_fn" if train_window is None else "loss_fn or train_window"):
            found = verify_batch(
                setup.model,
                setup.loss_fn,
                first_batch(setup, batch_size),
                micro_batch_size or setup.micro_batch_size or max(1, (batch_size or setup.batch_size) * 2 // 5),
                train_window=train_window,
                options=Options(batch_norm=setup.batch_norm, gradient_dtype=setup.gradient_dtype),
            )
    data, text = {"file": str(file), **found.to_dict()}, f"{file.name}\n\n{found}"
    answer(data, text, verify_page(found, name=file.name), as_json=as_json, html=html)
    if not found.accepted(allow or ()):
        raise typer.Exit(FAILED)
