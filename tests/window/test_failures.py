"""What fails inside a backward, a step or after it: nothing counts twice, no step is made twice, and it is said."""

import copy
import pickle
import re
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, StepLR

from bigbatch import Accumulator, BigStep, Options
from bigbatch.distributed.statement import Statement
from bigbatch.errors import LossError, StateError, WindowBroken
from bigbatch.state.rng import Randomness
from bigbatch.state.snapshot import Buffers, untouched
from bigbatch.window.gradients import Gradients
from bigbatch.window.stepper import Stepper
from bigbatch.window.window import Window
from tests.support.bombs import Bomb, Restless, restless_loss, seed
from tests.support.coupled import siglip, twins
from tests.support.reference import distance, sgd, trained, weights
from tests.support.samples import Batch, mlp, rows, seeded
from tests.support.training import MASKED, PLAIN, Training, micro_batches

BATCHES = micro_batches(case=PLAIN)  # of 3, 1, 4, 2, 5, 1 and 2 samples
MASKED_BATCHES = micro_batches()


class Once:
    """Fails the first time that it is called, and never again."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Fail, or do nothing."""
        error, self.error = self.error, None
        if error is not None:
            raise error


def before(call: Callable[[], Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Call something, that may fail, before a function runs."""
    return lambda *args, **kwargs: (call(), function(*args, **kwargs))[1]


def after(call: Callable[[], Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Call it when the function has run, as Ctrl-C may come."""
    return lambda *args, **kwargs: (function(*args, **kwargs), call())[0]


def fail(*_: Any, **__: Any) -> Any:
    """Fail, as a user's own code may."""
    raise OSError("no space left on device")


ERRORS: dict[str, Callable[[], BaseException]] = {
    "ctrl-c": KeyboardInterrupt,
    "memory": lambda: torch.OutOfMemoryError("out of memory"),
    "runtime": lambda: RuntimeError("device-side assert triggered"),
}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize(
    ("where", "place"),
    [
        ((Gradients, "remember", after), 0),  # before the count
        ((Gradients, "remember", after), 1),
        ((Window, "close", before), 2),  # before the step
        ((Statement, "big_loss", before), 2),  # in it
    ],
)
def test_a_failure_after_a_backward_breaks_the_window(
    where: tuple[type, str, Callable[..., Any]], place: int, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that tries the micro-batch again must not count it twice."""
    training, fault = Training(steps=3, case=PLAIN), ERRORS[error]()
    for batch in BATCHES[:place]:
        training.backward(batch)
    owner, name, around = where
    monkeypatch.setattr(owner, name, around(Once(fault), getattr(owner, name)))
    with pytest.raises(type(fault)):
        training.backward(BATCHES[place])
    for call in (partial(training.backward, BATCHES[place]), training.accumulator.flush):
        with pytest.raises(WindowBroken, match=r"(?s)backward.*failed.*accumulator.discard\(\)"):
            call()
    training.accumulator.discard()
    training.train(BATCHES)
    training.assert_big_batches(BATCHES[:3], BATCHES[3:6], BATCHES[6:])


NAMED: dict[str, tuple[Callable[[Training], Callable[[], object]], str]] = {
    "hook": (lambda t: t.accumulator.before_step(fail), "a before_step hook {} Nothing was stepped"),
    "step": (
        lambda t: t.optimizer.register_step_pre_hook(fail).remove,
        "optimizer.step() {} It may have changed some parameters",
    ),
}


@pytest.mark.parametrize("scaler", [None, torch.amp.GradScaler("cpu", init_scale=4.0)], ids=["plain", "scaler"])
@pytest.mark.parametrize("name", NAMED)
def test_what_fails_at_the_end_is_named(name: str, scaler: torch.amp.GradScaler | None) -> None:
    """Every call says the same, and dropping the window makes the next one exact."""
    register, text = NAMED[name]
    training = Training(steps=2, scaler=scaler)
    remove = register(training)
    training.backward(MASKED_BATCHES[0])
    with pytest.raises(OSError, match="no space"):
        training.backward(MASKED_BATCHES[1])
    told, accumulator = re.escape(text.format("failed with OSError: no space left on device.")), training.accumulator
    again = partial(training.backward, MASKED_BATCHES[0])
    for call in (again, accumulator.flush, accumulator.state_dict, partial(accumulator.over, MASKED_BATCHES)):
        with pytest.raises(WindowBroken, match=told + r"(.|\n)*accumulator.discard\(\)") as caught:
            call()
        assert isinstance(caught.value.__cause__, OSError)
    accumulator.discard()
    training.assert_untouched()
    remove()
    training.train(MASKED_BATCHES[:4])
    training.assert_big_batches(MASKED_BATCHES[:2], MASKED_BATCHES[2:4])


@pytest.mark.parametrize("late", [False, True], ids=["second optimizer", "scheduler"])
def test_a_step_that_fails_after_another_has_stepped(late: bool) -> None:
    """The first optimizer's parameters are changed, and the error says so; nor does it say so of a scheduler."""
    model = mlp()()
    optimizers = [sgd(trained(model)[:2]), torch.optim.AdamW(trained(model)[2:])]
    scheduler = LambdaLR(optimizers[0], lambda step: 1.0 if step == 0 else fail()) if late else None
    accumulator = Accumulator(model, optimizers, steps=1, scheduler=scheduler)
    if not late:
        optimizers[1].register_step_pre_hook(fail)
    with pytest.raises(OSError, match="no space"):
        accumulator.backward(PLAIN.loss(model, BATCHES[0]))
    told = "The optimizer has stepped; a scheduler has not" if late else "may have changed some parameters"
    with pytest.raises(WindowBroken, match=told):
        accumulator.flush()
    assert distance(weights(model)[:2], weights(mlp()())[:2]) > 0
    accumulator.discard()


# Losses that reach nothing.


@pytest.mark.parametrize("place", [0, 2])
def test_a_loss_that_reaches_no_parameter_is_refused(place: int) -> None:
    """At a window's first backward, also after a micro-batch that counted nothing; everything is as before."""
    training = Training(steps=2)
    other = nn.Linear(3, 1).double()
    for batch in MASKED_BATCHES[:place]:
        training.backward(batch)
    with pytest.raises(LossError, match=r"(?s)reaches none of the optimizer's 4 parameters: nothing was added.*detach"):
        training.accumulator.backward(other(BATCHES[place]["x"]).pow(2).mean())
    assert training.accumulator.remaining == 2
    assert all(p.grad is None for p in [*other.parameters(), *training.model.parameters()])
    training.train(MASKED_BATCHES[place:])
    training.assert_big_batches(*(MASKED_BATCHES[start : start + 2] for start in range(0, 7, 2)))
    nothing = {**MASKED_BATCHES[0], "partly": torch.full_like(MASKED_BATCHES[0]["partly"], -100)}
    training.backward(nothing)
    with pytest.raises(LossError, match="reaches none"):
        training.accumulator.backward(MASKED.loss(mlp()(), MASKED_BATCHES[1]))
    assert training.accumulator.remaining == 1


# Steps.


norms = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
MODES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Batch], Any], Options]] = {
    "plain": (mlp(), PLAIN.loss, Options()),
    "coupled": (twins, siglip, Options()),
    "recomputed": (twins, siglip, Options(activations="recompute")),
    "norms": (norms, lambda m, b: m(b["x"]).square().mean(), Options()),
}
STEPPING: dict[str, Callable[[Any, Any, Once, pytest.MonkeyPatch], object]] = {
    "scheduler": lambda _, s, once, patch: patch.setattr(s, "step", before(once, s.step)),
    "pre-hook": lambda o, _, once, __: o.register_step_pre_hook(once),
    "post-hook": lambda o, _, once, __: o.register_step_post_hook(once),
    "end of the step": lambda _, __, once, patch: patch.setattr(Stepper, "step", after(once, Stepper.step)),
    "end of the window": lambda _, __, once, patch: patch.setattr(Window, "close", after(once, Window.close)),
}


@pytest.mark.parametrize(
    ("mode", "where", "error"),
    [(m, w, list(ERRORS)[(i + j) % 3]) for i, m in enumerate(MODES) for j, w in enumerate(STEPPING)],
)
def test_a_step_that_has_begun_is_never_made_again(
    mode: str, where: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any mode, whatever fails; the error says that the step had begun, and buffers stay as it left them."""
    make, loss, options = MODES[mode]
    model, twin, fault = make(), make(), ERRORS[error]()
    optimizer = sgd(trained(model))
    scheduler, steps = StepLR(optimizer, 1), list[int]()
    step = BigStep(model, optimizer, loss, micro_batch_size=4, scheduler=scheduler, options=options)
    BigStep(twin, sgd(trained(twin)), loss, micro_batch_size=4, options=options)(rows(10, 0))
    optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    STEPPING[where](optimizer, scheduler, Once(fault), monkeypatch)
    with pytest.raises((type(fault), RuntimeError)) as caught:  # out of memory is told as ours
        step(rows(10, 0))
    assert len(steps) == 1
    told = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "step" in told
    assert "may have changed" in told or "has stepped" in told or "was made" in told
    if where != "pre-hook":
        ours, theirs = ([*weights(each), *each.buffers()] for each in (model, twin))
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert all(p.grad is None for p in model.parameters())
    step(rows(10, 1))
    assert len(steps) == 2


# What a failed attempt has changed.


@pytest.mark.parametrize("which", [Buffers, Randomness])
@pytest.mark.parametrize("during", ["micro-batch", "count"])
def test_what_cannot_be_restored_is_raised(which: type, during: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory, and again while its traces are removed: another try would start from other numbers."""
    seed()
    model = Restless(Bomb())
    step = BigStep(model, sgd(trained(model)), restless_loss, micro_batch_size=4)
    for number in range(2):  # samples are compared in both
        step(rows(8, number))
    calls = Counter[type]()
    for owner in (Buffers, Randomness):
        fault = Once(torch.OutOfMemoryError("out of memory") if owner is which else None)
        counting = partial(calls.update, [owner])
        monkeypatch.setattr(owner, "restore", before(counting, before(fault, owner.restore)))
    if during == "count":
        with pytest.raises(WindowBroken, match="could not be restored"), untouched([model]):
            raise MemoryError
    else:
        step.before_step(Once(torch.OutOfMemoryError("out of memory")))
        with pytest.raises(WindowBroken, match=r"(?s)could not be restored.*checkpoint"):
            step(rows(8, 0))
    assert calls.keys() == {Buffers, Randomness}


def test_activations_are_freed_before_anything_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """What restores takes memory, too."""
    alive: list[bool] = []
    held: list[Any] = []

    def loss_fn(model: Any, batch: Batch) -> Tensor:
        if len(batch["x"]) > 2:
            activations = torch.zeros(3)
            held.append(weakref.ref(activations))
            raise torch.OutOfMemoryError("out of memory")
        return PLAIN.loss(model, batch)

    restore = Buffers.restore

    def look(buffers: Buffers) -> None:
        alive.extend(each() is not None for each in held)
        restore(buffers)

    monkeypatch.setattr(Buffers, "restore", look)
    model = mlp()()
    BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=4, options=Options(check=False))(rows(8, 0))
    assert alive
    assert not any(alive)


# Copies.


@pytest.mark.parametrize("how", [copy.deepcopy, copy.copy, lambda each: pickle.loads(pickle.dumps(each))])  # noqa: S301
@pytest.mark.parametrize(
    "make", [lambda m, o: Accumulator(m, o, steps=2), lambda m, o: BigStep(m, o, PLAIN.loss, micro_batch_size=2)]
)
def test_a_copy_is_refused(make: Callable[..., Any], how: Callable[[Any], Any]) -> None:
    """It would watch the optimizer of the first, and report updates as skipped."""
    model = mlp()()
    optimizer = sgd(trained(model))
    found = make(model, optimizer)
    with pytest.raises(StateError, match=r"(?s)cannot be copied or pickled.*state_dict\(\)"):
        how((model, optimizer, found) if how is not copy.copy else found)
