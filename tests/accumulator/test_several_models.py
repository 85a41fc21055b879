"""Several models, optimizers and accumulators: one window over many optimizers, and many windows side by side."""

from collections.abc import Iterable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, Muon, Optimizer

from bigbatch import Accumulator
from bigbatch.errors import WindowDisturbed
from tests.support.reference import distance, state, weights, windows
from tests.support.samples import Batch, join, mlp, rows, seeded
from tests.support.training import MASKED

BATCHES = [rows(size, seed) for seed, size in enumerate((3, 1, 4, 2, 5))]
WINDOWS = windows(BATCHES, 2)


def by_shape(model: nn.Module) -> list[Optimizer]:
    """Muon for matrices, AdamW for the rest, as both are meant to be used."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    return [Muon(matrices, lr=0.02), AdamW(others, lr=0.01)]


@pytest.mark.parametrize("clip_norm", [0.05, 1e6])
def test_muon_and_adamw_under_one_norm(clip_norm: float) -> None:
    """Two optimizers, one window, one norm over all parameters."""
    model, twin = mlp()(), mlp()()
    accumulator = Accumulator(model, by_shape(model), steps=2, clip_norm=clip_norm)
    made = [accumulator.backward(MASKED.loss(model, batch)) for batch in accumulator.over(BATCHES)]
    optimizers, true = by_shape(twin), []
    for window in WINDOWS:
        twin.zero_grad()
        MASKED.loss(twin, join(window)).backward()
        true.append(float(clip_grad_norm_(twin.parameters(), clip_norm)))
        for optimizer in optimizers:
            optimizer.step()
    assert distance(weights(model), weights(twin)) <= 1e-12
    assert [float(each.grad_norm or 0) for each in made if each is not None] == pytest.approx(true, rel=1e-12)


# Two accumulators: a GAN.

Pair = tuple[nn.Module, nn.Module]


def pair() -> Pair:
    """A generator and a discriminator."""
    return seeded(lambda: nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3)))(), mlp(1)()


def losses(generator: nn.Module, discriminator: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Both sides of the non-saturating game, from the same fakes, at the same weights."""
    fake = generator(batch["x2"])
    wants = F.softplus(-discriminator(fake)).mean()
    doubts = F.softplus(discriminator(fake.detach())).mean() + F.softplus(-discriminator(batch["x"])).mean()
    return wants, doubts


def adams(models: Iterable[nn.Module]) -> list[Optimizer]:
    """An Adam each; a large eps keeps rounding from becoming a step."""
    return [torch.optim.Adam(model.parameters(), lr=0.02, betas=(0.5, 0.9), eps=1e-4) for model in models]


def accumulators(models: Pair, optimizers: Sequence[Optimizer], *steps: int) -> list[Accumulator]:
    """One each."""
    every = zip(models, optimizers, steps, strict=True)
    return [Accumulator(model, optimizer, steps=number, clip_norm=0.3) for model, optimizer, number in every]


def test_an_interleaved_gan_is_its_big_batch_twin() -> None:
    """Generator and discriminator take turns at every micro-batch, each with windows of its own."""
    models, twins = pair(), pair()
    ours, theirs = adams(models), adams(twins)
    generating, judging = accumulators(models, ours, 2, 2)
    for _ in range(2):
        for batch in generating.over(judging.over(BATCHES)):
            wants, doubts = losses(*models, batch)
            generating.backward(wants)
            judging.backward(doubts)
        for window in WINDOWS:
            for optimizer, twin, loss in zip(theirs, twins, losses(*twins, join(window)), strict=True):
                parameters = list(twin.parameters())
                for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                    p.grad = gradient
                clip_grad_norm_(parameters, 0.3)
                optimizer.step()
    assert all(distance(weights(m), weights(t)) <= 1e-12 for m, t in zip(models, twins, strict=True))
    assert distance([v for o in ours for v in state(o)], [v for o in theirs for v in state(o)]) <= 1e-10


def test_a_discriminator_with_shorter_windows_is_refused() -> None:
    """Three of its updates to one of the generator, whose window would be of three discriminators."""
    models = pair()
    generating, judging = accumulators(models, adams(models), 3, 1)
    for accumulator, loss in zip((generating, judging), losses(*models, BATCHES[0]), strict=True):
        accumulator.backward(loss)
    with pytest.raises(WindowDisturbed, match="parameters that another optimizer trains"):
        generating.backward(losses(*models, BATCHES[1])[0])
    generating.discard()


def test_a_loss_beside_a_discriminator_may_see_it_step() -> None:
    """Windows before and after run through it, and may not; a bare parameter is such a loss, too."""
    generator, judge = pair()[0], nn.Linear(3, 1, bias=False).double()
    size = nn.Parameter(torch.ones((), dtype=torch.float64))
    generating = Accumulator([generator], SGD([*generator.parameters(), size], lr=0.1), steps=3)
    judging = SGD(judge.parameters(), lr=0.1)

    def add(loss: Tensor) -> None:
        generating.backward(loss, count="sum")
        judge(BATCHES[0]["x"]).square().mean().backward()
        judging.step()

    for _ in range(2):
        add(F.softplus(-judge(generator(BATCHES[0]["x2"]))).mean())
        with pytest.raises(WindowDisturbed, match="which has changed 1 of them"):
            add(F.softplus(-judge(generator(BATCHES[1]["x2"]))).mean())
        generating.discard()
        for batch in BATCHES[:2]:
            add(generator(batch["x2"]).square().mean())
        add(size)


@pytest.mark.parametrize("open_window", [False, True])
def test_the_generators_loss_leaves_the_discriminator_alone(open_window: bool) -> None:
    """By hand it would have added to both; what the discriminator has added up so far stays, bit for bit."""
    generator, discriminator = models = pair()
    generating, judging = accumulators(models, adams(models), 2, 2)
    wants, doubts = losses(*models, BATCHES[0])
    if open_window:
        judging.backward(doubts)
    before = [p.grad.clone() for p in discriminator.parameters() if p.grad is not None]
    generating.backward(wants)
    after = [p.grad for p in discriminator.parameters() if p.grad is not None]
    assert len(before) == len(after) == 4 * open_window
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(p.grad is not None for p in generator.parameters())
