"""`Setup`: what it takes, what it refuses, and reading one from a file."""

import dataclasses
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset

from bigbatch import Accumulator, across, counted
from bigbatch.cli.setup_file import read_setup
from bigbatch.errors import BatchError, BatchNormError, ConfigurationError, LossError
from bigbatch.options import Options
from bigbatch.recipes.training import expected_updates, train_setup
from bigbatch.recipes.user_code import UserCodeError
from bigbatch.setup import Setup
from tests.support.messages import approve
from tests.support.setups import loss_of, make


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
    with pytest.raises(BatchError, match="not a mapping"):
        train_setup(make(loss_fn=None))


def test_a_stream_has_no_expected_length() -> None:
    """An IterableDataset is trained as it comes."""

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([(torch.ones(5, dtype=torch.float64), torch.tensor(1))] * 10)

    setup = make(data=Stream(), batch_size=4, micro_batch_size=2)
    assert expected_updates(setup) is None
    assert train_setup(setup).epochs[0].updates == 3


def with_batch_norm() -> dict[str, Any]:
    """A model with BatchNorm, and its optimizer."""
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5)}


def test_what_an_accumulator_takes_a_setup_takes() -> None:
    """Under the same names, with the same defaults."""
    theirs = inspect.signature(Accumulator).parameters
    ours = {field.name: field.default for field in dataclasses.fields(Setup)}
    of_loops = {
        "model",
        "optimizer",
        "steps",
        "group",
        "mesh",
        "overlap",
    }  # ranks are torchrun's, and there is no DDP to overlap
    for name in set(theirs) - of_loops - {"batch_norm"}:
        assert ours[name] == theirs[name].default, name
    assert ours["batch_norm"] == Options().batch_norm  # what an Accumulator refuses, a BigStep does


def test_batch_norm_is_refused_or_accepted_where_the_setup_says_so() -> None:
    """In the words of a Setup."""
    settings = {**with_batch_norm(), "micro_batch_size": 8}
    with pytest.raises(BatchNormError) as caught:
        train_setup(make(**settings, batch_norm="refuse"))
    approve("setup", "batch_norm refused", caught.value)
    training = train_setup(make(**settings, batch_norm="micro"))
    assert training.epochs[0].updates == 3
    assert not training.lock_step


def contrastive(model: Any, batch: Any) -> Tensor:
    """Each sample against all, with its own one as the target."""
    scores = model(batch[0])
    own = across.offset() + torch.arange(len(scores))
    return cross_entropy(scores @ across.gather(scores * 0.5 + 1).T, own)


def normed() -> nn.Module:
    """A model with BatchNorm, the same every time."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()


def linear() -> nn.Module:
    """A model without, the same every time."""
    torch.manual_seed(5)
    return nn.Linear(5, 3).double()


class Once(IterableDataset[Any]):
    """A stream that can be read once, and draws as it goes."""

    def __init__(self, samples: Any) -> None:
        self.samples = iter(samples)

    def __iter__(self) -> Any:
        for inputs, label in self.samples:
            torch.rand(3)
            yield inputs, label


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("micro_batch_size", [None, 8, 5])
@pytest.mark.parametrize(("kind", "loss_fn"), [(normed, loss_of), (linear, contrastive), (normed, contrastive)])
def test_coupled_samples_train_to_the_weights_of_whole_batches(
    kind: Any, loss_fn: Any, micro_batch_size: int | None, streamed: bool
) -> None:
    """BatchNorm and `across`, a last batch of 6, statistics, clipping and a scheduler; a stream loses no sample."""
    data: Any = make().data
    model, epochs = kind(), 1 if streamed else 2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    setup = make(
        model=model,
        optimizer=optimizer,
        loss_fn=loss_fn,
        data=Once(data) if streamed else data,
        micro_batch_size=micro_batch_size,
        shuffle=False,
        epochs=epochs,
        clip_norm=0.3,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9),
    )
    told: list[int] = []
    training = train_setup(setup, on_update=told.append)
    assert training.lock_step or micro_batch_size is None  # of one micro-batch there is nothing to join
    assert told == [number for number in range(1, epochs + 1) for _ in range(3)]
    true = kind()
    optimizer = torch.optim.SGD(true.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    for _ in range(epochs):
        for batch in DataLoader(data, batch_size=32):
            optimizer.zero_grad()
            loss_fn(true, batch).backward()
            nn.utils.clip_grad_norm_(true.parameters(), 0.3)
            optimizer.step()
            scheduler.step()
    for found, wanted in zip(model.state_dict().values(), true.state_dict().values(), strict=True):
        assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-12)


def test_a_loss_may_ask_for_other_samples_later() -> None:
    """From the second update on: the weights are still those of whole batches."""

    def trained(micro_batch_size: int | None) -> Tensor:
        def loss_fn(model: Any, batch: Any) -> Tensor:
            is_first = weights(setup).equal(first)
            return loss_of(model, batch) if is_first else contrastive(model, batch)

        setup = make(loss_fn=loss_fn, micro_batch_size=micro_batch_size, shuffle=False)
        first = weights(setup).clone()
        assert train_setup(setup).lock_step or micro_batch_size is None
        return weights(setup)

    whole = trained(None)
    assert (trained(8) - whole).norm() <= 1e-12 * whole.norm()


@pytest.mark.parametrize("streamed", [False, True])
def test_a_batch_need_not_be_a_multiple(streamed: bool) -> None:
    """Micro-batches of a batch differ by one at most, and updates are those of the batch."""
    data: Any = make().data
    settings = {"shuffle": False, "epochs": 1, "loss_fn": loss_of}
    whole, split = make(**settings), make(**settings, micro_batch_size=5, data=Once(data) if streamed else data)
    assert (split.steps, split.sizes) == (7, [5, 5, 5, 5, 4, 4, 4])
    one, other = train_setup(whole), train_setup(split)
    assert one.epochs[0].updates == other.epochs[0].updates == 3
    assert (weights(split) - weights(whole)).norm() <= 1e-12 * weights(whole).norm()
    cut = [len(batch[1]) for batch in dataclasses.replace(split, data=data).micro_batches()]
    assert cut == [5, 5, 5, 5, 4, 4, 4, 5, 5, 5, 5, 4, 4, 4, 5, 1]


def test_a_frozen_layer_stays_frozen_and_a_model_in_eval_mode_is_trained() -> None:
    """A BatchNorm in eval mode is no reason to refuse, also after evaluate; a whole model asleep is woken."""
    settings = with_batch_norm()
    modes = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        modes.append([module.training for module in model.modules()])
        return {}

    settings["model"][1].eval()
    setup = make(**settings, micro_batch_size=8, epochs=2, evaluate=evaluate)
    train_setup(setup)
    assert [module.training for module in setup.model.modules()] == [True, True, False, True]
    assert modes == [[False] * 4] * 2
    asleep = make()
    asleep.model.eval()
    train_setup(asleep)
    assert asleep.model.training


@pytest.mark.parametrize("told", [False, True])
def test_several_counts_train_to_the_weights_of_whole_batches(told: bool) -> None:
    """With the counts of the terms, as an `Accumulator` needs them, and without."""

    def loss_fn(model: Any, batch: Any) -> Tensor:
        outputs = model(batch[0])
        some = batch[1] > 0
        return cross_entropy(outputs, batch[1]) + counted(outputs[some].square().mean(), 3 * int(some.sum()))

    def counts(batch: Any) -> tuple[int, int]:
        return len(batch[1]), 3 * int((batch[1] > 0).sum())

    whole = make(shuffle=False, loss_fn=loss_fn)
    split = make(shuffle=False, loss_fn=loss_fn, micro_batch_size=4, counts=counts if told else None)
    train_setup(whole)
    train_setup(split)
    assert (weights(split) - weights(whole)).norm() <= 1e-12 * weights(whole).norm()


def test_a_scaler_is_stepped_once_per_update() -> None:
    """Its growth counts the updates, not the micro-batches, and the weights are those without it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaled, plain = make(micro_batch_size=8, shuffle=False, scaler=scaler), make(micro_batch_size=8, shuffle=False)
    train_setup(scaled)
    train_setup(plain)
    assert scaler.state_dict()["_growth_tracker"] == 3
    assert (weights(scaled) - weights(plain)).norm() <= 1e-12 * weights(plain).norm()


def test_gradients_are_added_up_in_the_dtype_given() -> None:
    """bf16 parameters end elsewhere where their gradients are summed in bf16."""

    def trained(**settings: Any) -> Tensor:
        model = nn.Linear(5, 3, dtype=torch.bfloat16)
        nn.init.constant_(model.weight, 0.5)
        nn.init.zeros_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loss_fn = lambda model, batch: cross_entropy(model(batch[0].bfloat16()).float(), batch[1])  # noqa: E731
        setup = make(
            model=model, optimizer=optimizer, loss_fn=loss_fn, shuffle=False, micro_batch_size=1, epochs=3, **settings
        )
        train_setup(setup)
        return weights(setup)

    assert torch.equal(trained(), trained(gradient_dtype=torch.float32))
    assert not torch.equal(trained(), trained(gradient_dtype=None))


@pytest.mark.parametrize("skip", [True, False])
def test_a_gradient_that_is_not_finite_is_skipped_where_the_setup_says_so(skip: bool) -> None:
    """One bad sample costs one update, or all weights."""
    samples = [(torch.ones(5, dtype=torch.float64), torch.tensor(1)) for _ in range(16)]
    samples[5][0][2] = torch.inf
    setup = make(data=samples, shuffle=False, batch_size=4, micro_batch_size=2, skip_nonfinite=skip)
    epoch = train_setup(setup).epochs[0]
    assert (epoch.updates, epoch.skipped) == ((3, 1) if skip else (4, 0))
    assert bool(torch.isfinite(weights(setup)).all()) is skip


def test_clipped_updates_are_counted() -> None:
    """None where nothing is clipped, all where the clip is tiny, none of them where it is huge."""
    assert [train_setup(make(clip_norm=clip)).epochs[0].clipped for clip in (None, 1e-3, 1e3)] == [None, 3, 0]


NONSENSE: dict[str, dict[str, Any]] = {
    "batch_size 0": {"batch_size": 0},
    "batch_size True": {"batch_size": True},
    "epochs of a float": {"epochs": 1.5},
    "micro_batch_size -1": {"micro_batch_size": -1},
    "sizes swapped": {"batch_size": 16, "micro_batch_size": 32},
    "data of a loader": {"data": DataLoader([1, 2])},  # type: ignore[arg-type]
    "data of an iterator": {"data": iter([1])},
    "data of a path": {"data": "train.csv"},
    "data of a dict": {"data": {"inputs": torch.ones(3)}},
    "data empty": {"data": []},
    "data of columns": {"data": (torch.ones(70, 5), torch.ones(70))},
    "model of a class": {"model": nn.Linear},
    "model of a name": {"model": "bert"},
    "model of several": {"model": [nn.Linear(5, 3)]},
    "optimizer of a class": {"optimizer": torch.optim.SGD},
    "optimizer of a name": {"optimizer": "sgd"},
    "optimizer of another model": {"optimizer": torch.optim.SGD(nn.Linear(5, 3).parameters())},
    "loss_fn of a name": {"loss_fn": "mse"},
    "loss_fn of a criterion": {"loss_fn": nn.MSELoss()},
    "loss_fn of a functional": {"loss_fn": cross_entropy},
    "loss_fn of one argument": {"loss_fn": lambda outputs: outputs},
    "evaluate of a number": {"evaluate": 0.9},
    "evaluate of no argument": {"evaluate": lambda: {"a": 1}},
    "collate of a list": {"collate": [1]},
    "counts of a tuple": {"counts": (3, 4)},
    "clip_norm 0": {"clip_norm": 0},
    "scheduler of a name": {"scheduler": "cosine"},
    "scaler of a number": {"scaler": 1024},
    "gradient_dtype of integers": {"gradient_dtype": torch.int8},
    "batch_norm maybe": {"batch_norm": "maybe"},
    "skip_nonfinite of a word": {"skip_nonfinite": "yes"},
}
OTHERS = ("model of a name", "optimizer of", "clip_norm", "scheduler", "scaler", "gradient_dtype", "skip_nonfinite")


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_refused_where_it_is_made(name: str) -> None:
    """Each refusal says what was found and what to write instead; those of `arguments` are approved there."""
    with pytest.raises(ConfigurationError) as caught:
        make(**NONSENSE[name])
    if not name.startswith(OTHERS) or name.endswith("a class"):
        approve("setup", name, caught.value)


def test_samples_that_only_look_like_columns_are_samples() -> None:
    """Two tensors of one shape are two samples, and with a collate of one's own anything is."""
    make(data=(torch.ones(5), torch.ones(5)))
    make(data=(torch.ones(70, 5), torch.ones(70)), collate=lambda samples: samples)


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda _, __: None,
        lambda _, __: 0.5,
        lambda _, __: SimpleNamespace(loss=1),
        lambda m, b: (loss_of(m, b), 1),
        lambda m, b: m(b[0]),
        lambda m, b: loss_of(m, b).detach(),
        lambda m, b: loss_of(m, b) * 1j,
    ],
    ids=["none", "number", "outputs", "extras", "several", "detached", "complex"],
)
def test_a_loss_that_is_none_is_refused_as_loss_fns(loss_fn: Any, request: pytest.FixtureRequest) -> None:
    """The message speaks of loss_fn, which the user wrote."""
    with pytest.raises(LossError, match=r"^loss_fn: ") as caught:
        train_setup(make(loss_fn=loss_fn))
    name = request.node.callspec.id
    if name in {"none", "number", "outputs", "extras"}:
        approve("setup", f"loss of {name}", caught.value)


def test_a_loss_that_cannot_be_read_is_settled_inside_loss_fn() -> None:
    """Not by the count= of an accumulator, which nobody has here."""

    class Opaque(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, outputs: Tensor) -> Tensor:
            return outputs.clone()

        @staticmethod
        def backward(_: Any, *gradients: Tensor) -> Any:
            return gradients[0]

    def loss_fn(model: Any, batch: Any) -> Tensor:
        loss: Tensor = Opaque.apply(loss_of(model, batch))  # type: ignore[no-untyped-call]
        return loss

    with pytest.raises(LossError, match=r"^loss_fn: (.|\n)*counted") as caught:
        train_setup(make(loss_fn=loss_fn, micro_batch_size=8))
    assert "accumulator" not in str(caught.value)


def test_a_model_without_a_loss_of_its_own_is_told_so() -> None:
    """Without loss_fn, outputs need a .loss, and a .loss needs labels."""
    samples = [{"input": torch.ones(5, dtype=torch.float64)}] * 8
    with pytest.raises(BatchError, match=r"a Tensor without a loss"):
        train_setup(make(data=samples, loss_fn=None))

    class Unlabelled(nn.Linear):
        def forward(self, input: Tensor) -> Any:  # noqa: A002 - a name that Linear has
            super().forward(input)
            return SimpleNamespace(loss=None)

    model = Unlabelled(5, 3, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(BatchError, match=r"returned no loss"):
        train_setup(make(model=model, optimizer=optimizer, data=samples, loss_fn=None))


@pytest.mark.parametrize(
    "returned", [0.9, {"accuracy": "high"}, {"accuracy": torch.ones(3)}], ids=["bare", "word", "many"]
)
def test_evaluate_returns_numbers_by_name(returned: object, request: pytest.FixtureRequest) -> None:
    """Whatever else it returns is refused as evaluate's."""
    with pytest.raises(ConfigurationError) as caught:
        train_setup(make(evaluate=lambda _: returned))
    approve("setup", f"evaluate {request.node.callspec.id}", caught.value)


def test_a_stream_that_gives_nothing_is_refused() -> None:
    """Also in a later epoch, where one that was not begun anew has ended."""

    class Once(IterableDataset[Any]):
        def __init__(self) -> None:
            self.samples = iter([(torch.ones(5, dtype=torch.float64), torch.tensor(1))] * 4)

        def __iter__(self) -> Any:
            return self.samples

    with pytest.raises(ConfigurationError, match=r"The data gave no sample in epoch 2(.|\n)*__iter__"):
        train_setup(make(data=Once(), epochs=2, batch_size=4))


def fails(*_: object) -> Any:
    """Stand for code of a user's that does not work."""
    raise KeyError("nope")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"loss_fn": fails}, "loss_fn failed in epoch 1, update 1"),
        ({"evaluate": fails}, "evaluate failed after epoch 1"),
        ({"collate": fails}, "making a batch of data failed in epoch 1, update 1"),
    ],
)
def test_a_failure_of_the_users_own_code_says_which_call_it_was(settings: dict[str, Any], text: str) -> None:
    """And keeps what was raised as its cause."""
    with pytest.raises(UserCodeError) as caught:
        train_setup(make(**settings))
    assert str(caught.value) == text
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_failing_backward_says_so() -> None:
    """The graph is the user's too."""

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, outputs: Tensor) -> Tensor:
            return outputs.clone()

        @staticmethod
        def backward(*_: Any) -> Any:
            raise ArithmeticError

    def loss_fn(model: Any, batch: Any) -> Tensor:
        return counted(Broken.apply(loss_of(model, batch)), len(batch[1]))  # type: ignore[no-untyped-call]

    with pytest.raises(UserCodeError, match="the loss's backward, or the update after it, failed in epoch 1, update"):
        train_setup(make(loss_fn=loss_fn))


def test_a_file_is_read_by_its_function(tmp_path: Path) -> None:
    """Its neighbours can be imported, and what is wrong with it is said."""
    (tmp_path / "neighbour_of_setup.py").write_text("SIZE = 24\n")
    file = tmp_path / "mine.py"
    head = "from tests.support.setups import make\nfrom neighbour_of_setup import SIZE\n"
    file.write_text(head + "def setup():\n    return make(batch_size=SIZE)\n")
    assert read_setup(file).batch_size == 24
    for name, body in {
        "no setup": "",
        "setup misspelt": "def get_setup(): return make()",
        "setup of a value": "setup = make()",
        "setup of a number": "def setup(): return 3",
        "setup of arguments": "def setup(arguments): return make()",
    }.items():
        file.write_text(head + body)
        refused(name, file)
    (tmp_path / "notes.txt").touch()
    paths = {
        "other": "other.py",
        "misspelt": "Mime.py",
        "nowhere": "nowhere/mine.py",
        "folder": "",
        "text": "notes.txt",
    }
    for name, path in paths.items():
        refused(f"file {name}", tmp_path / path)


def refused(name: str, path: Path) -> None:
    """See that a file is refused; texts with paths of this machine are shortened."""
    with pytest.raises(ConfigurationError) as caught:
        read_setup(path)
    folder = str(path if path.is_dir() else path.parent.parent if "nowhere" in name else path.parent)
    approve("setup", name, str(caught.value).replace(folder, "FOLDER"))
