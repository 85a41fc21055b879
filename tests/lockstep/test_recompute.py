"""Recomputed models: the update is the big batch's, or refused in words; under "auto" it is always the big batch's."""

import copy
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bigbatch import BigStep, Options, across
from bigbatch.lockstep.model_state import CannotRecompute
from tests.support.bombs import seed
from tests.support.coupled import Make, mine, step_of, unit
from tests.support.reference import distance, sgd, trained, weights
from tests.support.samples import generator, seeded

Loss = Callable[[Any, Tensor], Tensor]
Run = Callable[[Tensor], Tensor]
there: list[Any] = [0.0]  # a condition outside of any model
own_generator = torch.Generator()


class Adapted(nn.Module):
    """Has adapters that begin at zero, conditions, buffers, and says more than it returns.

    `how` does something else around its run.
    """

    def __init__(self, how: Callable[[Any, Tensor, Run], Any] | None = None) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 6), nn.Linear(6, 3)
        self.up = nn.ParameterList(nn.Parameter(torch.zeros(4, 6)) for _ in range(2))
        self.gate, self.log_scale = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.tensor(0.3))
        self.seen, self.shift = nn.Buffer(torch.zeros(())), nn.Buffer(torch.zeros(4))
        self.which, self.factor = 0, 1.0
        self.options: dict[str, Any] = {"which": 0}
        self.condition: Any = None
        self.aside: Any = None
        self.how = how

    def forward(self, x: Tensor, given: Any = None) -> Any:
        """(n, 4) → (n, 3)."""
        run = partial(self.run, given=given)
        return run(x) if self.how is None else self.how(self, x, run)

    def run(self, x: Tensor, given: Any) -> Any:
        """Run."""
        hidden = torch.tanh(self.one(x) + (x + self.shift) @ self.up[self.which + self.options["which"]])
        condition = self.condition if given is None else given.pop("condition")
        out = self.two(hidden) * self.factor
        out = out if condition is None else out + torch.tanh(self.gate) * condition
        self.aside = hidden
        self.seen.add_(len(x))
        return out + self.gate * torch.sin(out) if self.training else out - self.gate * out


def altered(how: Callable[[Any, Tensor, Run], Any] | None = None) -> Make:
    """Make the same one every time."""
    return seeded(lambda: Adapted(how))


def noisy(draw: Callable[[], float]) -> Make:
    """A model that draws a number in every run."""
    return altered(lambda _, x, run: run(x) * (1 + draw()))


def many(model: Any, x: Tensor, run: Run) -> Any:
    """Structures: one thing twice, a parameter, its input, an integer and something without gradient."""
    out = run(x)
    nested = (out, [model.log_scale, x])
    return {"out": out, "nested": nested, "fixed": out.detach() * 2, "best": out.argmax(1), "nothing": None}


def views(_: Any, x: Tensor, run: Run) -> Any:
    """The same memory several times."""
    out = run(x)
    return out, out[:, :2], out.T


def moving(model: Any, x: Tensor, run: Run, *, replacing: bool) -> Tensor:
    """A buffer that every run moves, in place or by another tensor each time."""
    if replacing:
        model.shift = model.shift * 0.999 + x.detach().mean(0) * 0.001
    else:
        model.shift.mul_(0.999).add_(x.detach().mean(0), alpha=0.001)
    return run(x + torch.exp(model.shift))


@seeded
def spectral() -> nn.Module:
    """A spectral norm, whose vector each run turns."""
    model = Adapted()
    nn.utils.parametrizations.spectral_norm(model.one)
    return model


def hooked() -> nn.Module:
    """No parameter is left to stand for the model."""
    model = altered()()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 1)
    return model


class Hidden:
    """Something that no one looks into."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


# Losses.


def spread(out: Tensor) -> Tensor:
    """A loss of all samples."""
    return across.mean((out - across.mean(out.mean(0))).pow(2).mean()).sqrt()


def both(one: Tensor, other: Tensor) -> Tensor:
    """A loss of all samples and two views."""
    return across.once(spread(one + other.pow(2) * torch.arange(1, other.shape[-1] + 1)))


def by_two_calls(model: Any, x: Tensor) -> Tensor:
    """Two runs."""
    return both(model(x), model(x.flip(1)))


def by_parameter(model: Any, x: Tensor) -> Tensor:
    """What it returns, and parameters."""
    return across.once(spread(model(x)) + model.log_scale.exp() + model.two.weight.pow(2).sum())


@contextmanager
def chosen(put: Callable[[Any], object], before: Any, value: Any) -> Iterator[None]:
    """Have another value for a while."""
    put(value)
    try:
        yield
    finally:
        put(before)


def around(change: Callable[[Any], AbstractContextManager[object]]) -> Loss:
    """One view as the model is, one with something else around the call."""

    def loss(model: Any, x: Tensor) -> Tensor:
        one = model(x)
        with change(model):
            other = model(x.flip(1))
        return both(one, other)

    return loss


def steered(model: Any) -> AbstractContextManager[object]:
    """A hook for one call."""
    handle: AbstractContextManager[object] = model.one.register_forward_hook(lambda m, _, out: out + torch.tanh(m.bias))
    return handle


def by_structure(model: Any, x: Tensor) -> Tensor:
    """Several things that it returns."""
    found = model(x)
    out, (parameter, given) = found["nested"]
    return across.once(spread(found["out"] + out + 0.1 * found["fixed"]) + parameter * across.mean(given.mean()))


def by_changed_result(model: Any, x: Tensor) -> Tensor:
    """A result that is changed in place."""
    out = model(x)
    out += 1
    return across.once(spread(out))


def by_given_dict(model: Any, x: Tensor) -> Tensor:
    """An argument with a gradient, in a dict that is filled anew for the next call."""
    given = {"condition": torch.sin(model.two.bias)}
    one = model(x, given)
    given["condition"] = x[:, 1:].flip(1)
    return both(one, model(x.flip(1), given))


def by_views(model: Any, x: Tensor) -> Tensor:
    """Views that nobody changes."""
    out, part, turned = model(x)
    return across.once(spread(out) + spread(part) + spread(turned.T * out))


def by_a_view_of_what_was_changed(model: Any, x: Tensor) -> Tensor:
    """One result is changed in place, and another one is a view of it."""
    out, part, _ = model(x)
    out.mul_(x[:, :3])
    return across.once(spread(part))


def by_a_gradient_of_its_own(model: Any, x: Tensor) -> Tensor:
    """A backward before the backward."""
    given = torch.sin(model.log_scale) * x
    out = model(given)
    (slope,) = torch.autograd.grad(out.pow(2).sum(), given, retain_graph=True)
    return across.once(spread(out * (1 + slope.detach().mean(1, keepdim=True))))


class Towers(nn.Module):
    """Two towers that are called by methods, one of them a list of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        self.text = nn.ModuleList([nn.Linear(4, 6), nn.Linear(6, 3)])
        self.scale = nn.Parameter(torch.ones(3))

    def encode_image(self, x: Tensor) -> Tensor:
        """(n, 4) → (n, 3)."""
        return unit(self.image(x)) * self.scale

    def encode_text(self, x: Tensor) -> Tensor:
        """(n, 4) → (n, 3)."""
        for layer in self.text:
            x = layer(x)
        return unit(x)


def contrastive(model: Any, x: Tensor) -> Tensor:
    """Own images against all texts."""
    images = model.encode_image(x)
    return F.cross_entropy(images @ across.gather(model.encode_text(x.flip(1))).T, mine(images))


RECOMPUTED: dict[str, tuple[Make, Loss]] = {
    "two calls": (altered(), by_two_calls),
    "structures": (altered(many), by_structure),
    "a result that is changed": (altered(), by_changed_result),
    "arguments with a gradient": (altered(), by_given_dict),
    "parameters beside it": (altered(), by_parameter),
    "views": (altered(views), by_views),
    "a checkpoint inside": (altered(lambda _, x, run: checkpoint(run, x, use_reentrant=False)), by_two_calls),
    "towers that are called by methods": (seeded(Towers), contrastive),
    # Another split is another update.
    "split: a buffer that moves": (altered(partial(moving, replacing=False)), by_two_calls),
    "split: a buffer that is replaced": (altered(partial(moving, replacing=True)), by_two_calls),
    "split: a spectral norm": (spectral, by_two_calls),
    "split: noise of torch": (noisy(lambda: float(torch.rand(()))), by_two_calls),
    "split: noise of Python": (noisy(random.random), by_two_calls),
    "split: noise of numpy": (noisy(lambda: float(np.random.rand())), by_two_calls),  # noqa: NPY002 - this one is meant
}
OTHER_VALUES = "returned other values"
REFUSED: dict[str, tuple[Make, Loss, str]] = {
    "an attribute": (
        altered(), around(lambda m: chosen(partial(setattr, m, "which"), 0, 1)), r"Adapted\.which was changed"
    ),
    "what is in a dict": (
        altered(), around(lambda m: chosen(partial(m.options.__setitem__, "which"), 0, 1)), r"options\.which was"
    ),
    "a mode": (altered(), around(lambda m: chosen(m.train, True, False)), r"Adapted\.training was changed"),
    "a hook": (altered(), around(steered), "was changed between"),
    "frozen parameters": (
        altered(), around(lambda m: chosen(m.one.requires_grad_, True, False)), r"one\.weight was changed"
    ),
    "a buffer that is filled": (altered(), around(lambda m: chosen(m.shift.fill_, 0.0, 1.0)), "shift was changed"),
    "a global": (
        altered(lambda _, x, run: run(x) * (1 + there[0])),
        around(lambda _: chosen(partial(there.__setitem__, 0), 0.0, 1.0)),
        OTHER_VALUES,
    ),
    "a generator of its own": (
        noisy(lambda: float(torch.rand((), generator=own_generator))), by_two_calls, OTHER_VALUES
    ),
    "an input that it changes": (
        altered(lambda _, x, run: run(x.mul_(2))), lambda model, x: by_parameter(model, x * 1), "or changes its input"
    ),
    "something hidden": (
        altered(lambda _, x, run: Hidden(run(x))),
        lambda model, x: across.once(spread(model(x).value)),
        r"an object that no one can look into \(Hidden\)",
    ),
    "what it puts aside": (
        altered(),
        lambda model, x: both(torch.cat([model(x), model.aside], 1), x[:, :1]),  # before they meet
        "something from the inside",
    ),
    "a view of what was changed": (altered(views), by_a_view_of_what_was_changed, "were changed in place"),
    "a gradient of its own": (altered(), by_a_gradient_of_its_own, "a derivative of its own"),
    "hooks on all parameters": (hooked, by_parameter, "no parameter"),
}  # fmt: skip


def rows(number: int) -> Tensor:
    """Return a batch."""
    return torch.randn(11, 4, generator=generator(number), dtype=torch.float64)


def recomputing(model: nn.Module, loss: Loss, activations: Any = "recompute") -> BigStep:
    """Return a step in four micro-batches."""
    return step_of(model, loss, 3, check=False, activations=activations)


def assert_big_batch(name: str, make: Make, loss: Loss, activations: Any) -> None:
    """Some updates are the big batch's; buffers move once for each micro-batch, as where activations are kept."""
    model, kept, true = make(), make(), make()
    step, keeping, optimizer = (
        recomputing(model, loss, activations),
        recomputing(kept, loss, "keep"),
        sgd(trained(true)),
    )
    for number in range(3):
        seed(number)
        update = step(rows(number))
        seed(number)
        keeping(rows(number))
        assert distance([*weights(model), *model.buffers()], [*weights(kept), *kept.buffers()]) <= 1e-12
        if "split" not in name:
            optimizer.zero_grad()
            value = loss(true, rows(number))
            value.backward()
            optimizer.step()
            assert distance(weights(model), weights(true)) <= 1e-12
            assert abs(float(update.loss) - float(value.detach())) <= 1e-12
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("activations", ["recompute", "auto"])
@pytest.mark.parametrize("name", RECOMPUTED)
def test_what_can_be_recomputed(name: str, activations: str) -> None:
    """It is, under "auto" as well, and leaves no trace."""
    assert_big_batch(name, *RECOMPUTED[name], activations)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_recomputed(name: str) -> None:
    """It is refused in the first window, and nothing is changed; under "auto" activations are kept."""
    make, loss, words = REFUSED[name]
    model = make()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CannotRecompute, match=words) as caught:
        recomputing(model, loss)(rows(0))
    assert 'Options(activations="keep")' in str(caught.value)
    assert not any("forward" in vars(module) for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    if name != "a generator of its own":  # the first try has drawn from it
        assert_big_batch(name, make, loss, "auto")


@pytest.mark.parametrize("activations", ["recompute", "auto"])
def test_modules_are_recomputed_where_methods_call_them(activations: str) -> None:
    """Below their hooks, but for the first micro-batch's; only the optimizer's parameters get gradients."""
    model: Any = seeded(Towers)()
    calls = list[object]()
    model.image.register_forward_hook(lambda *_: calls.append(0))
    options = Options(activations=activations, check=False)  # type: ignore[arg-type]
    optimizer = sgd([*model.image[2].parameters(), *model.text.parameters()])
    step = BigStep(model, optimizer, contrastive, micro_batch_size=3, options=options)
    step(rows(0))
    calls.clear()
    step(rows(1))
    assert len(calls) == 4
    assert all(p.grad is None for p in model.parameters())


def test_autocast_inside_the_loss_holds_in_both_runs() -> None:
    """It is that of the call, not that of backward."""
    inside: list[torch.dtype] = []

    def asking(model: Any, x: Tensor, run: Run) -> Any:
        inside.append(model.one(x).dtype)
        return run(x)

    def loss(model: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            one = model(x.float())
        with torch.autocast("cpu", enabled=False):
            return both(one.float(), model(x.float()))

    step = recomputing(altered(asking)().float(), loss)
    step(rows(0))
    inside.clear()
    step(rows(1))
    assert len(inside) == 14  # four micro-batches call twice, and three of them run both calls again
    assert inside.count(torch.bfloat16) == 7


def test_an_error_of_the_users_own_comes_out_at_once() -> None:
    """The window is not run again for it, nothing is changed, and later windows are recomputed."""
    calls: list[int] = []

    def loss(model: Any, x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 6:
            raise RuntimeError("mine")
        return by_parameter(model, x)

    model = altered()()
    step = recomputing(model, loss, "auto")
    step(rows(0))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="mine"):
        step(rows(1))
    assert len(calls) == 6
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    step(rows(2))


def test_a_copy_of_a_model_that_a_loss_makes_is_a_model() -> None:
    """A teacher that is copied in a window has weights and a forward of its own, and so has one that was pickled."""
    teachers: list[Any] = []

    def loss(model: Any, x: Tensor) -> Tensor:
        model.aside = None
        if number and not teachers:
            teachers.extend([copy.deepcopy(model), pickle.loads(pickle.dumps(model))])  # noqa: S301 - our own
        with torch.no_grad():
            target = (teachers[0] if teachers else model)(x.flip(1))
        return both(model(x), target)

    model = altered()()
    step = recomputing(model, loss)
    for number in range(3):
        step(rows(number))
    for teacher in teachers:
        assert distance(weights(teacher), weights(model)) > 1e-3
        assert isinstance(teacher.forward, MethodType)
        assert torch.equal(teacher(rows(0)), Adapted.forward(teacher, rows(0)))


def test_generators_stay_where_nobody_draws() -> None:
    """A window without noise moves none of them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    step = recomputing(model, lambda model, x: model(x).square().mean(), "keep")
    before = torch.get_rng_state()
    step(rows(0))
    assert torch.equal(torch.get_rng_state(), before)
