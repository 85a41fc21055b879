"""What a model hangs on beside its arguments: a second run in backward finds what the first one did, or is refused."""

import copy
import gc
import pickle
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from bigbatch import BigStep, Options, across
from bigbatch.errors import LossError
from tests.reference import distance, trained, weights

Loss = Callable[[Any, Tensor], Tensor]
LARGE = 200  # columns: 11 rows of them are more than what is held on the chance that it is needed


@dataclass
class Settings:
    """What some models carry around."""

    which: int = 0


class Setup:
    """The same, and nobody can tell what it is."""

    def __init__(self) -> None:
        self.which = 0


class Adapted(nn.Module):
    """Two adapters that begin at zero: whichever is chosen, the values are the same, and the gradient is another."""

    aside: Any
    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 3)
        self.down = nn.ParameterList(nn.Parameter(torch.randn(2, 4)) for _ in range(2))
        self.up = nn.ParameterList(nn.Parameter(torch.zeros(3, 2)) for _ in range(2))
        self.gate = nn.Parameter(torch.zeros(3))
        self.delta = nn.Parameter(torch.zeros(3, 4))
        self.register_buffer("shift", torch.zeros(4))
        self.which, self.factor = 0, 1.0
        self.condition: Any = None
        self.options: dict[str, Any] = {"deep": [0]}
        self.settings, self.simple, self.setup = Settings(), SimpleNamespace(which=0), Setup()

    @property
    def chosen(self) -> int:
        """The adapter in force, by whichever way it was chosen."""
        by_objects = self.settings.which + self.simple.which + self.setup.which
        return self.which + self.options["deep"][0] + by_objects + getattr(self, "later", 0) + there[0]

    def forward(self, x: Tensor, given: Any = None) -> Any:
        """(n, 4) → (n, 3)."""
        down, up = self.down[self.chosen], self.up[self.chosen]
        out = self.base(x) * self.factor + (x + self.shift) @ down.T @ up.T
        out = out + self.gate * torch.sin(out) if self.training else out - self.gate * out
        condition = self.condition if given is None else given["condition"]
        return out if condition is None else out + torch.tanh(self.gate) * condition


there = [0]  # a condition outside of any model


@contextmanager
def chosen(holder: Any, name: Any = "which", value: Any = 1) -> Any:
    """Have another value for a while."""
    before = holder[name] if isinstance(holder, dict | list) else getattr(holder, name)
    put = holder.__setitem__ if isinstance(holder, dict | list) else lambda *given: setattr(holder, *given)
    put(name, value)
    try:
        yield
    finally:
        put(name, before)


def both(one: Tensor, other: Tensor) -> Tensor:
    """A loss of all samples and two views."""
    mean = across.mean(one.mean(0))
    return across.once(across.mean((one - mean + other.pow(2) * torch.arange(1, 4)).pow(2).mean()).sqrt())


def around(*given: Any) -> Loss:
    """One view as the model is, one with something else set around the call."""

    def loss(model: Any, x: Tensor) -> Tensor:
        one = model(x)
        find, *rest = given
        with chosen(find(model), *rest):
            other = model(x.flip(1))
        return both(one, other)

    return loss


def by_weights_of_a_call(model: Any, x: Tensor) -> Tensor:
    """Other weights for one call."""
    own = {"base.weight": model.base.weight + model.delta}
    return both(functional_call(model, own, (x,)), model(x.flip(1)))


def by_products_of_weights(model: Any, x: Tensor) -> Tensor:
    """The same with a graph that can be gone through once."""
    own = {"base.weight": model.base.weight * (1 + model.delta)}
    return both(functional_call(model, own, (x,)), functional_call(model, own, (x.flip(1),)))


def by_a_mode(model: Any, x: Tensor) -> Tensor:
    """Another mode for one call."""
    one = model.eval()(x)
    return both(one, model.train()(x.flip(1)))


def by_a_condition(model: Any, x: Tensor) -> Tensor:
    """A condition that is set, and stays."""
    model.condition = x[:, :3]
    one = model(x)
    model.condition = x[:, 1:].flip(1)
    return both(one, model(x.flip(1)))


def by_a_condition_with_a_graph(model: Any, x: Tensor) -> Tensor:
    """A condition that is trained."""
    with chosen(model, "condition", torch.sin(model.base.weight[:, 0] * x[:, :3])):
        one = model(x)
    return both(one, model(x.flip(1)))


def by_a_hook(model: Any, x: Tensor) -> Tensor:
    """A hook for one call, between two others."""
    lasting = model.base.register_forward_hook(lambda _, __, out: out * 1.5)
    steering = model.base.register_forward_hook(lambda _, __, out: out + torch.tanh(model.gate))
    last = model.base.register_forward_hook(lambda _, given, out: out * given[0][:, :3])
    try:
        one = model(x)
        steering.remove()
        other = model(x.flip(1))
    finally:
        for hook in (lasting, steering, last):
            hook.remove()
    return both(one, other)


def by_a_new_attribute(model: Any, x: Tensor) -> Tensor:
    """One that is not there otherwise."""
    model.later = 1
    one = model(x)
    del model.later
    return both(one, model(x.flip(1)))


def by_a_new_dict(model: Any, x: Tensor) -> Tensor:
    """A dict that is set, and then filled anew."""
    model.options = {"deep": [0]}
    one = model(x)
    model.options["deep"][0] = 1
    other = model(x.flip(1))
    model.options["deep"][0] = 0
    return both(one, other)


def by_a_replaced_buffer(model: Any, x: Tensor) -> Tensor:
    """Another tensor as a buffer."""
    with chosen(model, "shift", torch.ones(4, dtype=x.dtype)):
        one = model(x)
    return both(one, model(x.flip(1)))


def by_a_given_dict(model: Any, x: Tensor) -> Tensor:
    """A dict that is filled anew for the next call."""
    given = {"condition": x[:, :3]}
    one = model(x, given)
    given["condition"] = x[:, 1:].flip(1)
    return both(one, model(x.flip(1), given))


CONDITIONS: dict[str, Loss] = {
    "an attribute": around(lambda model: model),
    "a factor": around(lambda model: model, "factor", 2.0),
    "what is in a dict": around(lambda model: model.options, "deep", [1]),
    "what is in a list in a dict": around(lambda model: model.options["deep"], 0),
    "what is in a dataclass": around(lambda model: model.settings),
    "what is in a namespace": around(lambda model: model.simple),
    "weights": by_weights_of_a_call,
    "products of weights": by_products_of_weights,
    "a mode": by_a_mode,
    "a condition": by_a_condition,
    "a condition with a graph": by_a_condition_with_a_graph,
    "a hook": by_a_hook,
    "a new attribute": by_a_new_attribute,
    "a new dict": by_a_new_dict,
    "a buffer": by_a_replaced_buffer,
    "a dict that is given": by_a_given_dict,
}


class Hiding(Adapted):
    """Takes or returns what nobody looks into, so that torch's own checkpoint runs it."""

    def forward(self, x: Tensor, given: Any = None) -> Any:
        """Run."""
        return SimpleNamespace(out=super().forward(x, given), more=Setup())


class Unhidden:
    """Calls such a model as if it were another."""

    def __init__(self, model: Any) -> None:
        object.__setattr__(self, "model", model)

    def __call__(self, *given: Any) -> Any:
        """Return what is hidden."""
        return self.model(*given).out

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.model, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.model, name)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Steps that go somewhere, and not away."""
    return torch.optim.SGD(parameters, lr=0.02)


def made(kind: type[nn.Module] = Adapted) -> Any:
    """Return the same model every time."""
    torch.manual_seed(0)
    return kind().double()


def rows(number: int, columns: int = 4) -> Tensor:
    """Return a batch."""
    return torch.randn(11, columns, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def step_of(model: nn.Module, loss: Loss, activations: Any = "recompute") -> BigStep:
    """Return a step that runs the model again."""
    options = Options(activations=activations, check=False)
    return BigStep(model, sgd(trained(model)), loss, micro_batch_size=3, options=options)


def assert_big_batch(
    loss: Loss, kind: type[nn.Module] = Adapted, activations: Any = "recompute", steps: int = 3
) -> BigStep:
    """Some updates are the big batch's."""
    mine, true = made(kind), made(kind)
    step, optimizer = step_of(mine, loss, activations), sgd(trained(true))
    for number in range(steps):
        step(rows(number))
        optimizer.zero_grad()
        loss(true, rows(number)).backward()
        optimizer.step()
        assert distance(weights(mine), weights(true)) <= 1e-12
    return step


@pytest.mark.parametrize("name", CONDITIONS)
def test_conditions_of_a_call_hold_in_both_runs(name: str) -> None:
    """Whatever was set on a model for one call is set for its second run, and gone afterwards."""
    step = assert_big_batch(CONDITIONS[name])
    assert step._together._valued is (name != "products of weights")


def unhidden(loss: Loss) -> Loss:
    """The same loss of a model that hides its result."""

    def of(model: Any, x: Tensor) -> Tensor:
        return loss(Unhidden(model), x)

    return of


@pytest.mark.parametrize("name", [name for name in CONDITIONS if not name.endswith(("weights", "a mode"))])
def test_conditions_of_a_call_hold_in_checkpoints(name: str) -> None:
    """The same where torch's own checkpoint is taken."""
    step = assert_big_batch(unhidden(CONDITIONS[name]), Hiding)
    assert not step._together._valued


def test_a_condition_that_begins_to_matter_later() -> None:
    """Every window finds what was set, not the first alone."""

    def loss(model: Any, x: Tensor) -> Tensor:
        one = model(x)
        with chosen(model, "factor", 2.0 if late else 1.0):
            other = model(x.flip(1))
        return both(one, other)

    mine, true = made(), made()
    step, optimizer = step_of(mine, loss), sgd(trained(true))
    for number in range(3):
        late = number > 0
        step(rows(number))
        optimizer.zero_grad()
        loss(true, rows(number)).backward()
        optimizer.step()
        assert distance(weights(mine), weights(true)) <= 1e-12


def by_a_global(model: Any, x: Tensor) -> Tensor:
    """A condition that is not the model's."""
    one = model(x)
    with chosen(there, 0):
        other = model(x.flip(1))
    return both(one, other)


def by_a_global_of_values(model: Any, x: Tensor) -> Tensor:
    """One by which values would differ, were it not for a gate that begins at zero."""
    with chosen(aside, 0, torch.tensor([1.0, 2.0, 3.0])):
        one = model(x)
    with chosen(aside, 0, torch.tensor([3.0, 2.0, 1.0])):
        other = model(x.flip(1))
    return both(one, other)


aside = [torch.zeros(3)]


class Gated(Adapted):
    """A gate that begins at zero, for something that is not the model's."""

    def forward(self, x: Tensor, given: Any = None) -> Any:
        """Run."""
        return super().forward(x, given) + self.gate * aside[0]


class Bent(Adapted):
    """The same parameters in another way, by something that is not the model's."""

    def forward(self, x: Tensor, given: Any = None) -> Any:
        """Run."""
        with chosen(there, 0, 0):
            out = super().forward(x, given)
        return out + (torch.tanh(self.gate) if there[0] else self.gate)


def by_a_stranger(model: Any, x: Tensor) -> Tensor:
    """A condition in an object that nobody knows."""
    one = model(x)
    with chosen(model.setup):
        other = model(x.flip(1))
    return both(one, other)


def by_a_buffer_that_is_filled(model: Any, x: Tensor) -> Tensor:
    """A buffer that is written into, for one call."""
    one = model(x)
    model.shift.fill_(1.0)
    other = model(x.flip(1))
    model.shift.fill_(0.0)
    return both(one, other)


def by_parameters_that_are_moved(model: Any, x: Tensor) -> Tensor:
    """Others of the same model, after it ran."""
    one = model(x)
    with torch.no_grad():
        model.delta.add_(0.0)
    return both(one, model(x.flip(1)) + model.delta.sum())


REFUSED: dict[str, tuple[type[nn.Module], Loss, str]] = {
    "a global": (Adapted, by_a_global, r"took another way .*it uses other parameters.*model\(x, condition\)"),
    "a global of values": (Gated, by_a_global_of_values, "took another way .*it computes with other values"),
    "a global of ways": (Bent, by_a_global, "took another way .*tensors are saved of it, and were"),
    "a stranger": (Adapted, by_a_stranger, r"what is in Adapted\.setup was changed between"),
    "a buffer": (Adapted, by_a_buffer_that_is_filled, r"Adapted\.shift was changed between .*activations=\"keep\""),
    "parameters": (Adapted, by_parameters_that_are_moved, r"Adapted\.delta was changed between"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_conditions_that_cannot_be_put_back_are_refused(name: str) -> None:
    """They are told of in the first window, where values cannot tell yet; where it may be chosen, others are kept."""
    kind, loss, words = REFUSED[name]
    model = made(kind)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(LossError, match=f"(?s){words}"):
        step_of(model, loss)(rows(0))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert "forward" not in vars(model)
    assert_big_batch(loss, kind, "auto")


def by_an_input_that_is_changed(model: Any, x: Tensor) -> Tensor:
    """What was given is changed after the call."""
    given = {"condition": x[:, :3].clone()}
    out = model(x, given)
    given["condition"].mul_(2)
    return both(out, out)


def by_an_object_that_is_changed(model: Any, x: Tensor) -> Tensor:
    """The same inside of what was given."""
    given = Setup()
    given.factor = 1.0  # type: ignore[attr-defined]
    one = model(x, given)
    given.factor = 2.0  # type: ignore[attr-defined]
    return both(one, model(x.flip(1), given))


class Scaled(Adapted):
    """Takes an object."""

    def forward(self, x: Tensor, given: Any = None) -> Any:
        """Run."""
        out = super().forward(x)
        return out if given is None else out + torch.tanh(self.gate) * given.factor


def by_a_global_of_later_values(model: Any, x: Tensor) -> Tensor:
    """Values differ by what is not the model's."""
    with chosen(aside, 0, x[:, :3]):
        one = model(x)
    return both(one, model(x.flip(1)))


class Open(Hiding):
    """Hangs on something that is not its own."""

    def forward(self, x: Tensor, given: Any = None) -> Any:
        """Run."""
        found = super().forward(x, given)
        return SimpleNamespace(out=found.out + aside[0], more=found.more)


class Averaging(Hiding):
    """Moves its own parameters."""

    def forward(self, x: Tensor, given: Any = None) -> Any:
        """Run."""
        with torch.no_grad():
            self.delta.add_(0.1)
        return super().forward(x, given)


IN_CHECKPOINTS: dict[str, tuple[type[nn.Module], Loss, str]] = {
    "an input": (Hiding, unhidden(by_an_input_that_is_changed), "a tensor that the model was given was changed"),
    "an object": (Scaled, by_an_object_that_is_changed, "an object that the model was given was changed"),
    "a global": (Open, unhidden(by_a_global_of_later_values), "returned other values when it was run again"),
    "parameters": (Averaging, unhidden(by_a_condition), "changes its own parameters when it runs"),
}


@pytest.mark.parametrize("name", IN_CHECKPOINTS)
def test_what_a_checkpoint_does_not_see_is_refused(name: str) -> None:
    """The gradient of torch's own checkpoint would be another one without a word."""
    kind, loss, words = IN_CHECKPOINTS[name]
    with pytest.raises(LossError, match=words):
        step_of(made(kind), loss)(rows(0))


# What a run leaves on a model.


class Counting(Adapted):
    """Counts and lists what it does, and its results hang on it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.seen: list[int] = []
        self.latest = deque([0.1, 0.2, 0.3], maxlen=3)
        self.inside = torch.zeros(())

    def forward(self, x: Tensor, given: Any = None) -> Any:
        """Run."""
        self.calls += 1
        self.seen.append(self.calls)
        self.latest.append(self.latest[0] + 0.1)
        self.inside.add_(1)
        factor = 1 + 0.01 * self.calls + 0.1 * len(self.seen) + sum(self.latest)
        return super().forward(x, given) * factor + self.inside


@pytest.mark.parametrize("kind", [Counting, type("HidingCounting", (Hiding, Counting), {})])
def test_a_second_run_leaves_no_trace(kind: type[nn.Module]) -> None:
    """A counter, a list and a tensor that a run moves are where the first runs have left them, as if kept."""
    left = {}
    loss = unhidden(by_a_given_dict) if issubclass(kind, Hiding) else by_a_given_dict
    for activations in ("keep", "recompute"):
        model = made(kind)
        step = step_of(model, loss, activations)
        step(rows(0))  # may be tried several times
        model.load_state_dict(made(kind).state_dict())
        model.calls = 0
        model.seen.clear()
        model.latest.extend([0.1, 0.2, 0.3])
        model.inside.zero_()
        for number in range(1, 3):
            step(rows(number))
        left[activations] = weights(model), model.calls, model.seen, model.latest, float(model.inside)
    assert distance(left["recompute"][0], left["keep"][0]) <= 1e-12
    assert left["recompute"][1:] == left["keep"][1:]


class Aside(nn.Module):
    """Puts something large aside."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(LARGE, LARGE)
        self.maps: Any = None
        self.reads = False

    def forward(self, x: Tensor) -> Tensor:
        """Run."""
        found: Tensor = torch.tanh(self.one(x))
        if self.reads and self.maps is not None:
            found = found + 0 * self.maps[0].detach()[: len(x)]
        wide = found.repeat(60, 1)
        self.maps = [wide, {"again": wide * 2}]
        alive.append(weakref.ref(wide))
        return found[:, :3]


alive: list["weakref.ref[Tensor]"] = []


@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_what_a_run_puts_aside_is_not_held(activations: str) -> None:
    """A model that keeps its latest attention maps finds those of another call, and nobody keeps them for that."""
    most: list[int] = []

    def loss(model: Any, x: Tensor) -> Tensor:
        one, other = model(x), model(x * 2)
        gc.collect()
        most.append(sum(each() is not None for each in alive))
        return both(one, other)

    alive.clear()
    torch.manual_seed(0)
    model = Aside().double()
    step_of(model, loss, activations)(rows(0, LARGE))
    assert max(most) <= 2 + 6 * (activations == "keep")


def test_what_was_put_aside_and_is_read_is_refused() -> None:
    """There is nothing but NaN to read, and that is not what the first run found."""
    model = Aside().double()
    model.reads = True
    with pytest.raises(LossError, match=r"other values|another way"):
        step_of(model, lambda model, x: both(model(x), model(x * 2)))(rows(0, LARGE))


def test_a_copy_of_a_model_that_a_loss_makes_is_a_model() -> None:
    """A teacher that is copied in a window has weights and a forward of its own, and so has one that was pickled."""
    teachers: list[Any] = []

    def loss(model: Any, x: Tensor) -> Tensor:
        if number and not teachers:
            teachers.extend([copy.deepcopy(model), pickle.loads(pickle.dumps(model))])  # noqa: S301 - our own
        with torch.no_grad():
            target = (teachers[0] if teachers else model)(x.flip(1))
        return both(model(x), target)

    model = made()
    step = step_of(model, loss)
    for number in range(3):
        step(rows(number))
    x = rows(0)
    for teacher in teachers:
        assert distance(weights(teacher), weights(model)) > 1e-3
        assert isinstance(teacher.forward, MethodType)
        assert torch.equal(teacher(x), Adapted.forward(teacher, x))
        assert not torch.equal(teacher(x), model(x))


# What was true before, and no test has told.


def test_autocast_inside_the_loss_alone_holds_in_the_second_run() -> None:
    """It is that of the call, not that of backward."""
    inside: list[bool] = []

    class Asking(Adapted):
        def forward(self, x: Tensor, given: Any = None) -> Any:
            inside.append(torch.is_autocast_enabled("cpu"))
            return super().forward(x, given)

    def loss(model: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            one = model(x.float())
        return both(one.float(), model(x.float()).float())

    torch.manual_seed(0)
    model = Asking()
    step = step_of(model, loss)
    step(rows(0))
    inside.clear()
    step(rows(1))
    assert len(inside) == 14  # four micro-batches call twice, and three of them run both calls again
    assert sum(inside) == 7
    assert step._together._valued


class Centred(Adapted):
    """Reads a buffer that every run moves in place."""

    def forward(self, x: Tensor, given: Any = None) -> Any:
        """Run."""
        self.shift.mul_(0.5).add_(x.detach().mean(0))
        return F.softplus(super().forward(x + torch.exp(self.shift), given))


def by_a_gradient_of_its_own(model: Any, x: Tensor) -> Tensor:
    """A backward before the backward, so that the model runs three times."""
    given = torch.sin(model.gate.mean()) * x
    out = model(given + x)
    (slope,) = torch.autograd.grad(out.pow(2).sum(), given, retain_graph=True)
    return both(out, out * (1 + slope.detach().mean(1, keepdim=True)))


def test_a_model_that_runs_three_times_finds_the_same_each_time() -> None:
    """What a second run writes into a copy is not what a third one finds."""
    left = {}
    for activations in ("keep", "recompute"):
        model = made(Centred)
        step_of(model, by_a_gradient_of_its_own, activations)(rows(0))
        left[activations] = [*weights(model), model.shift]
    assert distance(left["recompute"], left["keep"]) <= 1e-12
