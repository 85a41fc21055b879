"""What someone new to several ranks does first, and is told of: a wrong group, other settings, a model not wrapped."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bigbatch import Accumulator, BigStep, Options, verify
from bigbatch.distributed.fingerprint import rates_in_one
from bigbatch.errors import ConfigurationError
from bigbatch.window.stepper import Stepper
from tests.support.rank_checks import refused
from tests.support.rank_errors import heard
from tests.support.rank_loops import OPTIMIZERS, mean, micro_batch, model
from tests.support.rank_shards import shards
from tests.support.ranks import run_on_ranks
from tests.support.reference import distance

pytestmark = pytest.mark.ranks


def between_updates(steps: int) -> dict[str, Any]:
    """Return what an accumulator saves after one update."""
    network = model()
    accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=steps)
    for number in range(steps):
        accumulator.backward(mean(network, micro_batch(3, number)))
    return accumulator.state_dict()


def test_steps_are_of_who_resumes_where_no_window_is_open() -> None:
    """They are one rank's: on half as many ranks there are twice as many."""
    network = model()
    accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=4)
    accumulator.load_state_dict(between_updates(2))
    assert accumulator.steps == 4
    made = [accumulator.backward(mean(network, micro_batch(3, number))) is not None for number in range(8)]
    assert made == [False, False, False, True] * 2


def test_an_open_window_keeps_its_own_steps() -> None:
    """Its micro-batches were weighed for them."""
    network = model()
    optimizer = OPTIMIZERS["sgd"](network.parameters())
    accumulator = Accumulator(network, optimizer, steps=2)
    accumulator.backward(mean(network, micro_batch(3, 1)))
    saved = accumulator.state_dict()
    accumulator.discard()
    other = Accumulator(network, optimizer, steps=4)
    other.load_state_dict(saved)
    assert (other.steps, other.remaining) == (2, 1)


def with_group(_: int, group: Any, big: bool) -> Any:
    """Give something else as `group=`."""
    network = DistributedDataParallel(model())
    optimizer = OPTIMIZERS["sgd"](network.parameters())
    if big:
        return BigStep(network, optimizer, mean, micro_batch_size=2, options=Options(group=group))
    return Accumulator(network, optimizer, steps=2, group=group)


@pytest.mark.parametrize(("group", "big"), [(2, False), ("nccl", False), ([0, 1], False), ([0, 1], True)], ids=repr)
def test_a_group_is_a_process_group(group: object, big: bool) -> None:
    """It says what was found and what to type."""
    refused(
        run_on_ranks(2, with_group, group, big),
        ConfigurationError,
        f"group must be a torch.distributed.ProcessGroup, such as torch.distributed.group.WORLD. Got {group!r}.",
    )


def said(work: Callable[[], object]) -> list[str]:
    """Return the warnings that something gives."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        work()
    return [f"{Path(each.filename).name}: {each.message}" for each in found if each.category is UserWarning]


def made(network: nn.Module, *, big: bool, **options: Any) -> Any:
    """Return an object that trains a model."""
    optimizer = OPTIMIZERS["sgd"](network.parameters())
    if big:
        return BigStep(network, optimizer, mean, micro_batch_size=2, options=Options(**options))
    return Accumulator(network, optimizer, steps=2, **options)


def without_a_wrapper(rank: int) -> list[list[str]]:
    """Train a plain model, one of a group, one of this process's own, and one in DDP."""
    alone: Any = dist.new_group([rank], use_local_synchronization=True)
    ways: list[tuple[Any, Any]] = [
        (model, None),
        (model, dist.group.WORLD),
        (model, alone),
        (lambda: DistributedDataParallel(model()), None),
        (lambda: DistributedDataParallel(model(), process_group=alone), None),
    ]
    return [said(lambda: made(way(), big=big, group=who)) for big in (False, True) for way, who in ways]  # noqa: B023


def test_a_process_among_others_that_would_train_alone_is_told() -> None:
    """It says what to type, and nothing where somebody has said who trains together."""
    for found in run_on_ranks(2, without_a_wrapper):
        for told in (found[:5], found[5:]):
            ((plain,), *others) = told
            assert plain.startswith("test_settings.py: this process is one of 2, and nothing says")
            assert "make the Accumulator or BigStep after that" in plain
            assert "group=torch.distributed.group.WORLD" in plain
            assert others == [[]] * 4


def verified(_: int) -> list[str]:
    """Look at a plain model on every rank."""
    return said(lambda: verify(model(), mean, micro_batch(8, 1), micro_batch_size=4))


def test_looking_alone_is_no_training() -> None:
    """`verify` compares gradients within a process."""
    assert run_on_ranks(2, verified) == [[], []]


def test_a_launched_process_without_a_group_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun starts it, and nobody called init_process_group; one process alone hears nothing."""
    assert said(lambda: made(model(), big=False)) == []
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert said(lambda: made(model(), big=True)) == []
    monkeypatch.setenv("WORLD_SIZE", "4")
    (told,) = said(lambda: made(model(), big=True))
    assert "one of 4 that were started together, and torch.distributed is not initialised" in told
    assert "init_process_group() first" in told


def sharded_later(rank: int, big: bool) -> Any:
    """Make an object first, and shard its model then."""
    network = model()
    step = made(network, big=big)
    shards(network)
    return step(micro_batch(4, rank)) if big else step.backward(mean(network, micro_batch(4, rank)))


@pytest.mark.parametrize("big", [False, True], ids=["Accumulator", "BigStep"])
def test_a_model_that_is_sharded_later_is_refused(big: bool) -> None:
    """It says in which order to make them."""
    found = run_on_ranks(2, sharded_later, big)
    refused(found, ConfigurationError, f"after the {'BigStep' if big else 'accumulator'} was made")
    refused(found, ConfigurationError, "Use: fully_shard(model); optimizer = AdamW")


def dividing(rank: int, divisors: list[tuple[int, int]]) -> list[list[str]]:
    """Divide the loss by something, with so many steps."""
    found = []
    for steps, divisor in divisors:
        network = DistributedDataParallel(model())
        accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=steps)
        found.append(said(lambda: accumulator.backward(mean(network, micro_batch(5, rank)) / divisor)))  # noqa: B023
        accumulator.discard()
    return found


def test_a_loss_divided_by_the_number_of_ranks_is_told() -> None:
    """By the cause it has: ranks, steps, either of them, or both; and by nothing else."""
    for ranks, steps, either, both, alone, other in run_on_ranks(
        2, dividing, [(3, 2), (3, 3), (2, 2), (3, 6), (1, 2), (3, 7)]
    ):
        assert "divided by the number of ranks (2) already, as a training loop for several" in ranks[0]
        assert "bigbatch averages by itself over all ranks, so its gradients would be 2 times too small" in ranks[0]
        assert "divided by steps (3) already, as hand-written accumulation" in steps[0]
        assert "divided by steps or the number of ranks (2) already" in either[0]
        assert "divided by steps times the number of ranks (6) already" in both[0]
        assert "divided by the number of ranks (2) already" in alone[0]
        assert other == []


def sgd(network: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Return an optimizer with some options."""
    return torch.optim.SGD(network.parameters(), **{"lr": 0.1, **options})


def halves(network: nn.Module) -> list[torch.optim.Optimizer]:
    """Return two optimizers of one model."""
    first, *others = network.parameters()
    return [torch.optim.SGD([first], lr=0.1), torch.optim.SGD(others, lr=0.1)]


def scheduled(network: nn.Module) -> dict[str, Any]:
    """Return an optimizer with its scheduler."""
    optimizer = sgd(network)
    return {"optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


def loaded(network: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that goes on from a checkpoint, which one rank alone has loaded."""
    found = sgd(network, momentum=0.5)
    found.load_state_dict(
        {
            "state": {0: {"momentum_buffer": torch.ones_like(next(network.parameters()))}},
            "param_groups": found.state_dict()["param_groups"],
        }
    )
    return found


def scaler(tracker: int) -> torch.amp.GradScaler:
    """Return a scaler that has seen some steps."""
    found = torch.amp.GradScaler("cpu")
    found.load_state_dict({**found.state_dict(), "_growth_tracker": tracker})
    return found


UNLIKE: dict[str, tuple[Callable[[nn.Module], dict[str, Any]], str]] = {
    "clip_norm": (
        lambda network: {"optimizer": sgd(network), "clip_norm": 2.0},
        "clip_norm: None on rank 0, 2 on rank 1",
    ),
    "skip": (
        lambda network: {"optimizer": sgd(network), "skip_nonfinite": True},
        "skip_nonfinite: False on rank 0, True on rank 1",
    ),
    "dtype": (
        lambda network: {"optimizer": sgd(network), "gradient_dtype": None},
        "gradient_dtype: torch.float32 on rank 0, None on rank 1",
    ),
    "scheduler": (scheduled, "scheduler: None on rank 0, StepLR on rank 1"),
    "lr": (lambda network: {"optimizer": sgd(network, lr=0.2)}, "lr: 0.1 on rank 0, 0.2 on rank 1"),
    "weight_decay": (
        lambda network: {"optimizer": sgd(network, weight_decay=0.5)},
        "weight_decay: 0 on rank 0, 0.5 on rank 1",
    ),
    "momentum": (lambda network: {"optimizer": sgd(network, momentum=0.5)}, "options of the optimizer: "),
    "scaler": (
        lambda network: {"optimizer": sgd(network), "scaler": scaler(0)},
        "scaler: None on rank 0, scale 65536, ",
    ),
    "optimizers": (
        lambda network: {"optimizer": halves(network)},
        "optimizer: SGD of 1 groups on rank 0, SGD of 1 groups and SGD of 1 groups on rank 1",
    ),
}


def set_unlike(rank: int, big: bool) -> list[str]:
    """Give one rank another setting, each in turn."""
    found = []
    for name, (options, _) in UNLIKE.items():
        network = DistributedDataParallel(model())
        given: dict[str, Any] = options(network) if rank else {"optimizer": sgd(network)}
        before = [p.detach().clone() for p in network.parameters()]
        words = ""
        if big:
            inner = {key: given.pop(key) for key in ("skip_nonfinite", "gradient_dtype") if key in given}
            step = BigStep(network, given.pop("optimizer"), mean, micro_batch_size=2, options=Options(**inner), **given)
            words = heard(step, micro_batch(4, rank))
        else:
            accumulator = Accumulator(network, given.pop("optimizer"), steps=1, **given)
            words = heard(accumulator.backward, mean(network, micro_batch(4, rank)))
            accumulator.discard()
        assert distance([p.detach() for p in network.parameters()], before) == 0, name
        found.append(words)
    return found


@pytest.mark.parametrize("big", [False, True], ids=["Accumulator", "BigStep"])
def test_settings_that_differ_are_named(big: bool) -> None:
    """On all ranks, with what each of them has; nothing is stepped."""
    first, second = run_on_ranks(2, set_unlike, big)
    for (name, (_, words)), one, other in zip(UNLIKE.items(), first, second, strict=True):
        assert one.startswith("ConfigurationError: the ranks of this window have different settings"), name
        assert words in one, name
        assert words in other, name


def resumed_on_one(rank: int) -> list[str]:
    """Load what an optimizer and a scaler have learned on one rank alone."""
    found = []
    for name in ("optimizer", "scaler"):
        network = DistributedDataParallel(model())
        optimizer = loaded(network) if rank and name == "optimizer" else sgd(network, momentum=0.5)
        accumulator = Accumulator(network, optimizer, steps=1, scaler=scaler(7 * rank if name == "scaler" else 0))
        found.append(heard(accumulator.backward, mean(network, micro_batch(4, rank))))
        accumulator.discard()
    return found


def test_a_checkpoint_is_loaded_on_all_ranks() -> None:
    """DDP sends weights, and nothing of what an optimizer or a scaler keeps: ranks would part without a word."""
    first, second = run_on_ranks(2, resumed_on_one)
    for optimizer, scaled in (first, second):
        assert "state of the optimizer: none on rank 0, some on rank 1" in optimizer
        assert "the checkpoint loaded on every rank" in optimizer
        assert "_growth_tracker 0 on rank 0" in scaled
        assert "_growth_tracker 7 on rank 1" in scaled


def rates_that_part(rank: int, kind: str) -> list[str]:
    """Set another learning rate on one rank after the first window."""
    network = DistributedDataParallel(model())
    rate: Any = 0.1 if kind == "float" else torch.tensor(0.1)
    optimizer = torch.optim.AdamW(network.parameters(), lr=rate)
    accumulator = Accumulator(network, optimizer, steps=1)
    found = []
    for window in range(3):
        optimizer.param_groups[0]["lr"] = rate * (1.5 if window == 2 and rank else 0.5**window)
        found.append(heard(accumulator.backward, mean(network, micro_batch(4, rank))))
    accumulator.discard()
    return found


@pytest.mark.parametrize("kind", ["float", "tensor"])
def test_learning_rates_are_compared_in_every_window(kind: str) -> None:
    """As where each rank has a validation loss of its own."""
    for same, later, other in run_on_ranks(2, rates_that_part, kind):
        assert (same, later) == ("", "")
        assert other.startswith("ConfigurationError: the ranks of this window have different learning rates")


def test_a_learning_rate_on_a_device_is_not_read() -> None:
    """That would wait for it."""
    rate = torch.empty((), device="meta")  # whoever reads it raises
    optimizer = torch.optim.AdamW(model().parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = rate
    assert rates_in_one([optimizer]) == 0.0
    assert Stepper([optimizer]).settings(None)["lr"] == "on the device"
