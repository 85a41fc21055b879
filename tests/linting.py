"""Scripts for the linter, put together from parts, and what it says of them."""

import textwrap

from bigbatch_lint.check import check
from bigbatch_lint.finding import Finding
from bigbatch_lint.source import read_source

HEAD = """\
import torch
import torch.nn.functional as F
from torch import nn

from data import loader, stream

model = nn.Linear(10, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30)
accumulation_steps = 4
"""


def findings(script: str, name: str = "train.py") -> list[Finding]:
    """Return what all rules find in a script."""
    return check(read_source(name, textwrap.dedent(script).encode()))


def codes(script: str) -> list[str]:
    """Return the codes of what is found, each once."""
    return sorted({finding.code for finding in findings(script)})


def of_loop(loop: str) -> list[str]:
    """Return the codes of what is found in a loop that has everything it needs above it."""
    return codes(HEAD + textwrap.dedent(loop))
