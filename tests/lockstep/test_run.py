"""A window in lock-step: any coupled model in any split is the big batch, or refused in words."""

import copy
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bigbatch import BigStep, Options, across, counted
from bigbatch.errors import (
    CoupledLoss,
    LossError,
    OutOfMemory,
    PathsDiffer,
    UnreadableLoss,
    WindowDisturbed,
    WindowError,
)
from bigbatch.lockstep import activations
from bigbatch.lockstep.activations import Activations
from bigbatch.lockstep.model_state import CannotRecompute
from tests.support.coupled import (
    LOSSES,
    Case,
    Make,
    Model,
    assert_big_batch,
    assert_refused,
    cases,
    masked,
    model,
    plain,
    step_of,
    twins,
)
from tests.support.reference import distance, sgd, trained, weights
from tests.support.samples import CLASSES, Batch, rows, seeded


@given(cases())
@settings(max_examples=200)
def test_any_coupled_model_in_any_split(case: Case) -> None:
    """Losses of all samples, models that look at all, BatchNorm anywhere; over several updates, clipped or not."""
    assert_big_batch(case.make, case.loss_fn, case.batches, case.size, **case.settings)


@pytest.mark.parametrize("how", ["keep", "recompute"])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_in_an_uneven_split(loss: str, how: str) -> None:
    """As people write them, read without a word; of some targets none counts in a micro-batch."""
    batch = rows(8, 0)
    batch["partly"] = torch.tensor([1, -100, 3, -100, -100, -100, 0, 2])
    for size in (1, 3):
        assert_big_batch(twins, LOSSES[loss], [batch, rows(5, 1)], size, activations=how)


# What micro-batches find of each other when they take turns, and what a loss does beside.


def cross_entropy(model: Any, batch: Batch) -> Tensor:
    """The mean over samples, in float32 at least."""
    scores = model(batch["x"])
    return F.cross_entropy(scores.float() if scores.dtype == torch.bfloat16 else scores, batch["label"])


def forward(m: Any, x: Tensor) -> Any:
    """A norm in the middle."""
    return m.last(torch.relu(m.norm(m.first(x))))


def student(
    how: Callable[..., Any] = forward, norm: Callable[[], Any] = lambda: nn.BatchNorm1d(8), **more: Any
) -> Make:
    """Make a model with a norm."""
    parts: dict[str, Any] = {"first": lambda: nn.Linear(3, 8), "norm": norm, "last": lambda: nn.Linear(8, CLASSES)}
    return model(how, **parts, **more)


def frozen(make: Make) -> Make:
    """Make a model whose norm is in evaluation mode: nobody takes turns."""

    def found() -> nn.Module:
        made = make()
        made.get_submodule("norm").eval()
        return made

    return found


def by_a_hook() -> Callable[[Any, Batch], Tensor]:
    """A teacher's features, caught by a hook, are read after the student has run."""
    teacher = seeded(lambda: nn.Linear(3, CLASSES).requires_grad_(False))()
    features: dict[str, Tensor] = {}
    teacher.register_forward_hook(lambda _, __, out: features.__setitem__("teacher", out))

    def loss(model: Any, batch: Batch) -> Tensor:
        teacher(batch["x"])
        return F.mse_loss(model(batch["x"]), features["teacher"])

    return loss


def putting_aside(m: Any, x: Tensor) -> Any:
    """Keep a value of the input before the norm."""
    m.kept = x.abs().mean(1)
    return forward(m, x)


def halved(model: Any, batch: Batch) -> Tensor:
    """Call the model with other weights."""
    other = {"last.weight": model.last.weight / 2, "first.weight": model.first.weight * 1.5}
    return F.cross_entropy(torch.func.functional_call(model, other, batch["x"]), batch["label"])


def by_exchange(model: Any, batch: Batch) -> Tensor:
    """Have a teacher of slower weights, near to its own, by exchanging memory, in training mode."""
    slow = model.__dict__.setdefault("slow", [p.detach() * 0.999 for p in model.parameters()])

    def exchange() -> None:
        for p, other in zip(model.parameters(), slow, strict=True):
            p.data, other.data = other.data, p.data

    exchange()
    with torch.no_grad():
        target = model(batch["x"])
    exchange()
    return F.mse_loss(model(batch["x"]), target)


def inside_of_another() -> Callable[[Any, Batch], Tensor]:
    """A step in the midst of a forward."""
    inner = step_of(student()(), cross_entropy, 2)
    return lambda model, batch: (inner(rows(4, 0)), cross_entropy(model, batch))[1]


def changing(model: Any, batch: Batch) -> Tensor:
    """Micro-batches are parts of a batch that is changed in place."""
    out = model(batch["x"])
    batch["x"].mul_(2)
    return F.cross_entropy(out, batch["label"])


def with_a_backward(model: Any, batch: Batch) -> Tensor:
    """Its gradients would be added to the window's."""
    loss = cross_entropy(model, batch)
    loss.backward(retain_graph=True)
    return loss


def in_training_inside(model: nn.Module, batch: Batch) -> Tensor:
    """Each step begins in evaluation mode."""
    model.train()
    loss = cross_entropy(model, batch)
    model.eval()
    return loss


def branching(m: Any, x: Tensor) -> Any:
    """One of two norms of the same size, by the data."""
    hidden = m.first(x)
    return m.last(m.norm(hidden) if bool(x[0, 0] > 0) else m.other(hidden))


class Renewing(nn.BatchNorm1d):
    """Counts batches in a new tensor each time."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own name
        """Count, and normalise as ever."""
        assert self.num_batches_tracked is not None
        if self.training:
            self.num_batches_tracked = self.num_batches_tracked + 1
        mean, var, weight, bias = self.running_mean, self.running_var, self.weight, self.bias
        return F.batch_norm(input, mean, var, weight, bias, self.training, 0.1, self.eps)


def own_names() -> nn.Module:
    """A norm of one's own."""
    norm = Model(lambda m, x: F.batch_norm(x, m.m, m.v, training=m.training))
    norm.register_buffer("m", torch.zeros(8))
    norm.register_buffer("v", torch.ones(8))
    return norm


def lazy() -> nn.Module:
    """A lazy layer that has seen its input."""
    made = student(norm=nn.LazyBatchNorm1d)()
    with torch.no_grad():
        made(rows(8, 0)["x"])
    return made


linear = seeded(lambda: nn.Linear(3, CLASSES))
EXACT: dict[str, tuple[Make, Callable[[Any, Batch], Any], bool]] = {
    "a hook, nobody in turns": (frozen(student()), by_a_hook(), True),
    "other weights, nobody in turns": (frozen(student()), halved, True),
    "another counter each time": (student(norm=lambda: Renewing(8)), cross_entropy, True),
    "statistics of other names": (student(norm=own_names), cross_entropy, True),
    "training mode inside the loss": (lambda: student()().eval(), in_training_inside, False),
    "a lazy layer": (lazy, cross_entropy, True),
}


@pytest.mark.parametrize("how", EXACT)
def test_what_is_the_big_batch(how: str) -> None:
    """Over several updates, without a warning."""
    make, loss, check = EXACT[how]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_big_batch(make, loss, [rows(10, number) for number in range(3)], 4, check=check)


COUPLED = "the samples of this batch are coupled"
OF_ANOTHER = r"(?s)keeps outside of the call.*another micro-batch"
OTHER_WEIGHTS = "is another one after the forwards|are coupled"
REFUSED: dict[str, tuple[Make, Any, Any, str | None, bool]] = {
    "a hook": (student(), by_a_hook(), CoupledLoss, OF_ANOTHER, True),
    "an attribute": (
        student(putting_aside),
        lambda m, b: (F.cross_entropy(m(b["x"]), b["label"], reduction="none") * m.kept).mean(),
        CoupledLoss,
        OF_ANOTHER,
        True,
    ),
    "other weights": (student(), halved, LossError, OTHER_WEIGHTS, True),
    "other weights, unchecked": (student(), halved, LossError, OTHER_WEIGHTS, False),
    "exchanged memory": (student(), by_exchange, LossError, OTHER_WEIGHTS, True),
    "a count that is not one": (linear, lambda m, b: counted(cross_entropy(m, b), 1), CoupledLoss, COUPLED, True),
    "a changed batch": (student(), changing, RuntimeError, "modified by an inplace operation", False),
    "a backward": (student(), with_a_backward, (WindowDisturbed, LossError), None, False),
    "a step inside of another": (student(), inside_of_another(), WindowError, "inside of another's loss_fn", False),
    "two norms that look alike": (
        student(branching, other=lambda: nn.BatchNorm1d(8)),
        cross_entropy,
        PathsDiffer,
        r"(?s)BatchNorm '.*BatchNorm '",
        False,
    ),
}


@pytest.mark.parametrize("how", REFUSED)
def test_what_is_refused(how: str) -> None:
    """In words; nothing is changed, and the model has its own parameters, in their own memory."""
    make, loss, error, told, check = REFUSED[how]
    for size in (2, 5):
        made = make()
        parameters, memory = list(made.parameters()), [p.data_ptr() for p in made.parameters()]
        batch = rows(11, 3)
        batch["x"][:2, 0], batch["x"][-1, 0] = 1.0, -1.0
        assert_refused(lambda: made, loss, batch, size, error, told, check=check)  # noqa: B023 - at once
        assert all(a is b for a, b in zip(made.parameters(), parameters, strict=True))
        assert [p.data_ptr() for p in parameters] == memory


def test_norms_by_the_micro_batch_beside_across() -> None:
    """What was accepted is what is done, also where micro-batches meet elsewhere."""
    made, batch = student()(), rows(8, 0)
    twin = copy.deepcopy(made)
    root = lambda m, b: across.once(across.mean(cross_entropy(m, b)).sqrt())  # noqa: E731
    step_of(made, root, 4, batch_norm="micro")(batch)
    parts = [{name: batch[name][part] for name in ("x", "label")} for part in (slice(4), slice(4, 8))]
    torch.stack([cross_entropy(twin, part) for part in parts]).mean().sqrt().backward()
    sgd(trained(twin)).step()
    assert distance([*weights(made), *made.buffers()], [*weights(twin), *twin.buffers()]) <= 1e-12


def moving_a_buffer(m: Any, x: Tensor) -> Any:
    """By less than anyone sees in the loss."""
    out = m.norm(m.first(x))
    with torch.no_grad():
        m.centre += out.mean(0)
    return out


def test_buffers_that_a_forward_changes_are_told_of() -> None:
    """Once: each micro-batch moves them."""
    centre = lambda: nn.Buffer(torch.zeros(8))  # noqa: E731
    step = step_of(student(moving_a_buffer, centre=centre)(), cross_entropy, 4, calm)
    with pytest.warns(UserWarning, match=r"changes buffers when it runs \(Model\.centre\)"):
        step(rows(11, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(rows(11, 0))
        step_of(student(moving_a_buffer, centre=centre)(), cross_entropy, 11, calm)(rows(11, 0))


def calm(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD in small steps."""
    return torch.optim.SGD(parameters, lr=0.1)


def masked_by_hand(model: Any, batch: Batch) -> Tensor:
    """A mean over what counts, divided by hand."""
    mask = batch["partly"] != -100
    values = F.cross_entropy(model(batch["x"]), batch["partly"].clamp(min=0), reduction="none")
    return counted((values * mask).sum() / mask.sum(), mask.sum())


@pytest.mark.parametrize("skipping", [False, True])
def test_a_mean_over_nothing_is_not_stepped_with(skipping: bool) -> None:
    """Its 0 / 0 is in the gradient, whatever it weighs. Torch's own mean over no targets has a gradient of zero."""
    batch = rows(12, 0)
    batch["partly"] = torch.tensor([1, 2, 3, 0, *[-100] * 4, 1, 2, 3, 0])
    assert_big_batch(student(), masked, [batch], 4)
    if not skipping:
        told = r"counts nothing[\s\S]*clamp\(min=1\)"
        step = assert_refused(student(), masked_by_hand, batch, 4, LossError, told)
    else:
        made = student()()
        step = step_of(made, masked_by_hand, 4, skip_nonfinite=True)
        assert step(batch).skipped
        assert all(bool(p.isfinite().all()) for p in made.parameters())
    batch["partly"][4:8] = 1
    assert not step(batch).skipped


def by_its_own(own: list[bool], model: Any, batch: Batch) -> Tensor:
    """A sum by a count of all and then by its own: the two graphs look alike."""
    number = torch.tensor(float(len(batch["x"])), dtype=torch.float64)
    every = across.sum(number)
    total = F.cross_entropy(model(batch["x"]), batch["label"], reduction="sum")
    return total / (number.clone() if own else every)


def test_a_sum_by_a_count_of_all_and_then_by_its_own() -> None:
    """Only one divisor is the same in every micro-batch."""
    own = list[bool]()
    step = step_of(linear(), partial(by_its_own, own), 4, check=False)
    step(rows(8, 0))
    own.append(True)
    with pytest.raises(LossError, match="cannot tell what this loss was averaged over"):
        step(rows(8, 1))


# Low precision, several threads, others' parameters.


def test_parameters_that_get_no_gradient() -> None:
    """One of low precision that is not used keeps none, or it would decay; a loss that reaches none is refused."""
    low, batch = student()().bfloat16(), rows(8, 0)
    unused = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([*low.parameters(), unused], lr=0.1, weight_decay=0.5)
    BigStep(low, optimizer, cross_entropy, micro_batch_size=4)({"x": batch["x"].bfloat16(), "label": batch["label"]})
    assert torch.equal(unused, torch.ones_like(unused))
    other = linear()
    loss, options = lambda models, batch: cross_entropy(models[0], batch), Options(check=False)
    step = BigStep([student()(), other], sgd(trained(other)), loss, micro_batch_size=4, options=options)
    with pytest.raises(LossError, match="reaches none of the optimizer's 2 parameters"):
        step(batch)


def test_parameters_of_no_optimizer_are_left_alone_by_reentrant_checkpoints() -> None:
    """From the first window on, in which it is not known yet that there is one."""
    made: Any = student(lambda m, x: checkpoint(partial(forward, m), x.requires_grad_(), use_reentrant=True))()
    rest = [*made.norm.parameters(), *made.last.parameters()]
    BigStep(made, sgd(rest), cross_entropy, micro_batch_size=4, options=Options(check=False))(rows(8, 0))
    assert all(p.grad is None for p in made.first.parameters())


def test_several_threads_each_with_a_step_of_their_own() -> None:
    """One of them ends before another, and torch's function is torch's again."""
    before, errors = F.batch_norm, list[BaseException]()

    def train(number: int) -> None:
        made = student()()
        twin = copy.deepcopy(made)
        # Random generators are the process's: with others at work, the first check would see them move.
        step, optimizer = step_of(made, cross_entropy, 3, check=False), sgd(trained(twin))
        try:
            for each in range(5 + 3 * number):
                step(rows(8, each))
                optimizer.zero_grad()
                # A plain model on this thread, while others' windows run: nobody meets here.
                cross_entropy(twin, rows(8, each)).backward()
                optimizer.step()
            assert distance(weights(made), weights(twin)) <= 1e-10
        except BaseException as error:  # noqa: BLE001 - shown below
            errors.append(error)

    threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors
    assert F.batch_norm is before


# Where activations wait, by what the user says, what a model allows, and what there is room for.

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)  # asked for its name alone


@pytest.mark.parametrize(
    ("asked", "device", "micro_batches", "inside", "mode"),
    [
        ("auto", CPU, 2, False, "recompute"),
        ("auto", CPU, 2, True, "keep"),
        ("auto", GPU, 2, True, "keep"),
        ("keep", GPU, 2, False, "keep"),
        ("recompute", GPU, 1, False, "keep"),
        ("recompute", GPU, 2, True, "recompute"),
        ("offload", GPU, 2, False, "offload"),
        ("offload", CPU, 2, False, "keep"),
    ],
)
def test_the_first_choice(asked: Any, device: torch.device, micro_batches: int, inside: bool, mode: str) -> None:
    """A single micro-batch waits for nobody, and a host's memory is where it is."""
    assert Activations(asked, device, lambda: inside).mode(micro_batches) == mode


@pytest.mark.parametrize("asked", ["auto", "recompute"])
def test_what_turns_out_on_the_way(asked: Any) -> None:
    """A model that cannot be recomputed is kept, once and for all; what does not fit is offloaded from a device."""
    for error in (CannotRecompute("no"), UnreadableLoss("no")):
        where = Activations(asked, GPU, lambda: False)
        assert not where.fall_back(error, out_of_memory=False)
        where.recomputed = True
        assert not where.fall_back(ValueError(), out_of_memory=False)
        assert where.fall_back(error, out_of_memory=False) == (asked == "auto")
        assert where.mode(2) == ("keep" if asked == "auto" else "recompute")
        assert not where.fall_back(error, out_of_memory=False)
        assert where.fall_back(MemoryError(), out_of_memory=True) == (asked == "auto")
        assert where.mode(2) == ("offload" if asked == "auto" else "recompute")
        assert not where.fall_back(MemoryError(), out_of_memory=True)
    unseen, on_host = Activations("auto", GPU, lambda: False), Activations("auto", CPU, lambda: False)
    for recomputed, calls, mode in ((False, 0, "recompute"), (True, 3, "recompute"), (True, 0, "keep")):
        unseen.recomputed = recomputed
        unseen.passed(calls)
        assert unseen.mode(2) == mode
    assert not on_host.fall_back(MemoryError(), out_of_memory=True)


@pytest.mark.parametrize("device", [CPU, GPU])
def test_room_is_looked_for_before_the_window(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each shape of a sample is measured once; what a device cannot hold goes to the host, and is refused there."""
    asked: list[float] = []

    def room(where: Activations, size: float, samples: int, shape: str = "a", *, budget: int = 1000) -> str:
        measure = lambda: (asked.append(size), size)[1]  # type: ignore[func-returns-value]  # noqa: E731
        where.make_room(measure, samples, shape, budget=budget, pinned=100)
        return where.mode(2)

    monkeypatch.setattr(activations, "host_available", lambda: 1900)
    monkeypatch.setattr(activations, "resident", lambda: 100)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 200)
    where = Activations("auto", device, lambda: True)
    assert [room(where, 10, 70), room(where, 10, 70)] == ["keep", "keep"]
    assert where.of_a_sample == 10
    assert asked == [10]
    most = 100 if device == GPU else 45  # what is pinned counts as there; a host keeps to memory= as well
    if device == GPU:  # 0.9 times 800 on the device itself
        assert room(where, 20, 37, "b") == "offload"
        assert room(Activations("keep", device, lambda: True), 1000, 1000) == "keep"
    room(where, 20, most, "b")
    with pytest.raises(OutOfMemory, match="Nothing was changed") as caught:
        room(where, 20, most + 1, "b")
    assert ("within memory=" in str(caught.value)) == (device == CPU)
    Activations("recompute", device, lambda: False).make_room(lambda: 1e9, 9, "", budget=1, pinned=0)
    assert asked == [10, 20]
    for shape in range(20):  # of many shapes the largest is taken
        room(where, 1, 2, f"{shape}")
    assert len(asked) == 16
    assert where.of_a_sample == 20


def test_longer_samples_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that is too long is refused after short ones, and short ones are not after long ones."""
    layers = nn.Conv1d(3, 8, 3, padding=1), nn.BatchNorm1d(8), nn.Tanh(), nn.AdaptiveAvgPool1d(1), nn.Flatten()
    loss = lambda m, x: m(x).square().mean()  # noqa: E731
    made = nn.Sequential(*layers)
    step, short, long = step_of(made, loss, 4, check=False), torch.randn(8, 3, 16), torch.randn(8, 3, 16 * 256)
    monkeypatch.setattr(activations, "host_available", lambda: 1 << 20)
    step(short)
    before = weights(made)
    told = r"(?s)activations of all 8 wait in the host's memory.*about .* MiB, and 1 MiB for them.*\"keep\""
    with pytest.raises(OutOfMemory, match=told):
        step(long)
    assert distance(weights(made), before) == 0
    step(short)
    step_of(made, loss, 4, check=False, activations="keep")(long)  # which does not look


def test_weights_do_not_wait_with_every_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer saves its weight for backward, and it is one for all: it is no sample's activation."""
    wide = nn.Sequential(nn.Linear(3, 500), nn.BatchNorm1d(500), nn.Linear(500, 500), nn.Linear(500, CLASSES)).double()
    monkeypatch.setattr(activations, "host_available", lambda: 4 * 20 * 500 * 8)  # rows, no square
    step_of(wide, plain, 1, check=False)(rows(4, 0))
