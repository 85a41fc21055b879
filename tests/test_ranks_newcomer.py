"""What someone new to several ranks does first, and is told of: a wrong group, other settings, a model not wrapped."""

from typing import Any

import pytest
from torch.nn.parallel import DistributedDataParallel

from bigbatch import Accumulator, BigStep, Options
from bigbatch.errors import ConfigurationError
from tests.ranks import run_on_ranks
from tests.test_ranks import OPTIMIZERS, mean, micro_batch, model
from tests.test_ranks_hard import refused


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
        f"group must be a torch.distributed.ProcessGroup, such as torch.distributed.group.WORLD; found {group!r}",
    )
