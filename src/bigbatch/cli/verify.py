"""`bigbatch verify`: whether a user's file, accumulated, has the big batch's gradient, and if not, why not."""

import sys
from typing import Annotated

import typer

from bigbatch.cli.terminal import FAILED, AsJson, File, Html, running, show, show_json, write_page


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
    if as_json:
        show_json({"file": str(file), **found.to_dict()})
    else:
        show(f"{file.name}\n\n{found}")
    if html is not None:
        from bigbatch.report.pages import verify_page

        write_page(html, verify_page(found, name=file.name))
    if not found.accepted(allow or ()):
        raise typer.Exit(FAILED)
