"""Gradient hooks that are not linear: a window cannot have the big batch's gradient, and `verify` says so."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import verify


def clamp(gradient: Tensor) -> Tensor:
    """Clip by value, as recipes for recurrent networks do."""
    return gradient.clamp(-0.02, 0.02)


def after(parameter: Tensor) -> None:
    """Clip the gradient when it has been added."""
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.02, 0.02)


def mse(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A mean over elements."""
    return F.mse_loss(model(batch[0]), batch[1])


def hooked(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Clip the gradient of the output."""
    output = model(batch[0])
    output.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    return F.mse_loss(output, batch[1])


def layer(dtype: torch.dtype, hook: Callable[[Tensor], Tensor] | None = None) -> nn.Linear:
    """A layer with hooks on its parameters."""
    torch.manual_seed(0)
    model = nn.Linear(7, 3, dtype=dtype)
    for p in model.parameters():
        if hook is not None:
            p.register_hook(hook)
    return model


def batch(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Inputs and targets of 20 samples."""
    torch.manual_seed(1)
    return torch.randn(20, 7, dtype=dtype), torch.randn(20, 3, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_clamp_in_a_hook_of_a_parameter_is_no_rounding(dtype: torch.dtype) -> None:
    """It is named, with the parameter."""
    found = verify(layer(dtype, clamp), mse, batch(dtype), 6)
    assert not found.exact
    assert [(cause.kind, cause.where) for cause in found.causes] == [("clipping", "the gradient hook of 'weight'")]
    assert str(found).count("Exact") == 0


def test_a_clamp_after_accumulation_is_no_rounding() -> None:
    """Hooks that run when a gradient has been added are seen as well."""
    model = layer(torch.float64)
    model.bias.register_post_accumulate_grad_hook(after)
    found = verify(model, mse, batch(torch.float64), 6)
    assert not found.exact
    assert [cause.where for cause in found.causes] == ["the gradient hook of 'bias'"]


def test_a_clamp_on_an_activation_is_no_rounding() -> None:
    """No parameter has a hook, so no place is named."""
    found = verify(layer(torch.float64), hooked, batch(torch.float64), 6)
    assert not found.exact
    assert [(cause.kind, cause.where) for cause in found.causes] == [("clipping", "backward")]


def test_a_linear_hook_is_exact() -> None:
    """A mask and a factor add up as gradients do."""
    mask = torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64)
    model = layer(torch.float64)
    model.weight.register_hook(lambda gradient: gradient * mask[:, None])
    assert verify(model, mse, batch(torch.float64), 6).exact
