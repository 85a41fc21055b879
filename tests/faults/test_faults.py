"""Whatever fails once, nothing is silently wrong, lost or left behind, and training goes on to the same weights."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.faults import campaign, kills, single_faults
from tests.faults.outcomes import Case, Outcome
from tests.faults.workers import run_cases

SEED, FAULTS, KILLS = 14, 200, 5


@pytest.fixture(scope="module")
def outcomes() -> list[tuple[Case, Outcome]]:
    """Two hundred faults of `make faults`, always the same."""
    cases = list(single_faults.draw(SEED, FAULTS))
    return list(zip(cases, single_faults.run(cases), strict=True))


@pytest.mark.parametrize("entrance", ["Accumulator", "BigStep"])
def test_a_fault_anywhere_is_survived(outcomes: list[tuple[Case, Outcome]], entrance: str) -> None:
    """State is as promised, and the final weights are those of an undisturbed run."""
    found = [(case, outcome) for case, outcome in outcomes if case.entrance == entrance]
    bad = [f"{case}: {outcome}" for case, outcome in found if outcome.kind not in {"fine", "not reached"}]
    assert not bad, f"{len(bad)} of {len(found)}:\n" + "\n".join(bad)
    assert sum(outcome.kind == "fine" for _, outcome in found) > 0.9 * len(found)


def test_faults_at_places_that_chance_seldom_finds_are_survived() -> None:
    """Before a batch of `over` is given out, after its last update, and before a worker's first task."""
    places = [
        ("Accumulator", "iterator over", "call state.scope:times_asked #1, discard", "CUDA error"),
        ("Accumulator", "unsized over", "call loop:NoLoop.__init__ #2, discard", "cuBLAS"),
        ("Accumulator", "unsized over", "call loop:NoLoop.__init__ #2, retry", "KeyboardInterrupt"),
        ("BigStep", "across, offload", "call lockstep.thread_state:wait_when_woken #2, retry", "cuBLAS"),
        ("BigStep", "across, offload", "call lockstep.threads:_Seat.run #2, retry", "RuntimeError"),
        ("BigStep", "several counts", "call window.gradients:Gradients.release #1, retry", "RuntimeError"),
    ]
    cases = [Case("single", 0, 0, *place, 0) for place in places]
    assert [each.kind for each in single_faults.run(cases)] == ["fine"] * len(places)


def test_the_same_seed_draws_the_same_cases() -> None:
    """A campaign that was stopped goes on with the cases that are left."""
    assert list(single_faults.draw(3, 20)) == list(single_faults.draw(3, 50))[:20]


def test_a_campaign_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No case is run twice, a line that was cut off is run again, and the report counts all of them."""
    monkeypatch.setattr(campaign, "STATE", tmp_path)
    monkeypatch.setattr(campaign, "RESULTS", tmp_path)
    ran: list[int] = []

    def run(cases: Sequence[Case]) -> Iterator[Outcome]:
        for case in cases:
            if case.number == 4 and len(ran) == 4:
                raise KeyboardInterrupt
            ran.append(case.number)
            yield Outcome("wrong", "other weights") if case.number == 2 else Outcome("fine")

    parts = [campaign.Part("single", 8, single_faults.draw, run)]
    seed = campaign.seed_of("tried", None)
    with pytest.raises(KeyboardInterrupt):
        campaign.run("tried", seed, parts, [])
    assert campaign.seed_of("tried", None) == seed
    path = tmp_path / f"tried-single-{seed}.jsonl"
    path.write_text(path.read_text()[:-9])
    done = campaign.run("tried", seed, parts, [])
    assert ran == [0, 1, 2, 3, 3, 4, 5, 6, 7]
    assert [outcome.kind for _, outcome in done].count("fine") == 7
    assert "other weights" in (tmp_path / "tried.md").read_text()


def test_a_process_that_dies_is_an_outcome() -> None:
    """Each of its cases is one; the campaign goes on."""
    cases = list(single_faults.draw(3, 2))
    assert [outcome.kind for outcome in run_cases("tests.faults.nothing", cases)] == ["lost", "lost"]


def test_a_killed_training_goes_on_bit_by_bit() -> None:
    """Killed at random moments and resumed until it is done."""
    cases = list(kills.draw(SEED, KILLS))
    bad = [
        f"{case}: {outcome}" for case, outcome in zip(cases, kills.run(cases), strict=True) if outcome.kind != "fine"
    ]
    assert not bad, "\n".join(bad)
