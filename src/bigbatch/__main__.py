"""`python -m bigbatch`, for launchers that start a module: `torchrun --nproc-per-node 2 -m bigbatch train FILE.py`."""

from bigbatch.cli import app

if __name__ == "__main__":
    app(prog_name="bigbatch")
