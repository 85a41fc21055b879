"""Micro-batches that wait at a norm without their memory, on a CPU: streams and events do nothing here."""

import copy
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from bigbatch import BigStep, Options, across
from bigbatch.lockstep import offload_store, pinned_slabs, run
from bigbatch.lockstep.offload_evict import Holdings
from bigbatch.lockstep.offload_fetch import Held, Homecoming
from bigbatch.lockstep.round import Round
from tests.support.reference import distance, sgd, trained, weights
from tests.test_offloading import (
    ACTIVATIONS,
    BETWEEN,
    Between2Norms,
    Residual,
    _offloaded,  # noqa: F401 - a fixture
    cross_entropy,
    images,
)

Batch = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True)
def _crowded(monkeypatch: pytest.MonkeyPatch, _offloaded: None) -> None:  # noqa: F811 - after that one
    """Have no room for anyone who waits."""
    monkeypatch.setattr(run, "_WAITING", 0)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count who goes, who comes back, and who was there before that."""
    counted: Counter[str] = Counter()
    empty, come_home = Homecoming.empty, Homecoming.come_home

    def emptied(self: Homecoming, number: int, home: Held) -> None:
        empty(self, number, home)
        storage = home.taken()
        if storage is not None:
            assert not storage.nbytes()
            counted["went"] += 1

    def came(self: Homecoming, number: int) -> Any:
        counted["ahead"] += number in self.there
        found = come_home(self, number)
        counted["came"] += found is not None
        return found

    monkeypatch.setattr(Homecoming, "empty", emptied)
    monkeypatch.setattr(Homecoming, "come_home", came)
    return counted


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_big_batch_when_all_leave(name: str, size: int, seen: Counter[str]) -> None:
    """Weights and statistics over several updates, of uneven micro-batches; what comes back does so ahead of time."""
    torch.manual_seed(0)
    model = Residual(ACTIVATIONS[name]).double()
    twin = copy.deepcopy(model)
    optimizer = sgd(trained(twin))
    step = BigStep(model, sgd(trained(model)), cross_entropy, micro_batch_size=size, options=Options(check=False))
    for number in range(3):
        assert not seen["ahead"] or number == 2  # the first window has shown in which order
        seen.clear()
        step(images(13, number))
        optimizer.zero_grad()
        cross_entropy(twin, images(13, number)).backward()
        optimizer.step()
        # One tensor of three norms each, forward and backward, some with that of the shortcut: but for who came last.
        assert seen["came"] >= 6 * (-(-13 // size) - 2)
        assert seen["went"] >= seen["came"]
    assert seen["ahead"] > 0.25 * seen["came"]  # not the first at each norm: nobody runs before it
    assert distance(weights(model), weights(twin)) <= 1e-12
    assert distance(list(model.buffers()), list(twin.buffers())) <= 1e-12


def test_where_some_stay_those_who_left_are_fetched_ahead(seen: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """While the micro-batches before them run: each comes back to memory that is there."""
    monkeypatch.setattr(run, "_WAITING", 0.8)
    torch.manual_seed(0)
    model = Residual(nn.ReLU).double()
    step = BigStep(model, sgd(trained(model)), cross_entropy, micro_batch_size=2, options=Options(check=False))
    for number in range(3):
        seen.clear()
        step(images(24, number))
    assert 0 < seen["came"] < 0.5 * 12 * 3 * 2
    assert seen["ahead"] == seen["came"]


@pytest.mark.parametrize("name", BETWEEN)
def test_whatever_is_held_between_two_norms(name: str) -> None:
    """The big batch's update, from windows whose sizes come again in another order."""
    torch.manual_seed(0)
    model = Between2Norms(BETWEEN[name]).double()
    twin = copy.deepcopy(model)
    optimizer = sgd(trained(twin))
    step = BigStep(model, sgd(trained(model)), cross_entropy, micro_batch_size=2, options=Options(check=False))
    for number, samples in enumerate([8, 8, 11, 8, 5, 11]):
        step(images(samples, number))
        optimizer.zero_grad()
        cross_entropy(twin, images(samples, number)).backward()
        optimizer.step()
        assert distance(weights(model), weights(twin)) <= 1e-11


def two_norms() -> nn.Sequential:
    """Return a small model."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.BatchNorm1d(16)).double()


@pytest.mark.parametrize("shared", ["gathered", "summed"])
def test_what_all_micro_batches_share_stays(shared: str) -> None:
    """A value across micro-batches inside the model, and its gradient, which goes straight into a norm."""

    def forward(model: Any, x: Tensor, *, one: bool) -> Tensor:
        first, norm, second, last = model
        hidden = norm(first(x))
        if shared == "gathered":
            together = hidden if one else across.gather(hidden)
            mixed = torch.sigmoid(hidden @ together.T / 9) @ together
        else:
            parts = torch.stack(hidden.split(2)).sum(0) if one else across.sum(hidden)
            mixed = hidden * (parts.repeat(len(x) // 2, 1) if one else parts)
        found: Tensor = last(second(mixed * mixed))
        return found.pow(2).sum(1).sqrt().mean()

    model = two_norms()
    twin = copy.deepcopy(model)
    x = torch.randn(12, 6, dtype=torch.float64)
    step = BigStep(
        model,
        sgd(trained(model)),
        lambda model, batch: forward(model, batch, one=False),
        micro_batch_size=2,
        options=Options(check=False, activations="offload"),
    )
    for _ in range(2):
        step(x)
    optimizer = sgd(trained(twin))
    for _ in range(2):
        optimizer.zero_grad()
        forward(twin, x, one=True).backward()
        optimizer.step()
    assert distance(weights(model), weights(twin)) <= 1e-12


def test_a_sum_whose_gradient_goes_into_a_norm() -> None:
    """All micro-batches get the same gradient: each its own copy."""
    model = two_norms()
    twin = copy.deepcopy(model)
    x = torch.randn(12, 6, dtype=torch.float64)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return across.once(across.sum(model(batch)).pow(4).mean())

    BigStep(model, sgd(trained(model)), loss, micro_batch_size=2, options=Options(check=False))(x)
    optimizer = sgd(trained(twin))
    torch.stack(twin(x).split(2)).sum(0).pow(4).mean().backward()
    optimizer.step()
    assert distance(weights(model), weights(twin)) <= 1e-12


def test_a_weight_that_is_a_gradient_stays() -> None:
    """A function may give its weight away as a gradient: that is everybody's."""

    class Scored(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return (x * weight).sum()

        @staticmethod
        def backward(ctx: Any, above: Tensor) -> tuple[Tensor, Tensor]:
            x, weight = ctx.saved_tensors
            return weight, above * x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.below, self.weight = two_norms(), nn.Parameter(torch.randn(2, 16, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = Scored.apply(self.below(x), self.weight)  # type: ignore[no-untyped-call]
            return found

    model = Model()
    twin = copy.deepcopy(model)
    x = torch.randn(12, 6, dtype=torch.float64)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return across.once(across.sum(model(batch)))

    BigStep(model, sgd(trained(model)), loss, micro_batch_size=2, options=Options(check=False))(x)
    optimizer = sgd(trained(twin))
    (twin.below(x) * twin.weight.repeat(6, 1)).sum().backward()
    optimizer.step()
    assert distance(weights(model), weights(twin)) <= 1e-12


def test_a_gradient_that_several_come_with_stays() -> None:
    """A function may give the same tensor as a gradient to every micro-batch."""
    fixed = torch.randn(2, 16, dtype=torch.float64)

    class Pushed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            del ctx
            return x.sum()

        @staticmethod
        def backward(ctx: Any, above: Tensor) -> Tensor:
            del ctx, above
            return fixed

    model = two_norms()
    twin = copy.deepcopy(model)
    x = torch.randn(24, 6, dtype=torch.float64)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return across.once(across.sum(Pushed.apply(model(batch))))  # type: ignore[no-untyped-call]

    BigStep(model, sgd(trained(model)), loss, micro_batch_size=2, options=Options(check=False))(x)
    optimizer = sgd(trained(twin))
    (twin(x) * fixed.repeat(12, 1)).sum().backward()
    optimizer.step()
    assert distance(weights(model), weights(twin)) <= 1e-12


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_window_that_fails_gives_back_what_it_took(where: str) -> None:
    """Nobody is left without memory, and the next window is the big batch's."""
    found: list[Tensor] = []

    class Failing(Residual):
        fails = True

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first[0](x)
            found.append(hidden)
            around = self.first[2](self.first[1](hidden))
            if self.fails and where == "forward" and len(x) == 1:
                raise ValueError("mine")
            y: Tensor = self.last(self.more(self.body(around)) + around)
            if self.fails and where == "backward" and len(x) == 1:
                around.register_hook(_raise)
            return y

    torch.manual_seed(0)
    model = Failing(nn.ReLU).double()
    twin = copy.deepcopy(model)
    step = BigStep(model, sgd(trained(model)), cross_entropy, micro_batch_size=2, options=Options(check=False))
    step(images(8, 0))
    del found[:]
    with pytest.raises(ValueError, match="mine"):
        step(images(9, 1))
    assert len(found) >= 5
    assert all(each.untyped_storage().nbytes() for each in found)
    model.fails = twin.fails = False
    optimizer = sgd(trained(twin))
    step(images(9, 2))
    for number in (0, 2):
        optimizer.zero_grad()
        cross_entropy(twin, images(9 if number else 8, number)).backward()
        optimizer.step()
    assert distance(weights(model), weights(twin)) <= 1e-12


def _raise(_: Tensor) -> None:
    raise ValueError("mine")


@given(st.integers(2, 70), st.floats(0, 1.5))
def test_as_many_leave_as_must(size: int, room: float) -> None:
    """Of all micro-batches, not next to each other where that can be; what stays fits."""
    tensors = [torch.ones(32) for _ in range(size)]
    limit = int(room * size * 128)
    holdings = Holdings(limit, tuple)
    leaves = []
    for number, tensor in enumerate(tensors):
        holdings.add(number, tensor)
        leaves.append(bool(holdings.leaving(number, size, 0)))
    stay = size - sum(leaves)
    assert stay * 128 <= limit + 128
    assert (stay + 1) * 128 > limit or stay == size
    if 2 * limit >= size * 128:
        assert not any(a and b for a, b in pairwise(leaves))


def test_who_is_not_asked_to_leave() -> None:
    """A part of other memory, memory that is gone, what is kept, and all where there is no limit."""
    whole, kept = torch.ones(64), torch.ones(32)
    holdings = Holdings(0, lambda: [kept])
    holdings.add(0, whole[:32])
    holdings.add(0, whole[32:])
    holdings.add(0, torch.ones(5))
    holdings.add(0, kept)
    holdings.add(0, torch.ones(4, dtype=torch.complex64).conj())
    assert holdings.leaving(0, 2, 0) == []
    holdings.add(0, whole, 7)
    assert [each.number for each in holdings.leaving(0, 2, 0)] == [7]
    unlimited = Holdings(None, tuple)
    unlimited.add(0, whole)
    assert unlimited.leaving(0, 2, 0) == []


def test_what_is_added_to_a_gradient_is_not_lost() -> None:
    """A shortcut's gradient goes out once more after another was added to it in place."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.one, self.two = two_norms(), two_norms(), nn.Linear(16, 6)
            self.two.double()

        def forward(self, x: Tensor) -> Tensor:
            around = self.stem(x)
            y = around + self.one(self.two(around)) + self.one[0](self.two(around))
            found: Tensor = y + self.one(self.two(y))
            return found

    model = Twice()
    twin = copy.deepcopy(model)
    x, target = torch.randn(12, 6, dtype=torch.float64), torch.randn(12, 16, dtype=torch.float64)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    step = BigStep(model, sgd(trained(model)), loss, micro_batch_size=2, options=Options(check=False))
    optimizer = sgd(trained(twin))
    for _ in range(3):
        step((x, target))
        optimizer.zero_grad()
        loss(twin, (x, target)).backward()
        optimizer.step()
    assert distance(weights(model), weights(twin)) <= 1e-12


def test_the_casts_of_weights_stay() -> None:
    """Autocast makes them once for all micro-batches."""
    torch.manual_seed(0)
    model = Residual(nn.ReLU)
    twin = copy.deepcopy(model)
    inputs, labels = images(16, 0)
    batch = inputs.float(), labels
    step = BigStep(model, sgd(trained(model)), cross_entropy, micro_batch_size=2, options=Options(check=False))
    optimizer = sgd(trained(twin))
    with torch.autocast("cpu", torch.bfloat16):
        step(batch)
        cross_entropy(twin, batch).backward()
    optimizer.step()
    assert distance(weights(model), weights(twin)) <= 1e-2  # what bf16 rounds


def test_what_was_changed_after_it_was_saved_is_not_as_its_copy() -> None:
    """A value that nothing goes back through, as one that is logged, may have saved it before."""

    class Logging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.around, self.below, self.norm = nn.Linear(6, 16), nn.Linear(6, 16), nn.BatchNorm1d(16)
            self.size: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            around = self.around(x)
            self.size = (around * around).mean()
            around.add_(1)
            found: Tensor = self.norm(self.below(x)) + around
            return found

    torch.manual_seed(0)
    model = Logging().double()
    twin = copy.deepcopy(model)
    batch = torch.randn(12, 6, dtype=torch.float64), torch.randn(12, 16, dtype=torch.float64)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    BigStep(model, sgd(trained(model)), loss, micro_batch_size=2, options=Options(check=False))(batch)
    optimizer = sgd(trained(twin))
    loss(twin, batch).backward()
    optimizer.step()
    assert distance(weights(model), weights(twin)) <= 1e-12


def test_a_host_without_room_leaves_nobody_without_memory(seen: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what a micro-batch holds, one piece goes, and there is no room for the next."""
    monkeypatch.setattr(offload_store, "_IN_FLIGHT", 1)
    like = pinned_slabs.HostMemory.like
    monkeypatch.setattr(pinned_slabs.HostMemory, "like", lambda *given: like(*given) if given[2] < 512 else _full())
    offload = offload_store.Offload(torch.device("cpu"))
    worker = SimpleNamespace(number=0, size=2, round=Round((1, 1)))
    pieces = [torch.ones(64), torch.ones(64), torch.ones(128)]
    with offload.window(0):
        for piece in pieces:
            offload._holdings.add(0, piece)
        with pytest.raises(RuntimeError, match="full"), offload.waiting(worker):
            pass
    assert seen["went"] == seen["came"] == 1
    assert [piece.untyped_storage().nbytes() for piece in pieces] == [256, 256, 512]
    assert all(piece.eq(1).all() for piece in pieces)


def _full() -> Tensor:
    raise RuntimeError("full")


def test_what_stays_is_told_without_a_walk_through_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes longer than much else, and micro-batches wait at every norm."""
    walks: Counter[int] = Counter()
    walk = nn.Module.named_modules

    def counting(self: nn.Module, *given: Any, **named: Any) -> Any:
        walks[number] += 1
        return walk(self, *given, **named)

    monkeypatch.setattr(nn.Module, "named_modules", counting)
    torch.manual_seed(0)
    for number in (6, 12):
        model = Residual(nn.ReLU).double()
        step = BigStep(model, sgd(trained(model)), cross_entropy, micro_batch_size=2, options=Options(check=False))
        step(images(2 * number, 0))
    assert walks[6] == walks[12]
