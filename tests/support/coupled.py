"""Models whose samples are coupled, losses that ask for all of them, and the comparison with one big batch."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from bigbatch import BigStep, Options, across, counted
from bigbatch.batch.tree import leaves
from tests.support.bombs import everything, seed
from tests.support.reference import (
    FLOOR,
    TOLERANCE,
    OptimizerFactory,
    close,
    distance,
    sgd,
    state,
    told,
    trained,
    weights,
)
from tests.support.samples import CLASSES, Batch, images, rows, seeded
from tests.support.strategies import OPTIMIZERS, clip_norms

LossFunction = Callable[[Any, Any], Any]
Make = Callable[[], nn.Module]
# A norm at the end has gradients of nothing but rounding, which Adam would make as large as others.
CALM: dict[str, OptimizerFactory] = {
    "sgd": sgd,
    "sgd-momentum": OPTIMIZERS["sgd-momentum"],
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=0.1),
}

# Beside one big batch.


def gradients_of(model: nn.Module) -> list[Tensor]:
    """The gradients as they are now."""
    return [torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for p in trained(model)]


def assert_big_batch(
    make: Make,
    loss_fn: LossFunction,
    batches: Sequence[Any],
    size: int | str = "auto",
    *,
    optimizer: OptimizerFactory = sgd,
    clip_norm: float | None = None,
    tolerance: float = TOLERANCE,
    **options: Any,
) -> BigStep:
    """All that an update comes to is what plain torch makes of the whole batch; later ones stand on rounded weights."""
    model = make()
    twin = copy.deepcopy(model)
    mine, plain = optimizer(trained(model)), optimizer(trained(twin))
    given: dict[str, Any] = {"micro_batch_size": size, "clip_norm": clip_norm, "options": Options(**options)}
    step, gradients = BigStep(model, mine, loss_fn, **given), list[Tensor]()
    step.before_step(lambda: gradients.extend(gradients_of(model)))
    modes, slack = [module.training for module in model.modules()], tolerance
    for number, batch in enumerate(batches):
        slack = tolerance * 10 ** min(number, 2)
        gradients.clear()
        update = step(batch)
        assert all(p.grad is None for p in trained(model))
        samples = next(len(leaf) for _, leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.dim())
        assert isinstance(size, str) or update.micro_batches == math.ceil(samples / size)
        plain.zero_grad()
        loss, extras = found if isinstance(found := loss_fn(twin, batch), tuple) else (found, None)
        loss.backward()
        assert distance(gradients, gradients_of(twin), FLOOR) <= slack, f"update {number}: gradients"
        norm = clip_grad_norm_(trained(twin), math.inf if clip_norm is None else clip_norm)
        plain.step()
        assert distance(weights(model), weights(twin)) <= slack, f"update {number}: weights"
        for (name, buffer), true in zip(model.named_buffers(), twin.buffers(), strict=True):
            same = distance([buffer], [true], FLOOR) <= slack if true.is_floating_point() else buffer.equal(true)
            assert same, f"update {number}: {name} is {buffer}, the big batch's {true}"
        assert close(told(update, always=False), float(loss.detach()), slack), f"update {number}: loss"
        assert clip_norm is None or close(float(update.grad_norm or 0), float(norm), slack), f"update {number}: norm"
        if extras is not None:
            assert distance([update.extras], [extras.detach()], FLOOR) <= slack, f"update {number}: extras"
    assert distance(state(mine), state(plain), FLOOR) <= slack, "the optimizer's state"
    assert [module.training for module in model.modules()] == modes
    return step


def assert_refused(  # noqa: PLR0917 - as assert_big_batch
    make: Make, loss_fn: LossFunction, batch: Any, size: int, error: Any, match: str | None = None, **options: Any
) -> BigStep:
    """A step raises, and changes nothing; returns it."""
    model = make()
    optimizer = OPTIMIZERS["adamw"](trained(model))
    seed()
    before = everything(model, optimizer)
    step = BigStep(model, optimizer, loss_fn, micro_batch_size=size, options=Options(**options))
    with pytest.raises(error, match=match):
        step(batch)
    assert everything(model, optimizer) == before
    return step


# Losses of all samples.


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


twins = seeded(Twins)


def mine(x: Tensor) -> Tensor:
    """Where the rows of this micro-batch lie among all."""
    return across.offset() + torch.arange(len(x))


def clip(model: Any, batch: Batch) -> Tensor:
    """CLIP, with a learned temperature."""
    one, two, scale = model(batch)
    every, all_two = across.gather(one), across.gather(two)
    columns = F.cross_entropy(scale * two @ every.T, mine(two))
    return (F.cross_entropy(scale * one @ all_two.T, mine(one)) + columns) / 2


def supervised(model: Any, batch: Batch) -> Tensor:
    """SupCon: the samples of one's own class are the positives."""
    one, _, scale = model(batch)
    every, labels = across.gather(one), across.gather(batch["label"])
    own = mine(one)[:, None] == torch.arange(len(every))
    score = (scale * one @ every.T).masked_fill(own, -1e9).log_softmax(1)
    positive = (batch["label"][:, None] == labels) & ~own
    return -((score * positive).sum(1) / positive.sum(1).clamp(min=1)).mean()


def balance(model: Any, batch: Batch) -> Tensor:
    """Load balancing of a mixture of experts, beside a masked cross-entropy with a count of its own."""
    out = model.one(batch["x"])
    share = across.mean(F.one_hot(out.argmax(1), CLASSES).to(out.dtype).mean(0))
    gate = across.mean(out.softmax(1).mean(0))
    return F.cross_entropy(out, batch["partly"]) + 0.3 * across.once(CLASSES * (share * gate).sum())


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


LOSSES: dict[str, LossFunction] = {
    each.__name__: each for each in (clip, supervised, balance, rmse, masked_root, centred, summed)
}  # those of examples/coupled are in tests/lockstep/test_across.py


class Inside(nn.Module):
    """Something across samples between two layers, or after the last."""

    def __init__(self, how: str, *, last: bool = False) -> None:
        super().__init__()
        self.one, self.two, self.how, self.last = nn.Linear(3, 6), nn.Linear(6, CLASSES), how, last

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3) → (n, classes)."""
        h = self.one(x)
        return self.mixed(self.two(torch.tanh(h))) if self.last else self.two(torch.tanh(self.mixed(h)))

    def mixed(self, h: Tensor) -> Tensor:
        """Look at all samples."""
        if self.how == "centred":
            return h - across.mean(h.mean(0))
        if self.how == "scaled":
            return h / (1 + across.sum(h.square().sum(0)))
        if self.how != "attending":
            return h
        every = across.gather(h)
        return (h @ every.T).softmax(1) @ every


# BatchNorm.


class Subclass(nn.BatchNorm2d):
    """A subclass that does something before."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own name
        """Normalise twice as much."""
        return super().forward(2 * input)


class Activated(nn.BatchNorm2d):
    """As timm writes it: its own forward, with an activation, ends in `F.batch_norm`."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own name
        """Normalise and activate."""
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        training = self.training or (self.running_mean is None and self.running_var is None)
        mean = self.running_mean if not self.training or self.track_running_stats else None
        var = self.running_var if not self.training or self.track_running_stats else None
        return F.silu(F.batch_norm(input, mean, var, self.weight, self.bias, training, factor, self.eps))


def lazily(kind: Callable[..., nn.Module], *shape: int) -> Callable[..., nn.Module]:
    """A lazy layer that has seen its input."""

    def make(width: int, **options: Any) -> nn.Module:
        layer = kind(**options)
        layer.eval()
        layer(torch.zeros(2, width, *shape))
        return layer.train()

    return make


LAYERS: dict[int, dict[str, Callable[..., nn.Module]]] = {
    0: {
        "BatchNorm1d": nn.BatchNorm1d,
        "SyncBatchNorm": nn.SyncBatchNorm,
        "LazyBatchNorm1d": lazily(nn.LazyBatchNorm1d),
    },
    1: {"BatchNorm1d": nn.BatchNorm1d},
    2: {
        "BatchNorm2d": nn.BatchNorm2d,
        "SyncBatchNorm": nn.SyncBatchNorm,  # without a process group it is F.batch_norm, on the CPU, too
        "LazyBatchNorm2d": lazily(nn.LazyBatchNorm2d, 2, 2),
        "Subclass": Subclass,
        "Activated": Activated,
    },
    3: {"BatchNorm3d": nn.BatchNorm3d},
}
KINDS = [(dimensions, name) for dimensions, layers in LAYERS.items() for name in layers]
PLACES = ("first", "middle", "twice", "last", "frozen", "two")


class Net(nn.Module):
    """Two layers, and norms in some places; the input has 0 to 3 dimensions of space."""

    def __init__(self, kind: tuple[int, str], place: str, **options: Any) -> None:
        super().__init__()
        dimensions, name = kind
        make = LAYERS[dimensions][name]
        layer = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions]
        size: dict[str, Any] = {} if not dimensions else {"kernel_size": 3, "padding": 1}
        wide, self.place = 3 if not dimensions else 2, place
        self.one, self.two, self.head = layer(wide, 5, **size), layer(5, 5, **size), nn.Linear(5, CLASSES)
        self.norm = make(wide if place == "first" else 5, **options)
        self.other = make(5, **options) if place in {"frozen", "two"} else nn.Identity()
        self.end = LAYERS[0]["BatchNorm1d"](CLASSES, **options) if place == "last" else nn.Identity()
        if place == "frozen":
            self.other.eval()

    def forward(self, x: Tensor) -> Tensor:
        """(n, channels, ...) → (n, classes)."""
        x = self.norm(x) if self.place == "first" else x
        h = self.one(x)
        h = self.norm(h) if self.place in {"middle", "twice", "frozen", "two"} else h
        h = self.two(torch.tanh(self.other(h)))
        h = torch.tanh(self.norm(h) if self.place == "twice" else h)
        return self.end(self.head(h.flatten(2).mean(2) if h.dim() > 2 else h))


def net(kind: tuple[int, str] = (0, "BatchNorm1d"), place: str = "middle", **options: Any) -> nn.Module:
    """The same weights each time, with norms that are not at their beginning."""

    def make() -> nn.Module:
        model = Net(kind, place, **options)
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                for parameter in module.parameters():
                    nn.init.uniform_(parameter, 0.5, 1.5)
                if module.running_mean is not None and module.running_var is not None:
                    nn.init.normal_(module.running_mean)
                    nn.init.uniform_(module.running_var, 0.5, 2)
        return model

    return seeded(make)()


def data(dimensions: int) -> Callable[[int, int], Batch]:
    """Samples for a number of dimensions of space."""
    if not dimensions:
        return rows
    make = images(*(3,) * dimensions)

    def few(n: int, seed_: int) -> Batch:
        batch, whole = make(n, seed_), rows(n, seed_)
        return {"x": batch["x"], "label": batch["whole"], "partly": whole["partly"], "value": whole["value"]}

    return few


def plain(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """A mean cross-entropy; the outputs are extras."""
    out = model(batch["x"])
    return F.cross_entropy(out, batch["label"]), out


def masked(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Only some targets count; perhaps none of a micro-batch."""
    out = model(batch["x"])
    return F.cross_entropy(out, batch["partly"]), out


def several(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Two terms with different counts."""
    out = model(batch["x"])
    return F.cross_entropy(out, batch["partly"]) + 0.3 * F.mse_loss(out, batch["value"]), out


def told_apart(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """The same, with values that are kept."""
    out = model(batch["x"])
    first = counted(F.cross_entropy(out, batch["partly"]), (batch["partly"] != -100).sum())
    return first + 0.3 * counted(F.mse_loss(out, batch["value"]), out.numel()), out


def as_a_sum(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """A sum."""
    out = model(batch["x"])
    return F.mse_loss(out, batch["value"], reduction="sum"), out


OF_OUTPUTS: dict[str, LossFunction] = {each.__name__: each for each in (plain, masked, several, told_apart, as_a_sum)}


# Any of it.


@dataclass(frozen=True)
class Case:
    """A coupled model, batches, and how they are cut."""

    name: str
    make: Make
    loss_fn: LossFunction
    batches: list[Batch]
    size: int
    settings: dict[str, Any]

    def __repr__(self) -> str:
        return f"{self.name}: {[len(batch['x']) for batch in self.batches]} by {self.size}, {self.settings}"


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A loss of all samples, a model that asks between its layers, or one with BatchNorm; in any split."""
    kind = draw(st.sampled_from(["loss", "model", "norm", "norm"]))
    settings: dict[str, Any] = {
        "optimizer": CALM[draw(st.sampled_from(sorted(CALM)))],
        "clip_norm": draw(clip_norms),
        "activations": draw(st.sampled_from(["auto", "keep", *(["recompute"] if kind == "loss" else [])])),
    }
    of: Callable[[int, int], Batch] = rows
    make: Make
    if kind == "loss":
        name = draw(st.sampled_from(sorted(LOSSES)))
        make, loss_fn = twins, LOSSES[name]
    elif kind == "model":
        name, last = draw(st.sampled_from(["centred", "scaled", "attending"])), draw(st.booleans())
        make, loss_fn = seeded(lambda: Inside(name, last=last)), draw(st.sampled_from([plain, masked]))
    else:
        layer, place = draw(st.sampled_from(KINDS)), draw(st.sampled_from(PLACES))
        options = {
            "affine": draw(st.booleans()),
            "track_running_stats": draw(st.booleans()),
            "momentum": draw(st.sampled_from([None, 0.0, 0.1, 1.0])),
            "eps": draw(st.sampled_from([1e-5, 1e-2, 1.0])),
        }
        name, make, of = f"{layer} {place} {options}", partial(net, layer, place, **options), data(layer[0])
        loss_fn = OF_OUTPUTS[draw(st.sampled_from(sorted(OF_OUTPUTS)))]
    sizes, first = draw(st.lists(st.integers(4, 9), min_size=1, max_size=3)), draw(st.integers(0, 999))
    batches = [of(n, 10 * first + number) for number, n in enumerate(sizes)]
    return Case(name, make, loss_fn, batches, draw(st.integers(1, 5)), settings)
