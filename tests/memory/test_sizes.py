"""Sizes are found once, and for ragged batches not over and over."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bigbatch import errors
from bigbatch.batch.batch import SampleShape
from bigbatch.memory.search import Probe, choose
from bigbatch.memory.sizes import Sizes


def shape(*dims: int, dtype: str = "int64", beside: bool = False) -> SampleShape:
    """The shape of a sample with one tensor, or with a number beside it."""
    return SampleShape((("batch", dtype, dims), *((("other", "int64", ()),) if beside else ())))


def sizes(asked: list[int]) -> tuple[Sizes, Callable[[int, int], Probe]]:
    """Return sizes that are to be found on a device where eight samples fit."""

    def probe(size: int, limit: int) -> Probe:
        asked.append(size)
        return Probe(size, size * limit // 9, 0.01 + 0.001 * size)

    return Sizes("auto", "1GiB", torch.device("cpu")), probe


@pytest.mark.parametrize(
    ("other", "anew"),
    [
        (shape(100), False),
        (shape(129), True),
        (shape(100, dtype="int32"), True),
        (shape(100, 2), True),
        (shape(100, beside=True), True),
        (SampleShape(), True),  # as `collate` makes them
    ],
)
def test_a_size_for_larger_samples_serves_smaller_ones(other: SampleShape, anew: bool) -> None:
    """Ragged batches are tried anew only when they are larger than all before, or of another kind."""
    asked: list[int] = []
    found, probe = sizes(asked)
    size = found.samples(shape(128), 64, probe)
    number = len(asked)
    assert found.samples(other, 64, probe) == size
    assert (len(asked) > number) == anew
    assert len(found.state_dict()) == 1 + anew
    asked.clear()
    assert found.samples(other, 64, probe) == size == 8
    assert not asked  # found once


@pytest.mark.parametrize(("at_once", "size"), [(False, 1), (True, 8)])
def test_what_waits_for_each_other_is_run_at_once_where_that_fits(at_once: bool, size: int) -> None:
    """Though smaller ones are as fast."""
    kept = Sizes("auto", "1GiB", torch.device("cpu"))
    assert kept.samples(shape(1), 8, lambda n, _: Probe(n, n, 0.01 * n), at_once=at_once) == size


def test_tokens_are_chosen_for_the_least_expected_time() -> None:
    """One long sample is fastest alone, but its budget would leave every shorter one alone, too."""
    lengths = [512] + [300] * 63

    def probe(size: int, limit: int) -> Probe:
        return Probe(size, size * limit // 80, 0.09 if size == 1 else 0.17 * size)

    assert choose(lambda size: probe(size, 1 << 30), 64, 1 << 30).size == 1
    found = Sizes("auto", "1GiB", torch.device("cpu")).tokens("auto", lengths, probe)
    assert 512 < found <= 512 * 64


class Attention:
    """A device that a model with attention runs on: what samples take grows by the square of their length."""

    def __init__(self, room: int = 1 << 23) -> None:
        self.room, self.probed = room, list[tuple[int, int]]()
        self.sizes = Sizes("auto", "1GiB", torch.device("cpu"))

    def tokens(self, lengths: Sequence[int]) -> int:
        """A budget for a batch."""
        return self.sizes.tokens("auto", lengths, self.probe(max(lengths)))

    def probe(self, longest: int) -> Callable[[int, int], Probe]:
        """Probe sizes of samples of a length."""

        def probe(size: int, limit: int) -> Probe:
            self.probed.append((size, longest))
            return Probe(size, size * longest**2 * limit // self.room, 0.1 + 1e-6 * size * longest)

        return probe

    def holds(self, budget: int, longest: int) -> bool:
        """Whether as many of these samples as a budget allows fit."""
        return max(budget // longest, 1) * longest**2 <= self.room


@given(st.lists(st.tuples(st.integers(1, 4096), st.integers(1, 400)), min_size=1, max_size=40))
@settings(max_examples=30)
def test_budgets_of_any_batches_fit_and_are_rarely_looked_for(batches: list[tuple[int, int]]) -> None:
    """Longest samples and numbers of them in any order: the second time round, or of less length, nothing is probed."""
    device = Attention(1 << 26)
    for turn, shorter in enumerate((0, 0, 8)):
        device.probed.clear()
        for longest, number in batches:
            length = longest - longest * shorter // 64
            assert device.holds(device.tokens([length] * number), length)
        assert not turn or not device.probed


def test_a_budget_that_failed_is_never_exceeded() -> None:
    """Not by what was found before, nor by what is found for longer samples."""
    device = Attention()
    assert device.tokens([16] * 800) > 100
    device.sizes.learn(None, 100)
    probes = len(device.probed)
    assert device.tokens([16] * 800) == 100
    assert len(device.probed) == probes
    assert device.tokens([64] * 800) == 100
    assert device.sizes.tokens(40, [64] * 800, device.probe(64)) == 40


def test_what_was_learned_is_saved_with_what_it_was_found_with() -> None:
    """A size found on two samples is found again on many, also when it came from a file; so are budgets."""
    asked: list[int] = []
    found, probe = sizes(asked)
    found.samples(shape(128), 2, probe)
    device = Attention()
    device.tokens([16] * 4)
    found.learn(SampleShape(), 3)
    state = {**found.state_dict(), **device.sizes.state_dict()}
    assert state == {
        "batch int64 [128]": {"size": 2, "samples": 2},
        "samples": {"size": 3},
        "tokens [16]": {"size": 64, "samples": 4},
    }
    resumed = Sizes("auto", "1GiB", torch.device("cpu"))
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    asked.clear()
    assert resumed.samples(shape(128), 4, probe) == 2
    assert resumed.samples(SampleShape(), 4096, probe) == 3
    assert not asked
    assert resumed.samples(shape(128), 64, probe) == 8
    device.sizes, device.probed = resumed, []
    assert device.tokens([16] * 4) == 64
    assert not device.probed
    assert device.tokens([16] * 64) > 64


@pytest.mark.parametrize(
    "found", [0, None, {"samples": 2}, {"size": 2, "samples": 0}, {"size": True}, {"size": 2, "a": 1}]
)
def test_a_learned_size_that_is_none_is_refused(found: Any) -> None:
    """What comes from a file is looked at, and taken whole or not at all."""
    kept = Sizes("auto", None, torch.device("cpu"))
    kept.learn(shape(3), 1)
    with pytest.raises(errors.StateError, match="positive integer"):
        kept.load_state_dict({"batch int64 [4]": {"size": 1}, "batch int64 [5]": found})
    with pytest.raises(errors.StateError, match="shape of a sample"):
        kept.load_state_dict({"batch int64 [4]": {"size": 1}, "no shape": {"size": 1}})
    assert list(kept.state_dict()) == ["batch int64 [3]"]


@given(
    st.lists(
        st.tuples(st.text(min_size=1), st.sampled_from(["int64", "bfloat16"]), st.lists(st.integers(0, 99)).map(tuple)),
        max_size=3,
    )
)
@settings(max_examples=50)
def test_a_shape_is_read_as_it_was_written(tensors: list[tuple[str, str, tuple[int, ...]]]) -> None:
    """Whatever the keys of a batch are."""
    written = SampleShape(tuple((f"batch[{key!r}]", dtype, dims) for key, dtype, dims in tensors))
    kept, resumed = (Sizes("auto", None, torch.device("cpu")) for _ in range(2))
    kept.learn(written, 3)
    resumed.load_state_dict(kept.state_dict())
    assert resumed.samples(written, 9, lambda *_: pytest.fail("it is known")) == 3
