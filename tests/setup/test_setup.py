"""`Setup`: what it takes, what it refuses, and reading one from a file."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, IterableDataset

from bigbatch import across
from bigbatch.cli.setup_file import read_setup
from bigbatch.errors import BatchError, BatchNormError, ConfigurationError, LossError
from bigbatch.recipes.setup_run import expected_updates, train_setup
from bigbatch.setup import UserCodeError
from tests.support.messages import approve
from tests.support.reference import distance, sgd, trained, weights
from tests.support.samples import seeded
from tests.support.setups import loss_of, make


def test_evaluate_sees_an_eval_model_without_gradients() -> None:
    """After each epoch."""
    seen = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        seen.append((model.training, torch.is_grad_enabled()))
        return {"answer": 42}

    training = train_setup(make(epochs=2, evaluate=evaluate))
    assert seen == [(False, False)] * 2
    assert [epoch.metrics for epoch in training.epochs] == [{"answer": 42.0}] * 2


class Named(nn.Linear):
    """A model that returns its loss."""

    def forward(self, inputs: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
        """As those of Hugging Face do."""
        return SimpleNamespace(loss=cross_entropy(super().forward(inputs), labels))


def test_a_model_that_returns_its_loss_needs_no_loss_fn() -> None:
    """The default is `model(**batch).loss`, and a batch that is no mapping is refused with the line to write."""
    model = Named(5, 3)
    samples = [{"inputs": torch.ones(5), "labels": torch.tensor(1)}] * 8
    named = make(model=model, optimizer=sgd(trained(model)), data=samples, loss_fn=None, batch_size=4)
    assert train_setup(named).epochs[0].updates == 2
    with pytest.raises(BatchError, match="not a mapping"):
        train_setup(make(loss_fn=None))


def contrastive(model: Any, batch: Any) -> Tensor:
    """Each sample against all, with its own one as the target."""
    scores = model(batch[0])
    own = across.offset() + torch.arange(len(scores))
    return cross_entropy(scores @ across.gather(scores * 0.5 + 1).T, own)


normed = seeded(lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)))
linear = seeded(lambda: nn.Linear(5, 3))


class Once(IterableDataset[Any]):
    """A stream that can be read once, and draws as it goes."""

    def __init__(self, samples: Any) -> None:
        self.samples = iter(samples)

    def __iter__(self) -> Any:
        for sample in self.samples:
            torch.rand(3)
            yield sample


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("micro_batch_size", [None, 8, 5])
@pytest.mark.parametrize(("kind", "loss_fn"), [(linear, loss_of), (normed, loss_of), (normed, contrastive)])
def test_micro_batches_train_to_the_weights_of_whole_batches(
    kind: Any, loss_fn: Any, micro_batch_size: int | None, streamed: bool
) -> None:
    """A last batch of 6, BatchNorm and `across`, statistics, clipping and a scheduler; a stream loses no sample."""
    data: Any = make().data
    model, true, epochs = kind(), kind(), 1 if streamed else 2
    ours, theirs = sgd(trained(model)), sgd(trained(true))
    schedulers = [StepLR(each, 1, gamma=0.9) for each in (ours, theirs)]
    given: dict[str, Any] = {"model": model, "optimizer": ours, "loss_fn": loss_fn, "scheduler": schedulers[0]}
    given |= {"data": Once(data) if streamed else data, "micro_batch_size": micro_batch_size, "clip_norm": 0.3}
    setup = make(**given, shuffle=False, epochs=epochs)
    assert expected_updates(setup) == (None if streamed else 6)
    told: list[int] = []
    training = train_setup(setup, on_update=told.append)
    assert training.lock_step or kind is linear or micro_batch_size is None
    assert told == [number for number in range(1, epochs + 1) for _ in range(3)]
    for _ in range(epochs):
        for batch in DataLoader(data, batch_size=32):
            theirs.zero_grad()
            loss_fn(true, batch).backward()
            nn.utils.clip_grad_norm_(true.parameters(), 0.3)
            theirs.step()
            schedulers[1].step()
    for found, wanted in zip(model.state_dict().values(), true.state_dict().values(), strict=True):
        assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("skip", [True, False])
def test_a_gradient_that_is_not_finite_is_skipped_where_the_setup_says_so(skip: bool) -> None:
    """One bad sample costs one update, or all weights."""
    samples = [(torch.ones(5, dtype=torch.float64), torch.tensor(1)) for _ in range(16)]
    samples[5][0][2] = torch.inf
    setup = make(data=samples, shuffle=False, batch_size=4, micro_batch_size=2, skip_nonfinite=skip)
    epoch = train_setup(setup).epochs[0]
    assert (epoch.updates, epoch.skipped) == ((3, 1) if skip else (4, 0))
    assert all(bool(p.isfinite().all()) for p in weights(setup.model)) is skip


RETURNED = {"bare": 0.9, "word": {"accuracy": "high"}, "many": {"accuracy": torch.ones(3)}}


@pytest.mark.parametrize("kind", RETURNED)
def test_evaluate_returns_numbers_by_name(kind: str) -> None:
    """Whatever else it returns is refused as evaluate's."""
    with pytest.raises(ConfigurationError) as caught:
        train_setup(make(evaluate=lambda _: RETURNED[kind]))
    approve("setup", f"evaluate {kind}", caught.value)


def test_a_stream_that_gives_nothing_is_refused() -> None:
    """Also in a later epoch, where one that was not begun anew has ended."""
    stream = Once([(torch.ones(5, dtype=torch.float64), torch.tensor(1))] * 4)
    with pytest.raises(ConfigurationError, match=r"The data gave no sample in epoch 2(.|\n)*__iter__"):
        train_setup(make(data=stream, epochs=2, batch_size=4))


def fails(*_: object) -> Any:
    """Stand for code of a user's that does not work."""
    raise KeyError


@pytest.mark.parametrize("name", ["loss_fn", "evaluate", "collate"])
def test_a_failure_of_the_users_own_code_says_which_call_it_was(name: str) -> None:
    """And keeps what was raised as its cause."""
    with pytest.raises(UserCodeError) as caught:
        train_setup(make(**{name: fails}))
    assert str(caught.value) == f"{'making a batch of data' if name == 'collate' else name} failed"
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("returned", [None, SimpleNamespace(loss=1), torch.ones(3)])
def test_what_is_no_loss_is_refused_as_loss_fns(returned: Any) -> None:
    """Before anything is trained."""
    with pytest.raises(LossError):
        train_setup(make(loss_fn=lambda _model, _batch: returned))


def test_what_a_setup_says_reaches_the_step() -> None:
    """The scaler grows with updates, BatchNorm is treated as asked, counts are not needed, and modes are kept."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaled, plain = make(micro_batch_size=8, shuffle=False, scaler=scaler), make(micro_batch_size=8, shuffle=False)
    train_setup(scaled)
    train_setup(plain)
    assert scaler.state_dict()["_growth_tracker"] == 3
    assert distance(weights(scaled.model), weights(plain.model)) <= 1e-12
    assert [train_setup(make(clip_norm=clip)).epochs[0].clipped for clip in (None, 1e-3, 1e3)] == [None, 3, 0]

    model = normed()
    settings = {"model": model, "optimizer": sgd(trained(model)), "micro_batch_size": 8}
    with pytest.raises(BatchNormError, match="is in training mode"):
        train_setup(make(**settings, batch_norm="refuse"))
    assert not train_setup(make(**settings, batch_norm="micro")).lock_step
    model[1].eval()  # type: ignore[index]
    train_setup(make(**settings, batch_norm="refuse", evaluate=lambda _: {}))
    assert [module.training for module in model.modules()] == [True, True, False, True]
    model.eval()
    train_setup(make(**settings))
    assert model.training


NONSENSE: dict[str, dict[str, Any]] = {
    "batch_size True": {"batch_size": True},
    "micro_batch_size -1": {"micro_batch_size": -1},
    "sizes swapped": {"batch_size": 16, "micro_batch_size": 32},
    "data of a loader": {"data": DataLoader([1, 2])},  # type: ignore[arg-type]
    "data of a path": {"data": "train.csv"},
    "data empty": {"data": []},
    "model of a class": {"model": nn.Linear},
    "model of several": {"model": [nn.Linear(5, 3)]},
    "loss_fn of a criterion": {"loss_fn": nn.MSELoss()},
    "loss_fn of one argument": {"loss_fn": lambda outputs: outputs},
}
CHECKED_ELSEWHERE: dict[str, Any] = {
    "optimizer": "sgd", "clip_norm": 0, "scheduler": "cosine", "collate": [1], "evaluate": lambda: {"a": 1},
    "batch_norm": "maybe", "scaler": 1024, "gradient_dtype": torch.int8, "skip_nonfinite": "yes",
}  # fmt: skip


@pytest.mark.parametrize("name", [*NONSENSE, *CHECKED_ELSEWHERE])
def test_nonsense_is_refused_where_it_is_made(name: str) -> None:
    """Each refusal says what was found and what to write instead; some texts are those of `arguments`."""
    with pytest.raises(ConfigurationError) as caught:
        make(**NONSENSE.get(name, {name: CHECKED_ELSEWHERE.get(name)}))
    if name in NONSENSE:
        approve("setup", name, caught.value)
    assert name in NONSENSE or name in str(caught.value)


def test_a_file_is_read_by_its_function(tmp_path: Path) -> None:
    """Its neighbors can be imported, and what is wrong with it is said."""
    (tmp_path / "neighbor_of_setup.py").write_text("SIZE = 24\n")
    file = tmp_path / "mine.py"
    head = "from tests.support.setups import make\nfrom neighbor_of_setup import SIZE\n"
    file.write_text(head + "def setup():\n    return make(batch_size=SIZE)\n")
    assert read_setup(file).batch_size == 24
    (tmp_path / "notes.txt").touch()
    cases = {"no setup": "", "setup of a number": "def setup(): return 3", "setup of arguments": "def setup(a): ..."}
    for name, body in {**cases, "file text": ""}.items():
        file.write_text(head + body)
        with pytest.raises(ConfigurationError) as caught:
            read_setup(tmp_path / "notes.txt" if name == "file text" else file)
        approve("setup", name, str(caught.value).replace(str(tmp_path), "FOLDER"))
