"""BatchNorm would normalize by the micro-batch: refused where it is awake, exact where it rests, or accepted."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import Accumulator
from bigbatch.errors import BatchNormError
from tests.support.messages import approve
from tests.support.reference import distance, sgd, trained, weights
from tests.support.samples import Batch, join, rows, seeded

BATCHES = [rows(size, seed) for seed, size in enumerate((3, 2, 4))]


def normed(kind: Any = nn.BatchNorm1d, *, tracks: bool = True) -> nn.Module:
    """A model with a norm some way down, where no graph's tail shows it; the same weights at each call."""
    norm = kind(5, track_running_stats=tracks)
    return seeded(
        lambda: nn.Sequential(OrderedDict(block=nn.Sequential(nn.Linear(3, 5), norm, nn.ReLU()), head=nn.Linear(5, 4)))
    )()


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """A mean over samples."""
    return F.cross_entropy(model(batch["x"]), batch["label"])


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.SyncBatchNorm])
def test_training_mode_is_refused(kind: Any) -> None:
    """Before anything is added; the error names the layer and the ways on."""
    model = normed(kind)
    accumulator = Accumulator(model, sgd(trained(model)), steps=2)
    with pytest.raises(BatchNormError) as caught:
        accumulator.backward(trained(model)[0].pow(2).sum())  # SyncBatchNorm itself would ask for a process group
    approve("accumulator", kind.__name__, caught.value)
    assert all(p.grad is None for p in model.parameters())


def test_any_mode_is_refused_without_running_statistics_and_training_in_mid_window() -> None:
    """`track_running_stats=False` knows no other mean than the batch's; `model.train()` wakes a frozen norm."""
    for model in (normed(tracks=False).eval(), normed().eval()):
        accumulator = Accumulator(model, sgd(trained(model)), steps=2)
        if next(model.buffers(), None) is not None:
            accumulator.backward(loss(model, BATCHES[0]))
            model.train()
        with pytest.raises(BatchNormError, match=r"BatchNorm1d 'block\.1'"):
            accumulator.backward(loss(model, BATCHES[1]))


@pytest.mark.parametrize("micro", [False, True])
def test_what_is_accepted(micro: bool) -> None:
    """At rest it is a constant per channel, and exact; `batch_norm="micro"` is the weighed sum of micro-batches."""
    model, twin, big = (normed().train(micro) for _ in range(3))
    accumulator = Accumulator(model, sgd(trained(model)), steps=3, batch_norm="micro" if micro else "refuse")
    for batch in accumulator.over(BATCHES):
        accumulator.backward(loss(model, batch))
        (loss(twin, batch) * len(batch["x"]) / 9).backward()
    loss(big, join(BATCHES)).backward()
    for each in (twin, big):
        sgd(trained(each)).step()
    assert distance(weights(model), weights(twin)) <= 1e-12
    far = distance(weights(model), weights(big))
    assert far > 1e-2 if micro else far <= 1e-12


def test_a_refused_first_loss_opens_no_window() -> None:
    """BatchNorm of a model that nobody told of: no update of nothing, no step of the scheduler."""
    model, judge = normed().eval(), nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)).double()
    optimizer = sgd(trained(model))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    accumulator = Accumulator(model, optimizer, steps=2, scheduler=scheduler)
    for batch in [*accumulator.over(BATCHES[:1]), BATCHES[0]]:
        with pytest.raises(BatchNormError):
            accumulator.backward(judge(model(batch["x"])).mean())
        assert accumulator.remaining == 2
    assert accumulator.flush() is None
    assert scheduler.last_epoch == 0
    optimizer.step()  # outside of windows it is the user's own
    assert next(iter(accumulator.over(BATCHES))) is BATCHES[0]
