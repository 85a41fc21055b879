"""`--html PAGE`: refuse what cannot be written before anything is measured, and say what was."""

from pathlib import Path

import typer

from bigbatch.cli.failures import FAILED, fail
from bigbatch.cli.terminal import escaped


def prepare(page: Path) -> None:
    """Raise where no page can be drawn or written."""
    from bigbatch.report.page import check_target
    from bigbatch.report.plots import require_matplotlib

    check_target(page)
    require_matplotlib()


def wrote(text: str, page: Path) -> None:
    """Write a page, and say so where it does not mix with results."""
    try:
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"--html {page}: this could not be written ({error.strerror or error}).", "Name another file.", FAILED)
    typer.echo(f"Wrote {escaped(str(page))}", err=True)
