"""`across`: what a loss or a model knows of all micro-batches, with the big batch's gradients."""

import copy
import faulthandler
import math
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from bigbatch import Accumulator, BigStep, Options, across
from bigbatch.errors import BatchNormError, ConfigurationError, CoupledLoss, LossError, PathsDiffer, UnreadableLoss
from bigbatch.lockstep.threads import current
from bigbatch.memory.meter import LiveBytes
from bigbatch.state.scope import NeedsLockStep, one_after_the_other
from tests.bombs import everything, seed
from tests.support.reference import FLOOR, TOLERANCE, close, distance, sgd, told, trained, weights
from tests.support.samples import CLASSES, Batch, generator, rows, seeded
from tests.support.strategies import OPTIMIZERS, clip_norms, seeds

LIMIT = 120  # seconds after which a test hangs
LossFunction = Callable[[Any, Batch], Any]


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    """Micro-batches that wait for each other forever end the run, with the lines they wait at."""
    faulthandler.dump_traceback_later(LIMIT, exit=True, file=sys.__stderr__ or sys.stderr)
    yield
    faulthandler.cancel_dump_traceback_later()


# Models and losses.


class Twins(nn.Module):
    """Two encoders and a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, CLASSES))
        self.two = nn.Linear(3, CLASSES)
        self.scale = nn.Parameter(torch.tensor(0.4))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Both, on the unit sphere."""
        one, two = F.normalize(self.one(batch["x"]), dim=1), F.normalize(self.two(batch["x2"]), dim=1)
        return one, two, self.scale.exp()


def mine(x: Tensor) -> Tensor:
    """Where the rows of this micro-batch lie among all."""
    return across.offset() + torch.arange(len(x))


def clip(model: Any, batch: Batch) -> Tensor:
    """CLIP, with a learned temperature."""
    one, two, scale = model(batch)
    every, all_two = across.gather(one), across.gather(two)
    rows_, columns = (
        F.cross_entropy(scale * one @ all_two.T, mine(one)),
        F.cross_entropy(scale * two @ every.T, mine(two)),
    )
    return (rows_ + columns) / 2


def negatives(model: Any, batch: Batch) -> Tensor:
    """InfoNCE: the others of the batch are negatives."""
    one, two, scale = model(batch)
    return F.cross_entropy(scale * one @ across.gather(two).T, mine(one))


def supervised(model: Any, batch: Batch) -> Tensor:
    """SupCon: the samples of one's own class are the positives."""
    one, _, scale = model(batch)
    every, labels = across.gather(one), across.gather(batch["label"])
    own = mine(one)[:, None] == torch.arange(len(every))
    score = (scale * one @ every.T).masked_fill(own, -1e9).log_softmax(1)
    positive = (batch["label"][:, None] == labels) & ~own
    return -((score * positive).sum(1) / positive.sum(1).clamp(min=1)).mean()


def barlow(model: Any, batch: Batch) -> Tensor:
    """Barlow Twins: a correlation matrix of the whole batch."""
    one, two, _ = model(batch)
    number = across.sum(torch.tensor(float(len(one)), dtype=one.dtype))
    one, two = one - across.mean(one.mean(0)), two - across.mean(two.mean(0))
    spread = (across.sum(one.square().sum(0)) * across.sum(two.square().sum(0))).clamp(min=1e-3).sqrt()
    matrix = across.sum(one.T @ two) / spread + 0 * number
    return across.once((matrix - torch.eye(CLASSES, dtype=one.dtype)).square().sum())


def vicreg(model: Any, batch: Batch) -> Tensor:
    """VICReg: a mean over samples beside terms of the whole batch."""
    one, two, _ = model(batch)
    centred = one - across.mean(one.mean(0))
    moments = across.sum(centred.T @ centred) / 7
    spread = F.relu(1 - (moments.diagonal() + 0.1).sqrt()).mean()
    return F.mse_loss(one, two) + across.once(0.5 * spread + 0.1 * moments.triu(1).square().sum())


def balance(model: Any, batch: Batch) -> Tensor:
    """Load balancing of a mixture of experts, beside a masked cross-entropy with a count of its own."""
    out = model.one(batch["x"])
    share = across.mean(F.one_hot(out.argmax(1), CLASSES).to(out.dtype).mean(0))
    gate = across.mean(out.softmax(1).mean(0))
    return F.cross_entropy(out, batch["partly"]) + 0.3 * across.once(CLASSES * (share * gate).sum())


def dice(model: Any, batch: Batch) -> Tensor:
    """Soft Dice over the whole batch."""
    found, true = model.one(batch["x"]).sigmoid(), batch["binary"]
    both, each = across.sum((found * true).sum(0)), across.sum((found + true).sum(0))
    return across.once((1 - (2 * both + 1) / (each + 1)).mean())


def correlation(model: Any, batch: Batch) -> Tensor:
    """One minus Pearson's correlation over the batch."""
    found, true = model.one(batch["x"])[:, 0], batch["scalar"]
    found, true = found - across.mean(found.mean()), true - across.mean(true.mean())
    product = across.sum((found * true).sum())
    size = (across.sum(found.square().sum()) * across.sum(true.square().sum()) + 1e-2).sqrt()
    return across.once(1 - product / size)


def rmse(model: Any, batch: Batch) -> Tensor:
    """The root of the big batch's mean."""
    return across.once(across.mean(F.mse_loss(model.one(batch["x"]), batch["value"])).sqrt())


def masked_root(model: Any, batch: Batch) -> Tensor:
    """The same over targets that are not ignored: a mean with a count of its own."""
    out, counts = model.one(batch["x"]), batch["partly"] != -100
    each = (out.square().sum(1) * counts).sum() / counts.sum().clamp(min=1)
    return across.once(across.mean(each, counts.sum()).sqrt())


def centred(model: Any, batch: Batch) -> Tensor:
    """Outputs less their mean: a mean over samples."""
    out = model.one(batch["x"])
    return F.mse_loss(out - across.mean(out.mean(0)), batch["value"])


def summed(model: Any, batch: Batch) -> Tensor:
    """A sum over samples, each against the sum of all."""
    out = model.one(batch["x"])
    return F.mse_loss(out * across.sum(out.sum(0)).tanh(), batch["value"], reduction="sum")


def attending(model: Any, batch: Batch) -> Tensor:
    """Each sample looks at all."""
    out = model.one(batch["x"])
    every = across.gather(out)
    return F.mse_loss((out @ every.T).softmax(1) @ every, batch["value"])


LOSSES: dict[str, LossFunction] = {
    "CLIP": clip,
    "InfoNCE": negatives,
    "SupCon": supervised,
    "Barlow Twins": barlow,
    "VICReg": vicreg,
    "load balancing": balance,
    "soft Dice": dice,
    "correlation": correlation,
    "RMSE": rmse,
    "a masked root": masked_root,
    "centred": centred,
    "summed": summed,
}


class Inside(nn.Module):
    """Something across samples between two layers."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.one, self.last, self.how = nn.Linear(3, 6), nn.Linear(6, CLASSES), how

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3) → (n, classes)."""
        h = self.one(x)
        if self.how == "centred":
            h = h - across.mean(h.mean(0))
        elif self.how == "scaled":
            h = h / (1 + across.sum(h.square().sum(0)))
        elif self.how == "attending":
            every = across.gather(h)
            h = (h @ every.T).softmax(1) @ every
        return self.last(torch.tanh(h))


class AtTheEnd(Inside):
    """The same after the last layer."""

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3) → (n, classes)."""
        h = self.last(torch.tanh(self.one(x)))
        if self.how == "attending":
            every = across.gather(h)
            return (h @ every.T).softmax(1) @ every
        return h - across.mean(h.mean(0)) if self.how == "centred" else h / (1 + across.sum(h.square().sum(0)))


# Ours beside the big batch.


def twins() -> nn.Module:
    """The same weights each time."""
    return seeded(Twins)()


def parts(found: Any) -> tuple[Tensor, Any]:
    """A loss, and perhaps extras."""
    return found if isinstance(found, tuple) else (found, None)


def assert_exact(
    make: Callable[[], nn.Module],
    loss_fn: LossFunction,
    batches: Sequence[Batch],
    size: int,
    *,
    optimizer: str = "sgd",
    clip_norm: float | None = None,
    tolerance: float = TOLERANCE,
    **options: Any,
) -> None:
    """Gradients, weights, loss and norm are those of the plain meaning on the whole batch."""
    model = make()
    twin = copy.deepcopy(model)
    step = BigStep(
        model,
        OPTIMIZERS[optimizer](trained(model)),
        loss_fn,
        micro_batch_size=size,
        clip_norm=clip_norm,
        options=Options(**options),
    )
    updater = OPTIMIZERS[optimizer](trained(twin))
    gradients: list[list[Tensor]] = []
    step.before_step(lambda: gradients.append([p.grad.clone() for p in trained(model) if p.grad is not None]))
    for number, batch in enumerate(batches):
        slack = tolerance * 10 ** min(number, 2)
        update = step(batch)
        assert update.micro_batches == math.ceil(len(batch["x"]) / size)
        updater.zero_grad()
        loss, extras = parts(loss_fn(twin, batch))
        loss.backward()
        true = [p.grad for p in trained(twin) if p.grad is not None]
        assert distance(gradients.pop(), true, FLOOR) <= slack, f"update {number}: gradients"
        norm = clip_grad_norm_(trained(twin), math.inf if clip_norm is None else clip_norm)
        updater.step()
        assert distance(weights(model), weights(twin)) <= slack, f"update {number}: weights"
        assert close(told(update, always=False), float(loss.detach()), slack), f"update {number}: loss"
        assert clip_norm is None or close(float(update.grad_norm), float(norm), slack)  # type: ignore[arg-type]
        if extras is not None:
            assert distance([update.extras], [extras.detach()]) <= slack


# Exact.


@given(
    loss=st.sampled_from(sorted(LOSSES)),
    sizes=st.lists(st.integers(2, 9), min_size=1, max_size=2),
    size=st.integers(1, 5),
    optimizer=st.sampled_from(["sgd", "sgd-momentum", "adamw"]),
    clip_norm=clip_norms,
    activations=st.sampled_from(["auto", "keep", "recompute"]),
    seed_=seeds,
)
@settings(max_examples=100)
def test_any_loss_in_any_split_is_exact(
    *,
    loss: str,
    sizes: list[int],
    size: int,
    optimizer: str,
    clip_norm: float | None,
    activations: str,
    seed_: int,
) -> None:
    """Whatever a loss asks for, in any split, wherever activations stay."""
    batches = [rows(n, 10 * seed_ + number) for number, n in enumerate(sizes)]
    assert_exact(twins, LOSSES[loss], batches, size, optimizer=optimizer, clip_norm=clip_norm, activations=activations)


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload", "auto"])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_wherever_activations_stay(loss: str, activations: str) -> None:
    """Unevenly cut, and in single samples."""
    for size in (1, 3):
        assert_exact(twins, LOSSES[loss], [rows(7, 0), rows(5, 1)], size, activations=activations)


@pytest.mark.parametrize("size", [1, 3])
def test_a_loss_in_which_each_sample_attends_to_all(size: int) -> None:
    """A product of what is a sample's own with what all have in common, twice."""
    assert_exact(twins, attending, [rows(7, 0)], size)


@pytest.mark.parametrize("size", [1, 3])
def test_keys_without_gradient(size: int) -> None:
    """Of all samples, as a momentum encoder makes them."""

    def loss_fn(model: Any, batch: Batch) -> Tensor:
        one, two, scale = model(batch)
        return F.cross_entropy(scale * one @ across.gather(two.detach()).T, mine(one))

    assert_exact(twins, loss_fn, [rows(7, 0)], size)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("how", ["centred", "scaled", "attending"])
def test_between_the_layers_of_a_model(how: str, size: int) -> None:
    """A model may ask, too; its activations are kept then."""
    make = seeded(lambda: Inside(how))
    assert_exact(make, lambda m, b: F.cross_entropy(m(b["x"]), b["partly"]), [rows(7, 0), rows(6, 1)], size)


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("how", ["centred", "scaled", "attending"])
def test_at_the_end_of_a_model(how: str, size: int) -> None:
    """After its last layer."""
    make = seeded(lambda: AtTheEnd(how))
    assert_exact(make, lambda m, b: F.cross_entropy(m(b["x"]), b["partly"]), [rows(7, 0), rows(6, 1)], size)


def test_beside_batch_norm() -> None:
    """Both meet."""

    def make() -> nn.Module:
        model = Twins()
        model.one.insert(1, nn.BatchNorm1d(6))
        return model

    for loss in (clip, balance, rmse):
        assert_exact(seeded(make), loss, [rows(7, 0), rows(5, 1)], 2)


def test_extras_come_beside() -> None:
    """In the batch's own order."""

    def loss_fn(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        return clip(model, batch), model.one(batch["x"])

    assert_exact(twins, loss_fn, [rows(7, 0)], 3)


def test_rows_that_are_not_samples() -> None:
    """Two views of each sample, one below the other."""

    def loss_fn(model: Any, batch: Batch) -> Tensor:
        one, two, scale = model(batch)
        views = torch.cat([one, two])
        return F.mse_loss(views * (scale + across.gather(views).square().sum(0)), torch.zeros_like(views))

    assert_exact(twins, loss_fn, [rows(7, 0)], 3)


def test_the_same_value_asked_for_twice_and_in_turns() -> None:
    """Each asking is a meeting of its own; results of one go into another."""

    def loss_fn(model: Any, batch: Batch) -> Tensor:
        out = model.one(batch["x"])
        first, again = across.mean(out.mean(0)), across.mean(out.mean(0))
        further = across.mean((out * first).mean(0))
        return F.mse_loss(out + first - 0.5 * again + further, batch["value"])

    assert_exact(twins, loss_fn, [rows(7, 0), rows(4, 1)], 3)


def test_what_each_micro_batch_is_told() -> None:
    """Rows in the batch's own order, from where its own begin; sums and means of all; types as they came."""
    batch = rows(7, 0)
    seen: list[tuple[int, int]] = []

    def loss_fn(model: Any, b: Batch) -> Tensor:
        worker = current()
        if worker is not None and worker.size == 3:
            seen.append((across.offset(), len(b["x"])))
            gathered = across.gather(b["x"])
            assert torch.equal(gathered, batch["x"])
            assert torch.equal(gathered[mine(b["x"])], b["x"])
            assert torch.equal(across.gather(b["label"]), batch["label"])
            assert across.gather(b["label"] > 1).dtype == torch.bool
            assert torch.equal(across.gather(b["x"].bfloat16()), batch["x"].bfloat16())
            assert torch.allclose(across.sum(b["x"].sum(0)), batch["x"].sum(0), rtol=1e-13)
            assert torch.allclose(across.mean(b["x"].mean(0)), batch["x"].mean(0), rtol=1e-13)
            assert across.sum(torch.tensor(len(b["x"]))) == 7
            number = (b["partly"] != -100).sum()
            kept = b["scalar"][b["partly"] != -100]
            found = across.mean(kept.mean() if number else torch.zeros((), dtype=torch.float64), number)
            assert torch.allclose(found, batch["scalar"][batch["partly"] != -100].mean(), rtol=1e-13)
        return F.mse_loss(model.one(b["x"]) + 0 * across.offset(), b["value"])

    model = twins()
    step = BigStep(
        model, sgd(trained(model)), loss_fn, micro_batch_size=3, options=Options(activations="keep", check=False)
    )
    step(batch)
    assert seen == [(0, 3), (3, 2), (5, 2)]


def test_low_precision_is_added_up_in_float32() -> None:
    """A sum of many bf16 values is rounded once; against float64, beside the whole batch."""
    batch = {"x": torch.randn(64, 3, generator=generator(0))}

    def loss_fn(model: Any, b: Batch) -> Tensor:
        out = model(b["x"].bfloat16())
        return across.once(across.sum(out.sum(0)).float().square().sum())

    def run(size: int) -> list[Tensor]:
        model = seeded(lambda: nn.Linear(3, 4))().bfloat16()
        step = BigStep(model, torch.optim.SGD(model.parameters(), lr=0.0), loss_fn, micro_batch_size=size)
        found: list[Tensor] = []
        step.before_step(lambda: found.extend(p.grad.double() for p in trained(model) if p.grad is not None))
        step(batch)
        return found

    exact = seeded(lambda: nn.Linear(3, 4))().bfloat16().double()
    exact(batch["x"].bfloat16().double()).sum(0).square().sum().backward()
    true = [p.grad for p in trained(exact) if p.grad is not None]
    assert distance(run(1), true) <= max(2.5 * distance(run(64), true), 2**-8)


# Its plain meaning.


def test_outside_of_a_window_a_batch_is_the_whole_batch() -> None:
    """Values and gradients are those of the argument."""
    x = torch.randn(4, 3, requires_grad=True)
    for ask in (across.gather, across.sum, across.mean, lambda x: across.mean(x, 3)):
        found = ask(x)
        assert torch.equal(found, x)
        (gradient,) = torch.autograd.grad((found * torch.arange(12).view(4, 3)).sum(), x)
        assert torch.equal(gradient, torch.arange(12.0).view(4, 3))
        with torch.no_grad():
            assert torch.equal(ask(x), x)
    assert torch.equal(across.gather(x.detach()), x)
    assert across.offset() == 0
    assert across.once(x.sum()) == x.sum()


def test_plain_losses_are_the_textbooks() -> None:
    """What a loss with `across` says of a whole batch, written down without it."""
    model, batch = twins(), rows(9, 0)
    one, two, scale = model(batch)
    logits, own = scale * one @ two.T, torch.arange(9)
    assert torch.allclose(clip(model, batch), (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2)
    out = model.get_submodule("one")(batch["x"])
    assert torch.allclose(rmse(model, batch), F.mse_loss(out, batch["value"]).sqrt())
    together = torch.stack([out[:, 0], batch["scalar"]])
    assert (correlation(model, batch) - 1 + torch.corrcoef(together)[0, 1]).abs().item() < 1e-2


# Refused.

ASKING: dict[str, LossFunction] = {
    "gather at the top": lambda m, b: across.gather(F.mse_loss(m.one(b["x"]), b["value"]).view(1)).squeeze(),
    "mean at the top": lambda m, b: across.mean(F.mse_loss(m.one(b["x"]), b["value"])),
    "sum at the top": lambda m, b: across.sum(F.mse_loss(m.one(b["x"]), b["value"], reduction="sum")),
    "beside a loss": lambda m, b: (
        F.mse_loss(m.one(b["x"]), b["value"]) + across.once(across.mean(m.one(b["x"]).mean()))
    ),
    "RMSE": rmse,
}
BELOW: dict[str, LossFunction] = {
    "gathered": lambda m, b: across.gather(m.one(b["x"])).square().mean(),
    "centred": centred,
    "CLIP": clip,
}


@pytest.mark.parametrize("how", [*ASKING, *BELOW])
def test_an_accumulator_refuses_a_loss_that_asks(how: str) -> None:
    """At the top of the loss or below; nothing was added."""
    model = twins()
    accumulator = Accumulator(model, sgd(trained(model)), steps=2)
    with pytest.raises(CoupledLoss, match=r"(?s)asks for all samples of the big batch.*Use: BigStep"):
        accumulator.backward({**ASKING, **BELOW}[how](model, rows(4, 0)))
    assert all(p.grad is None for p in trained(model))


@pytest.mark.parametrize("how", ["centred", "scaled", "attending"])
def test_an_accumulator_refuses_a_model_that_asks(how: str) -> None:
    """Hidden between its layers."""
    model = seeded(lambda: Inside(how))()
    accumulator = Accumulator(model, sgd(trained(model)), steps=3)
    with pytest.raises(CoupledLoss, match="asks for all samples of the big batch"):
        accumulator.backward(F.cross_entropy(model(rows(4, 0)["x"]), rows(4, 0)["label"]))
    assert all(p.grad is None for p in trained(model))


@pytest.mark.parametrize("how", ["beside a loss", "RMSE"])
def test_an_accumulator_refuses_a_marked_loss_that_asks_every_time(how: str) -> None:
    """A user who has caught the error and goes on gets it again."""
    model = twins()
    accumulator = Accumulator(model, sgd(trained(model)), steps=2)
    for _ in range(2):
        with pytest.raises(CoupledLoss, match="asks for all samples of the big batch"):
            accumulator.backward(ASKING[how](model, rows(4, 0)))


@pytest.mark.parametrize("before", ["asks", "does not ask"])
def test_an_accumulator_refuses_a_model_that_asks_every_time(before: str) -> None:
    """Also after a call that was refused, and where it did not ask at first."""
    model = seeded(lambda: Inside("centred" if before == "asks" else "nothing"))()
    assert isinstance(model, Inside)
    accumulator = Accumulator(model, sgd(trained(model)), steps=3)
    batch = rows(4, 0)
    if before == "asks":
        with pytest.raises(CoupledLoss, match="asks for all samples of the big batch"):
            accumulator.backward(F.cross_entropy(model(batch["x"]), batch["label"]))
    else:
        accumulator.backward(F.cross_entropy(model(batch["x"]), batch["label"]))
    model.how = "centred"
    with pytest.raises(CoupledLoss, match="asks for all samples of the big batch"):
        accumulator.backward(F.cross_entropy(model(batch["x"]), batch["label"]))


@pytest.mark.parametrize("over", [True, False])
@pytest.mark.parametrize("how", ["offset", "gather", "mean"])
def test_an_accumulator_refuses_questions_without_gradient(how: str, over: bool) -> None:
    """They have another answer in a micro-batch, too."""
    model = twins()
    accumulator = Accumulator(model, sgd(trained(model)), steps=2)

    def loss_fn(m: Any, b: Batch) -> Tensor:
        asked: Any = across.offset() if how == "offset" else across.mean(b["x"].mean())
        asked = across.gather(b["x"]).mean() if how == "gather" else asked
        return F.mse_loss(m.one(b["x"]) * (1 + asked), b["value"])

    loss_fn(model, rows(4, 0))  # as in validation, before a batch is given out
    if not over:
        loss = loss_fn(model, rows(4, 0))
        for _ in range(2):
            with pytest.raises(CoupledLoss, match=r"(?s)were asked for.*Use: BigStep.*torch\.no_grad"):
                accumulator.backward(loss)
        with torch.no_grad():
            loss_fn(model, rows(4, 0))
        accumulator.backward(F.mse_loss(model.get_submodule("one")(rows(4, 0)["x"]), rows(4, 0)["value"]))
        return
    batches = iter(accumulator.over([rows(4, 0), rows(4, 1)]))
    loss = loss_fn(model, next(batches))
    with pytest.raises(CoupledLoss, match="asks for all samples of the big batch"):
        accumulator.backward(loss)


def test_an_accumulator_beside_a_step_that_asks() -> None:
    """A BigStep's own questions, at its first check, too, are not those of another loss."""
    model, other = twins(), twins()
    accumulator = Accumulator(other, sgd(trained(other)), steps=2)
    step = BigStep(model, sgd(trained(model)), clip, micro_batch_size=2)
    for number in range(3):
        for size in (5, 2):  # of several micro-batches, and of one
            step(rows(size, number))
        accumulator.backward(F.mse_loss(other.get_submodule("one")(rows(4, number)["x"]), rows(4, number)["value"]))


COUNTED_OFTEN: dict[str, LossFunction] = {
    "a root of a mean": lambda m, b: across.mean(F.mse_loss(m.one(b["x"]), b["value"])).sqrt(),
    "a mean": lambda m, b: across.mean(F.mse_loss(m.one(b["x"]), b["value"])),
    "a sum": lambda m, b: across.sum(F.mse_loss(m.one(b["x"]), b["value"], reduction="sum")),
    "a mean of gathered rows": lambda m, b: across.gather(m.one(b["x"])).square().mean(),
    "a sum of gathered rows": lambda m, b: across.gather(m.one(b["x"])).square().sum(),
    "a cross-entropy of gathered rows": lambda m, b: F.cross_entropy(
        across.gather(m.one(b["x"])), across.gather(b["label"])
    ),
    "a product of means": lambda m, b: across.mean(m.one(b["x"]).mean()) * across.mean(m.two(b["x"]).mean()),
    "a ratio of sums, one without gradient": lambda m, b: (
        1
        - (2 * across.sum((m.one(b["x"]).sigmoid() * b["value"].sigmoid()).sum()) + 1)
        / (across.sum(m.one(b["x"]).sigmoid().sum()) + across.sum(b["value"].sigmoid().sum()) + 1)
    ),
    "times a parameter": lambda m, b: across.mean(m.one(b["x"]).mean()) * m.scale,
    "beside a mean over samples": lambda m, b: (
        F.mse_loss(m.one(b["x"]), b["value"]) + 0.1 * across.mean(m.one(b["x"]).mean()).square()
    ),
    "all against all": lambda m, b: F.cross_entropy(
        across.gather(m.one(b["x"])) @ across.gather(m.two(b["x2"])).T,
        torch.arange(across.gather(b["x"]).shape[0]),
    ),
    "through a layer": lambda m, b: F.mse_loss(m.two(across.gather(m.one(b["x"]))[:, :3]), across.gather(b["value"])),
    "through a layer, summed": lambda m, b: m.two(across.gather(m.one(b["x"]))[:, :3]).square().sum(),
}


@pytest.mark.filterwarnings("ignore:this loss is made of values of all")
@pytest.mark.parametrize(
    ("how", "check"),
    [
        *((how, check) for how in ("a layer", "two layers") for check in (True, False)),
        ("a norm", True),
        ("a norm", False),
    ],
)
def test_a_sum_through_layers_that_every_micro_batch_would_count(how: str, check: bool) -> None:
    """However far down the gathered rows are, it is refused or counted once."""

    def loss_fn(m: Any, b: Batch) -> Tensor:
        every = across.gather(m.one(b["x"]))[:, :3]
        if how == "two layers":
            every = m.two(every)[:, :3]
        elif how == "a norm":
            every = F.layer_norm(every, (3,))
        return m.two(every).square().sum()

    try:
        assert_exact(twins, loss_fn, [rows(7, 0)], 3, check=check)
    except LossError:
        return


@pytest.mark.parametrize("how", COUNTED_OFTEN)
def test_a_term_of_values_of_all_counts_once(how: str) -> None:
    """Marked or not; where the whole loss is one, what it costs is said once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_exact(twins, COUNTED_OFTEN[how], [rows(7, number) for number in range(2)], 3)
    alone = [str(each.message) for each in caught if "each micro-batch computes all of it" in str(each.message)]
    assert len(alone) == (0 if "beside" in how else 1)
    marked: LossFunction = lambda m, b: across.once(COUNTED_OFTEN[how](m, b))  # noqa: E731
    if "beside" not in how:
        assert_exact(twins, marked, [rows(7, 0)], 3)


@pytest.mark.parametrize(("size", "check"), [(3, True), (3, False), (2, True)])
def test_an_own_number_beside_values_of_all_is_refused(size: int, check: bool) -> None:
    """It has no gradient, and no place in a graph; where it is the same in all, it is not the big batch's."""

    def loss_fn(m: Any, b: Batch) -> Tensor:
        own = torch.tensor(float(len(b["x"])), dtype=torch.float64)
        return across.sum(m.one(b["x"]).square().sum()) / (across.sum(m.two(b["x"]).square().sum()) + own)

    model = twins()
    step = BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=size, options=Options(check=check))
    before = [p.clone() for p in model.parameters()]
    with pytest.raises((UnreadableLoss, CoupledLoss), match=r"(made of values of all|coupled)"):
        step(rows(8, 0))
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("check", [True, False])
def test_own_rows_of_values_of_all_do_not_count_once(check: bool) -> None:
    """They are not the same in every micro-batch, which is seen; nothing is changed."""

    def loss_fn(m: Any, b: Batch) -> Tensor:
        return across.gather(m.one(b["x"]))[mine(b["x"])].square().mean()

    model = twins()
    optimizer = OPTIMIZERS["adamw"](trained(model))
    seed()
    before = everything(model, optimizer)
    step = BigStep(model, optimizer, loss_fn, micro_batch_size=3, options=Options(check=check))
    with pytest.raises(UnreadableLoss, match=r"(?s)made of values of all micro-batches alone.*counted\(term, n\)"):
        step(rows(7, 0))
    assert everything(model, optimizer) == before


@pytest.mark.xfail(
    strict=True,
    reason="own values without gradient, a target or a weight, do not count as data where values of all are met: a "
    "mean over this micro-batch's samples is refused as if it were the same in each",
)
def test_values_of_all_against_what_has_no_gradient_are_a_mean_over_samples() -> None:
    """A prediction for all, set against each sample's own target."""

    def loss_fn(model: Any, batch: Batch) -> Tensor:
        return F.mse_loss(across.mean(model.one(batch["x"]).mean(0)) * batch["signs"], batch["value"])

    assert_exact(twins, loss_fn, [rows(7, 0)], 3)


def test_a_term_marked_though_it_is_a_micro_batchs_own() -> None:
    """The first window looks: the values differ, and are shown."""
    model = twins()
    optimizer = OPTIMIZERS["adamw"](trained(model))
    seed()
    before = everything(model, optimizer)

    def loss_fn(m: Any, b: Batch) -> Tensor:
        out = m.one(b["x"])
        return F.mse_loss(out, b["value"]) + across.once(out.square().mean() * across.mean(out.mean()))

    step = BigStep(model, optimizer, loss_fn, micro_batch_size=2)
    with pytest.raises(LossError, match=r"(?s)the same in every micro-batch, and .*Got .*, "):
        step(rows(6, 0))
    assert everything(model, optimizer) == before


def _marked(term: Tensor) -> Tensor:
    return across.once(term)


def _two_terms(m: Any, b: Batch) -> tuple[Tensor, Tensor]:
    """One that is the same in every micro-batch, and one that is not."""
    out = m.one(b["x"])
    return across.mean(out.square().mean()).sqrt(), F.mse_loss(out, b["value"]).sqrt() * across.mean(out.mean()).exp()


SEVERAL_MARKED: dict[str, LossFunction] = {
    "by a function": lambda m, b: sum((_marked(t) for t in _two_terms(m, b)), start=torch.zeros(())),
    "in a loop": lambda m, b: sum((across.once(t) for t in _two_terms(m, b)), start=torch.zeros(())),
}


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("how", SEVERAL_MARKED)
def test_every_term_that_one_line_marks_is_looked_at(how: str, check: bool) -> None:
    """Not the first alone."""
    model = twins()
    step = BigStep(model, sgd(trained(model)), SEVERAL_MARKED[how], micro_batch_size=2, options=Options(check=check))
    with pytest.raises(LossError, match="the same in every micro-batch, and"):
        step(rows(6, 0))


def test_a_marked_term_that_is_zero_at_first_is_looked_at_again() -> None:
    """A hinge says nothing before it is passed."""
    model = twins()

    def loss_fn(m: Any, b: Batch) -> Tensor:
        out = m.one(b["x"])
        own = F.relu((out - b["value"]).square().mean().sqrt() - 1e3 * b["x"][0, 0]) * across.mean(out.mean()).exp()
        return F.mse_loss(out, b["value"]) + across.once(own)

    step = BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=2)
    for first in (1.0, 1.0, 0.0):
        batch = rows(6, 0)
        batch["x"][:, 0] = first
        if first:
            step(batch)
        else:
            with pytest.raises(LossError, match="the same in every micro-batch, and"):
                step(batch)


def test_a_marked_term_is_looked_at_no_more_when_it_was_seen_to_be_the_same() -> None:
    """It waits for a device."""
    model, meetings = twins(), []

    def loss_fn(m: Any, b: Batch) -> Tensor:
        found = rmse(m, b)
        worker = current()
        if worker is not None and worker.size == 3 and not worker.number:
            meetings.append(worker.meetings)
        return found

    options = Options(activations="keep", check=False)
    step = BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=2, options=options)
    for number in range(3):
        step(rows(6, number))
    assert meetings == [2, 1, 1]  # a mean and a look; then the mean


def test_questions_on_a_thread_of_ones_own_are_refused() -> None:
    """There is no micro-batch there: the answer would be another."""
    model = twins()

    def loss_fn(m: Any, b: Batch) -> Tensor:
        one, two, scale = m(b)
        with ThreadPoolExecutor(1) as pool:
            own = pool.submit(across.offset).result() + torch.arange(len(one))
        return F.cross_entropy(scale * one @ across.gather(two).T, own)

    optimizer = OPTIMIZERS["adamw"](trained(model))
    seed()
    before = everything(model, optimizer)
    step = BigStep(model, optimizer, loss_fn, micro_batch_size=2)
    with pytest.raises(CoupledLoss):
        step(rows(6, 0))
    assert everything(model, optimizer) == before


def test_questions_on_a_thread_that_was_there_before_are_its_own() -> None:
    """Somebody who validates beside a step has the whole batch."""
    model, asked = twins(), threading.Event()
    answers: list[int] = []

    def beside() -> None:
        asked.wait(LIMIT)
        answers.append(across.offset())

    thread = threading.Thread(target=beside, daemon=True)
    thread.start()

    def loss_fn(m: Any, b: Batch) -> Tensor:
        found = clip(m, b)
        asked.set()
        thread.join(LIMIT)
        return found

    BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=2, options=Options(check=False))(rows(6, 0))
    assert answers == [0]


class OnThreads(nn.Module):
    """Two norms at once."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norms = nn.Linear(3, CLASSES), nn.ModuleList([nn.BatchNorm1d(CLASSES), nn.BatchNorm1d(CLASSES)])

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3) → (n, classes)."""
        h = self.one(x)
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(lambda norm: norm(h), self.norms)
        return torch.as_tensor(first + second)


def test_norms_on_threads_of_ones_own_are_refused() -> None:
    """With what there is to find."""
    model = seeded(OnThreads)()
    options = Options(check=False)
    step = BigStep(model, sgd(trained(model)), plain, micro_batch_size=2, options=options)
    with pytest.raises(BatchNormError, match=r"(?s)was called on a thread of the model's own.*Use: F.batch_norm"):
        step(rows(6, 0))


def test_one_after_the_other_inside_of_itself() -> None:
    """The inner one leaves the outer one in force."""
    with one_after_the_other():
        with one_after_the_other():
            pass
        with pytest.raises(NeedsLockStep):
            across.offset()
    assert across.offset() == 0


def test_a_mean_over_nothing_counts_nothing() -> None:
    """It is NaN, in one micro-batch of three."""

    def loss_fn(m: Any, b: Batch) -> Tensor:
        out, counts = m.one(b["x"]), b["partly"] != -100
        return across.once(across.mean(out[counts].square().mean(), counts.sum()).sqrt())

    batch = rows(6, 0)
    batch["partly"] = torch.tensor([1, -100, -100, -100, 2, 0])
    assert_exact(twins, loss_fn, [batch], 2)


@pytest.mark.parametrize("ask", [across.gather, across.mean])
def test_a_result_changed_in_place_in_backward_is_refused(ask: Callable[[Tensor], Tensor]) -> None:
    """Others still need it."""
    model = twins()

    def loss_fn(m: Any, b: Batch) -> Tensor:
        out = m.one(b["x"])
        shared = ask(out if ask is across.gather else out.mean(0))

        def change(_: Tensor) -> None:
            with torch.no_grad():
                shared.mul_(2)

        shared.register_hook(change)
        return F.mse_loss(out + (shared.mean(0) if ask is across.gather else shared), b["value"])

    options = Options(activations="keep", check=False)
    step = BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=2, options=options)
    with pytest.raises(RuntimeError, match=r"(?s)across\.\w+ of .* was changed in place.*clone it first"):
        step(rows(6, 0))


def test_a_loss_that_changes_within_a_batch_is_refused() -> None:
    """A big batch has one."""
    model = twins()
    optimizer = OPTIMIZERS["adamw"](trained(model))

    def loss_fn(m: Any, b: Batch) -> Tensor:
        out = m.one(b["x"])
        out = out - across.mean(out.mean(0))
        return F.mse_loss(out, b["value"]) if _some(b) else F.cross_entropy(out, b["label"])

    batch = rows(6, 0)
    batch["x"][:, 0] = torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0, -1.0])
    seed()
    before = everything(model, optimizer)
    options = Options(check=False, activations="keep")
    step = BigStep(model, optimizer, loss_fn, micro_batch_size=2, options=options)
    with pytest.raises(LossError, match=r"the loss changes within a batch: its terms are .* in one and .* in another"):
        step(batch)
    assert everything(model, optimizer) == before


@pytest.mark.parametrize("ask", [across.gather, across.sum, across.mean])
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_a_result_changed_in_place_is_refused(ask: Callable[[Tensor], Tensor], activations: str) -> None:
    """It is one tensor for all micro-batches."""
    model = twins()
    optimizer = OPTIMIZERS["adamw"](trained(model))

    def loss_fn(m: Any, b: Batch) -> Tensor:
        out = m.one(b["x"])
        shared = ask(out if ask is across.gather else out.mean(0))
        shared.mul_(2)
        return F.mse_loss(out * shared.sum(0), b["value"])

    seed()
    before = everything(model, optimizer)
    options = Options(activations=activations, check=False)  # type: ignore[arg-type]
    step = BigStep(model, optimizer, loss_fn, micro_batch_size=2, options=options)
    with pytest.raises(RuntimeError, match=r"(?s)across\.\w+ of .* was changed in place.*clone it first"):
        step(rows(6, 0))
    assert everything(model, optimizer) == before


@pytest.mark.parametrize("ask", [across.gather, across.sum])
def test_a_result_without_gradient_changed_in_place(ask: Callable[[Tensor], Tensor]) -> None:
    """Refused, or each micro-batch has its own."""

    def loss_fn(m: Any, b: Batch) -> Tensor:
        weight = ask(b["unit"]).clone() if ask is across.gather else ask(b["unit"].sum(0))
        shared = weight if ask is across.sum else ask(b["unit"])
        shared.add_(1.0)
        return F.mse_loss(m.one(b["x"]) * float(shared.mean()), b["value"])

    try:
        assert_exact(twins, loss_fn, [rows(6, 0)], 2, check=False)
    except RuntimeError as error:
        assert "in place" in str(error)  # noqa: PT017 - either will do


def test_a_single_number_has_no_rows() -> None:
    """Inside and outside of a window."""
    with pytest.raises(LossError, match=r"(?s)takes rows.*0-d tensor.*across\.sum\(x\)"):
        across.gather(torch.tensor(1.0))
    model = twins()
    step = BigStep(
        model, sgd(trained(model)), lambda m, b: across.gather(m.one(b["x"]).mean()).mean(), micro_batch_size=2
    )
    with pytest.raises(LossError, match="takes rows"):
        step(rows(6, 0))


def test_a_count_with_gradient_is_refused() -> None:
    """A count is a number of things."""
    model = twins()
    step = BigStep(
        model,
        sgd(trained(model)),
        lambda m, b: across.once(across.mean(m.one(b["x"]).mean(), m.scale.exp())),
        micro_batch_size=2,
    )
    with pytest.raises(LossError, match="without gradient"):
        step(rows(6, 0))


@pytest.mark.parametrize("how", ["gather", "mean"])
def test_a_second_derivative_is_refused(how: str) -> None:
    """A penalty on the slope of a model that asks would see this micro-batch alone."""

    def loss_fn(m: Any, b: Batch) -> Tensor:
        x = b["x"].clone().requires_grad_()
        out = m.one(x)
        shared = across.gather(out).square().mean(0) if how == "gather" else across.mean(out.square().mean(0))
        (slope,) = torch.autograd.grad((out * shared).square().sum(), x, create_graph=True)
        return F.mse_loss(slope, torch.ones_like(slope)) + F.mse_loss(out, b["value"])

    model = twins()
    optimizer = OPTIMIZERS["adamw"](trained(model))
    before = everything(model, optimizer)
    step = BigStep(model, optimizer, loss_fn, micro_batch_size=2)
    with pytest.raises(RuntimeError, match=rf"across\.{how} of .* cannot be differentiated twice"):
        step(rows(6, 0))
    assert everything(model, optimizer) == before


# Different paths.


def _some(batch: Batch) -> bool:
    return bool(batch["x"][0, 0] > 0)


PATHS: dict[str, LossFunction] = {
    "gathered by some": lambda m, b: F.mse_loss(
        m.one(b["x"]) + (across.gather(m.one(b["x"])).mean(0) if _some(b) else 0), b["value"]
    ),
    "summed by some": lambda m, b: F.mse_loss(
        m.one(b["x"]) + (across.sum(m.one(b["x"]).sum(0)) if _some(b) else 0), b["value"]
    ),
    "something else by some": lambda m, b: F.mse_loss(
        m.one(b["x"]) + (across.gather(m.one(b["x"])).mean(0) if _some(b) else across.mean(m.one(b["x"]).mean(0))),
        b["value"],
    ),
    "another shape": lambda m, b: F.mse_loss(
        m.one(b["x"]) + across.sum(m.one(b["x"])[:, : 3 if _some(b) else 2].sum(0)).sum(), b["value"]
    ),
    "another order": lambda m, b: F.mse_loss(
        m.one(b["x"])
        + sum(
            (across.mean if which else across.sum)(m.one(b["x"]).mean(0)) for which in ((0, 1) if _some(b) else (1, 0))
        ),
        b["value"],
    ),
    "once more by some": lambda m, b: F.mse_loss(
        sum((across.mean(m.one(b["x"]).mean(0)) for _ in range(1 + _some(b))), start=m.one(b["x"])), b["value"]
    ),
    "without gradient in some": lambda m, b: F.mse_loss(
        m.one(b["x"]) + across.mean((m.one(b["x"]) if _some(b) else m.one(b["x"]).detach()).mean(0)), b["value"]
    ),
    "one of two means that look alike": lambda m, b: F.mse_loss(
        m.one(b["x"]) + _either([across.mean(m.one(b["x"]).mean(0) * s) for s in (1, 2)], _some(b)), b["value"]
    ),
    "one of two gathered that look alike": lambda m, b: F.mse_loss(
        m.one(b["x"]) + _either([across.gather(m.one(b["x"]) * s) for s in (1, 2)], _some(b)).mean(0), b["value"]
    ),
    "used in the loss of some": lambda m, b: F.mse_loss(
        m.one(b["x"]) + _used(across.mean(m.one(b["x"]).mean(0)), _some(b)), b["value"]
    ),
}


def _either(values: Sequence[Tensor], first: bool) -> Tensor:
    return values[0] + values[1].detach() if first else values[0].detach() + values[1]


def _used(value: Tensor, used: bool) -> Tensor:
    return value if used else value.detach()


@pytest.mark.parametrize("signs", [(1, -1, -1), (-1, 1, -1), (-1, -1, 1), (-1, 1, 1)])
@pytest.mark.parametrize("how", PATHS)
def test_micro_batches_that_take_different_paths_are_reported(how: str, signs: tuple[int, ...]) -> None:
    """With what each waits at; never a hang, and nothing is changed."""
    batch = rows(6, 0)
    batch["x"][:, 0] = torch.tensor([float(sign) for sign in signs for _ in range(2)])
    model = twins()
    optimizer = OPTIMIZERS["adamw"](trained(model))
    options = Options(check=False, activations="keep")
    step = BigStep(model, optimizer, PATHS[how], micro_batch_size=2, options=options)
    seed()
    before = everything(model, optimizer)
    with pytest.raises(PathsDiffer, match=r"(?s)took different paths.*micro-batch.* (is|are) at .*micro-batch.* at "):
        step(batch)
    assert everything(model, optimizer) == before
    batch["x"][:, 0] = 1.0
    step(batch)  # all take one path


# Where activations stay.


class Runs:
    """What is told of runs, outside of the model, where no second run is undone."""

    def __init__(self) -> None:
        self.calls = 0
        self.masks: list[tuple[int, Tensor]] = []


class Wide(nn.Module):
    """Much inside, little outside; tells how often it ran."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, CLASSES))
        self.how, self.runs = how, Runs()

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3) → (n, classes)."""
        self.runs.calls += 1
        h = self.one(x)
        if self.how == "dropping":
            mask = torch.bernoulli(torch.full_like(h, 0.5))
            worker = current()
            self.runs.masks.append((worker.number if worker is not None else 0, mask))
            h = h * mask
        return h - across.mean(h.mean(0)) if self.how == "meeting" else h


def spread(model: Any, batch: Batch) -> Tensor:
    """A contrastive loss of one encoder."""
    out = model(batch["x"])
    return F.cross_entropy(out @ across.gather(out).T, mine(out))


def apart(model: Any, batch: Batch) -> Tensor:
    """Outputs less their mean."""
    out = model(batch["x"])
    return F.mse_loss(out - across.mean(out.mean(0)), batch["value"])


def test_recomputing_holds_one_micro_batch_at_a_time() -> None:
    """Tensor memory is about that of one micro-batch; kept, it is that of all of them."""

    def peak(n: int, activations: str) -> int:
        model = seeded(Wide)()
        options = Options(activations=activations, check=False)  # type: ignore[arg-type]
        step = BigStep(model, torch.optim.SGD(trained(model), lr=0.1), apart, micro_batch_size=128, options=options)
        batch = {name: leaf for name, leaf in rows(n, 0).items() if name in {"x", "value"}}
        step(batch)
        with LiveBytes() as live:
            step(batch)
        return live.peak

    one, kept, recomputed = peak(128, "keep"), peak(1024, "keep"), peak(1024, "recompute")
    assert kept > 4 * one
    assert recomputed < 1.7 * one


@pytest.mark.parametrize(("activations", "calls"), [("keep", 4), ("recompute", 7), ("auto", 7), ("offload", 4)])
def test_how_often_a_model_runs(activations: str, calls: int) -> None:
    """Twice where it is recomputed, but for the first micro-batch, whose backward comes first."""
    model = seeded(Wide)()
    options = Options(activations=activations, check=False)  # type: ignore[arg-type]
    step = BigStep(model, sgd(trained(model)), spread, micro_batch_size=2, options=options)
    step(rows(8, 0))
    assert isinstance(model, Wide)
    model.runs.calls = 0
    step(rows(8, 1))
    assert model.runs.calls == calls
    assert "forward" not in vars(model)  # as it was


def test_recomputing_draws_the_same_numbers() -> None:
    """Each micro-batch finds its own masks again; with them the big batch has the same gradient."""
    model = seeded(lambda: Wide("dropping"))()
    twin = copy.deepcopy(model)
    assert isinstance(model, Wide)
    options = Options(activations="recompute", check=False)
    seed()
    step = BigStep(model, sgd(trained(model)), spread, micro_batch_size=3, options=options)
    step(rows(7, 0))
    # The first attempt found out that the loss asks, and was given up.
    masks = [[mask for at, mask in model.runs.masks[-5:] if at == number] for number in range(3)]
    assert [len(each) for each in masks] == [1, 2, 2]
    assert all(torch.equal(*each) for each in masks[1:])

    class Given(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return twin.get_submodule("one")(x) * torch.cat([each[0] for each in masks])

    spread(Given(), rows(7, 0)).backward()
    sgd(trained(twin)).step()
    assert distance(weights(model), weights(twin)) <= 1e-12


def plain(model: Any, batch: Batch) -> Tensor:
    """A mean over samples."""
    return F.cross_entropy(model(batch["x"]), batch["label"])


def test_recomputing_a_model_that_meets_inside_is_refused() -> None:
    """It says what to take instead, and nothing is changed; `auto` keeps them then."""
    make = seeded(lambda: Wide("meeting"))
    model = make()
    optimizer = OPTIMIZERS["adamw"](trained(model))
    seed()
    before = everything(model, optimizer)
    options = Options(activations="recompute", check=False)
    step = BigStep(model, optimizer, plain, micro_batch_size=2, options=options)
    with pytest.raises(ConfigurationError, match=r'(?s)model runs again.*across\.mean.*inside.*"keep".*"offload"'):
        step(rows(6, 0))
    assert everything(model, optimizer) == before
    assert "forward" not in vars(model)
    assert_exact(make, plain, [rows(6, 0), rows(5, 1)], 2)
    model = make()
    step = BigStep(model, sgd(trained(model)), plain, micro_batch_size=2, options=Options(check=False))
    step(rows(6, 0))
    assert isinstance(model, Wide)
    model.runs.calls = 0
    step(rows(6, 1))
    assert model.runs.calls == 3


def test_recomputing_batch_norm_is_refused() -> None:
    """Micro-batches meet inside."""
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, CLASSES)))()
    step = BigStep(
        model,
        sgd(trained(model)),
        lambda m, b: F.cross_entropy(m(b["x"]), b["label"]),
        micro_batch_size=2,
        options=Options(activations="recompute"),
    )
    with pytest.raises(ConfigurationError, match="BatchNorm '1' over"):
        step(rows(6, 0))


# Failures.


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("moment", ["before", "after", "backward"])
def test_an_error_in_any_micro_batch_changes_nothing(moment: str, number: int, activations: str) -> None:
    """Before and after a meeting, and in backward; the next step works."""
    model = twins()
    optimizer = OPTIMIZERS["adamw"](trained(model))
    failing = [False]

    def fail(*_: Any) -> None:
        worker = current()
        if failing[0] and worker is not None and worker.number == number:
            raise ZeroDivisionError("of the loss")

    def loss_fn(m: Any, b: Batch) -> Tensor:
        one, two, scale = m(b)
        if moment == "before":
            fail()
        every = across.gather(two)
        if moment == "after":
            fail()
        if moment == "backward":
            one.register_hook(fail)
        return F.cross_entropy(scale * one @ every.T, mine(one))

    options = Options(activations=activations)  # type: ignore[arg-type]
    step = BigStep(model, optimizer, loss_fn, micro_batch_size=2, options=options)
    for each in (0, 2):  # samples are compared in both
        step(rows(6, each))
    seed()
    before = everything(model, optimizer)
    failing[0] = True
    with pytest.raises(ZeroDivisionError, match="of the loss"):
        step(rows(6, 1))
    assert everything(model, optimizer) == before
    failing[0] = False
    step(rows(6, 1))
    assert everything(model, optimizer)[0] != before[0]


def test_a_mean_of_each_class_over_as_many_as_there_are_of_it() -> None:
    """A count for each value: of a class that a micro-batch does not have, it is 0."""

    def loss(model: Any, batch: Any) -> Tensor:
        of = F.one_hot(batch[1], 3).double()
        number = of.sum(0)[:, None]
        means = of.T @ model(batch[0]) / number.clamp(min=1)
        return across.once(across.mean(means, number).var(0).sum())

    torch.manual_seed(0)
    model = nn.Linear(6, 4).double()
    twin = copy.deepcopy(model)
    batch = torch.randn(12, 6, dtype=torch.float64), torch.tensor([0, 0, 1, 0, 1, 2, 2, 1, 2, 2, 0, 1])
    BigStep(model, sgd(trained(model)), loss, micro_batch_size=4, options=Options(check=False))(batch)
    loss(twin, batch).backward()
    sgd(trained(twin)).step()
    assert distance(weights(model), weights(twin)) <= 1e-12
