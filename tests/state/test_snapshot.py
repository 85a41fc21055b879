"""What a forward changes is put back: buffers of every kind, generators, gradients; what never changes is cheap."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from bigbatch.state.rng import Randomness
from bigbatch.state.snapshot import Buffers, untouched

ON_CPU = frozenset({torch.device("cpu")})


class Store(nn.Module):
    """Some buffers, one of them below."""

    counter: Tensor
    mean: Tensor
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counter", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("table", torch.arange(5.0), persistent=False)
        self.register_buffer("absent", None)
        self.norm = nn.BatchNorm1d(3)

    def values(self) -> dict[str, list[float]]:
        """All of them, as numbers."""
        return {name: buffer.tolist() for name, buffer in self.named_buffers()}


CHANGES: dict[str, Callable[[Store], Any]] = {
    "in place": lambda m: m.counter.add_(1),
    "augmented": lambda m: setattr(m, "counter", m.counter.__iadd__(1)),
    "replaced": lambda m: setattr(m, "mean", m.mean + 1),
    "replaced by another shape": lambda m: setattr(m, "mean", torch.ones(7)),
    "replaced, then in place": lambda m: setattr(m, "mean", m.mean.clone().add_(2)),
    "in place, then replaced": lambda m: setattr(m, "mean", m.mean.add_(2).clone()),
    "through data": lambda m: m.table.data.add_(3),
    "a view": lambda m: m.table[2:].zero_(),
    "filled": lambda m: setattr(m, "absent", torch.ones(2)),
    "emptied": lambda m: setattr(m, "mean", None),
    "batch norm": lambda m: m.norm(torch.randn(4, 3)),
    "norm rests": lambda m: m.norm.eval(),
    "norm wakes": lambda m: m.norm.train(),
    "nothing": lambda _: None,
}
LASTING = {"replaced by another shape", "filled", "emptied", "through data"}  # the others could not follow them


@given(st.lists(st.sets(st.sampled_from(sorted(CHANGES))), max_size=4), st.sampled_from(sorted(CHANGES)), st.booleans())
@example([{"norm rests"}, {"norm wakes"}], "batch norm", False)  # its statistics move without a new version
@example([{"norm rests"}, {"norm wakes"}, {"batch norm"}], "batch norm", False)
@settings(max_examples=100)
def test_a_step_can_be_undone_whatever_steps_before_it_did(passed: list[set[str]], last: str, quietly: bool) -> None:
    """A buffer may move in one step and rest in the next; one written through `.data` is so from the first step on."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Store()
        last_step: Buffers | None = None
        for changes in passed:
            buffers = Buffers([model], last_step)
            for change in sorted(changes - LASTING):
                CHANGES[change](model)
            if quietly:
                CHANGES["through data"](model)
            last_step = buffers.settle()
        buffers, before, held = Buffers([model], last_step), model.values(), dict(model.named_buffers())
        if quietly or last != "through data":
            CHANGES[last](model)
        buffers.restore()
        assert model.values() == before
        assert all(model.get_buffer(name) is buffer for name, buffer in held.items())


def test_what_is_large_never_changes_or_has_no_version() -> None:
    """A quantized model in buffers must not be doubled on the device, nor copied for each step; inference tensors."""
    model = nn.Module()
    model.register_buffer("large", torch.zeros(1 << 19))
    with torch.inference_mode():
        model.register_buffer("table", torch.ones(3))
    first = Buffers([model])
    copies = [each.copied for each in first.saved]
    buffers = Buffers([model], first.settle())
    assert all(each.copied is copy for each, copy in zip(buffers.saved, copies, strict=True))
    model.get_buffer("large").add_(1)
    buffers.restore()
    assert not model.get_buffer("large").any()
    assert model.get_buffer("table").tolist() == [1, 1, 1]


DRAWN: list[Callable[[], Any]] = [
    lambda: torch.rand(()),
    random.random,
    lambda: np.random.rand(),  # noqa: NPY002, PLW0108 - the generator that is restored
    lambda: nn.Dropout()(torch.ones(3)),
]


def test_untouched_leaves_nothing() -> None:
    """Gradients, buffers and generators, also when what is inside fails."""
    model = Store()
    weight = nn.Parameter(torch.ones(3))
    model.register_parameter("weight", weight)
    outside = torch.optim.SGD([nn.Parameter(torch.ones(2)), weight], lr=0.1)
    kept = weight.grad = torch.full((3,), 7.0)
    before, randomness = model.values(), Randomness(ON_CPU)

    def inside() -> None:
        with untouched([model], [outside]):
            assert weight.grad is None
            (weight * torch.rand(3)).sum().backward()
            outside.param_groups[0]["params"][0].grad = torch.ones(2)
            for draw in DRAWN:
                draw()
            model.counter += 1
            model.norm(torch.randn(4, 3))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        inside()
    assert weight.grad is kept
    assert outside.param_groups[0]["params"][0].grad is None
    assert model.values() == before
    assert not randomness.drawn()


@pytest.mark.parametrize("draw", DRAWN)
def test_drawing_is_noticed(draw: Callable[[], Any]) -> None:
    """By torch, Python or numpy; and not where nobody has drawn, or numbers were put back."""
    randomness = Randomness(ON_CPU)
    assert not randomness.drawn()
    first = draw()
    assert randomness.drawn()
    randomness.restore()
    assert not randomness.drawn()
    assert bool(torch.as_tensor(first == draw()).all())
