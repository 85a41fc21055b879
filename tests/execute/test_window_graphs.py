"""Windows in lock-step that are replayed whole, on emulated graphs: always the big batch's update."""

import copy
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from bigbatch import BigStep, Options, across
from bigbatch.execute.graph_replay import Limits, Replayed
from tests.support.emulated_graphs import gave_up, whole_emulated
from tests.support.reference import distance

Batch = dict[str, Any]
Loss = Callable[[Any, Batch], Any]


class Config:
    """Settings, as models have them."""

    def __init__(self) -> None:
        self.scale = 1.0


class Norms(nn.Module):
    """Convolutions, norms and a way around them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.second = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4))
        self.head, self.last = nn.Linear(4, 3), nn.SiLU()
        self.function: Callable[[Tensor], Tensor] = torch.cos
        self.scales, self.settings, self.config = [1.0], {"scale": 1.0}, Config()
        self.idle = nn.Linear(2, 2)  # without a gradient: one of zero would let it decay

    def forward(self, x: Tensor) -> Tensor:
        """(n, 2, h, w) → (n, 3)."""
        x = self.first(x)
        x = self.function(self.last(x + self.second(x)).mean((2, 3)))
        found: Tensor = self.head(x * (self.scales[0] * self.settings["scale"] * self.config.scale))
        return found


class Towers(nn.Module):
    """Two of them, and a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))
        self.other, self.scale = nn.Linear(6, 4), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return both embeddings, and what their products are multiplied with."""
        return F.normalize(self.one(x), dim=1), F.normalize(self.other(y), dim=1), self.scale.exp()


def classified(model: Any, batch: Batch) -> Tensor:
    """A mean over targets, of which some do not count."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


def contrasted(model: Any, batch: Batch) -> Tensor:
    """Each row against all."""
    one, other, scale = model(batch["x"], batch["y"])
    mine = across.offset() + torch.arange(len(one))
    rows = F.cross_entropy(scale * one @ across.gather(other).T, mine)
    return (rows + F.cross_entropy(scale * other @ across.gather(one).T, mine)) / 2


def images(number: int, seed: int) -> Batch:
    """Return images; every third has no target."""
    by = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (number,), generator=by)
    labels[::3] = -100
    return {"x": torch.randn(number, 2, 4, 4, generator=by, dtype=torch.float64), "y": labels}


def pairs(number: int, seed: int) -> Batch:
    """Return what belongs together."""
    by = torch.Generator().manual_seed(seed)
    return {name: torch.randn(number, n, generator=by, dtype=torch.float64) for name, n in (("x", 5), ("y", 6))}


class Twins:
    """A model that a step trains by replays, and one that sees whole batches."""

    def __init__(self, model: nn.Module, loss: Loss, patch: pytest.MonkeyPatch, size: int = 3, **options: Any) -> None:
        self.mine, self.true, self.loss = model.double(), copy.deepcopy(model).double(), loss
        self._optimizers = self._sgd(self.mine), self._sgd(self.true)
        self.step = BigStep(
            self.mine, self._optimizers[0], loss, micro_batch_size=size, clip_norm=1.0, options=Options(**options)
        )
        self.whole: Replayed = whole_emulated(self.step, patch)

    @staticmethod
    def _sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)

    def optimize_what_is_there(self) -> None:
        """Have the optimizers train the parameters that the models have now."""
        for optimizer, model in zip(self._optimizers, (self.mine, self.true), strict=True):
            optimizer.param_groups[0]["params"] = list(model.parameters())

    def both(self, change: Callable[[Any], object]) -> None:
        """Change both models."""
        change(self.mine)
        change(self.true)

    def update(self, batch: Batch) -> Any:
        """Make one update of each; they must agree."""
        found = self.step(batch)
        loss = self.loss(self.true, batch)
        loss = loss[0] if isinstance(loss, tuple) else loss
        assert abs(float(found.loss) - loss.item()) < 1e-12
        loss.backward()
        nn.utils.clip_grad_norm_([p for p in self.true.parameters() if p.requires_grad], 1.0)
        self._optimizers[1].step()
        self._optimizers[1].zero_grad()
        mine, true = (list(model.state_dict().values()) for model in (self.mine, self.true))
        for one, other in zip(mine, true, strict=True):
            assert distance([one.double()], [other.double()], 1e-3) < 1e-12
        return found

    def updates(self, sizes: Sequence[int], make: Callable[[int, int], Batch] = images) -> None:
        """Make some updates of batches that differ."""
        for seed, size in enumerate(sizes):
            self.update(make(size, seed))


@settings(max_examples=15, deadline=None)
@given(
    size=st.integers(1, 4),
    sizes=st.lists(st.sampled_from([4, 7, 8]), min_size=3, max_size=7),
    case=st.sampled_from(["norms", "pairs kept", "pairs run again"]),
    seed=st.integers(0, 99),
)
def test_a_replay_is_the_big_batch(size: int, sizes: list[int], case: str, seed: int) -> None:
    """Whatever batches come in whatever order, launched, captured or replayed."""
    torch.manual_seed(seed)
    with pytest.MonkeyPatch.context() as patch:
        if case == "norms":
            twins = Twins(Norms(), classified, patch, size)
            twins.updates(sizes)
        else:
            kept = "keep" if case == "pairs kept" else "auto"
            twins = Twins(Towers(), contrasted, patch, size, activations=kept)
            twins.updates(sizes, pairs)
        assert twins.whole.launches == len(set(sizes))
        assert len(twins.whole.captured) == sum(sizes.count(each) > 1 for each in set(sizes))


def test_what_is_captured_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's own code runs when a shape comes first, once more to measure it, and when it is captured."""
    calls: list[int] = []

    def loss(model: Any, batch: Batch) -> Tensor:
        if model is twins.mine:
            calls.append(len(batch["x"]))
        return classified(model, batch)

    twins = Twins(Norms(), loss, monkeypatch, check=False)
    twins.updates([8] * 5)
    assert calls == [3, *[3, 3, 2] * 2]
    assert twins.whole.replays == 3


CHANGES: dict[str, Callable[[Any], object]] = {
    "momentum": lambda model: setattr(model.first[1], "momentum", 0.5),
    "list": lambda model: model.scales.__setitem__(0, 0.5),
    "dict": lambda model: model.settings.update(scale=0.5),
    "object": lambda model: setattr(model.config, "scale", 0.5),
    "layer": lambda model: setattr(model, "last", nn.Tanh()),
    "function": lambda model: setattr(model, "function", torch.sin),
    "hook": lambda model: model.head.register_forward_hook(lambda *given: given[-1] * 2),
    "gradient hook": lambda model: model.head.weight.register_hook(lambda gradient: gradient * 2),
    "frozen norm": lambda model: model.second[1].eval(),
    "frozen weight": lambda model: model.head.bias.requires_grad_(False),
    "parameter": lambda model: setattr(model.head, "weight", nn.Parameter(model.head.weight.detach() * 2)),
    "data": lambda model: setattr(model.head.weight, "data", model.head.weight.data * 2),
    "assigned": lambda model: model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()}, assign=True),
    "buffer": lambda model: setattr(model.first[1], "running_mean", torch.ones(4, dtype=torch.float64)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_a_change_between_windows_is_seen(change: Callable[[Any], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph would keep numbers and addresses as they were: it is captured anew."""
    twins = Twins(Norms(), classified, monkeypatch)
    twins.updates([8] * 3)
    assert twins.whole.replays == 1
    with torch.no_grad():
        twins.both(change)
    twins.optimize_what_is_there()
    twins.updates([8] * 4)
    assert twins.whole.launches == 2


def test_a_number_in_the_batch_is_a_part_of_its_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is frozen in what was captured, so another one is another window."""

    def scaled(model: Any, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"]) * batch["by"], batch["y"])

    twins = Twins(Norms(), scaled, monkeypatch)
    for seed, by in enumerate([1.0, 1.0, 2.0, 1.0, 2.0, 2.0]):
        twins.update({**images(8, seed), "by": by})
    assert twins.whole.replays == 2


def test_extras_come_back_as_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next replay writes to the same places."""

    def with_logits(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = model(batch["x"])
        return F.cross_entropy(logits, batch["y"]), logits

    twins = Twins(Norms(), with_logits, monkeypatch)
    updates = [twins.update(images(8, seed)) for seed in range(4)]
    true = copy.deepcopy(twins.true)
    before = updates[-1].extras.clone()
    expected = true(images(8, 4)["x"])  # of the weights before that update
    found = twins.update(images(8, 4)).extras
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    assert torch.equal(updates[-1].extras, before)


def test_updates_keep_what_they_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next replay writes a loss and a count to the same places."""
    twins = Twins(Norms(), classified, monkeypatch)
    updates = [twins.update(images(8, seed)) for seed in range(3)]
    told = [(float(each.loss), float(each.count)) for each in updates]
    for seed in range(3, 6):
        batch = images(8, seed)
        batch["y"][1] = -100
        twins.update(batch)
    assert [(float(each.loss), float(each.count)) for each in updates] == told


def test_low_precision_weights_add_up_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their gradients are widened, and lie at one place, too."""
    torch.manual_seed(0)
    models = [Norms() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    steps = []
    for model in models:
        for layer in (model.first[0], model.second[0], model.head):
            layer.bfloat16()

        def loss(model: Any, batch: Batch) -> Tensor:
            x = F.silu(model.first[1](model.first[0](batch["x"].bfloat16()).float()))
            return F.cross_entropy(model.head(x.mean((2, 3)).bfloat16()).float(), batch["y"])

        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        steps.append(BigStep(model, optimizer, loss, micro_batch_size=3, options=Options(check=False)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(3):
            steps[0](images(8, seed))
        whole = whole_emulated(steps[1], monkeypatch)
        for seed in range(3):
            steps[1](images(8, seed))
    assert whole.replays == 1
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert distance([other.detach().double()], [one.detach().double()], 1e-3) < 1e-2  # bf16 rounds


class Noisy(Norms):
    """Draws a number of the host in each forward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.by, self.other = kind, random.Random(0), np.random.default_rng(0)  # noqa: S311 - no secrets

    def forward(self, x: Tensor) -> Tensor:
        """(n, 2, h, w) → (n, 3)."""
        draw: dict[str, Callable[[], float]] = {
            "torch": lambda: torch.rand(()).item(),
            "python": lambda: random.gauss(0, 1),
            "own": lambda: self.by.gauss(0, 1),
            "numpy's own": lambda: float(self.other.normal()),
        }
        return super().forward(x + 0.1 * draw[self.kind]())


@pytest.mark.parametrize("kind", ["torch", "python", "own", "numpy's own"])
def test_random_numbers_are_not_captured(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replay would have to draw other ones; it is launched, which a warning says, and draws as before."""

    def trained(*, whole: bool) -> list[Tensor]:
        torch.manual_seed(0)
        random.seed(0)
        model = Noisy(kind).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        step = BigStep(model, optimizer, classified, micro_batch_size=3, options=Options(check=False))
        if whole:
            whole_emulated(step, monkeypatch)
        for seed in range(4):
            step(images(8, seed))
        return [p.detach().clone() for p in model.parameters()]

    with pytest.warns(UserWarning, match="it draws random numbers") as caught:
        found = trained(whole=True)
    assert sum("draws random numbers" in str(each.message) for each in caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert all(map(torch.equal, found, trained(whole=False)))


class Meta:
    """Something that comes with a batch, or goes out of a loss."""

    def __init__(self, value: Any) -> None:
        self.value = value


def test_what_is_hidden_in_an_object_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be what it was, or the graph's own memory."""

    def scaled(model: Any, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"]) * batch["meta"].value, batch["y"])

    def telling(model: Any, batch: Batch) -> tuple[Tensor, Meta]:
        logits = model(batch["x"])
        return F.cross_entropy(logits, batch["y"]), Meta(logits)

    twins, meta = Twins(Norms(), scaled, monkeypatch), Meta(1.0)
    with pytest.warns(UserWarning, match="its batch holds a Meta"):
        twins.update({**images(8, 0), "meta": meta})
    meta.value = 2.0
    twins.update({**images(8, 1), "meta": meta})
    twins = Twins(Norms(), telling, monkeypatch)
    twins.updates([8])
    with pytest.warns(UserWarning, match="loss_fn returns a Meta"):
        twins.updates([8])


def test_a_head_that_is_left_out_has_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where gradients are of another type than their parameters: one of zero would let it decay."""

    class Heads(Norms):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(2, 3)

    def chosen(model: Any, batch: Batch) -> Tensor:
        found = model(batch["x"])
        if batch["both"]:
            found = found + model.other(batch["x"].mean((2, 3)).bfloat16()).double()
        return F.cross_entropy(found, batch["y"])

    model = Heads().double()
    model.other.bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.1)
    step = BigStep(model, optimizer, chosen, micro_batch_size=3, options=Options(check=False))
    whole_emulated(step, monkeypatch)
    for seed in range(2):
        step({**images(8, seed), "both": True})
    before = model.other.weight.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(4):
            step({**images(8, seed), "both": False})
    assert torch.equal(model.other.weight, before)


def test_a_scaler_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scale changes from step to step."""
    model = Norms()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step = BigStep(model, optimizer, classified, micro_batch_size=3, scaler=scaler)
    whole_emulated(step, monkeypatch)
    batch = images(8, 0)
    with pytest.warns(UserWarning, match="a gradient scaler"):
        step({**batch, "x": batch["x"].float()})
    assert gave_up(step)


def test_what_changes_all_the_time_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that counts its calls is another one every time; a warning says so."""
    monkeypatch.setattr("bigbatch.execute.graph_calls.WINDOWS", Limits(kept=8, fresh=4, replays=1))

    class Counting(Norms):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    twins = Twins(Counting(), classified, monkeypatch)
    twins.updates([8] * 2)
    with pytest.warns(UserWarning, match="2 were captured, and 0 replayed"):
        twins.updates([8] * 8)
    assert gave_up(twins.step)


def test_a_capture_that_fails_leaves_all_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own error comes out, and the next update is right."""

    def loss(model: Any, batch: Batch) -> Tensor:
        if failing and len(batch["x"]) == 2:
            raise KeyError("mine")
        return classified(model, batch)

    failing: list[bool] = []
    twins = Twins(Norms(), loss, monkeypatch)
    twins.updates([8])
    failing.append(True)
    before = {name: value.clone() for name, value in twins.mine.state_dict().items()}
    with pytest.raises(KeyError, match="mine"):
        twins.step(images(8, 1))
    assert all(torch.equal(before[name], value) for name, value in twins.mine.state_dict().items())
    assert all(p.grad is None for p in twins.mine.parameters())
    failing.clear()
    twins.updates([8] * 3)
    assert twins.whole.replays == 2


def test_constants_outlive_their_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph reads them where they are: it holds them."""
    twins = Twins(Norms(), classified, monkeypatch)
    twins.updates([8] * 3)
    twins.step._together._constants._made.clear()
    twins.updates([8] * 2)
    assert twins.whole.replays == 3


def test_running_out_of_memory_forgets_the_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold the memory of a window."""
    twins = Twins(Norms(), classified, monkeypatch)
    twins.updates([8] * 3)
    failing = [True]

    def short() -> None:
        if failing.pop() if failing else False:
            raise torch.OutOfMemoryError("CUDA out of memory")

    twins.step.before_step(short)
    twins.updates([8] * 3)
    assert twins.whole.launches == 2
    assert twins.update(images(8, 3)).micro_batches == 3  # no smaller than before
