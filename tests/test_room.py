"""What waits while micro-batches run in lock-step, and whether there is room for it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from bigbatch import BigStep, Options
from bigbatch.errors import OutOfMemory
from bigbatch.lockstep.activations import _SHAPES, Activations
from tests.support.reference import distance, sgd, trained, weights


def sequences(length: int) -> Tensor:
    """Return eight of them."""
    return torch.randn(8, 3, length, generator=torch.Generator().manual_seed(0))


def step_of() -> tuple[nn.Module, BigStep]:
    """Return a model whose activations grow with the length, and a step."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(3, 8, 3, padding=1), nn.BatchNorm1d(8), nn.Tanh(), nn.AdaptiveAvgPool1d(1), nn.Flatten()
    )
    return model, BigStep(
        model,
        sgd(trained(model)),
        lambda model, batch: model(batch).square().mean(),
        micro_batch_size=4,
        options=Options(check=False),
    )


def test_longer_samples_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that is too long is refused after short ones, and short ones are not after long ones."""
    model, step = step_of()
    monkeypatch.setattr("bigbatch.lockstep.activations.host_available", lambda: 1 << 20)
    step(sequences(16))
    before = weights(model)
    with pytest.raises(OutOfMemory, match=r"(?s)wait in the host's memory.* about .* MiB, and 1 MiB for them"):
        step(sequences(16 * 256))
    assert distance(weights(model), before) == 0
    step(sequences(16))


def test_what_memory_allows_is_named_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is less than the host has."""
    monkeypatch.setattr("bigbatch.lockstep.activations.resident", lambda: 0)
    where = Activations("auto", torch.device("cpu"))
    with pytest.raises(OutOfMemory, match=r"1 KiB for them within memory="):
        where.make_room(lambda: 256.0, 8, "a shape", meets_inside=True, budget=1024, pinned=0)
    where.make_room(lambda: 128.0, 8, "another", meets_inside=True, budget=1024, pinned=0)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 5)), max_size=60))
def test_shapes_are_measured_where_it_matters(asked: list[tuple[int, int]]) -> None:
    """Each of the first ones once; of others the largest is taken, unless it would not fit."""
    waiting, measured = Activations("auto", torch.device("cpu")), list[int]()
    for shape, room in asked:

        def measure(shape: int = shape) -> float:
            measured.append(shape)
            return 1 + shape % 4

        found = waiting._bytes_of(str(shape), measure, room)
        assert found >= 1 + shape % 4 or found <= room
        if shape in measured:
            assert found == 1 + shape % 4
        else:
            assert len(set(measured)) >= _SHAPES
    assert len(measured) == len(set(measured))
