"""Which rules and files: pyproject.toml, and what the command line says instead."""

from itertools import groupby
from pathlib import Path

import pytest

from bigbatch_lint.output.check import lint
from bigbatch_lint.output.config import Settings, UsageError, read_settings, settings_of
from bigbatch_lint.rules import RULES

LOOP = "for x in loader:\n    loss = net(x)\n    loss.backward()\n    opt.step()\n    total += loss\n"
NOTHING = Settings(())


def write(path: Path, text: str) -> Path:
    """Write a file with its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def found(*paths: Path, choice: Settings = NOTHING) -> dict[str, list[str]]:
    """Return the codes found by file name."""
    findings = [each for found, _ in lint(list(paths), choice) for each in found]
    return {Path(path).name: [f.code for f in some] for path, some in groupby(findings, lambda f: f.path)}


BB1 = {"BB101", "BB102", "BB103", "BB104", "BB105", "BB106"}
CHOSEN = [
    (("ALL",), (), set(RULES)), ((), (), set()), (("BB1",), (), BB1), (("BB1",), ("BB10",), set()),
    (("ALL",), ("BB",), set()), (("BB103",), ("BB1",), {"BB103"}),
    (("BB3", "BB5"), ("BB301",), {"BB302", "BB303", "BB304", "BB501"}),
]  # fmt: skip


@pytest.mark.parametrize(("select", "ignore", "expected"), CHOSEN)
def test_the_longer_beginning_decides(select: tuple[str, ...], ignore: tuple[str, ...], expected: set[str]) -> None:
    """Selected and not ignored more precisely."""
    assert Settings(select, ignore).codes() == expected


def test_the_nearest_file_with_a_table_decides(tmp_path: Path) -> None:
    """One without is passed over; one below another hides it."""
    write(tmp_path / "pyproject.toml", '[tool.bigbatch.lint]\nignore = ["BB5"]\n')
    write(tmp_path / "inner" / "pyproject.toml", "[project]\nname = 'x'\n")
    write(tmp_path / "own" / "pyproject.toml", '[tool.bigbatch.lint]\nselect = ["BB5"]\n')
    files = [write(tmp_path / folder / f"{folder}.py", LOOP) for folder in ("inner", "own")]
    assert found(*files) == {"inner.py": ["BB106"], "own.py": ["BB501"]}
    assert [settings_of(file).folder for file in files] == [tmp_path, tmp_path / "own"]


def test_the_command_line_goes_first(tmp_path: Path) -> None:
    """--select instead of select, --ignore besides ignore."""
    write(tmp_path / "pyproject.toml", '[tool.bigbatch.lint]\nselect = ["BB5"]\nignore = ["BB2"]\n')
    file = write(tmp_path / "a.py", LOOP)
    assert found(file, choice=Settings(select=("BB1",))) == {"a.py": ["BB106"]}
    assert found(file, choice=Settings((), ignore=("BB501",))) == {}


def test_which_files_are_read(tmp_path: Path) -> None:
    """Scripts once and in order, without those excluded by name, pattern or path, also where they are named."""
    write(tmp_path / "pyproject.toml", '[tool.bigbatch.lint]\nexclude = ["legacy", "*_old.py", "a/b"]\n')
    names = "new.py x_old.py legacy/one.py a/b/two.py a/three.py a.txt .venv/four.py node_modules/five.py"
    for name in names.split():
        write(tmp_path / name, LOOP)
    assert list(found(tmp_path, tmp_path / "new.py")) == ["new.py", "three.py"]
    assert list(found(tmp_path, choice=Settings((), exclude=("three.py",)))) == ["new.py"]
    named = tmp_path / "legacy" / "one.py"
    assert list(found(named, tmp_path / "a.txt", tmp_path / ".venv" / "four.py")) == ["a.txt", "four.py"]


def test_a_folder_above_where_the_command_is_typed_excludes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout below a folder called `build` is checked by the hook, too."""
    file = write(tmp_path / "build" / "project" / "a.py", LOOP)
    monkeypatch.chdir(file.parent)
    for path in (Path("a.py"), file, Path()):
        assert found(path) == {"a.py": ["BB106", "BB501"]}


@pytest.mark.parametrize("table", ["selct = []", 'select = "BB1"', 'ignore = ["E501"]', "select = ["])
def test_settings_that_cannot_be_used(tmp_path: Path, table: str) -> None:
    """The error names the file."""
    path = write(tmp_path / "pyproject.toml", f"[tool.bigbatch.lint]\n{table}\n")
    with pytest.raises(UsageError) as caught:
        read_settings(path)
    assert str(caught.value).startswith(str(path))
    assert read_settings(write(path, "tool = 1\n")) is None
    assert read_settings(tmp_path / "none.toml") is None
