"""Every case is judged as its labels say."""

import pytest

from benchmarks.lint import Case, judge, read_cases
from bigbatch_lint.rules import RULES

CASES = {case.name: case for case in read_cases()}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_case(case: Case) -> None:
    """All that is labelled is found, and nothing else; where a line is labelled, it is found there."""
    judged = judge(case)
    assert (judged.missed(), judged.false()) == (frozenset(), frozenset())
    on_lines = {code for code, _ in judged.lines}
    assert on_lines & judged.found() == judged.in_place()


def test_each_rule_has_cases_and_names_are_unique() -> None:
    """At least three scripts break each rule."""
    assert len(CASES) == sum(1 for _ in read_cases())
    for rule in RULES:
        assert sum(rule in case.expected for case in CASES.values()) >= 3
