"""Sizes are found once, and for ragged batches not over and over."""

import pytest
import torch

from bigbatch import errors
from bigbatch.memory.sizes import Sizes
from bigbatch.memory.sizing import Probe, choose


def sizes(asked: list[int]) -> tuple[Sizes, object]:
    """Return sizes that are to be found on a device where eight samples fit."""

    def probe(size: int, limit: int) -> Probe:
        asked.append(size)
        return Probe(size, size * limit // 9, 0.01 + 0.001 * size)

    return Sizes("auto", "1GiB", torch.device("cpu")), probe


def test_a_size_is_found_once() -> None:
    """The second batch of a shape asks for nothing."""
    asked: list[int] = []
    found, probe = sizes(asked)
    first = found.samples("batch int64 [128]", 64, probe)  # type: ignore[arg-type]
    number = len(asked)
    assert first == 8
    assert number
    assert found.samples("batch int64 [128]", 64, probe) == first  # type: ignore[arg-type]
    assert len(asked) == number


@pytest.mark.parametrize(
    ("shape", "anew"),
    [
        ("batch int64 [100]", False),
        ("batch int64 [129]", True),
        ("batch int32 [100]", True),
        ("batch int64 [100, 2]", True),
        ("batch int64 [100]; other int64 []", True),
    ],
)
def test_a_size_for_larger_samples_serves_smaller_ones(shape: str, anew: bool) -> None:
    """Ragged batches are tried anew only when they are larger than all before, or of another kind."""
    asked: list[int] = []
    found, probe = sizes(asked)
    size = found.samples("batch int64 [128]", 64, probe)  # type: ignore[arg-type]
    number = len(asked)
    assert found.samples(shape, 64, probe) == size  # type: ignore[arg-type]
    assert (len(asked) > number) == anew
    assert len(found.state_dict()) == 1 + anew


def test_tokens_are_chosen_for_the_least_expected_time() -> None:
    """One long sample is fastest alone, but its budget would leave every shorter one alone, too."""
    lengths = [512] + [300] * 63

    def probe(size: int, limit: int) -> Probe:
        return Probe(size, size * limit // 80, 0.09 if size == 1 else 0.17 * size)

    assert choose(lambda size: probe(size, 1 << 30), 64, 1 << 30).size == 1
    found = Sizes("auto", "1GiB", torch.device("cpu")).tokens("auto", lengths, probe)
    assert 512 < found <= 512 * 64


def test_a_learned_size_that_is_none_is_refused() -> None:
    """What comes from a file is looked at."""
    with pytest.raises(errors.StateError, match="positive integer"):
        Sizes("auto", None, torch.device("cpu")).load_state_dict({"batch": 0})
