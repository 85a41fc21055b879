"""The command line, put together.

Nothing here imports torch before a command runs, so that `bigbatch --help` answers at once.
"""

import os
import sys
from importlib import metadata
from typing import Annotated

import typer

from bigbatch.cli.before_training import plan, verify
from bigbatch.cli.train import train
from bigbatch_lint.cli import main as run_lint

app = typer.Typer(
    name="bigbatch",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,  # plain help, readable in any terminal
    pretty_exceptions_enable=False,
)
app.command()(train)
app.command()(plan)


# Its own parser reads all that follows, --help too.
@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def lint(context: typer.Context) -> None:
    """Read training scripts and notebooks for the classic mistakes of gradient accumulation."""
    try:
        status = run_lint(context.args, "bigbatch lint")
    except SystemExit as ended:  # after --help
        status = ended.code if isinstance(ended.code, int) else 1
    sys.stdout.flush()
    raise typer.Exit(status)


app.command()(verify)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bigbatch {metadata.version('bigbatch')}")
        raise typer.Exit


@app.callback()
def bigbatch(
    version: Annotated[  # noqa: ARG001 - acted on by its callback
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and end.")
    ] = False,
) -> None:
    """The batch you want, in the memory you have, with the same gradients."""
    if "MASTER_ADDR" in os.environ and os.environ.get("RANK", "0") != "0":
        raise typer.Exit  # every command is one process's work: of several that torchrun has started, the first's
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show × or ± gets a question mark instead of a traceback.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
