"""A verification leaves the model, its gradients and the random generators as they were, whatever happens."""

import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bigbatch import Options, verify
from bigbatch.state.rng import Randomness
from tests.support import defects
from tests.support.bombs import seed
from tests.support.defects import Batch, mean, samples


class Changing(nn.Module):
    """Every kind of state: BatchNorm, dropout, a buffer that is replaced, a frozen part, attributes, a graph."""

    scale: Tensor
    output: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.frozen, self.resting = nn.Linear(8, 8), nn.Dropout(0.5).eval()
        self.drop, self.last = nn.Dropout(0.2), nn.Linear(8, 3)
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.ones(()))
        self.history, self.seen = list[int](), {"rows": [0]}
        self.last.weight.register_hook(lambda gradient: gradient)

    def forward(self, x: Tensor) -> Tensor:
        """Draw, count and write."""
        self.scale = self.scale * (1 + 1e-3 * random.random())  # noqa: S311 - no secret
        self.history.append(len(x))
        self.seen["rows"][0] += len(x)
        self.output = self.last(self.drop(self.resting(self.frozen(self.norm(self.first(x)).tanh())))) * self.scale
        return self.output


def state(model: nn.Module) -> dict[str, Any]:
    """All of a model that a proof may not change: values as numbers, tensors and gradients as the objects they are."""
    return {
        "values": {name: value.tolist() for name, value in model.state_dict().items()},
        "tensors": {name: id(value) for name, value in model.state_dict(keep_vars=True).items()},
        "gradients": {name: (id(p.grad), p.requires_grad) for name, p in model.named_parameters()},
        "modes": {name: module.training for name, module in model.named_modules()},
        "attributes": {  # hooks are among them
            name: {key: len(value) if isinstance(value, dict) else id(value) for key, value in vars(module).items()}
            for name, module in model.named_modules()
        },
    }


WAYS: dict[str, dict[str, Any]] = {
    "BigStep": {},
    "plain statistics": {"options": Options(batch_norm="micro", check=False)},
    "a loop": {"train_window": defects.by_samples(before=lambda model, _: model.train(), end=defects.step_and_clear)},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt], ids=["", "ValueError", "KeyboardInterrupt"])
def test_everything_is_as_it_was(way: str, error: type[BaseException] | None) -> None:
    """Weights, their tensors, gradients, buffers, modes, hooks, generators and torch; also after an error."""
    seed()
    model, batch, calls = Changing(), samples(), 0
    model(torch.randn(3, 6))  # leaves a graph behind
    model.first.weight.grad = torch.ones(8, 6)

    def loss_fn(given: Any, some: Batch) -> Tensor:
        nonlocal calls
        calls += 1
        if error is not None and calls >= 4:
            raise error("in the middle")
        return mean(given, some)

    before = state(model)
    randomness = Randomness()
    functions = (torch.optim.Optimizer.zero_grad, nn.utils.clip_grad_norm_, nn.utils.clip_grad.clip_grad_value_)
    with nullcontext() if error is None else pytest.raises(error, match="in the middle"):
        found = verify(model, loss_fn, batch, 4, **WAYS[way])
        assert "randomness" in {cause.kind for cause in found.causes}
    assert not randomness.drawn()
    assert state(model) == before
    assert (model.history, model.seen) == ([3], {"rows": [3]})
    assert functions == (torch.optim.Optimizer.zero_grad, nn.utils.clip_grad_norm_, nn.utils.clip_grad.clip_grad_value_)
