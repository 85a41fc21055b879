"""Low precision: bf16 and fp16 gradients are added up in float32 and rounded once, and weights round nothing."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import Accumulator, BigStep, Options, Update
from tests.support.reference import OptimizerFactory, big_batches, distance, sgd, trained, weights
from tests.support.samples import Batch, Loss, mlp, rows

Function = Callable[[Any, Batch], Tensor]
HALVES = [torch.bfloat16, torch.float16]


def low_loss(model: nn.Module, batch: Batch) -> Tensor:
    """A masked cross-entropy all in the model's own precision."""
    return F.cross_entropy(model(batch["x"].to(next(model.parameters()).dtype)), batch["partly"])


def mean_gradient(
    model: nn.Module, batches: Sequence[Batch], counts: Sequence[float], loss: Function = low_loss
) -> list[Tensor]:
    """The mean of the micro-batches' own gradients by their counts, rounded by the model and no more, in float64."""
    each = [torch.autograd.grad(loss(model, batch), trained(model)) for batch in batches]
    shares = [count / sum(counts) for count in counts]
    columns = zip(*each, strict=True)
    return [torch.stack([g.double() * n for g, n in zip(c, shares, strict=True)]).sum(0) for c in columns]


def train(
    model: nn.Module,
    batches: Sequence[Batch],
    loss: Function = low_loss,
    optimizer: OptimizerFactory = sgd,
    **options: Any,
) -> tuple[list[Tensor], Update]:
    """Train one window; returns what `.grad` holds before the step, and the update."""
    gradients: list[Tensor] = []
    accumulator = Accumulator(model, optimizer(trained(model)), steps=len(batches), **options)
    accumulator.before_step(lambda: gradients.extend(p.grad.clone() for p in trained(model) if p.grad is not None))
    (update,) = [u for b in accumulator.over(batches) if (u := accumulator.backward(loss(model, b)))]
    return gradients, update


# Adding up.


@pytest.mark.parametrize("sizes", [(4, 4, 4, 4), (1001, 7, 3), (2, 300, 5, 64, 1)], ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_gradients_add_up_in_float32(dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    """The sum of the micro-gradients, weighed by counts that bf16 cannot hold, to the precision of float32."""
    batches = [rows(size, seed) for seed, size in enumerate(sizes)]
    model = mlp()().to(dtype)
    true = mean_gradient(model, batches, [int((batch["partly"] != -100).sum()) for batch in batches])
    gradients, _ = train(model, batches)
    assert all(gradient.dtype == torch.float32 for gradient in gradients)
    assert distance(gradients, true) <= 1e-6


@pytest.mark.parametrize("ragged", [False, True], ids=["even", "ragged"])
def test_a_thousand_fp16_micro_batches_do_not_underflow(ragged: bool) -> None:
    """A weight of 1/1000 in the backward would leave little of small gradients: fp16 ends at 6e-8."""
    sizes = [1 + place % 3 for place in range(1000)] if ragged else [2] * 1000
    batches = [rows(size, seed % 7) for seed, size in enumerate(sizes)]
    model = mlp()().half()

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return 0.001 * F.mse_loss(model(batch["x"].half()), batch["value"].half())

    true = mean_gradient(model, batches, sizes, loss)
    assert distance(train(model, batches, loss)[0], true) <= 1e-4


@pytest.mark.parametrize("low", [(0, 1, 2), (2,), (1, 2), (0,), (1,), (0, 2), (0, 1)], ids=str)
@pytest.mark.parametrize("sizes", [(1001, 7, 3), (1, 200, 5)], ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_low_precision_loss_costs_its_weights_nothing(
    dtype: torch.dtype, sizes: tuple[int, ...], low: tuple[int, ...]
) -> None:
    """All losses or some, as under autocast that is on for some micro-batches and off for others.

    Below the cast the model is float64: were the weights rounded like the loss, 1e-12 could not be had.
    """
    case = Loss("cast", mlp(), rows, lambda m, b: F.cross_entropy(m(b["x"]), b["partly"]))
    batches = case.micro_batches(sizes)
    model = case.model()
    accumulator = Accumulator(model, sgd(trained(model)), steps=len(sizes))
    for place, batch in enumerate(accumulator.over(batches)):
        loss = case.loss(model, batch)
        accumulator.backward(loss.to(dtype) if place in low else loss)
    assert distance(weights(model), big_batches(case, batches, len(sizes)).weights) <= 1e-12


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_weighed_loss_that_counts_nothing_adds_nothing(dtype: torch.dtype) -> None:
    """No weight is split in two where there is none."""
    case = Loss("cast", mlp(), rows, lambda m, b: F.cross_entropy(m(b["x"]), b["partly"]))
    model, (one, nothing, two) = case.model(), case.micro_batches((5, 2, 7))
    nothing["partly"].fill_(-100)
    optimizer = sgd(trained(model))
    accumulator = Accumulator(model, optimizer, steps=3)
    for batch in (one, nothing, two):
        accumulator.weigh(case.loss(model, batch).to(dtype)).backward()
    accumulator.settle()
    optimizer.step()
    assert distance(weights(model), big_batches(case, [one, two], 2).weights) <= 1e-12


def same_sign(dtype: torch.dtype | None) -> float:
    """The part that 1,024 micro-gradients of one sign lose when they are added up."""
    model = nn.Linear(64, 1, bias=False, dtype=torch.bfloat16)
    by = torch.Generator().manual_seed(0)
    data = [{"x": (1 + torch.rand(1, 64, generator=by)).bfloat16()} for _ in range(1024)]
    gradients, _ = train(model, data, lambda model, batch: model(batch["x"]).mean(), gradient_dtype=dtype)
    return distance(gradients, [torch.stack([batch["x"].double() for batch in data]).mean(0)])


def test_a_thousand_gradients_of_one_sign_lose_nothing() -> None:
    """In float32 far less than 1e-3; in bf16 a sum stands still once it is 256 times its next part."""
    assert same_sign(torch.float32) < 1e-6
    assert same_sign(torch.float64) < 1e-6
    assert same_sign(None) > 1e-2


# The step.

OPTIMIZERS: dict[str, OptimizerFactory] = {
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-4, foreach=False),  # fp16 has no 1e-8
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-4, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-4, fused=True),
}


@pytest.mark.parametrize("clip_norm", [None, 0.01])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stock_optimizers_step_with_the_gradient_rounded_once(
    name: str, dtype: torch.dtype, clip_norm: float | None
) -> None:
    """Bit for bit what the optimizer does with the float32 gradient cast to the parameter's type; clipped before."""
    model, twin = mlp()().to(dtype), mlp()().to(dtype)
    gradients, update = train(model, [rows(3, 0), rows(1, 1)], optimizer=OPTIMIZERS[name], clip_norm=clip_norm)
    norm, factor = torch.cat([g.flatten() for g in gradients]).double().norm(), 1.0
    if clip_norm is not None:
        assert update.grad_norm is not None
        assert float(update.grad_norm) == pytest.approx(float(norm), rel=1e-6)
        factor = clip_norm / float(norm)
    for p, gradient in zip(trained(twin), gradients, strict=True):
        p.grad = (gradient * factor).to(dtype)
    OPTIMIZERS[name](trained(twin)).step()
    assert distance(weights(model), weights(twin)) <= (0.0 if clip_norm is None else 1e-3)


def test_parameters_are_left_as_they_were() -> None:
    """After a step and after `discard`: no gradient is left, and no float32 one would be accepted, as torch has it."""
    model, batch = mlp()().bfloat16(), rows(3, 0)
    parameters = trained(model)
    accumulator = Accumulator(model, sgd(parameters), steps=2)
    ends: list[Callable[[], Any]] = [lambda: accumulator.backward(low_loss(model, batch)), accumulator.discard]
    for end in ends:
        accumulator.backward(low_loss(model, batch))
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in parameters)
        end()
        assert all(p.grad is None and getattr(p, "grad_dtype", p.dtype) == p.dtype for p in parameters)
    low_loss(model, batch).backward()
    assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in parameters)


@pytest.mark.parametrize(
    ("own", "wanted", "found"),
    [
        (torch.bfloat16, None, torch.bfloat16),
        (torch.bfloat16, torch.float64, torch.float64),
        (torch.float32, torch.float32, torch.float32),
        (torch.float32, torch.float64, torch.float32),
        (torch.float64, torch.float32, torch.float64),
    ],
    ids=str,
)
def test_only_low_precision_gradients_are_widened(own: torch.dtype, wanted: torch.dtype, found: torch.dtype) -> None:
    """float32 and float64 parameters keep a gradient of their own type; None leaves all of them."""
    model = mlp()().to(own)
    gradients, _ = train(model, [rows(3, 0)], gradient_dtype=wanted)
    assert {gradient.dtype for gradient in gradients} == {found}


def test_parameters_of_both_kinds_in_one_window() -> None:
    """A bf16 body under a float32 head: one norm, each gradient in its own precision."""
    model: Any = mlp()()
    model[0].bfloat16()
    model[2].float()

    def loss(_: Any, batch: Batch) -> Tensor:
        return F.cross_entropy(model[2](model[1](model[0](batch["x"].bfloat16())).float()), batch["label"])

    batches = [rows(4, seed) for seed in range(4)]
    true = mean_gradient(model, batches, [1, 1, 1, 1], loss)
    gradients, _ = train(model, batches, loss, clip_norm=1.0)
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    assert distance(gradients, true) <= 1e-6


@pytest.mark.parametrize("lock_step", [False, True])
def test_a_model_that_is_cast_after_a_window_has_gradients_of_its_new_type(lock_step: bool) -> None:
    """Nothing of a window in low precision stays with its parameters."""
    model = nn.Sequential(nn.Linear(3, 4), *([nn.BatchNorm1d(4)] if lock_step else []), nn.Linear(4, 2)).bfloat16()
    step = BigStep(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model, batch: model(batch).float().square().mean(),
        micro_batch_size=4,
        options=Options(check=False),
    )
    step(torch.randn(8, 3, dtype=torch.bfloat16))
    model.double()
    model(torch.randn(8, 3, dtype=torch.float64)).square().mean().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float64 for p in model.parameters())
