"""The first check: what couples samples behind the graph is refused, and no program that is exact is accused."""

import copy
import random
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

from bigbatch import BigStep, Options, counted
from bigbatch.errors import BatchNormError, CoupledLoss, LossError
from tests.support.bombs import Restless, everything, restless_loss, seed
from tests.support.messages import approve
from tests.support.reference import distance, trained, weights
from tests.support.samples import mlp, rows

Batch = tuple[Tensor, Tensor]
Loss = Callable[[Any, Batch], Tensor]
Between = Callable[[Tensor, bool], Tensor]
COUPLED = r"(?s)the samples of this batch are coupled: the gradient of \d+ of them is .*Options\(check=False\)"


def data(samples: int, number: int = 0, dtype: torch.dtype = torch.float64, classes: int = 4) -> Batch:
    """Features and labels."""
    by = torch.Generator().manual_seed(number)
    return torch.randn(samples, 8, generator=by).to(dtype), torch.randint(classes, (samples,), generator=by)


class Net(nn.Module):
    """Two layers, something between them that may know of training mode, and perhaps samples that are centred there."""

    def __init__(
        self, between: Between = lambda h, _: h, parts: nn.Module | None = None, classes: int = 4, centred: str = ""
    ) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, classes)
        self.between, self.parts, self.centred = between, parts, centred

    def forward(self, x: Tensor) -> Tensor:
        """(n, 8) → (n, classes)."""
        hidden = torch.tanh(self.first(x))
        if self.centred == "always" or (self.training and self.centred == "training"):
            hidden = hidden - hidden.mean(0)
        if self.parts is not None:
            hidden = self.parts(hidden)
        return self.last(self.between(hidden, self.training))


def net(number: int = 0, dtype: torch.dtype = torch.float64, **named: Any) -> Net:
    """The same for the same number."""
    torch.manual_seed(number)
    return Net(**named).to(dtype)


def step_of(model: nn.Module, loss: Loss, size: int = 4, *, lr: float = 0.1, **options: Any) -> BigStep:
    """A step with SGD."""
    return BigStep(
        model, torch.optim.SGD(trained(model), lr=lr), loss, micro_batch_size=size, options=Options(**options)
    )


def plain(model: Any, batch: Batch) -> Tensor:
    """A mean cross-entropy."""
    return F.cross_entropy(model(batch[0]), batch[1])


# Losses that are refused.


def _advantage(x: Tensor) -> Tensor:
    reward = x.square().sum(1)
    return (reward - reward.mean()) / (reward.std(correction=0) + 1e-8)


def advantages(model: Any, batch: Batch) -> Tensor:
    """A policy gradient with advantages normalized over the batch."""
    return (F.cross_entropy(model(batch[0]), batch[1], reduction="none") * _advantage(batch[0])).mean()


def on_policy(model: Any, batch: Batch) -> Tensor:
    """As TRL has it: with normalized advantages it is zero at any weights, and its gradient is not."""
    chosen = model(batch[0]).log_softmax(-1).gather(1, batch[1][:, None])[:, 0]
    return -((chosen - chosen.detach()).exp() * _advantage(batch[0])).mean()


def gradient_alone(model: Any, batch: Batch) -> Tensor:
    """Moves the gradient, and not the loss."""
    found = model(batch[0])
    together = found.detach().mean(0)
    return F.cross_entropy(found, batch[1]) + 0.5 * ((found - found.detach()) * together).sum(1).mean()


def class_weights(model: Any, batch: Batch) -> Tensor:
    """Classes weighed by how often they are in the batch."""
    logits = model(batch[0])
    weight = 1 / torch.bincount(batch[1], minlength=logits.shape[1]).clamp(min=1).to(logits.dtype)
    return F.cross_entropy(logits, batch[1], weight=weight)


def mined(model: Any, batch: Batch, *, smaller: bool = False) -> Tensor:
    """Samples above a detached threshold; or the half with the smaller loss, as against noisy labels."""
    each = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return each[each.detach().argsort()[: len(each) // 2] if smaller else each.detach() > each.detach().mean()].mean()


def several_counts(model: Any, batch: Batch) -> Tensor:
    """Normalized advantages beside a mean over some of the features and a sum."""
    scores = model(batch[0])
    chosen = scores[batch[0][:, :4] > 0]
    return advantages(model, batch) + 0.5 * chosen.square().mean() + 0.01 * counted(scores.abs().sum(), "sum")


def lacking(model: Any, batch: Batch, *, told: bool = False) -> Tensor:
    """A term for samples of one class, which some micro-batches have none of; perhaps counted there, too."""
    scores, chosen, loss = model(batch[0]), batch[1] == 3, plain(model, batch)
    beside = scores[chosen].square().mean() if chosen.any() else 0 * loss
    if told:
        return loss + counted(beside, int(chosen.sum()) * scores.shape[1])
    return loss + beside if chosen.any() else loss


# Models that are refused.

INSIDE: dict[str, Between] = {
    "attention across the batch": lambda h, _: (h @ h.T).softmax(-1) @ h,
    "a centred batch": lambda h, _: h - h.mean(0),
    "a batch divided by its largest": lambda h, _: h / h.abs().max(),
    "a batch divided by its norm": lambda h, _: h / h.norm(),
    "the first sample for all": lambda h, _: h + h[:1],
    "a running sum": lambda h, _: h.cumsum(0),
    "neighbours": lambda h, _: h + h.roll(1, 0),
    "a place in the batch": lambda h, _: h + torch.arange(len(h), dtype=h.dtype)[:, None],
    "a factor of the size": lambda h, _: h * len(h),
    "a sort": lambda h, _: h.sort(0).values,
    "a rank": lambda h, _: h + h.argsort(0).to(h.dtype),
}


class Carrying(nn.Module):
    """Each call begins with the state that the latest has left, as in truncated backpropagation; or where it fits."""

    def __init__(self, *, fitting: bool = False) -> None:
        super().__init__()
        self.cell, self.last, self.fitting = nn.GRUCell(8, 16), nn.Linear(16, 4), fitting
        self.h: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """One step."""
        if self.h is not None and self.fitting and len(self.h) != len(x):
            self.h = None
        found: Tensor = self.cell(x, self.h)
        self.h = found.detach()
        return self.last(found)


class GhostNorm(nn.Module):
    """BatchNorm over virtual batches of a fixed size, as tabular networks have it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.size = nn.BatchNorm1d(8), size

    def forward(self, x: Tensor) -> Tensor:
        """Normalize one virtual batch after the other."""
        return torch.cat([self.norm(each) for each in x.split(self.size)])


def pairs(model: Any, batch: Batch) -> Tensor:
    """Fails for one sample."""
    found = model(batch[0]).view(-1, 2, 4)
    return (found - found.detach().mean(0)).square().mean()


def mixed(model: nn.Module, batch: Batch) -> Tensor:
    """Each sample mixed with another one, as mixup does: no part of an order is the order of a part."""
    return F.cross_entropy(model(batch[0] + 0.3 * batch[0][torch.randperm(len(batch[0]))]), batch[1])


def turned(model: nn.Module, batch: Batch) -> Tensor:
    """Noise on two places of each sample, places first: no rows of it in one piece are a part's."""
    places = batch[0].unflatten(1, (2, 4)).transpose(0, 1).flatten(0, 1)
    noisy = places + 0.3 * torch.randn_like(places)
    return F.cross_entropy(model(noisy.unflatten(0, (2, -1)).transpose(0, 1).flatten(1)), batch[1])


class Reentrant(nn.Linear):
    """A layer in a checkpoint of the older kind, whose gradient cannot be asked for: the losses are compared."""

    def forward(self, x: Tensor) -> Tensor:
        """(n, 8) → (n, 8)."""
        found: Tensor = checkpoint(super().forward, x, use_reentrant=True)
        return found


class Refused(NamedTuple):
    """A program that no split computes."""

    loss: Any = plain
    make: Callable[..., nn.Module] = net  # of a seed, a dtype and `classes`
    sizes: tuple[int, ...] = (4,)
    samples: int = 32
    classes: int = 4
    said: str = COUPLED
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32)


BOTH = (1, 3)
LACKING = "a term that some parts lack"
REFUSED = {
    "advantages beside other counts": Refused(several_counts),
    "normalized advantages": Refused(advantages),
    "an on-policy loss": Refused(on_policy),
    "an on-policy loss, one at a time": Refused(on_policy, sizes=(1,), samples=8),
    "in low precision, which hides the loss": Refused(on_policy, dtypes=(torch.bfloat16,)),
    "a gradient alone": Refused(gradient_alone),
    "class weights": Refused(class_weights),
    "class weights of 1,000 classes": Refused(class_weights, sizes=(2, 32), samples=256, classes=1000),
    "mined examples": Refused(mined),
    "the smaller half": Refused(partial(mined, smaller=True)),
    "half of the batch": Refused(
        lambda m, b: (m(b[0])[:, :, None] - b[0][: len(b[0]) // 2].T.flatten()).square().mean(), samples=12
    ),
    "pairs, of which a part fails": Refused(pairs, samples=24),
    "a term for each sample": Refused(
        lambda m, b: torch.stack([F.mse_loss(m(x), x[:4]) for x in b[0]]).sum(),
        sizes=(2, 3, 5),
        samples=10,
        said="terms for single samples|coupled",
    ),
    "one row of all": Refused(
        lambda m, b: -m(b[0])[:, 0].view(1, -1).log_softmax(1).mul(b[0][:, 0]).sum(1).mean(), samples=12
    ),
    "keys of all": Refused(
        lambda m, b: torch.bmm(m(b[0])[:, 0].view(1, -1, 1), b[0][:, 0].view(1, 1, -1)).square().mean(), samples=12
    ),
    LACKING: Refused(lacking, sizes=(1, 2), said=r"counted\(0 \* loss, 0\)"),
    "a weak coupling beside BatchNorm": Refused(
        lambda m, b: plain(m, b) + 0.2 * advantages(m, b),  # its statistics do not excuse it: the check uses none
        lambda *how, **named: net(*how, parts=nn.BatchNorm1d(8), **named),
        (16,),
        128,
    ),
    "a reentrant checkpoint": Refused(advantages, lambda *how, **named: net(*how, parts=Reentrant(8, 8), **named)),
    "eval mode shows it beside an order": Refused(
        make=partial(net, between=lambda h, on: h + 0.3 * h[torch.randperm(len(h))] if on else h, centred="always"),
        samples=8,
    ),
    "virtual batches": Refused(
        make=lambda *how, **named: net(*how, parts=GhostNorm(4), **named),
        samples=24,
        said=r"BatchNorm is called \d+ times .*ghost",
    ),
    "a state that is left for the next call": Refused(
        make=lambda *how, **_: Carrying(fitting=True).to(how[1]), samples=8
    ),
    **{what: Refused(make=partial(net, between=between), sizes=BOTH, samples=8) for what, between in INSIDE.items()},
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("what", REFUSED)
def test_coupled_samples_are_refused_before_the_first_update(what: str) -> None:
    """On each of two seeds, also after a batch of one sample, which shows nothing; nothing is changed."""
    case = REFUSED[what]
    for dtype, size, number in product(case.dtypes, case.sizes, range(2)):
        model = case.make(number, dtype, classes=case.classes)
        optimizer = torch.optim.AdamW(trained(model))
        step = BigStep(model, optimizer, case.loss, micro_batch_size=size)
        if what in INSIDE:
            step(data(1, 0, dtype))
        before = everything(model, optimizer)
        with pytest.raises(LossError, match=case.said):
            step(data(case.samples, number, dtype, case.classes))
        assert everything(model, optimizer) == before


# Programs that are exact.


def vae(model: Any, batch: Batch) -> Tensor:
    """As the examples of torch have it."""
    mean, logarithm = model[0](batch[0]).chunk(2, 1)
    found = model[1](mean + torch.randn_like(mean) * (logarithm / 2).exp())
    divergence = -0.5 * (1 + logarithm - mean.square() - logarithm.exp()).sum(1).mean()
    return F.mse_loss(found, batch[0], reduction="none").sum(1).mean() + divergence


def diffusion(model: Any, batch: Batch) -> Tensor:
    """Noise of a random strength for each sample."""
    x = batch[0]
    time, noise = torch.randint(1, 10, (len(x),)), torch.randn_like(x)
    strength = (time / 10).to(x.dtype)[:, None]
    return F.mse_loss(model(x * (1 - strength) + noise * strength), noise[:, :4])


def augmented(model: Any, batch: Batch) -> Tensor:
    """Noise, a flip for some samples, and factors of Python's and numpy's numbers for all."""
    x = batch[0] + 0.1 * torch.randn(batch[0].shape, dtype=batch[0].dtype)
    flipped = torch.where(torch.rand(len(x), 1) < 0.5, x.flip(1), x)
    factor = random.uniform(0.9, 1.1) * np.random.uniform(0.9, 1.1)  # noqa: NPY002, S311 - as a user would
    return F.cross_entropy(model(flipped * factor), batch[1])


def one_by_one(model: Any, batch: Batch) -> Tensor:
    """Python's numbers for each sample go on from part to part."""
    factors = torch.tensor([random.uniform(0.5, 2) for _ in batch[0]], dtype=batch[0].dtype)  # noqa: S311
    return F.cross_entropy(model(batch[0] * factors[:, None]), batch[1])


def masked(model: Any, batch: Batch) -> Tensor:
    """Features are left out by numbers that are drawn from probabilities of the data."""
    keep = torch.bernoulli(batch[0].sigmoid())
    chosen = torch.multinomial(batch[0].softmax(1), 2)
    return F.cross_entropy(model(batch[0] * keep + batch[0].gather(1, chosen).sum(1, keepdim=True)), batch[1])


def counts(model: Any, batch: Batch) -> Tensor:
    """Terms over samples, over some features, added up and counted by hand, one used twice, and a regularizer."""
    scores = model(batch[0])
    chosen = scores[batch[0][:, :4] > 0]
    once = sum(p.square().sum() for p in model.parameters())
    terms = counted(chosen.square().mean(), chosen.numel()) * 0.3 - 0.01 * scores.abs().sum()
    return 1 - F.cross_entropy(scores, batch[1]) + terms + 1e-3 * once


def quadruples(model: Any, batch: Batch) -> Tensor:
    """The largest features of each four samples; takes more memory than a piece may in any case."""
    _ = batch[0].new_ones(1 << 23)
    return model(batch[0]).view(-1, 4, 4).flatten(1).topk(5, dim=1).values.mean()


def _unwatched(h: Tensor, _: bool) -> Tensor:
    """Fail under a mode that sees all operations, as flex attention does."""
    if _get_current_dispatch_mode() is not None:
        raise NotImplementedError
    return h


class Recurrent(nn.LSTM):
    """Two layers with dropout between them, which only the recurrent module knows of."""

    def forward(self, x: Tensor, *_: Any) -> Any:  # type: ignore[override]
        """One step of one sequence per sample."""
        return super().forward(x[:, None])[0][:, 0]


def _attended(h: Tensor, training: bool) -> Tensor:
    places = h.unflatten(1, (2, 4))
    return F.scaled_dot_product_attention(places, places, places, dropout_p=0.5 if training else 0.0).flatten(1)


RANDOM: dict[str, dict[str, Any]] = {
    "F.dropout": {"between": lambda h, on: F.dropout(h, 0.5, on)},
    "F.alpha_dropout": {"between": lambda h, on: F.alpha_dropout(h, 0.5, on)},
    "torch.native_dropout": {"between": lambda h, on: torch.native_dropout(h, 0.5, on)[0]},
    "F.rrelu": {"between": lambda h, on: F.rrelu(h, training=on)},
    "noise": {"between": lambda h, on: h + torch.randn_like(h) if on else h},
    "attention": {"between": _attended},
    "LSTM": {"parts": lambda: Recurrent(8, 8, 2, dropout=0.5, batch_first=True)},
    "DropPath": {"between": lambda h, on: h * h.new_empty(len(h), 1).bernoulli_(0.5) if on else h},
}


def drawing(what: str, centred: str = "") -> Net:
    """A model that draws numbers."""
    named = {name: value() if name == "parts" else value for name, value in RANDOM[what].items()}
    return net(centred=centred, **named)


@pytest.mark.parametrize("what", RANDOM)
def test_random_numbers_hide_nothing_and_are_not_accused(what: str) -> None:
    """Coupling in training mode alone is refused beside them; without it there is no warning, and modes stay."""
    model = drawing(what, centred="training")
    modes = [module.training for module in model.modules()]
    with pytest.raises(CoupledLoss, match=COUPLED):
        step_of(model, plain)(data(8))
    assert [module.training for module in model.modules()] == modes
    model = drawing(what)
    assert step_of(model, plain)(data(8)).micro_batches == 2
    assert not torch.equal(model(data(8)[0]), model(data(8)[0]))


EXACT: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "vae": (lambda: nn.ModuleList([nn.Linear(8, 6), nn.Linear(3, 8)]), vae),
    "diffusion": (partial(drawing, "F.dropout"), diffusion),
    "augmented": (partial(drawing, "F.dropout"), augmented),
    "masked": (partial(drawing, "F.dropout"), masked),
    "counts": (partial(drawing, "F.dropout"), counts),
    "a sum": (partial(drawing, "F.dropout"), lambda m, b: 1 - F.cross_entropy(m(b[0]), b[1], reduction="sum")),
    LACKING: (partial(drawing, "F.dropout"), partial(lacking, told=True)),
    "quadruples": (partial(drawing, "F.dropout"), quadruples),
    "an operation that cannot be watched": (lambda: net(between=_unwatched), plain),
    "checkpointed": (partial(drawing, "F.dropout"), lambda m, b: plain(partial(checkpoint, m, use_reentrant=False), b)),
    "raises in evaluation": (lambda: net(between=lambda h, on: F.dropout(h) if on else 1 / 0), plain),
    "no graph in evaluation": (lambda: net(between=lambda h, on: F.dropout(h) if on else h.detach()), plain),
    "layer norm": (lambda: net(parts=nn.LayerNorm(8)), plain),
    "group norm": (lambda: net(parts=nn.GroupNorm(2, 8)), plain),
    "softmax": (lambda: net(parts=nn.Softmax(-1)), plain),
    "a frozen batch norm": (lambda: net(parts=nn.BatchNorm1d(8)).eval(), plain),
    "batch norm": (lambda: net(parts=nn.BatchNorm1d(8)), plain),
    "a transformer": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (2, 4)),
            nn.TransformerEncoderLayer(4, 2, 16, batch_first=True),
            nn.Flatten(),
            nn.Linear(8, 4),
        ),
        plain,
    ),
}
PRECISIONS = {"float64": torch.float64, "float32": torch.float32, "autocast": torch.float32, "bf16": torch.bfloat16}


UNFIT = {*product(("masked", "counts"), ("autocast", "bf16")), ("batch norm", "bf16"), (LACKING, "bf16")}  # refused


@pytest.mark.parametrize(("what", "precision"), [each for each in product(EXACT, PRECISIONS) if each not in UNFIT])
def test_exact_programs_are_not_accused(what: str, precision: str) -> None:
    """Neither a warning nor an error, at any of the checks; the step draws the numbers that it draws without it."""
    (make, loss), dtype, found = EXACT[what], PRECISIONS[precision], []
    for check in (True, False):
        seed()
        torch.manual_seed(0)
        model = make().to(dtype)
        step = step_of(model, loss, lr=1e-2, check=check)
        with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            warnings.simplefilter("error")
            _ = [step(data(20, number, dtype)) for number in range(2)]
        found.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


LONE: dict[str, Loss] = {
    "parts of a sample": lambda m, b: F.softplus(-m(b[0]).flatten().view(len(b[0]), 4).sum(1)).mean(),
    "a product for each sample": lambda m, b: -torch.einsum("bc,bc->b", m(b[0]), b[0][:, :4]).exp().mean(),
    "choices of each sample": lambda m, b: torch.einsum("bd,bkd->bk", m(b[0]), b[0].view(-1, 2, 4)).exp().mean(),
}


@pytest.mark.parametrize("size", [1, 3, "auto"])
@pytest.mark.parametrize("what", LONE)
def test_a_sample_alone_is_taken_for_one(what: str, size: Any) -> None:
    """Where a graph does not show whether one row is a sample or all of them, the check does."""
    loss, model, twin, batch = LONE[what], net(), net(), data(7)
    step, optimizer = step_of(model, loss, size), torch.optim.SGD(trained(twin), lr=0.1)
    for _ in range(2):
        step(batch)
        optimizer.zero_grad()
        loss(twin, batch).backward()
        optimizer.step()
    assert distance(weights(model), weights(twin)) <= 1e-12


class InBlocks(nn.Module):
    """Adds up in blocks that depend on the number of rows, as kernels of a GPU are chosen; perhaps without a graph."""

    def __init__(self, inside: torch.dtype, coupling: float = 0.0, *, frozen: bool = False) -> None:
        super().__init__()
        self.inside, self.coupling, self.frozen = inside, coupling, frozen
        self.first, self.last = nn.Parameter(torch.randn(64, 8), requires_grad=not frozen), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply, block by block."""
        x = x.repeat(1, 8)
        with torch.set_grad_enabled(not self.frozen):
            given, weight = x.to(self.inside), self.first.to(self.inside)
            found = torch.zeros(len(x), 8, dtype=self.inside)
            for block in torch.arange(64).split(3 + len(x) % 5):
                found = found + given[:, block] @ weight[block]
        hidden = torch.tanh(found.to(self.last.weight.dtype) * 0.1)
        return self.last(hidden + self.coupling * hidden.mean(0))


@pytest.mark.parametrize(
    ("dtype", "inside", "coupling"),
    [
        (torch.float64, torch.float64, 1e-4),
        (torch.float64, torch.float32, 0.2),
        (torch.float64, torch.bfloat16, 30.0),
        (torch.float32, torch.bfloat16, 30.0),
    ],
)
def test_the_tolerance_is_that_of_the_least_precise_numbers(
    dtype: torch.dtype, inside: torch.dtype, coupling: float
) -> None:
    """Also where no gradient comes and no graph shows them; a batch in less than the model is no excuse."""
    cast: Loss = lambda m, b: plain(m, (b[0].to(dtype), b[1]))  # noqa: E731
    for frozen, number in product((False, True), range(2)):
        torch.manual_seed(number)
        step_of(InBlocks(inside, frozen=frozen).to(dtype), cast, 24)(data(64, number, torch.float32))
        torch.manual_seed(number)
        with pytest.raises(CoupledLoss):
            step_of(InBlocks(inside, coupling, frozen=frozen).to(dtype), cast, 24)(data(64, number, torch.float32))


@pytest.mark.parametrize("scale", [1e2, 1e4])
def test_terms_that_cancel_leave_their_rounding(scale: float) -> None:
    """A critic's loss is small beside what it says of real and of fake samples; a coupling is refused all the same."""

    def critic(m: Any, b: Batch) -> Tensor:
        both = m(torch.cat(b))
        return (both[: len(b[0])].mean(0) - both[len(b[0]) :].mean(0)).view(1)

    loss: Loss
    for number, loss in product(range(2), (critic, lambda m, b: m(b[0]).sum() - m(b[1]).sum())):
        torch.manual_seed(number)
        last = nn.Linear(64, 1)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), last)
        last.bias.data.fill_(scale)
        last.weight.data.mul_(scale)
        real = torch.randn(64, 64)
        batch = real, real + 1e-3 * torch.randn(64, 64)
        step_of(model, loss, 8, lr=1e-9)(batch)
        with pytest.raises(CoupledLoss):
            step_of(model, lambda m, b: loss(m, (b[0] - b[0].mean(0), b[1])), 8, lr=1e-9)(batch)  # noqa: B023 - called at once


def penalized(model: Any, batch: Batch) -> Tensor:
    """A gradient penalty."""
    x = batch[0].requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


@pytest.mark.parametrize(
    ("loss", "size"),
    [
        *((lambda m, b: m(b[0]).view(-1, 2, 4).flatten(1).topk(5, dim=1).values.mean(), size) for size in (2, 4, 6)),
        *((penalized, size) for size in (1, 4)),
        *((loss, 24) for loss in (mined, advantages)),
    ],
)
def test_a_check_that_cannot_run_is_no_error(loss: Any, size: int) -> None:
    """Where pieces or parts fail that are not the step's own, others are compared; one micro-batch is the big batch."""
    calls = [0]

    def failing(model: Any, batch: Batch) -> Tensor:
        calls[0] += 1
        if calls[0] == 2:
            raise ZeroDivisionError("once, in the check")
        return loss(model, batch)

    assert step_of(net(), failing if size == 4 else loss, size)(data(24)).micro_batches == 24 // size


def test_norms_and_tensors_of_pieces() -> None:
    """A batch in one virtual batch is exact, and accepted statistics are; one cut of what all samples share is not."""
    assert step_of(net(parts=GhostNorm(100)), plain, 12)(data(24)).micro_batches == 2
    assert step_of(net(parts=nn.BatchNorm1d(8)), plain, batch_norm="micro")(data(8)).micro_batches == 2
    with pytest.raises(BatchNormError):
        step_of(net(parts=nn.BatchNorm1d(8)), plain, batch_norm="refuse")(data(8))

    def own_rows(model: Any, batch: Batch) -> Tensor:
        ones = torch.ones(len(batch[0]), 4).double()
        return F.binary_cross_entropy_with_logits(model(batch[0]), ones, pos_weight=batch[1])

    with pytest.raises(CoupledLoss, match="as many rows"):
        step_of(net(), own_rows, 1)((data(4)[0], torch.rand(4).double()))


class OwnBatchNorm(nn.Module):
    """A BatchNorm that no layer of torch's is."""

    def forward(self, x: Tensor) -> Tensor:
        """By the batch in training, by constants otherwise."""
        return F.batch_norm(x, x.new_zeros(8), x.new_ones(8), training=self.training)


@pytest.mark.parametrize(
    ("parts", "said"),
    [(lambda: nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5)), False), (OwnBatchNorm, True)],
)
def test_accepted_statistics_do_not_hide_what_else_training_does(parts: Any, said: bool) -> None:
    """BatchNorm rests meanwhile, and all else stays in training; where that cannot be told apart it is said."""
    for centred in ("", "training"):
        warned = said or bool(centred)
        with pytest.warns(UserWarning, match="could not see, in training mode") if warned else nullcontext():
            step_of(net(parts=parts(), centred=centred), plain, batch_norm="micro")(data(8))


def test_a_compiled_model_stays_compiled() -> None:
    """The check runs it as it is written, and the step as it was compiled."""
    model, calls = net(), list[int]()

    def backend(graph: Any, _: Any) -> Any:
        def run(*given: Any) -> Any:
            calls.append(1)
            return graph(*given)

        return run

    compiled = torch.compile(model, backend=backend)
    step = step_of(model, lambda _, b: plain(compiled, b))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        _ = [step(data(12, number)) for number in range(2)]
    assert len(calls) == 6


@pytest.mark.parametrize("size", [1, 3])
def test_the_check_runs_once_and_changes_nothing(size: int) -> None:
    """The updates are the same without it, bit by bit; once it has looked there are no forwards but the window's."""
    found = []
    for check in (True, False):
        seed()
        model, other = Restless(), mlp(3)()
        model.first.eval()
        optimizer = torch.optim.AdamW(trained(model), lr=0.05)
        step = BigStep(
            model,
            optimizer,
            lambda m, b: restless_loss(m, {**b, "x": b["x"] + other(b["x2"])}),  # noqa: B023 - called at once
            micro_batch_size=size,
            options=Options(check=check),
        )
        step(rows(6, 0))
        assert (len(model.bomb.seen) > 6 // size) is check
        step(rows(6, 1))  # it looks once more
        model.bomb.seen.clear()
        step(rows(6, 2))
        assert len(model.bomb.seen) == 6 // size
        assert all(p.grad is None for p in other.parameters())
        found.append(everything(model, optimizer))
    assert found[0] == found[1]


# Later updates.


class Gated(nn.Module):
    """Looks across samples, behind a gate that begins at zero; one that is learned shows in its gradient."""

    def __init__(self, *, learned: bool = False) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(8, 4), nn.Linear(8, 4)
        self.gate = nn.Parameter(torch.zeros(()), requires_grad=learned)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 8) → (n, 4)."""
        found: Tensor = self.layer(x) + self.gate * self.other((x - x.mean(0)).square())
        return found


def test_a_gate_that_begins_at_zero() -> None:
    """Where it is learned its gradient shows at once what is behind; else a later look does, as soon as it can be had.

    A batch of one sample shows nothing, nor does an update that was skipped.
    """
    with pytest.raises(CoupledLoss, match="are coupled"):
        step_of(Gated(learned=True).double(), plain)(data(11))
    model = Gated().double()
    step = step_of(model, plain, skip_nonfinite=True)
    step(data(11))
    model.gate.fill_(0.1)
    bad = data(11, 2)
    bad[0][0, 0] = torch.inf
    assert step(bad).skipped
    step(data(1))
    with pytest.raises(CoupledLoss, match=r"are coupled[\s\S]*did not show at first[\s\S]*2 by now"):
        step(data(11, 1))


def test_a_teacher_that_begins_as_a_copy() -> None:
    """Its average moves with every micro-batch; at first that moves nothing, and the update is right."""
    student = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).double()
    teacher = copy.deepcopy(student).requires_grad_(False).eval()

    def loss(model: Any, batch: Batch) -> Tensor:
        for mine, other in zip(teacher.parameters(), model.parameters(), strict=True):
            mine.lerp_(other.detach(), 0.5)
        return plain(model, batch) + F.mse_loss(model(batch[0]), teacher(batch[0]), reduction="none").mean()

    step = step_of(student, loss, lr=0.5)
    step(data(11))
    with pytest.raises(CoupledLoss, match=r"did not show at first[\s\S]*to find the cause"):
        step(data(11, 1))


def test_it_looks_four_times_more() -> None:
    """Before updates 2, 4, 16 and 128."""
    calls, found = [0], []

    def loss(model: Any, batch: Batch) -> Tensor:
        calls[0] += 1
        return plain(model, batch)

    step = step_of(net(), loss)
    for number in range(140):
        before = calls[0]
        step(data(11, number))
        found.append(calls[0] - before)
    assert [number for number, each in enumerate(found) if each > 3] == [0, 1, 3, 15, 127]


# What it could not see.


@pytest.mark.parametrize("loss", [mixed, one_by_one, turned])
@pytest.mark.parametrize(("check", "heard"), [(True, [0, 0, 1, 0]), (False, [0, 0, 0, 0])])
def test_numbers_that_cannot_be_drawn_again_are_said_once(loss: Loss, check: bool, heard: list[int]) -> None:
    """At the user's line, when a batch is cut for the first time; whoever knows is told nothing."""
    step = step_of(net(), loss, check=check)
    for number, (size, expected) in enumerate(zip([4, 3, 8, 8], heard, strict=True)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(data(size, number))
        assert len(caught) == expected
        assert all(each.filename == __file__ and "cannot be drawn again" in str(each.message) for each in caught)


def test_a_check_that_could_not_run_says_so_after_the_step() -> None:
    """Once, at the user's line, with the reason; an update that fails says nothing of it, nor does `check=False`."""
    for check in (True, False):
        model = Carrying().double()
        step = step_of(model, plain, check=check)
        broken = data(8)
        broken[1][7] = 4  # no such class
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with pytest.raises(IndexError):
                step(broken)
            assert not caught
            _ = [step(data(8, number)) for number in range(3)]
        assert len(caught) == check
        for each in caught:
            assert each.filename == __file__
            approve("big_step", "a check that could not run", UserWarning(str(each.message)))


class Short(torch.autograd.Function):
    """An identity whose backward runs out of memory with more than a few samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fits: int) -> Tensor:
        """Note how many there are."""
        ctx.short = len(x) > fits
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Fail, or do nothing."""
        if ctx.short:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return gradients[0], None


@pytest.mark.parametrize("fits", [1, 2, 4])
def test_a_check_that_runs_out_of_memory_in_backward_takes_smaller_pieces(fits: int) -> None:
    """They show what is coupled; where two samples do not fit, the update is made, and a warning says what it lacks."""

    def step(loss: Loss) -> BigStep:
        return step_of(net(between=lambda h, _: Short.apply(h, fits)), loss, fits)  # type: ignore[no-untyped-call]

    if fits > 1:
        assert step(plain)(data(16)).micro_batches == 16 // fits
        with pytest.raises(CoupledLoss):
            step(on_policy)(data(16))
    else:
        with pytest.warns(UserWarning, match=r"could not run: .*\(OutOfMemoryError: CUDA out of memory\)"):
            assert step(plain)(data(16)).micro_batches == 16
