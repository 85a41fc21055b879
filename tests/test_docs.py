"""The code in README.md and docs/ runs, on real objects, as it stands."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from bigbatch import Accumulator, Update

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
    batches = [(torch.randn(n, 10), torch.randint(0, 2, (n,))) for n in (16, 16, 16, 16, 16, 7)]
    inputs, labels = batches[0]
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "criterion": nn.CrossEntropyLoss(),
        "loader": DataLoader(batches, batch_size=None),  # type: ignore[arg-type]  # a list is a dataset
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
    """Every relative link is a file; figures are drawn when the pages are built, which checks links, too."""
    for link in re.findall(r"\]\((?!figures/)([^)#:]+)\)", page.read_text()):
        assert (page.parent / link).exists(), link


def test_a_hugging_face_language_model_equals_to_its_own_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the pages say: a float64 model's loss is float32, and accumulated weights move to within 1e-6 of the true."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, intermediate_size=32)
    true = transformers.LlamaForCausalLM(config).double()
    accumulated = copy.deepcopy(true)
    tokens = torch.randint(50, (12, 8))
    before = nn.utils.parameters_to_vector(true.parameters()).detach().clone()

    loss = true(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.optim.SGD(true.parameters(), lr=0.5).step()
    accumulator = Accumulator(accumulated, torch.optim.SGD(accumulated.parameters(), lr=0.5), steps=3)
    for part in accumulator.over(tokens.split(5)):
        accumulator.backward(accumulated(input_ids=part, labels=part).loss)

    after, reached = (nn.utils.parameters_to_vector(model.parameters()) for model in (true, accumulated))
    assert (true.dtype, loss.dtype) == (torch.float64, torch.float32)
    assert 1e-12 < (reached - after).norm() / (after - before).norm() < 1e-6


def test_the_fields_of_an_update_that_the_readme_names_are_there() -> None:
    """Each name in the sentence is a field."""
    sentence = re.search(r"An `Update` is (.*?)\n\n", (ROOT / "README.md").read_text(), re.DOTALL)
    assert sentence is not None
    names = set(re.findall(r"`(\w+)`", sentence[1])) - {"clip_norm"}
    assert names == {"loss", "count", "micro_batches", "grad_norm", "skipped"}
    assert all(hasattr(Update(micro_batches=1, count=1.0, _loss=0.5), name) for name in names)
