"""What micro-batches find of each other when they take turns, and what the first check sees of it."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import BigStep, Options, across, counted
from bigbatch.errors import ConfigurationError, CoupledLoss, LossError, WindowError
from tests.support.reference import distance, sgd, trained, weights

Batch = tuple[Tensor, Tensor]


def samples(number: int, seed: int = 0) -> Batch:
    """Return some with classes."""
    by = torch.Generator().manual_seed(seed)
    return torch.randn(number, 6, generator=by, dtype=torch.float64), torch.randint(3, (number,), generator=by)


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


class UsesAfter(Student):
    """Uses what it was given before the norm."""

    def forward(self, x: Tensor) -> Tensor:
        """(n, 6) → (n, 3)."""
        return self.last(torch.relu(self.norm(self.first(x))) * self.kept)


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


def by_a_setting(model: Any, batch: Batch) -> Tensor:
    """Give the model something that is no argument."""
    model.kept = (batch[0].repeat(1, 2)[:, :8] > 0).double()
    return F.cross_entropy(model(batch[0]), batch[1])


def by_a_gathered_one(model: Any, batch: Batch) -> Tensor:
    """Read what was put aside after asking for the others."""
    scores = model(batch[0])
    every = across.gather(scores)
    return (
        F.cross_entropy(scores @ every.T, across.offset() + torch.arange(len(scores)), reduction="none") * model.kept
    ).mean()


SHARED: dict[str, tuple[type[Student], Callable[[], Callable[[Any, Batch], Tensor]]]] = {
    "a hook": (Student, by_a_hook),
    "an attribute": (PutsAside, lambda: by_an_attribute),
    "a setting": (UsesAfter, lambda: by_a_setting),
    "before across": (PutsAside, lambda: by_a_gathered_one),
}


@pytest.mark.parametrize("size", [2, 4, 5])
@pytest.mark.parametrize("how", SHARED)
def test_what_is_kept_outside_of_a_call_is_another_micro_batchs(how: str, size: int) -> None:
    """Seen at the first step, which changes nothing, and told what it is."""
    kind, loss = SHARED[how]
    model = kind()
    before = [each.clone() for each in (*weights(model), *model.buffers())]
    step = BigStep(model, sgd(trained(model)), loss(), micro_batch_size=size)
    with pytest.raises(CoupledLoss, match=r"(?s)Micro-batches take turns at BatchNorm and at `across`.*Return it"):
        step(samples(20))
    assert distance([*weights(model), *model.buffers()], before) == 0


@pytest.mark.parametrize("how", ["a hook", "an attribute"])
def test_what_is_kept_is_ones_own_where_nobody_takes_turns(how: str) -> None:
    """The same losses with a frozen norm are exact."""
    kind, loss = SHARED[how]
    model, by = kind(), loss()
    model.norm.eval()
    twin = copy.deepcopy(model)
    BigStep(model, sgd(trained(model)), by, micro_batch_size=4)(samples(20))
    by(twin, samples(20)).backward()
    sgd(trained(twin)).step()
    assert distance(weights(model), weights(twin)) <= 1e-12


WEIGHED: dict[str, Callable[[Any, Batch], Tensor]] = {
    "a count that is not one": lambda m, b: counted(F.mse_loss(m(b[0]), b[0][:, :3]), 1),
    "means of sums": lambda m, b: across.once(across.mean(m(b[0]).square().sum()) / across.mean(b[0].square().sum())),
    "a masked mean without its count": lambda m, b: across.once(
        across.mean((m(b[0]).square().mean(1) * (b[1] > 0)).sum() / (b[1] > 0).sum()).sqrt()
    ),
}


@pytest.mark.parametrize("size", [4, 5, 8])
@pytest.mark.parametrize("how", WEIGHED)
def test_what_equal_parts_would_hide(how: str, size: int) -> None:
    """Mistakes in weighing show where parts differ in size."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3).double()
    step = BigStep(model, sgd(trained(model)), WEIGHED[how], micro_batch_size=size)
    with pytest.raises(CoupledLoss, match="the samples of this batch are coupled"):
        step(samples(23, 3))


def test_samples_that_come_in_pairs() -> None:
    """A loss that takes even numbers alone is looked at in halves."""

    def loss(model: Any, batch: Batch) -> Tensor:
        one, other = model(batch[0]).view(-1, 2, 3).unbind(1)
        return F.mse_loss(one, other)

    torch.manual_seed(0)
    model = nn.Linear(6, 3).double()
    twin = copy.deepcopy(model)
    BigStep(model, sgd(trained(model)), loss, micro_batch_size=4)(samples(20))
    loss(twin, samples(20)).backward()
    sgd(trained(twin)).step()
    assert distance(weights(model), weights(twin)) <= 1e-12


def test_samples_that_come_in_pairs_where_norms_are_accepted_as_they_are() -> None:
    """A failure in thirds is none of theirs: what looks across samples is seen in halves."""

    class Ranking(Student):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.tanh(self.first(x)).softmax(0))

    def loss(model: Any, batch: Batch) -> Tensor:
        one, other = model(batch[0]).view(-1, 2, 3).unbind(1)
        return F.mse_loss(one, other)

    model = Ranking()
    step = BigStep(model, sgd(trained(model)), loss, micro_batch_size=4, options=Options(batch_norm="micro"))
    with pytest.raises(CoupledLoss):
        step(samples(20))


class Centring(Student):
    """Looks at other samples in training mode."""

    looks = 0

    def forward(self, x: Tensor) -> Tensor:
        """(n, 6) → (n, 3)."""
        self.looks += 1
        hidden = self.first(x)
        return self.last(hidden - hidden.mean(0) if self.norm.training else hidden)


def test_what_couples_samples_when_it_trains_later() -> None:
    """Samples are looked at again where other modules train than before; not where that was seen."""
    model = Centring()
    model.norm.eval()
    step = BigStep(model, sgd(trained(model)), lambda m, b: F.cross_entropy(m(b[0]), b[1]), micro_batch_size=4)
    for _ in range(2):  # samples are compared in both
        step(samples(8))
    model.train()
    with pytest.raises(CoupledLoss):
        step(samples(8))
    model.norm.eval()
    looked = model.looks
    step(samples(8))
    assert model.looks - looked == 8 // 4


def test_a_forward_that_changes_modes_is_looked_at_once() -> None:
    """By the modes that a step begins with, as they are set anew before each."""

    class Freezing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.part, self.looks = nn.Linear(6, 3).double(), nn.Identity(), 0

        def forward(self, x: Tensor) -> Tensor:
            self.looks += 1
            self.part.eval()
            found: Tensor = self.layer(x)
            return found

    model = Freezing()
    step = BigStep(model, sgd(trained(model)), lambda m, b: F.cross_entropy(m(b[0]), b[1]), micro_batch_size=4)
    looks = []
    for _ in range(3):
        model.train()
        before = model.looks
        step(samples(8))
        looks.append(model.looks - before)
    assert looks[1] > looks[2] == 8 // 4  # samples are compared before the second update, too


def test_a_step_inside_of_another_is_refused() -> None:
    """It would run in the midst of a forward."""
    model, other = Student(), Student()
    inner = BigStep(other, sgd(trained(other)), lambda m, b: F.cross_entropy(m(b[0]), b[1]), micro_batch_size=2)

    def loss(model: Any, batch: Batch) -> Tensor:
        inner(samples(4))
        return F.cross_entropy(model(batch[0]), batch[1])

    step = BigStep(model, sgd(trained(model)), loss, micro_batch_size=4, options=Options(check=False))
    with pytest.raises(WindowError, match=r"inside of another's loss_fn"):
        step(samples(8))


def test_a_lazy_layer_is_to_run_once_before() -> None:
    """It has no size that could be put back."""
    model = nn.Sequential(nn.Linear(6, 8), nn.LazyBatchNorm1d(), nn.Linear(8, 3)).double()
    with pytest.raises(ConfigurationError, match=r"(?s)LazyBatchNorm1d '1' has no size yet.*torch\.no_grad"):
        BigStep(model, sgd(trained(model)), lambda m, b: F.cross_entropy(m(b[0]), b[1]), micro_batch_size=4)
    with torch.no_grad():
        model(samples(8)[0])
    twin = copy.deepcopy(model)
    BigStep(model, sgd(trained(model)), lambda m, b: F.cross_entropy(m(b[0]), b[1]), micro_batch_size=3)(samples(8))
    F.cross_entropy(twin(samples(8)[0]), samples(8)[1]).backward()
    sgd(trained(twin)).step()
    assert distance([*weights(model), *model.buffers()], [*weights(twin), *twin.buffers()]) <= 1e-12


def test_a_norm_whose_statistics_have_other_names() -> None:
    """Whatever a layer calls its buffers: it ends in F.batch_norm."""

    class Own(nn.Module):
        m: Tensor
        v: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("m", torch.zeros(8, dtype=torch.float64))
            self.register_buffer("v", torch.ones(8, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return F.batch_norm(x, self.m, self.v, training=self.training)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), Own(), nn.Linear(8, 3)).double()
    twin = copy.deepcopy(model)
    step = BigStep(model, sgd(trained(model)), lambda m, b: F.cross_entropy(m(b[0]), b[1]), micro_batch_size=3)
    step(samples(8))
    F.cross_entropy(twin(samples(8)[0]), samples(8)[1]).backward()
    sgd(trained(twin)).step()
    assert distance([*weights(model), *model.buffers()], [*weights(twin), *twin.buffers()]) <= 1e-12


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


def test_somebody_elses_norms_where_those_of_micro_batches_are_accepted() -> None:
    """Nothing of a teacher is put back where nothing meets: also where one micro-batch runs alone, to be measured."""

    class Gated(Student):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.norm(self.first(x))
            return self.last(hidden * across.mean(hidden.square().mean(0)).sigmoid())

    teacher = Student()

    def loss(model: Any, batch: Batch) -> Tensor:
        with torch.no_grad():
            wanted = teacher(batch[0])
        return F.mse_loss(model(batch[0]), wanted)

    model = Gated()
    options = Options(batch_norm="micro", check=False)
    BigStep(model, sgd(trained(model)), loss, micro_batch_size=4, options=options)(samples(8))
    assert model.norm.num_batches_tracked == 2


@pytest.mark.parametrize("count", [-1, torch.tensor(-2.0)])
def test_a_count_below_nothing_is_refused(count: Any) -> None:
    """It is a number of things."""
    model = Student()
    step = BigStep(
        model,
        sgd(trained(model)),
        lambda m, b: across.once(across.mean(m(b[0]).square().mean(), count=count)),
        micro_batch_size=4,
        options=Options(check=False),
    )
    with pytest.raises(LossError, match=r"a number of things.*Got -"):
        step(samples(8))


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


def by_copies(model: Any, batch: Batch) -> Tensor:
    """Have a teacher by copying weights in and out."""
    with torch.no_grad():
        own = [p.clone() for p in model.parameters()]
        for p, slow in zip(model.parameters(), model.slow, strict=True):
            p.copy_(slow)
        target = model(batch[0])
        for p, before in zip(model.parameters(), own, strict=True):
            p.copy_(before)
    return F.mse_loss(model(batch[0]), target)


class Slow(Student):
    """A student that keeps slower weights, near to its own."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = [p.detach() * 0.999 for p in self.parameters()]


@pytest.mark.parametrize(("loss", "check"), [(halved, True), (halved, False), (by_exchange, True), (by_copies, True)])
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
    if loss is not by_copies:
        assert distance(weights(model), before) == 0


@pytest.mark.parametrize("loss", [halved, by_exchange])
def test_other_weights_where_nobody_meets(loss: Callable[[Any, Batch], Tensor]) -> None:
    """With the norm in evaluation mode they are exact."""
    model = Slow()
    model.norm.eval()
    twin = copy.deepcopy(model)
    step = BigStep(model, sgd(trained(model)), loss, micro_batch_size=4)
    optimizer = sgd(trained(twin))
    for number in range(2):
        step(samples(18, number))
        optimizer.zero_grad()
        loss(twin, samples(18, number)).backward()
        optimizer.step()
    assert distance(weights(model), weights(twin)) <= 1e-12
