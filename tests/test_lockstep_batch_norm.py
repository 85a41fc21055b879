"""BatchNorm in a `BigStep` normalises by the big batch: outputs, gradients, running statistics, loss and norm."""

import copy
import faulthandler
import gc
import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import batch_norm as imported_by_name
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from bigbatch import BigStep, Options, counted
from bigbatch.errors import BatchNormError, CoupledLoss, LossError, OutOfMemory
from bigbatch.lockstep.threads import current
from tests.bombs import OTHER, OUT_OF_MEMORY, Bomb, Fuse, everything, seed
from tests.support.reference import FLOOR, TOLERANCE, OptimizerFactory, close, distance, sgd, told, trained, weights
from tests.support.samples import CLASSES, Batch, images, rows, seeded
from tests.support.strategies import OPTIMIZERS, clip_norms, seeds

LIMIT = 120  # seconds after which a test hangs
PLAIN = F.batch_norm


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    """Micro-batches that wait for each other forever end the run, with the lines they wait at."""
    faulthandler.dump_traceback_later(LIMIT, exit=True, file=sys.__stderr__ or sys.stderr)
    yield
    faulthandler.cancel_dump_traceback_later()
    assert F.batch_norm is PLAIN  # as it was


@pytest.fixture(autouse=True, scope="module")
def _quick_collection() -> Iterator[None]:
    """Each retry collects garbage; what the imports have made need not be looked through every time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


# Layers.


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
    1: {"BatchNorm1d": nn.BatchNorm1d, "SyncBatchNorm": nn.SyncBatchNorm},
    2: {
        "BatchNorm2d": nn.BatchNorm2d,
        "SyncBatchNorm": nn.SyncBatchNorm,  # without a process group it is F.batch_norm, on the CPU, too
        "LazyBatchNorm2d": lazily(nn.LazyBatchNorm2d, 2, 2),
        "Subclass": Subclass,
        "Activated": Activated,
    },
    3: {"BatchNorm3d": nn.BatchNorm3d, "LazyBatchNorm3d": lazily(nn.LazyBatchNorm3d, 2, 2, 2)},
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
        h = torch.tanh(self.other(h))
        h = self.two(h)
        h = self.norm(h) if self.place == "twice" else h
        h = torch.tanh(h).flatten(2).mean(2) if h.dim() > 2 else torch.tanh(h)
        return self.end(self.head(h))


def data(dimensions: int) -> Callable[[int, int], Batch]:
    """Samples for a number of dimensions of space."""
    if not dimensions:
        return rows
    make = images(*(3,) * dimensions)

    def few(n: int, seed_: int) -> Batch:
        batch = make(n, seed_)
        whole = rows(n, seed_)
        return {"x": batch["x"], "label": batch["whole"], "partly": whole["partly"], "value": whole["value"]}

    return few


# Losses, with the model's output as extras.


def plain(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """A mean cross-entropy."""
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
    number = (batch["partly"] != -100).sum()
    first = counted(F.cross_entropy(out, batch["partly"]), number)
    return first + 0.3 * counted(F.mse_loss(out, batch["value"]), out.numel()), out


def summed(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """A sum."""
    out = model(batch["x"])
    return F.mse_loss(out, batch["value"], reduction="sum"), out


LOSSES: dict[str, Callable[[Any, Batch], tuple[Tensor, Tensor]]] = {
    "plain": plain,
    "masked": masked,
    "several": several,
    "told apart": told_apart,
    "summed": summed,
}


# Ours beside the big batch.


class Found(NamedTuple):
    """What an update came to."""

    gradients: list[Tensor]
    weights: list[Tensor]
    buffers: dict[str, Tensor]
    loss: float | None
    norm: float | None
    extras: Any


def gradients_of(model: nn.Module) -> list[Tensor]:
    """The gradients as they are now."""
    return [torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for p in trained(model)]


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """The buffers as they are now."""
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def true_updates(
    model: nn.Module,
    batches: Sequence[Batch],
    loss_fn: Callable[[Any, Batch], Any],
    optimizer: OptimizerFactory = sgd,
    clip_norm: float | None = None,
) -> list[Found]:
    """One forward and backward over each whole batch, in plain torch."""
    updater, found = optimizer(trained(model)), []
    for batch in batches:
        updater.zero_grad()
        loss, extras = loss_fn(model, batch)
        loss.backward()
        before = gradients_of(model)
        norm = clip_grad_norm_(trained(model), math.inf if clip_norm is None else clip_norm)
        updater.step()
        found.append(
            Found(before, weights(model), buffers_of(model), float(loss.detach()), float(norm), extras.detach())
        )
    return found


def our_updates(  # noqa: PLR0917 - as true_updates
    model: nn.Module,
    batches: Sequence[Batch],
    loss_fn: Callable[[Any, Batch], Any],
    size: Any,
    optimizer: OptimizerFactory = sgd,
    clip_norm: float | None = None,
    **options: Any,
) -> list[Found]:
    """The same by `BigStep`."""
    found = []
    step = BigStep(
        model,
        optimizer(trained(model)),
        loss_fn,
        micro_batch_size=size,
        clip_norm=clip_norm,
        options=Options(**options),
    )
    before: list[list[Tensor]] = []
    step.before_step(lambda: before.append(gradients_of(model)))
    for batch in batches:
        update = step(batch)
        assert all(p.grad is None for p in trained(model))
        assert size == "auto" or update.micro_batches == math.ceil(len(batch["x"]) / size)
        norm = None if update.grad_norm is None else float(update.grad_norm)
        loss = told(update, always=False)
        found.append(Found(before.pop(), weights(model), buffers_of(model), loss, norm, update.extras))
    return found


def assert_same(ours: Sequence[Found], true: Sequence[Found], tolerance: float = TOLERANCE) -> None:
    """All that an update came to is the big batch's; later ones stand on rounded weights."""
    for number, (mine, theirs) in enumerate(zip(ours, true, strict=True)):
        slack = tolerance * 10 ** min(number, 2)
        size = float(torch.cat([g.flatten() for g in theirs.gradients]).norm())
        apart = distance(mine.gradients, theirs.gradients, FLOOR)
        assert apart <= slack, f"update {number}: gradients are {apart:.1e} apart, of norm {size:.1e}"
        assert distance(mine.weights, theirs.weights) <= slack, f"update {number}: weights"
        assert distance([mine.extras], [theirs.extras], FLOOR) <= slack, f"update {number}: outputs"
        assert close(mine.loss, theirs.loss, slack), f"update {number}: loss {mine.loss}, {theirs.loss}"
        assert close(mine.norm, theirs.norm, slack), f"update {number}: norm {mine.norm}, {theirs.norm}"
        assert mine.buffers.keys() == theirs.buffers.keys()
        for name, buffer in theirs.buffers.items():
            found = mine.buffers[name]
            assert found.dtype == buffer.dtype
            same = distance([found], [buffer], FLOOR) <= slack if buffer.is_floating_point() else found == buffer
            assert same, f"update {number}: {name} is {found}, the big batch's {buffer}"


def assert_exact(  # noqa: PLR0917 - as true_updates
    make: Callable[[], nn.Module],
    batches: Sequence[Batch],
    size: Any,
    loss_fn: Callable[[Any, Batch], Any] = plain,
    optimizer: OptimizerFactory = sgd,
    clip_norm: float | None = None,
    **options: Any,
) -> None:
    """Training in micro-batches is training on the whole batches."""
    model = make()
    twin = copy.deepcopy(model)
    modes = [module.training for module in model.modules()]
    ours = our_updates(model, batches, loss_fn, size, optimizer, clip_norm, **options)
    assert_same(ours, true_updates(twin, batches, loss_fn, optimizer, clip_norm))
    assert [module.training for module in model.modules()] == modes


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


# Exact.


@given(
    kind=st.sampled_from(KINDS),
    place=st.sampled_from(PLACES),
    affine=st.booleans(),
    tracking=st.booleans(),
    momentum=st.sampled_from([None, 0.0, 0.1, 1.0]),
    eps=st.sampled_from([1e-5, 1e-2, 1.0]),
    sizes=st.lists(st.integers(4, 9), min_size=1, max_size=3),
    size=st.integers(1, 5),
    loss=st.sampled_from(sorted(LOSSES)),
    optimizer=st.sampled_from(["sgd", "sgd-momentum", "calm adamw"]),
    clip_norm=clip_norms,
    seed_=seeds,
)
@settings(max_examples=150)
def test_any_batch_norm_in_any_split_is_exact(
    *,
    kind: tuple[int, str],
    place: str,
    affine: bool,
    tracking: bool,
    momentum: float | None,
    eps: float,
    sizes: list[int],
    size: int,
    loss: str,
    optimizer: str,
    clip_norm: float | None,
    seed_: int,
) -> None:
    """Any layer anywhere, of any settings, in any split, over several updates of any optimizer, clipped or not."""
    make = partial(net, kind, place, affine=affine, track_running_stats=tracking, momentum=momentum, eps=eps)
    batches = [data(kind[0])(n, 10 * seed_ + number) for number, n in enumerate(sizes)]
    # A norm at the end has gradients of nothing but rounding, which Adam makes as large as others.
    calm = {**OPTIMIZERS, "calm adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=0.1)}
    assert_exact(make, batches, size, LOSSES[loss], calm[optimizer], clip_norm)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_layer_in_every_place(kind: tuple[int, str], place: str) -> None:
    """As they come from torch, unevenly cut."""
    batches = [data(kind[0])(n, n) for n in (7, 5)]
    assert_exact(partial(net, kind, place), batches, 3)


@pytest.mark.parametrize("momentum", [None, 0.0, 0.1, 1.0])
@pytest.mark.parametrize("place", ["middle", "twice"])
def test_running_statistics_move_once_per_window(place: str, momentum: float | None) -> None:
    """And once per use: a window counts as one batch, whatever the number of micro-batches."""
    model = net(place=place, momentum=momentum)
    norm: Any = model.norm
    assert_exact(lambda: model, [rows(6, number) for number in range(4)], 1)
    assert norm.num_batches_tracked == (8 if place == "twice" else 4)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8])
def test_channels_last(size: int) -> None:
    """The memory format of images that a convolution likes best."""

    def make() -> nn.Module:
        model: Any = net((2, "BatchNorm2d"), "twice")
        return model.to(memory_format=torch.channels_last)

    batches = [data(2)(7, number) for number in range(2)]
    for batch in batches:
        batch["x"] = batch["x"].to(memory_format=torch.channels_last)
    assert_exact(make, batches, size)


def test_a_tensor_that_lies_across() -> None:
    """An input that is neither contiguous nor channels-last, as a transposed sequence is."""

    class Across(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm, self.head = nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(self.layer(x).transpose(1, 2)).transpose(1, 2)
            return self.head(torch.tanh(h)).mean(1)

    from tests.support.samples import sequences

    batches = [{"x": sequences(n, n)["x"], "label": rows(n, n)["label"]} for n in (7, 4)]
    assert_exact(seeded(Across), batches, 2)


@pytest.mark.parametrize("size", [1, 2])
def test_two_samples(size: int) -> None:
    """The smallest batch that BatchNorm trains on."""
    assert_exact(partial(net, eps=0.1), [rows(2, 0), rows(3, 1)], size)


def test_a_batch_of_one_value_is_refused_as_torch_does() -> None:
    """One sample has no variance, whatever the window."""
    model = net()
    step = BigStep(model, sgd(trained(model)), plain, micro_batch_size=2)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        step(rows(1, 0))


def test_micro_batches_in_which_nothing_counts() -> None:
    """Their samples are part of the statistics all the same."""
    batch = rows(8, 0)
    batch["partly"] = torch.tensor([-100, -100, 1, -100, -100, -100, 2, 0])
    assert_exact(net, [batch], 2, masked)
    assert_exact(net, [batch], 2, told_apart)


def test_a_batch_in_which_nothing_counts_makes_no_update() -> None:
    """Nothing to average: the weights stay."""
    batch = rows(6, 0)
    batch["partly"] = torch.full((6,), -100)
    model = net()
    before = weights(model)
    update = BigStep(model, sgd(trained(model)), masked, micro_batch_size=2)(batch)
    assert update.skipped
    assert distance(weights(model), before) == 0


def test_frozen_parts_beside_batch_norm() -> None:
    """A frozen first layer: the norm's input has no gradient, and micro-batches do not meet there in backward."""

    def make() -> nn.Module:
        model = net(place="two")
        one: Any = model.one
        one.requires_grad_(requires_grad=False)
        return model

    assert_exact(make, [rows(7, 0), rows(5, 1)], 3)

    def bare() -> nn.Module:
        model = make()
        norm: Any = model.norm
        norm.requires_grad_(requires_grad=False)
        return model

    assert_exact(bare, [rows(7, 0), rows(5, 1)], 3)


@pytest.mark.parametrize("activations", ["keep", "offload", "auto"])
@pytest.mark.parametrize("size", [3, "auto"])
def test_wherever_activations_stay(activations: str, size: Any) -> None:
    """On the CPU they are where they are; `auto` finds a size by itself."""
    assert_exact(partial(net, place="two"), [rows(8, 0), rows(8, 1)], size, activations=activations)


def test_several_models_and_optimizers() -> None:
    """One window, one global norm; the second model has a norm, too."""

    def run(*, ours: bool) -> tuple[list[Tensor], list[Tensor], list[float]]:
        body, head = net(place="twice"), seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)))()
        optimizers = [torch.optim.SGD(trained(body), lr=0.1, momentum=0.9), OPTIMIZERS["adamw"](trained(head))]
        norms = []

        def loss_fn(models: Any, batch: Batch) -> Tensor:
            return F.mse_loss(models[1](models[0](batch["x"]))[:, :CLASSES], batch["value"])

        step = BigStep([body, head], optimizers, loss_fn, micro_batch_size=3, clip_norm=0.2)
        for number in range(3):
            batch = rows(7, number)
            if ours:
                norm = step(batch).grad_norm
                assert norm is not None
            else:
                for optimizer in optimizers:
                    optimizer.zero_grad()
                loss_fn([body, head], batch).backward()
                norm = clip_grad_norm_([*trained(body), *trained(head)], 0.2)
                for optimizer in optimizers:
                    optimizer.step()
            norms.append(float(norm))
        buffers = [b.double() for model in (body, head) for b in model.buffers()]
        return [*weights(body), *weights(head)], buffers, norms

    ours, true = run(ours=True), run(ours=False)
    assert distance(ours[0], true[0]) <= 1e-11
    assert distance(ours[1], true[1]) <= 1e-11
    assert all(close(a, b, 1e-11) for a, b in zip(ours[2], true[2], strict=True))


def test_a_model_of_a_teacher_that_tracks_along() -> None:
    """Given to the step, a norm without gradient meets, too, and its statistics move once."""
    student, teacher = net(), net(place="two")
    twins = copy.deepcopy([student, teacher])

    def loss_fn(models: Any, batch: Batch) -> Tensor:
        with torch.no_grad():
            target = models[1](batch["x"])
        return F.mse_loss(models[0](batch["x"]), target)

    step = BigStep([student, teacher], sgd(trained(student)), loss_fn, micro_batch_size=2)
    updater = sgd(trained(twins[0]))
    for number in range(2):
        step(rows(7, number))
        updater.zero_grad()
        loss_fn(twins, rows(7, number)).backward()
        updater.step()
    assert distance(weights(student), weights(twins[0])) <= 1e-11
    for mine, true in zip(teacher.buffers(), twins[1].buffers(), strict=True):
        assert distance([mine], [true]) <= 1e-12


@pytest.mark.parametrize("check", [True, False])
def test_a_gradient_penalty_is_refused(check: bool) -> None:
    """A second derivative through lock-step would see this micro-batch alone; of a frozen norm it is exact."""

    def loss_fn(m: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        x = batch["x"].clone().requires_grad_()
        out = m(x)
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return F.mse_loss(slope, torch.ones_like(slope)) + F.mse_loss(out, batch["value"]), out

    model = net()
    before = [*weights(model), *buffers_of(model).values()]
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        our_updates(model, [rows(6, 0)], loss_fn, 3, check=check)
    assert all(torch.equal(a, b) for a, b in zip(before, [*weights(model), *model.buffers()], strict=True))


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("how", ["grad", "backward"])
def test_an_attack_inside_of_a_loss(how: str, reduction: str, check: bool) -> None:
    """It would add up those of all micro-batches: exact of the whole batch at once, refused of a part."""

    def loss_fn(m: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        x = batch["x"].clone().requires_grad_()
        inner = F.cross_entropy(m(x), batch["label"], reduction=reduction)
        if how == "grad":
            (slope,) = torch.autograd.grad(inner, x)
        else:
            inner.backward(inputs=[x])
            assert x.grad is not None
            slope = x.grad
        out = m(batch["x"] + 0.1 * slope.sign())
        return F.cross_entropy(out, batch["label"]), out

    assert_exact(net, [rows(7, 0)], 7, loss_fn)
    with pytest.raises(LossError, match="a derivative inside of the loss goes through BatchNorm"):
        our_updates(net(), [rows(7, 0)], loss_fn, 3, check=check)


def test_an_attack_on_a_frozen_model_inside_of_a_loss() -> None:
    """A plain backward adds to no weight there, so that no gradient shows it."""
    model, teacher = net(), net()
    teacher.requires_grad_(False)

    def loss_fn(models: Any, batch: Batch) -> Tensor:
        x = batch["x"].clone().requires_grad_()
        F.cross_entropy(models[1](x), batch["label"]).backward()
        assert x.grad is not None
        return F.cross_entropy(models[0](batch["x"] + 0.1 * x.grad.sign()), batch["label"])

    step = BigStep([model, teacher], sgd(trained(model)), loss_fn, micro_batch_size=3)
    with pytest.raises(LossError, match="a derivative inside of the loss"):
        step(rows(7, 0))


# Checkpoints and random numbers.


class Dropping(nn.Module):
    """Dropout that takes down its masks, and whether it ran in a backward; or drops by given ones."""

    def __init__(self) -> None:
        super().__init__()
        self.given: Tensor | None = None
        self.seen: list[tuple[int, bool, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        """Drop about half."""
        mask = torch.bernoulli(torch.full_like(x, 0.5)) if self.given is None else self.given
        worker, again = current(), torch._C._current_graph_task_id() != -1
        self.seen.append((worker.number if worker is not None else 0, again, mask))
        return x * mask * 2


class Checkpointed(nn.Module):
    """A block of norm, dropout, layer, norm under a checkpoint, or without."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.first, self.last, self.reentrant = nn.Linear(3, 6), nn.Linear(6, CLASSES), reentrant
        self.dropping = Dropping()
        self.block = nn.Sequential(nn.BatchNorm1d(6), self.dropping, nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3) → (n, classes)."""
        h = torch.tanh(self.first(x))
        h = self.block(h) if self.reentrant is None else checkpoint(self.block, h, use_reentrant=self.reentrant)
        return self.last(h)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_checkpoints_run_again_with_the_same_numbers(reentrant: bool | None, size: int) -> None:
    """What backward computes again has the masks of the forward; with them the big batch has the same gradient."""
    model = seeded(lambda: Checkpointed(reentrant))()
    assert isinstance(model, Checkpointed)
    twin = copy.deepcopy(model)
    batch, true = rows(7, 0), twin.dropping
    seed()
    ours = our_updates(model, [batch], plain, size, check=False, activations="keep")
    numbers = sorted({number for number, _, _ in model.dropping.seen})
    assert numbers == list(range(math.ceil(7 / size)))
    masks = []
    for number in numbers:
        forward, *again = (mask for at, _, mask in model.dropping.seen if at == number)
        assert len(again) == (reentrant is not None)
        assert all(torch.equal(forward, mask) for mask in again)
        masks.append(forward)
    assert [later for _, later, _ in model.dropping.seen].count(True) == (reentrant is not None) * len(numbers)
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == len(masks)  # each has its own
    true.given = torch.cat(masks)
    assert_same(ours, true_updates(twin, [batch], plain))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_are_exact_over_several_updates(reentrant: bool) -> None:
    """Without dropout; statistics move twice, as they do for a big batch under a checkpoint."""

    def make() -> nn.Module:
        model = seeded(lambda: Checkpointed(reentrant))()
        model.get_submodule("dropping").given = torch.ones(())
        return model

    assert_exact(make, [rows(7, number) for number in range(3)], 2, masked, OPTIMIZERS["adamw"], 0.3)


def test_the_same_seed_gives_the_same_update() -> None:
    """Bit by bit, and another seed another one; the next step draws new numbers."""

    def run(number: int) -> list[Any]:
        seed(number)
        model = seeded(lambda: Checkpointed(reentrant=False))()
        optimizer = OPTIMIZERS["adamw"](trained(model))
        options = Options(check=False, activations="keep")
        step = BigStep(model, optimizer, plain, micro_batch_size=2, options=options)
        for each in range(3):
            step(rows(7, each))
        assert isinstance(model, Checkpointed)
        masks = [mask.flatten().tolist() for _, again, mask in model.dropping.seen if not again]
        assert len({tuple(mask) for mask in masks}) == len(masks) == 12
        return everything(model, optimizer)

    assert run(0) == run(0)
    assert run(0)[0] != run(1)[0]


def test_a_step_without_random_numbers_leaves_the_generators_alone() -> None:
    """Whoever draws nothing moves nothing."""
    model = net()
    step = BigStep(model, sgd(trained(model)), plain, micro_batch_size=2)
    seed()
    before = torch.get_rng_state()
    step(rows(6, 0))
    assert torch.equal(torch.get_rng_state(), before)


# Low precision, judged beside the big batch's own rounding.


@pytest.mark.parametrize("size", [1, 3, 5])
@pytest.mark.parametrize("kind", [(0, "BatchNorm1d"), (2, "BatchNorm2d"), (2, "Activated")], ids=str)
@pytest.mark.parametrize("precision", ["float32", "autocast"])
def test_rounding_is_the_big_batches_own(precision: str, kind: tuple[int, str], size: int) -> None:
    """Against float64, ours is not much further off than the whole batch in the same precision."""

    def lowered(batch: Batch) -> Batch:
        return {name: leaf.float() if leaf.is_floating_point() else leaf for name, leaf in batch.items()}

    ours = theirs = statistics = their_statistics = 0.0
    for number in range(6):
        exact = net(kind, "two", eps=1e-2)
        low = copy.deepcopy(exact).float()
        full = copy.deepcopy(low)
        batch = data(kind[0])(16, number)
        true = true_updates(exact, [batch], plain)[0]
        around: AbstractContextManager[Any] = nullcontext()
        if precision == "autocast":
            around = torch.autocast("cpu", torch.bfloat16)
        with around:
            mine = our_updates(low, [lowered(batch)], plain, size)[0]
            whole = true_updates(full, [lowered(batch)], plain)[0]
        assert all(p.dtype == torch.float32 for p in low.parameters())
        ours += distance(mine.gradients, true.gradients) ** 2
        theirs += distance(whole.gradients, true.gradients) ** 2
        statistics += _distance_of(mine.buffers, true.buffers)
        their_statistics += _distance_of(whole.buffers, true.buffers)
    assert theirs > 0
    assert math.sqrt(ours) <= 2.5 * math.sqrt(theirs)
    assert math.sqrt(statistics) <= 2.5 * math.sqrt(their_statistics) + 1e-7


def _distance_of(found: dict[str, Tensor], true: dict[str, Tensor]) -> float:
    pairs = [(found[name], buffer) for name, buffer in true.items() if buffer.is_floating_point()]
    return distance([a for a, _ in pairs], [b for _, b in pairs]) ** 2


@pytest.mark.parametrize("kind", [(0, "BatchNorm1d"), (2, "BatchNorm2d")], ids=str)
def test_a_model_in_bfloat16(kind: tuple[int, str]) -> None:
    """Parameters, statistics, loss and all: no further off than the whole batch."""
    ours = theirs = 0.0
    for number in range(4):
        exact = net(kind, "two", eps=1e-2)
        low = copy.deepcopy(exact).bfloat16()
        full = copy.deepcopy(low)
        batch = data(kind[0])(16, number)
        coarse = {name: leaf.bfloat16() if leaf.is_floating_point() else leaf for name, leaf in batch.items()}
        true = true_updates(exact, [batch], plain)[0]
        ours += distance(our_updates(low, [coarse], plain, 4)[0].gradients, true.gradients) ** 2
        theirs += distance(true_updates(full, [coarse], plain)[0].gradients, true.gradients) ** 2
    assert 0 < math.sqrt(ours) <= 2.5 * math.sqrt(theirs)


@pytest.mark.parametrize("size", [3, 7])
def test_weights_that_bfloat16_would_round_are_refused(size: int) -> None:
    """All backwards begin before the first ends, so there is no rescaling between them."""
    model = net().bfloat16()
    batch = {name: leaf.bfloat16() if leaf.is_floating_point() else leaf for name, leaf in rows(16, 0).items()}
    with pytest.raises(LossError, match="Compute the loss in float32"):
        our_updates(model, [batch], plain, size)


# What is asked for otherwise, and what cannot be met.


def test_micro_batch_statistics_where_they_are_accepted() -> None:
    """Each micro-batch by its own: what torch does in a loop, and not the big batch."""
    model = net()
    twin, whole = copy.deepcopy(model), copy.deepcopy(model)
    batch = rows(6, 0)
    ours = our_updates(model, [batch], plain, 3, batch_norm="micro")[0]
    optimizer = sgd(trained(twin))
    for start in (0, 3):
        part = {name: leaf[start : start + 3] for name, leaf in batch.items()}
        (plain(twin, part)[0] / 2).backward()
    optimizer.step()
    assert distance(ours.weights, weights(twin)) <= 1e-12
    assert ours.buffers["norm.num_batches_tracked"] == 2
    assert distance(ours.gradients, true_updates(whole, [batch], plain)[0].gradients) > 0.05


def test_no_statistics_where_they_are_refused() -> None:
    """Before anything is run."""
    model = net()
    calls: list[int] = []

    def loss_fn(m: Any, batch: Batch) -> Any:
        calls.append(1)
        return plain(m, batch)

    step = BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=3, options=Options(batch_norm="refuse"))
    with pytest.raises(BatchNormError, match=r"BatchNorm1d 'norm' is in training mode"):
        step(rows(6, 0))
    assert not calls


NORMS: dict[str, Callable[[], nn.Module]] = {
    "GroupNorm": lambda: nn.GroupNorm(2, 4),
    "LayerNorm": lambda: nn.LayerNorm([4, 3, 3]),
    "InstanceNorm": lambda: nn.InstanceNorm2d(4),
    "InstanceNorm, affine": lambda: nn.InstanceNorm2d(4, affine=True),
    "BatchNorm, frozen": lambda: nn.BatchNorm2d(4).eval(),
}


@pytest.mark.parametrize("name", NORMS)
def test_other_norms_never_enter_lock_step(name: str) -> None:
    """They need nothing and get nothing: no thread is made, and the result is the big batch's as ever."""

    def make() -> nn.Module:
        layers = (nn.Conv2d(2, 4, 3, padding=1), NORMS[name](), nn.Tanh(), nn.Flatten(), nn.Linear(36, CLASSES))
        return nn.Sequential(*layers)

    model = seeded(make)()
    twin = copy.deepcopy(model)
    step = BigStep(model, sgd(trained(model)), plain, micro_batch_size=2)
    step(data(2)(5, 0))
    assert not step._together._crew._seats
    assert distance(weights(model), true_updates(twin, [data(2)(5, 0)], plain)[0].weights) <= 1e-12


class Escaping(nn.Module):
    """A layer that does not end in `F.batch_norm` as it is when called."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.last, self.how = nn.Linear(3, 6), nn.Linear(6, CLASSES), how
        self.norm, self.asleep = nn.BatchNorm1d(6), False

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3) → (n, classes)."""
        if "reentrant" in self.how:
            return self.last(checkpoint(self.escape, self.first(x), use_reentrant="not" not in self.how))
        return self.last(self.escape(self.first(x)))

    def escape(self, h: Tensor) -> Tensor:
        """Normalise by the micro-batch."""
        norm = self.norm
        if self.how == "imported by name":
            return imported_by_name(h, norm.running_mean, norm.running_var, norm.weight, norm.bias, training=True)
        running = (norm.running_mean, norm.running_var)
        return torch.batch_norm(h, norm.weight, norm.bias, *running, not self.asleep, 0.1, 1e-5, True)


ESCAPES = ["direct", "imported by name", "not reentrant"]


@pytest.mark.parametrize("how", [*ESCAPES, "reentrant"])
def test_a_norm_that_escapes_is_detected(how: str) -> None:
    """By the graph, in every step: it would have normalised by the micro-batch; nothing is changed."""
    model = seeded(lambda: Escaping(how))()
    optimizer = OPTIMIZERS["adamw"](trained(model))
    seed()
    before = everything(model, optimizer)
    step = BigStep(model, optimizer, plain, micro_batch_size=3, options=Options(check=False))
    with pytest.raises(BatchNormError, match=r"(?s)cannot meet at.*torch\.nn\.functional\.batch_norm"):
        step(rows(6, 0))
    assert everything(model, optimizer) == before


@pytest.mark.parametrize("before", ["awake", "asleep"])
def test_a_norm_that_escapes_is_detected_every_time(before: str) -> None:
    """Also after a step that was refused, and where the norm was frozen at first."""
    model = seeded(lambda: Escaping("direct"))()
    assert isinstance(model, Escaping)
    model.asleep = before == "asleep"
    model.beginning = nn.BatchNorm1d(3).double()  # the step runs in lock-step from the beginning
    step = BigStep(
        model,
        sgd(trained(model)),
        lambda m, b: F.cross_entropy(m(m.beginning(b["x"])), b["label"]),
        micro_batch_size=3,
        options=Options(check=False),
    )
    if before == "asleep":
        step(rows(6, 0))
    else:
        with pytest.raises(BatchNormError, match="cannot meet at"):
            step(rows(6, 0))
    model.asleep = False
    with pytest.raises(BatchNormError, match="cannot meet at"):
        step(rows(6, 1))


@pytest.mark.parametrize("how", [*ESCAPES, "reentrant", "without gradient"])
def test_a_norm_that_escapes_is_seen_by_the_first_check(how: str) -> None:
    """By its loss, also where no graph shows it."""
    model = seeded(lambda: Escaping("direct" if how == "without gradient" else how))()
    optimizer = OPTIMIZERS["adamw"](trained(model))

    def without_gradient(m: Any, batch: Batch) -> Tensor:
        with torch.no_grad():
            target = m(batch["x"])
        return F.mse_loss(m.last(m.first(batch["x"])), target)

    step = BigStep(model, optimizer, without_gradient if how == "without gradient" else plain, micro_batch_size=4)
    seed()
    before = everything(model, optimizer)
    with pytest.raises((BatchNormError, CoupledLoss)):
        step(rows(8, 0))
    assert everything(model, optimizer) == before


@pytest.mark.parametrize("how", ["never", "once for two"])
def test_a_layer_that_counts_in_its_own_way(how: str) -> None:
    """`num_batches_tracked` is the big batch's, whatever the layer does with it."""

    class Counting(nn.BatchNorm1d):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own name
            assert self.num_batches_tracked is not None
            norm = partial(F.batch_norm, weight=self.weight, bias=self.bias, training=self.training)
            if how == "never":
                return norm(input, self.running_mean, self.running_var)
            self.num_batches_tracked.add_(1)
            return norm(norm(input, self.running_mean, self.running_var) ** 2, self.running_mean, self.running_var)

    make = seeded(lambda: nn.Sequential(nn.Linear(3, 5), Counting(5), nn.Linear(5, CLASSES)))
    assert_exact(make, [rows(6, number) for number in range(2)], 2)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("gradient", [True, False])
def test_a_model_that_nobody_told_of(size: int, gradient: bool) -> None:
    """Its running statistics could not be put back: refused, with what to type; in evaluation mode it is welcome."""
    model, teacher = seeded(lambda: nn.Linear(3, CLASSES))(), net()

    def loss_fn(m: Any, batch: Batch) -> Tensor:
        with nullcontext() if gradient else torch.no_grad():
            target = teacher(batch["x"])
        return F.mse_loss(m(batch["x"]), target)

    step = BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=size)
    with pytest.raises((BatchNormError, CoupledLoss), match=r"BigStep\(\[model, teacher\]|are coupled"):
        step(rows(8, 0))
    teacher.eval()
    step(rows(8, 0))


@pytest.mark.parametrize("how", ["a centred batch", "attention", "a largest value"])
def test_coupling_beside_batch_norm_is_refused(how: str) -> None:
    """Micro-batches meet at the norms alone."""

    class Coupled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.norm(self.first(x)))
            if how == "attention":
                h = (h @ h.T).softmax(-1) @ h
            else:
                h = h - h.mean(0) if how == "a centred batch" else h / h.abs().max()
            return self.last(h)

    model = seeded(Coupled)()
    step = BigStep(model, sgd(trained(model)), plain, micro_batch_size=4)
    with pytest.raises(CoupledLoss):
        step(rows(8, 0))


def test_compiled_batch_norm_is_refused_before_it_is_compiled() -> None:
    """Inside compiled code micro-batches cannot meet."""
    model = net()
    compiled: Any = torch.compile(model, backend="eager")

    def loss_fn(m: Any, batch: Batch) -> Tensor:
        raise AssertionError((m, batch))

    step = BigStep(compiled, sgd(trained(model)), loss_fn, micro_batch_size=3)
    with pytest.raises(BatchNormError, match="is compiled and holds BatchNorm in training mode"):
        step(rows(6, 0))


def test_a_norm_that_some_skip_is_reported() -> None:
    """A path that depends on the data ends in an error that says where each waits."""
    model = net(place="two")

    def loss_fn(m: Any, batch: Batch) -> Tensor:
        h = m.one(batch["x"])
        h = m.norm(h) if batch["x"][0, 0] > 0 else h
        return F.cross_entropy(m.head(m.other(h)), batch["label"])

    batch = rows(6, 0)
    batch["x"][:, 0] = torch.tensor([1.0, 1, -1, -1, 1, 1])
    step = BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=2)
    before = [*weights(model), *buffers_of(model).values()]
    with pytest.raises(LossError, match=r"(?s)took different paths.*micro-batch.* at "):
        step(batch)
    assert all(torch.equal(a, b) for a, b in zip(before, [*weights(model), *model.buffers()], strict=True))


def test_other_threads_normalise_as_ever() -> None:
    """The swap acts on the window's own threads alone."""
    model, x = net(), torch.randn(5, 3, dtype=torch.float64)
    expected = F.batch_norm(x, None, None, training=True)
    found: list[Tensor] = []

    def loss_fn(m: Any, batch: Batch) -> Any:
        assert F.batch_norm is not PLAIN
        thread = threading.Thread(target=lambda: found.append(F.batch_norm(x, None, None, training=True)))
        thread.start()
        thread.join()
        return plain(m, batch)

    BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=2)(rows(6, 0))
    assert len(found) >= 3
    assert all(torch.equal(each, expected) for each in found)


# Failures.


class Fragile(nn.Module):
    """Norms, dropout, and points before, between and after them at which it may fail, forwards and backwards."""

    def __init__(self, bomb: Bomb | None = None) -> None:
        super().__init__()
        self.bomb = bomb or Bomb()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.first, self.middle, self.last = (nn.Linear(a, b).double() for a, b in ((3, 6), (6, 6), (6, CLASSES)))
        self.norms = nn.ModuleList([nn.BatchNorm1d(6).double() for _ in range(2)])
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3) → (n, classes)."""
        self.bomb.pass_by("forward", len(x))
        h = self.norms[0](self._fused("below", self.first(x)))
        self.bomb.pass_by("between norms", len(x))
        h = self.norms[1](self.middle(self._fused("between", self.dropout(torch.tanh(h)))))
        self.bomb.pass_by("after norms", len(x))
        return self.last(self._fused("above", h))

    def _fused(self, where: str, x: Tensor) -> Tensor:
        found: Tensor = Fuse.apply(x, _Elsewhere(self.bomb, where))  # type: ignore[no-untyped-call]
        return found


class _Elsewhere(Bomb):
    """A bomb whose backward has a name of its own."""

    def __init__(self, bomb: Bomb, where: str) -> None:
        super().__init__()
        self.bomb, self.where = bomb, where

    def pass_by(self, point: str, samples: int) -> None:
        """Come to a point of a micro-step."""
        self.bomb.pass_by(f"{point} {self.where}", samples)


POINTS = (
    "forward", "between norms", "after norms", "loss",
    "backward above", "backward between", "backward below",
)  # fmt: skip


class Session:
    """A fragile model in training."""

    def __init__(self, bomb: Bomb | None = None, size: Any = 2, **options: Any) -> None:
        seed()
        self.model = Fragile(bomb)
        self.optimizer = torch.optim.AdamW(trained(self.model), lr=0.05, foreach=False)
        self.step = BigStep(
            self.model, self.optimizer, self.loss, micro_batch_size=size, clip_norm=1.0, options=Options(**options)
        )

    @staticmethod
    def loss(model: Any, batch: Batch) -> Tensor:
        """A masked cross-entropy with noise."""
        out = model(batch["x"] + 0.1 * torch.randn_like(batch["x"]))
        model.bomb.pass_by("loss", len(batch["x"]))
        return F.cross_entropy(out, batch["partly"])

    @property
    def all(self) -> list[Any]:
        """All that a step may change."""
        return everything(self.model, self.optimizer)


@pytest.mark.parametrize("after", [0, 1, 2, 3])
@pytest.mark.parametrize("point", POINTS)
def test_an_error_in_any_micro_batch_changes_nothing(point: str, after: int) -> None:
    """Weights, gradients, state, statistics and generators; the error is the one raised; the next step works."""
    error = OTHER[(after + len(point)) % len(OTHER)]
    true = Session()
    for number in range(3):
        true.step(rows(8, number))
    expected, session = true.all, Session(Bomb())
    for number in range(2):  # samples are compared in both
        session.step(rows(8, number))
    before, bomb = session.all, session.model.bomb
    bomb.point, bomb.after, bomb.error = point, after, error
    with pytest.raises(type(error())) as caught:
        session.step(rows(8, 2))
    assert bomb.went_off == 1
    assert "pass_by" in [each.name for each in caught.traceback]  # the line that failed is in it
    assert session.all == before
    bomb.point = ""
    session.step(rows(8, 2))
    assert session.all == expected


def _learned(step: BigStep) -> int:
    (found,) = step.state_dict()["sizes"].values()
    return found["size"]


@given(
    point=st.sampled_from(POINTS),
    error=st.sampled_from(OUT_OF_MEMORY),
    n=st.integers(4, 9),
    size=st.integers(3, 8),
    fits=st.integers(1, 2),
    after=st.integers(0, 3),
)
@settings(max_examples=20)
def test_out_of_memory_is_as_if_it_had_never_been(
    *, point: str, error: Callable[[], BaseException], n: int, size: int, fits: int, after: int
) -> None:
    """The size is halved, and the update is, bit by bit, that of the smaller size all along."""
    bomb = Bomb(point, fits, after, error)
    session = Session(bomb, size)
    update, found = session.step(rows(n, 0)), session.all
    if not bomb.went_off:
        return
    learned = _learned(session.step)
    assert learned < min(size, n)
    true = Session(size=learned)
    expected = true.step(rows(n, 0))
    assert found == true.all
    assert update.micro_batches == expected.micro_batches == math.ceil(n / learned)


@pytest.mark.parametrize("point", POINTS)
def test_a_sample_that_does_not_fit(point: str) -> None:
    """Says so, and changes nothing."""
    session = Session(Bomb(point, fits=0, error=OUT_OF_MEMORY[0]), 4)
    before = session.all
    with pytest.raises(OutOfMemory, match="out of memory with one sample at a time"):
        session.step(rows(6, 0))
    assert session.all == before


def test_a_batch_whose_activations_do_not_fit_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait in the host's memory, and there is none."""
    monkeypatch.setattr("bigbatch.lockstep.activations.host_available", lambda: 1000)
    model = net()
    step = BigStep(model, sgd(trained(model)), plain, micro_batch_size=3)
    before = weights(model)
    with pytest.raises(OutOfMemory, match=r"(?s)the activations of all 8.*Nothing was changed"):
        step(rows(8, 0))
    assert distance(weights(model), before) == 0
    assert all(p.grad is None for p in trained(model))
    keeping = BigStep(model, sgd(trained(model)), plain, micro_batch_size=3, options=Options(activations="keep"))
    assert keeping(rows(8, 0)).micro_batches == 3


def test_a_size_that_is_small_for_another_reason_is_no_lack_of_memory() -> None:
    """A size that was learned before, as the fastest: the batch fits, and is cut all the same."""
    from bigbatch.batch.batch import Batch as Cut

    model = net()
    twin, batch = copy.deepcopy(model), rows(8, 0)
    step = BigStep(model, sgd(trained(model)), plain)
    step.load_state_dict({"version": 1, "sizes": {str(Cut.of(batch).signature()): 4}})
    assert step(batch).micro_batches == 2
    assert distance(weights(model), true_updates(twin, [batch], plain)[0].weights) <= 1e-12


# A thousand windows.


def test_a_thousand_windows_leave_nothing_behind() -> None:
    """No thread, no tensor, no object more than after the first few, though some windows fail."""
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES)))()
    failing: list[int] = []

    def loss_fn(m: Any, batch: Batch) -> Tensor:
        loss = F.cross_entropy(m(batch["x"]), batch["label"])
        worker = current()
        if failing and worker is not None and worker.number == failing[0]:
            raise ValueError("of the loss")
        return loss

    step = BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=2)
    batch = {name: leaf for name, leaf in rows(6, 0).items() if name in {"x", "label"}}

    def windows(number: int) -> None:
        for each in range(number):
            failing[:] = [each % 3] if each % 10 == 9 else []
            if failing:
                with pytest.raises(ValueError, match="of the loss"):
                    step(batch)
            else:
                step(batch)

    def tensors() -> int:
        return sum(issubclass(type(each), Tensor) for each in gc.get_objects())

    windows(20)
    gc.collect()
    alive, objects, threads = tensors(), len(gc.get_objects()), set(threading.enumerate())
    windows(980)
    gc.collect()
    # Those that a test before has left may end meanwhile; none may come.
    assert set(threading.enumerate()) <= threads
    assert tensors() <= alive
    assert len(gc.get_objects()) <= objects + 50


def test_threads_end_with_their_step() -> None:
    """A step that nobody holds leaves no thread behind."""
    gc.collect()
    before = set(threading.enumerate())
    model = net()
    step: BigStep | None = BigStep(model, sgd(trained(model)), plain, micro_batch_size=2)
    assert step is not None
    step(rows(6, 0))
    mine = set(threading.enumerate()) - before
    assert len(mine) == 3
    step = None
    gc.collect()
    for thread in mine:
        thread.join(20)
    assert not any(thread.is_alive() for thread in mine)
