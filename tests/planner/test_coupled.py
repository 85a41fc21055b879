"""What a plan says of micro-batches that wait for each other inside of a model."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import across
from bigbatch.memory.search import Choice
from bigbatch.planner import coupled, measure
from bigbatch.planner.coupled import Coupling
from bigbatch.planner.measure import plan
from bigbatch.planner.plan_report import Plan

MIB = 1 << 20
Batch = tuple[Tensor, Tensor]
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would be measured")


class Asking(nn.Module):
    """Takes the batch's mean from each sample between its layers, or not."""

    def __init__(self, *, inside: bool = True) -> None:
        super().__init__()
        self.first, self.last, self.inside = nn.Linear(64, 512), nn.Linear(512, 4), inside

    def forward(self, x: Tensor) -> Tensor:
        """(n, 64) → (n, 4)."""
        h = torch.tanh(self.first(x))
        found: Tensor = self.last(h - across.mean(h.mean(0)) if self.inside else h)
        return found


def normed() -> nn.Sequential:
    """Linear layers and a norm."""
    return nn.Sequential(nn.Linear(64, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 4))


def network() -> nn.Sequential:
    """Convolutions and a norm."""
    pool = nn.AdaptiveAvgPool2d(1)
    conv = nn.Conv2d(3, 32, 3, padding=1)
    return nn.Sequential(conv, nn.BatchNorm2d(32), nn.ReLU(), pool, nn.Flatten(), nn.Linear(32, 4))


def images(number: int = 256, side: int = 32) -> Batch:
    """A batch."""
    return torch.randn(number, 3, side, side), torch.randint(4, (number,))


def rows(number: int = 4096) -> Batch:
    """A batch."""
    return torch.randn(number, 64), torch.randint(4, (number,))


def classify(model: Any, batch: Batch) -> Tensor:
    """A mean over the samples."""
    return F.cross_entropy(model(batch[0]), batch[1])


def contrast(model: Any, batch: Batch) -> Tensor:
    """A loss that asks for others after the model."""
    out = model(batch[0])
    return F.cross_entropy(out @ across.gather(out).T, across.offset() + torch.arange(len(out)))


def penalized(model: Any, batch: Batch) -> Tensor:
    """A penalty on slopes."""
    x = batch[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x)
    return classify(model, batch) + 0 * slope.detach().mean()


def mib_after(text: str, pattern: str) -> float:
    """Read a number of MiB."""
    found = re.search(pattern + r"([\d.]+) MiB", text)
    assert found, text
    return float(found[1])


INSIDE = pytest.mark.parametrize("make", [Asking, normed], ids=["across", "norm"])


@INSIDE
def test_what_waits_of_a_model_that_asks_between_its_layers(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What autograd saves of the whole batch, and whether the host has room for it."""
    found = plan(make(), classify, rows(), memory="90MiB")
    text = str(found)
    assert found.steps != 1
    assert "micro-batches run in lock-step" in text
    assert "waits beside" in text
    # A sample of 64, an activation of 512 and what the last layer multiplies, in float32.
    whole = mib_after(text, "the whole batch, about ")
    assert whole == pytest.approx((64 + 2 * 512) * 4 * 4096 / MIB, rel=0.05)
    assert re.search(r"wait in host memory where the device has no room, of .* that are free\.", text)
    monkeypatch.setattr(coupled, "host_available", lambda: int(whole * MIB) - MIB)
    assert "more than is free: a step would be refused." in str(plan(make(), classify, rows(), memory="90MiB"))


@pytest.mark.parametrize("loss_fn", [contrast, classify])
def test_a_model_that_is_asked_after_its_last_layer_has_nothing_to_wait(loss_fn: Any) -> None:
    """It is run again in backward, one micro-batch after the other; and a step refuses neither loss."""
    found = plan(Asking(inside=False), loss_fn, rows(), memory="75MiB")
    assert found.steps != 1
    assert "lock-step" not in str(found)
    assert "waits beside" not in str(found)
    assert not plan(Asking(inside=False), loss_fn, rows(64)).refused


@pytest.mark.parametrize("memory", ["4GiB", None], ids=["traced", "measured"])
def test_a_batch_that_fits_is_taken_whole_where_micro_batches_would_wait(memory: str | None) -> None:
    """As BigStep does; a model that asks between its layers is no other case than a norm."""
    found = plan(Asking(), classify, rows(256), memory=memory)
    assert found.steps == 1
    assert "between its layers (across): BigStep takes all at once" in str(found)
    assert "waits beside" not in str(found)


@pytest.mark.parametrize(
    ("batch", "memory", "fits"), [((256, 32), "84MiB", True), ((256, 32), "100MiB", True), ((64, 256), "130MiB", False)]
)
def test_the_size_to_take_leaves_room_for_what_waits(batch: tuple[int, int], memory: str, fits: bool) -> None:
    """Its peak and what waits beside it are within the budget; where the samples alone are more, that is said."""
    found = plan(network(), classify, images(*batch), memory=memory)
    row = next(row for row in found.rows if row.size == found.size)
    assert row.waiting_bytes is not None
    assert found.peak_bytes is not None
    assert row.fits is fits
    limit = int(0.9 * found.budget)
    for each in found.rows:
        assert each.predicted_bytes is not None
        assert each.fits == (each.predicted_bytes + (each.waiting_bytes or 0) <= limit)
    in_all = mib_after(str(found), "of the others; ")
    assert in_all * MIB == pytest.approx(found.peak_bytes + row.waiting_bytes, rel=0.01)
    assert ("in all, more than there is to use: take a smaller batch." in str(found)) is not fits


def test_what_waits_by_hand() -> None:
    """Samples, and of the activations as much as lock-step lets wait at norms, or those of all others at `across`."""
    found = Coupling([], [torch.empty(1600)], 64)
    found.saved = {size: 100 * size for size in (64, 48, 4)}
    assert found.beside(4) == 12_000
    found.norms = ["norm"]
    assert [found.beside(size) for size in (64, 48, 4)] == [None, 1600 + 1600, 6000 + 500]


def of_eight(probe: Any, largest: int, budget: int, *, margin: float) -> Choice:
    """Choose eight samples, as if they were the fastest."""
    sizes = sorted({1, 8, largest}) if largest < 512 else [1, 8]
    seen = tuple(replace(probe(size), seconds=10.0 if size == largest else 0.1) for size in sizes)
    return Choice(8, largest, seen, budget, int(budget * (1 - margin)))


@INSIDE
def test_on_a_cpu_all_waits_in_the_process(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured; a peak is a micro-batch's, and the plan says what comes to it. A whole batch is taken where it fits."""
    monkeypatch.setattr(measure, "choose", of_eight)
    model = make()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found: Plan = plan(model, classify, rows(512))
    assert (found.measured, found.size, found.refused) == (True, 8, False)
    assert mib_after(str(found), "the whole batch, about ") == pytest.approx(2 * 512 * 4 * 512 / MIB, rel=0.3)
    assert "wait in this process's memory, beside these peaks, of " in str(found)
    assert "waits beside" not in str(found)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert plan(model, classify, rows(64)).size == 64  # though a part of it was faster, alone
    assert plan(Asking(inside=False), classify, rows(64)).size == 8


def test_a_derivative_inside_of_a_loss_does_no_harm() -> None:
    """What autograd saves is counted all the same."""
    assert "lock-step" in str(plan(Asking(), penalized, rows(), memory="90MiB"))
