"""Arguments that cannot work, and BatchNorm, are refused with what was found and what to type."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD

from bigbatch import Accumulator
from bigbatch.errors import BatchNormError, BigBatchError, ConfigurationError
from tests.support.reference import distance, sgd, trained, weights
from tests.support.samples import join, mlp, rows, seeded
from tests.support.training import Training

BATCHES = [rows(size, seed) for seed, size in enumerate((3, 2, 4))]


@pytest.mark.parametrize("steps", [0, -1, 1.5, 2.0, True, "4", None, math.inf])
def test_steps_must_be_a_positive_integer(steps: Any) -> None:
    """When the accumulator is made, and when steps are set."""
    text = "steps must be a positive integer, the number of micro-batches per update; found "
    with pytest.raises(ConfigurationError, match=text):
        Training(steps)
    training = Training(steps=2)
    with pytest.raises(ConfigurationError, match=text):
        training.accumulator.steps = steps
    assert training.accumulator.steps == 2


REFUSED: list[tuple[str, Any, str]] = [
    ("clip_norm", 0, r"clip_norm must be a positive number \(math.inf only reports the norm\) or None; found 0"),
    ("clip_norm", -1.0, "found -1.0"),
    ("clip_norm", math.nan, "found nan"),
    ("clip_norm", "1", "found '1'"),
    ("clip_norm", True, "found True"),
    ("gradient_dtype", torch.bfloat16, r"must be torch.float32, torch.float64 or None .*; found torch.bfloat16"),
    ("gradient_dtype", torch.int32, "found torch.int32"),
    ("gradient_dtype", "float32", "found 'float32'"),
    ("batch_norm", "ignore", 'batch_norm must be "refuse" or "micro"; found \'ignore\''),
    ("batch_norm", None, "found None"),
    ("counts", (3, 4), r"counts must be a function from a batch to its counts.*; found \(3, 4\)"),
    ("scaler", "amp", r"scaler must be a torch.amp.GradScaler; found 'amp'"),
    ("scheduler", 0.1, r"LRScheduler or a sequence; found float"),
]


@pytest.mark.parametrize(("name", "value", "text"), REFUSED, ids=[f"{name}={value}" for name, value, _ in REFUSED])
def test_an_argument_that_cannot_work(name: str, value: Any, text: str) -> None:
    """The error names the argument, what it may be and what it was."""
    with pytest.raises(ConfigurationError, match=text) as caught:
        Training(steps=2, **{name: value})
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, BigBatchError)


def test_an_optimizer_of_another_model_is_refused() -> None:
    """The usual cause is a model made anew after its optimizer; the error gives the line to write."""
    with pytest.raises(
        ConfigurationError,
        match=r"SGD shares no parameter with the model: it holds 4 tensors, none of them among the model's 4. .*\n"
        r".*SGD\(model.parameters\(\), ...\)",
    ):
        Accumulator(mlp()(), SGD(mlp()().parameters(), lr=0.1), steps=2)


def test_a_parameter_of_two_optimizers_is_refused() -> None:
    """Each parameter is stepped by one."""
    model = mlp()()
    with pytest.raises(ConfigurationError, match="4 parameters belong to two optimizers"):
        Accumulator(model, [sgd(trained(model)), sgd(trained(model))], steps=2)


NO_PAIR: list[tuple[Any, Any, str]] = [
    (mlp(), None, "model must be an nn.Module or a sequence of them; found function"),
    ([], None, "model is an empty sequence"),
    (None, [], "optimizer is an empty sequence"),
    (None, SGD, "optimizer must be a torch.optim.Optimizer or a sequence of them; found type"),
]


@pytest.mark.parametrize(("model", "optimizer", "text"), NO_PAIR)
def test_models_and_optimizers_must_be_such(model: Any, optimizer: Any, text: str) -> None:
    """A factory, a class, an empty list."""
    real = mlp()()
    with pytest.raises(ConfigurationError, match=text):
        Accumulator(real if model is None else model, sgd(trained(real)) if optimizer is None else optimizer, steps=2)


# BatchNorm.


class Residual(nn.Module):
    """A block whose norm is some way down."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(3, 5), norm, nn.ReLU())
        self.head = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The usual order: the norm is below a layer, where no graph's tail shows it."""
        return self.head(self.block(x))


NORMS: dict[str, type[nn.Module]] = {"BatchNorm1d": nn.BatchNorm1d, "SyncBatchNorm": nn.SyncBatchNorm}


@pytest.mark.parametrize("name", NORMS)
def test_training_mode_batch_norm_is_refused(name: str) -> None:
    """Before anything is added; the error names the layer and the three ways on."""
    model = seeded(lambda: Residual(NORMS[name](5)))()
    accumulator = Accumulator(model, sgd(trained(model)), steps=2)
    with pytest.raises(BatchNormError, match=rf"{name} 'block.1' is in training mode") as caught:
        accumulator.backward(trained(model)[0].pow(2).sum())  # SyncBatchNorm itself would ask for a process group
    assert "module.eval()" in str(caught.value)
    assert "GroupNorm or LayerNorm" in str(caught.value)
    assert 'Accumulator(..., batch_norm="micro")' in str(caught.value)
    assert all(p.grad is None for p in model.parameters())


def test_batch_norm_that_goes_back_to_training_is_refused_in_mid_window() -> None:
    """`model.train()` after a validation loop wakes a frozen norm."""
    model = seeded(lambda: Residual(nn.BatchNorm1d(5)))()
    model.eval()
    accumulator = Accumulator(model, sgd(trained(model)), steps=2)
    accumulator.backward(F.cross_entropy(model(BATCHES[0]["x"]), BATCHES[0]["label"]))
    model.train()
    with pytest.raises(BatchNormError, match=r"BatchNorm1d 'block\.1' is in training mode"):
        accumulator.backward(F.cross_entropy(model(BATCHES[1]["x"]), BATCHES[1]["label"]))


def test_frozen_batch_norm_is_exact() -> None:
    """In evaluation mode it is a constant per channel."""
    model, twin = (seeded(lambda: Residual(nn.BatchNorm1d(5)))().eval() for _ in range(2))
    accumulator = Accumulator(model, sgd(trained(model)), steps=3)
    for batch in accumulator.over(BATCHES):
        accumulator.backward(F.cross_entropy(model(batch["x"]), batch["label"]))
    F.cross_entropy(twin(join(BATCHES)["x"]), join(BATCHES)["label"]).backward()
    sgd(trained(twin)).step()
    assert distance(weights(model), weights(twin)) <= 1e-12


def test_batch_norm_without_running_statistics_is_refused_in_any_mode() -> None:
    """`track_running_stats=False` knows no other mean than the batch's."""
    model = seeded(lambda: Residual(nn.BatchNorm1d(5, track_running_stats=False)))().eval()
    accumulator = Accumulator(model, sgd(trained(model)), steps=2)
    with pytest.raises(BatchNormError):
        accumulator.backward(F.cross_entropy(model(BATCHES[0]["x"]), BATCHES[0]["label"]))


def test_micro_batch_norm_is_what_was_accepted() -> None:
    """`batch_norm="micro"`: the weighed sum of the micro-batches' own losses, by their own statistics."""
    model, twin, big = (seeded(lambda: Residual(nn.BatchNorm1d(5)))() for _ in range(3))
    accumulator = Accumulator(model, sgd(trained(model)), steps=3, batch_norm="micro")
    for batch in accumulator.over(BATCHES):
        accumulator.backward(F.cross_entropy(model(batch["x"]), batch["label"]))
    for batch in BATCHES:
        (F.cross_entropy(twin(batch["x"]), batch["label"]) * len(batch["x"]) / 9).backward()
    sgd(trained(twin)).step()
    F.cross_entropy(big(join(BATCHES)["x"]), join(BATCHES)["label"]).backward()
    sgd(trained(big)).step()
    assert distance(weights(model), weights(twin)) <= 1e-12
    assert distance(weights(model), weights(big)) > 1e-2
