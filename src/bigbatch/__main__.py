"""The command line: `python -m bigbatch`, and the script `bigbatch`."""

import sys


def main() -> None:
    """Run a command; without the libraries of the command line, say how to install them."""
    try:
        from bigbatch.cli import app  # noqa: PLC0415 - what it imports may be missing
    except ModuleNotFoundError as error:
        if error.name not in {"typer", "click"}:
            raise
        sys.exit(
            f"error: the command line needs {error.name}, which is not installed\n\nhint: pip install 'bigbatch[cli]'"
        )
    app(prog_name="bigbatch")


if __name__ == "__main__":
    main()
