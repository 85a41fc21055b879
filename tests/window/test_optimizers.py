"""Optimizers and the parameters they hold: fused, grouped, frozen, unused, tied, sparse, and those of others."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, AdamW, Optimizer, SparseAdam
from torch.utils.checkpoint import checkpoint

from bigbatch import Accumulator, BigStep
from tests.support.losses import l2
from tests.support.reference import accumulated, assert_equal, big_batches, distance, sgd, state, trained, weights
from tests.support.samples import CLASSES, Batch, Loss, join, mlp, normal, rows, seeded, sequences
from tests.support.samples import generator as generator_of
from tests.support.training import Training, micro_batches

BATCHES = [rows(size, seed) for seed, size in enumerate((3, 1, 4, 2, 5))]
TOKENS = [sequences(size, seed) for seed, size in enumerate((3, 1, 4, 2, 5))]


def assert_exact(
    make: Callable[[], nn.Module],
    optimizers: Callable[[Any], Sequence[Optimizer]],
    loss: Callable[[Any, Batch], Tensor],
    batches: Sequence[Batch] = BATCHES,
    *,
    clip_norm: float | None = None,
    tolerance: float = 1e-12,
) -> tuple[Any, Sequence[Optimizer]]:
    """Train two epochs by windows of two and by real big batches; return the accumulated model."""
    model, twin = make(), make()
    ours, theirs = optimizers(model), optimizers(twin)
    accumulator = Accumulator(model, list(ours), steps=2, clip_norm=clip_norm)
    for _ in range(2):
        for batch in accumulator.over(batches):
            accumulator.backward(loss(model, batch))
        for start in range(0, len(batches), 2):
            twin.zero_grad()
            loss(twin, join(batches[start : start + 2])).backward()
            if clip_norm is not None:
                clip_grad_norm_(twin.parameters(), clip_norm)
            for optimizer in theirs:
                optimizer.step()
    assert distance(weights(model), weights(twin)) <= tolerance
    assert distance([v for o in ours for v in state(o)], [v for o in theirs for v in state(o)]) <= 100 * tolerance
    return model, ours


def masked(model: Any, batch: Batch) -> Tensor:
    """A cross-entropy over some of the targets."""
    return F.cross_entropy(model(batch["x"].to(next(model.parameters()).dtype)), batch["partly"])


# Fused kernels take the correction as an argument.

FUSED: dict[str, Callable[[Any], list[Optimizer]]] = {
    "adamw": lambda m: [AdamW(m.parameters(), lr=0.01, fused=True)],
    "adam": lambda m: [Adam(m.parameters(), lr=0.01, weight_decay=0.1, fused=True)],
    "momentum": lambda m: [SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, fused=True)],
    "beside a plain one": lambda m: [
        AdamW(m[0].parameters(), lr=0.01, fused=True),
        SGD(m[2].parameters(), lr=0.1, foreach=False),
    ],
}


@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("name", FUSED)
def test_a_fused_optimizer_in_float32(name: str, clip_norm: float | None) -> None:
    """Clip and correction go to the kernel as `grad_scale`, where all can take it, and nothing of that stays there."""
    handed: list[bool] = []

    def watched(model: Any) -> list[Optimizer]:
        optimizers = FUSED[name](model)
        optimizers[0].register_step_pre_hook(lambda o, _args, _kwargs: handed.append("grad_scale" in vars(o)))
        return optimizers

    _, found = assert_exact(lambda: mlp()().float(), watched, masked, clip_norm=clip_norm, tolerance=2e-6)
    assert not any({"grad_scale", "found_inf"} & vars(optimizer).keys() for optimizer in found)
    assert any(handed) is (len(found) == 1)
    assert not all(handed)  # the twin's never is


# Parameters.


def half_used(*, frozen: bool) -> nn.Module:
    """A model half of which no loss reaches, or whose body is frozen, though the optimizer holds it."""
    model = nn.ModuleDict({"used": mlp()(), "kept": mlp()()})
    model["kept"].requires_grad_(requires_grad=not frozen)
    return model


@pytest.mark.parametrize("frozen", [False, True])
def test_frozen_and_unused_parameters_stay(frozen: bool) -> None:
    """They have no gradient, not one of zeros: no step, no decay, no state."""
    model, (optimizer,) = assert_exact(
        partial(half_used, frozen=frozen),
        lambda m: [AdamW(m.parameters(), lr=0.01, weight_decay=0.5, eps=1e-3)],
        lambda m, b: masked(m["used"], b),
    )
    for p, before in zip(model["kept"].parameters(), mlp()().parameters(), strict=True):
        assert torch.equal(p, before)
        assert not optimizer.state[p]


def test_parameters_added_between_windows() -> None:
    """Gradual unfreezing by `add_param_group`: the next window has them, with a regulariser counted once."""
    models: list[Any] = [mlp()(), mlp()()]
    for each in models:
        each[0].requires_grad_(requires_grad=False)
    optimizers = [SGD(each[2].parameters(), lr=0.1, momentum=0.9) for each in models]
    (model, twin), accumulator = models, Accumulator(models[0], optimizers[0], steps=2)

    def loss(m: nn.Module, batch: Batch) -> Tensor:
        return (m(batch["x"]) - batch["value"]).pow(2).sum() + l2(m)

    for window in (BATCHES[:2], BATCHES[2:4]):
        for batch in accumulator.over(window):
            accumulator.backward(loss(model, batch))
        optimizers[1].zero_grad()
        loss(twin, join(window)).backward()
        optimizers[1].step()
        for each, optimizer in zip(models, optimizers, strict=True):
            if len(optimizer.param_groups) == 1:
                each[0].requires_grad_(requires_grad=True)
                optimizer.add_param_group({"params": list(each[0].parameters())})
    assert distance(weights(model)[:1], weights(mlp()())[:1]) > 0
    assert distance(weights(model), weights(twin)) <= 1e-12


# Sparse gradients.


class Bag(nn.Module):
    """An embedding, sparse or dense, and a head."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 3, sparse=sparse)
        self.head = nn.Linear(3, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits from the mean of a sequence's embeddings."""
        return self.head(self.embedding(tokens * 3).mean(1).tanh())


def classify(model: Any, batch: Batch) -> Tensor:
    """The first token, where it is not masked, from all of them."""
    return F.cross_entropy(model(batch["tokens"]), batch["labels"][:, 2])


@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_sparse_gradients_are_those_of_a_dense_embedding(clip_norm: float | None) -> None:
    """Rows that occur twice, in one micro-batch and in several; clipped over their values."""
    case = Loss("bag", seeded(partial(Bag, sparse=True)), sequences, classify)
    ours = accumulated(case, TOKENS, 2, clip_norm=clip_norm)
    assert_equal(ours, big_batches(case, TOKENS, 2, model=seeded(partial(Bag, sparse=False))(), clip_norm=clip_norm))


def test_sparse_adam_beside_adamw() -> None:
    """SparseAdam takes sparse gradients alone; it shares a window with AdamW."""

    def both(model: Any) -> list[Optimizer]:
        return [
            SparseAdam(list(model.embedding.parameters()), lr=0.01, eps=1e-3),
            AdamW(model.head.parameters(), lr=0.01, eps=1e-3),
        ]

    assert_exact(seeded(lambda: Bag(sparse=True)), both, classify, TOKENS)


# What is left alone.


def test_a_single_optimizer_may_serve_two_accumulators_in_turn() -> None:
    """One for each phase of training; only one of them has a window open."""
    training, batches = Training(steps=3), micro_batches()
    training.train(batches[:4])
    first = training.accumulator
    training.accumulator = Accumulator(training.model, training.optimizer, steps=2)
    training.train(batches[4:])
    training.assert_big_batches(batches[:3], batches[3:4], batches[4:6], batches[6:])
    assert first.flush() is None


Models = list[nn.Module]


def judged(models: Any, x: Tensor) -> Tensor:
    """A loss of both models, with a checkpoint that runs a backward of its own."""
    first, second = models
    given = x.detach().clone().requires_grad_()
    out: Tensor = checkpoint(lambda y: second(torch.relu(first(y))), given, use_reentrant=True)
    return out.square().mean()


def by_big_step(models: Models, batch: Tensor) -> None:
    """One update of the first model."""
    BigStep(models, sgd(trained(models[0])), judged, micro_batch_size=2)(batch)


def by_accumulator(models: Models, batch: Tensor) -> None:
    """The same, one micro-batch after the other."""
    accumulator = Accumulator(models, sgd(trained(models[0])), steps=4)
    for x in accumulator.over(batch.split(2)):
        accumulator.backward(judged(models, x))


@pytest.mark.parametrize("train", [by_big_step, by_accumulator])
@pytest.mark.parametrize("before", [None, 2.0])
def test_reentrant_checkpoints_leave_other_parameters_alone(
    train: Callable[[Models, Tensor], None], before: float | None
) -> None:
    """They have the gradients they had, the same tensors, and the update is the big batch's."""
    models, twins = ([seeded(partial(nn.Linear, 3, out))() for out in (3, 1)] for _ in range(2))
    batch, weight = normal(8, 3, by=generator_of(0)), models[1].get_parameter("weight")
    weight.grad = held = None if before is None else torch.full_like(weight, before)
    train(models, batch)
    assert weight.grad is held
    assert held is None or held.unique().tolist() == [before]
    assert models[1].get_parameter("bias").grad is None
    judged(twins, batch).backward()
    sgd(trained(twins[0])).step()
    assert distance(weights(models[0]), weights(twins[0])) <= 1e-12


def test_an_autocast_around_several_steps_casts_weights_anew() -> None:
    """Its cache would go on with the weights from before the first update."""
    found = []
    for spanning in (True, False):
        model = seeded(lambda: nn.Linear(3, 1))().float()
        step = BigStep(model, sgd(trained(model)), lambda m, x: m(x).float().square().mean(), micro_batch_size=2)
        with torch.autocast("cpu", torch.bfloat16) if spanning else nullcontext():
            for _ in range(4):
                with torch.autocast("cpu", torch.bfloat16):
                    step(normal(8, 3, by=generator_of(0)).float())
        found.append(weights(model))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
