"""`bigbatch train` as a user meets it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from bigbatch.cli import app

FILE = """\
from tests.test_setup import make

def setup():
    return make(micro_batch_size=8, epochs=2, evaluate=lambda model: {"always": 0.25})
"""


def run(*arguments: str, columns: int = 80) -> Result:
    """One command, with a terminal of this width."""
    return CliRunner().invoke(app, arguments, env={"COLUMNS": str(columns), "NO_COLOR": "1"})


@pytest.fixture(scope="module")
def default() -> Result:
    """The command as it stands in the README, with fewer seeds and epochs."""
    return run("train", "--seeds", "2", "--epochs", "3")


def test_the_report_has_its_parts_in_order(default: Result) -> None:
    """Title, table, the three sentences, and what to try next as the last line."""
    assert default.exit_code == 0, default.output
    assert default.stderr == ""
    text = " ".join(default.stdout.split())
    parts = ["1,000 samples", "samples used", "distance from true 64", "The textbook loop left 40 of 1,000"]
    parts += ["At the same rate of 0.1", "The page claims about 70 %", "Next: bigbatch train --clip 1.0"]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert default.stdout.splitlines()[-1].startswith("Next: bigbatch train --clip 1.0")


def test_the_table_fits_eighty_columns(default: Result) -> None:
    """No line is longer but the last, which is to be copied; no colour codes, no truncated cells."""
    lines = default.stdout.splitlines()
    assert max(len(line) for line in lines[:-1]) <= 80
    assert "\x1b" not in default.stdout
    assert "…" not in default.stdout
    row = next(line for line in lines if line.startswith("samples used"))
    assert row.split()[2:] == ["3,000", "2,880", "3,000", "3,000", "3,000"]


@pytest.mark.parametrize("columns", [40, 120])
def test_other_widths_lose_nothing(columns: int) -> None:
    """Blocks where it is narrow, one line per measurement where it is wide."""
    result = run("train", "--seeds", "2", "--epochs", "1", columns=columns)
    lines = result.stdout.splitlines()
    assert max(len(line) for line in lines[:-1]) <= columns
    assert "…" not in result.stdout
    assert result.stdout.count("updates") >= (5 if columns == 40 else 1)
    assert any(line.count("±") == (1 if columns == 40 else 5) for line in lines)


def test_json_is_all_that_is_on_stdout() -> None:
    """The same numbers, for programs, with the sentences."""
    result = run("train", "--seeds", "1", "--epochs", "2", "--json", "--clip", "1.0")
    data = json.loads(result.stdout)
    assert [arm["updates"] for arm in data["arms"]] == [126, 30, 32, 32, 32]
    assert (data["clip_norm"], data["seeds"], data["epochs"]) == (1.0, 1, 2)
    assert data["arms"][0]["loss"]["std"] is None
    assert data["arms"][2]["distance"] <= 1e-12
    assert len(data["findings"]) == 3


def test_what_to_try_next_goes_on() -> None:
    """After the bonus comes the second example, after that the user's own file."""
    assert "Next: bigbatch train adamw" in run("train", "--clip", "1.0", "--seeds", "1", "--epochs", "1").stdout
    adamw = run("train", "adamw", "--seeds", "1", "--epochs", "1")
    assert "Next: bigbatch train FILE.py" in adamw.stdout
    assert "clipped at 1" in adamw.stdout


def test_a_file_is_trained_and_seeded(tmp_path: Path) -> None:
    """The same seed gives the same numbers, another one others; flags go before the file's own."""
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    result = run("train", str(file))
    assert result.exit_code == 0, result.output
    assert "mine.py: batch 32 = 8 × 4, seed 0" in result.stdout
    assert "always" in result.stdout
    assert result.stdout.splitlines()[-1].startswith(f"Next: bigbatch train {file} --seed 1")

    def losses(*flags: str) -> list[float]:
        data = json.loads(run("train", str(file), "--json", *flags).stdout)
        return [epoch["loss"] for epoch in data["epochs"]]

    assert losses() == losses("--seed", "0")
    assert losses() != losses("--seed", "1")
    assert len(losses("--epochs", "3")) == 3
    assert losses("--clip", "0.001") != losses()


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["nope"], "no recipe is called 'nope'", "hint: the recipes are textbook, adamw"),
        (["nope.py"], "there is no file nope.py", ""),
        (["--clip", "0"], "--clip 0: ", "hint: --clip 1.0"),
        (["--clip", "nan"], "--clip nan: ", "hint: --clip 1.0"),
        (["--seed", "3"], "--seed is for files", "hint: bigbatch train textbook --seeds 5"),
        (["some.py", "--seeds", "3"], "--seeds is for recipes", "hint: bigbatch train some.py --seed 3"),
    ],
)
def test_misuse_is_short_text_and_exit_code_two(arguments: list[str], message: str, hint: str) -> None:
    """On stderr, with a hint after a blank line, and nothing on stdout."""
    result = run("train", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: {message}")
    assert not hint or f"\n\n{hint}" in result.stderr


def test_a_refusal_of_the_library_has_no_traceback(tmp_path: Path) -> None:
    """A setup that cannot work: what is wrong, then what to write."""
    file = tmp_path / "mine.py"
    file.write_text(FILE.replace("micro_batch_size=8", "micro_batch_size=7"))
    result = run("train", str(file))
    assert result.exit_code == 2
    assert "32 is not a multiple of 7" in result.stderr
    assert "\n\nhint: Take batch_size=28 or 35" in result.stderr
    assert "Traceback" not in result.stderr


def test_help_lists_what_there_is() -> None:
    """One command so far, and nothing that is not built."""
    result = run("--help")
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.split("Commands:\n")[1].splitlines()] == ["train"]


def test_help_does_not_load_torch() -> None:
    """A fresh interpreter answers without it."""
    script = "import sys; from bigbatch.cli import app; app(['--help'], standalone_mode=False)"
    script += "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False, capture_output=True).returncode == 0


def test_an_ascii_terminal_is_no_reason_to_fail() -> None:
    """What it cannot show is replaced."""
    command = [sys.executable, "-c", "from bigbatch.cli import app; app()", "train", "--seeds", "1", "--epochs", "1"]
    result = subprocess.run(command, check=False, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert result.returncode == 0, result.stderr
    assert b"distance from true 64" in result.stdout
