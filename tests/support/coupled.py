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
from torch.utils.checkpoint import checkpoint

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


def step_of(
    model: nn.Module, loss_fn: LossFunction, size: Any, optimizer: OptimizerFactory = sgd, **options: Any
) -> BigStep:
    """A step of a model, by plain SGD."""
    return BigStep(model, optimizer(trained(model)), loss_fn, micro_batch_size=size, options=Options(**options))


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


def held_on_host(step: BigStep) -> int:
    """How many bytes of host memory a step has pinned for activations."""
    offload = step._together._offload
    return 0 if offload is None else offload.memory.held


class Model(nn.Module):
    """Modules by name, and a forward: `Model(lambda m, x: m.two(m.one(x)), one=nn.Linear(3, 6), two=...)`."""

    def __init__(self, how: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.how = how
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *given: Any, **named: Any) -> Any:
        """Run."""
        return self.how(self, *given, **named)


def model(how: Callable[..., Any], **parts: Callable[[], Any]) -> Make:
    """Make such a model, with the same weights each time."""
    return seeded(lambda: Model(how, **{name: part() for name, part in parts.items()}))


# Losses of all samples.


def unit(x: Tensor) -> Tensor:
    """Rows of length 1."""
    return F.normalize(x, dim=1)


def mine(x: Tensor) -> Tensor:
    """Where the rows of this micro-batch lie among all."""
    return across.offset() + torch.arange(len(x), device=x.device)


def centred_rows(x: Tensor) -> Tensor:
    """Rows less their mean over the batch: still one per sample."""
    return x - across.mean(x.mean(0))


# Two encoders and a learned temperature.
twins = model(
    lambda m, b: (unit(m.one(b["x"])), unit(m.two(b["x2"])), m.scale.exp()),
    one=lambda: nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, CLASSES)),
    two=lambda: nn.Linear(3, CLASSES),
    scale=lambda: nn.Parameter(torch.tensor(0.4)),
)


def clip(model: Any, batch: Batch) -> Tensor:
    """CLIP, with a learned temperature."""
    one, two, scale = model(batch)
    every, all_two = across.gather(one), across.gather(two)
    columns = F.cross_entropy(scale * two @ every.T, mine(two))
    return (F.cross_entropy(scale * one @ all_two.T, mine(one)) + columns) / 2


def contrast(similarity: Callable[[Tensor, Tensor], Tensor]) -> LossFunction:
    """InfoNCE of own rows against all, by some similarity."""

    def loss_fn(model: Any, batch: Batch) -> Tensor:
        one, two, _ = model(batch)
        return F.cross_entropy(similarity(one, across.gather(two)) / 0.2, mine(one))

    return loss_fn


def simclr(model: Any, batch: Batch) -> Tensor:
    """Two views in one tensor, each against all but itself (Chen et al. 2020)."""
    one, two, scale = model(batch)
    every = torch.cat([across.gather(one), across.gather(two)])
    half = len(every) // 2
    itself = torch.cat([mine(one), half + mine(one)])[:, None] == torch.arange(len(every))
    logits = (torch.cat([one, two]) @ every.T * scale).masked_fill(itself, -torch.inf)
    return F.cross_entropy(logits, torch.cat([half + mine(one), mine(one)]))


def siglip(model: Any, batch: Batch) -> Tensor:
    """A sigmoid for every pair (Zhai et al. 2023)."""
    one, every = model.one(batch["x"]), across.gather(model.two(batch["x2"]))
    signs = 2.0 * (mine(one)[:, None] == torch.arange(len(every))) - 1
    return -F.logsigmoid(signs * (one @ every.T - 1)).sum() / len(one)


def batch_hard(model: Any, batch: Batch) -> Tensor:
    """The farthest of a sample's class and the nearest of the others (Hermans et al. 2017)."""
    rows_ = model.one(batch["x"])
    distances, same = torch.cdist(rows_, across.gather(rows_)), batch["label"][:, None] == across.gather(batch["label"])
    farthest, nearest = distances.masked_fill(~same, 0.0).amax(1), distances.masked_fill(same, 1e3).amin(1)
    return F.relu(farthest - nearest + 1).mean()


def swav(model: Any, batch: Batch) -> Tensor:
    """Assignments that are balanced over the batch, without gradient (Caron et al. 2020)."""
    with torch.no_grad():
        shares = model.two(batch["x2"]).exp()
        for _ in range(3):
            shares = shares / across.sum(shares.sum(0))
            shares = shares / shares.sum(1, keepdim=True)
    return F.cross_entropy(model.one(batch["x"]), shares)


def several_terms(model: Any, batch: Batch) -> Tensor:
    """A masked mean, a term of all samples, and one of parameters."""
    scores = model.one(batch["x"])
    share = across.mean(scores.softmax(1).mean(0))
    decay = counted(sum(p.square().sum() for p in model.parameters()), "once")
    return F.cross_entropy(scores, batch["partly"]) + 0.1 * across.once((share * share.log()).sum()) + 0.01 * decay


def moco(model: Any, batch: Batch) -> Tensor:
    """Keys without gradient, as of a momentum encoder."""
    one = model.one(batch["x"])
    with torch.no_grad():
        keys = across.gather(model.two(batch["x2"]))
    return F.cross_entropy(one @ keys.T, mine(one))


def masked_mean(model: Any, batch: Batch) -> Tensor:
    """A sum over this micro-batch's own, divided by the batch's count: it adds up."""
    mask = (batch["label"] > 0).double()
    each = F.cross_entropy(model.one(batch["x"]), batch["label"], reduction="none")
    return (each * mask).sum() / across.sum(mask.sum())


def masked_root(model: Any, batch: Batch) -> Tensor:
    """A mean of targets that are not ignored, with a count of its own; NaN where a micro-batch has none."""
    out, counts = model.one(batch["x"]), batch["partly"] != -100
    return across.once(across.mean(out[counts].square().mean(), counts.sum()).sqrt())


def of_classes(model: Any, batch: Batch) -> Tensor:
    """A mean for each class, of as many samples as lean towards it."""
    of = F.one_hot(batch["label"], CLASSES) + 0.5
    number = of.sum(0)[:, None]
    return across.once(across.mean(of.T.double() @ model.one(batch["x"]) / number, number).var(0).sum())


def in_turns(model: Any, batch: Batch) -> Tensor:
    """The same value asked for twice; results of one go into another."""
    out = model.one(batch["x"])
    first, again = across.mean(out.mean(0)), across.mean(out.mean(0))
    further = across.mean((out * first).mean(0))
    return F.mse_loss(out + first - 0.5 * again + further, batch["value"])


def by_rows(model: Any, batch: Batch) -> Tensor:
    """One direction, whose rows are made again in backward (docs/coupled.md)."""
    rows_ = lambda one, every: F.cross_entropy(one @ every.T, mine(one))  # noqa: E731
    one, two, _ = model(batch)
    return counted(checkpoint(rows_, one, across.gather(two), use_reentrant=False), len(one))


def _of_views(views: Tensor, scale: Tensor) -> Tensor:
    return (views * (scale + across.gather(views).square().sum(0))).square().mean()


LOSSES: dict[str, LossFunction] = {
    "einsum": contrast(lambda one, every: torch.einsum("id,jd->ij", one, every)),
    "cdist": contrast(lambda one, every: -torch.cdist(one, every)),
    "cosine": contrast(lambda one, every: F.cosine_similarity(one[:, None], every[None], dim=-1)),
    "mean of pairs": lambda m, b: (m.one(b["x"]) @ across.gather(m.one(b["x"])).T).square().mean(),
    "centred": lambda m, b: F.mse_loss(centred_rows(m.one(b["x"])), b["value"]),
    "counted": lambda m, b: counted(moco(m, b), len(b["x"])),
    "extras": lambda m, b: (clip(m, b), m.one(b["x"])),
    "rows that are not samples": lambda m, b: _of_views(torch.cat(m(b)[:2]), m(b)[2]),  # two views of each
    "divided by a mean": lambda m, b: (
        F.mse_loss(m.one(b["x"]), b["value"]) / across.mean(m.two(b["x2"]).square().mean())
    ),
    "summed": lambda m, b: F.mse_loss(
        m.one(b["x"]) * across.sum(m.one(b["x"]).sum(0)).tanh(), b["value"], reduction="sum"
    ),
    "a norm": lambda m, b: F.cross_entropy(F.batch_norm(m.one(b["x"]), None, None, training=True), b["label"]),
    **{
        each.__name__: each
        for each in (clip, simclr, siglip, batch_hard, swav, several_terms, moco, masked_mean, masked_root)
    },
    **{each.__name__: each for each in (of_classes, in_turns, by_rows)},
}  # those of examples/coupled are in tests/lockstep/test_across.py


def _attending(h: Tensor) -> Tensor:
    every = across.gather(h)
    return (h @ every.T).softmax(1) @ every


# Something across samples, between two layers or after the last.
INSIDE: dict[str, Callable[[Tensor], Tensor]] = {
    "centred": centred_rows,
    "scaled": lambda h: h / (1 + across.sum(h.square().sum(0))),
    "attending": _attending,
}


def inside(how: str, *, last: bool = False) -> Make:
    """A model that asks."""
    mixed = INSIDE[how]
    run: Callable[[Any, Tensor], Tensor] = (
        (lambda m, x: mixed(m.two(torch.tanh(m.one(x))))) if last else (lambda m, x: m.two(torch.tanh(mixed(m.one(x)))))
    )
    return model(run, one=lambda: nn.Linear(3, 6), two=lambda: nn.Linear(6, CLASSES))


# BatchNorm.


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
        tracked = (
            (self.running_mean, self.running_var) if not self.training or self.track_running_stats else (None,) * 2
        )
        return F.silu(F.batch_norm(input, *tracked, self.weight, self.bias, training, factor, self.eps))


KINDS: dict[str, tuple[int, Callable[..., nn.Module]]] = {  # dimensions of space, and a layer
    "1d": (0, nn.BatchNorm1d),
    "sync": (0, nn.SyncBatchNorm),  # without a process group it is F.batch_norm, on the CPU, too
    "1d with steps": (1, nn.BatchNorm1d),
    "2d": (2, nn.BatchNorm2d),
    "sync 2d": (2, nn.SyncBatchNorm),
    "activated": (2, Activated),
    "3d": (3, nn.BatchNorm3d),
}
PLACES = ("first", "middle", "twice", "last", "frozen", "two")


class Net(nn.Module):
    """Two layers, and norms in some places; the input has 0 to 3 dimensions of space."""

    def __init__(self, kind: str, place: str, **options: Any) -> None:
        super().__init__()
        dimensions, make = KINDS[kind]
        layer = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions]
        size: dict[str, Any] = {} if not dimensions else {"kernel_size": 3, "padding": 1}
        wide, self.place = 3 if not dimensions else 2, place
        self.one, self.two, self.head = layer(wide, 5, **size), layer(5, 5, **size), nn.Linear(5, CLASSES)
        self.norm = make(wide if place == "first" else 5, **options)
        self.other = make(5, **options) if place in {"frozen", "two"} else nn.Identity()
        self.end = nn.BatchNorm1d(CLASSES, **options) if place == "last" else nn.Identity()
        self.other.train(place != "frozen")
        for each in (self.norm, self.other, self.end):  # not at their beginning
            for name, tensor in (*each.named_parameters(), *each.named_buffers()):
                if tensor.is_floating_point():
                    nn.init.normal_(tensor) if "mean" in name else nn.init.uniform_(tensor, 0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        """(n, channels, ...) → (n, classes)."""
        x = self.norm(x) if self.place == "first" else x
        h = self.one(x)
        h = self.norm(h) if self.place in {"middle", "twice", "frozen", "two"} else h
        h = self.two(torch.tanh(self.other(h)))
        h = torch.tanh(self.norm(h) if self.place == "twice" else h)
        return self.end(self.head(h.flatten(2).mean(2) if h.dim() > 2 else h))


def net(kind: str = "1d", place: str = "middle", **options: Any) -> nn.Module:
    """The same weights each time."""
    return seeded(lambda: Net(kind, place, **options))()


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


def told_apart(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Two terms with different counts, and values that are kept."""
    out = model(batch["x"])
    first = counted(F.cross_entropy(out, batch["partly"]), (batch["partly"] != -100).sum())
    return first + 0.3 * counted(F.mse_loss(out, batch["value"]), out.numel()), out


OF_OUTPUTS: list[LossFunction] = [
    plain,
    masked,
    told_apart,
    lambda m, b: F.cross_entropy(m(b["x"]), b["partly"]) + 0.3 * F.mse_loss(m(b["x"]), b["value"]),
    lambda m, b: F.mse_loss(m(b["x"]), b["value"], reduction="sum"),
]


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
    sort = draw(st.sampled_from(["loss", "model", "norm", "norm"]))
    settings: dict[str, Any] = {
        "optimizer": CALM[draw(st.sampled_from(sorted(CALM)))],
        "clip_norm": draw(clip_norms),
        "activations": draw(st.sampled_from(["auto", "keep", "offload", *(["recompute"] if sort == "loss" else [])])),
    }
    make: Make = twins
    of: Callable[[int, int], Batch] = rows
    if sort == "loss":
        name = draw(st.sampled_from(sorted(LOSSES)))
        loss_fn = LOSSES[name]
    elif sort == "model":
        name = draw(st.sampled_from(sorted(INSIDE)))
        make, loss_fn = inside(name, last=draw(st.booleans())), draw(st.sampled_from([plain, masked]))
    else:
        kind, place = draw(st.sampled_from(sorted(KINDS))), draw(st.sampled_from(PLACES))
        options = {
            "affine": draw(st.booleans()),
            "track_running_stats": draw(st.booleans()),
            "momentum": draw(st.sampled_from([None, 0.0, 0.1, 1.0])),
            "eps": draw(st.sampled_from([1e-5, 1e-2, 1.0])),
        }
        name, make, of = f"{kind} {place} {options}", partial(net, kind, place, **options), data(KINDS[kind][0])
        loss_fn = draw(st.sampled_from(OF_OUTPUTS))
    sizes, first = draw(st.lists(st.integers(4, 9), min_size=1, max_size=3)), draw(st.integers(0, 999))
    batches = [of(n, 10 * first + number) for number, n in enumerate(sizes)]
    return Case(name, make, loss_fn, batches, draw(st.integers(1, 5)), settings)
