"""Activations that leave and come back: the big batch, however late copies are made; which go, and in which order."""

import copy
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bigbatch import across
from bigbatch.errors import OutOfMemory
from bigbatch.lockstep import run
from bigbatch.lockstep.offload_evict import Holdings
from bigbatch.lockstep.offload_store import HostMemory
from tests.support.coupled import Make, assert_big_batch, assert_refused, held_on_host, model, step_of
from tests.support.late_streams import offload_late
from tests.support.reference import distance, sgd, trained, weights
from tests.support.samples import generator, seeded
from tests.support.samples import rows as samples_of

Batch = tuple[Tensor, Tensor]
_SLAB = 1 << 14


@pytest.fixture(autouse=True)
def seen(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Offload on the host; who went, who came back, and who was there before that."""
    return offload_late(monkeypatch)


def residual(m: Any, x: Tensor) -> Any:
    """Norms and activations, in place and not, and a way around them."""
    x = m.first(x)
    around = x
    x = m.more(m.body(x))
    x += around
    return m.last(x)


def in_two_views(m: Any, x: Tensor) -> Any:
    """Memory that is copied in two views: it must not go when all of it was copied, while a part of it still is."""
    x = m.first(x)
    y = m.more[0](x)
    return m.last(m.body(m.more[1](y)) + x + x[:, :2].square().mean(1, keepdim=True))


def skipping(m: Any, x: Tensor) -> Any:
    """Windows that ask in another order: what was fetched for nothing is there before its memory is given out again."""
    x = m.first(x)
    side, y = m.more(x), m.body(x)
    return m.last(y if switch[0] else y + side)


switch = [False]


def layer(*more: nn.Module, inputs: int = 4) -> nn.Module:
    """A convolution and a norm."""
    return nn.Sequential(nn.Conv2d(inputs, 4, 3, padding=1), nn.BatchNorm2d(4), *more)


def layered(how: Callable[[Any, Tensor], Any] = residual, activation: Callable[[], nn.Module] = nn.ReLU) -> Make:
    """Make a model of a few layers, with an activation."""
    return model(
        how,
        first=lambda: layer(activation(), inputs=3),
        body=lambda: layer(activation()),
        more=layer,
        last=lambda: nn.Sequential(activation(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 4)),
    )


def images(number: int, seed: int) -> Batch:
    """Return images and their classes."""
    by = generator(seed)
    return torch.randn(number, 3, 6, 6, generator=by, dtype=torch.float64), torch.randint(4, (number,), generator=by)


def cross_entropy(m: Any, batch: Batch) -> Tensor:
    """Return the mean over samples. Every other window takes a short cut."""
    switch[0] = bool((batch[0][:, 0, 0, 0] == 0).all())
    return F.cross_entropy(m(batch[0]), batch[1])


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


def between_norms(between: Callable[[nn.Module, Tensor], Tensor]) -> Make:
    """Make a model with something between two norms."""
    return model(
        lambda m, x: m.head(m.above(between(m.inner, m.below(x))).mean((2, 3))),
        below=lambda: layer(inputs=3),
        inner=lambda: nn.Conv2d(4, 4, 3, padding=1),
        above=lambda: nn.BatchNorm2d(4),
        head=lambda: nn.Linear(4, 4),
    )


MODELS: dict[str, Make] = {
    **{name: layered(residual, activation) for name, activation in ACTIVATIONS.items()},
    **{name: between_norms(between) for name, between in BETWEEN.items()},
    "two views": layered(in_two_views, nn.GELU),
    "another order": layered(skipping, nn.GELU),
}


@pytest.mark.parametrize("waiting", [0, 0.8])  # times one micro-batch, that may wait on the device
@pytest.mark.parametrize("name", MODELS)
def test_the_big_batch_whatever_waits_elsewhere(name: str, waiting: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """From windows whose sizes come again in another order, in few micro-batches and in many."""
    monkeypatch.setattr(run, "_WAITING", waiting)
    batches = [images(samples, number) for number, samples in enumerate([8, 8, 11, 8])]
    batches[2][0][:, 0, 0, 0] = 0
    for size in (3, 1):
        assert_big_batch(MODELS[name], cross_entropy, batches, size, check=False, optimizer=slow)


def slow(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD that leaves rounding where it is."""
    return torch.optim.SGD(parameters, lr=0.1)


def test_what_comes_back_does_so_ahead_of_time(seen: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all leave, most of it; where some stay, each comes back to memory that is there."""
    for waiting, samples in ((0.0, 13), (0.8, 24)):
        monkeypatch.setattr(run, "_WAITING", waiting)
        step, parts = step_of(layered()(), cross_entropy, 2, check=False), -(-samples // 2)
        for number in range(3):
            seen.clear()
            step(images(samples, number))
            assert seen["went"] >= seen["came"] > 0
            assert not seen["most"]  # bytes that are back ahead, beyond twice the largest
            if waiting:
                assert seen["came"] < 0.5 * parts * 3 * 2
                assert seen["ahead"] == seen["came"]
            else:  # a tensor of three norms each, forward and backward; not the first at each norm: nobody is before it
                assert seen["came"] >= 6 * (parts - 2)
                assert seen["ahead"] > 0.25 * seen["came"]


def test_host_memory_serves_again_and_what_follows_a_norm_is_made_again() -> None:
    """Of a convolution, a norm and a ReLU one tensor is kept, not two."""
    stored: dict[str, int] = {}
    for name in ("relu", "gelu"):
        layers = [(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), ACTIVATIONS[name]()) for _ in range(4)]
        made = nn.Sequential(*(each for layer in layers for each in layer)).double()
        step = step_of(made, lambda m, x: m(x).square().mean(), 4, check=False)
        held = []
        for _ in range(3):
            step(torch.randn(8, 3, 8, 8, dtype=torch.float64))
            held.append(held_on_host(step))
        assert len(set(held)) == 1
        stored[name] = held[0]
    assert 0 < stored["relu"] <= 0.5 * stored["gelu"]  # 0.67 if ReLU stored its result


@pytest.mark.parametrize("rows", [2, 64])
def test_changes_in_place_are_noticed_as_torch_would(rows: int) -> None:
    """Whether the tensor was moved or too small for it; whoever does not ask for it is not told."""
    make = seeded(lambda: nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)))

    def loss_fn(m: Any, batch: Batch, *, beside: bool = True) -> Tensor:
        hidden = m[1](m[0](batch[0])).exp()
        out = m[2](hidden)
        (hidden.exp() if beside else hidden).mul_(3)
        return F.cross_entropy(out, batch[1])

    whole = samples_of(2 * rows, 0)
    batch = whole["x"], whole["label"]
    assert_big_batch(make, loss_fn, [batch], rows, check=False)
    told = "modified by an inplace operation"
    assert_refused(make, partial(loss_fn, beside=False), batch, rows, RuntimeError, told, check=False)


def test_a_batch_that_the_host_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it starts; what is pinned already counts as there."""
    step = step_of(layered()(), cross_entropy, 3)
    step(images(8, 0))
    monkeypatch.setattr("bigbatch.lockstep.activations.host_available", lambda: 1 << 14)
    step(images(8, 1))
    with pytest.raises(OutOfMemory, match="Nothing was changed"):
        step(images(800, 2))


# Where all leave: what must stay, and what must not be lost.


def norms() -> nn.Sequential:
    """Return a small model."""
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.BatchNorm1d(16))


two_norms = seeded(norms)


class Scored(torch.autograd.Function):
    """Gives a tensor of everybody's away as a gradient: its weight, or one that is always the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Add up products."""
        ctx.save_for_backward(x)
        ctx.weight = weight
        return (x * weight).sum()

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor, Tensor | None]:
        """Give the weight."""
        (x,) = ctx.saved_tensors
        return ctx.weight, above[0] * x if ctx.needs_input_grad[1] else None


def score(m: Any, x: Tensor) -> Any:
    """A score of each micro-batch; of the whole batch, in parts of two."""
    hidden = m.below(x)
    if len(x) > 2:
        return (hidden * m.weight.repeat(len(x) // 2, 1)).sum()
    return Scored.apply(hidden, m.weight)  # type: ignore[no-untyped-call]


def scoring(*, learned: bool) -> Make:
    """Make such a model."""
    weight = partial(torch.randn, 2, 16, dtype=torch.float64)
    return model(score, below=norms, weight=lambda: nn.Parameter(weight()) if learned else weight())


def twice(m: Any, x: Tensor) -> Any:
    """A shortcut's gradient goes out once more after another was added to it in place."""
    around = m.stem(x)
    y = around + m.one(m.two(around)) + m.one[0](m.two(around))
    return y + m.one(m.two(y))


def logging(m: Any, x: Tensor) -> Any:
    """A value that nothing goes back through, as one that is logged, may have saved what is changed later."""
    around = m.around(x)
    m.size = (around * around).mean().detach()
    (around * around).mean()
    around.add_(1)
    return m.norm(m.below(x)) + around


def mixing(m: Any, batch: Batch, *, gathers: bool) -> Tensor:
    """A value across micro-batches inside the model, and its gradient, which goes straight into a norm."""
    first, norm, second, last = m
    hidden = norm(first(batch[0]))
    if gathers:
        together = across.gather(hidden)
        mixed = torch.sigmoid(hidden @ together.T / 9) @ together
    else:
        parts = across.sum(torch.stack(hidden.split(2)).sum(0))
        mixed = hidden * parts.repeat(len(hidden) // 2, 1)
    found: Tensor = last(second(mixed * mixed))
    return found.pow(2).sum(1).sqrt().mean()


to_target = lambda m, batch: F.mse_loss(m(batch[0]), batch[1])  # noqa: E731
STAYING: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Batch], Tensor]]] = {
    "what is gathered": (two_norms, lambda m, b: mixing(m, b, gathers=True)),
    "what is summed": (two_norms, lambda m, b: mixing(m, b, gathers=False)),
    "a sum whose gradient goes into a norm": (
        two_norms,
        lambda m, b: across.once(across.sum(torch.stack(m(b[0]).split(2)).sum(0)).pow(4).mean()),
    ),
    "a weight that is a gradient": (scoring(learned=True), lambda m, b: across.once(across.sum(m(b[0])))),
    "a gradient of several": (scoring(learned=False), lambda m, b: across.once(across.sum(m(b[0])))),
    "what is added to a gradient": (model(twice, stem=norms, one=norms, two=lambda: nn.Linear(16, 6)), to_target),
    "what was changed after it was saved": (
        model(logging, **dict.fromkeys(("around", "below"), lambda: nn.Linear(6, 16)), norm=lambda: nn.BatchNorm1d(16)),
        to_target,
    ),
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
    made = layered()().float()
    twin = copy.deepcopy(made)
    inputs, labels = images(16, 0)
    batch = inputs.float(), labels
    with torch.autocast("cpu", torch.bfloat16):
        step_of(made, cross_entropy, 2, check=False)(batch)
        cross_entropy(twin, batch).backward()
    sgd(trained(twin)).step()
    assert distance(weights(made), weights(twin)) <= 1e-2  # what bf16 rounds


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


def failing(m: Any, x: Tensor) -> Any:
    """Fail for a single sample, where it is told to."""
    hidden = m.first[0](x)
    found.append((hidden, hidden.detach().clone()))
    around = m.first[2](m.first[1](hidden))
    if fails[0] == "forward" and len(x) == 1:
        raise ValueError("mine")
    y = m.last(m.more(m.body(around)) + around)
    if fails[0] == "backward" and len(x) == 1:
        around.register_hook(_raise)
    return y


fails = [""]
found: list[tuple[Tensor, Tensor]] = []


@pytest.mark.parametrize("waiting", [0, 0.8])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_window_after_one_that_failed(where: str, waiting: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was on its way is through before its memory serves again, and nobody is left with another's, or none."""
    monkeypatch.setattr(run, "_WAITING", waiting)
    made = layered(failing)()
    twin = copy.deepcopy(made)
    plain, step = sgd(trained(twin)), step_of(made, cross_entropy, 2, check=False)
    for number in range(6):
        del found[:]
        fails[0] = where if number % 2 else ""
        with pytest.raises(ValueError, match="mine") if fails[0] else nullcontext():
            step(images(9, number))
        if fails[0]:
            assert len(found) >= 5
            assert all(torch.equal(*each) for each in found)
            continue
        plain.zero_grad()
        cross_entropy(twin, images(9, number)).backward()
        plain.step()
        assert distance(weights(made), weights(twin)) <= 1e-12


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
