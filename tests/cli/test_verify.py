"""`bigbatch verify` as a user meets it."""

import json
from pathlib import Path

import pytest

from tests.support.commands import run, written

LOOP = """
def train_window(model, micro_batches):
    for inputs, labels in micro_batches:
        F.cross_entropy(model(inputs), labels).backward()
"""


@pytest.mark.parametrize("columns", [80, 120])
def test_the_report_has_its_parts_in_order(tmp_path: Path, columns: int) -> None:
    """The verdict, the table, and what is next, inside the terminal."""
    result = run("verify", written(tmp_path), columns=columns)
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    parts = ("mine.py: Exact: the gradient of 16 samples in 3 micro-batches", "parameter shape float64", "0.weight 8×6")
    places = [text.index(part) for part in (*parts, "Differences are relative.", "Next: ")]
    assert places == sorted(places)
    assert max(len(line) for line in result.stdout.splitlines() if not line.startswith("Next")) <= columns
    assert "\x1b" not in result.stdout


def test_a_loop_in_the_file_is_put_to_the_proof(tmp_path: Path) -> None:
    """The cause stands below the table, and the exit status says that it is wrong."""
    result = run("verify", written(tmp_path, loop=LOOP, more="micro_batch_size=4,"))
    assert result.exit_code == 1
    text = " ".join(result.stdout.split())
    assert "Not exact: the gradient of 16 samples in 4 micro-batches" in text
    assert "1. wrong-scale The gradient is 4 times the big batch's" in text
    assert "(again, after the remedy above)" in text


def test_equal_micro_batches_are_no_proof_of_a_loops_counts(tmp_path: Path) -> None:
    """The textbook's division is exact for them: a size that shows it is what to type next, and it shows it."""
    loop = LOOP.replace("labels).backward()", "labels).div(len(micro_batches)).backward()")
    file = written(tmp_path, loop=loop, more="micro_batch_size=4,")
    even = run("verify", file)
    assert even.exit_code == 0
    text = " ".join(even.stdout.split())
    assert "All 4 micro-batches count the same, which hides a loop that weights them wrong." in text
    assert "micro_batch_size=3" in text
    assert f"Next: bigbatch verify {file} --micro-batch-size 3 (with a short last micro-batch)" in text
    assert "with the gradients that were proved" not in text
    uneven = run("verify", file, "--micro-batch-size", "3")
    assert uneven.exit_code == 1
    assert "wrong-count" in uneven.stdout


def test_random_numbers_can_be_accepted(tmp_path: Path) -> None:
    """By name; a model in evaluation mode is put into training mode, as train does."""
    file = written(tmp_path, layer="torch.nn.Dropout(0.5)", mode=".eval()")
    refused, accepted = run("verify", file), run("verify", file, "--allow", "randomness")
    assert (refused.exit_code, accepted.exit_code) == (1, 0)
    assert "Equal in distribution: " in refused.stdout
    assert "--allow randomness" in refused.stdout
    assert "1. randomness at 1" in accepted.stdout
    assert run("verify", file, "--allow", "batch-norm").exit_code == 1
    unknown = run("verify", file, "--allow", "dropout")
    assert unknown.exit_code == 2
    assert "error: allow must be a set of kinds of causes. Got 'dropout'" in " ".join(unknown.stderr.split())


def test_json_is_all_that_is_on_stdout(tmp_path: Path) -> None:
    """Also where the file prints."""
    file = written(tmp_path, layer="torch.nn.BatchNorm1d(8)", more='batch_norm="micro",')
    result = run("verify", file, "--json", "--batch-size", "12", "--micro-batch-size", "5")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["micro_batches"] == [4, 4, 4]
    assert [cause["kind"] for cause in found["causes"]] == ["batch-norm"]
    assert (found["file"], found["exact"], found["worst"]) == (file, False, "0.weight")


def test_long_names_keep_their_ends(tmp_path: Path) -> None:
    """In a narrow terminal; no cell of a figure is cut."""
    name = "a_layer_with_a_name_that_is_much_too_long_for_any_terminal_at_all_whatever_it_is_called"
    own = (
        "\nclass Named(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        f"        self.parts = torch.nn.ModuleDict({{'{name}': torch.nn.Linear(8, 8)}})\n"
        f"    def forward(self, x):\n        return self.parts['{name}'](x)\n"
    )
    file = written(tmp_path, layer="Named()", loop=own)
    result = run("verify", file, columns=70)
    assert result.exit_code == 0, result.output
    rows = [line for line in result.stdout.splitlines() if line.startswith("…")]
    assert len(rows) == 2
    assert {row.split()[0][-7:] for row in rows} <= {".weight", "ed.bias"}
    assert all(len(row) <= 70 and len(row.split()) == 6 for row in rows)


def test_more_is_asked_for_than_there_is(tmp_path: Path) -> None:
    """A note says so."""
    result = run("verify", written(tmp_path), "--batch-size", "100", "--micro-batch-size", "40")
    assert result.exit_code == 0, result.output
    assert "The file's data has 64 samples in all: no batch of 100 can be made." in " ".join(result.stdout.split())


def test_a_page_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the results, which are not lost with it."""
    pytest.importorskip("matplotlib")

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
    whole = run("verify", written(tmp_path), "--micro-batch-size", "16")
    assert whole.exit_code == 2
    assert "error: micro_batch_size=16 takes all 16 samples" in " ".join(whole.stderr.split())
    assert "a smaller one, such as micro_batch_size=6" in whole.stderr
    missing = run("verify", str(tmp_path / "none.py"))
    assert missing.exit_code == 2
    assert "There is no file" in missing.stderr
    broken = run("verify", written(tmp_path, loop="\ndef train_window(model, micro_batches):\n    1 / 0\n"))
    assert broken.exit_code == 1
    assert "ZeroDivisionError" in broken.stderr
    assert "loss_fn or train_window failed" in broken.stderr
