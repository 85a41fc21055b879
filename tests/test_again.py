"""Models that run twice, the first time without a graph: where that is right it is done, elsewhere it is not."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import BigStep, Options, across
from bigbatch.errors import LossError
from tests.reference import distance, sgd, trained, weights

Loss = Callable[[Any, Tensor], Tensor]


class Features(nn.Module):
    """Says more than it returns."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 6), nn.Linear(6, 3)
        self.log_scale = nn.Parameter(torch.tensor(0.3))
        self.register_buffer("seen", torch.zeros(()))
        self.aside: Any = None
        self.condition: Any = None
        self.drop = 0.0
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor, condition: Tensor | None = None) -> Any:
        """Run."""
        hidden = torch.tanh(self.one(x))
        condition = self.condition if condition is None else condition
        if condition is not None:
            hidden = hidden + condition
        self.aside = hidden
        self.seen.add_(len(x))
        return self.two(hidden)


class Many(Features):
    """Returns structures: one thing twice, a parameter, its input, an integer and something without gradient."""

    def forward(self, x: Tensor, condition: Tensor | None = None) -> Any:
        """Run."""
        out = super().forward(x, condition)
        return {
            "out": out,
            "nested": (out, [self.log_scale, x]),
            "scale": self.log_scale.exp(),
            "fixed": out.detach() * 2,
            "best": out.argmax(1),
            "nothing": None,
            "name": "many",
        }


class Hidden:
    """Something that no one looks into."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Wrapped(Features):
    """Returns something that no one looks into."""

    def forward(self, x: Tensor, condition: Tensor | None = None) -> Any:
        """Run."""
        return Hidden(super().forward(x, condition))


class Changing(Features):
    """Changes what it is given, here a copy of the batch."""

    def forward(self, x: Tensor, condition: Tensor | None = None) -> Any:
        """Run."""
        return super().forward(x.mul_(2), condition)


def centred(out: Tensor) -> Tensor:
    """A loss of all samples."""
    return across.mean((out - across.mean(out.mean(0))).pow(2).mean()).sqrt()


def by_result(model: Any, x: Tensor) -> Tensor:
    """What the model returns."""
    return across.once(centred(model(x)))


def by_structure(model: Any, x: Tensor) -> Tensor:
    """Several things that it returns."""
    found = model(x)
    nested, (parameter, given) = found["nested"]
    value = found["scale"] * centred(nested + 0.1 * found["fixed"]) + parameter * across.mean(given.mean())
    return across.once(value)


def by_hidden(model: Any, x: Tensor) -> Tensor:
    """What is in a thing that it returns."""
    return across.once(centred(model(x).value))


def by_what_was_put_aside(model: Any, x: Tensor) -> Tensor:
    """What it returns and what it has put aside."""
    out, aside = model(x), model.aside
    return across.once(centred(out) + centred(aside))


def by_what_was_put_aside_alone(model: Any, x: Tensor) -> Tensor:
    """Only what it has put aside."""
    model(x)
    return across.once(centred(model.aside))


def by_hook(model: Any, x: Tensor) -> Tensor:
    """What it returns, by a hook."""
    latest = []
    handle = model.two.register_forward_hook(lambda *given: latest.append(given[2]))
    out = model(x)
    handle.remove()
    return across.once(centred(latest[0] + out))


def by_two_calls(model: Any, x: Tensor) -> Tensor:
    """Two runs."""
    one, other = model(x), model(x.flip(1))
    return across.once(centred(one) + centred(one * other))


def by_changed_result(model: Any, x: Tensor) -> Tensor:
    """A result that is changed in place."""
    out = model(x)
    out += 1
    return across.once(centred(out))


def by_given_condition(model: Any, x: Tensor) -> Tensor:
    """An input with a gradient."""
    return across.once(centred(model(x, torch.sin(model.one.bias))))


def by_condition_on_the_model(model: Any, x: Tensor) -> Tensor:
    """An input that is not given as one."""
    model.condition = torch.sin(model.one.bias)
    try:
        out = model(x)
    finally:
        model.condition = None
    return across.once(centred(out))


def by_parameter(model: Any, x: Tensor) -> Tensor:
    """What it returns, and parameters."""
    return across.once(centred(model(x)) + model.log_scale.exp() + model.two.weight.pow(2).sum())


CASES: dict[str, tuple[type[Features], Loss, bool]] = {
    "result": (Features, by_result, True),
    "structure": (Many, by_structure, True),
    "two calls": (Features, by_two_calls, True),
    "changed result": (Features, by_changed_result, True),
    "a condition that is given": (Features, by_given_condition, True),
    "parameters beside it": (Features, by_parameter, True),
    "something hidden": (Wrapped, by_hidden, False),
    "put aside": (Features, by_what_was_put_aside, False),
    "put aside alone": (Features, by_what_was_put_aside_alone, False),
    "by a hook": (Features, by_hook, False),
}


def made(kind: type[Features]) -> Features:
    """Return the same model every time."""
    torch.manual_seed(0)
    return kind().double()


def rows(number: int) -> Tensor:
    """Return a batch."""
    return torch.randn(11, 4, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def step_of(model: nn.Module, loss: Loss) -> BigStep:
    """Return a step that runs the model again."""
    options = Options(activations="recompute", check=False)
    return BigStep(model, sgd(trained(model)), loss, micro_batch_size=3, options=options)


@pytest.mark.parametrize("name", CASES)
def test_the_big_batch_whatever_a_loss_hangs_on(name: str) -> None:
    """The short way is taken where it is right, and left where it is not; buffers move once for each micro-batch."""
    kind, loss, short = CASES[name]
    mine, true = made(kind), made(kind)
    optimizer, step = sgd(trained(true)), step_of(mine, loss)
    for number in range(3):
        update = step(rows(number))
        optimizer.zero_grad()
        value = loss(true, rows(number))
        value.backward()
        optimizer.step()
        assert distance(weights(mine), weights(true)) <= 1e-12
        assert abs(float(update.loss) - float(value.detach())) <= 1e-12
    assert step._together._valued is short
    assert mine.seen == true.seen
    assert "forward" not in vars(mine)


def test_a_model_that_changes_its_input_is_not_run_again() -> None:
    """Neither way can; where it may be chosen, activations are kept."""

    def loss(model: Any, x: Tensor) -> Tensor:
        return by_result(model, x * 1)

    with pytest.raises(LossError, match=r"changes its input in place when it runs"):
        step_of(made(Changing), loss)(rows(0))
    the_big_batch_of(Changing, loss, False, "auto")


@pytest.mark.parametrize("activations", ["recompute", "auto"])
def test_a_condition_that_is_gone_when_a_model_runs_again(activations: str) -> None:
    """What loss_fn has set on the model for a call is set for its second run."""
    the_big_batch_of(loss=by_condition_on_the_model, activations=activations)


def test_a_condition_outside_of_the_model_that_is_gone_is_refused() -> None:
    """Both runs are compared; where it may be chosen, activations are kept."""
    factor = [1.0]

    class Scaled(Features):
        def forward(self, x: Tensor, condition: Tensor | None = None) -> Any:
            return super().forward(x, condition) * factor[0]

    def loss(model: Any, x: Tensor) -> Tensor:
        factor[0] = 2.0
        out = model(x)
        factor[0] = 1.0
        return across.once(centred(out))

    model = made(Scaled)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(LossError, match=r"(?s)other values when it was run again.*model\(x, condition\)"):
        step_of(model, loss)(rows(0))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    the_big_batch_of(Scaled, loss, activations="auto")


def test_a_loss_that_hangs_on_the_inside_later() -> None:
    """Every window is looked at, not the first alone."""

    def loss(model: Any, x: Tensor) -> Tensor:
        out, aside = model(x), model.aside
        return across.once(centred(out) + (centred(aside) if late else 0.0))

    mine, true = made(Features), made(Features)
    optimizer, step = sgd(trained(true)), step_of(mine, loss)
    for number in range(4):
        late = number > 1
        step(rows(number))
        assert step._together._valued is not late
        optimizer.zero_grad()
        loss(true, rows(number)).backward()
        optimizer.step()
        assert distance(weights(mine), weights(true)) <= 1e-12


def test_hooks_of_parameters_see_gradients_alone() -> None:
    """None of them is called for nothing, and each micro-batch's gradient comes by."""
    mine, true = made(Features), made(Features)
    seen: list[Tensor] = []
    mine.one.weight.register_hook(seen.append)
    step_of(mine, by_result)(rows(0))
    by_result(true, rows(0)).backward()
    assert len(seen) >= 4
    assert all(isinstance(each, Tensor) for each in seen)
    assert true.one.weight.grad is not None
    assert distance([torch.stack(seen[-4:]).sum(0)], [true.one.weight.grad]) <= 1e-12


def test_where_every_parameter_has_a_hook() -> None:
    """None is left to stand for the model."""
    mine, true = made(Features), made(Features)
    for parameter in mine.parameters():
        parameter.register_hook(lambda gradient: gradient * 1)
    step = step_of(mine, by_result)
    step(rows(0))
    assert not step._together._valued
    optimizer = sgd(trained(true))
    by_result(true, rows(0)).backward()
    optimizer.step()
    assert distance(weights(mine), weights(true)) <= 1e-12


def test_only_the_optimizers_parameters_get_gradients() -> None:
    """Others of the same model are left alone."""
    model = made(Features)
    step = BigStep(
        model,
        sgd(list(model.two.parameters())),
        by_result,
        micro_batch_size=3,
        options=Options(activations="recompute", check=False),
    )
    for number in range(2):
        step(rows(number))
    assert step._together._valued
    assert model.one.weight.grad is None


def test_autocast_inside_the_loss_holds_in_both_runs() -> None:
    """Results have its precision, and copies of weights are no one else's."""
    inside: list[torch.dtype] = []

    class Asking(Features):
        def forward(self, x: Tensor, condition: Tensor | None = None) -> Any:
            found = super().forward(x, condition)
            inside.append(found.dtype)
            return found

    def loss(model: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x.float())
        return across.once(centred(out.float()))

    torch.manual_seed(0)
    mine = Asking()
    true = copy.deepcopy(mine)
    step = step_of(mine, loss)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step(rows(0))
    assert step._together._valued
    assert set(inside) == {torch.bfloat16}
    optimizer = sgd(trained(true))
    loss(true, rows(0)).backward()
    optimizer.step()
    assert distance(weights(mine), weights(true)) <= 3e-2
    assert distance(weights(mine), weights(true)) > 0


def test_an_error_of_the_users_own_comes_out() -> None:
    """After one more try, and nothing is changed."""
    calls: list[int] = []

    def loss(model: Any, x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 2:
            raise ValueError("mine")
        return by_result(model, x)

    model = made(Features)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="mine"):
        step_of(model, loss)(rows(0))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert F.relu is torch.nn.functional.relu


# What a second run must not get wrong in silence.


class Views(Features):
    """Returns the same memory several times."""

    def forward(self, x: Tensor, condition: Tensor | None = None) -> Any:
        """Run."""
        out = super().forward(x, condition)
        return out, out[:, :2], out.T


class Reshaping(Features):
    """Returns its input, looked at in another way."""

    def forward(self, x: Tensor, condition: Tensor | None = None) -> Any:
        """Run."""
        del condition
        return x.view(-1, 2)


def by_a_view_of_what_was_changed(model: Any, x: Tensor) -> Tensor:
    """One result is changed in place, and another one is a view of it."""
    out, part, _ = model(x)
    out.mul_(x[:, :3])
    return across.once(centred(part))


def by_what_a_view_was_changed_of(model: Any, x: Tensor) -> Tensor:
    """The other way round."""
    out, part, turned = model(x)
    part.mul_(x[:, :2])
    return across.once(centred(out) + centred(turned.T))


def by_an_input_that_was_changed_by_a_view(model: Any, x: Tensor) -> Tensor:
    """The result is changed in place, and never used."""
    given = torch.sin(model.log_scale) * x
    model(given).mul_(2)
    return across.once(centred(given.exp()))


def by_views(model: Any, x: Tensor) -> Tensor:
    """Views that nobody changes."""
    out, part, turned = model(x)
    return across.once(centred(out) + centred(part) + centred(turned.T * out))


def by_a_gradient_of_its_own(model: Any, x: Tensor) -> Tensor:
    """A backward before the backward."""
    given = torch.sin(model.log_scale) * x
    out = model(given)
    (slope,) = torch.autograd.grad(out.pow(2).sum(), given, retain_graph=True)
    return across.once(centred(out * (1 + slope.detach().mean(1, keepdim=True))))


SILENT: dict[str, tuple[type[Features], Loss, bool]] = {
    "a view of what was changed": (Views, by_a_view_of_what_was_changed, False),
    "what a view was changed of": (Views, by_what_a_view_was_changed_of, False),
    "an input that was changed by a view": (Reshaping, by_an_input_that_was_changed_by_a_view, False),
    "views": (Views, by_views, True),
    "a gradient of its own": (Features, by_a_gradient_of_its_own, False),
}


@pytest.mark.parametrize("name", SILENT)
def test_what_shares_memory_or_a_backward(name: str) -> None:
    """Changes in place go by the memory, not by one node for all; where there are any, the short way is left."""
    the_big_batch_of(*SILENT[name])


def the_big_batch_of(
    kind: type[Features] = Features, loss: Loss = by_result, short: bool = True, activations: Any = "recompute"
) -> None:
    """One update is the big batch's."""
    mine, true = made(kind), made(kind)
    options = Options(activations=activations, check=False)
    step = BigStep(mine, sgd(trained(mine)), loss, micro_batch_size=3, options=options)
    step(rows(0))
    assert step._together._valued is short
    optimizer = sgd(trained(true))
    loss(true, rows(0)).backward()
    optimizer.step()
    assert distance(weights(mine), weights(true)) <= 1e-12


def test_parameters_that_are_frozen_for_one_call() -> None:
    """They get no gradient by that call, though in backward they are trained."""

    def loss(model: Any, x: Tensor) -> Tensor:
        model.one.requires_grad_(False)
        out = model(x)
        model.one.requires_grad_(True)
        return across.once(centred(out) + centred(model.one(x)))

    the_big_batch_of(loss=loss, short=False, activations="auto")
    with pytest.raises(RuntimeError, match="checkpoint"):
        the_big_batch_of(loss=loss)


class Centred(Features):
    """Reads a buffer that every run moves a little, in place or not."""

    centre: Tensor
    in_place = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(6))

    def forward(self, x: Tensor, condition: Tensor | None = None) -> Any:
        """Run."""
        del condition
        hidden = self.aside = torch.tanh(self.one(x))
        if self.in_place:
            self.centre.mul_(0.999).add_(hidden.detach().mean(0), alpha=0.001)
        else:
            self.centre = self.centre * 0.999 + hidden.detach().mean(0) * 0.001
        return self.two((hidden - self.centre) * torch.exp(self.centre))


class Replacing(Centred):
    """The same with another tensor each time."""

    in_place = False


class Spectral(Features):
    """A spectral norm, whose vector each run turns."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.one)


def left_behind(kind: type[Features], loss: Loss, activations: Any) -> list[Tensor]:
    """Train a little; returns parameters and buffers."""
    model = made(kind)
    options = Options(activations=activations, check=False)
    step = BigStep(model, sgd(trained(model)), loss, micro_batch_size=3, options=options)
    for number in range(3):
        step(rows(number))
    return [each.detach().double() for each in (*model.parameters(), *model.buffers())]


@pytest.mark.parametrize("kind", [Centred, Replacing, Spectral])
def test_buffers_that_a_run_reads_and_moves(kind: type[Features]) -> None:
    """The second run finds what the first one found, and leaves them where the last first run did."""
    assert distance(left_behind(kind, by_result, "recompute"), left_behind(kind, by_result, "keep")) <= 1e-12


@pytest.mark.parametrize("kind", [Centred, Replacing, Spectral])
def test_buffers_that_a_run_reads_and_moves_in_a_checkpoint(kind: type[Features]) -> None:
    """The same where the loss also hangs on the inside, so that torch's own checkpoint is taken."""
    ours = left_behind(kind, by_what_was_put_aside, "recompute")
    assert distance(ours, left_behind(kind, by_what_was_put_aside, "keep")) <= 1e-12


def test_a_buffer_that_moves_later_is_refused() -> None:
    """Of one that the first micro-batch leaves alone there is no copy."""

    class Later(Centred):
        def forward(self, x: Tensor, condition: Tensor | None = None) -> Any:
            del condition
            if len(x) == 2:  # the last one
                self.centre.add_(0.01)
            return self.two(torch.tanh(self.one(x)) * torch.exp(self.centre))

    with pytest.raises(LossError, match=r"(?s)changes a buffer for some micro-batches.*activations=\"keep\""):
        left_behind(Later, by_result, "recompute")
    assert distance(left_behind(Later, by_result, "auto"), left_behind(Later, by_result, "keep")) == 0


def test_a_model_that_changes_its_own_parameters_is_not_run_again() -> None:
    """An average of others would move twice."""

    class Averaging(Features):
        def __init__(self) -> None:
            super().__init__()
            self.slow = nn.Linear(4, 3).requires_grad_(False)

        def forward(self, x: Tensor, condition: Tensor | None = None) -> Any:
            with torch.no_grad():
                self.slow.weight.mul_(0.999).add_(self.two.weight[:, :4], alpha=0.001)
            return super().forward(x, condition) + self.slow(x)

    with pytest.raises(LossError, match=r"(?s)changes its own parameters when it runs.*activations=\"keep\""):
        step_of(made(Averaging), by_result)(rows(0))


@pytest.mark.parametrize("by", [1e-3, 1e-6])
def test_a_small_difference_between_two_runs_is_one_in_high_precision(by: float) -> None:
    """A counter that moves the result a little, and is not the model's own."""
    calls = [0]

    class Counting(Features):
        def forward(self, x: Tensor, condition: Tensor | None = None) -> Any:
            calls[0] += 1
            return super().forward(x, condition) * (1 + by * calls[0])

    with pytest.raises(LossError, match="other values when it was run again"):
        step_of(made(Counting), by_result)(rows(0))


def test_an_error_of_the_users_own_changes_no_later_window() -> None:
    """Neither of the ways around it has helped, so both are given up again."""

    def loss(model: Any, x: Tensor) -> Tensor:
        if bad:
            raise RuntimeError("mine")
        return by_result(model, x)

    model = made(Features)
    step = BigStep(model, sgd(trained(model)), loss, micro_batch_size=3, options=Options(check=False))
    bad = False
    step(rows(0))
    bad = True
    with pytest.raises(RuntimeError, match="mine"):
        step(rows(1))
    assert step._together._activations(4) == "recompute"
    assert step._together._valued
    bad = False
    step(rows(2))


def test_a_backward_that_failed_leaves_nothing() -> None:
    """A window that was tried and given up holds neither its graph nor the threads."""
    model = made(Features)
    step = step_of(model, by_what_was_put_aside)
    step(rows(0))
    crew, owner = weakref.ref(step._together._crew), weakref.ref(step._together)
    model.aside = None
    del step
    gc.collect()
    assert crew() is None
    assert owner() is None


@pytest.mark.xfail(
    strict=True,
    reason="a model's attributes are those of the micro-batch that ran it last: after a meeting that is another one, "
    "and nothing tells whose a tensor is that needs nothing saved",
)
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_what_was_put_aside_is_read_after_a_meeting(activations: Any) -> None:
    """Should be this micro-batch's own, or refused."""

    class Shifted(Features):
        def forward(self, x: Tensor, condition: Tensor | None = None) -> Any:
            out = super().forward(x, condition)
            self.aside = x[:, :3] + self.two.bias
            return out

    def loss(model: Any, x: Tensor) -> Tensor:
        spread = centred(model(x))
        return across.once(spread + across.mean((x[:, :3] * model.aside).mean()))

    the_big_batch_of(Shifted, loss, activations=activations)
