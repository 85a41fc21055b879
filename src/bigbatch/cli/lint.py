"""`bigbatch lint`: the command line of bigbatch_lint, which needs nothing but Python."""

import sys

import typer

from bigbatch_lint.cli import main


def lint(context: typer.Context) -> None:
    """Read training scripts and notebooks for the classic mistakes of gradient accumulation."""
    try:
        status = main(context.args, "bigbatch lint")
    except SystemExit as ended:  # after --help
        status = ended.code if isinstance(ended.code, int) else 1
    sys.stdout.flush()
    raise typer.Exit(status)
