"""Values that the batch produced without gradient, which no graph shows: `verify` names the coupling."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import verify

Batch = tuple[Tensor, Tensor, Tensor, Tensor]


def network() -> nn.Sequential:
    """A small classifier, the same for every seed."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))


def batch(seed: int) -> Batch:
    """Inputs, labels, advantages and weights of 24 samples."""
    torch.manual_seed(seed)
    return torch.randn(24, 6), torch.randint(4, (24,)), torch.randn(24), torch.rand(24) + 0.5


def normalized_advantages(model: nn.Module, batch: Batch) -> Tensor:
    """As PPO has them."""
    x, actions, advantages, _ = batch
    chosen = F.softmax(model(x), -1).gather(1, actions[:, None])[:, 0]
    return -(chosen * (advantages - advantages.mean()) / (advantages.std() + 1e-8)).mean()


def normalized_weights(model: nn.Module, batch: Batch) -> Tensor:
    """Weights that add up to one over the batch."""
    x, labels, _, weights = batch
    return (F.cross_entropy(model(x), labels, reduction="none") * (weights / weights.sum())).sum()


def centered_teacher(model: nn.Module, batch: Batch) -> Tensor:
    """Targets from which the batch's mean is taken, as DINO has them."""
    logits = model(batch[0])
    target = F.softmax((logits.detach() - logits.detach().mean(0)) / 0.1, -1)
    return -(target * F.log_softmax(logits, -1)).sum(-1).mean()


def hard_half(model: nn.Module, batch: Batch) -> Tensor:
    """The samples with the larger losses."""
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return losses[losses.detach().topk(len(losses) // 2).indices].mean()


LOSSES: list[Callable[[nn.Module, Batch], Tensor]] = [
    normalized_advantages,
    normalized_weights,
    centered_teacher,
    hard_half,
]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("loss", LOSSES)
def test_coupling_without_gradient_is_named(loss: Callable[[nn.Module, Batch], Tensor], seed: int) -> None:
    """It is the one cause, and makes all of the difference."""
    found = verify(network(), loss, batch(seed), 8)
    assert not found.exact
    assert [cause.kind for cause in found.causes] == ["coupled-samples"]


class Foreign(torch.autograd.Function):
    """Squares, as a function that the reader does not know."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        """Keep what is needed."""
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> Tensor:
        """Return twice what was kept."""
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return 2 * x * gradients[0]


def test_a_refusal_is_no_cause_where_the_gradients_are_equal() -> None:
    """It stays a note: the figures are the proof."""
    found = verify(network(), lambda m, b: Foreign.apply(m(b[0])).mean(), batch(0), 10)  # type: ignore[no-untyped-call]
    assert all(each.exact for each in found.differences)
    assert any("BigStep refuses this" in note for note in found.notes)
    assert not found.causes
