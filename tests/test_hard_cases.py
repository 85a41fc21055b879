"""Loops and losses that look right and are not: each is exact or refused with a reason."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import Accumulator, BigStep, counted, errors

SIZES = (4, 4, 4)


def sample(size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(size, 3, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


DATA = [sample(size, seed) for seed, size in enumerate(SIZES)]
UNEVEN = [sample(size, seed) for seed, size in enumerate((5, 2, 3))]


class Net(nn.Module):
    """A linear layer and a learned scale."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.f = nn.Linear(3, 3)
        self.rho = nn.Parameter(torch.tensor(0.3))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        out: Tensor = self.f(x)
        return out


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return plain SGD."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


def difference(
    loss: Callable[[Net, Tensor, Tensor], Tensor], data: list[tuple[Tensor, Tensor]] = DATA, **options: Any
) -> float:
    """Return how far the accumulated step is from the true big batch's."""
    model, twin = Net(), Net()
    accumulator = Accumulator(model, sgd(model), steps=3, **options)
    for x, y in accumulator.over(data):
        accumulator.backward(loss(model, x, y))
    optimizer = sgd(twin)
    loss(twin, torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])).backward()
    optimizer.step()
    pairs = [(a.detach(), b.detach()) for a, b in zip(model.parameters(), twin.parameters(), strict=True)]
    return max(float((a - b).abs().max()) for a, b in pairs)


COUNT_INSIDE: dict[str, Callable[[Net, Tensor, Tensor], Tensor]] = {
    "mask": lambda m, x, y: ((m(x) - y).pow(2) * (y > 0) / (y > 0).sum().item()).sum(),
    "twice-the-size": lambda m, x, y: ((m(x) - y).pow(2).sum(1) / (2 * len(x))).sum(),
}
SIZE_INSIDE: dict[str, Callable[[Net, Tensor, Tensor], Tensor]] = {
    "size-then-two": lambda m, x, y: ((m(x) - y).pow(2) / len(x) * 2.0).sum(),
    "size-then-half": lambda m, x, y: ((m(x) - y).pow(2) / len(x) * 0.5).sum(),
    "size-and-two": lambda m, x, y: ((m(x) - y).pow(2) / len(x) / 2).sum(),
}


@pytest.mark.parametrize("name", COUNT_INSIDE)
def test_a_count_inside_a_sum_is_refused(name: str) -> None:
    """Micro-batches of one size make a count look like a constant: it is no size of what was summed."""
    with pytest.raises(errors.UnreadableLoss, match="may be a count"):
        difference(COUNT_INSIDE[name])


@pytest.mark.parametrize("name", SIZE_INSIDE)
def test_the_number_of_samples_inside_a_sum_is_read(name: str) -> None:
    """Whatever other factors stand beside it."""
    assert difference(SIZE_INSIDE[name]) <= 1e-12


SPREAD: dict[str, Callable[[Net, Tensor, Tensor], Tensor]] = {
    "shape-bug": lambda m, x, y: (m(x)[:, :1] - y[:, 0]).pow(2).mean(),
    "chamfer": lambda m, x, y: (m(x)[:, None] - y[None]).pow(2).sum(-1).min(1).values.mean(),
}


@pytest.mark.parametrize("name", SPREAD)
def test_outputs_spread_over_other_samples_are_refused(name: str) -> None:
    """A tensor without gradient sets every sample against every other by broadcasting."""
    with pytest.raises(errors.LossError, match=r"spreads|samples"):
        difference(SPREAD[name])


def test_the_classic_shape_bug_is_named() -> None:
    """(n, 1) - (n,) says what it gives and what to type."""
    with pytest.raises(errors.UnreadableLoss, match=r"\(n, 1\) with \(n,\) gives \(n, n\)(.|\n)*squeeze"):
        difference(SPREAD["shape-bug"])


def test_a_learned_scale_in_data_and_penalty_is_refused_or_exact() -> None:
    """A value that serves the data and a regulariser cannot carry the regulariser's weight."""

    def loss(m: Net, x: Tensor, y: Tensor) -> Tensor:
        sigma = F.softplus(m.rho)
        return ((m(x) - y) ** 2 / (2 * sigma**2)).sum() + sigma

    with pytest.raises(errors.LossError, match="once"):
        difference(loss)


def test_the_same_with_a_place_of_its_own_is_exact() -> None:
    """What the error says to type works."""

    def loss(m: Net, x: Tensor, y: Tensor) -> Tensor:
        sigma = F.softplus(m.rho)
        return ((m(x) - y) ** 2 / sigma**2).sum() + counted(sigma, "once")

    assert difference(loss) < 1e-12


def test_a_window_that_begins_with_a_regulariser_is_refused() -> None:
    """Terms that come and go are different losses."""
    model = Net()
    accumulator = Accumulator(model, sgd(model), steps=2)
    accumulator.backward(model.f.weight.pow(2).sum())
    with pytest.raises(errors.LossError, match="changed within a window"):
        accumulator.backward(F.mse_loss(model(DATA[0][0]), DATA[0][1]))


def test_every_hook_is_called() -> None:
    """Hooks whose remover is dropped stay, in order."""
    model, heard = Net(), list[int]()
    accumulator = Accumulator(model, sgd(model), steps=1)
    for number in range(3):
        accumulator.before_step(lambda number=number: heard.append(number))  # type: ignore[misc]
    accumulator.backward(model(DATA[0][0]).mean())
    assert heard == [0, 1, 2]


def test_batch_norm_of_a_foreign_model_is_refused() -> None:
    """A discriminator's BatchNorm couples the generator's samples, and no module of ours shows it."""
    generator = nn.Linear(3, 3).double()
    critic = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    accumulator = Accumulator(generator, sgd(generator), steps=2)
    with pytest.raises(errors.BatchNormError, match=r"discriminator.eval\(\)"):
        accumulator.backward(F.softplus(-critic(generator(DATA[0][0]))).mean())
    critic.eval()
    accumulator = Accumulator(generator, sgd(generator), steps=2)  # one that has not looked at this graph before
    assert accumulator.backward(F.softplus(-critic(generator(DATA[0][0]))).mean()) is None


@pytest.mark.parametrize("own", [False, True], ids=["alone", "beside a frozen one of the model"])
def test_batch_norm_of_a_foreign_model_that_wakes_up_is_refused(own: bool) -> None:
    """In evaluation mode its graph looks the same, so that it was read before says nothing."""
    generator = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).eval() if own else nn.Tanh()).double()
    critic = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double().eval()
    accumulator = Accumulator(generator, sgd(generator), steps=2)
    for _ in range(3):
        accumulator.backward(F.softplus(-critic(generator(DATA[0][0]))).mean())
    critic.train()
    with pytest.raises(errors.BatchNormError, match=r"discriminator.eval\(\)"):
        accumulator.backward(F.softplus(-critic(generator(DATA[0][0]))).mean())


@pytest.mark.parametrize("own", [False, True], ids=["alone", "beside a frozen one of the model"])
def test_batch_norm_of_a_foreign_model_that_wakes_up_is_refused_by_big_step(own: bool) -> None:
    """It is as if the model had been in training mode from the beginning."""
    generator = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).eval() if own else nn.Tanh()).double()
    critic = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double().eval()
    step = BigStep(
        generator, sgd(generator), loss_fn=lambda model, x: F.softplus(-critic(model(x))).mean(), micro_batch_size=3
    )
    for _ in range(2):
        step(torch.randn(12, 3).double())
    critic.train()
    before = [p.clone() for p in generator.parameters()]
    with pytest.raises(errors.BatchNormError, match=r"BigStep\(\[model, teacher\]"):
        step(torch.randn(12, 3).double())
    assert all(torch.equal(a, b) for a, b in zip(generator.parameters(), before, strict=True))


@pytest.mark.parametrize("steps", [1, 100], ids=["between windows", "inside a window"])
@pytest.mark.parametrize("count", [None, 1], ids=["read", "counted"])
def test_batch_norm_of_a_foreign_model_that_joins_late_is_refused(count: int | None, steps: int) -> None:
    """After a warm-up on ragged batches, each of which looks unlike the others."""
    generator = nn.Linear(3, 3).double()
    critic = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    accumulator = Accumulator(generator, sgd(generator), steps=steps)
    for size in range(2, 32):
        accumulator.backward(generator(torch.randn(size, 3).double()).square().mean(), count=count and size)
    for _ in range(3):  # the same graph is refused each time
        with pytest.raises(errors.BatchNormError, match=r"discriminator.eval\(\)"):
            accumulator.backward(F.softplus(-critic(generator(DATA[0][0]))).square().mean(), count=count)
    accumulator.discard()


def test_one_scaler_in_two_accumulators_is_exact() -> None:
    """The scale may change in mid-window, by another accumulator's update."""
    model, other, twin = Net(), Net(), Net()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    one = Accumulator(model, sgd(model), steps=3, scaler=scaler)
    two = Accumulator(other, sgd(other), steps=1, scaler=scaler)
    for x, y in one.over(DATA):
        one.backward(F.mse_loss(model(x), y))
        two.backward(F.mse_loss(other(x), y))
    assert scaler.get_scale() > 4.0
    F.mse_loss(twin(torch.cat([x for x, _ in DATA])), torch.cat([y for _, y in DATA])).backward()
    sgd(twin).step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)


def test_discard_leaves_the_last_batch_of_a_loop_the_last() -> None:
    """A batch that is tried again still closes its window."""
    model = Net()
    accumulator = Accumulator(model, sgd(model), steps=3)
    batches = iter(accumulator.over(DATA[:1]))
    next(batches)
    accumulator.discard()
    update = accumulator.backward(F.mse_loss(model(DATA[0][0]), DATA[0][1]))
    assert update is not None
    assert update.micro_batches == 1


def test_nothing_to_train_is_refused() -> None:
    """With all parameters frozen a backward would fill other models' gradients."""
    model, other = Net(), Net()
    accumulator = Accumulator(model, sgd(model), steps=1)
    model.requires_grad_(False)
    with pytest.raises(errors.ConfigurationError, match="nothing to train"):
        accumulator.backward(F.mse_loss(other(model(DATA[0][0])), DATA[0][1]))
    assert all(p.grad is None for p in other.parameters())


def test_freezing_inside_a_window_is_noticed() -> None:
    """The window has that parameter's gradient already."""
    model = Net()
    accumulator = Accumulator(model, sgd(model), steps=2)
    accumulator.backward(F.mse_loss(model(DATA[0][0]), DATA[0][1]))
    model.f.bias.requires_grad_(False)
    with pytest.raises(errors.WindowDisturbed, match="frozen inside a window"):
        accumulator.backward(F.mse_loss(model(DATA[1][0]), DATA[1][1]))


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no grad_dtype")
def test_a_parameter_s_own_grad_dtype_comes_back() -> None:
    """It is as it was before the window, not the parameter's type."""
    model = nn.Linear(3, 1).bfloat16()
    for p in model.parameters():
        p.grad_dtype = torch.float32
    accumulator = Accumulator(model, sgd(model), steps=2)
    accumulator.backward(model(DATA[0][0].bfloat16()).float().mean())
    accumulator.discard()
    assert {p.grad_dtype for p in model.parameters()} == {torch.float32}


def test_a_refused_state_leaves_the_open_window() -> None:
    """Nothing is dropped for a state that cannot be loaded."""
    model = Net()
    accumulator = Accumulator(model, sgd(model), steps=2)
    accumulator.backward(F.mse_loss(model(DATA[0][0]), DATA[0][1]))
    with pytest.raises(errors.StateError, match="not a dict"):
        accumulator.load_state_dict({"version": 1, "steps": 3, "window": [1]})
    assert accumulator.steps == 2
    assert accumulator.remaining == 1


def test_gradients_by_hand_are_told_from_zeroed_ones() -> None:
    """An unused parameter has no gradient, and was not set to None."""
    model = Net()  # rho is unused
    accumulator = Accumulator(model, sgd(model), steps=3)
    accumulator.backward(F.mse_loss(model(DATA[0][0]), DATA[0][1]))
    F.mse_loss(model(DATA[1][0]), DATA[1][1]).backward()
    with pytest.raises(errors.WindowDisturbed, match="changed in place"):
        accumulator.flush()
    accumulator.discard()


def test_skip_nonfinite_is_a_truth_value() -> None:
    """As every other argument it is looked at."""
    model = Net()
    with pytest.raises(errors.ConfigurationError, match="skip_nonfinite must be True or False; found 'yes'"):
        Accumulator(model, sgd(model), steps=1, skip_nonfinite="yes")  # type: ignore[arg-type]


def test_a_loop_that_was_only_half_converted_is_refused() -> None:
    """`over` with a leftover loss.backward() would train nothing, without a word."""
    model = Net()
    accumulator = Accumulator(model, sgd(model), steps=2)
    batches = iter(accumulator.over(DATA))
    x, y = next(batches)
    F.mse_loss(model(x), y).backward()
    with pytest.raises(errors.WindowDisturbed, match=r"nothing is accumulated(.|\n)*accumulator.backward\(loss\)"):
        next(batches)


def test_a_fused_sum_divided_by_its_rows_is_a_mean() -> None:
    """`reduction="sum"` and `/ len(x)`, as some write a mean over samples."""
    assert difference(lambda m, x, y: F.mse_loss(m(x), y, reduction="sum") / len(x), UNEVEN) < 1e-12
