"""The examples on several ranks, started as their first lines say, end with the weights of one process."""

from pathlib import Path

import pytest
import torch

from examples.ranks import one_gpu
from tests.launched import torchrun
from tests.reference import distance

ROOT = Path(__file__).parent.parent
EXAMPLES = ["examples/ranks/ddp.py", "examples/ranks/ddp_big_step.py"]


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_ends_with_the_weights_of_one_process(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To 1e-12, and prints what one process prints, once."""
    one, several = str(tmp_path / "one.pt"), str(tmp_path / "several.pt")
    monkeypatch.setattr("sys.argv", ["one_gpu.py", one])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    one_gpu.main()
    result = torchrun(2, example, several)
    assert result.returncode == 0, result.stderr
    assert result.stdout == capsys.readouterr().out
    assert result.stdout.count("16 updates") == 3
    found, true = torch.load(several), torch.load(one)
    assert found.keys() == true.keys()
    assert distance(list(found.values()), list(true.values())) <= 1e-12


@pytest.mark.parametrize("example", [*EXAMPLES, "examples/ranks/one_gpu.py"])
def test_an_example_says_how_to_start_it(example: str) -> None:
    """In its docstring, by its own path."""
    text = (ROOT / example).read_text().split('"""')[1]
    launcher = "python " if example.endswith("one_gpu.py") else "torchrun --nproc-per-node 2 "
    assert f"\n{launcher}{example} [weights.pt]\n" in text
