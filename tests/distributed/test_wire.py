"""What crosses the wire in an update is counted: once per update, however many micro-batches there are."""

import json
from pathlib import Path

import pytest

from benchmarks.wire import independent_of_steps, page_table
from benchmarks.wire_counting import Wire, count_here
from benchmarks.wire_loops import OURS, plain_model
from tests.support.ranks import exactly

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[2]
EVERY, QUIET = "DDP, reduced every micro-batch", "DDP with no_sync"
NUMBERS = 40 * 8  # bytes of what ranks tell each other before the gradients
GRADIENTS = sum(p.numel() * p.element_size() for p in plain_model().parameters())


def test_gradients_cross_the_wire_once_per_update() -> None:
    """And one message before them, for windows of one micro-batch and of three; others are counted by the same rule."""
    counted: list[Wire] = exactly(2, count_here, [1, 3], [EVERY, QUIET, *OURS])[0]
    ours = [each for each in counted if each.loop in OURS]
    assert {each.bytes for each in ours} == {GRADIENTS + NUMBERS}
    assert {each.collectives for each in ours if "overlap" not in each.loop} == {2}
    assert len(ours) == 2 * len(OURS)
    assert independent_of_steps(counted)
    sent = {(each.loop, each.steps): each.bytes for each in counted}
    assert sent[QUIET, 1] == sent[QUIET, 3] == sent[EVERY, 1] == GRADIENTS
    assert sent[EVERY, 3] == 3 * GRADIENTS


def test_the_page_shows_the_results_that_are_kept() -> None:
    """They are of these loops, of groups of two and four, and ours send the same in windows of 1 to 64."""
    kept = [Wire(**row) for row in json.loads((ROOT / "benchmarks/results/wire.json").read_text())["measured"]]
    assert f"<!-- wire -->\n{page_table(kept)}<!-- end -->" in (ROOT / "docs" / "ranks.md").read_text()
    assert {each.ranks for each in kept} == {2, 4}
    assert {each.steps for each in kept} == {1, 2, 4, 8, 16, 32, 64}
    assert independent_of_steps(kept)
    assert {each.bytes for each in kept if each.loop in OURS} == {GRADIENTS + NUMBERS}
