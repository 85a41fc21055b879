"""Comments silence findings, as in ruff."""

import json

import pytest

from benchmarks.lint import codes
from bigbatch_lint.output.check import check
from bigbatch_lint.reading.source import read_source

LOOP = "for x in loader:\n    loss = model(x)\n    loss.backward()\n    opt.step(){}\n    total += loss\n"
NAMED = "# noqa: BB106|# noqa:BB106|# noqa: E501, BB106|# noqa: BB1|# noqa: BB106 - on purpose".split("|")


@pytest.mark.parametrize("comment", ["# noqa", "#noqa", "# NOQA", *NAMED])
def test_a_line(comment: str) -> None:
    """All rules, or those that are named, by codes or beginnings."""
    assert codes(LOOP.format(f"  {comment}")) == ["BB501"]


@pytest.mark.parametrize("behind", ["", "  # noqa: E501", "  # noqa: BB501", "  # nota", '; "# noqa"'])
def test_comments_about_something_else(behind: str) -> None:
    """Other codes, other words, and strings that look like a comment."""
    assert codes(LOOP.format(behind)) == ["BB106", "BB501"]


@pytest.mark.parametrize(
    ("comment", "left"),
    [
        ("# bigbatch: noqa", []),
        ("# bigbatch:noqa", []),
        ("# bigbatch: noqa: BB106", ["BB501"]),
        ("# bigbatch: noqa: BB1, BB5", []),
        ("# ruff: noqa", ["BB106", "BB501"]),
    ],
)
def test_a_file(comment: str, left: list[str]) -> None:
    """Anywhere in the file."""
    loop = LOOP.format("")
    assert codes(f"{comment}\n{loop}") == codes(f"{loop}\n{comment}\n") == left


def test_a_statement_over_several_lines() -> None:
    """At its first line, or where its head ends; a comment in its body is about something else."""
    loop = (
        "for i, x in enumerate(loader):\n    (net(x) / 4).backward()\n    if ({}\n        (i + 1) % 4 == 0\n    ):{}\n"
        "        {}\n        opt.step()\n        opt.zero_grad()\n"
    )
    noqa = "# noqa: BB103"
    assert codes(loop.format("", "", "")) == codes(loop.format("", "", noqa)) == ["BB103"]
    assert codes(loop.format(noqa, "", "")) == codes(loop.format("", noqa, "")) == []


@pytest.mark.parametrize(
    ("cells", "left"),
    [
        (["x = 1", LOOP.format("")], ["BB106", "BB501"]),
        (["x = 1", LOOP.format("  # noqa")], ["BB501"]),
        (["# bigbatch: noqa", LOOP.format("")], []),
    ],
)
def test_in_a_notebook(cells: list[str], left: list[str]) -> None:
    """By cell and line; for the file, in any cell."""
    data = {"cells": [{"cell_type": "code", "source": cell} for cell in cells]}
    assert [f.code for f in check(read_source("train.ipynb", json.dumps(data).encode()))] == left
