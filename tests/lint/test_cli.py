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

LOOP = """\
for x, y in loader:
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    total += loss
"""


def run(*arguments: str, text: str | bytes | None = None, columns: int = 80) -> Result:
    """One command."""
    return CliRunner().invoke(app, ["lint", *arguments], input=text, env={"COLUMNS": str(columns), "NO_COLOR": "1"})


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A script with two mistakes, in the folder where the command is typed."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(LOOP)
    return "train.py"


def test_findings_as_text(script: str) -> None:
    """Where, code, severity, name; the line; what is wrong; what to do. The rest is on stderr."""
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


def test_nothing_found(script: str) -> None:
    """A word on stderr, nothing on stdout, and 0."""
    result = run(script, "--ignore", "BB1,BB5")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "All checks passed: 1 file read.\n")


def test_exit_zero(script: str) -> None:
    """Found, and still 0."""
    result = run(script, "--exit-zero")
    assert result.exit_code == 0
    assert "BB106" in result.stdout


def test_json(script: str) -> None:
    """One list, in either spelling, and nothing else on stdout."""
    first, second = (json.loads(run(script, *flag).stdout) for flag in (["--json"], ["--format", "json"]))
    assert first == second
    assert first[0] == {
        "path": "train.py",
        "cell": None,
        "line": 4,
        "column": 5,
        "code": "BB106",
        "slug": "never-zeroed",
        "severity": "error",
        "message": "gradients are never cleared: every step also takes those of all steps before",
        "remedy": "call optimizer.zero_grad() after each step",
        "end_line": 4,
    }
    assert run(script, "--json", "--select", "BB601").stdout == "[]\n"


def test_github(script: str) -> None:
    """One annotation per finding, with what GitHub would take for its own escaped."""
    lines = run(script, "--format", "github").stdout.splitlines()
    assert lines[0] == (
        "::error file=train.py,line=4,endLine=4,col=5,title=BB106 never-zeroed::gradients are never cleared: every "
        "step also takes those of all steps before; fix: call optimizer.zero_grad() after each step"
    )
    assert len(lines) == 2


def test_github_on_a_notebook(script: str) -> None:
    """A cell's line is none of the file's: it is said in words."""
    source = Path(script).read_text()
    Path("a.ipynb").write_text(json.dumps({"cells": [{"cell_type": "code", "source": source}]}))
    lines = run("a.ipynb", "--format", "github").stdout.splitlines()
    assert lines[0].startswith("::error file=a.ipynb,title=BB106 never-zeroed (cell 1%2C line 4)::gradients are never")


def test_a_long_line_is_cut(script: str) -> None:
    """A file without line ends does not fill the terminal."""
    Path(script).write_text(LOOP.replace("step()", "step(); x = (" + "1, " * 20_000 + ")"))
    shown = run(script).stdout.splitlines()
    assert shown[1].startswith("    optimizer.step(); x = (1, 1, ")
    assert shown[1].endswith("…")
    assert max(map(len, shown)) < 200


def test_json_said_twice_is_json(script: str) -> None:
    """The two agree."""
    assert json.loads(run(script, "--json", "--format", "json").stdout)


def test_select_takes_lists_and_several_options(script: str) -> None:
    """With commas, again, in small letters."""
    assert "BB501" not in run(script, "--select", "BB106,BB103").stdout
    assert run(script, "--select", "bb1", "--select", "BB5").stdout.count("BB") == 2


def test_standard_input() -> None:
    """Under the name that it is given."""
    result = run("-", "--stdin-filename", "mine.py", text=LOOP)
    assert result.exit_code == 1
    assert result.stdout.startswith("mine.py:4:5: BB106")
    notebook = json.dumps({"cells": [{"cell_type": "code", "source": LOOP}]})
    assert run("-", "--stdin-filename", "a.ipynb", text=notebook).stdout.startswith("a.ipynb:cell 1:4:5: BB106")


def test_a_folder_is_the_one_here_by_default(script: str) -> None:
    """Without a path, everything below."""
    assert run().stdout.startswith(f"{script}:4:5")


@pytest.mark.parametrize("code", ["BB103", "bb103"])
def test_explain(code: str) -> None:
    """A rule's page."""
    result = run("--explain", code)
    assert result.exit_code == 0
    assert result.stdout.startswith("# BB103 leftover-dropped\n\n*warning*\n")


def test_explain_every_rule() -> None:
    """All have one."""
    assert all(run("--explain", code).exit_code == 0 for code in RULES)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["gone.py"], "error: there is no file or folder gone.py"),
        (["--select", "E501", "."], "error: no rule's code begins with 'E501'."),
        (["--explain", "BB999"], "error: there is no rule BB999"),
        (["--format", "xml"], "error: argument --format: invalid choice"),
        (["--json", "--format", "text"], "error: --json and --format text ask for different things"),
        (["--format", "github", "--json"], "hint: Leave one of them out."),
    ],
)
def test_what_cannot_be_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], text: str) -> None:
    """It ends with 2, and says why."""
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2
    assert text in result.stderr
    assert result.stdout == ""


def test_settings_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named with their file, and a hint."""
    monkeypatch.chdir(tmp_path)
    Path("a.py").write_text("x = 1\n")
    Path("pyproject.toml").write_text("[tool.bigbatch.lint]\nline-length = 3\n")
    result = run("a.py")
    assert result.exit_code == 2
    assert "knows no 'line-length'" in result.stderr
    assert "hint: It knows exclude, extend-select, ignore, select." in result.stderr


def test_long_messages_fit_the_terminal(script: str) -> None:
    """Words stay whole."""
    assert max(len(line) for line in run(script, columns=60).stdout.splitlines()) <= 60


def test_the_removed_diff_says_what_shows_the_fix(script: str) -> None:
    """Patches are gone; a rule's page has the loop as it should be."""
    result = run(script, "--diff")
    assert result.exit_code == 2
    assert not result.stdout
    assert "--diff was removed" in result.stderr
    assert "bigbatch lint --explain BB103" in result.stderr
    assert "--diff" not in run("--help").stdout


@pytest.mark.parametrize("more", [[], ["--json"], ["--format", "github"], ["--exit-zero"]])
def test_a_file_that_cannot_be_read_is_an_error_and_no_finding(script: str, more: list[str]) -> None:
    """Whatever the format: stderr says where and why, and the status is 2."""
    Path("old.py").write_text("x = 1\nprint 'hello'\n")
    both, alone = run("old.py", script, *more), run("old.py", *more)
    assert both.exit_code == alone.exit_code == 2
    assert "old.py:2:1: cannot be checked: Missing parentheses" in alone.stderr
    assert "old.py" not in both.stdout
    assert both.stdout == run(script, *more).stdout


@pytest.mark.parametrize("code", ["BB305", "BB502", "BB900"])
def test_a_removed_rule_has_no_page(code: str) -> None:
    """The error says what is there instead."""
    result = run("--explain", code)
    assert result.exit_code == 2
    assert f"the rule {code} was removed\n\nhint: " in result.stderr


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
    assert result.exit_code == 2
    assert len([line for line in result.stdout.splitlines() if ": BB" in line]) == 2
    assert "a.py" not in result.stdout
    assert (
        "error: a.py:1:1: cannot be checked: bigbatch lint failed on it, please report: ZeroDivisionError"
        in result.stderr
    )
