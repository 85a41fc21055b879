"""Chains of operations that nobody has written yet: exact or refused, none wrong.

Every run tries the same few hundred; `pytest tests/audit/test_chains.py --chains 20000 --chain-seed 7` tries others.
One that fails is shown as the shortest program that fails in the same way.
"""

from collections.abc import Callable, Iterator

import pytest

from tests.audit.judge import Verdict
from tests.audit.programs import Program, could_be_exact, fair, shrunk, verdict, verdict_of_big_step

pytestmark = pytest.mark.filterwarnings("ignore")  # a program that nobody has written warns of what nobody would write
BLOCK = 25  # chains of one test: so that workers share them
BIG_STEPS = 6  # as many times fewer chains go through a BigStep


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Cut the chains into blocks."""
    if "block" in metafunc.fixturenames:
        share = BIG_STEPS if "check" in metafunc.fixturenames else 2 if "accepted" in metafunc.function.__name__ else 1
        blocks = -(-metafunc.config.getoption("--chains") // (BLOCK * share))
        metafunc.parametrize("block", range(blocks))


@pytest.fixture
def programs(request: pytest.FixtureRequest, block: int, kind: str) -> Iterator[Program]:
    """The programs of a block."""
    seed = request.config.getoption("--chain-seed")
    return fair(seed, block * 1000, BLOCK, kind)


def assert_exact_or_refused(programs: Iterator[Program], judge: Callable[[Program], Verdict]) -> None:
    """What is not refused must be exact; what fails is shown as short as it can be."""
    for program in programs:
        outcome = judge(program).outcome
        if outcome in {"wrong", "crashed"}:
            small = shrunk(program, judge)
            pytest.fail(f"{judge(small)}\n\n{small}", pytrace=False)


@pytest.mark.parametrize("kind", ["any"])
def test_a_chain_is_exact_or_refused(programs: Iterator[Program]) -> None:
    """An Accumulator is exact, or says why it is not."""
    assert_exact_or_refused(programs, verdict)


@pytest.mark.parametrize("kind", ["apart"])
def test_a_chain_on_samples_is_accepted(programs: Iterator[Program]) -> None:
    """Operations that act on each sample alone may be chained at will."""

    def judge(program: Program) -> Verdict:
        told = verdict(program)
        by_design = told.outcome != "refused" or told.words.startswith("SeveralCounts")  # a mean beside a sum
        return told if by_design or not could_be_exact(program) else Verdict("wrong", told.words)

    assert_exact_or_refused(programs, judge)


@pytest.mark.parametrize(("kind", "check"), [("any", False), ("any", True), ("deep", True)])
def test_a_chain_is_exact_or_refused_in_a_big_step(programs: Iterator[Program], check: bool) -> None:
    """So is a BigStep; with its check of the first steps also where samples meet inside the model."""
    assert_exact_or_refused(programs, lambda program: verdict_of_big_step(program, check=check))


def test_a_failure_is_shown_short() -> None:
    """Of a program that fails, what the failure does not need is left out."""
    lines = ("x = x.tanh()", "x = x - x.mean()", "x = x * 2", "loss = x.square().mean()")
    program = Program("F.linear(b['x'], m.token)", lines, ((2, 3, 1), (2, 2, 2)), 0)
    small = shrunk(program, verdict)
    assert small.lines == ("x = x - x.mean()", "loss = x.square().mean()")
    assert len(small.sizes) == 1
    assert "loss = x.square().mean()" in str(small)
