"""Run a command as a user does, on a small file of a user's own."""

from pathlib import Path

from typer.testing import CliRunner, Result

from bigbatch.cli import app

_FILE = """\
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset
from bigbatch import Setup

def setup():
    print("a file that prints")
    {seed}
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), {layer}, torch.nn.Linear(8, 3))
    return Setup(
        model=model{mode},
        loss_fn=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=torch.optim.AdamW(model.parameters(), lr={rate}),
        data=TensorDataset(torch.randn(64, 6), torch.randint(3, (64,))),
        batch_size=16,{more}
    )
"""


def run(*arguments: str, columns: int = 80) -> Result:
    """One command, with a terminal of this width."""
    return CliRunner().invoke(app, arguments, env={"COLUMNS": str(columns), "NO_COLOR": "1"})


def assert_in_order(result: Result, *parts: str, status: int = 0) -> None:
    """A command has said these in this order, inside eighty columns: its result, or with a status the error."""
    assert result.exit_code == status, result.output
    said = result.stderr if status else result.stdout
    text = " ".join(said.split())
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert max(map(len, said.splitlines())) <= 80


def written(folder: Path, *, loop: str = "", seeded: bool = True, **changed: str) -> str:
    """Write a user's own file; return its path."""
    path = folder / "mine.py"
    parts = {"layer": "torch.nn.Tanh()", "mode": "", "more": "", "rate": "1e-3", **changed}
    path.write_text(_FILE.format(seed="torch.manual_seed(0)" if seeded else "", **parts) + loop)
    return str(path)
