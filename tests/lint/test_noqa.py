"""Comments silence findings, as in ruff."""

import json

import pytest

from benchmarks.lint_accuracy import codes
from bigbatch_lint.output.check import check
from bigbatch_lint.reading.source import read_source

LOOP = """\
for x in loader:{head}
    loss = model(x)
    loss.backward()
    opt.step(){step}
    total += loss{total}
"""


def found(head: str = "", step: str = "", total: str = "", above: str = "") -> list[str]:
    """Return what is found in a loop with comments."""
    return codes(above + LOOP.format(head=head, step=step, total=total))


def test_without_comments_there_are_two() -> None:
    """What the others silence."""
    assert found() == ["BB106", "BB501"]


NAMED = "# noqa: BB106|# noqa:BB106|# noqa: E501, BB106|# noqa: BB1|# noqa: BB106 - on purpose".split("|")


@pytest.mark.parametrize("comment", ["# noqa", "#noqa", "# NOQA", *NAMED])
def test_a_line(comment: str) -> None:
    """All rules, or those that are named, by codes or beginnings."""
    assert found(step=f"  {comment}") == ["BB501"]


@pytest.mark.parametrize("behind", ["  # noqa: E501", "  # noqa: BB501", "  # nota", '; "# noqa"'])
def test_comments_about_something_else(behind: str) -> None:
    """Other codes, other words, and strings that look like a comment."""
    assert found(step=behind) == ["BB106", "BB501"]


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
    assert found(above=f"{comment}\n") == left
    assert codes(LOOP.format(head="", step="", total="") + f"\n{comment}\n") == left


def test_a_statement_over_several_lines() -> None:
    """At its first line, or where its head ends; a comment in its body is about something else."""
    loop = """
    for i, x in enumerate(loader):
        (net(x) / 4).backward()
        if ({}
            (i + 1) % 4 == 0
        ):{}
            {}
            opt.step()
            opt.zero_grad()
    """
    noqa = "# noqa: BB103"
    assert codes(loop.format("", "", "")) == ["BB103"]
    assert codes(loop.format(noqa, "", "")) == []
    assert codes(loop.format("", noqa, "")) == []
    assert codes(loop.format("", "", noqa)) == ["BB103"]


def test_in_a_notebook() -> None:
    """By cell and line; for the file, in any cell."""

    def notebook(*cells: str) -> list[str]:
        data = {"cells": [{"cell_type": "code", "source": cell} for cell in cells]}
        return [f.code for f in check(read_source("train.ipynb", json.dumps(data).encode()))]

    loop = LOOP.format(head="", step="{}", total="")
    assert notebook("x = 1", loop.format("")) == ["BB106", "BB501"]
    assert notebook("x = 1", loop.format("  # noqa")) == ["BB501"]
    assert notebook("# bigbatch: noqa", loop.format("")) == []
