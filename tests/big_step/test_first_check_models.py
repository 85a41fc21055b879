"""The first-step check: what couples samples inside a model is refused, and nothing else is accused."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import BigStep, Options
from bigbatch.errors import BatchNormError, CoupledLoss, LossError
from tests.bombs import Restless, everything, restless_loss, seed
from tests.support.reference import sgd, trained, weights
from tests.support.samples import CLASSES, Batch, mlp, rows, seeded, sequences

COUPLED = r"(?s)the samples of this batch are coupled: the gradient of \d+ of them is .*Options\(check=False\)"


class Around(nn.Module):
    """Something between two layers, where no graph of a loss is read."""

    def __init__(self, between: Callable[[Tensor], Tensor], width: int = 3) -> None:
        super().__init__()
        self.first, self.between, self.last = nn.Linear(width, 8), between, nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Layer, something, layer."""
        return self.last(self.between(torch.tanh(self.first(x))))


COUPLING: dict[str, Callable[[Tensor], Tensor]] = {
    "attention across the batch": lambda h: (h @ h.T).softmax(-1) @ h,
    "a centred batch": lambda h: h - h.mean(0),
    "a batch divided by its largest": lambda h: h / h.abs().max(),
    "a batch divided by its norm": lambda h: h / h.norm(),
    "the first sample for all": lambda h: h + h[:1],
    "a running sum": lambda h: h.cumsum(0),
    "neighbours": lambda h: h + h.roll(1, 0),
    "a place in the batch": lambda h: h + torch.arange(len(h), dtype=h.dtype)[:, None],
    "a factor of the size": lambda h: h * len(h),
    "a sort": lambda h: h.sort(0).values,
    "a rank": lambda h: h + h.argsort(0).to(h.dtype),
}


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("how", COUPLING)
def test_samples_coupled_inside_a_model_are_refused(how: str, size: int) -> None:
    """In micro-batches of one sample, too, and nothing is changed by it."""
    model = seeded(lambda: Around(COUPLING[how]))()
    optimizer = torch.optim.AdamW(trained(model))
    seed()
    before = everything(model, optimizer)
    step = BigStep(model, optimizer, lambda m, b: F.cross_entropy(m(b["x"]), b["label"]), micro_batch_size=size)
    with pytest.raises(CoupledLoss, match=COUPLED):
        step(rows(8, 0))
    assert everything(model, optimizer) == before
    with pytest.raises(CoupledLoss, match=COUPLED):  # as long as it has not passed
        step(rows(8, 1))


def test_the_first_batch_with_two_samples_is_looked_at() -> None:
    """A first batch of one sample shows nothing."""
    model = seeded(lambda: Around(COUPLING["a centred batch"]))()
    step = BigStep(model, sgd(trained(model)), lambda m, b: F.mse_loss(m(b["x"]), b["value"]), micro_batch_size=2)
    step(rows(1, 0))
    with pytest.raises(CoupledLoss, match=COUPLED):
        step(rows(4, 1))


def test_a_coupling_that_dropout_hides() -> None:
    """Random numbers are turned off to look."""
    model = seeded(lambda: Around(nn.Sequential(nn.Dropout(0.3), _Centred())))()
    step = BigStep(model, sgd(trained(model)), lambda m, b: F.mse_loss(m(b["x"]), b["value"]), micro_batch_size=4)
    with pytest.raises(CoupledLoss, match=COUPLED):
        step(rows(8, 0))


class _Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def test_a_shared_tensor_with_as_many_rows_as_samples() -> None:
    """It was cut, and should not have been: the error says to look for one."""
    anchors = torch.linspace(-1, 1, 64, dtype=torch.float64).view(8, 8)

    def loss_fn(model: Any, batch: Any) -> Tensor:
        model.between = lambda h: h + (h @ batch["anchors"].T).logsumexp(1, keepdim=True)
        return model(batch["x"]).pow(2).mean()

    model = seeded(lambda: Around(torch.tanh))()
    step = BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=4)
    with pytest.raises(CoupledLoss, match="has as many rows as there are samples"):
        step({"x": rows(8, 0)["x"], "anchors": anchors})


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_a_term_for_each_sample_is_refused(n: int) -> None:
    """In even micro-batches a list of samples cannot be told from a list of terms; halves tell."""
    model = mlp()()

    def loss_fn(m: Any, batch: Batch) -> Tensor:
        each = [F.mse_loss(m(x), y) for x, y in zip(batch["x"], batch["value"], strict=True)]
        return torch.stack(each).sum()

    step = BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=n)
    with pytest.raises(LossError, match=r"terms for single samples|are coupled"):
        step(rows(2 * n, 0))


def test_a_step_without_the_check() -> None:
    """The user's word counts."""
    model = seeded(lambda: Around(COUPLING["a centred batch"]))()
    options = Options(check=False)
    loss_fn: Any = lambda m, b: F.mse_loss(m(b["x"]), b["value"])  # noqa: E731
    assert (
        BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=2, options=options)(rows(6, 0)).micro_batches == 3
    )


# No false alarm.


class TrainingOnly(nn.Module):
    """Has dropout, and knows no other mode than training."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.body, self.how = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, CLASSES)), how

    def forward(self, x: Tensor) -> Tensor:
        """Do something else where it is not training."""
        if not self.training:
            if self.how == "raises":
                raise RuntimeError("not for inference")
            if self.how == "has no graph":
                return self.body(x).detach()
        return self.body(x)


def noisy(model: Any, batch: Batch) -> Tensor:
    """Inputs with torch's noise."""
    return F.cross_entropy(model(batch["x"] + torch.randn_like(batch["x"])), batch["label"])


def augmented(model: Any, batch: Batch) -> Tensor:
    """Inputs augmented by Python's numbers."""
    return F.cross_entropy(model(batch["x"] * random.uniform(0.5, 2)), batch["label"])  # noqa: S311 - as a user would


def cropped(model: Any, batch: Batch) -> Tensor:
    """Inputs augmented by numpy's numbers."""
    return F.cross_entropy(model(batch["x"] * np.random.uniform(0.5, 2)), batch["label"])  # noqa: NPY002 - same


def plain(model: Any, batch: Batch) -> Tensor:
    """A mean cross-entropy."""
    return F.cross_entropy(model(batch["x"]), batch["label"])


def summed(model: Any, batch: Batch) -> Tensor:
    """A sum."""
    return F.cross_entropy(model(batch["x"]), batch["label"], reduction="sum")


INNOCENT: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Batch], Tensor]]] = {
    "dropout": (lambda: Around(nn.Dropout(0.4)), plain),
    "dropout, sum": (lambda: Around(nn.Dropout(0.4)), summed),
    "noise in the loss": (lambda: Around(nn.Identity()), noisy),
    "python's numbers": (lambda: Around(nn.Identity()), augmented),
    "numpy's numbers": (lambda: Around(nn.Identity()), cropped),
    "raises in evaluation": (lambda: TrainingOnly("raises"), plain),
    "no graph in evaluation": (lambda: TrainingOnly("has no graph"), plain),
    "layer norm": (lambda: Around(nn.LayerNorm(8)), plain),
    "group norm": (lambda: Around(nn.GroupNorm(2, 8)), plain),
    "rms norm": (lambda: Around(nn.RMSNorm(8)), plain),
    "softmax": (lambda: Around(nn.Softmax(-1)), plain),
    "gelu": (lambda: Around(nn.GELU()), plain),
    "restless": (Restless, restless_loss),
}
PRECISIONS: dict[str, tuple[torch.dtype, bool]] = {
    "float64": (torch.float64, False),
    "float32": (torch.float32, False),
    "autocast": (torch.float32, True),
    "bfloat16": (torch.bfloat16, False),
}


def in_dtype(batch: Batch, dtype: torch.dtype) -> Batch:
    """Floating-point leaves in another dtype."""
    return {name: leaf.to(dtype) if leaf.is_floating_point() else leaf for name, leaf in batch.items()}


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")  # RMSNorm under autocast
@pytest.mark.parametrize(
    ("what", "precision"),
    [
        (what, precision)
        for what in INNOCENT
        for precision in PRECISIONS
        if what != "restless" or precision == "float64"
    ],
)
def test_models_whose_samples_are_apart_are_not_accused(what: str, precision: str) -> None:
    """Whatever is random, normalised per sample or rounded."""
    make, loss_fn = INNOCENT[what]
    dtype, autocast = PRECISIONS[precision]
    for number in range(4):
        seed(number)
        model = make().to(dtype)
        step = BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=5)
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            assert step(in_dtype(rows(9, number), dtype)).micro_batches == 2


class Encoder(nn.Module):
    """A transformer, perhaps in low precision where nobody sees it from outside."""

    def __init__(self, inside: str = "") -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.first, self.inside = nn.Linear(3, 16), inside
        self.body = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.last = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """(n, steps, 3) → (n, steps, 4)."""
        with torch.autocast("cpu", torch.bfloat16) if self.inside == "autocast" else nullcontext():
            return self.last(self.body(self.first(x))).to(torch.float64 if x.dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize(
    ("precision", "inside"),
    [("float64", ""), *((p, i) for p in ("float32", "autocast") for i in ("", "autocast", "bfloat16"))],
)
def test_transformers_are_not_accused(precision: str, inside: str) -> None:
    """A loss in float32 may stand on bf16: its rounding is that of bf16."""
    dtype, autocast = PRECISIONS[precision]
    for number in range(3):
        seed(number)
        model = Encoder(inside).to(torch.bfloat16 if inside == "bfloat16" else dtype)
        step = BigStep(
            model,
            torch.optim.SGD(trained(model), lr=0.1),
            lambda m, b: F.cross_entropy(m(b["x"]).flatten(0, 1), b["labels"].flatten()),
            micro_batch_size=7,
        )
        batch = in_dtype(sequences(12, number), torch.bfloat16 if inside == "bfloat16" else dtype)
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            step(batch)


def test_losses_that_cancel_are_not_accused() -> None:
    """A critic's difference of means is near zero, and its rounding is not."""
    for number in range(30):
        seed(number)
        model = nn.Linear(3, 1)
        with torch.no_grad():
            model.bias.fill_(10.0)
        batch = in_dtype(rows(40, number), torch.float32)
        BigStep(
            model,
            torch.optim.SGD(trained(model), lr=1e-3),
            lambda m, b: m(b["x"]).mean() - m(b["x2"]).mean(),
            micro_batch_size=33,
        )(batch)


def test_batch_norm_is_refused_or_accepted_as_said() -> None:
    """Exact by itself, or refused; accepted statistics of the micro-batch are no accusation, nor are frozen ones."""

    def make() -> nn.Module:
        return seeded(lambda: Around(nn.BatchNorm1d(8)))()

    model = make()
    with pytest.raises(BatchNormError):
        BigStep(model, sgd(trained(model)), plain, micro_batch_size=4, options=Options(batch_norm="refuse"))(rows(8, 0))
    assert BigStep(model, sgd(trained(model)), plain, micro_batch_size=4)(rows(8, 0)).micro_batches == 2
    micro = Options(batch_norm="micro")
    assert BigStep(model, sgd(trained(model)), plain, micro_batch_size=4, options=micro)(rows(8, 0)).micro_batches == 2
    model = make().eval()
    assert BigStep(model, sgd(trained(model)), plain, micro_batch_size=4)(rows(8, 0)).micro_batches == 2


# Once, and without a trace.


@pytest.mark.parametrize("size", [1, 3])
def test_the_check_runs_once_and_changes_nothing(size: int) -> None:
    """The updates are the same without it, bit by bit; once it has looked there are no forwards but the window's."""
    found = []
    for check in (True, False):
        seed()
        model = Restless()
        model.first.eval()
        optimizer = torch.optim.AdamW(trained(model), lr=0.05)
        step = BigStep(model, optimizer, restless_loss, micro_batch_size=size, options=Options(check=check))
        step(rows(6, 0))
        assert (len(model.bomb.seen) > 6 // size) is check
        step(rows(6, 1))  # it looks once more
        model.bomb.seen.clear()
        step(rows(6, 2))
        assert len(model.bomb.seen) == 6 // size
        found.append(everything(model, optimizer))
    assert found[0] == found[1]


def test_the_check_is_run_with_gradients_of_nobody() -> None:
    """It leaves no gradient, also in a model that is not trained."""
    model, other = mlp()(), mlp()()
    step = BigStep(model, sgd(trained(model)), lambda m, b: F.mse_loss(m(b["x"]), other(b["x2"])), micro_batch_size=2)
    before = weights(other)
    step(rows(4, 0))
    assert all(p.grad is None for p in [*model.parameters(), *other.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(before, weights(other), strict=True))


def test_coupling_that_only_training_shows_is_seen_beside_dropout() -> None:
    """Dropout is turned off by itself first: evaluation mode would hide what couples samples in training."""

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.dropout = nn.Linear(4, 1), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.layer(self.dropout(x - x.mean(0) if self.training else x))
            return found

    network = Centred()
    step = BigStep(
        network,
        torch.optim.SGD(network.parameters(), lr=0.1),
        lambda network, x: (network(x) - 1).square().mean(),
        micro_batch_size=4,
    )
    with pytest.raises(CoupledLoss):
        step(torch.randn(8, 4) + 3)


# Dropout that is no module of its own: training mode stays on while it is looked for coupled samples.


class DropPath(nn.Module):
    """Drops whole samples by its own numbers, as libraries of image models do."""

    def forward(self, x: Tensor) -> Tensor:
        """Nothing where it is not training."""
        return x * x.new_empty(len(x), 1).bernoulli_(0.5) if self.training else x


class Inside(nn.Module):
    """Something random between two layers, and perhaps samples that are centred in training alone."""

    def __init__(
        self, drop: Callable[[Tensor, bool], Tensor], *, coupled: bool, parts: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, CLASSES)
        self.drop, self.coupled, self.parts = drop, coupled, parts

    def forward(self, x: Tensor) -> Tensor:
        """Layer, something, layer."""
        hidden = self.first(x)
        if self.training and self.coupled:
            hidden = hidden - hidden.mean(0)
        if self.parts is not None:
            hidden = self.parts(hidden)
        return self.last(hidden + self.drop(hidden, self.training))


class Recurrent(nn.Module):
    """Two layers with dropout between them, which only the recurrent module knows of."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.body = kind(8, 8, 2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """One step of one sequence per sample."""
        return self.body(x[:, None])[0][:, 0]


class Attending(nn.Module):
    """Attention within a sample, with dropout of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Two places per sample."""
        places = x.unflatten(1, (2, 4))
        return self.body(places, places, places, need_weights=False)[0].flatten(1)


def _attended(h: Tensor, training: bool) -> Tensor:
    places = h.unflatten(1, (2, 4))
    return F.scaled_dot_product_attention(places, places, places, dropout_p=0.5 if training else 0.0).flatten(1)


def _nothing(h: Tensor, training: bool) -> Tensor:
    del training
    return torch.zeros_like(h)


DROPS: dict[str, tuple[Callable[[Tensor, bool], Tensor], Callable[[], nn.Module] | None]] = {
    "F.dropout": (lambda h, on: F.dropout(h, 0.5, on), None),
    "F.dropout in place": (lambda h, on: F.dropout(h.clone(), training=on, inplace=True), None),
    "F.dropout by names": (lambda h, on: F.dropout(input=h, p=0.5, training=on), None),
    "F.alpha_dropout": (lambda h, on: F.alpha_dropout(h, 0.5, on), None),
    "F.feature_alpha_dropout": (lambda h, on: F.feature_alpha_dropout(h[..., None], 0.5, on)[..., 0], None),
    "F.dropout1d": (lambda h, on: F.dropout1d(h[..., None], 0.5, on)[..., 0], None),
    "F.dropout2d": (lambda h, on: F.dropout2d(h[..., None, None], 0.5, on)[..., 0, 0], None),
    "torch.dropout": (lambda h, on: torch.dropout(h, 0.5, on), None),
    "torch.dropout_": (lambda h, on: torch.dropout_(h.clone(), 0.5, on), None),
    "torch.native_dropout": (lambda h, on: torch.native_dropout(h, 0.5, on)[0], None),
    "torch.ops.aten.dropout": (lambda h, on: torch.ops.aten.dropout.default(h, 0.5, on), None),
    "F.rrelu": (lambda h, on: F.rrelu(h, training=on), None),
    "torch.rrelu": (lambda h, on: torch.rrelu(h, 0.1, 0.4, on), None),
    "attention": (_attended, None),
    "multi-head attention": (_nothing, Attending),
    "LSTM": (_nothing, lambda: Recurrent(nn.LSTM)),
    "GRU": (_nothing, lambda: Recurrent(nn.GRU)),
    "RReLU": (_nothing, nn.RReLU),
    "DropPath": (_nothing, DropPath),
}


def dropping(what: str, *, coupled: bool, size: int = 4) -> tuple[BigStep, nn.Module]:
    """A step of a model with some dropout."""
    drop, parts = DROPS[what]
    model = seeded(lambda: Inside(drop, coupled=coupled, parts=parts and parts()))()
    return BigStep(model, sgd(trained(model)), plain, micro_batch_size=size), model


@pytest.mark.parametrize("what", DROPS)
def test_no_dropout_hides_what_couples_samples_in_training(what: str) -> None:
    """It is turned off without leaving training mode, and nothing is changed."""
    step, model = dropping(what, coupled=True)
    before = [module.training for module in model.modules()]
    with pytest.raises(CoupledLoss, match=COUPLED):
        step(rows(8, 0))
    assert [module.training for module in model.modules()] == before


@pytest.mark.parametrize("what", DROPS)
def test_dropout_alone_is_neither_accused_nor_left_unchecked(what: str) -> None:
    """There is no warning, and afterwards it drops again."""
    step, model = dropping(what, coupled=False)
    x = rows(8, 0)["x"]
    assert step(rows(8, 0)).micro_batches == 2
    assert not torch.equal(model(x), model(x))


class Noisy(nn.Module):
    """Adds noise in training that no dropout is, and may centre its samples."""

    def __init__(self, centred: str = "never") -> None:
        super().__init__()
        self.first, self.last, self.centred = nn.Linear(3, 8), nn.Linear(8, CLASSES), centred

    def forward(self, x: Tensor) -> Tensor:
        """Layer, noise, layer."""
        hidden = self.first(x)
        if self.centred == "always" or (self.training and self.centred == "training"):
            hidden = hidden - hidden.mean(0)
        return self.last(hidden + torch.randn_like(hidden) if self.training else hidden)


def test_noise_is_drawn_again_and_hides_nothing() -> None:
    """A part of a batch draws the numbers of its own rows: there is no warning, and coupling beside it is refused."""
    for centred in ("never", "training"):
        model = seeded(lambda: Noisy(centred))()  # noqa: B023 - called at once
        step = BigStep(model, sgd(trained(model)), plain, micro_batch_size=4)
        with pytest.raises(CoupledLoss, match=COUPLED) if centred == "training" else nullcontext():
            _ = [step(rows(8, number)) for number in range(2)]


def test_coupling_that_evaluation_mode_shows_is_refused_beside_noise() -> None:
    """The refusal comes before the warning."""
    model = seeded(lambda: Noisy("always"))()
    step = BigStep(model, sgd(trained(model)), plain, micro_batch_size=4)
    with pytest.raises(CoupledLoss, match=COUPLED):  # a warning would be the error here
        step(rows(8, 0))


class OwnBatchNorm(nn.Module):
    """A BatchNorm that no layer of torch's is."""

    def forward(self, x: Tensor) -> Tensor:
        """By the batch in training, by constants otherwise."""
        mean, variance = x.new_zeros(8), x.new_ones(8)
        return F.batch_norm(x, mean, variance, training=self.training)


@pytest.mark.parametrize(
    ("between", "said"),
    [
        (lambda: nn.BatchNorm1d(8), False),
        (lambda: nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5)), False),
        (OwnBatchNorm, True),
    ],
)
def test_accepted_statistics_do_not_hide_what_else_training_does(between: Any, said: bool) -> None:
    """BatchNorm rests for the look, and the rest stays in training; where that cannot be told apart it is said."""
    micro = Options(batch_norm="micro")
    for coupled in (False, True):
        model = seeded(lambda: Inside(_nothing, coupled=coupled, parts=between()))()  # noqa: B023 - called at once
        step = BigStep(model, sgd(trained(model)), plain, micro_batch_size=4, options=micro)
        expected = said or coupled
        with pytest.warns(UserWarning, match="could not see, in training mode") if expected else nullcontext():
            step(rows(8, 0))


def test_a_shared_tensor_that_was_cut_is_found_at_size_one() -> None:
    """Class weights with as many rows as there are samples broadcast at one sample; two fail, and all differ."""
    model = seeded(lambda: nn.Linear(3, 5).double())()
    batch = (torch.randn(5, 3, dtype=torch.float64), torch.ones(5, 5, dtype=torch.float64), torch.rand(5))

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1], pos_weight=batch[2].double())

    with pytest.raises(CoupledLoss, match="has as many rows as there are samples"):
        BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=1)(batch)
