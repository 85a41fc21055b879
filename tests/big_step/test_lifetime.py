"""A step that nobody holds is gone at once: its model, optimizer state and threads wait for no garbage collector."""

import gc
import weakref

import pytest
import torch.nn.functional as F
from torch import nn

from bigbatch import BigStep
from tests.support.reference import sgd, trained
from tests.support.samples import rows


@pytest.mark.parametrize("norm", [False, True])
def test_a_step_that_is_dropped_is_gone(norm: bool) -> None:
    """Without the collector, which a training loop may have turned off."""
    x = rows(8, 0)["x"]
    model = nn.Sequential(nn.Linear(x.shape[1], 4), nn.BatchNorm1d(4) if norm else nn.Tanh(), nn.Linear(4, 2)).to(x)
    step = BigStep(model, sgd(trained(model)), lambda m, b: F.mse_loss(m(b), m(b).detach() + 1), micro_batch_size=4)
    step(x)
    gone = weakref.ref(step)
    gc.collect()
    gc.disable()
    try:
        del step
        assert gone() is None
    finally:
        gc.enable()
