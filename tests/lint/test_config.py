"""Which rules and files: pyproject.toml, and what the command line says instead."""

from itertools import groupby
from pathlib import Path

import pytest

from bigbatch_lint.output.check import lint
from bigbatch_lint.output.config import Settings, UsageError, files_in, read_settings, settings_of
from bigbatch_lint.rules import REMOVED, RULES

LOOP = "for x in loader:\n    loss = net(x)\n    loss.backward()\n    opt.step()\n    total += loss\n"


def write(path: Path, text: str) -> Path:
    """Write a file with its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def found(*paths: Path, choice: Settings = Settings()) -> dict[str, list[str]]:  # noqa: B008 - it is frozen
    """Return the codes found by file name."""
    findings = [each for found, _ in lint(list(paths), choice) for each in found]
    return {Path(path).name: [f.code for f in some] for path, some in groupby(findings, lambda f: f.path)}


@pytest.mark.parametrize(
    ("select", "extend", "ignore", "expected"),
    [
        (None, (), (), set(RULES)),
        (("ALL",), (), (), set(RULES)),
        (("BB1",), (), (), {"BB101", "BB102", "BB103", "BB104", "BB105", "BB106"}),
        (("BB1",), (), ("BB10",), set()),
        (("BB103",), (), ("BB1",), {"BB103"}),
        (("ALL",), (), ("BB",), set()),
        (("BB3",), ("BB5",), ("BB301",), {"BB302", "BB303", "BB304", "BB501"}),
    ],
)
def test_the_longer_beginning_decides(
    select: tuple[str, ...] | None, extend: tuple[str, ...], ignore: tuple[str, ...], expected: set[str]
) -> None:
    """Selected and not ignored more precisely."""
    assert Settings(select, extend, ignore).codes() == expected


@pytest.mark.parametrize("code", REMOVED)
@pytest.mark.parametrize("place", range(3))
def test_a_removed_rule_is_an_error_that_says_what_to_do(code: str, place: int, tmp_path: Path) -> None:
    """Selected, added or ignored, on the command line or in a file; a comment that silences it stays without effect."""
    key = ("select", "extend_select", "ignore")[place]
    with pytest.raises(UsageError, match=rf"the rule {code} was removed\.\n."):
        Settings(**{key: (code,)}).codes()  # type: ignore[arg-type]
    file = write(tmp_path / "pyproject.toml", f'[tool.bigbatch.lint]\n{key.replace("_", "-")} = ["{code}"]\n')
    with pytest.raises(UsageError, match=rf"pyproject.toml: the rule {code} was removed"):
        read_settings(file)
    file.unlink()
    assert found(write(tmp_path / "a.py", f"{LOOP}# bigbatch: noqa: {code}\n")) == {"a.py": ["BB106", "BB501"]}


def test_the_nearest_file_with_a_table_decides(tmp_path: Path) -> None:
    """One without is passed over; one below another hides it."""
    write(tmp_path / "pyproject.toml", '[tool.bigbatch.lint]\nignore = ["BB5"]\n')
    write(tmp_path / "inner" / "pyproject.toml", "[project]\nname = 'x'\n")
    write(tmp_path / "own" / "pyproject.toml", '[tool.bigbatch.lint]\nselect = ["BB5"]\n')
    files = [write(tmp_path / folder / f"{folder}.py", LOOP) for folder in ("inner", "own")]
    assert found(*files) == {"inner.py": ["BB106"], "own.py": ["BB501"]}
    assert [settings_of(file, {}).folder for file in files] == [tmp_path, tmp_path / "own"]


def test_the_command_line_goes_first(tmp_path: Path) -> None:
    """--select instead of select, --ignore besides ignore."""
    write(tmp_path / "pyproject.toml", '[tool.bigbatch.lint]\nselect = ["BB5"]\nignore = ["BB2"]\n')
    file = write(tmp_path / "a.py", LOOP)
    assert found(file, choice=Settings(select=("BB1",))) == {"a.py": ["BB106"]}
    assert found(file, choice=Settings(extend_select=("BB1",))) == {"a.py": ["BB106", "BB501"]}
    assert found(file, choice=Settings(ignore=("BB501",))) == {}


def test_excluded_files(tmp_path: Path) -> None:
    """By name, pattern or path below the pyproject.toml; a file that is named is read, unless that is forced."""
    write(tmp_path / "pyproject.toml", '[tool.bigbatch.lint]\nexclude = ["legacy", "*_old.py", "a/b"]\n')
    for name in "new.py x_old.py legacy/one.py a/b/two.py a/three.py .venv/four.py node_modules/five.py".split():
        write(tmp_path / name, LOOP)
    assert set(found(tmp_path)) == {"new.py", "three.py"}
    assert set(found(tmp_path, choice=Settings(exclude=("three.py",)))) == {"new.py"}
    named = tmp_path / "legacy" / "one.py"
    assert set(found(named)) == {"one.py"}
    assert list(lint([named, tmp_path / ".venv" / "four.py"], Settings(force_exclude=True))) == []


def test_folders_are_walked_in_order_and_files_come_once(tmp_path: Path) -> None:
    """Scripts and notebooks; nothing else, and nothing twice."""
    for name in ("b.py", "a.ipynb", "c.txt", "sub/d.py"):
        write(tmp_path / name, "")
    found_files = files_in([tmp_path, tmp_path / "b.py"])
    assert [file.relative_to(tmp_path).as_posix() for file in found_files] == ["a.ipynb", "b.py", "sub/d.py"]
    assert list(files_in([tmp_path / "c.txt"])) == [tmp_path / "c.txt"]


@pytest.mark.parametrize("table", ["selct = []", 'select = "BB1"', 'ignore = ["E501"]', "select = ["])
def test_settings_that_cannot_be_used(tmp_path: Path, table: str) -> None:
    """The error names the file."""
    path = write(tmp_path / "pyproject.toml", f"[tool.bigbatch.lint]\n{table}\n")
    with pytest.raises(UsageError) as caught:
        read_settings(path)
    assert str(caught.value).startswith(str(path))
    assert read_settings(write(path, "tool = 1\n")) is None
    assert read_settings(tmp_path / "none.toml") is None
