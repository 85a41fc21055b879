"""`bigbatch train` as a user meets it."""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from typer.testing import Result

from tests.support.commands import run

FILE = """\
from tests.support.setups import make

def setup():
    return make(micro_batch_size=8, epochs=2, evaluate=lambda model: {"always": 0.25})
"""


@pytest.fixture(scope="module")
def default() -> Result:
    """The command as it stands in the README, with fewer seeds and epochs."""
    return run("train", "--seeds", "2", "--epochs", "3")


def test_the_report_has_its_parts_in_order(default: Result) -> None:
    """Title, table, the three sentences, and what to try next as the last line."""
    assert default.exit_code == 0, default.output
    assert default.stderr == ""
    text = " ".join(default.stdout.split())
    parts = [
        "teaching pages on gradient accumulation in PyTorch: 1,000 samples",
        "samples used",
        "distance from true 64",
    ]
    parts += ["textbook: the loop as the teaching pages print it", "The textbook loop left 40 of 1,000"]
    parts += ["At the same rate of 0.1", "The teaching pages that this is from claim about 70 %"]
    parts += ["Next: bigbatch train --clip 1.0"]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)


@pytest.mark.parametrize("columns", [40, 60, 120])
def test_other_widths_lose_nothing(columns: int) -> None:
    """Blocks where it is narrow, one line per measurement where it is wide."""
    result = run("train", "--seeds", "2", "--epochs", "1", columns=columns)
    lines = result.stdout.splitlines()
    assert max(len(line) for line in lines) <= columns
    assert "…" not in result.stdout
    assert result.stdout.count("updates") >= (1 if columns == 120 else 5)
    assert any(line.count("±") == (5 if columns == 120 else 1) for line in lines)


def test_json_is_all_that_is_on_stdout() -> None:
    """The same numbers, for programs, with the sentences."""
    result = run("train", "--seeds", "1", "--epochs", "2", "--json", "--clip", "1.0")
    data = json.loads(result.stdout)
    assert [arm["updates"] for arm in data["arms"]] == [126, 30, 32, 32, 32]
    assert (data["clip_norm"], data["seeds"], data["epochs"]) == (1.0, 1, 2)
    assert data["arms"][0]["loss"]["std"] is None
    assert data["arms"][2]["distance"] <= 1e-12
    assert len(data["findings"]) == 4
    assert all(set(arm["clipped"]) == {"updates", "largest_norm"} for arm in data["arms"])
    assert data["arms"][3]["clipped"]["updates"]["mean"] == 0


def test_what_to_try_next_goes_on() -> None:
    """After the bonus comes the second example, after that the user's own file."""
    assert "Next: bigbatch train adamw" in run("train", "--clip", "1.0", "--seeds", "1", "--epochs", "1").stdout
    adamw = run("train", "adamw", "--seeds", "1", "--epochs", "1").stdout
    assert "Next: bigbatch train FILE.py" in adamw
    assert "clipped at 1" in adamw
    (row,) = [line for line in adamw.splitlines() if line.startswith("updates clipped")]
    small, _, ours, true, _ = row.split()[2:]
    assert (small, ours) == ("32", true)  # of 32, every one: it starts where the norms are large


def test_a_file_is_trained_and_seeded(tmp_path: Path) -> None:
    """The same seed gives the same numbers, another one others; flags go before the file's own."""
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    result = run("train", str(file))
    assert result.exit_code == 0, result.output
    assert "mine.py: batch 32 = 8 × 4, seed 0" in result.stdout
    assert "always" in result.stdout
    assert f"Next: bigbatch train {file} --seed 1\n" in result.stdout

    def losses(*flags: str) -> list[float]:
        data = json.loads(run("train", str(file), "--json", *flags).stdout)
        return [epoch["loss"] for epoch in data["epochs"]]

    assert losses() == losses("--seed", "0")
    assert losses() != losses("--seed", "1")
    assert len(losses("--epochs", "3")) == 3
    assert losses("--clip", "0.001") != losses()


@pytest.mark.parametrize("ending", ["KeyboardInterrupt", "ValueError"])
def test_epochs_are_shown_as_they_end_whatever_comes_after(tmp_path: Path, ending: str) -> None:
    """A row each, before the next one begins; a metric that comes later has a heading of its own."""
    file = tmp_path / "mine.py"
    file.write_text(
        "from tests.support.setups import make\n"
        "seen = []\n"
        "def evaluate(model):\n"
        "    print('evaluating', len(seen) + 1)\n"
        "    seen.append(1)\n"
        f"    if len(seen) == 4: raise {ending}\n"
        "    return {'always': 0.25, **({'late': 1234.5} if len(seen) == 3 else {})}\n"
        "def setup():\n"
        "    return make(micro_batch_size=8, epochs=5, evaluate=evaluate)\n"
    )
    result = run("train", str(file))
    assert result.exit_code == (130 if ending == "KeyboardInterrupt" else 1)
    first, what, _, heading, one, second, two, third, other, three, last = result.stdout.splitlines()
    assert [first, second, third, last] == [f"evaluating {epoch}" for epoch in range(1, 5)]
    assert what == "mine.py: batch 32 = 8 × 4, seed 0"
    assert heading == "epoch  updates      loss    always  ms/update"
    assert other == "epoch  updates      loss    always      late  ms/update"
    for number, row in enumerate((one, two, three), start=1):
        assert re.fullmatch(rf"    {number} +\d  +\d\.\d{{4}}    0\.2500  (1234\.5000  )? +[0-9.]+", row), row
    assert "Next: " not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["nope"], "no recipe is called 'nope'", "hint: The recipes are textbook, adamw"),
        (["textbok"], "no recipe is called 'textbok'", "hint: bigbatch train textbook\n"),
        (["nope.py"], "There is no file nope.py", "hint: bigbatch train, or bigbatch train adamw, "),
        (["your.py"], "There is no file your.py", "hint: bigbatch train yours.py\n"),
        (["folder"], "folder is a folder, not a file", "hint: bigbatch train"),
        (["--clip", "0"], "--clip 0: ", "hint: --clip 1.0"),
        (["--clip", "x"], "Invalid value for '--clip'", "hint: `bigbatch train --help`"),
        (["--clop", "1"], "No such option: --clop", "hint: `bigbatch train --help`"),
        (["yours.py", "theirs.py"], "Got unexpected extra argument", "hint: `bigbatch train --help`"),
        (["--seed", "3"], "--seed is for files", "hint: bigbatch train textbook --seeds 5"),
        (["yours.py", "--seeds", "3"], "--seeds is for recipes", "hint: bigbatch train yours.py --seed 3"),
    ],
)
def test_misuse_is_short_text_and_exit_code_two(arguments: list[str], message: str, hint: str, directory: Path) -> None:
    """On stderr, with a hint after a blank line, no line too long, and nothing on stdout."""
    (directory / "yours.py").touch()
    (directory / "folder").mkdir()
    result = run("train", *arguments, columns=60)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert " ".join(result.stderr.split()).startswith(f"error: {message}")
    assert f"\n\n{hint}"[:40] in result.stderr
    assert max(len(line) for line in result.stderr.splitlines()) <= 60


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of a user's own, and the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


IN_LOSS_FN = "loss_fn failed in epoch 1, update 1"
MINE = """\
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from bigbatch import Setup


def evaluate(model):
    return {"nothing": 0.0}


def loss_fn(model, batch):
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def setup():
    model = nn.Sequential(nn.Linear(10, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 2)))
    inputs, labels = torch.randn(100, 10), torch.randint(2, (100,))
    return Setup(
        model=model,
        loss_fn=loss_fn,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data=TensorDataset(inputs, labels),
        batch_size=64,
        micro_batch_size=16,
        evaluate=evaluate,
    )
"""

# What stands in the file, what is written instead, what that raises, and how the line below it begins.
MISTAKES = [
    ("import sys", "import syss", "No module named 'syss'", "reading the file failed (mine.py, line 1"),
    ("import sys", "raise SystemExit", "SystemExit", "reading the file failed (mine.py, line 1"),
    ("def setup():", "def setup(:", "SyntaxError: invalid syntax", "reading the file failed (mine.py, line 20"),
    ("data=TensorDataset", "dataset=TensorDataset", "unexpected keyword", "setup() failed (mine.py, line 23"),
    ("Linear(8, 2)", "Linear(9, 2)", "mat1 and mat2 shapes", f"{IN_LOSS_FN} (mine.py, line 17"),
    ("labels)\n\n", "labels[1:])\n\n", "ValueError: Expected", f"{IN_LOSS_FN} (mine.py, line 17"),
    ('"nothing": 0.0', '"nothing": 1 / 0', "ZeroDivisionError", "evaluate failed after epoch 1 (mine.py, line 12"),
]


@pytest.mark.parametrize(("right", "wrong", "raised", "below"), MISTAKES)
def test_a_failure_in_a_users_file_is_shown_from_its_own_line_on(
    right: str, wrong: str, raised: str, below: str, directory: Path
) -> None:
    """Python's traceback without frames of the command line or the library, one line of where, and exit code 1."""
    assert right in MINE
    (directory / "mine.py").write_text(MINE.replace(right, wrong, 1))
    result = run("train", "mine.py")
    assert (result.exit_code, result.stdout) == (1, "")
    traceback, _, end = result.stderr.partition("\n\nerror: ")
    assert raised in traceback
    assert " ".join(end.split()).startswith(below)
    files = re.findall(r'^  File "(.*)", line (\d+)', traceback, re.MULTILINE)
    assert files[0] == (str(directory / "mine.py"), below.rsplit(maxsplit=1)[-1])
    assert not any("/src/bigbatch/" in name or "typer" in name or name.startswith("<") for name, _ in files)
    assert len(files) <= 2
    assert ("hint: It ended the program. Put what is not to run here under" in end) == (raised == "SystemExit")


@pytest.mark.parametrize(
    ("right", "wrong", "what"),
    [
        ("nn.ReLU()", "nn.BatchNorm1d(8)", "batch 64 = 16 × 4, in lock-step"),
        (
            "labels)\n\n",
            "labels) + across.once(across.mean(model(inputs).mean()))\n\n",
            "batch 64 = 16 × 4, in lock-step",
        ),
        ("size=16", "size=24", "batch 64 = up to 22 × 3"),
    ],
)
def test_what_is_proved_and_planned_is_trained(right: str, wrong: str, what: str, directory: Path) -> None:
    """Coupled samples and sizes that do not divide: the three commands take one file, each names the next."""
    text = MINE.replace("import Setup", "import Setup, across").replace(right, wrong, 1)
    (directory / "mine.py").write_text(text)
    proved = run("verify", "mine.py")
    assert proved.exit_code == 0, proved.output
    assert "Exact" in proved.stdout
    assert "Next: bigbatch train mine.py  (with the gradients that were proved)" in proved.stdout
    assert "Next: bigbatch train mine.py" in run("plan", "mine.py").stdout
    trained = run("train", "mine.py", "--clip", "1.0", "--epochs", "2")
    assert trained.exit_code == 0, trained.output
    assert f"mine.py: {what}, clipped at 1, seed 0" in trained.stdout


@pytest.mark.parametrize(
    ("right", "wrong", "message", "hint"),
    [
        ("return F.", "F.", "loss_fn: The loss must be a tensor. Got NoneType.", "return loss"),
        ("labels)\n\n", "labels).sqrt()\n\n", "loss_fn: this loss does not add up", ""),
        ('{"nothing": 0.0}', "0.5", "evaluate must return numbers by name. Got float.", "return {"),
        ("loss_fn=loss_fn", "loss_fn=F.mse_loss", "mine.py, line 23: loss_fn must be a function", "loss_fn=lambda"),
        ("batch_size=64", "batch_size=6", "mine.py, line 23: A micro-batch is", "batch_size=16"),
    ],
)
def test_what_the_library_refuses_of_a_file_speaks_of_the_file(
    right: str, wrong: str, message: str, hint: str, directory: Path
) -> None:
    """Never of a backward or an accumulator, which the user has not written; 2 for an argument, 1 for a loss."""
    (directory / "mine.py").write_text(MINE.replace(right, wrong, 1))
    result = run("train", "mine.py")
    assert result.exit_code == (1 if message.startswith("loss_fn") else 2)
    text = " ".join(result.stderr.split())
    assert text.startswith(f"error: {message}")
    assert f"\n\nhint: {hint}" in result.stderr
    assert "Traceback" not in text
    assert "accumulator" not in text.lower()
    assert max(len(line) for line in result.stderr.splitlines()) <= 80


def test_the_example_in_the_hint_runs(directory: Path) -> None:
    """A file without setup() is answered with one that can be pasted, also where the terminal is narrow."""
    (directory / "mine.py").touch()
    result = run("train", "mine.py", columns=60)
    assert result.exit_code == 2
    (directory / "mine.py").write_text(textwrap.dedent(result.stderr.split("as in this file:\n")[1]))
    again = run("train", "mine.py")
    assert again.exit_code == 0, again.stderr
    assert "mine.py: batch 64 = 16 × 4, seed 0" in again.stdout


def test_a_file_may_print_and_its_json_is_still_json(directory: Path) -> None:
    """What it prints goes to stderr there; a loss that has run away is null, since JSON has no NaN."""
    source = MINE.replace("inputs, labels = batch", "inputs, labels = batch; print('hello')").replace(
        "lr=0.1", "lr=1e38"
    )
    (directory / "mine.py").write_text(source)
    result = run("train", "mine.py", "--json", "--epochs", "2", "--clip", "1e30")
    data = json.loads(result.stdout, parse_constant=pytest.fail)
    assert result.exit_code == 1
    assert data["epochs"][1]["loss"] is None
    assert data["epochs"][0]["clipped"] is not None
    assert "hello" in result.stderr
    shown = run("train", "mine.py", "--epochs", "2")
    assert "hello" in shown.stdout
    assert shown.exit_code == 1
    assert "error: the loss is not finite since epoch 1\n\nhint: Try a smaller learning rate" in shown.stderr


def test_what_was_clipped_and_skipped_in_a_file_is_said(directory: Path) -> None:
    """In sentences below the table, where it happened."""
    data = "data=[(inputs[n] / (n > 0), labels[n]) for n in range(100)], skip_nonfinite=True, clip_norm=1e-4"
    (directory / "mine.py").write_text(MINE.replace("data=TensorDataset(inputs, labels)", data))
    result = run("train", "mine.py", "--epochs", "2")
    assert result.exit_code == 0, result.stderr
    assert "\n2 of 2 updates had a gradient to clip, of a norm above 0.0001.\n" in result.stdout
    assert "\n2 batches made no update: nothing was counted, or a gradient was not finite.\n" in result.stdout


def test_warnings_are_text_in_the_same_style(directory: Path) -> None:
    """The library's without its source lines, a user's own with their place; in a process of its own, as users have."""
    source = MINE.replace("import sys", "import warnings; warnings.warn('oh')").replace(
        "    inputs, labels = torch.randn",
        "    model[0].weight.register_hook(lambda g: g)\n    inputs, labels = torch.randn",
    )
    (directory / "mine.py").write_text(source)
    command = [sys.executable, "-c", "from bigbatch.cli import app; app()", "train", "mine.py"]
    result = subprocess.run(command, check=True, capture_output=True, env={**os.environ, "COLUMNS": "80"}, text=True)
    assert result.stderr.startswith("warning: mine.py, line 1: oh\nwarning: parameter '0.weight' has a gradient hook")
    assert max(len(line) for line in result.stderr.splitlines()) <= 80


@pytest.mark.parametrize("arguments", [["-h"], ["train", "--help"], [], ["trian"]])
def test_help_fits_the_terminal(arguments: list[str]) -> None:
    """Also a narrow one; nothing at all is a request for help, and a misspelt command gets a hint."""
    command = [sys.executable, "-c", "from bigbatch.cli import app; app(prog_name='bigbatch')", *arguments]
    environment = {**os.environ, "COLUMNS": "60"}  # in a process of its own: typer's runner is 80 wide
    result = subprocess.run(command, check=False, capture_output=True, env=environment, text=True)
    assert max(len(line) for line in (result.stdout + result.stderr).splitlines()) <= 60
    if arguments == ["trian"]:
        assert result.stderr.startswith("error: No such command 'trian'")
        assert "\n\nhint: `bigbatch --help` shows" in result.stderr
    else:
        assert "Usage: bigbatch" in result.stdout + result.stderr


def test_help_does_not_load_torch() -> None:
    """A fresh interpreter answers without it, with the commands that there are."""
    script = "import sys; from bigbatch.cli import app; app(['--help'], standalone_mode=False)"
    script += "; sys.exit('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert result.returncode == 0
    commands = [line.split()[0] for line in result.stdout.split("Commands:\n")[1].splitlines() if line[2:3].strip()]
    assert commands == ["train", "plan", "lint", "verify"]


def test_an_ascii_terminal_is_no_reason_to_fail() -> None:
    """What it cannot show is replaced."""
    command = [sys.executable, "-c", "from bigbatch.cli import app; app()", "train", "--seeds", "1", "--epochs", "1"]
    result = subprocess.run(command, check=False, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert result.returncode == 0, result.stderr
    assert b"distance from true 64" in result.stdout


@pytest.mark.parametrize("command", ["train", "plan", "verify", "lint"])
def test_control_characters_of_a_file_name_are_escaped(command: str, directory: Path) -> None:
    """A name may not move the cursor, set the title or forge a line: neither in results nor in errors."""
    name = "\x1b]0;x\x07\x1b[2J\u202emine.py"
    (directory / name).write_text(MINE)
    for arguments in ([command, name], [command, f"no{name}"], [command, name, "--html", f"{name}/x"]):
        result = run(*arguments)
        assert not set("\x1b\x07\u202e") & set(result.output)
    assert "\\x1b" in run(command, f"no{name}").output


def test_without_its_libraries_the_command_line_says_what_to_install(directory: Path) -> None:
    """`pip install bigbatch` brings torch alone."""
    (directory / "rich.py").write_text("raise ModuleNotFoundError('no', name='rich')")
    environment = {**os.environ, "PYTHONPATH": f"{directory}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "bigbatch", "train"]
    result = subprocess.run(command, check=False, capture_output=True, env=environment, text=True)
    assert result.returncode == 1
    assert result.stderr == (
        "error: the command line needs rich, which is not installed\n\nhint: pip install 'bigbatch[cli]'\n"
    )
