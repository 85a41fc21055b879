"""`python -m bigbatch`, as `bigbatch`."""

from bigbatch.cli import app

if __name__ == "__main__":
    app(prog_name="bigbatch")
