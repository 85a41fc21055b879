"""Losses that run through models of others: weights that another accumulator trains, BatchNorm in training mode."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import Accumulator, BigStep
from bigbatch.errors import BatchNormError, WindowDisturbed
from tests.support.reference import distance

X = torch.randn(24, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Z = torch.randn(24, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
CUTS = [slice(0, 5), slice(5, 12), slice(12, 16), slice(16, 24)]


def pair() -> tuple[nn.Module, nn.Module]:
    """A generator and a discriminator."""
    torch.manual_seed(0)
    return nn.Linear(3, 5).double(), nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def told_apart(judge: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    """The discriminator's loss."""
    return F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean()


def deceived(judge: nn.Module, fake: Tensor) -> Tensor:
    """The generator's loss."""
    return F.softplus(-judge(fake)).mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that changes a lot."""
    return torch.optim.SGD(model.parameters(), lr=0.5)


def weights(*models: nn.Module) -> list[Tensor]:
    """All of them."""
    return [p.detach() for model in models for p in model.parameters()]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("more", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}])
def test_a_discriminator_that_steps_inside_the_generators_window_is_refused(
    optimizer: Callable[..., torch.optim.Optimizer], more: dict[str, bool]
) -> None:
    """In the last micro-batch it has other weights than in those before."""
    g, d = pair()
    a = Accumulator(g, sgd(g), steps=4)
    b = Accumulator(d, optimizer(d.parameters(), lr=0.1, **more), steps=4)
    before = weights(copy.deepcopy(g))
    for cut in CUTS[:3]:
        b.backward(told_apart(d, X[cut], g(Z[cut])))
        a.backward(deceived(d, g(Z[cut])))
    b.backward(told_apart(d, X[CUTS[3]], g(Z[CUTS[3]])))
    with pytest.raises(WindowDisturbed, match=r"changed 4 of them(.|\n)*Use:"):
        a.backward(deceived(d, g(Z[CUTS[3]])))
    assert distance(weights(g), before) == 0
    a.discard()
    for cut in a.over(CUTS):
        a.backward(deceived(d, g(Z[cut])))
    assert distance(weights(g), before) > 0


def test_a_loss_from_before_the_other_step_is_exact_or_refused() -> None:
    """The judge's last layers are trained apart: losses that came before a step have the weights from before it."""
    g, d = pair()
    parts = list(d.parameters())[:2], list(d.parameters())[2:]
    one, other = (Accumulator(d, torch.optim.SGD(part, lr=0.5), steps=n) for part, n in zip(parts, (2, 4), strict=True))
    for number, cut in enumerate(CUTS):
        losses = told_apart(d, X[cut], g(Z[cut])), told_apart(d, X[cut], g(Z[cut]))
        one.backward(losses[0])
        if not number:
            other.backward(losses[1])
        else:
            with pytest.raises(WindowDisturbed, match="changed 2 of them"):
                other.backward(losses[1])
    other.discard()


def clamp(model: nn.Module) -> None:
    """As WGAN has it."""
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.1, 0.1)


def test_any_change_of_other_weights_inside_a_window_is_refused() -> None:
    """Between windows it is an ordinary thing."""
    g, d = pair()
    a = Accumulator(g, sgd(g), steps=2)
    for cut in CUTS[:2]:
        a.backward(deceived(d, g(Z[cut])))
    clamp(d)
    a.backward(deceived(d, g(Z[CUTS[2]])), count=4)
    clamp(d)
    with pytest.raises(WindowDisturbed, match="changed"):
        a.backward(deceived(d, g(Z[CUTS[3]])), count=8)
    a.discard()


def test_a_big_step_for_each_is_exact() -> None:
    """As the error says: one whole update after the other."""
    g, d = pair()
    true_g, true_d = copy.deepcopy(g), copy.deepcopy(d)
    sgds = sgd(true_d), sgd(true_g)
    told_apart(true_d, X, true_g(Z)).backward()
    sgds[0].step()
    deceived(true_d, true_g(Z)).backward()
    sgds[1].step()
    BigStep(d, sgd(d), lambda d, b: told_apart(d, b[0], g(b[1])), micro_batch_size=5)((X, Z))
    BigStep(g, sgd(g), lambda g, b: deceived(d, g(b[1])), micro_batch_size=5)((X, Z))
    assert distance(weights(g, d), weights(true_g, true_d)) <= 1e-12


def critic() -> nn.Module:
    """A discriminator with BatchNorm, which couples a generator's samples."""
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()


def generator(*, own: bool = False) -> nn.Module:
    """Perhaps with a frozen BatchNorm of its own."""
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).eval() if own else nn.Tanh()).double()


@pytest.mark.parametrize("entrance", ["accumulator", "big step"])
@pytest.mark.parametrize("own", [False, True], ids=["alone", "beside a frozen one of the model"])
def test_batch_norm_of_another_model_is_refused_when_it_wakes_up(own: bool, entrance: str) -> None:
    """No module of ours shows it; in evaluation mode its graph looks the same, and was read before."""
    g, d = generator(own=own), critic()
    words = r"discriminator.eval\(\)" if entrance == "accumulator" else r"BigStep\(\[model, teacher\]"

    def made() -> Callable[[], object]:
        if entrance == "big step":
            step = BigStep(g, sgd(g), loss_fn=lambda model, z: deceived(d, model(z)), micro_batch_size=3)
            return lambda: step(Z[:12])
        accumulator = Accumulator(g, sgd(g), steps=2)
        return lambda: accumulator.backward(deceived(d, g(Z[:4])))

    with pytest.raises(BatchNormError, match=words):
        made()()
    d.eval()
    train = made()
    for _ in range(4):
        train()
    d.train()
    before = copy.deepcopy(g)
    with pytest.raises(BatchNormError, match=words):
        train()
    assert distance(weights(g), weights(before)) == 0


@pytest.mark.parametrize("steps", [1, 100], ids=["between windows", "inside a window"])
@pytest.mark.parametrize("count", [None, 1], ids=["read", "counted"])
def test_batch_norm_of_another_model_that_joins_late_is_refused(count: int | None, steps: int) -> None:
    """After a warm-up on ragged batches, each of which looks unlike the others."""
    g, d = generator(), critic()
    accumulator = Accumulator(g, sgd(g), steps=steps)
    for size in range(2, 24):
        accumulator.backward(g(Z[:size]).square().mean(), count=count and size)
    for _ in range(3):  # the same graph is refused each time
        with pytest.raises(BatchNormError, match=r"discriminator.eval\(\)"):
            accumulator.backward(F.softplus(-d(g(Z[:4]))).square().mean(), count=count)
    accumulator.discard()
