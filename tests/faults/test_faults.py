"""Whatever fails once, nothing is silently wrong, lost or left behind, and training goes on to the same weights."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.faults import campaign, kills, single_faults
from tests.faults.outcomes import Case, Outcome, run_cases

SEED, FAULTS, KILLS = 14, 200, 5
# Before a batch of `over` is given out, while batches are compared or states restored, before a worker works.
SELDOM = [
    ("Accumulator", "iterator over", "call state.scope:times_asked #1, discard", "CUDA error"),
    ("Accumulator", "unsized over", "call loop:no_loop #2, discard", "cuBLAS"),
    ("Accumulator", "unsized over", "call loop:no_loop #2, retry", "KeyboardInterrupt"),
    ("Accumulator", "iterator over", "call batch.tree:_Content.reducer_override #2, retry", "cuBLAS"),
    ("Accumulator", "saved", "call window.gradients:_hand #3, discard", "RuntimeError"),
    ("BigStep", "two optimizers", "call state.rng:Randomness.restore #22, retry", "KeyboardInterrupt"),
    ("BigStep", "across, offload", "call lockstep.thread_state:wait_when_woken #2, retry", "cuBLAS"),
    ("BigStep", "across, offload", "call lockstep.threads:_Seat.run #2, retry", "RuntimeError"),
    ("BigStep", "several counts", "call window.gradients:Gradients.release #1, retry", "RuntimeError"),
    ("BigStep", "several counts", "call window.window:Window.discard #1, flush", "RuntimeError"),
    ("BigStep", "several counts", "call state.oom:is_out_of_memory #1, flush", "MemoryError"),
]


def test_a_fault_anywhere_is_survived() -> None:
    """State is as promised, and the final weights are those of an undisturbed run, at 200 faults of `make faults`."""
    cases = [Case("single", 0, 0, *each) for each in SELDOM] + list(single_faults.draw(SEED, FAULTS))
    found = list(zip(cases, single_faults.run(cases), strict=True))
    gone = [pair for pair in found[: len(SELDOM)] if pair[1].kind == "not reached"]  # renamed: name it anew
    bad = [f"{case}: {outcome}" for case, outcome in [*gone, *(pair for pair in found if pair[1].is_bad)]]
    assert not bad, f"{len(bad)} of {len(found)}:\n" + "\n".join(bad)
    assert sum(outcome.kind == "fine" for _, outcome in found) > 0.9 * len(found)


def test_a_campaign_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same seed draws the same cases; none runs twice, a line that was cut off runs again, the report has all."""
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
    done = campaign.run("tried", seed, parts, [], jobs=2)
    assert sorted(ran) == [0, 1, 2, 3, 3, 4, 5, 6, 7]
    assert [case for case, _ in done] == list(single_faults.draw(seed, 8))
    assert [outcome.kind for _, outcome in done].count("fine") == 7
    assert "other weights" in (tmp_path / "tried.md").read_text()


def test_a_process_that_dies_is_an_outcome() -> None:
    """Each of its cases is one; the campaign goes on."""
    cases = list(single_faults.draw(3, 2))
    assert [outcome.kind for outcome in run_cases("tests.faults.nothing", cases)] == ["lost", "lost"]


def test_a_killed_training_goes_on_bit_by_bit() -> None:
    """Killed at random moments and resumed until it is done."""
    assert list(kills.run(list(kills.draw(SEED, KILLS)))) == [Outcome("fine")] * KILLS
