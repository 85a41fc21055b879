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
    WindowDisturbed,
    WindowError,
)
from tests.support.coupled import LOSSES, Case, assert_big_batch, assert_refused, cases, twins
from tests.support.reference import distance, sgd, trained, weights
from tests.support.samples import rows

Batch = tuple[Tensor, Tensor]


@given(cases())
@settings(max_examples=200)
def test_any_coupled_model_in_any_split(case: Case) -> None:
    """Losses of all samples, models that look at all, BatchNorm anywhere; over several updates, clipped or not."""
    assert_big_batch(case.make, case.loss_fn, case.batches, case.size, **case.settings)


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_in_an_uneven_split(loss: str, activations: str) -> None:
    """As people write them, read without a word; of some targets none counts in a micro-batch."""
    batch = rows(8, 0)
    batch["partly"] = torch.tensor([1, -100, 3, -100, -100, -100, 0, 2])
    for size in (1, 3):
        assert_big_batch(twins, LOSSES[loss], [batch, rows(5, 1)], size, activations=activations)


# What micro-batches find of each other when they take turns.


def samples(number: int, seed: int = 0) -> Batch:
    """Return some with classes."""
    by = torch.Generator().manual_seed(seed)
    return torch.randn(number, 6, generator=by, dtype=torch.float64), torch.randint(3, (number,), generator=by)


def cross_entropy(model: Any, batch: Batch) -> Tensor:
    """Return the mean over samples, in float32 at least."""
    scores = model(batch[0])
    return F.cross_entropy(scores.float() if scores.dtype == torch.bfloat16 else scores, batch[1])


def layer() -> nn.Module:
    """Return a model without a norm."""
    torch.manual_seed(0)
    return nn.Linear(6, 3).double()


class Student(nn.Module):
    """A norm in the middle."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.double()
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        """(n, 6) → (n, 3)."""
        return self.last(torch.relu(self.norm(self.first(x))))


class PutsAside(Student):
    """Keeps a value of its input before the norm."""

    def forward(self, x: Tensor) -> Tensor:
        """(n, 6) → (n, 3)."""
        self.kept = x.abs().mean(1)
        return super().forward(x)


def by_a_hook() -> Callable[[Any, Batch], Tensor]:
    """A teacher's features, caught by a hook, are read after the student has run."""
    teacher = nn.Linear(6, 3).double().requires_grad_(False)
    features: dict[str, Tensor] = {}
    teacher.register_forward_hook(lambda _, __, out: features.__setitem__("teacher", out))

    def loss(model: Any, batch: Batch) -> Tensor:
        teacher(batch[0])
        return F.mse_loss(model(batch[0]), features["teacher"])

    return loss


def by_an_attribute(model: Any, batch: Batch) -> Tensor:
    """Weigh samples by what the model has put aside."""
    scores = model(batch[0])
    return (F.cross_entropy(scores, batch[1], reduction="none") * model.kept).mean()


def inside_of_another() -> Callable[[Any, Batch], Tensor]:
    """A step in the midst of a forward."""
    other = Student()
    inner = BigStep(other, sgd(trained(other)), cross_entropy, micro_batch_size=2)

    def loss(model: Any, batch: Batch) -> Tensor:
        inner(samples(4))
        return cross_entropy(model, batch)

    return loss


def frozen(kind: Callable[[], Any]) -> Callable[[], nn.Module]:
    """Make a model whose norm is in evaluation mode: nobody takes turns."""

    def make() -> nn.Module:
        model = kind()
        model.norm.eval()
        found: nn.Module = model
        return found

    return make


def test_norms_by_the_micro_batch_beside_across() -> None:
    """What was accepted is what is done, also where micro-batches meet elsewhere."""

    def loss(model: Any, batch: Batch) -> Tensor:
        return across.once(across.mean(F.cross_entropy(model(batch[0]), batch[1])).sqrt())

    model = Student()
    twin = copy.deepcopy(model)
    BigStep(model, sgd(trained(model)), loss, micro_batch_size=4, options=Options(batch_norm="micro"))(samples(8))
    parts = zip(*(each.split(4) for each in samples(8)), strict=True)
    torch.stack([F.cross_entropy(twin(x), y) for x, y in parts]).mean().sqrt().backward()
    sgd(trained(twin)).step()
    assert distance([*weights(model), *model.buffers()], [*weights(twin), *twin.buffers()]) <= 1e-12


def halved(model: Any, batch: Batch) -> Tensor:
    """Call the model with other weights."""
    other = {"last.weight": model.last.weight / 2, "first.weight": model.first.weight * 1.5}
    return F.cross_entropy(torch.func.functional_call(model, other, batch[0]), batch[1])


def by_exchange(model: Any, batch: Batch) -> Tensor:
    """Have a teacher by exchanging memory, in training mode."""

    def exchange() -> None:
        for p, slow in zip(model.parameters(), model.slow, strict=True):
            p.data, slow.data = slow.data, p.data

    exchange()
    with torch.no_grad():
        target = model(batch[0])
    exchange()
    return F.mse_loss(model(batch[0]), target)


class Slow(Student):
    """A student that keeps slower weights, near to its own."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = [p.detach() * 0.999 for p in self.parameters()]


@pytest.mark.parametrize(("loss", "check"), [(halved, True), (halved, False), (by_exchange, True)])
def test_other_weights_at_a_norm_are_another_micro_batchs(loss: Callable[[Any, Batch], Tensor], check: bool) -> None:
    """Told as that, however near they are, and the model has its own again."""
    model = Slow()
    optimizer = sgd(trained(model))
    parameters, before = list(model.parameters()), [p.detach().clone() for p in model.parameters()]
    memory = [p.data_ptr() for p in parameters]
    step = BigStep(model, optimizer, loss, micro_batch_size=4, options=Options(check=check))
    with pytest.raises(LossError, match=r"is another one after the forwards|are coupled"):
        step(samples(20))
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert [p.data_ptr() for p in model.parameters()] == memory
    assert distance(weights(model), before) == 0


# Buffers, counters and modes.


def between(norm: nn.Module) -> nn.Module:
    """Return a model with a norm in the middle."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), norm, nn.Tanh(), nn.Linear(8, 3)).double()


class Renewing(nn.BatchNorm1d):
    """Counts batches in a new tensor each time."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own name
        """Count, and normalise as ever."""
        count = self.num_batches_tracked
        assert count is not None
        if self.training:
            self.num_batches_tracked = count + 1
        return F.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1, self.eps
        )


class OwnNames(nn.Module):
    """A norm of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.m: Tensor
        self.v: Tensor
        self.register_buffer("m", torch.zeros(8))
        self.register_buffer("v", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        """(n, 8) → the same."""
        return F.batch_norm(x, self.m, self.v, training=self.training)


class Centred(nn.Module):
    """Moves a buffer whenever it runs, by less than anyone sees in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 3), nn.BatchNorm1d(3)
        self.centre: Tensor
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        """(n, 6) → (n, 3)."""
        out: Tensor = self.norm(self.first(x))
        with torch.no_grad():
            self.centre += out.mean(0)
        return out


def test_buffers_that_a_forward_changes_are_told_of() -> None:
    """Once: each micro-batch moves them."""
    model = Centred().double()
    step = BigStep(model, torch.optim.SGD(model.parameters(), lr=0.1), cross_entropy, micro_batch_size=4)
    with pytest.warns(UserWarning, match=r"changes buffers when it runs \(Centred\.centre\)"):
        step(samples(11))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(samples(11))
        BigStep(model, torch.optim.SGD(model.parameters(), lr=0.1), cross_entropy, micro_batch_size=11)(samples(11))


def in_training_inside(model: nn.Module, batch: Batch) -> Tensor:
    """Each step begins in evaluation mode."""
    model.train()
    loss = cross_entropy(model, batch)
    model.eval()
    return loss


def lazy() -> nn.Module:
    """A lazy layer that has seen its input."""
    model = nn.Sequential(nn.Linear(6, 8), nn.LazyBatchNorm1d(), nn.Linear(8, 3)).double()
    with torch.no_grad():
        model(samples(8)[0])
    return model


EXACT: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Batch], Tensor], bool]] = {
    "a hook, nobody in turns": (frozen(Student), by_a_hook(), True),
    "other weights, nobody in turns": (frozen(Slow), halved, True),
    "another counter each time": (lambda: between(Renewing(8)), cross_entropy, True),
    "statistics of other names": (lambda: between(OwnNames()), cross_entropy, True),
    "training mode inside the loss": (lambda: Student().eval(), in_training_inside, False),
    "a lazy layer": (lazy, cross_entropy, True),
}


@pytest.mark.parametrize("how", EXACT)
def test_what_is_the_big_batch(how: str) -> None:
    """Over several updates, without a warning."""
    make, loss, check = EXACT[how]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_big_batch(make, loss, [samples(10, number) for number in range(3)], 4, check=check)


def changing(model: Any, batch: Batch) -> Tensor:
    """Micro-batches are parts of a batch that is changed in place."""
    out = model(batch[0])
    batch[0].mul_(2)
    return F.cross_entropy(out, batch[1])


def with_a_backward(model: Any, batch: Batch) -> Tensor:
    """Its gradients would be added to the window's."""
    loss = cross_entropy(model, batch)
    loss.backward(retain_graph=True)
    return loss


class Branching(Student):
    """One of two norms of the same size, by the data."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.BatchNorm1d(8).double()

    def forward(self, x: Tensor) -> Tensor:
        """Choose."""
        hidden = self.first(x)
        found: Tensor = self.last(self.norm(hidden) if bool(x[0, 0] > 0) else self.other(hidden))
        return found


COUPLED = "the samples of this batch are coupled"
OF_ANOTHER = r"(?s)keeps outside of the call.*another micro-batch"
REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, Any, str, bool]] = {
    "a hook": (Student, by_a_hook(), CoupledLoss, OF_ANOTHER, True),
    "an attribute": (PutsAside, by_an_attribute, CoupledLoss, OF_ANOTHER, True),
    "a count that is not one": (layer, lambda m, b: counted(cross_entropy(m, b), 1), CoupledLoss, COUPLED, True),
    "a changed batch": (Student, changing, RuntimeError, "modified by an inplace operation", False),
    "a backward": (Student, with_a_backward, (WindowDisturbed, LossError), "", False),
    "a step inside of another": (Student, inside_of_another(), WindowError, "inside of another's loss_fn", False),
    "two norms that look alike": (Branching, cross_entropy, PathsDiffer, r"(?s)BatchNorm '.*BatchNorm '", False),
}


@pytest.mark.parametrize("how", REFUSED)
def test_what_is_refused(how: str) -> None:
    """In words; nothing is changed."""
    make, loss, error, told, check = REFUSED[how]
    for size in (2, 5):
        assert_refused(make, loss, samples(11, 3), size, error, told or None, check=check)


def masked(model: Any, batch: Batch) -> Tensor:
    """A mean over what counts, divided by hand."""
    mask = batch[1] != -100
    values = F.cross_entropy(model(batch[0]), batch[1].clamp(min=0), reduction="none")
    return counted((values * mask).sum() / mask.sum(), mask.sum())


@pytest.mark.parametrize("skipping", [False, True])
def test_a_mean_over_nothing_is_not_stepped_with(skipping: bool) -> None:
    """Its 0 / 0 is in the gradient, whatever it weighs. Torch's own mean over no targets has a gradient of zero."""
    x, y = samples(12)
    y[4:8] = -100
    assert_big_batch(Student, cross_entropy, [(x, y)], 4)
    if not skipping:
        step = assert_refused(Student, masked, (x, y), 4, LossError, r"counts nothing[\s\S]*clamp\(min=1\)")
    else:
        model = Student()
        options = Options(skip_nonfinite=True)
        step = BigStep(model, sgd(trained(model)), masked, micro_batch_size=4, options=options)
        assert step((x, y)).skipped
        assert all(bool(p.isfinite().all()) for p in model.parameters())
    y[4:8] = 1
    assert not step((x, y)).skipped


def by_its_own(own: list[bool], model: Any, batch: Batch) -> Tensor:
    """A sum by a count of all and then by its own: the two graphs look alike."""
    number = torch.tensor(float(len(batch[0])), dtype=torch.float64)
    every = across.sum(number)
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum") / (number.clone() if own else every)


def test_a_sum_by_a_count_of_all_and_then_by_its_own() -> None:
    """Only one divisor is the same in every micro-batch."""
    model, own = layer(), list[bool]()
    loss = partial(by_its_own, own)
    step = BigStep(model, sgd(trained(model)), loss, micro_batch_size=4, options=Options(check=False))
    step(samples(8))
    own.append(True)
    with pytest.raises(LossError, match="cannot tell what this loss was averaged over"):
        step(samples(8, 1))


# Low precision, other devices, several threads, others' parameters.


def test_parameters_that_get_no_gradient() -> None:
    """One of low precision that is not used keeps none, or it would decay; a loss that reaches none is refused."""
    model = Student().bfloat16()
    unused = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([*model.parameters(), unused], lr=0.1, weight_decay=0.5)
    x, y = samples(8)
    BigStep(model, optimizer, cross_entropy, micro_batch_size=4)((x.bfloat16(), y))
    assert torch.equal(unused, torch.ones_like(unused))
    student, other = Student(), layer()
    loss = lambda models, batch: cross_entropy(models[0], batch)  # noqa: E731
    step = BigStep([student, other], sgd(trained(other)), loss, micro_batch_size=4, options=Options(check=False))
    with pytest.raises(LossError, match="reaches none of the optimizer's 2 parameters"):
        step(samples(8))


def test_parameters_of_no_optimizer_are_left_alone_by_reentrant_checkpoints() -> None:
    """From the first window on, in which it is not known yet that there is one."""

    class Checkpointed(Student):
        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = checkpoint(super().forward, x.requires_grad_(), use_reentrant=True)
            return found

    model = Checkpointed()
    rest = [*model.norm.parameters(), *model.last.parameters()]
    BigStep(model, sgd(rest), cross_entropy, micro_batch_size=4, options=Options(check=False))(samples(8))
    assert all(p.grad is None for p in model.first.parameters())


def test_several_threads_each_with_a_step_of_their_own() -> None:
    """One of them ends before another, and torch's function is torch's again."""
    plain, errors = F.batch_norm, list[BaseException]()

    def train(number: int) -> None:
        model = Student()
        twin = copy.deepcopy(model)
        # Random generators are the process's: with others at work, the first check would see them move.
        step = BigStep(model, sgd(trained(model)), cross_entropy, micro_batch_size=3, options=Options(check=False))
        optimizer = sgd(trained(twin))
        try:
            for each in range(5 + 3 * number):
                step(samples(8, each))
                optimizer.zero_grad()
                # A plain model on this thread, while others' windows run: nobody meets here.
                cross_entropy(twin, samples(8, each)).backward()
                optimizer.step()
            assert distance(weights(model), weights(twin)) <= 1e-10
        except BaseException as error:  # noqa: BLE001 - shown below
            errors.append(error)

    threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors
    assert F.batch_norm is plain


# Room for what waits.


def step_of_sequences(**given: Any) -> tuple[nn.Module, BigStep]:
    """Return a model whose activations grow with the length, and a step."""
    torch.manual_seed(0)
    layers = nn.Conv1d(3, 8, 3, padding=1), nn.BatchNorm1d(8), nn.Tanh(), nn.AdaptiveAvgPool1d(1), nn.Flatten()
    model, options = nn.Sequential(*layers), Options(check=False, **given)
    loss = lambda model, batch: model(batch).square().mean()  # noqa: E731
    return model, BigStep(model, sgd(trained(model)), loss, micro_batch_size=4, options=options)


def test_longer_samples_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that is too long is refused after short ones, and short ones are not after long ones."""
    model, step = step_of_sequences()
    monkeypatch.setattr("bigbatch.lockstep.activations.host_available", lambda: 1 << 20)
    step(torch.randn(8, 3, 16))
    before = weights(model)
    told = r"(?s)activations of all 8 wait in the host's memory.*about .* MiB, and 1 MiB for them.*\"keep\""
    with pytest.raises(OutOfMemory, match=told):
        step(torch.randn(8, 3, 16 * 256))
    assert distance(weights(model), before) == 0
    step(torch.randn(8, 3, 16))
    step_of_sequences(activations="keep")[1](torch.randn(8, 3, 16 * 256))  # which does not look


def test_weights_do_not_wait_with_every_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer saves its weight for backward, and it is one for all: it is no sample's activation."""
    layers = nn.Linear(6, 500), nn.BatchNorm1d(500), nn.Linear(500, 500), nn.Linear(500, 3)
    model, options = nn.Sequential(*layers).double(), Options(check=False)
    monkeypatch.setattr("bigbatch.lockstep.activations.host_available", lambda: 4 * 20 * 500 * 8)  # rows, no square
    BigStep(model, sgd(trained(model)), cross_entropy, micro_batch_size=1, options=options)(samples(4))
