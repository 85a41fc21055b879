"""Loops and losses that look right and are not: each is exact or refused with a reason."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import Accumulator, counted, errors

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


def test_a_refused_state_leaves_the_open_window() -> None:
    """Nothing is dropped for a state that cannot be loaded."""
    model = Net()
    accumulator = Accumulator(model, sgd(model), steps=2)
    accumulator.backward(F.mse_loss(model(DATA[0][0]), DATA[0][1]))
    with pytest.raises(errors.StateError, match="not the window of an Accumulator"):
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


def test_a_loop_that_was_only_half_converted_is_refused() -> None:
    """`over` with a leftover loss.backward() would train nothing, without a word."""
    model = Net()
    accumulator = Accumulator(model, sgd(model), steps=2)
    batches = iter(accumulator.over(DATA))
    x, y = next(batches)
    F.mse_loss(model(x), y).backward()
    with pytest.raises(errors.WindowDisturbed, match=r"nothing is accumulated(.|\n)*accumulator.backward\(loss\)"):
        next(batches)
