"""What a plan says of micro-batches that wait for each other inside of a model."""

import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import across
from bigbatch.lockstep import offload_store, run
from bigbatch.memory.search import Choice, Probe
from bigbatch.planner import coupled, waiting
from bigbatch.planner import measure as planning
from bigbatch.planner.measure import plan
from bigbatch.planner.plan_report import Plan, Row
from bigbatch.planner.waiting import Saved, Waiting, saved

KIB, MIB = 1 << 10, 1 << 20
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would be measured")


class Meeting(nn.Module):
    """Takes the batch's mean from each sample between its layers, or after them."""

    def __init__(self, *, inside: bool) -> None:
        super().__init__()
        self.first, self.last, self.inside = nn.Linear(64, 512), nn.Linear(512, 4), inside

    def forward(self, x: Tensor) -> Tensor:
        """(n, 64) → (n, 4)."""
        h = torch.tanh(self.first(x))
        found: Tensor = self.last(h - across.mean(h.mean(0)) if self.inside else h)
        return found


class Block(nn.Module):
    """Convolutions, norms and a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.first, self.second = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return F.relu(x + self.second(self.two(F.relu(self.first(self.one(x))))))


def network(width: int = 32) -> nn.Sequential:
    """A small residual network."""
    blocks = [Block(width) for _ in range(3)]
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 4)
    )


def images(number: int = 256) -> tuple[Tensor, Tensor]:
    """A batch."""
    return torch.randn(number, 3, 32, 32), torch.randint(4, (number,))


def rows(number: int = 4096) -> tuple[Tensor, Tensor]:
    """A batch."""
    return torch.randn(number, 64), torch.randint(4, (number,))


def classify(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A mean over the samples."""
    return F.cross_entropy(model(batch[0]), batch[1])


def contrast(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A loss that meets after the model."""
    out = model(batch[0])
    return F.cross_entropy(out @ across.gather(out).T, across.offset() + torch.arange(len(out)))


def chosen(found: Plan) -> Row:
    """The row that is recommended."""
    return next(row for row in found.rows if row.size == found.size)


def in_mib(text: str, pattern: str) -> float:
    """Read a number of MiB."""
    found = re.search(pattern + r"([\d.]+) MiB", text)
    assert found, text
    return float(found[1])


def test_a_model_that_asks_between_its_layers_is_told_of() -> None:
    """What of it waits, where, and how much; one that is asked of after its last layer has nothing to wait."""
    inside = plan(Meeting(inside=True), classify, rows(), memory="90MiB")
    assert inside.steps is not None
    assert inside.steps > 1
    text = str(inside)
    assert "This model asks for other samples between its layers (across): micro-batches run in lock-step" in text
    assert "waits beside" in text
    # A sample of 64, an activation of 512 and what the last layer multiplies, in float32.
    assert in_mib(text, "the whole batch, about ") == pytest.approx((64 + 2 * 512) * 4 * 4096 / MIB, rel=0.03)
    # At the meeting each holds its activation, and its sample.
    held = in_mib(text, "wait about ")
    assert held == pytest.approx((64 + 512) * 4 * 4096 / MIB, rel=0.25)
    for model, loss_fn in ((Meeting(inside=False), contrast), (Meeting(inside=False), classify)):
        outside = plan(model, loss_fn, rows(), memory="75MiB")
        assert outside.steps is not None
        assert outside.steps > 1
        assert "lock-step" not in str(outside)
        assert "waits beside" not in str(outside)


@pytest.mark.parametrize("tracing", [True, False])
def test_a_batch_that_fits_is_taken_whole_where_micro_batches_would_wait(tracing: bool) -> None:
    """As BigStep does; a model that asks between its layers is no other case than a norm."""
    found = plan(Meeting(inside=True), classify, rows(256), memory="4GiB" if tracing else None)
    assert found.steps == 1
    assert "between its layers (across): BigStep takes all at once" in str(found)
    assert "waits beside" not in str(found)


def test_the_activations_of_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What autograd saves of it, to within what it saves whatever the size; and whether the host has room."""
    model = nn.Sequential(nn.Linear(64, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 4))
    found = plan(model, classify, rows(), memory="90MiB")
    # The sample, the norm's input, its output or the activation of it.
    whole = in_mib(str(found), "BatchNorm .* the whole batch, about ")
    assert whole == pytest.approx((64 + 2 * 512) * 4 * 4096 / MIB, rel=0.05)
    assert re.search(r"wait in host memory where the device has no room, of .* that are free\.", str(found))
    monkeypatch.setattr(coupled, "host_available", lambda: int(whole * MIB) - MIB)
    found = plan(model, classify, rows(), memory="90MiB")
    assert "has no room, more than is free: a step would be refused." in str(found)


@pytest.mark.parametrize("memory", ["84MiB", "100MiB", "200MiB"])
def test_the_size_to_take_leaves_room_for_what_waits(memory: str) -> None:
    """Its peak and what waits beside it are within the budget; the next size that was tried is not."""
    found = plan(network(), classify, images(), memory=memory)
    row = chosen(found)
    assert row.waiting_bytes is not None
    assert found.peak_bytes is not None
    limit = int(0.9 * found.budget)
    assert row.fits
    assert found.peak_bytes + row.waiting_bytes <= limit
    larger = [each for each in found.rows if each.size > row.size]
    assert larger
    for each in larger:
        assert each.predicted_bytes is not None
        assert each.waiting_bytes is not None
        assert not each.fits
        assert each.predicted_bytes + each.waiting_bytes > limit
    in_all = in_mib(str(found), "where they meet; ")
    assert in_all * MIB == pytest.approx(found.peak_bytes + row.waiting_bytes, rel=0.01)
    assert "take a smaller batch" not in str(found)


def test_where_no_size_leaves_room() -> None:
    """The samples themselves are more than there is."""
    batch = torch.randn(64, 3, 256, 256), torch.randint(4, (64,))
    found = plan(network(4), classify, batch, memory="110MiB")
    assert found.steps is not None
    assert found.steps > 1
    assert not chosen(found).fits
    assert "in all, more than there is to use: take a smaller batch." in str(found)


def test_many_small_micro_batches_hold_their_samples_and_what_is_too_small_to_move() -> None:
    """Of 256 of one sample, a step of one says little."""
    found = plan(network(8), classify, images(), memory="75MiB")
    one = found.rows[0]
    assert one.size == 1
    assert one.waiting_bytes is not None
    samples = 256 * 3 * 32 * 32 * 4
    # Each piece of 8 x 32 x 32 is below 64 KiB.
    assert one.waiting_bytes > samples + 255 * 3 * 4 * (8 * 32 * 32 * 4)


BY_HAND = Saved(size=4, pieces=(400 * KIB, 400 * KIB, 4 * KIB), held=(400 * KIB,))


@pytest.mark.parametrize(
    ("size", "beside"),
    [
        # All of one size waits beside it: nothing else does.
        (64, 0),
        # One other: its samples, its small piece of 32 KiB, what it holds.
        (32, 8 * MIB + 32 * KIB + 3200 * KIB),
        # Fifteen others; at norms no more than 1.25 times one micro-batch's 804 KiB.
        (4, 15 * MIB + 15 * 4 * KIB + 1005 * KIB),
        # 63 of one sample; pieces of 100 KiB are worth moving.
        (1, 16 * MIB * 63 // 64 + 63 * KIB + int(1.25 * 201 * KIB)),
    ],
)
def test_what_waits_by_hand(size: int, beside: int) -> None:
    """Samples, what is small, what is held."""
    found = Waiting(BY_HAND, samples=16 * MIB, batch_size=64, limited=True)
    assert found.whole == 804 * KIB * 16 + 16 * MIB
    assert found.beside(size) == beside
    unlimited = replace(found, limited=False).beside(4)
    assert unlimited == 15 * MIB + 15 * 4 * KIB + 15 * 400 * KIB  # at across, all that is held


def test_limits_are_those_of_lock_step() -> None:
    """The same numbers in both places."""
    assert waiting._MOST == run._WAITING
    assert waiting._WORTH_MOVING == offload_store._WORTH_MOVING


def test_what_is_held_at_a_meeting() -> None:
    """What code holds, and not what the graph alone would keep."""
    weight = nn.Linear(8, 8)

    def forward(x: Tensor, *, holds: bool) -> Tensor:
        first = torch.tanh(weight(x))
        second = torch.tanh(first * 2)
        kept = first if holds else None
        del first
        mean = across.mean(second.mean(0))
        return (second - mean).square().sum() + (0 if kept is None else kept.sum())

    for holds in (True, False):
        found = saved(partial(forward, holds=holds), torch.ones(4, 8), 4, [weight], None, norms=False)
        assert found.held == (128,) * (2 if holds else 1)  # second, and first where it is held
        assert found.pieces == (128,) * 3  # the difference, too


def test_a_derivative_inside_of_a_loss_does_no_harm() -> None:
    """Its values are of no interest."""

    def penalised(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        x = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x)
        return classify(model, batch) + 0 * slope.detach().mean()

    assert "lock-step" in str(plan(Meeting(inside=True), penalised, rows(), memory="90MiB"))


def test_a_batch_that_fits_is_taken_whole_though_a_part_of_it_was_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, that is: micro-batches that wait for each other gain nothing."""

    def eight(probe: Any, largest: int, budget: int, *, margin: float) -> Choice:
        seen = tuple(replace(probe(size), seconds=10.0 if size == largest else 0.1) for size in (1, 8, largest))
        return Choice(8, largest, seen, budget, int(budget * (1 - margin)))

    monkeypatch.setattr(planning, "choose", eight)
    assert plan(Meeting(inside=True), classify, rows(64)).size == 64
    assert plan(Meeting(inside=False), classify, rows(64)).size == 8


def test_on_a_cpu_all_waits_in_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured; a peak is a micro-batch's, and it is said what comes to it."""

    def eight(probe: Any, largest: int, budget: int, *, margin: float) -> Choice:
        seen = tuple(replace(probe(size), seconds=None) for size in (1, 8))
        assert all(isinstance(each, Probe) for each in seen)
        return Choice(8, largest, seen, budget, int(budget * (1 - margin)))

    monkeypatch.setattr(planning, "choose", eight)
    for model in (Meeting(inside=True), nn.Sequential(nn.Linear(64, 512), nn.BatchNorm1d(512), nn.Linear(512, 4))):
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        found = plan(model, classify, rows(512))
        assert found.measured
        assert found.size == 8
        whole = in_mib(str(found), "the whole batch, about ")
        assert whole == pytest.approx(2 * 512 * 4 * 512 / MIB, rel=0.3)
        assert "wait in this process's memory, beside these peaks, of " in str(found)
        assert "waits beside" not in str(found)
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
