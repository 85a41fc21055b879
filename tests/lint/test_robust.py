"""Nothing that a file may hold stops the linter: junk, halves of files, deep nesting, notebooks of any kind."""

import cProfile
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.lint_accuracy import read_cases
from bigbatch_lint.output.check import check, check_source, lint
from bigbatch_lint.output.config import Settings
from bigbatch_lint.reading.source import read_source
from bigbatch_lint.rules import RULES

EVERYTHING = frozenset(RULES)


@cache
def scripts() -> list[bytes]:
    """Return the cases."""
    return [case.script.encode() for case in read_cases()]


def survives(data: bytes, name: str = "train.py") -> list[str]:
    """Check something; return the codes found."""
    findings, problems = check_source(read_source(name, data), EVERYTHING)
    assert all(finding.line >= 1 and finding.column >= 1 for finding in findings)
    assert not [problem for problem in problems if "please report" in problem]
    return [finding.code for finding in findings]


@given(st.binary(max_size=300))
def test_bytes(data: bytes) -> None:
    """Any bytes, as a script and as a notebook."""
    survives(data)
    survives(data, "train.ipynb")


@given(st.text(max_size=300))
def test_text(text: str) -> None:
    """Any text; backward is in it, so that it is read if it can be parsed."""
    survives(f"# backward step(\n{text}".encode(errors="replace"))


@settings(max_examples=80)
@given(st.data())
def test_halves_of_scripts(data: st.DataObject) -> None:
    """A script that ends in the middle, as a download that broke off."""
    script = data.draw(st.sampled_from(scripts()))
    survives(script[: data.draw(st.integers(0, len(script)))])
    survives(script[: data.draw(st.integers(0, len(script)))], "train.ipynb")


@settings(max_examples=80)
@given(st.data())
def test_lines_of_scripts_mixed(data: st.DataObject) -> None:
    """Lines left out, doubled, indented otherwise, and taken from another script: what parses is read."""
    lines = [line for each in range(2) for line in _lines(data, each)]
    kept = data.draw(st.lists(st.sampled_from(lines), min_size=1, max_size=40)) if lines else []
    survives("\n".join(kept).encode())
    half = data.draw(st.integers(0, len(lines)))
    survives("\n".join(lines[:half] + lines[half + 1 :]).encode())


def _lines(data: st.DataObject, _: int) -> list[str]:
    return data.draw(st.sampled_from(scripts())).decode(errors="replace").splitlines()


NAMES = st.sampled_from(
    "i n x y loss total model optimizer scaler scheduler accelerator loader accum_steps self.k batch mask".split()
)
NUMBERS = st.sampled_from(["0", "1", "4", "0.5", "-1", "1e308", "10**400", "None", "True", "len(loader)", "''"])
METHODS = st.sampled_from("sum mean item div_ chunk step loss append".split())
FUNCTIONS = st.sampled_from("range enumerate len zip iter float print model sum".split())
EXPRESSIONS = st.recursive(
    NAMES | NUMBERS,
    lambda inner: st.one_of(
        st.builds("({} {} {})".format, inner, st.sampled_from("+ - * / // % == != > < >= and or".split()), inner),
        st.builds("not {}".format, inner),
        st.builds("{}[{}]".format, NAMES, inner),
        st.builds(
            "{}.{}({})".format, NAMES, st.sampled_from("sum mean item div_ chunk step loss append".split()), inner
        ),
        st.builds(
            "{}({})".format, st.sampled_from("range enumerate len zip iter float print model sum".split()), inner
        ),
        st.builds("({} if {} else {})".format, inner, inner, inner),
        st.builds("[{} for i in {}]".format, inner, inner),
        st.builds("(lambda i: {})".format, inner),
    ),
    max_leaves=6,
)
SIMPLE = st.one_of(
    st.builds("{} = {}".format, NAMES, EXPRESSIONS),
    st.builds("{} {}= {}".format, NAMES, st.sampled_from("+-*/%"), EXPRESSIONS),
    st.builds("({}).backward()".format, EXPRESSIONS),
    st.builds("{}".format, EXPRESSIONS),
    st.builds("return {}".format, EXPRESSIONS),
    st.builds("assert {}".format, EXPRESSIONS),
    st.sampled_from(
        "loss.backward()|optimizer.step()|optimizer.zero_grad()|scaler.step(optimizer)|scaler.update()|continue|break|"
        "scheduler.step()|accelerator.backward(loss)|model.no_sync()|x, y = next(it)|scaler.unscale_(optimizer)|f()|"
        "self.f(i)|torch.nn.utils.clip_grad_norm_(model.parameters(), n)|p.grad /= n|i += 1|n = n + 1".split("|")
    ),
)
HEADS = st.one_of(
    st.builds("if {}:".format, EXPRESSIONS),
    st.builds("for i in {}:".format, EXPRESSIONS),
    st.builds("for i, (x, y) in enumerate({}):".format, EXPRESSIONS),
    st.builds("while {}:".format, EXPRESSIONS),
    st.builds("with {}:".format, EXPRESSIONS),
    st.sampled_from(
        ["def f(i=0, *a, **k):", "class C:", "try:\n    pass\nfinally:", "with accelerator.accumulate(model):"]
    ),
)


def _block(head: str, body: list[str]) -> str:
    lines = [f"    {line}" for statement in body for line in statement.split("\n")]
    return "\n".join([head, *lines])


PROGRAMS = st.recursive(
    SIMPLE, lambda inner: st.builds(_block, HEADS, st.lists(inner, min_size=1, max_size=4)), max_leaves=25
)


@settings(max_examples=200)
@given(st.lists(PROGRAMS, min_size=1, max_size=5))
def test_programs_that_nobody_would_write(statements: list[str]) -> None:
    """Training statements in any order and nesting."""
    survives(("import torch\n" + "\n".join(statements)).encode())


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
    "functions": "\n".join(
        f"def f{n}():\n    f{n + 1}()\n    f{n + 1}()\n    loss.backward()\n    optimizer.step()" for n in range(60)
    ),
    "itself": "def f():\n    f()\n    loss.backward()\n    optimizer.step()\nf()",
    "strings": "x = " + "f'{" * 100 + "}'" * 100,
}


@pytest.mark.parametrize("text", DEEP.values(), ids=DEEP)
def test_deep_nesting(text: str) -> None:
    """It is read, or said to be too deep; it takes no ages and ends no process."""
    found = survives(f"# backward step(\n{text}\n".encode())
    assert set(found) <= EVERYTHING


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=10),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["cells", "cell_type", "source", "x"]), inner, max_size=3)
    ),
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


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x89PNG\r\n\x1a\n\0\0", "it is no text"),
        (b"x = 1\0", "null bytes"),
        (b"# -*- coding: nonsense -*-\n", "it is no text"),
        (b"\xff\xfe", "it is no text"),
        (b"print 'hello'\n", "Missing parentheses"),
        (b"loss.backward(\n", "was never closed"),
        (b"<<<<<<< HEAD\n", "invalid syntax"),
    ],
)
def test_what_cannot_be_read_is_said(data: bytes, why: str) -> None:
    """With the reason; nothing else is found in it."""
    source = read_source("train.py", data)
    (problem,) = source.problems
    assert problem.startswith("train.py:1:")
    assert why in problem
    assert not check(source)


def test_other_encodings_are_read() -> None:
    """Latin-1 that says so, a byte order mark, Windows line ends."""
    loop = "for x in loader:\n    net(x).backward()\n    opt.step()  # é\n"
    for data in (
        b"# coding: latin-1\n" + loop.encode("latin-1"),
        b"\xef\xbb\xbf" + loop.encode(),
        loop.replace("\n", "\r\n").encode(),
    ):
        assert survives(data) == ["BB106"]


def test_a_file_that_is_not_there_and_a_folder(tmp_path: Path) -> None:
    """What cannot be opened does not stop the others."""
    missing, good = tmp_path / "gone.py", tmp_path / "good.py"
    good.write_text("x = 1\n")
    ((_, (problem,)), (_, none)) = lint([missing, good], Settings())
    assert f"{missing}:1:1: cannot be checked: No such file" in problem
    assert not none


def test_a_link_that_leads_to_itself(tmp_path: Path) -> None:
    """It cannot be opened, and the others are read."""
    (tmp_path / "loop.py").symlink_to("loop.py")
    (tmp_path / "good.py").write_text("x = 1\n")
    for choice in (Settings(), Settings(force_exclude=True)):
        ((_, none), (_, (problem,))) = lint([tmp_path], choice)
        assert not none
        assert "symbolic links" in problem


def test_a_named_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """Nobody may ever write to it; the error says how to read from one."""
    os.mkfifo(tmp_path / "pipe.py")
    ((_, (problem,)),) = lint([tmp_path], Settings())
    assert "use - for standard input" in problem


def test_four_times_the_loops_take_four_times_the_work() -> None:
    """Counted in calls of functions, which do not depend on the machine."""
    loop = (
        "for i, (x, y) in enumerate(loader):\n    (criterion(model(x), y) / 4).backward()\n"
        "    if (i + 1) % 4 == 0:\n        optimizer.step()\n        optimizer.zero_grad()\n"
    )
    calls = []
    for number in (40, 160):
        source = read_source("train.py", (loop * number).encode())
        with cProfile.Profile() as profile:
            check(source)
        calls.append(sum(entry.callcount for entry in profile.getstats()))
    assert calls[1] < 5 * calls[0]
