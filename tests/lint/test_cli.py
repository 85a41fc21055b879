"""`bigbatch lint` as a user meets it."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from bigbatch.cli import app
from bigbatch_lint.output import check
from bigbatch_lint.rules import RULES, find

LOOP = "for x, y in loader:\n    loss = model(x, y)\n    loss.backward()\n    optimizer.step()\n    total += loss\n"
NOTEBOOK = json.dumps({"cells": [{"cell_type": "code", "source": LOOP}]})


def run(*arguments: str, text: str | None = None, columns: int = 80) -> Result:
    """One command."""
    return CliRunner().invoke(app, ["lint", *arguments], input=text, env={"COLUMNS": str(columns)})


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A script with two mistakes, in the folder where the command is typed."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(LOOP)
    return "train.py"


def test_findings_as_text(script: str) -> None:
    """Where, code, severity, name; the line, which is cut if it is long; what is wrong; what to do."""
    result = run(script)
    assert result.exit_code == 1
    assert result.stdout == (
        "train.py:4:5: BB106 error never-zeroed\n"
        "    optimizer.step()\n"
        "  gradients are never cleared: every step also takes those of all steps before\n"
        "  fix: call optimizer.zero_grad() after each step\n"
        "\n"
        "train.py:5:5: BB501 error running-loss-keeps-graph\n"
        "    total += loss\n"
        "  total keeps the graph of every loss that is added to it\n"
        "  fix: add loss.detach(), and read it once per window or epoch\n"
        "\n"
    )
    assert result.stderr == (
        "Found 2 errors in 1 file read.\n\nhint: `bigbatch lint --explain BB106` says why and how to fix it.\n"
    )
    assert run().stdout == result.stdout  # the folder is the one here by default
    assert max(len(line) for line in run(script, columns=60).stdout.splitlines()) <= 60
    Path(script).write_text(LOOP.replace("step()", "step(); x = (" + "1, " * 20_000 + ")"))
    assert max(map(len, run(script).stdout.splitlines())) < 200


def test_exit_status_and_selection(script: str) -> None:
    """Nothing found is 0, and a word on stderr; found is 1, or 0 if asked for. Codes: with commas, again, small."""
    result = run(script, "--ignore", "BB1,BB5")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "All checks passed: 1 file read.\n")
    result = run(script, "--exit-zero")
    assert (result.exit_code, "BB106" in result.stdout) == (0, True)
    assert "BB501" not in run(script, "--select", "BB106,BB103").stdout
    assert run(script, "--select", "bb1", "--select", "BB5").stdout.count("BB") == 2


def test_json(script: str) -> None:
    """One list, and nothing else on stdout."""
    found = json.loads(run(script, "--json").stdout)[0]
    place = {"path": "train.py", "cell": None, "line": 4, "column": 5, "end_line": 4}
    message = "gradients are never cleared: every step also takes those of all steps before"
    said = {"severity": "error", "message": message, "remedy": "call optimizer.zero_grad() after each step"}
    assert found == {**place, "code": "BB106", "slug": "never-zeroed", **said}
    assert run(script, "--json", "--select", "BB601").stdout == "[]\n"


def test_standard_input() -> None:
    """Under the name that it is given."""
    assert run("-", "--stdin-filename", "mine.py", text=LOOP).stdout.startswith("mine.py:4:5: BB106")
    assert run("-", "--stdin-filename", "a.ipynb", text=NOTEBOOK).stdout.startswith("a.ipynb:cell 1:4:5: BB106")


@pytest.mark.parametrize("code", [*RULES, "bb103"])
def test_explain(code: str) -> None:
    """A rule's page."""
    result = run("--explain", code)
    assert result.exit_code == 0
    assert result.stdout.startswith(f"# {code.upper()} {RULES[code.upper()].slug}\n")


@pytest.mark.parametrize(
    ("arguments", "settings", "text"),
    [
        ("gone.py", "", "error: there is no file or folder gone.py\n"),
        ("--select E501 .", "", "error: no rule's code begins with 'E501'\nhint: The rules are BB101, "),
        ("--explain BB999", "", "error: there is no rule BB999\nhint: "),
        ("train.py --diff", "", "error: unrecognized arguments: --diff\n"),
        ("train.py", "line-length = 3", "hint: It knows exclude, ignore, select, each a list of strings.\n"),
    ],
)
def test_what_cannot_be_done(arguments: str, settings: str, text: str) -> None:
    """It ends with 2, and says why."""
    Path("pyproject.toml").write_text(f"[tool.bigbatch.lint]\n{settings}\n")
    result = run(*arguments.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert text in result.stderr


@pytest.mark.parametrize("more", [[], ["--json"], ["--exit-zero"]])
def test_a_file_that_cannot_be_read_is_an_error_and_no_finding(script: str, more: list[str]) -> None:
    """Whatever the format: stderr says where and why, and the status is 2; a file's name cannot color the terminal."""
    old = "\x1b[31mold.py"
    Path(old).write_text("x = 1\nprint 'hello'\n")
    both, alone = run(old, script, *more), run(old, *more)
    assert both.exit_code == alone.exit_code == 2
    assert "\\x1b[31mold.py:2:1: cannot be checked: Missing parentheses" in alone.stderr
    assert both.stdout == run(script, *more).stdout


def test_torch_is_not_loaded(script: str) -> None:
    """Neither by the command nor by anything it imports."""
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom bigbatch.cli import app\n"
        f"for more in ([], ['--json']): CliRunner().invoke(app, ['lint', {script!r}, *more])\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('torch', 'numpy')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_mistake_of_the_linter_hides_nothing(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an error on stderr with a status of its own, and the other files are checked."""

    def breaks(tree: ast.Module) -> Iterator[tuple[str, ast.AST, str]]:
        if isinstance(tree.body[0], ast.Assign):
            raise ZeroDivisionError("oops")
        return find(tree)

    Path("a.py").write_text("x = loss.backward(), optimizer.step()\n")
    monkeypatch.setattr(check, "find", breaks)
    result = run("a.py", script)
    assert (result.exit_code, result.stdout.count(": BB")) == (2, 2)
    text = "error: a.py:1:1: cannot be checked: bigbatch lint failed on it, please report: ZeroDivisionError"
    assert text in result.stderr
