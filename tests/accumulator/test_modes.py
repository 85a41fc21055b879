"""Modes around a step: whoever counts operations sees what the model does, and the update is the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from bigbatch import Accumulator, BigStep
from tests.support.reference import distance, sgd, trained, weights
from tests.support.samples import Batch, join, rows, seeded
from tests.support.strategies import Epoch, epochs, readable
from tests.support.training import Training

pytestmark = pytest.mark.filterwarnings(
    "ignore:reduction.*divides the total loss:UserWarning",  # kl_div(reduction="mean")
    "ignore:this loss looks divided by steps:UserWarning",
    "ignore:this loss is a sum over data:UserWarning",
)
BATCHES = [rows(5, 0), rows(3, 1), rows(4, 2)]


class Dispatched(TorchDispatchMode):
    """Notes every operation."""

    seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note it, and do it."""
        self.seen += len(types) >= 0
        return func(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    """Notes every function."""

    seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note it, and call it."""
        self.seen += len(types) >= 0
        return func(*args, **(kwargs or {}))


class Flops(FlopCounterMode):
    """Torch's own counter."""

    def __init__(self) -> None:
        super().__init__(display=False)

    @property
    def seen(self) -> int:
        """How many there were."""
        return self.get_total_flops()


def model_of(norm: Callable[[int], nn.Module]) -> nn.Module:
    """The same weights every time."""
    return seeded(lambda: nn.Sequential(nn.Linear(3, 8), norm(8), nn.Tanh(), nn.Linear(8, 4)))()


def loss_of(model: Any, batch: Batch) -> Tensor:
    """A loss with numbers in its graph."""
    return 0.7 * F.cross_entropy(model(batch["x"]) * 2, batch["label"]) + (model(batch["x"]) ** 2).mean() / 5


def accumulated(model: nn.Module) -> Callable[[], object]:
    """Return what makes an update of three micro-batches."""
    accumulator = Accumulator(model, sgd(trained(model)), steps=3, clip_norm=0.1)
    return lambda: [accumulator.backward(loss_of(model, batch)) for batch in BATCHES]


def stepped(model: nn.Module) -> Callable[[], object]:
    """Return what makes an update of a big batch, in micro-batches of four; the first one is checked."""
    step = BigStep(model, sgd(trained(model)), loss_of, micro_batch_size=4, clip_norm=0.1)
    return lambda: step(join(BATCHES))


WAYS = {
    "accumulator": (nn.Identity, accumulated),
    "big step": (nn.Identity, stepped),
    "lock-step": (nn.BatchNorm1d, stepped),
}


@pytest.mark.parametrize("mode", [Flops, Dispatched, Called])
@pytest.mark.parametrize("way", WAYS)
def test_an_update_under_a_mode_is_the_same(way: str, mode: Any) -> None:
    """To the last bit; the third one, which checks nothing, has the flops of a plain loop."""
    norm, updating = WAYS[way]
    model, twin, by_hand = (model_of(norm) for _ in range(3))
    update, alone = updating(model), updating(twin)
    with mode() as watching:
        update()
        update()
    alone()
    alone()
    assert all(torch.equal(one, other) for one, other in zip(weights(model), weights(twin), strict=True))
    assert watching.seen
    with Flops() as ours:
        update()
    with Flops() as theirs:
        for batch in BATCHES:
            loss_of(by_hand, batch).backward()
    assert ours.seen == theirs.seen > 0


@given(epochs(readable))
@settings(max_examples=40)
def test_every_loss_is_read_under_a_mode(epoch: Epoch) -> None:
    """Those with numbers, indices and weights among their saved tensors, too."""
    watched, alone = Training(epoch.steps, case=epoch.case), Training(epoch.steps, case=epoch.case)
    with Dispatched(), Called():  # type: ignore[no-untyped-call]
        watched.train(epoch.batches)
    alone.train(epoch.batches)
    assert distance(watched.weights, alone.weights) <= 1e-15  # torch itself adds some up in another order there
