"""Nothing that a file may hold stops the linter: junk, halves of files, deep nesting, notebooks of any kind."""

import cProfile
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.lint import read_cases
from bigbatch_lint.output.check import check, check_source, lint
from bigbatch_lint.output.config import Settings
from bigbatch_lint.reading.source import read_source
from bigbatch_lint.rules import RULES

LOOP = (
    "for i, (x, y) in enumerate(loader):\n    (criterion(model(x), y) / 4).backward()\n"
    "    if (i + 1) % 4 == 0:\n        optimizer.step()\n        optimizer.zero_grad()\n"
)


SCRIPTS = [case.script for case in read_cases()]


def survives(data: bytes, name: str = "train.py") -> list[str]:
    """Check something; return the codes found."""
    findings, problems = check_source(read_source(name, data), frozenset(RULES))
    assert all(finding.line >= 1 and finding.column >= 1 for finding in findings)
    assert not [problem for problem in problems if "please report" in problem]
    return [finding.code for finding in findings]


@given(
    st.binary(max_size=300)
    | st.text(max_size=300).map(lambda text: f"# backward step(\n{text}".encode("utf8", "replace"))
)
def test_junk(data: bytes) -> None:
    """Any bytes and any text, as a script and as a notebook."""
    survives(b"# backward step(\n" + data)
    survives(data, "train.ipynb")


@settings(max_examples=80)
@given(st.data())
def test_parts_of_scripts(data: st.DataObject) -> None:
    """A script that ends in the middle, one that lacks a line, and lines of two scripts in any order."""
    first, second = (data.draw(st.sampled_from(SCRIPTS)) for _ in range(2))
    cut = data.draw(st.integers(0, len(first)))
    survives(first[:cut].encode())
    survives(first[:cut].encode(), "train.ipynb")
    lines = [*first.splitlines(), *second.splitlines()]
    gone = data.draw(st.integers(0, len(lines)))
    survives("\n".join(lines[:gone] + lines[gone + 1 :]).encode())
    survives("\n".join(data.draw(st.lists(st.sampled_from(lines), max_size=40))).encode())


DEEP = {
    "parentheses": "x = " + "(" * 5000 + ")" * 5000,
    "lists": "x = " + "[" * 90 + "]" * 90,
    "minus": "x = " + "-" * 50_000 + "1",
    "not": "x = " + "not " * 50_000 + "1",
    "attributes": "x = a" + ".b" * 20_000,
    "calls": "x = a" + "()" * 5000,
    "sums": "x = " + " + ".join(["loss"] * 20_000),
    "blocks": "\n".join("  " * n + "if loss.backward():" for n in range(90)) + "\n" + "  " * 90 + "optimizer.step()",
    "elifs": "if a:\n    loss.backward()\n" + "elif b:\n    optimizer.step()\n" * 3000,
    "functions": "\n".join(f"def f{n}():\n    f{n + 1}()\n    f{n + 1}()\n    loss.backward()" for n in range(60)),
    "itself": "def f():\n    f()\n    loss.backward()\n    optimizer.step()\nf()",
    "strings": "x = " + "f'{" * 100 + "}'" * 100,
}


@pytest.mark.parametrize("text", DEEP.values(), ids=DEEP)
def test_deep_nesting(text: str) -> None:
    """It is read, or said to be too deep; it takes no ages and ends no process."""
    survives(f"# backward step(\n{text}\n".encode())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=10,
)
CELLS = st.fixed_dictionaries(
    {"cell_type": st.sampled_from(["code", "markdown", "raw"])},
    optional={"source": st.text(max_size=40) | st.lists(st.text(max_size=20), max_size=3) | JSON},
)


@given(JSON | st.fixed_dictionaries({"cells": st.lists(CELLS, max_size=4)}))
def test_notebooks_of_any_kind(notebook: Any) -> None:
    """JSON that is no notebook, cells without a source, sources that are no text."""
    survives(json.dumps(notebook).encode(), "train.ipynb")


UNREADABLE = {
    b"\x89PNG\r\n\x1a\n\0\0": "invalid or missing encoding declaration",
    b"x = 1\0": "null bytes",
    b"# -*- coding: nonsense -*-\n": "unknown encoding: nonsense",
    b"print 'hello'\n": "Missing parentheses",
    b"loss.backward(\n": "was never closed",
}


@pytest.mark.parametrize(("data", "why"), UNREADABLE.items())
def test_what_cannot_be_read_is_said(data: bytes, why: str) -> None:
    """With the reason; nothing else is found in it."""
    source = read_source("train.py", data)
    assert re.match(f"train.py:1:.*{why}", "".join(source.problems))
    assert not check(source)


def test_other_encodings_are_read() -> None:
    """Latin-1 that says so, a byte order mark, Windows line ends."""
    loop = "for x in loader:\n    net(x).backward()\n    opt.step()  # é\n"
    windows = loop.replace("\n", "\r\n").encode()
    for data in (b"# coding: latin-1\n" + loop.encode("latin-1"), b"\xef\xbb\xbf" + loop.encode(), windows):
        assert survives(data) == ["BB106"]


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    """A missing file, a link that leads to itself and a pipe that nobody writes to; the others are read."""
    (tmp_path / "good.py").write_text("x = 1\n")
    (tmp_path / "loop.py").symlink_to("loop.py")
    os.mkfifo(tmp_path / "pipe.py")
    ((_, (missing,)), (_, good), (_, (link,)), (_, (pipe,))) = lint([tmp_path / "gone.py", tmp_path], Settings(()))
    assert "gone.py:1:1: cannot be checked: No such file" in missing
    assert "symbolic links" in link
    assert "use - for standard input" in pipe
    assert not good


def test_four_times_the_loops_take_four_times_the_work() -> None:
    """Counted in calls of functions, which do not depend on the machine."""
    calls = []
    for number in (40, 160):
        source = read_source("train.py", (LOOP * number).encode())
        with cProfile.Profile() as profile:
            check(source)
        calls.append(sum(entry.callcount for entry in profile.getstats()))
    assert calls[1] < 5 * calls[0]
