"""What is replayed is the big batch's update, whatever the model does meanwhile; CUDA graphs are emulated on a CPU."""

import copy
import random
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
from bigbatch.batch.batch import Batch as Cut
from bigbatch.batch.split import Division
from bigbatch.errors import WindowDisturbed
from bigbatch.execute.execution import Execution, remedy
from bigbatch.execute.graph_record import NotCapturable
from bigbatch.execute.graph_replay import Limits, Replayed
from bigbatch.execute.precast import CastWeights
from bigbatch.loss.count import Term
from bigbatch.window.tally import Ledger
from tests.support.emulated_graphs import Tape, captures, emulated, graphs_of, whole_emulated
from tests.support.reference import distance, sgd, trained, weights
from tests.support.samples import seeded
from tests.support.tables import (
    LONG,
    SHORT,
    AsAttribute,
    AsBuffer,
    ByWidth,
    InATuple,
    OfTheLatestWidth,
    PutAside,
    Turning,
    text,
    token_loss,
)

Batch = dict[str, Any]
Loss = Callable[[Any, Batch], Any]
KINDS = {"micro-steps": emulated, "windows": whole_emulated}


class Config:
    """Settings, as models have them."""

    def __init__(self) -> None:
        self.scale = 1.0


class Net(nn.Module):
    """Convolutions and a way around them, perhaps with norms, and settings in all places where models keep them."""

    shift: Tensor

    def __init__(self, *, norms: bool = True) -> None:
        super().__init__()
        norm = nn.BatchNorm2d if norms else nn.Identity
        self.first = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), norm(4), nn.ReLU(inplace=True))
        self.second = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), norm(4))
        self.head, self.last = nn.Linear(4, 3), nn.SiLU()
        self.function: Callable[[Tensor], Tensor] = torch.cos
        self.scales, self.settings, self.config = [1.0], {"scale": 1.0}, Config()
        self.tables = {3: [(self.table(1.0), 3)]}
        self.idle = nn.Linear(2, 2)  # without a gradient: one of zero would let it decay
        self.register_buffer("shift", torch.zeros(4))

    @staticmethod
    def table(by: float) -> Tensor:
        """Factors, as of rotary embeddings."""
        return by * torch.ones(4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 2, h, w) → (n, 3)."""
        x = self.first(x)
        x = self.function(self.last(x + self.second(x)).mean((2, 3))) * self.tables[3][0][0] + self.shift
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
    return F.cross_entropy(model(batch["x"]) * batch.get("by", 1.0), batch["y"])


def with_logits(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """The same, and extras."""
    logits = model(batch["x"])
    return F.cross_entropy(logits, batch["y"]), logits


def with_slope(model: Any, batch: Batch) -> Tensor:
    """A penalty on the slope at the inputs."""
    x = batch["x"].requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return slope.square().sum((1, 2, 3)).mean()


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

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        patch: pytest.MonkeyPatch,
        replays: Callable[[BigStep, Any], Replayed] = whole_emulated,
        *,
        size: int = 3,
        **options: Any,
    ) -> None:
        self.mine, self.true, self.loss = model.double(), copy.deepcopy(model).double(), loss
        self.optimizers = self._sgd(self.mine), self._sgd(self.true)
        self.step = BigStep(
            self.mine, self.optimizers[0], loss, micro_batch_size=size, clip_norm=1.0, options=Options(**options)
        )
        self.graphs = replays(self.step, patch)

    @staticmethod
    def _sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)

    def change(self, change: Callable[[Any], object]) -> None:
        """Change both models, and have the optimizers train the parameters that these have then."""
        for optimizer, model in zip(self.optimizers, (self.mine, self.true), strict=True):
            with torch.no_grad():
                change(model)
            optimizer.param_groups[0]["params"] = list(model.parameters())

    def update(self, batch: Batch) -> Any:
        """Make one update of each; they must agree."""
        found = self.step(batch)
        loss = self.loss(self.true, batch)
        loss = loss[0] if isinstance(loss, tuple) else loss
        assert abs(float(found.loss) - loss.item()) < 1e-12
        loss.backward()
        nn.utils.clip_grad_norm_([p for p in self.true.parameters() if p.requires_grad], 1.0)
        self.optimizers[1].step()
        self.optimizers[1].zero_grad()
        mine, true = (list(model.state_dict().values()) for model in (self.mine, self.true))
        for one, other in zip(mine, true, strict=True):
            assert distance([one.double()], [other.double()], 1e-3) < 1e-12
        return found

    def updates(self, sizes: Sequence[int], make: Callable[[int, int], Batch] = images) -> list[Any]:
        """Make some updates of batches that differ."""
        return [self.update(make(size, seed)) for seed, size in enumerate(sizes)]


@settings(max_examples=20, deadline=None)
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
            twins = Twins(Net(), classified, patch, size=size)
            twins.updates(sizes)
        else:
            kept = "keep" if case == "pairs kept" else "auto"
            twins = Twins(Towers(), contrasted, patch, size=size, activations=kept)
            twins.updates(sizes, pairs)
        assert twins.graphs.launches == len(set(sizes))
        assert len(twins.graphs.captured) == sum(sizes.count(each) > 1 for each in set(sizes))


def test_what_is_captured_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's own code runs when a shape comes first, once more to measure it, and when it is captured."""
    calls: list[int] = []

    def loss(model: Any, batch: Batch) -> Tensor:
        if model is twins.mine:
            calls.append(len(batch["x"]))
        return classified(model, batch)

    twins = Twins(Net(), loss, monkeypatch, check=False)
    twins.updates([8] * 5)
    assert calls == [3, *[3, 3, 2] * 2]
    assert twins.graphs.replays == 3


CHANGES: dict[str, Callable[[Any], object]] = {
    "nothing": id,
    "list": lambda model: model.scales.__setitem__(0, 0.5),
    "dict": lambda model: model.settings.update(scale=0.5),
    "object": lambda model: setattr(model.config, "scale", 0.5),
    "table": lambda model: model.tables[3].__setitem__(0, (model.table(0.5), 3)),
    "layer": lambda model: setattr(model, "last", nn.Tanh()),
    "function": lambda model: setattr(model, "function", torch.sin),
    "hook": lambda model: model.head.register_forward_hook(lambda *given: given[-1] * 2),
    "gradient hook": lambda model: model.head.weight.register_hook(lambda gradient: gradient * 2),
    "frozen weight": lambda model: model.head.bias.requires_grad_(False),
    "parameter": lambda model: setattr(model.head, "weight", nn.Parameter(model.head.weight.detach() * 2)),
    "data": lambda model: setattr(model.head.weight, "data", model.head.weight.data * 2),
    "assigned": lambda model: model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()}, assign=True),
    "buffer": lambda model: setattr(model, "shift", torch.ones(4, dtype=torch.float64)),
    "momentum": lambda model: setattr(model.first[1], "momentum", 0.5),
    "frozen norm": lambda model: model.second[1].eval(),
}


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (kind, each)
        for kind in KINDS
        for each in CHANGES
        if kind == "windows" or each not in {"momentum", "frozen norm"}
    ],
)
def test_a_change_between_windows_is_seen(kind: str, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph would keep numbers and addresses as they were: it is captured anew."""
    twins = Twins(Net(norms=kind == "windows"), classified, monkeypatch, KINDS[kind], size=4)
    twins.updates([8] * 3)
    replays, launches = twins.graphs.replays, twins.graphs.launches
    assert replays
    twins.change(CHANGES[change])
    twins.updates([8] * 4)
    assert twins.graphs.launches == launches + (change != "nothing")
    assert twins.graphs.replays > replays


@pytest.mark.parametrize("loss", [with_slope, lambda m, b: m(b["x"].requires_grad_()).square().mean()])
def test_inputs_that_require_a_gradient(loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replay copies into the same inputs, whose history does not grow from update to update."""
    twins = Twins(Net(norms=False), loss, monkeypatch, emulated, check=False, size=4)
    twins.updates([8] * 4)
    assert twins.graphs.replays
    assert all(each.grad_fn is None for made in twins.graphs.captured.values() for each in made.inputs.values())


def test_a_number_in_the_batch_is_a_part_of_its_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is frozen in what was captured, so another one is another window."""
    twins = Twins(Net(), classified, monkeypatch)
    for seed, by in enumerate([1.0, 1.0, 2.0, 1.0, 2.0, 2.0]):
        twins.update({**images(8, seed), "by": by})
    assert twins.graphs.replays == 2


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_update_tells_is_its_own(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next replay writes a loss, a count and extras to the same places."""
    twins = Twins(Net(norms=kind == "windows"), with_logits, monkeypatch, KINDS[kind], size=4)
    kept = []
    for seed in range(7):
        batch = images(8, seed)
        batch["y"][1] = -100 if seed > 4 else 0
        expected = copy.deepcopy(twins.true)(batch["x"])  # of the weights before that update
        update = twins.update(batch)
        assert torch.allclose(update.extras, expected, rtol=0, atol=1e-12)
        kept.append((update, float(update.loss), float(update.count), update.extras.clone()))
    for update, loss, count, extras in kept:
        assert (float(update.loss), float(update.count)) == (loss, count)
        assert torch.equal(update.extras, extras)


@pytest.mark.parametrize("case", ["micro-steps", "windows", "pairs"])
def test_a_gradient_is_the_callers_own(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`gradients(batch)` leaves the big batch's, unclipped, and the rest to its caller; a replay writes elsewhere."""
    make, kind = (pairs if case == "pairs" else images), KINDS.get(case, whole_emulated)
    model = Towers() if case == "pairs" else Net(norms=case == "windows")
    twins = Twins(model, contrasted if case == "pairs" else classified, monkeypatch, kind, activations="keep")
    kept: list[tuple[Tensor, Tensor]] = []
    for seed in range(5):
        batch, before = make(11, seed), weights(twins.mine)
        update = twins.step.gradients(batch)
        loss = twins.loss(twins.true, batch)
        loss.backward()
        assert (update.micro_batches, update.skipped) == (4, False)
        assert abs(float(update.loss) - loss.item()) < 1e-12
        assert all(map(torch.equal, weights(twins.mine), before))
        for mine, true in zip(twins.mine.parameters(), twins.true.parameters(), strict=True):
            assert (mine.grad is None) == (true.grad is None)
            if mine.grad is not None and true.grad is not None:
                assert distance([mine.grad], [true.grad], 1e-2) < 1e-12
                kept.append((mine.grad, mine.grad.clone()))
        with pytest.raises(WindowDisturbed, match="before the window's first backward"):
            twins.step.gradients(batch)
        for optimizer in twins.optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert twins.graphs.replays
    assert all(torch.equal(*each) for each in kept)


def test_low_precision_weights_add_up_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their gradients are widened, and lie at one place, too; one that is left out has none, and does not decay."""
    torch.manual_seed(0)
    models = [Net() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    steps = []
    for model in models:
        for layer in (model.first[0], model.second[0], model.head, model.idle):
            layer.bfloat16()

        def loss(model: Any, batch: Batch) -> Tensor:
            x = F.silu(model.first[1](model.first[0](batch["x"].bfloat16()).float()))
            x = x + model.idle(x[:, :2].mean((2, 3)).bfloat16()).mean() if batch["both"] else x
            return F.cross_entropy(model.head(x.mean((2, 3)).bfloat16()).float(), batch["y"])

        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.1)
        steps.append(BigStep(model, optimizer, loss, micro_batch_size=3, options=Options(check=False)))
    for seed in range(6):
        steps[0]({**images(8, seed), "both": seed < 2})
    graphs = whole_emulated(steps[1], monkeypatch)
    idle = []
    for seed in range(6):
        steps[1]({**images(8, seed), "both": seed < 2})
        idle.append(models[1].idle.weight.clone())
    assert graphs.captures > 1
    assert all(torch.equal(each, idle[1]) for each in idle[2:])
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert distance([other.detach().double()], [one.detach().double()], 1e-3) < 1e-2  # bf16 rounds


class Noisy(Net):
    """Draws a number of the host in each forward."""

    def __init__(self, kind: str, *, norms: bool) -> None:
        super().__init__(norms=norms)
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


@pytest.mark.parametrize(
    ("replays", "kind"),
    [*((whole_emulated, each) for each in ("torch", "python", "own", "numpy's own")), (emulated, "python")],
)
def test_random_numbers_are_not_captured(replays: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replay would have to draw other ones; it is launched, which a warning says, and draws as before."""

    def found(*, captured: bool) -> list[Tensor]:
        torch.manual_seed(0)
        random.seed(0)
        model = Noisy(kind, norms=replays is whole_emulated).double()
        step = BigStep(model, sgd(trained(model)), classified, micro_batch_size=3, options=Options(check=False))
        if captured:
            replays(step, monkeypatch)
        for seed in range(4):
            step(images(8, seed))
        return weights(model)

    with pytest.warns(UserWarning, match="it draws random numbers") as caught:
        mine = found(captured=True)
    assert sum("draws random numbers" in str(each.message) for each in caught) == 1
    monkeypatch.undo()
    assert distance(mine, found(captured=False)) < 1e-14


class Meta:
    """Something that comes with a batch, or goes out of a loss."""

    def __init__(self, value: Any) -> None:
        self.value = value


def test_what_is_hidden_in_an_object_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be what it was, or the graph's own memory."""

    def scaled(model: Any, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"]) * batch["meta"].value, batch["y"])

    def telling(model: Any, batch: Batch) -> tuple[Tensor, Meta]:
        loss, logits = with_logits(model, batch)
        return loss, Meta(logits)

    twins, meta = Twins(Net(), scaled, monkeypatch), Meta(1.0)
    with pytest.warns(UserWarning, match="its batch holds a Meta"):
        twins.update({**images(8, 0), "meta": meta})
    meta.value = 2.0
    twins.update({**images(8, 1), "meta": meta})
    twins = Twins(Net(), telling, monkeypatch)
    twins.updates([8])
    with pytest.warns(UserWarning, match="loss_fn returns a Meta"):
        twins.updates([8])


def test_a_scaler_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scale changes from step to step. Micro-steps, for losses that ask for nobody, are apart."""
    model = Net().double()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    step = BigStep(model, sgd(trained(model)), classified, micro_batch_size=3, scaler=scaler)
    whole_emulated(step, monkeypatch)
    with pytest.warns(UserWarning, match="a gradient scaler"):
        step(images(8, 0))
    assert not captures(step)
    both = Execution(graph_steps=True, graph_windows=True)
    with pytest.warns(UserWarning, match="cannot be captured"):
        assert remedy(both, NotCapturable("x"), side_by_side=True) == Execution(graph_steps=True)


class Counting(Net):
    """Is another model every time."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """(n, 2, h, w) → (n, 3)."""
        self.calls += 1
        return super().forward(x)


@pytest.mark.parametrize(
    ("kind", "model", "batch", "size", "said"),
    [
        ("windows", Counting, lambda n: images(8, n), 3, "2 were captured, and 0 replayed"),
        (
            "micro-steps",
            Net,
            lambda n: {**images(8, n), "by": 1.0 + n},
            2,
            "4 were the .*, 2 were captured, and 4 repl",
        ),
        ("micro-steps", Net, lambda n: images(n + 2, n), 300, "of 5 calls 5 were the first of their shape"),
    ],
)
def test_captures_that_are_hardly_replayed_are_given_up(
    *, kind: str, model: Any, batch: Callable[[int], Batch], size: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shapes, or a model, that change all the time take longer to capture than that saves; a warning says so."""
    for name in ("WINDOWS", "MICRO_STEPS"):
        monkeypatch.setattr(f"bigbatch.execute.graph_calls.{name}", Limits(kept=8, fresh=4, replays=3))
    twins = Twins(model(norms=kind == "windows"), classified, monkeypatch, KINDS[kind], size=size)
    with pytest.warns(UserWarning, match=said) as caught:
        list(map(twins.update, map(batch, range(10))))
    assert len([each for each in caught if "cannot be captured" in str(each.message)]) == 1
    assert not captures(twins.step)


def test_a_capture_that_fails_leaves_all_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own error comes out, and the next update is right."""

    def loss(model: Any, batch: Batch) -> Tensor:
        if failing and len(batch["x"]) == 2:
            raise KeyError("mine")
        return classified(model, batch)

    failing: list[bool] = []
    twins = Twins(Net(), loss, monkeypatch)
    twins.updates([8])
    failing.append(True)
    before = {name: value.clone() for name, value in twins.mine.state_dict().items()}
    with pytest.raises(KeyError, match="mine"):
        twins.step(images(8, 1))
    assert all(torch.equal(before[name], value) for name, value in twins.mine.state_dict().items())
    assert all(p.grad is None for p in twins.mine.parameters())
    failing.clear()
    twins.updates([8] * 3)
    assert twins.graphs.replays == 2


def test_constants_outlive_their_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph reads them where they are: it holds them."""
    twins = Twins(Net(), classified, monkeypatch)
    twins.updates([8] * 3)
    twins.step._together._constants._made.clear()
    twins.updates([8] * 2)
    assert twins.graphs.replays == 3


def test_running_out_of_memory_forgets_the_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold the memory of a window."""
    twins = Twins(Net(), classified, monkeypatch)
    twins.updates([8] * 3)
    failing = [True]

    def short() -> None:
        if failing.pop() if failing else False:
            raise torch.OutOfMemoryError("CUDA out of memory")

    twins.step.before_step(short)
    twins.updates([8] * 3)
    assert twins.graphs.launches == 2
    assert twins.update(images(8, 3)).micro_batches == 3  # no smaller than before


def test_what_was_launched_in_another_mode_is_launched_again_before_it_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A first time in every state: what a capture needs, as weights in low precision, is made by launching."""
    twins = Twins(Net(norms=False), classified, monkeypatch, emulated, size=4)
    seen: list[tuple[int, int]] = []
    for training in (True, False, False, True, True):  # the first window is launched as a whole
        twins.change(lambda model: model.train(training))  # noqa: B023 - called at once
        twins.updates([8])
        seen.append((twins.graphs.launches, twins.graphs.captures))
    assert seen == [(1, 0), (2, 1), (2, 1), (3, 2), (3, 2)]


# Packed micro-batches, and tables that models make when they need them.


def on_devices(*kinds: Any) -> list[Any]:
    """Each on a CPU, where graphs are emulated, and on a GPU."""
    return [
        *(("cpu", *each) for each in kinds),
        *(pytest.param("cuda", *each, marks=pytest.mark.cuda) for each in kinds),
    ]


def packed(
    kind: type[nn.Module],
    device: str,
    patch: pytest.MonkeyPatch,
    lengths: Sequence[Sequence[int]],
    *,
    check: bool = True,
) -> tuple[BigStep, Replayed]:
    """Train packed batches beside a true big step, and compare after every update."""
    model, twin = seeded(kind)().to(device), seeded(kind)().to(device)
    optimizer = sgd(trained(twin))
    options = Options(lengths="mask", token_budget=32, check=check, cuda_graph=device == "cuda")
    step = BigStep(model, sgd(trained(model)), token_loss, options=options)
    graphs = graphs_of(step, patch)
    for number, each in enumerate(lengths):
        step(text(each, number))
        optimizer.zero_grad()
        token_loss(twin, {name: leaf.to(device) for name, leaf in text(each, number).items()}).backward()
        optimizer.step()
        assert distance(weights(model), weights(twin)) <= 1e-12, f"step {number}"
    return step, graphs


@pytest.mark.parametrize(
    ("device", "kind"), [*on_devices([Turning], [AsBuffer], [AsAttribute], [InATuple]), ("cpu", PutAside)]
)
def test_a_table_that_grows_in_a_launch_is_seen_by_the_replays_after_it(
    device: str, kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graphs that knew the old one are captured anew, and go on being replayed."""
    step, graphs = packed(kind, device, monkeypatch, [SHORT] * 3 + [LONG] * 3)
    assert "steps" in captures(step)
    renewed = kind in {AsBuffer, AsAttribute, InATuple}
    # Four of width 8, two of 16, the one left over, perhaps all again, and one of width 24 and of 32.
    assert device == "cuda" or graphs.captures == (7 if renewed else 5)
    assert graphs.replays > graphs.launches > 0


class Failing(OfTheLatestWidth):
    """Cannot be captured for another reason, after a table was made."""

    def forward(self, tokens: Tensor) -> Tensor:
        """(n, width) → (n, width, 5)."""
        out = super().forward(tokens)
        if Tape.records or (tokens.is_cuda and torch.cuda.is_current_stream_capturing()):
            raise NotCapturable("it waits")
        return out


REPLACES = "replaces a buffer or an attribute, "


@pytest.mark.parametrize(
    ("device", "kind", "words"),
    [
        *on_devices(
            [OfTheLatestWidth, rf"{REPLACES}OfTheLatestWidth\.kept;"],
            [ByWidth, rf"{REPLACES}ByWidth\.\d+;"],
            [Failing, "it waits"],
        ),
        pytest.param("cuda", PutAside, "cannot be captured", marks=pytest.mark.cuda),
    ],
)
def test_a_capture_that_replaces_a_table_is_refused_and_leaves_none(
    device: str, kind: type[nn.Module], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has made was never computed: the micro-steps that are launched instead must not read it.

    On a GPU, an activation that is put aside with its graph keeps the stream of the leaves.
    """
    with pytest.warns(UserWarning, match=words):
        step, _ = packed(kind, device, monkeypatch, [[16] * 4 + [8] * 8 + [24] * 2] * 3)
    assert "steps" not in captures(step)


@pytest.mark.parametrize("kind", [Turning, AsAttribute])
def test_a_packed_batch_of_one_group_is_replayed(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes again with every batch; a table that the first one has made is none that has changed."""
    _, graphs = packed(kind, "cpu", monkeypatch, [[16, 16]] * 4, check=False)
    assert (graphs.captures, graphs.replays, graphs.launches) == (1, 2, 1)


@pytest.mark.parametrize(
    ("number", "budget", "most", "again", "sizes"),
    [
        (8, 128, None, [True], (8,)),
        (5, 128, None, [True], (5,)),
        (5, 128, 8, [True], (5,)),
        (16, 128, None, [True, True], (8, 8)),
        (8, 128, 4, [True, True], (4, 4)),
        (7, 128, 4, [True, True], (3, 4)),
        (70, 512, None, [True, False, True], (32, 6, 32)),
    ],
)
def test_a_packed_batch_in_full_groups_is_captured_whole(
    number: int, budget: int, most: int | None, again: list[bool], sizes: tuple[int, ...]
) -> None:
    """The left-over group counts as recurring where it can only have few sizes, or is the only one."""
    batch = Cut.of({"x": torch.zeros(number, 16)})
    division = Division.packed(batch, [16] * number, budget, most, alike=True)
    assert [division.odd != each for each in range(len(division))] == again
    assert division.sizes == sizes


# What replays stand on.


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("on_device", [(False, True, False), (True, False, True), (True, True, True), (False,) * 3])
def test_a_number_and_a_tensor_make_one_count(on_device: Sequence[bool], small: bool) -> None:
    """`counted(x, max(n, 1))` is a number where n is 0, and a tensor otherwise: in any order, each has its share."""
    ledger, shares = Ledger(3, small=small), []
    for number, there in zip((4.0, 12.0, 16.0), on_device, strict=True):
        terms = [Term(None, "mean", torch.tensor(number, dtype=torch.float64) if there else number, "counted")]
        share = ledger.weigh(terms)
        shares.append(share.whole)
        ledger.enter(terms, share, torch.ones((), dtype=torch.float64), {})
    correction = ledger.correction()
    assert [float(share * correction) for share in shares] == pytest.approx([4 / 32, 12 / 32, 16 / 32], rel=1e-12)


def test_two_casts_that_overlap_leave_functions_as_they_were() -> None:
    """Two steps on two threads, of which the first to begin ends first."""
    plain = F.linear
    first, second = (CastWeights([torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1)]) for _ in range(2))
    try:
        first.__enter__()
        second.__enter__()
        first.__exit__()
        second.__exit__()
        assert F.linear is plain
    finally:
        F.linear = plain
