"""Activations that wait elsewhere, on a CPU: streams and events do nothing here.

What those are for is tested on a device (`test_cuda_lockstep.py`); this is about which tensors go, in which order they
are fetched, and which are made again.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bigbatch import BigStep, Options
from bigbatch.errors import OutOfMemory
from bigbatch.lockstep import offload_fetch, offload_store, pinned_slabs, run
from bigbatch.lockstep.activations import Activations
from tests.support.reference import distance, sgd, trained, weights

Batch = tuple[Tensor, Tensor]


class _Idle:
    """A stream or an event on a machine that does one thing after the other."""

    def __init__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name in {"wait_stream", "wait_event", "record"}:
            return lambda *_: None
        raise AttributeError(name)


@contextmanager
def _idle(_: object) -> Iterator[None]:
    yield


class _Torch:
    """torch, without a device to wait for."""

    cuda = SimpleNamespace(Stream=_Idle, Event=_Idle, current_stream=lambda *_: _Idle(), stream=_idle)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(*sizes: Any, pin_memory: bool = False, **named: Any) -> Tensor:
        del pin_memory
        return torch.empty(*sizes, **named)


@pytest.fixture(autouse=True)
def _offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offload on the host, in small pieces."""
    for module in (offload_store, offload_fetch, pinned_slabs):
        monkeypatch.setattr(module, "torch", _Torch())
    monkeypatch.setattr(offload_store, "_WORTH_MOVING", 64)
    monkeypatch.setattr(pinned_slabs, "_SLAB", 1 << 14)
    monkeypatch.setattr(offload_store, "_IN_FLIGHT", 2)
    monkeypatch.setattr(run.Together, "_activations", lambda _, number: "keep" if number == 1 else "offload")


class Residual(nn.Module):
    """Norms and activations, in place and not, and a way around them."""

    def __init__(self, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), activation())
        self.body = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), activation())
        self.more = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4))
        self.last = nn.Sequential(activation(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3, h, w) → (n, 4)."""
        x = self.first(x)
        around = x
        x = self.more(self.body(x))
        x += around
        found: Tensor = self.last(x)
        return found


def images(number: int, seed: int) -> Batch:
    """Return images and their classes."""
    by = torch.Generator().manual_seed(seed)
    return torch.randn(number, 3, 6, 6, generator=by, dtype=torch.float64), torch.randint(4, (number,), generator=by)


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean over samples."""
    return F.cross_entropy(model(batch[0]), batch[1])


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "relu in place": lambda: nn.ReLU(inplace=True),
    "silu in place": lambda: nn.SiLU(inplace=True),
    "hardswish": nn.Hardswish,
    "leaky": lambda: nn.LeakyReLU(0.2),
    "elu in place": lambda: nn.ELU(inplace=True),
    "gelu": nn.GELU,  # none of those that are made again
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_big_batch_whatever_waits_elsewhere(name: str) -> None:
    """Weights and statistics over several updates, from uneven micro-batches; host memory is used again."""
    torch.manual_seed(0)
    model = Residual(ACTIVATIONS[name]).double()
    twin = copy.deepcopy(model)
    optimizer = sgd(trained(twin))
    step = BigStep(model, sgd(trained(model)), cross_entropy, micro_batch_size=3)
    held = []
    for number in range(3):
        step(images(8, number))
        optimizer.zero_grad()
        cross_entropy(twin, images(8, number)).backward()
        optimizer.step()
        offload = step._together._offload
        assert offload is not None
        held.append(offload.held)
    assert distance(weights(model), weights(twin)) <= 1e-12
    assert distance(list(model.buffers()), list(twin.buffers())) <= 1e-12
    assert held[0] > 0
    assert len(set(held)) == 1


def test_what_follows_a_norm_is_made_again() -> None:
    """Of a convolution, a norm and a ReLU one tensor is kept, not two."""
    torch.manual_seed(0)
    stored: dict[str, int] = {}
    for name in ("relu", "gelu"):
        model = nn.Sequential(
            *(m for _ in range(4) for m in (nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), ACTIVATIONS[name]()))
        ).double()
        step = BigStep(
            model,
            sgd(trained(model)),
            lambda model, batch: model(batch).square().mean(),
            micro_batch_size=4,
            options=Options(check=False),
        )
        step(torch.randn(8, 3, 8, 8, dtype=torch.float64))
        offload = step._together._offload
        assert offload is not None
        stored[name] = offload.held
    assert stored["relu"] < 0.8 * stored["gelu"]


def test_a_change_in_place_of_what_the_loss_does_not_use() -> None:
    """As torch has it: whoever asks for what was changed is told, and nobody asks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)).double()
    twin = copy.deepcopy(model)

    def loss_fn(model: Any, batch: Batch) -> Tensor:
        hidden = model[1](model[0](batch[0])).exp()
        beside = hidden.exp()  # saves its result
        beside.mul_(3)
        return F.cross_entropy(model[2](hidden), batch[1])

    by = torch.Generator().manual_seed(0)
    batch = (torch.randn(16, 3, generator=by, dtype=torch.float64), torch.randint(4, (16,), generator=by))
    BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=8, options=Options(check=False))(batch)
    loss_fn(twin, batch).backward()
    sgd(trained(twin)).step()
    assert distance(weights(model), weights(twin)) <= 1e-12


@pytest.mark.parametrize("rows", [2, 64])
def test_a_change_in_place_is_noticed_as_torch_would(rows: int) -> None:
    """Whether the tensor was moved or too small for it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)).double()

    def loss_fn(model: Any, batch: Batch) -> Tensor:
        hidden = model[1](model[0](batch[0])).exp()
        out = model[2](hidden)
        hidden.mul_(3)
        return F.cross_entropy(out, batch[1])

    by = torch.Generator().manual_seed(0)
    batch = (torch.randn(2 * rows, 3, generator=by, dtype=torch.float64), torch.randint(4, (2 * rows,), generator=by))
    options = Options(check=False)
    step = BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=rows, options=options)
    before = weights(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(batch)
    assert distance(weights(model), before) == 0


def test_a_batch_that_the_host_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it starts; what is pinned already counts as there."""
    torch.manual_seed(0)
    model = Residual(nn.ReLU).double()
    step = BigStep(model, sgd(trained(model)), cross_entropy, micro_batch_size=3)
    step(images(8, 0))
    monkeypatch.setattr("bigbatch.lockstep.activations.host_available", lambda: 0)
    offload = step._together._offload
    assert offload is not None
    held = offload.held
    monkeypatch.setattr(Activations, "_bytes_of", lambda *_: held / 8 * 0.9)
    step(images(8, 1))
    monkeypatch.setattr(Activations, "_bytes_of", lambda *_: held / 8 * 1.1)
    with pytest.raises(OutOfMemory, match="Nothing was changed"):
        step(images(8, 2))


# What may be saved, and how.

Between = Callable[[nn.Module, Tensor], Tensor]


def _in_place_by_a_view(_: nn.Module, x: Tensor) -> Tensor:
    seen = x.view(x.shape)
    F.silu(seen, inplace=True)
    return x + seen


def _added_in_place(_: nn.Module, x: Tensor) -> Tensor:
    doubled = x * 2
    x += doubled
    return F.relu(x, inplace=True)


def _with_its_conjugate(convolution: nn.Module, x: Tensor) -> Tensor:
    found = torch.fft.fft2(F.relu(x))
    power: Tensor = convolution((found.conj() * found).real)
    return power * found.conj().imag


BETWEEN: dict[str, Between] = {
    "an activation in a checkpoint": lambda c, x: checkpoint(lambda x: c(F.relu(x)), x, use_reentrant=False),
    "an activation in a reentrant checkpoint": lambda c, x: checkpoint(lambda x: c(F.relu(x)), x, use_reentrant=True),
    "a conjugate": _with_its_conjugate,
    "in place by a view": _in_place_by_a_view,
    "added in place": _added_in_place,
    "two activations of one norm": lambda c, x: c(F.relu(F.relu(x))) + F.silu(x) * x,
    "turned": lambda c, x: c(F.relu(x.transpose(2, 3))),
    "not dense": lambda c, x: c(F.elu(x[:, :, ::2, ::2])),
    "spread": lambda c, x: c(F.hardswish(x * x.mean((2, 3), keepdim=True).expand_as(x))),
    "channels last": lambda c, x: c(F.mish(x.contiguous(memory_format=torch.channels_last), inplace=True)),
}


class Between2Norms(nn.Module):
    """Something between two norms."""

    def __init__(self, between: Between) -> None:
        super().__init__()
        self.below = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4))
        self.inner, self.between = nn.Conv2d(4, 4, 3, padding=1), between
        self.above, self.head = nn.BatchNorm2d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3, h, w) → (n, 4)."""
        found: Tensor = self.head(self.above(self.between(self.inner, self.below(x))).mean((2, 3)))
        return found


@pytest.mark.parametrize("size", [3, 1])  # few micro-batches, and more than hold what they need
@pytest.mark.parametrize("name", BETWEEN)
def test_whatever_is_saved_between_two_norms(name: str, size: int) -> None:
    """The big batch's update, from windows whose sizes come again in another order."""
    torch.manual_seed(0)
    model = Between2Norms(BETWEEN[name]).double()
    twin = copy.deepcopy(model)
    optimizer = sgd(trained(twin))
    step = BigStep(model, sgd(trained(model)), cross_entropy, micro_batch_size=size, options=Options(check=False))
    for number, samples in enumerate([8, 8, 11, 8, 5, 11]):
        step(images(samples, number))
        optimizer.zero_grad()
        cross_entropy(twin, images(samples, number)).backward()
        optimizer.step()
        assert distance(weights(model), weights(twin)) <= 1e-11
    assert step._together._offload is not None


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind(fails: bool) -> None:
    """Neither what was made again last nor what was to be made again, also where a forward has failed."""

    class Failing(Residual):
        def forward(self, x: Tensor) -> Tensor:
            found = super().forward(x)
            if fails and len(x) == 2:
                raise ValueError("mine")
            return found

    torch.manual_seed(0)
    model = Failing(nn.ReLU).double()
    step = BigStep(model, sgd(trained(model)), cross_entropy, micro_batch_size=3, options=Options(check=False))
    with pytest.raises(ValueError, match="mine") if fails else nullcontext():
        step(images(8, 0))
    offload = step._together._offload
    assert offload is not None
    recipes = offload.recipes
    assert not any([offload._outs, offload._saved, offload._leaving, offload._absent, recipes._known, recipes._latest])
    assert not any([offload._fetcher.there, offload._coming_home.there, offload._holdings._of])
