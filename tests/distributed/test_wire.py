"""What crosses the wire in an update is counted: once per update, however many micro-batches there are."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.wire import grids, independent_of_steps, page_table
from benchmarks.wire_counting import Wire, count_here
from benchmarks.wire_loops import OURS, plain_model
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[2]
EVERY, QUIET = "DDP, reduced every micro-batch", "DDP with no_sync"
NUMBERS = 40 * 8  # bytes of what ranks tell each other before the gradients
GRADIENTS = sum(p.numel() * p.element_size() for p in plain_model().parameters())


@pytest.fixture(scope="module")
def counted() -> list[Wire]:
    """Two processes, windows of one and of three."""
    found: Any = run_on_ranks(2, count_here, [1, 3], [EVERY, QUIET, *OURS])
    for each in found:
        if isinstance(each, BaseException):
            raise each
    first: list[Wire] = found[0]
    return first


def test_gradients_cross_the_wire_once_per_update(counted: list[Wire]) -> None:
    """And one message before them, for windows of one micro-batch and of three."""
    ours = [each for each in counted if each.loop in OURS]
    assert {each.bytes for each in ours} == {GRADIENTS + NUMBERS}
    assert {each.collectives for each in ours if "overlap" not in each.loop} == {2}
    assert len(ours) == 2 * len(OURS)
    assert independent_of_steps(counted)


def test_others_are_counted_by_the_same_rule(counted: list[Wire]) -> None:
    """DDP sends as often as there are micro-batches, or once under no_sync: the counting can tell."""
    sent = {(each.loop, each.steps): each.bytes for each in counted}
    assert sent[QUIET, 1] == sent[QUIET, 3] == sent[EVERY, 1] == GRADIENTS
    assert sent[EVERY, 3] == 3 * GRADIENTS
    assert not independent_of_steps([Wire(2, OURS[0], steps, 2, 8 * steps, None) for steps in (1, 2)])


def test_the_interface_agrees(counted: list[Wire]) -> None:
    """An all-reduce among two sends every byte both ways, and some headers; other traffic can only add."""
    for each in counted:
        assert each.loopback is None or each.loopback >= 2 * each.bytes


def test_the_tables_have_a_row_for_every_loop(counted: list[Wire]) -> None:
    """And a column for every size of a window."""
    collectives, sent, interface = grids(counted)
    assert [row[0] for row in collectives.rows] == [EVERY, QUIET, *OURS]
    assert all(len(row) == len(grid.header) == 3 for grid in (collectives, sent, interface) for row in grid.rows)
    assert sent.rows[0][1:] == (f"{GRADIENTS:,}", f"{3 * GRADIENTS:,}")


def results() -> list[Wire]:
    """Return the figures that are kept."""
    return [Wire(**row) for row in json.loads((ROOT / "benchmarks/results/wire.json").read_text())["measured"]]


def test_the_page_shows_the_results_that_are_kept() -> None:
    """Its table is made of them."""
    page = (ROOT / "docs" / "ranks.md").read_text()
    assert f"<!-- wire -->\n{page_table(results())}<!-- end -->" in page


def test_the_results_that_are_kept_are_of_these_loops() -> None:
    """Groups of two and four, windows of 1 to 64; ours send the same for all of them."""
    kept = results()
    assert {each.ranks for each in kept} == {2, 4}
    assert {each.steps for each in kept} == {1, 2, 4, 8, 16, 32, 64}
    assert independent_of_steps(kept)
    assert {each.bytes for each in kept if each.loop in OURS} == {GRADIENTS + NUMBERS}
