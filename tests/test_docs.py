"""The code in README.md and docs/ runs, on real objects, as it stands."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import Accumulator

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def token_losses(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return each target's own loss."""
    return F.cross_entropy(model(inputs), labels, reduction="none")


def my_masked_mean(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return a masked mean as people write it."""
    mask = labels != -100
    return (token_losses(model, inputs, labels) * mask).sum() / mask.sum()


def reader_s_own() -> dict[str, Any]:
    """Return what a reader of the pages has: a model, a loader, an optimizer."""
    torch.manual_seed(0)
    model = nn.Linear(10, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = [(torch.randn(n, 10), torch.randint(0, 2, (n,))) for n in (16, 16, 16, 16, 16, 7)]
    inputs, labels = loader[0]
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "criterion": nn.CrossEntropyLoss(),
        "loader": loader,
        "inputs": inputs,
        "labels": labels,
        "anchor": torch.zeros_like(model.weight),
        "token_losses": token_losses,
        "my_masked_mean": my_masked_mean,
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_on_a_page_runs(page: Path) -> None:
    """Every block runs, one after the other as a reader would type them."""
    names = reader_s_own()
    for code in BLOCK.findall(page.read_text()):
        if "accumulator" in names:  # a window that an earlier block left open is the reader's to drop
            names["accumulator"].discard()
        names.setdefault("accumulator", Accumulator(names["model"], names["optimizer"], steps=4))
        exec(compile(code, page.name, "exec"), names)  # noqa: S102 - that is the test


def test_every_page_has_code() -> None:
    """The pattern finds the blocks: a page without any would pass for nothing."""
    assert all(BLOCK.search(page.read_text()) for page in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link is a file."""
    for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / link).exists(), link
