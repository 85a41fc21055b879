"""What micro-batches in lock-step put in another's place is one thing again; what is only looked at does not move."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from bigbatch import BigStep, Options
from bigbatch.lockstep.round import OwnParameters
from tests.support.reference import TOLERANCE, distance, sgd, trained
from tests.support.samples import rows, seeded

HIDDEN = 6


def between(norm: nn.Module) -> nn.Module:
    """A model with a norm in the middle."""
    return nn.Sequential(nn.Linear(3, HIDDEN), norm, nn.Tanh(), nn.Linear(HIDDEN, 4))


def step_of(model: nn.Module) -> BigStep:
    """In micro-batches of four, with nothing looked at before."""
    return BigStep(
        model,
        sgd(trained(model)),
        lambda model, batch: F.cross_entropy(model(batch["x"]), batch["label"]),
        micro_batch_size=4,
        options=Options(check=False),
    )


def test_parameters_that_were_replaced_are_put_back() -> None:
    """As by calls of functional_call that ended in another order than they began: the very ones, where they were."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    own = OwnParameters([model])
    before = dict(model.named_parameters())
    first, second = model[0], model[1]
    first._parameters["weight"] = nn.Parameter(torch.zeros(2, 3))
    del second._parameters["bias"]
    own.restore()
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)


def test_memory_that_was_exchanged_is_put_back() -> None:
    """The same for what a parameter holds."""
    model = nn.Linear(3, 2)
    own = OwnParameters([model])
    memory, value = model.weight.data_ptr(), model.weight.detach().clone()
    model.weight.data = torch.zeros(2, 3)
    own.restore()
    assert model.weight.data_ptr() == memory
    assert torch.equal(model.weight, value)


class Renewing(nn.BatchNorm1d):
    """Counts batches in a new tensor each time."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own name
        """Count, and normalise as ever."""
        count = self.num_batches_tracked
        assert count is not None
        if self.training:
            self.num_batches_tracked = count + 1
        return F.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1, self.eps
        )


def test_a_counter_that_each_micro_batch_replaces_counts_windows() -> None:
    """One batch for each update, as in one piece."""
    model = seeded(lambda: between(Renewing(HIDDEN)))()
    step = step_of(model)
    for number in range(3):
        update = step(rows(10, number))
        assert update.micro_batches > 1
        assert int(model.get_buffer("1.num_batches_tracked")) == number + 1


class Turning(nn.Module):
    """A weight that is another each time it is asked for in training, as a spectral norm's is."""

    asked: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("asked", torch.zeros(()))

    def forward(self, weight: Tensor) -> Tensor:
        """Count how often."""
        if self.training:
            self.asked += 1
        return weight * (1 + 0.01 * self.asked.clone())


def turning() -> nn.Module:
    """A BatchNorm with such a weight."""
    norm = nn.BatchNorm1d(HIDDEN)
    parametrize.register_parametrization(norm, "weight", Turning())
    return between(norm)


def test_a_computed_weight_of_a_norm_is_asked_for_by_its_micro_batches_alone() -> None:
    """To look up the layers of a model moves nothing: as often as there are micro-batches, it is computed."""
    model = seeded(turning)()
    counting = next(module for module in model.modules() if isinstance(module, Turning))
    before = int(counting.asked)
    update = step_of(model)(rows(10, 0))
    assert int(counting.asked) - before == update.micro_batches > 1


@pytest.mark.parametrize("norm", [Renewing, nn.BatchNorm1d])
def test_a_counter_of_ones_own_changes_nothing_else(norm: type[nn.BatchNorm1d]) -> None:
    """The update is that of one piece."""
    model, twin = (seeded(lambda: between(norm(HIDDEN)))() for _ in range(2))
    step_of(model)(rows(10, 0))
    optimizer, batch = sgd(trained(twin)), rows(10, 0)
    F.cross_entropy(twin(batch["x"]), batch["label"]).backward()
    optimizer.step()
    ours, true = ([p.detach() for p in trained(each)] for each in (model, twin))
    assert distance(ours, true) <= TOLERANCE
