"""Random numbers at their mean: whoever draws is noticed, and what stands for a draw is the same every time."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch.verifying.drawing import Draws

X = torch.linspace(0.1, 0.9, 12).reshape(3, 4)
CONSTANT: dict[str, Callable[[], Tensor]] = {
    "rand": lambda: torch.rand(3),
    "rand_like": lambda: torch.rand_like(X),
    "a generator of its own": lambda: torch.rand(3, generator=torch.Generator()),
    "uniform_": lambda: torch.empty(3).uniform_(2, 4),
    "randn": lambda: torch.randn(3),
    "randn_like": lambda: torch.randn_like(X),
    "normal": lambda: torch.normal(X, 2.0),
    "normal_": lambda: torch.empty(3).normal_(1.0, 2.0),
    "log_normal_": lambda: torch.empty(3).log_normal_(),
    "exponential_": lambda: torch.empty(3).exponential_(2.0),
    "cauchy_": lambda: torch.empty(3).cauchy_(),
    "geometric_": lambda: torch.empty(3).geometric_(0.5),
    "bernoulli": lambda: torch.bernoulli(X),
    "bernoulli_": lambda: torch.empty(3).bernoulli_(0.3),
    "bernoulli_ of a tensor": lambda: torch.empty(3, 4).bernoulli_(X),
    "bernoulli_ of truths": lambda: torch.empty(3, dtype=torch.bool).bernoulli_(0.7),
    "poisson": lambda: torch.poisson(X),
    "gamma": lambda: torch.distributions.Gamma(X, X).sample(),
    "randperm": lambda: torch.randperm(5),
    "randint": lambda: torch.randint(2, 7, (5,)),
    "random_": lambda: torch.empty(3).random_(5),
    "multinomial": lambda: torch.multinomial(X, 2),
    "multinomial, again and again": lambda: torch.multinomial(X, 9, replacement=True),
    "gumbel_softmax": lambda: F.gumbel_softmax(X),
    "dropout": lambda: F.dropout(X, 0.7),
    "alpha_dropout": lambda: F.alpha_dropout(X, 0.3, training=True),
    "native_dropout": lambda: torch.native_dropout(X, 0.3, train=True)[0],
    "attention": lambda: F.scaled_dot_product_attention(X[None], X[None], X[None], dropout_p=0.5),
    "recurrent": lambda: nn.LSTM(4, 4, 2, dropout=0.5)(X)[0],
}


@pytest.mark.parametrize("name", CONSTANT)
def test_a_draw_is_noticed_and_can_be_held_still(name: str) -> None:
    """The same for every state of the generators, and not the same where it is not held."""
    held = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with Draws(lambda: "here", still=True) as seen:
            held.append(CONSTANT[name]().clone())
        assert set(seen.seen) == {"here"}
    assert torch.equal(*held)
    assert bool(torch.isfinite(held[0]).all())


def test_dropout_at_its_mean_drops_nothing() -> None:
    """Kept as it is, and so is its gradient."""
    x = X.clone().requires_grad_()
    with Draws(still=True):
        found = F.dropout(x, 0.4)
        found.sum().backward()
    assert torch.allclose(found, X)
    assert x.grad is not None
    assert torch.allclose(x.grad, torch.ones_like(X))


def test_the_fused_dropout_of_a_gpu_has_the_gradient_of_what_it_gives() -> None:
    """It scales, and drops nothing."""
    x = X.clone().requires_grad_()
    with Draws(still=True):
        found, _ = torch.native_dropout(x, 0.4, train=True)
        found.sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad * X, found)


QUIET: dict[str, Callable[[], object]] = {
    "dropout in evaluation": lambda: F.dropout(X, 0.5, training=False),
    "dropout of nothing": lambda: F.dropout(X, 0.0),
    "a fused dropout in evaluation": lambda: torch.native_dropout(X, 0.3, train=False),
    "attention without dropout": lambda: F.scaled_dot_product_attention(X[None, None], X[None, None], X[None, None]),
    "a product": lambda: X @ X.T,
    "a randomised activation in evaluation": lambda: F.rrelu(X, training=False),
}


@pytest.mark.parametrize("name", QUIET)
def test_what_draws_nothing_is_not_noticed(name: str) -> None:
    """Nor is what could draw, and does not."""
    with Draws() as seen:
        QUIET[name]()
    assert not seen.seen
