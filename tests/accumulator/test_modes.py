"""Modes around a step: whoever counts operations sees what the model does, and the update is the same."""

from collections.abc import Callable
from typing import Any, TypeAlias

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
plain = seeded(lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)))
normed = seeded(lambda: nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)))


class Dispatched(TorchDispatchMode):
    """Notes every operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note it, and do it."""
        del types
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    """Notes every function."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note it, and call it."""
        del types
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def flops() -> FlopCounterMode:
    """Torch's own counter."""
    return FlopCounterMode(display=False)


Watching: TypeAlias = FlopCounterMode | Dispatched | Called
MODES: list[Callable[[], Watching]] = [flops, Dispatched, Called]


def loss_of(model: Any, batch: Batch) -> Tensor:
    """A loss with numbers in its graph."""
    return 0.7 * F.cross_entropy(model(batch["x"]) * 2, batch["label"]) + (model(batch["x"]) ** 2).mean() / 5


def accumulated(model: nn.Module) -> Callable[[], None]:
    """Return what makes an update of three micro-batches."""
    accumulator = Accumulator(model, sgd(trained(model)), steps=3, clip_norm=0.1)

    def update() -> None:
        for batch in BATCHES:
            accumulator.backward(loss_of(model, batch))

    return update


def stepped(model: nn.Module) -> Callable[[], None]:
    """Return what makes an update of a big batch, in micro-batches of four; the first one is checked."""
    step = BigStep(model, sgd(trained(model)), loss_of, micro_batch_size=4, clip_norm=0.1)
    return lambda: (step(join(BATCHES)), None)[1]


def by_hand(model: nn.Module) -> Callable[[], None]:
    """Return what backpropagates three micro-batches; weights are of no interest here."""

    def window() -> None:
        for batch in BATCHES:
            loss_of(model, batch).backward()

    return window


WAYS = {"accumulator": (plain, accumulated), "big step": (plain, stepped), "lock-step": (normed, stepped)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", WAYS)
def test_an_update_under_a_mode_is_the_same(way: str, mode: Callable[[], Watching]) -> None:
    """To the last bit, and the mode has seen the model."""
    make, updating = WAYS[way]
    model, twin = make(), make()
    update, alone = updating(model), updating(twin)
    with mode() as watching:
        update()
        update()
    alone()
    alone()
    assert all(torch.equal(one, other) for one, other in zip(weights(model), weights(twin), strict=True))
    assert watching.get_total_flops() if isinstance(watching, FlopCounterMode) else watching.seen


@pytest.mark.parametrize("way", WAYS)
def test_flops_are_those_of_a_loop_by_hand(way: str) -> None:
    """Of an update after the first two, which look at some samples more than once."""
    make, updating = WAYS[way]
    update, window = updating(make()), by_hand(make())
    update()
    update()
    with flops() as ours:
        update()
    with flops() as theirs:
        window()
    assert ours.get_total_flops() == theirs.get_total_flops() > 0


@given(epochs(readable))
@settings(max_examples=40)
def test_every_loss_is_read_under_a_mode(epoch: Epoch) -> None:
    """Those with numbers, indices and weights among their saved tensors, too."""
    watched, alone = Training(epoch.steps, case=epoch.case), Training(epoch.steps, case=epoch.case)
    with Dispatched(), Called():
        watched.train(epoch.batches)
    alone.train(epoch.batches)
    assert distance(watched.weights, alone.weights) <= 1e-15  # torch itself adds some up in another order there
