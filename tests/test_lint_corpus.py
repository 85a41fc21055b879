"""The scripts in tests/lint_corpus: every planted mistake is found, and nothing else."""

from collections import Counter

import pytest

from benchmarks.lint_accuracy import Judged, judge_all, scores

JUDGED = judge_all()


@pytest.mark.parametrize("judged", JUDGED, ids=lambda judged: f"{judged.file.parent.name}/{judged.file.name}")
def test_a_script(judged: Judged) -> None:
    """What its labels say, and no more."""
    assert not judged.missed(), f"not found: {sorted(judged.missed())}"
    assert not judged.false(), [finding.message for finding in judged.findings if finding.code in judged.false()]


def test_findings_stand_where_a_reader_would_look() -> None:
    """Nearly all are on the labelled line; some lines are a matter of taste."""
    total = scores(JUDGED)[-1]
    assert total.in_place >= 0.95 * total.on_lines


def test_the_corpus_is_large_enough() -> None:
    """At least 120 scripts, correct and wrong, and every rule that is on by default in several of them."""
    assert len(JUDGED) >= 120
    labelled = Counter(code for judged in JUDGED for code in judged.expected)
    assert min(labelled.values()) >= 4
    assert sum(not judged.expected for judged in JUDGED) >= 60
