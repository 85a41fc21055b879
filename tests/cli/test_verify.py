"""`bigbatch verify` as a user meets it."""

import json
from pathlib import Path

import pytest

from tests.support.commands import assert_in_order, run, written


def test_a_right_file_is_exact(tmp_path: Path) -> None:
    """Its name, the table and the verdict."""
    parts = "mine.py", "parameter shape float64", "0.weight 8×6", "Exact: the gradient of 16 samples in 3 micro-"
    assert_in_order(run("verify", written(tmp_path)), *parts)


def test_random_numbers_can_be_accepted(tmp_path: Path) -> None:
    """By name; a model in evaluation mode is put into training mode, as train does."""
    file = written(tmp_path, layer="torch.nn.Dropout(0.5)", mode=".eval()")
    refused, accepted = run("verify", file), run("verify", file, "--allow", "randomness")
    assert (refused.exit_code, accepted.exit_code) == (1, 0)
    assert "Equal in distribution: " in refused.stdout
    unknown = "error: allow must be a set of kinds of causes. Got 'dropout'"
    assert_in_order(run("verify", file, "--allow", "dropout"), unknown, status=2)


def test_json_is_all_that_is_on_stdout(tmp_path: Path) -> None:
    """Also where the file prints."""
    file = written(tmp_path, layer="torch.nn.BatchNorm1d(8)", more='batch_norm="micro",')
    result = run("verify", file, "--json", "--batch-size", "12", "--micro-batch-size", "5")
    found = json.loads(result.stdout)
    assert [cause["kind"] for cause in found["causes"]] == ["batch-norm"]
    assert (result.exit_code, found["file"], found["exact"], found["micro_batches"]) == (1, file, False, [4, 4, 4])


def test_a_page_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the results, which are not lost with it."""
    file = written(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    result = run("verify", file, "--html", str(tmp_path / "page.html"))
    assert result.exit_code == 1
    assert "Exact: " in result.stdout
    assert "this could not be written (No space left on device)" in " ".join(result.stderr.split())


def test_what_cannot_work_says_what_to_type(tmp_path: Path) -> None:
    """As every other command."""
    whole = "error: micro_batch_size=16 takes all 16 samples"
    assert_in_order(run("verify", written(tmp_path), "--micro-batch-size", "16"), whole, status=2)
    assert run("verify", str(tmp_path / "none.py")).exit_code == 2
    broken = run("verify", written(tmp_path, loop="\ndef train_window(model, micro_batches):\n    1 / 0\n"))
    assert broken.exit_code == 1
    assert "ZeroDivisionError" in broken.stderr
    assert "loss_fn or train_window failed" in broken.stderr
