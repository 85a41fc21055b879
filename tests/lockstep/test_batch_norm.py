"""BatchNorm in a `BigStep` normalises by the big batch: outputs, gradients, running statistics, loss and norm."""

import copy
import gc
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import batch_norm as imported_by_name
from torch.utils.checkpoint import checkpoint

from bigbatch import BigStep
from bigbatch.errors import BatchNormError, CoupledLoss, LossError
from bigbatch.lockstep.threads import current
from tests.support.bombs import OTHER, OUT_OF_MEMORY, Bomb, Restless, everything, restless_loss, seed
from tests.support.coupled import (
    KINDS,
    Make,
    assert_big_batch,
    assert_refused,
    data,
    gradients_of,
    masked,
    model,
    net,
    plain,
    step_of,
    told_apart,
)
from tests.support.reference import distance, trained, weights
from tests.support.samples import CLASSES, Batch, rows, seeded
from tests.support.strategies import OPTIMIZERS

PLAIN = F.batch_norm


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    """Torch's function is torch's again."""
    yield
    assert F.batch_norm is PLAIN


@pytest.fixture(autouse=True, scope="module")
def _quick_collection() -> Iterator[None]:
    """Each retry collects garbage; what the imports have made need not be looked through every time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def normed(norm: Callable[[], nn.Module] = lambda: nn.BatchNorm1d(6), how: Any = None, **more: Any) -> Make:
    """A norm between two layers, or what `how` makes of them."""
    run = how or (lambda m, x: m.last(m.norm(m.first(x))))
    return model(run, first=lambda: nn.Linear(3, 6), norm=norm, last=lambda: nn.Linear(6, CLASSES), **more)


# Exact; any layer in any split is in test_run.py, other strides in test_offload.py.


def partly_frozen(*, norm: bool) -> nn.Module:
    """The norm's input has no gradient, and micro-batches do not meet there in backward."""
    made = net(place="two")
    made.get_submodule("one").requires_grad_(requires_grad=False)
    made.get_submodule("norm").requires_grad_(norm)
    return made


def of_a_teacher(models: Any, batch: Batch) -> Tensor:
    """A frozen teacher whose norms track along: one without gradient meets, too, and its statistics move once."""
    with torch.no_grad():
        target = models[1](batch["x"])
    return F.mse_loss(models[0](batch["x"]), target)


class CountingOnce(nn.BatchNorm1d):
    """Counts batches in its own way, once for two calls."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own name
        """Normalise."""
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        norm = partial(F.batch_norm, weight=self.weight, bias=self.bias, training=self.training)
        return norm(norm(input, self.running_mean, self.running_var) ** 2, self.running_mean, self.running_var)


def some_counted() -> Batch:
    """Nothing counts in a micro-batch of two."""
    return {**rows(8, 0), "partly": torch.tensor([-100, -100, 1, -100, -100, -100, 2, 0])}


EXACT: dict[str, tuple[Make, Any, list[Batch], int]] = {
    "two samples, one by one": (partial(net, eps=0.1), plain, [rows(2, 0), rows(3, 1)], 1),
    "nothing counts in some": (net, masked, [some_counted()], 2),
    "nothing counts in some, two terms": (net, told_apart, [some_counted()], 2),
    "a frozen layer before it": (partial(partly_frozen, norm=True), plain, [rows(7, 0), rows(5, 1)], 3),
    "a frozen norm": (partial(partly_frozen, norm=False), plain, [rows(7, 0), rows(5, 1)], 3),
    "a teacher that tracks along": (
        lambda: nn.ModuleList([net(), net(place="two").requires_grad_(False)]),
        of_a_teacher,
        [rows(7, 0), rows(7, 1)],
        2,
    ),
    "one count for two": (normed(lambda: CountingOnce(6)), plain, [rows(6, 0), rows(6, 1)], 2),
}  # fmt: skip


@pytest.mark.parametrize("how", EXACT)
def test_what_is_the_big_batch(how: str) -> None:
    """Samples that count nothing are part of the statistics all the same."""
    make, loss, batches, size = EXACT[how]
    assert_big_batch(make, loss, batches, size)


def test_a_batch_in_which_nothing_counts() -> None:
    """It makes no update."""
    made = net()
    before = weights(made)
    assert step_of(made, masked, 2)({**rows(8, 0), "partly": torch.full((8,), -100)}).skipped
    assert distance(weights(made), before) == 0


def attacked(m: Any, batch: Batch, *, by_backward: bool) -> Tensor:
    """A first derivative would add up those of all micro-batches: exact of the whole batch, refused of a part."""
    x = batch["x"].clone().requires_grad_()
    inner = F.cross_entropy(m(x), batch["label"])
    if by_backward:
        inner.backward(inputs=[x])
    slope: Any = x.grad if by_backward else torch.autograd.grad(inner, x)[0]
    return F.cross_entropy(m(batch["x"] + 0.1 * slope.sign()), batch["label"])


def penalized(m: Any, batch: Batch) -> Tensor:
    """A second derivative through lock-step would see this micro-batch alone."""
    x = batch["x"].clone().requires_grad_()
    out = m(x)
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    return F.mse_loss(slope, torch.ones_like(slope)) + F.mse_loss(out, batch["value"])


def zero_for_some(m: Any, batch: Batch) -> Tensor:
    """As one after the other: nothing tells how many samples a loss of zero leaves out."""
    return plain(m, batch)[0] * (0 if batch["x"][0, 0] == rows(7, 0)["x"][0, 0] else 1)


def lowered(batch: Batch, dtype: torch.dtype) -> Batch:
    """The same in another precision."""
    return {name: leaf.to(dtype) if leaf.is_floating_point() else leaf for name, leaf in batch.items()}


def without_gradient(m: Any, batch: Batch) -> Tensor:
    """No graph shows the norm."""
    with torch.no_grad():
        target = m(batch["x"])
    return F.mse_loss(m.last(m.first(batch["x"])), target)


def with_another(*, gradient: bool) -> Callable[[Any, Batch], Tensor]:
    """Compare with a model that nobody told of: its running statistics could not be put back."""
    teacher = net()

    def loss_fn(m: Any, batch: Batch) -> Tensor:
        with nullcontext() if gradient else torch.no_grad():
            target = teacher(batch["x"])
        return F.mse_loss(m(batch["x"]), target)

    return loss_fn


def never(m: Any, batch: Batch) -> Any:
    """Nothing is run."""
    raise AssertionError((m, batch))


def below(m: Any, h: Tensor) -> Tensor:
    """The function that `F.batch_norm` calls."""
    norm = m.norm
    return torch.batch_norm(h, norm.weight, norm.bias, norm.running_mean, norm.running_var, True, 0.1, 1e-5, True)


def by_name(m: Any, h: Tensor) -> Tensor:
    """The function as it was when it was imported."""
    norm = m.norm
    return imported_by_name(h, norm.running_mean, norm.running_var, norm.weight, norm.bias, training=True)


# Layers that do not end in `F.batch_norm` as it is when called: they would normalise by the micro-batch.
ESCAPING: dict[str, Make] = {
    "direct": normed(how=lambda m, x: m.last(below(m, m.first(x)))),
    "imported by name": normed(how=lambda m, x: m.last(by_name(m, m.first(x)))),
    "checkpoint": normed(how=lambda m, x: m.last(checkpoint(below, m, m.first(x), use_reentrant=False))),
}
ESCAPED = r"does not call torch\.nn\.functional\.batch_norm"
INSIDE = "a derivative inside of the loss goes through BatchNorm"
linear = seeded(lambda: nn.Linear(3, CLASSES))
low = lowered(rows(16, 0), torch.bfloat16)
Refused = tuple[Make, Any, Batch, Any, str | None, dict[str, Any]]
REFUSED: dict[str, Refused] = {
    "one sample": (net, plain, rows(1, 0), ValueError, "more than 1 value per channel", {}),
    "a second derivative": (net, penalized, rows(6, 0), RuntimeError, "cannot be differentiated twice", {}),
    "a first derivative": (net, partial(attacked, by_backward=False), rows(7, 0), LossError, INSIDE, {}),
    "a backward inside": (net, partial(attacked, by_backward=True), rows(7, 0), LossError, INSIDE, {}),
    "a loss of zero beside means": (net, zero_for_some, rows(7, 0), LossError, "0 times something", {"check": False}),
    # All backwards begin before the first ends, so there is no rescaling between them.
    "bfloat16 weights it": (lambda: net().bfloat16(), plain, low, LossError, "Compute the loss in float32", {}),
    "as asked": (
        net, never, rows(6, 0), BatchNormError, r"BatchNorm1d 'norm' is in training mode", {"batch_norm": "refuse"}
    ),
    "compiled": (
        lambda: torch.compile(net(), backend="eager"),  # type: ignore[dict-item, return-value]
        never, rows(6, 0), BatchNormError, "is compiled and holds BatchNorm in training mode", {},
    ),
    "another model": (
        linear, with_another(gradient=True), rows(8, 0), BatchNormError, r"BigStep\(\[model, teacher\]", {}
    ),
    "another model, without gradient": (
        linear, with_another(gradient=False), rows(8, 0), (BatchNormError, CoupledLoss),
        r"BigStep\(\[model, teacher\]|are coupled", {},
    ),
    **{n: (make, plain, rows(6, 0), BatchNormError, ESCAPED, {"check": False}) for n, make in ESCAPING.items()},
    **{
        f"{name}, without gradient": (make, without_gradient, rows(8, 0), (BatchNormError, CoupledLoss), None, {})
        for name, make in ESCAPING.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("how", REFUSED)
def test_what_is_refused(how: str) -> None:
    """With a check and without; every time."""
    make, loss, batch, error, told, options = REFUSED[how]
    for check in {options.get("check", True), how.startswith("another") or "gradient" in how}:
        step = assert_refused(make, loss, batch, 3, error, told, **{"check": check, **options})
        with pytest.raises(error, match=told):
            step(batch)


@pytest.mark.parametrize("by_backward", [True, False])
def test_a_derivative_inside_of_a_loss(by_backward: bool) -> None:
    """It is exact in a batch of one micro-batch."""
    assert_big_batch(net, partial(attacked, by_backward=by_backward), [rows(7, 0)], 7)


def test_another_model_in_evaluation_mode_is_welcome() -> None:
    """Nothing of it moves."""
    teacher = net().eval()
    step_of(linear(), lambda m, b: F.mse_loss(m(b["x"]), teacher(b["x"])), 3)(rows(8, 0))


@pytest.mark.parametrize("norm", [nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True), nn.BatchNorm2d(4).eval()])
def test_other_norms_never_enter_lock_step(norm: nn.Module) -> None:
    """They need nothing and get nothing: no thread is made, and the result is the big batch's as ever."""

    def make() -> nn.Module:
        layers = (nn.Conv2d(2, 4, 3, padding=1), copy.deepcopy(norm), nn.Tanh(), nn.Flatten(), nn.Linear(36, CLASSES))
        return nn.Sequential(*layers)

    before = threading.active_count()
    step = assert_big_batch(seeded(make), plain, [data(2)(5, 0)], 2)
    assert threading.active_count() <= before, step


# Checkpoints and random numbers.


def checkpointed(m: Any, x: Tensor) -> Any:
    """A block of norm, dropout, layer, norm under a checkpoint, or without."""
    h, block = torch.tanh(m.first(x)), m.norm
    return m.last(block(h) if m.reentrant is None else checkpoint(block, h, use_reentrant=m.reentrant))


def block() -> nn.Module:
    """Norms that do not track."""
    norms = [nn.BatchNorm1d(6, momentum=0.0) for _ in range(2)]
    return nn.Sequential(norms[0], nn.Dropout(0.5), nn.Linear(6, 6), norms[1], nn.Tanh())


@pytest.mark.parametrize("size", [1, 3])
def test_checkpoints_run_again_with_the_same_numbers(size: int) -> None:
    """With one seed the update is the same under any checkpoint and without one; with another it is another."""

    def run(reentrant: bool | None, number: int = 0) -> list[Tensor]:
        seed(number)
        made = normed(block, checkpointed, reentrant=lambda: reentrant)()
        step = step_of(made, plain, size, OPTIMIZERS["sgd"], check=False, activations="keep")
        for each in range(3):
            step(rows(7, each))
        return weights(made)

    true = run(None)
    assert distance(run(None), true) == 0
    assert distance(run(None, 1), true) > 1e-3
    for reentrant in (True, False):
        assert distance(run(reentrant), true) <= 1e-12


# Low precision, judged beside the big batch's own rounding.


def one_step(model: nn.Module, batch: Batch, size: int) -> tuple[list[Tensor], list[Tensor]]:
    """The gradient of a step, and the statistics after it."""
    found: list[Tensor] = []
    step = step_of(model, plain, size)
    step.before_step(lambda: found.extend(gradients_of(model)))
    step(batch)
    return found, [buffer for buffer in model.buffers() if buffer.is_floating_point()]


@pytest.mark.parametrize("kind", ["1d", "activated"])
@pytest.mark.parametrize("precision", ["float32", "autocast", "bfloat16"])
def test_rounding_is_the_big_batches_own(precision: str, kind: str) -> None:
    """Against float64, ours is not much further off than the whole batch in the same precision."""
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    size = 4 if precision == "bfloat16" else 5  # whose weights it does not round
    ours = theirs = 0.0
    for number in range(4):
        exact = net(kind, "two", eps=1e-2)
        low = copy.deepcopy(exact).to(dtype)
        full, batch = copy.deepcopy(low), data(KINDS[kind][0])(16, number)
        true = one_step(exact, batch, 16)
        around: AbstractContextManager[Any] = nullcontext()
        if precision == "autocast":
            around = torch.autocast("cpu", torch.bfloat16)
        with around:
            mine, whole = one_step(low, lowered(batch, dtype), size), one_step(full, lowered(batch, dtype), 16)
        assert all(p.dtype == dtype for p in low.parameters())
        ours += sum(distance(a, b) ** 2 for a, b in zip(mine, true, strict=True))
        theirs += sum(distance(a, b) ** 2 for a, b in zip(whole, true, strict=True))
    assert 0 < math.sqrt(ours) <= 2.5 * math.sqrt(theirs)


# Failures.


class Normed(Restless):
    """Norms between points at which it may fail, forwards and backwards."""

    def __init__(self, bomb: Bomb | None = None) -> None:
        super().__init__(bomb)
        norms = (nn.BatchNorm1d(6).double() for _ in range(2))
        self.dropout = nn.Sequential(next(norms), nn.Dropout(0.3), next(norms))  # type: ignore[assignment]


class Session:
    """Such a model in training."""

    def __init__(self, bomb: Bomb | None = None, size: Any = 2) -> None:
        seed()
        self.model = Normed(bomb)
        self.optimizer = torch.optim.AdamW(trained(self.model), lr=0.05, foreach=False)
        self.step = BigStep(self.model, self.optimizer, restless_loss, micro_batch_size=size, clip_norm=1.0)

    @property
    def all(self) -> list[Any]:
        """All that a step may change."""
        return everything(self.model, self.optimizer)


@pytest.mark.parametrize("after", [0, 2, 3])
@pytest.mark.parametrize("point", ["forward", "loss", "backward", "gradient hook", "parameter hook"])
def test_an_error_in_any_micro_batch_changes_nothing(point: str, after: int) -> None:
    """Weights, gradients, state, statistics and generators; the error is the one raised; the next step works."""
    error = OTHER[(after + len(point)) % len(OTHER)]
    true, session = Session(), Session(Bomb())
    seed()
    for number in range(3):
        true.step(rows(8, number))
    expected = true.all
    seed()
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


@pytest.mark.filterwarnings("ignore:the check of this batch could not run")
@pytest.mark.parametrize(("point", "n", "size", "fits", "after"), [("forward", 4, 3, 2, 0), ("backward", 5, 3, 2, 1)])
def test_out_of_memory_is_as_if_it_had_never_been(point: str, n: int, size: int, fits: int, after: int) -> None:
    """The update is, bit by bit, that of the smaller size all along; of the same, where the check alone met it."""
    session = Session(Bomb(point, fits, after, OUT_OF_MEMORY[after]), size)
    update, found = session.step(rows(n, 0)), session.all
    learned = [each["size"] for each in session.step.state_dict()["sizes"].values()]
    assert all(each < min(size, n) for each in learned)
    true = Session(size=learned[0] if learned else size)
    expected = true.step(rows(n, 0))
    assert found == true.all
    assert update.micro_batches == expected.micro_batches


# Many windows.


def test_many_windows_leave_nothing_behind() -> None:
    """No thread, no tensor, no object more than after the first few, though some windows fail."""
    failing: list[int] = []

    def loss_fn(m: Any, batch: Batch) -> Tensor:
        loss, worker = F.cross_entropy(m(batch["x"]), batch["label"]), current()
        if failing and worker is not None and worker.number == failing[0]:
            raise ValueError("of the loss")
        return loss

    step = step_of(normed()(), loss_fn, 2)
    batch = {name: leaf for name, leaf in rows(6, 0).items() if name in {"x", "label"}}

    def windows(number: int) -> tuple[int, int]:
        for each in range(number):
            failing[:] = [each % 3] if each % 10 == 9 else []
            with pytest.raises(ValueError, match="of the loss") if failing else nullcontext():
                step(batch)
        gc.collect()
        return sum(issubclass(type(each), Tensor) for each in gc.get_objects()), len(gc.get_objects())

    (tensors, objects), threads = windows(20), set(threading.enumerate())
    more_tensors, more_objects = windows(180)
    # Those that a test before has left may end meanwhile; none may come.
    assert set(threading.enumerate()) <= threads
    assert more_tensors <= tensors
    assert more_objects <= objects + 50
