"""`bigbatch train` as a user meets it, and what all commands have in common."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import assert_in_order, run, written


def test_the_report_has_its_parts_in_order() -> None:
    """The command as it stands in the README, with fewer seeds and epochs: title, table, what it shows."""
    result = run("train", "--seeds", "2", "--epochs", "3")
    assert result.stderr == ""
    title = "teaching pages on gradient accumulation in PyTorch: 1,000 samples"
    shown = "The textbook loop leaves 40 of 1,000", "At the same rate", "The teaching pages claim about 70 %"
    assert_in_order(result, title, "samples used", "distance from true 64", *shown)


def test_json_is_all_that_is_on_stdout() -> None:
    """The same numbers, for programs."""
    data = json.loads(run("train", "adamw", "--seeds", "1", "--epochs", "1", "--json", "--clip", "0.5").stdout)
    assert [arm["updates"] for arm in data["arms"]] == [32, 8, 8, 8, 8]
    assert (data["clip_norm"], data["seeds"], data["epochs"]) == (0.5, 1, 1)
    assert data["arms"][0]["loss"]["std"] is None
    assert data["arms"][0]["clipped"]["mean"] == 32
    assert data["arms"][2]["distance"] <= 1e-12


def test_a_file_is_trained_and_seeded(tmp_path: Path) -> None:
    """The same seed gives the same numbers, another one others; flags go before the file's own."""
    evaluate = "evaluate=lambda model: {'always': 0.25}, epochs=2, micro_batch_size=4,"
    file = written(tmp_path, more=evaluate, seeded=False)
    result = run("train", file)
    assert result.exit_code == 0, result.output
    title, one, two = result.stdout.splitlines()[-3:]
    assert title == "mine.py: batch 16 in micro-batches of 4, seed 0"
    for number, line in enumerate((one, two), 1):
        assert re.fullmatch(rf"epoch {number}: loss \d\.\d+, always 0.25, updates 4, ms/update \S+", line)

    def losses(*flags: str) -> list[float]:
        data = json.loads(run("train", file, "--json", *flags).stdout)
        return [epoch["loss"] for epoch in data["epochs"]]

    of_the_file = losses()
    assert of_the_file == losses("--seed", "0") != losses("--seed", "1")
    assert len(clipped := losses("--epochs", "3", "--clip", "0.001")) == 3
    assert clipped[:2] != of_the_file


MISUSES = [
    (["nope.py"], "nope.py is no file, and no recipe."),
    (["--clip", "0"], "clip_norm must be a positive number"),
    (["--clip", "x"], "Invalid value for '--clip'"),
    (["--seed", "3"], "--seed is for files"),
    ([__file__, "--seeds", "3"], "a recipe runs --seeds"),
]


@pytest.mark.parametrize(("arguments", "message"), MISUSES)
def test_misuse_is_short_text_and_exit_code_two(arguments: list[str], message: str) -> None:
    """On stderr, and nothing on stdout."""
    result = run("train", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in " ".join(result.stderr.split())


# What is put in the place of the model's layer, which calls fail, and how the line below the traceback begins.
MISTAKES: dict[str, dict[str, Any]] = {
    "reading the file": {"loop": "\nimport syss"},
    "setup()": {"more": "dataset=0"},
    "loss_fn": {"layer": "torch.nn.Linear(9, 8)"},
    "evaluate": {"more": "evaluate=lambda model: {'nothing': 1 / 0}"},
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_failure_in_a_users_file_is_shown_from_its_own_line_on(what: str, tmp_path: Path) -> None:
    """Python's traceback without what led to the user's code, one line of what was called, and exit code 1."""
    file = written(tmp_path, **MISTAKES[what])
    result = run("train", file)
    assert result.exit_code == 1
    traceback, _, end = result.stderr.partition("\n\nerror: ")
    assert end.startswith(f"{what} failed")
    assert re.findall(r'^  File "(.*)", line \d+', traceback, re.MULTILINE)[0] == file


@pytest.mark.parametrize("layer", ["torch.nn.Tanh()", "torch.nn.BatchNorm1d(8)"])
def test_what_is_proved_and_planned_is_trained(layer: str, tmp_path: Path) -> None:
    """The three commands take one file, with coupled samples, too."""
    file = written(tmp_path, layer=layer, more="micro_batch_size=6,")
    assert "Exact: " in run("verify", file).stdout
    assert "Next: bigbatch train" in run("plan", file).stdout
    trained = run("train", file, "--clip", "1.0", "--epochs", "2")
    assert trained.exit_code == 0, trained.output
    assert ("micro-batches of 6, in lock-step" in trained.stdout) == ("Norm" in layer)


def test_what_the_library_refuses_of_a_file_is_text(tmp_path: Path) -> None:
    """An error and a hint; 2 for an argument."""
    file = written(tmp_path, more="evaluate=lambda model: 0.5,")
    hint = 'hint: return {"accuracy": accuracy.item()}'
    assert_in_order(run("train", file), "error: evaluate must return numbers by name. Got float.", hint, status=2)
    Path(file).write_text("")
    assert_in_order(run("train", file), "has no function setup() without arguments", status=2)


def test_a_loss_that_runs_away_is_null_in_json(tmp_path: Path) -> None:
    """JSON has no NaN; what the file prints goes to stderr there, and the exit code says that it failed."""
    result = run("train", written(tmp_path, rate="1e30", more="epochs=2,"), "--json")
    data = json.loads(result.stdout, parse_constant=pytest.fail)
    assert data["epochs"][1]["loss"] is None
    assert_in_order(result, "a file that prints", "error: the loss is not finite since epoch", status=1)


def test_a_misspelt_command_is_answered_with_the_right_one() -> None:
    """By typer."""
    assert_in_order(run("trian"), "Did you mean 'train'", status=2)


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, as users have one."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, check=False, capture_output=True, env={**os.environ, **environment}, text=True)


def test_help_does_not_load_torch() -> None:
    """A fresh interpreter answers without it, with the commands that there are."""
    script = "import sys; from bigbatch.cli import app; app(['--help'], standalone_mode=False)"
    result = python("-c", f"{script}; sys.exit('torch' in sys.modules)")
    assert result.returncode == 0
    commands = [line.split()[0] for line in result.stdout.split("Commands:\n")[1].splitlines() if line[2:3].strip()]
    assert commands == ["train", "plan", "lint", "verify"]


def test_warnings_are_text_also_on_an_ascii_terminal(tmp_path: Path) -> None:
    """Without the library's source lines; what the terminal cannot show is replaced."""
    file = written(tmp_path, loop="\nimport warnings; warnings.warn('ö')")
    result = python("-m", "bigbatch", "train", file, PYTHONIOENCODING="ascii")
    assert result.returncode == 0, result.stderr
    assert "warning: ?\n" in result.stderr


def test_without_its_libraries_the_command_line_says_what_to_install(tmp_path: Path) -> None:
    """`pip install bigbatch` brings torch alone."""
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError('no', name='typer')")
    result = python("-m", "bigbatch", "train", PYTHONPATH=f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    said = "error: the command line needs typer, which is not installed\n\nhint: pip install 'bigbatch[cli]'\n"
    assert (result.returncode, result.stderr) == (1, said)
