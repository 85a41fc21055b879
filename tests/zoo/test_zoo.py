"""Other people's models and losses, with both entrances, beside true big batches: exact, or refused for a known reason.

Ten of them always run; `make zoo` tries them all.
"""

import os
from typing import Any

import pytest

from tests.zoo.libraries import missing
from tests.zoo.program import Program
from tests.zoo.table import OPEN, PROGRAMS
from tests.zoo.trial import attempt, is_met

pytestmark = pytest.mark.peers
SKIPPED = pytest.mark.skip(reason="one of the zoo that `make zoo` tries; ZOO=1 has pytest try it, too")


def tried() -> list[Any]:
    """Every program with every entrance; those that are not quick wait for `ZOO=1`."""
    rows = []
    for program in PROGRAMS:
        for entrance in program.entrances():
            name = f"{program.name}/{entrance}"
            marks = [pytest.mark.xfail(strict=True, reason=OPEN[name])] if name in OPEN else []
            marks += [] if program.quick or os.environ.get("ZOO") else [SKIPPED]
            rows.append(pytest.param(program, entrance, id=name, marks=marks))
    return rows


@pytest.mark.parametrize(("program", "entrance"), tried())
def test_a_program_is_exact_or_refused_for_a_reason(program: Program, entrance: str) -> None:
    """What comes out is what the table says."""
    if reason := missing(program.library):
        pytest.skip(reason)
    result = attempt(program, entrance)
    due = program.unseen if entrance == "verify" else program.due(entrance)
    assert is_met(program, entrance, result), f"expected {due}; {result}: {result.text}"


def test_the_table_names_each_program_once() -> None:
    """Names are unique, ten are quick, and whatever is open is a row."""
    names = [program.name for program in PROGRAMS]
    assert len(names) == len(set(names))
    assert sum(program.quick for program in PROGRAMS) >= 10
    assert set(OPEN) <= {f"{program.name}/{entrance}" for program in PROGRAMS for entrance in program.entrances()}
