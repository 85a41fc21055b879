"""Comments silence findings, as in ruff."""

import json

import pytest

from benchmarks.lint import codes
from bigbatch_lint.output.check import check
from bigbatch_lint.reading.source import read_source

LOOP = "for x in loader:\n    loss = model(x)\n    loss.backward()\n    opt.step(){}\n    total += loss\n"
NAMED = "# noqa: BB106|# noqa:BB106|# noqa: E501, BB106|# noqa: BB1|# noqa: BB106 - on purpose".split("|")
OTHER = ["", "  # noqa: E501", "  # noqa: BB501", "  # nota", '; "# noqa"']
BOTH = ["BB106", "BB501"]
WHOLE = {"bigbatch: noqa: BB106": ["BB501"], "bigbatch: noqa: BB1, BB5": [], "ruff: noqa": BOTH}


@pytest.mark.parametrize("comment", ["# noqa", "#noqa", "# NOQA", *NAMED, *OTHER])
def test_a_line(comment: str) -> None:
    """All rules, or those that are named, by codes or beginnings; not other codes, words or strings."""
    assert codes(LOOP.format(f"  {comment}" if comment[:1] == "#" else comment)) == BOTH[comment not in OTHER :]


@pytest.mark.parametrize(("comment", "left"), [("bigbatch: noqa", []), ("bigbatch:noqa", []), *WHOLE.items()])
def test_a_file(comment: str, left: list[str]) -> None:
    """Anywhere in the file."""
    loop = LOOP.format("")
    assert codes(f"# {comment}\n{loop}") == codes(f"{loop}\n# {comment}\n") == left


def test_a_statement_over_several_lines() -> None:
    """At its first line, or where its head ends; a comment in its body is about something else."""
    loop = (
        "for i, x in enumerate(loader):\n    (net(x) / 4).backward()\n    if ({}\n        (i + 1) % 4 == 0\n    ):{}\n"
        "        {}\n        opt.step()\n        opt.zero_grad()\n"
    )
    noqa = "# noqa: BB103"
    assert codes(loop.format("", "", "")) == codes(loop.format("", "", noqa)) == ["BB103"]
    assert codes(loop.format(noqa, "", "")) == codes(loop.format("", noqa, "")) == []


@pytest.mark.parametrize(("first", "comment", "left"), [("x", "", BOTH), ("x", "  # noqa", ["BB501"])])
def test_in_a_notebook(first: str, comment: str, left: list[str]) -> None:
    """By cell and line; for the file, in any cell."""
    for cell, found in ((first, left), ("# bigbatch: noqa", [])):
        data = {"cells": [{"cell_type": "code", "source": text} for text in (cell, LOOP.format(comment))]}
        assert [f.code for f in check(read_source("train.ipynb", json.dumps(data).encode()))] == found
