"""Activations that leave and come back: the big batch, however late copies are made; which go, and in which order."""

import copy
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bigbatch import BigStep, Options, across
from bigbatch.errors import OutOfMemory
from bigbatch.lockstep import run
from bigbatch.lockstep.offload_evict import Holdings
from bigbatch.lockstep.offload_store import HostMemory
from tests.support.coupled import assert_big_batch
from tests.support.late_streams import offload_late
from tests.support.reference import distance, sgd, trained, weights

Batch = tuple[Tensor, Tensor]
_SLAB = 1 << 14


@pytest.fixture(autouse=True)
def seen(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Offload on the host; who went, who came back, and who was there before that."""
    return offload_late(monkeypatch)


class Residual(nn.Module):
    """Norms and activations, in place and not, and a way around them."""

    def __init__(self, activation: Callable[[], nn.Module] = nn.ReLU) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), activation())
        self.body = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), activation())
        self.more = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4))
        self.last = nn.Sequential(activation(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 4))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3, h, w) → (n, 4)."""
        x = self.first(x)
        around = x
        x = self.more(self.body(x))
        x += around
        found: Tensor = self.last(x)
        return found


class Parted(Residual):
    """Memory that is copied in two views: it must not go when all of it was copied, while a part of it still is."""

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3, h, w) → (n, 4)."""
        x = self.first(x)
        y = self.more[0](x)
        side = x[:, :2].square().mean(1, keepdim=True)
        found: Tensor = self.last(self.body(self.more[1](y)) + x + side)
        return found


class Skipping(Residual):
    """Windows that ask in another order: what was fetched for nothing is there before its memory is given out again."""

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3, h, w) → (n, 4)."""
        x = self.first(x)
        side, y = self.more(x), self.body(x)
        found: Tensor = self.last(y if switch[0] else y + side)
        return found


switch = [False]


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
    "leaky": lambda: nn.LeakyReLU(0.2),
    "elu in place": lambda: nn.ELU(inplace=True),
    "gelu": nn.GELU,  # none of those that are made again
}


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


BETWEEN: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
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

    def __init__(self, between: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.below = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4))
        self.inner, self.between = nn.Conv2d(4, 4, 3, padding=1), between
        self.above, self.head = nn.BatchNorm2d(4), nn.Linear(4, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3, h, w) → (n, 4)."""
        found: Tensor = self.head(self.above(self.between(self.inner, self.below(x))).mean((2, 3)))
        return found


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: lambda name=name: Residual(ACTIVATIONS[name]) for name in ACTIVATIONS},  # type: ignore[misc]
    **{name: lambda name=name: Between2Norms(BETWEEN[name]) for name in BETWEEN},  # type: ignore[misc]
    "two views": lambda: Parted(nn.GELU),
    "another order": lambda: Skipping(nn.GELU),
}


def switching(model: nn.Module, batch: Batch) -> Tensor:
    """Every other window takes a short cut."""
    switch[0] = bool((batch[0][:, 0, 0, 0] == 0).all())
    return cross_entropy(model, batch)


@pytest.mark.parametrize("waiting", [0, 0.8])  # times one micro-batch, that may wait on the device
@pytest.mark.parametrize("name", MODELS)
def test_the_big_batch_whatever_waits_elsewhere(name: str, waiting: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """From windows whose sizes come again in another order, in few micro-batches and in many."""
    monkeypatch.setattr(run, "_WAITING", waiting)
    batches = [images(samples, number) for number, samples in enumerate([8, 8, 11, 8])]
    batches[2][0][:, 0, 0, 0] = 0
    loss = switching if name == "another order" else cross_entropy
    for size in (3, 1):
        assert_big_batch(MODELS[name], loss, batches, size, check=False, optimizer=slow)


def slow(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD that leaves rounding where it is."""
    return torch.optim.SGD(parameters, lr=0.1)


def test_what_comes_back_does_so_ahead_of_time(seen: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all leave, from the second window on; where some stay, each comes back to memory that is there."""
    for waiting, samples in ((0.0, 13), (0.8, 24)):
        monkeypatch.setattr(run, "_WAITING", waiting)
        model, parts = Residual(), -(-samples // 2)
        step = BigStep(model, sgd(trained(model)), cross_entropy, micro_batch_size=2, options=Options(check=False))
        for number in range(3):
            seen.clear()
            step(images(samples, number))
            assert number or not seen["ahead"]  # the first window has shown in which order
        assert seen["went"] >= seen["came"] > 0
        if waiting:
            assert seen["came"] < 0.5 * parts * 3 * 2
            assert seen["ahead"] == seen["came"]
        else:  # one tensor of three norms each, forward and backward; not the first at each norm: nobody runs before it
            assert seen["came"] >= 6 * (parts - 2)
            assert seen["ahead"] > 0.25 * seen["came"]


def held_after(step: BigStep) -> int:
    """Return how many bytes of host memory a step holds."""
    offload = step._together._offload
    assert offload is not None
    return offload.memory.held


def test_host_memory_serves_again_and_what_follows_a_norm_is_made_again() -> None:
    """Of a convolution, a norm and a ReLU one tensor is kept, not two."""
    stored: dict[str, int] = {}
    for name in ("relu", "gelu"):
        layers = [(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), ACTIVATIONS[name]()) for _ in range(4)]
        model = nn.Sequential(*(each for layer in layers for each in layer)).double()
        loss = lambda model, batch: model(batch).square().mean()  # noqa: E731
        step = BigStep(model, sgd(trained(model)), loss, micro_batch_size=4, options=Options(check=False))
        held = []
        for _ in range(3):
            step(torch.randn(8, 3, 8, 8, dtype=torch.float64))
            held.append(held_after(step))
        assert len(set(held)) == 1
        stored[name] = held[0]
    assert 0 < stored["relu"] <= 0.5 * stored["gelu"]  # 0.67 if ReLU stored its result


@pytest.mark.parametrize("rows", [2, 64])
def test_changes_in_place_are_noticed_as_torch_would(rows: int) -> None:
    """Whether the tensor was moved or too small for it; whoever does not ask for it is not told."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)).double()

    def loss_fn(model: Any, batch: Batch, *, beside: bool = True) -> Tensor:
        hidden = model[1](model[0](batch[0])).exp()
        out = model[2](hidden)
        (hidden.exp() if beside else hidden).mul_(3)
        return F.cross_entropy(out, batch[1])

    by = torch.Generator().manual_seed(0)
    batch = (torch.randn(2 * rows, 3, generator=by, dtype=torch.float64), torch.randint(4, (2 * rows,), generator=by))
    assert_big_batch(make, loss_fn, [batch], rows, check=False)
    model, options = make(), Options(check=False)
    loss = lambda model, batch: loss_fn(model, batch, beside=False)  # noqa: E731
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        BigStep(model, sgd(trained(model)), loss, micro_batch_size=rows, options=options)(batch)
    assert distance(weights(model), weights(make())) == 0


def test_a_batch_that_the_host_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it starts; what is pinned already counts as there."""
    model = Residual()
    step = BigStep(model, sgd(trained(model)), cross_entropy, micro_batch_size=3)
    step(images(8, 0))
    monkeypatch.setattr("bigbatch.lockstep.activations.host_available", lambda: 1 << 14)
    step(images(8, 1))
    with pytest.raises(OutOfMemory, match="Nothing was changed"):
        step(images(800, 2))


# Where all leave: what must stay, and what must not be lost.


def two_norms() -> nn.Sequential:
    """Return a small model."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.BatchNorm1d(16)).double()


class Scored(torch.autograd.Function):
    """Gives a tensor of everybody's away as a gradient: its weight, or one that is always the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Add up products."""
        ctx.save_for_backward(x, weight)
        return (x * weight).sum()

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor, Tensor | None]:
        """Give the weight."""
        x, weight = ctx.saved_tensors
        return weight, above[0] * x if ctx.needs_input_grad[1] else None


class Scoring(nn.Module):
    """A score of each micro-batch; of the whole batch, in parts of two."""

    def __init__(self, *, learned: bool) -> None:
        super().__init__()
        self.below = two_norms()
        self.weight = nn.Parameter(torch.randn(2, 16, dtype=torch.float64), requires_grad=learned)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 6) → a score."""
        hidden = self.below(x)
        if len(x) > 2:
            return (hidden * self.weight.repeat(len(x) // 2, 1)).sum()
        found: Tensor = Scored.apply(hidden, self.weight)  # type: ignore[no-untyped-call]
        return found


class Twice(nn.Module):
    """A shortcut's gradient goes out once more after another was added to it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.two = two_norms(), two_norms(), nn.Linear(16, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        """(n, 6) → (n, 16)."""
        around = self.stem(x)
        y = around + self.one(self.two(around)) + self.one[0](self.two(around))
        found: Tensor = y + self.one(self.two(y))
        return found


class Logging(nn.Module):
    """A value that nothing goes back through, as one that is logged, may have saved what is changed later."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.around, self.below, self.norm = nn.Linear(6, 16), nn.Linear(6, 16), nn.BatchNorm1d(16)
        self.size: Tensor | None = None
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """(n, 6) → (n, 16)."""
        around = self.around(x)
        self.size = (around * around).mean().detach()
        (around * around).mean()
        around.add_(1)
        found: Tensor = self.norm(self.below(x)) + around
        return found


def mixing(model: Any, batch: Batch, *, gathers: bool) -> Tensor:
    """A value across micro-batches inside the model, and its gradient, which goes straight into a norm."""
    first, norm, second, last = model
    hidden = norm(first(batch[0]))
    if gathers:
        together = across.gather(hidden)
        mixed = torch.sigmoid(hidden @ together.T / 9) @ together
    else:
        parts = across.sum(torch.stack(hidden.split(2)).sum(0))
        mixed = hidden * parts.repeat(len(hidden) // 2, 1)
    found: Tensor = last(second(mixed * mixed))
    return found.pow(2).sum(1).sqrt().mean()


def to_target(model: Any, batch: Batch) -> Tensor:
    """Compare with a target."""
    return F.mse_loss(model(batch[0]), batch[1])


STAYING: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Batch], Tensor]]] = {
    "what is gathered": (two_norms, lambda m, b: mixing(m, b, gathers=True)),
    "what is summed": (two_norms, lambda m, b: mixing(m, b, gathers=False)),
    "a sum whose gradient goes into a norm": (
        two_norms,
        lambda m, b: across.once(across.sum(torch.stack(m(b[0]).split(2)).sum(0)).pow(4).mean()),
    ),
    "a weight that is a gradient": (lambda: Scoring(learned=True), lambda m, b: across.once(across.sum(m(b[0])))),
    "a gradient of several": (lambda: Scoring(learned=False), lambda m, b: across.once(across.sum(m(b[0])))),
    "what is added to a gradient": (Twice, to_target),
    "what was changed after it was saved": (Logging, to_target),
}


@pytest.mark.filterwarnings("ignore:this loss is made of values of all")
@pytest.mark.parametrize("how", STAYING)
def test_what_stays_and_what_is_not_lost(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over several updates, where all leave that can."""
    monkeypatch.setattr(run, "_WAITING", 0)
    make, loss = STAYING[how]
    by = torch.Generator().manual_seed(0)
    batch = tuple(torch.randn(12, size, generator=by, dtype=torch.float64) for size in (6, 16))
    assert_big_batch(make, loss, [batch] * 3, 2, check=False, optimizer=slow)


def test_the_casts_of_weights_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast makes them once for all micro-batches."""
    monkeypatch.setattr(run, "_WAITING", 0)
    model = Residual().float()
    twin = copy.deepcopy(model)
    inputs, labels = images(16, 0)
    batch = inputs.float(), labels
    step = BigStep(model, sgd(trained(model)), cross_entropy, micro_batch_size=2, options=Options(check=False))
    with torch.autocast("cpu", torch.bfloat16):
        step(batch)
        cross_entropy(twin, batch).backward()
    sgd(trained(twin)).step()
    assert distance(weights(model), weights(twin)) <= 1e-2  # what bf16 rounds


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


# Failures.


def _raise(_: Tensor) -> None:
    raise ValueError("mine")


class Failing(Residual):
    """Fails for a single sample, where it is told to."""

    fails = ""

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3, h, w) → (n, 4)."""
        hidden = self.first[0](x)
        found.append((hidden, hidden.detach().clone()))
        around = self.first[2](self.first[1](hidden))
        if self.fails == "forward" and len(x) == 1:
            raise ValueError("mine")
        y: Tensor = self.last(self.more(self.body(around)) + around)
        if self.fails == "backward" and len(x) == 1:
            around.register_hook(_raise)
        return y


found: list[tuple[Tensor, Tensor]] = []


@pytest.mark.parametrize("waiting", [0, 0.8])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_window_after_one_that_failed(where: str, waiting: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was on its way is through before its memory serves again, and nobody is left with another's, or none."""
    monkeypatch.setattr(run, "_WAITING", waiting)
    model = Failing()
    twin, optimizer = copy.deepcopy(model), sgd(trained(model))
    plain = sgd(trained(twin))
    step = BigStep(model, optimizer, cross_entropy, micro_batch_size=2, options=Options(check=False))
    for number in range(6):
        del found[:]
        model.fails = where if number % 2 else ""
        with pytest.raises(ValueError, match="mine") if model.fails else nullcontext():
            step(images(9, number))
        if model.fails:
            assert len(found) >= 5
            assert all(torch.equal(*each) for each in found)
            continue
        plain.zero_grad()
        cross_entropy(twin, images(9, number)).backward()
        plain.step()
        assert distance(weights(model), weights(twin)) <= 1e-12


@given(st.lists(st.integers(1, 3 * _SLAB), min_size=1, max_size=200))
def test_pinned_memory_is_handed_out_once_and_serves_again(sizes: list[int]) -> None:
    """Pieces do not overlap, little is left at the ends of slabs, and the next window has the same memory."""
    memory, held = HostMemory(), set[int]()
    for again in (sizes, sizes[:7], sizes):
        memory.begin_anew()
        pieces = [memory.like(torch.empty(size, dtype=torch.uint8), size) for size in again]
        spans = sorted((piece.data_ptr(), piece.data_ptr() + piece.numel()) for piece in pieces)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
        assert [piece.numel() for piece in pieces] == again
        held.add(memory.held)
    assert held == {memory.held}
    assert memory.held <= 1.3 * sum(size + 512 for size in sizes) + 16 * _SLAB
