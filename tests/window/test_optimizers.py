"""Optimizers and the parameters they hold: fused, grouped, frozen, unused, tied, sparse."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, AdamW, Optimizer, SparseAdam

from bigbatch import Accumulator
from tests.support.losses import MODELS, l2
from tests.support.reference import accumulated, assert_equal, big_batches, distance, state, weights
from tests.support.samples import CLASSES, Batch, Loss, join, mlp, rows, seeded, sequences
from tests.support.training import Training, micro_batches

BATCHES = [rows(size, seed) for seed, size in enumerate((3, 1, 4, 2, 5))]
TOKENS = [sequences(size, seed) for seed, size in enumerate((3, 1, 4, 2, 5))]
Function = Callable[[Any, Batch], Tensor]


def assert_exact(
    make: Callable[[], nn.Module],
    optimizers: Callable[[Any], Sequence[Optimizer]],
    loss: Function,
    batches: Sequence[Batch],
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
    return F.cross_entropy(model(batch["x"]), batch["partly"])


# Fused kernels take the correction as an argument.

FUSED: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda p: AdamW(p, lr=0.01, fused=True),
    "adam": lambda p: Adam(p, lr=0.01, weight_decay=0.1, fused=True),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, fused=True),
}


def masked_single(model: Any, batch: Batch) -> Tensor:
    """The loss of a float32 model."""
    return F.cross_entropy(model(batch["x"].float()), batch["partly"])


@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("name", FUSED)
def test_a_fused_optimizer_in_float32(name: str, clip_norm: float | None) -> None:
    """Clip and correction go to the kernel as `grad_scale`, and nothing of that stays on the optimizer."""
    handed: list[bool] = []

    def watched(model: Any) -> list[Optimizer]:
        optimizer = FUSED[name](model.parameters())
        optimizer.register_step_pre_hook(lambda o, _args, _kwargs: handed.append("grad_scale" in vars(o)))
        return [optimizer]

    _, (optimizer,) = assert_exact(
        lambda: mlp()().float(), watched, masked_single, BATCHES, clip_norm=clip_norm, tolerance=2e-6
    )
    assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()
    assert any(handed)
    assert not all(handed)  # the twin's never is


def test_a_fused_optimizer_beside_a_plain_one() -> None:
    """Where not all can take the correction as an argument, all get it in their gradients."""

    def both(model: Any) -> list[Optimizer]:
        return [AdamW(model[0].parameters(), lr=0.01, fused=True), SGD(model[2].parameters(), lr=0.1, foreach=False)]

    assert_exact(lambda: mlp()().float(), both, masked_single, BATCHES, clip_norm=0.05, tolerance=2e-6)


# Parameters.


def half_frozen() -> nn.Module:
    """A model whose body is frozen, though the optimizer holds it."""
    model = nn.ModuleDict({"used": mlp()(), "kept": mlp()()})
    model["kept"].requires_grad_(requires_grad=False)
    return model


def half_used() -> nn.Module:
    """A model half of which no loss reaches."""
    return nn.ModuleDict({"used": mlp()(), "kept": mlp()()})


@pytest.mark.parametrize("make", [half_frozen, half_used])
def test_frozen_and_unused_parameters_stay(make: Callable[[], nn.Module]) -> None:
    """They have no gradient, not one of zeros: no step, no decay, no state."""
    model, (optimizer,) = assert_exact(
        make,
        lambda m: [AdamW(m.parameters(), lr=0.01, weight_decay=0.5, eps=1e-3)],
        lambda m, b: masked(m["used"], b),
        BATCHES,
    )
    for p, before in zip(model["kept"].parameters(), mlp()().parameters(), strict=True):
        assert torch.equal(p, before)
        assert not optimizer.state[p]


def test_parameters_added_between_windows() -> None:
    """Gradual unfreezing by `add_param_group`: the next window has them, with a regulariser counted once."""
    model, twin = mlp()(), mlp()()
    optimizers = []
    for each in (model, twin):
        each[0].requires_grad_(requires_grad=False)  # type: ignore[index]
        optimizers.append(SGD(each[2].parameters(), lr=0.1, momentum=0.9))  # type: ignore[index]
    accumulator = Accumulator(model, optimizers[0], steps=2)

    def loss(m: nn.Module, batch: Batch) -> Tensor:
        return (m(batch["x"]) - batch["value"]).pow(2).sum() + l2(m)

    for window in (BATCHES[:2], BATCHES[2:4]):
        for batch in accumulator.over(window):
            accumulator.backward(loss(model, batch))
        optimizers[1].zero_grad()
        loss(twin, join(window)).backward()
        optimizers[1].step()
        if len(optimizers[0].param_groups) == 1:
            for each, optimizer in zip((model, twin), optimizers, strict=True):
                each[0].requires_grad_(requires_grad=True)  # type: ignore[index]
                optimizer.add_param_group({"params": list(each[0].parameters())})  # type: ignore[index]
    assert not torch.equal(model[0].weight, mlp()()[0].weight)  # type: ignore[index]
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


# Double backward.


@pytest.mark.parametrize("name", ["gradient-penalty", "gradient-penalty-r1"])
def test_gradient_penalties_over_several_updates(name: str) -> None:
    """Losses that hold a gradient themselves."""
    case = next(case for case in MODELS if case.name == name)
    assert_exact(case.model, lambda m: [Adam(m.parameters(), lr=0.01, eps=1e-3)], case.loss, BATCHES, clip_norm=0.5)


# What cannot be.


def test_a_single_optimizer_may_serve_two_accumulators_in_turn() -> None:
    """One for each phase of training; only one of them has a window open."""
    training = Training(steps=3)
    batches = micro_batches()
    training.train(batches[:4])
    first = training.accumulator
    training.accumulator = Accumulator(training.model, training.optimizer, steps=2)
    training.train(batches[4:])
    training.assert_big_batches(batches[:3], batches[3:4], batches[4:6], batches[6:])
    assert first.flush() is None
