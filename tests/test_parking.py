"""Gradients whose memory waits elsewhere at a meeting, on a CPU: streams and events do nothing here."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import BigStep, Options, across
from bigbatch.lockstep import batch_norm, offloading, parking, together
from bigbatch.lockstep.parking import Parking
from tests.reference import distance, sgd, trained, weights
from tests.test_offloading import ACTIVATIONS, Residual, _Torch, images

Batch = tuple[Tensor, Tensor]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _parked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offload on the host, and park all that is larger than a few numbers, from three micro-batches on."""
    for module in (offloading, parking):
        monkeypatch.setattr(module, "torch", _Torch())
        monkeypatch.setattr(module, "_WORTH_MOVING", 64)
    monkeypatch.setattr(batch_norm, "_MANY", 2)
    monkeypatch.setattr(together.Together, "_activations", lambda _, number: "keep" if number == 1 else "offload")


def park() -> Parking:
    """Return an empty one."""
    stream: Any = _Torch.cuda.Stream()
    return Parking(CPU, stream)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean over samples."""
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_big_batch_with_gradients_that_park(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and statistics over several updates, of uneven micro-batches, with a shortcut that shares a gradient."""
    came_back: list[int] = []
    plain = Parking._come_back

    def come_back(self: Parking, number: int, away: Any) -> None:
        assert not away.storage.nbytes()
        came_back.append(number)
        plain(self, number, away)

    monkeypatch.setattr(Parking, "_come_back", come_back)
    torch.manual_seed(0)
    model = Residual(ACTIVATIONS[name]).double()
    twin = copy.deepcopy(model)
    optimizer = sgd(trained(twin))
    step = BigStep(model, sgd(trained(model)), loss_of, micro_batch_size=2)
    for number in range(3):
        step(images(13, number))
        optimizer.zero_grad()
        loss_of(twin, images(13, number)).backward()
        optimizer.step()
    assert set(came_back) == {1, 5}  # of seven
    assert distance(weights(model), weights(twin)) <= 1e-12
    assert distance(list(model.buffers()), list(twin.buffers())) <= 1e-12


@pytest.mark.parametrize("shared", ["gathered", "summed"])
def test_a_gradient_that_all_micro_batches_share(shared: str) -> None:
    """What comes back of a meeting in the loss goes straight into a norm: each has its own copy."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        out = model(batch[0])
        if shared == "gathered":
            return across.once(across.gather(out).pow(2).sum(1).sqrt().mean())
        return across.once(across.sum(out).pow(4).mean())

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.BatchNorm1d(16)).double()
    twin = copy.deepcopy(model)
    x = torch.randn(12, 6, dtype=torch.float64)
    step = BigStep(model, sgd(trained(model)), loss, micro_batch_size=2, options=Options(check=False))
    step((x, x))
    optimizer = sgd(trained(twin))
    parts = torch.stack(twin(x).split(2)).sum(0) if shared == "summed" else twin(x)
    (parts.pow(2).sum(1).sqrt().mean() if shared == "gathered" else parts.pow(4).mean()).backward()
    optimizer.step()
    assert distance(weights(model), weights(twin)) <= 1e-12


def test_memory_goes_and_comes_back() -> None:
    """The tensor stays; whoever holds a view of it finds it as it was."""
    parked = park()
    first, second = torch.arange(32.0), torch.arange(32.0, 64.0)
    view, size = first[3:], first.untyped_storage().nbytes()
    with parked.parked(1, first):
        assert first.untyped_storage().nbytes() == size  # until someone comes after it
        with parked.parked(5, second):
            assert not first.untyped_storage().nbytes()
            assert second.untyped_storage().nbytes() == size
        assert torch.equal(second, torch.arange(32.0, 64.0))
        assert not first.untyped_storage().nbytes()
    assert torch.equal(first, torch.arange(32.0))
    assert torch.equal(view, torch.arange(3.0, 32.0))
    assert parked.held == 2 * size


def test_who_does_not_park() -> None:
    """Most micro-batches, and small tensors."""
    parked = park()
    with parked.parked(2, torch.ones(64)), parked.parked(1, torch.ones(2)):
        assert not parked.held


def test_a_window_that_fails_leaves_nothing_behind() -> None:
    """What has not left stays, and the next window parks as before."""
    parked = park()
    held = torch.ones(32)
    with pytest.raises(ValueError, match="failed"), parked.parked(1, held):
        raise ValueError("failed")
    assert not parked._leaving
    assert torch.equal(held, torch.ones(32))
    with parked.parked(1, held):
        pass
    assert torch.equal(held, torch.ones(32))
