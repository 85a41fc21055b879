"""`Setup`: what it takes, what it refuses, and reading one from a file."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from bigbatch.cli.setup_file import read_setup
from bigbatch.errors import ConfigurationError
from bigbatch.recipes.training import expected_updates, train_setup
from bigbatch.setup import Setup


def loss_of(model: Any, batch: Any) -> Tensor:
    """Cross-entropy of (inputs, labels)."""
    return cross_entropy(model(batch[0]), batch[1])


def make(**settings: Any) -> Setup:
    """A setup of 70 samples, in float64, with what a test sets."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(70, 5, generator=generator, dtype=torch.float64)
    model = nn.Linear(5, 3, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    defaults: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.5),
        "data": TensorDataset(inputs, torch.randint(3, (70,), generator=generator)),
        "loss_fn": loss_of,
        "batch_size": 32,
    }
    return Setup(**{**defaults, **settings})


def weights(setup: Setup) -> Tensor:
    """All parameters in one vector."""
    return nn.utils.parameters_to_vector(setup.model.parameters()).detach()


def test_micro_batches_train_to_the_weights_of_whole_batches() -> None:
    """70 samples in batches of 32: the tail of 6 is one window, of micro-batches 4 + 2."""
    whole = make(shuffle=False, epochs=3)
    split = make(shuffle=False, epochs=3, micro_batch_size=4)
    one, other = train_setup(whole), train_setup(split)
    assert split.steps == 8
    assert [epoch.updates for epoch in other.epochs] == [epoch.updates for epoch in one.epochs] == [3, 3, 3]
    assert (weights(split) - weights(whole)).norm() <= 1e-12 * weights(whole).norm()
    assert [epoch.loss for epoch in other.epochs] == pytest.approx([epoch.loss for epoch in one.epochs], rel=1e-12)
    assert not torch.equal(weights(whole), weights(make()))


def test_clipping_scheduling_and_evaluation_are_the_setups() -> None:
    """The clip bounds a step, the scheduler counts updates, and evaluate sees an eval model without gradients."""
    seen = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        seen.append((model.training, torch.is_grad_enabled()))
        return {"answer": 42}

    setup = make(clip_norm=1e-3, epochs=2, micro_batch_size=8, evaluate=evaluate)
    scheduler = torch.optim.lr_scheduler.StepLR(setup.optimizer, 1, gamma=1.0)  # type: ignore[arg-type]
    object.__setattr__(setup, "scheduler", scheduler)
    before = weights(setup)
    training = train_setup(setup)
    assert (weights(setup) - before).norm() <= 6 * 0.5 * 1e-3
    assert scheduler.last_epoch == 6 == expected_updates(setup)
    assert seen == [(False, False)] * 2
    assert [epoch.metrics for epoch in training.epochs] == [{"answer": 42.0}] * 2


def test_every_update_is_told() -> None:
    """The callback hears the epoch of each update."""
    told: list[int] = []
    train_setup(make(epochs=2, micro_batch_size=16), on_update=told.append)
    assert told == [1, 1, 1, 2, 2, 2]


def test_a_model_that_returns_its_loss_needs_no_loss_fn() -> None:
    """The default is `model(**batch).loss`, and a batch that is no mapping is refused with the line to write."""

    class Wrapped(nn.Linear):
        def forward(self, inputs: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
            return SimpleNamespace(loss=cross_entropy(super().forward(inputs), labels))

    model = Wrapped(5, 3)
    samples = [{"inputs": torch.ones(5), "labels": torch.tensor(1)}] * 8
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    named = make(model=model, optimizer=optimizer, data=samples, loss_fn=None, batch_size=4)
    assert train_setup(named).epochs[0].updates == 2
    with pytest.raises(ConfigurationError, match=r"model\(\*\*batch\)\.loss.*list(.|\n)*loss_fn=lambda"):
        train_setup(make(loss_fn=None))


def test_a_stream_has_no_expected_length() -> None:
    """An IterableDataset is trained as it comes."""

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([(torch.ones(5, dtype=torch.float64), torch.tensor(1))] * 10)

    setup = make(data=Stream(), batch_size=4, micro_batch_size=2)
    assert expected_updates(setup) is None
    assert train_setup(setup).epochs[0].updates == 3


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"batch_size": 0}, "batch_size is a positive integer"),
        ({"batch_size": True}, "batch_size is a positive integer"),
        ({"epochs": 1.5}, "epochs is a positive integer"),
        ({"micro_batch_size": -1}, "micro_batch_size is a positive integer"),
        ({"batch_size": 16, "micro_batch_size": 32}, "Did you mean batch_size=32, micro_batch_size=16"),
        ({"batch_size": 100, "micro_batch_size": 16}, "Take batch_size=96 or 112"),
        ({"data": DataLoader([1, 2])}, r"data=loader\.dataset"),  # type: ignore[arg-type]
        ({"data": iter([1])}, r"data=list\(samples\)"),
    ],
)
def test_nonsense_is_refused_where_it_is_made(settings: dict[str, Any], text: str) -> None:
    """Each refusal says what to write instead."""
    with pytest.raises(ConfigurationError, match=text):
        make(**settings)


def test_a_file_is_read_by_its_function(tmp_path: Path) -> None:
    """Its neighbours can be imported, and what is wrong with it is said."""
    (tmp_path / "neighbour_of_setup.py").write_text("SIZE = 24\n")
    file = tmp_path / "mine.py"
    head = "from tests.test_setup import make\nfrom neighbour_of_setup import SIZE\n"
    file.write_text(head + "def setup():\n    return make(batch_size=SIZE)\n")
    assert read_setup(file).batch_size == 24
    for body, text in [
        ("", r"has no function setup\(\)(.|\n)*def setup\(\):"),
        ("setup = make()", r"not a function(.|\n)*def setup\(\): return"),
        ("def setup(): return 3", r"returned int, not a bigbatch\.Setup"),
        ("def setup(:", "line 3: "),
    ]:
        file.write_text(head + body)
        with pytest.raises(ConfigurationError, match=text):
            read_setup(file)
    with pytest.raises(ConfigurationError, match="there is no file"):
        read_setup(tmp_path / "other.py")
