"""Lock-step where it is easily almost right: low precision, look-alikes, buffers, empty parts, several threads."""

import copy
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bigbatch import BigStep, Options, across
from bigbatch.errors import CoupledLoss, LossError, PathsDiffer, WindowDisturbed
from tests.support.reference import distance, sgd, trained, weights

Batch = tuple[Tensor, Tensor]


def data(number: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Batch:
    """Return rows of three numbers and their classes."""
    by = torch.Generator().manual_seed(seed)
    return torch.randn(number, 3, generator=by, dtype=dtype), torch.randint(4, (number,), generator=by)


def normalised(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Return a perceptron with a BatchNorm inside."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 4)).to(dtype)


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean over samples, in float32 at least."""
    logits: Tensor = model(batch[0])
    return F.cross_entropy(logits.float() if logits.dtype == torch.bfloat16 else logits, batch[1])


def gradients_of_a_step(model: nn.Module, batch: Batch, size: int, **options: Any) -> list[Tensor]:
    """Return what `.grad` held before the step."""
    found: list[Tensor] = []
    step = BigStep(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        cross_entropy,
        micro_batch_size=size,
        options=Options(**options),
    )
    step.before_step(lambda: found.extend(p.grad.double() for p in model.parameters() if p.grad is not None))
    step(batch)
    return found


def test_low_precision_parameters_add_up_in_float32() -> None:
    """Also above the last norm, where all micro-batches have added before the first backward ends."""
    x, y = data(512)
    exact = normalised()
    cross_entropy(exact, (x, y)).backward()
    true = list(exact.parameters())[-1].grad
    assert true is not None
    errors = []
    for size in (512, 2):
        low = copy.deepcopy(normalised()).bfloat16()
        found = gradients_of_a_step(low, (x.bfloat16(), y), size, check=False)
        errors.append(float((found[-1] - true).norm() / true.norm()))
    assert errors[1] < 2 * errors[0] + 5e-3


def test_an_unused_low_precision_parameter_keeps_no_gradient() -> None:
    """A gradient of zero would have it decay."""
    model = normalised(torch.bfloat16)
    unused = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([*model.parameters(), unused], lr=0.1, weight_decay=0.5)
    x, y = data(8)
    BigStep(model, optimizer, cross_entropy, micro_batch_size=4)((x.bfloat16(), y))
    assert torch.equal(unused, torch.ones_like(unused))


class Branching(nn.Module):
    """One of two norms of the same size, by the data."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.other = nn.Linear(3, 6), nn.BatchNorm1d(6), nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Choose."""
        hidden = self.first(x)
        hidden = self.one(hidden) if bool(x[0, 0] > 0) else self.other(hidden)
        found: Tensor = self.last(hidden)
        return found


def test_two_norms_that_look_alike_are_not_pooled() -> None:
    """Micro-batches at different layers are at different places."""
    torch.manual_seed(0)
    model = Branching().double()
    x, y = data(8)
    x[:4, 0], x[4:, 0] = 1.0, -1.0
    step = BigStep(model, sgd(trained(model)), cross_entropy, micro_batch_size=4, options=Options(check=False))
    with pytest.raises(PathsDiffer, match=r"(?s)BatchNorm 'one' over.*BatchNorm 'other' over"):
        step((x, y))
    assert not any(bool(mean.any()) for name, mean in model.named_buffers() if name.endswith("running_mean"))


def test_two_questions_that_look_alike_are_at_different_places() -> None:
    """By the lines that ask them."""
    model = nn.Linear(3, 4).double()
    x, y = data(8)
    x[:4, 0], x[4:, 0] = 1.0, -1.0

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        out = model(batch[0])
        if bool(batch[0][0, 0] > 0):  # noqa: SIM108 - two lines, which is the point
            out = out - across.mean(out.mean(0))
        else:
            out = out + across.mean(out.mean(0))
        return F.cross_entropy(out, batch[1])

    step = BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=4, options=Options(check=False))
    with pytest.raises(PathsDiffer, match=r"(?s)across\.mean of .*test_lockstep_hard\.py, line \d+"):
        step((x, y))


class Counting(nn.Module):
    """Keeps count of what it has seen, in a buffer."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Count the rows."""
        self.seen += len(x)
        found: Tensor = self.layer(x)
        return found


@pytest.mark.parametrize("activations", ["auto", "keep", "recompute"])
def test_a_buffer_moves_once_though_the_model_runs_twice(activations: Any) -> None:
    """What backward runs again was counted in forward."""
    model = Counting().double()

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        rows = F.normalize(model(batch[0]), dim=1)
        return F.cross_entropy(rows @ across.gather(rows).T, across.offset() + torch.arange(len(rows)))

    options = Options(activations=activations, check=False)
    step = BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=4, options=options)
    step(data(11))
    assert float(model.seen) == 11


def test_a_mean_over_nothing_in_one_micro_batch() -> None:
    """A part without a single thing to average counts nothing."""
    x, _ = data(8)
    mask = torch.tensor([1.0, 0, 1, 1, 0, 0, 0, 0], dtype=torch.float64)

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        each, kept = model(batch[0]).square().sum(1), batch[1]
        return across.once(across.mean((each * kept).sum() / kept.sum().clamp(min=1), count=kept.sum()).sqrt())

    model = nn.Linear(3, 4).double()
    twin = copy.deepcopy(model)
    BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=4)((x, mask))
    optimizer = sgd(trained(twin))
    loss_fn(twin, (x, mask)).backward()
    optimizer.step()
    assert distance(weights(model), weights(twin)) <= 1e-12


def test_counts_that_a_low_precision_value_could_not_hold() -> None:
    """A count has a type of its own."""
    model = nn.Linear(3, 4).double()
    found: list[Tensor] = []

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        found.append(across.mean(torch.ones(2, dtype=torch.float16), count=70_000 + len(found)))
        return F.cross_entropy(model(batch[0]), batch[1])

    BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=4, options=Options(check=False))(data(8))
    assert all(bool((mean == 1).all()) for mean in found)
    assert int(across.sum(torch.tensor([True, True]))[0]) == 1


def test_a_marked_term_that_appears_later_is_looked_at() -> None:
    """As one that begins after a warm-up."""
    model, warm = nn.Linear(3, 4).double(), list[bool]()

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        out = model(batch[0])
        loss = F.cross_entropy(out, batch[1]) + across.once(across.mean(out.mean()))
        return loss + across.once(out.square().mean() * across.mean(out.mean()).exp()) if warm else loss

    step = BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=4)
    step(data(8))
    warm.append(True)
    with pytest.raises(LossError, match="the same in every micro-batch"):
        step(data(8, 1))


def test_a_sum_by_a_count_of_all_and_then_by_its_own() -> None:
    """The two graphs look alike; only one divisor is the same in every micro-batch."""
    model, own = nn.Linear(3, 4).double(), list[bool]()

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        number = torch.tensor(float(len(batch[0])), dtype=torch.float64)
        every = across.sum(number)
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum") / (number.clone() if own else every)

    step = BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=4, options=Options(check=False))
    step(data(8))
    own.append(True)
    with pytest.raises(LossError, match="cannot tell what this loss was averaged over"):
        step(data(8, 1))


@pytest.mark.parametrize("how", ["regulariser", "learned factor"])
def test_a_mean_and_a_term_of_parameters_beside_batch_norm(how: str) -> None:
    """Exact, and its value is known."""
    model, scale = normalised(), nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
    twin, twin_scale = copy.deepcopy(model), copy.deepcopy(scale)

    def loss_with(scale: Tensor) -> Any:
        def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
            if how == "regulariser":
                return cross_entropy(model, batch) + scale * sum(p.square().sum() for p in model.parameters())
            return (-scale).exp() * cross_entropy(model, batch) + scale

        return loss_fn

    step = BigStep(model, torch.optim.SGD([*model.parameters(), scale], lr=0.1), loss_with(scale), micro_batch_size=3)
    update = step(data(8))
    optimizer = torch.optim.SGD([*twin.parameters(), twin_scale], lr=0.1)
    loss = loss_with(twin_scale)(twin, data(8))
    loss.backward()
    optimizer.step()
    assert abs(update.loss.item() - loss.item()) <= 1e-12
    assert distance([*weights(model), scale.detach()], [*weights(twin), twin_scale.detach()]) <= 1e-12


def test_several_threads_each_with_a_step_of_their_own() -> None:
    """One of them ends before another, and torch's function is torch's again."""
    plain, errors = F.batch_norm, list[BaseException]()

    def train(number: int) -> None:
        model = normalised()
        twin = copy.deepcopy(model)
        # Random generators are the process's: with others at work, the first check would see them move.
        step = BigStep(model, sgd(trained(model)), cross_entropy, micro_batch_size=3, options=Options(check=False))
        optimizer = sgd(trained(twin))
        try:
            for each in range(10 + 5 * number):
                step(data(8, each))
                optimizer.zero_grad()
                # A plain model on this thread, while others' windows run: nobody meets here.
                cross_entropy(twin, data(8, each)).backward()
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


def test_a_loss_that_reaches_no_parameter_is_refused() -> None:
    """As outside of lock-step."""
    model, other = normalised(), nn.Linear(3, 4).double()
    step = BigStep(
        [model, other],
        torch.optim.SGD(other.parameters(), lr=0.1),
        lambda models, batch: cross_entropy(models[0], batch),
        micro_batch_size=4,
        options=Options(check=False),
    )
    with pytest.raises(LossError, match="reaches none of the optimizer's 2 parameters"):
        step(data(8))


def test_parameters_of_no_optimizer_are_left_alone_by_reentrant_checkpoints() -> None:
    """From the first window on, in which it is not known yet that there is one."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = normalised()

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = checkpoint(self.body, x.requires_grad_(), use_reentrant=True)
            return found

    model = Checkpointed()
    frozen_out = list(model.body[0].parameters())
    rest = [p for p in model.parameters() if not any(p is q for q in frozen_out)]
    BigStep(model, sgd(rest), cross_entropy, micro_batch_size=4, options=Options(check=False))(data(8))
    assert all(p.grad is None for p in frozen_out)


def test_a_default_device_does_no_harm() -> None:
    """What is made on the host is made there."""
    model, batch = normalised(), data(8)
    twin = copy.deepcopy(model)
    step = BigStep(model, sgd(trained(model)), cross_entropy, micro_batch_size=3, options=Options(check=False))
    torch.set_default_device("meta")
    try:
        step(batch)
    finally:
        torch.set_default_device(None)
    BigStep(twin, sgd(trained(twin)), cross_entropy, micro_batch_size=3)(batch)
    assert distance(weights(model), weights(twin)) <= 1e-12


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize("size", [2, 3])
def test_what_gives_nan_for_one_sample_is_seen(size: int) -> None:
    """A standard deviation over the batch, of halves of one."""

    class Standardised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 6), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            found: Tensor = self.last((hidden - hidden.mean(0)) / hidden.std(0))
            return found

    torch.manual_seed(0)
    model = Standardised().double()
    with pytest.raises(CoupledLoss, match="the samples of this batch are coupled"):
        BigStep(model, sgd(trained(model)), cross_entropy, micro_batch_size=size)(data(8))


@pytest.mark.parametrize("model", [normalised, lambda: nn.Linear(3, 4).double()], ids=["lock-step", "one at a time"])
@pytest.mark.parametrize("size", [4, 8])
def test_a_backward_inside_loss_fn_is_noticed(model: Any, size: int) -> None:
    """Its gradients would be added to the window's."""
    network = model()

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        loss = cross_entropy(model, batch)
        loss.backward(retain_graph=True)
        return loss

    step = BigStep(network, sgd(trained(network)), loss_fn, micro_batch_size=size, options=Options(check=False))
    with pytest.raises((WindowDisturbed, LossError)):
        step(data(8))
    assert all(p.grad is None for p in network.parameters())


def test_a_model_that_leaves_training_mode_between_steps() -> None:
    """Its loss_fn puts it there and back: the second step begins in evaluation mode, and is exact all the same."""
    model = normalised()
    twin = copy.deepcopy(model)
    optimizer = sgd(trained(twin))

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        model.train()
        loss = cross_entropy(model, batch)
        model.eval()
        return loss

    step = BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=4, options=Options(check=False))
    for number in range(3):
        step(data(8, number))
        optimizer.zero_grad()
        loss_fn(twin, data(8, number)).backward()
        optimizer.step()
    assert distance(weights(model), weights(twin)) <= 1e-12


def test_weights_do_not_wait_with_every_micro_batch() -> None:
    """A layer saves its weight for backward, and it is one for all: it is no sample's activation."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 500), nn.BatchNorm1d(500), nn.Linear(500, 500), nn.Linear(500, 4)).double()
    step = BigStep(model, sgd(trained(model)), cross_entropy, micro_batch_size=1, options=Options(check=False))
    step(data(4))
    waiting = step._together._where.of_a_sample
    assert waiting is not None
    assert waiting < 20 * 500 * 8  # some rows of 500, and no square of them
