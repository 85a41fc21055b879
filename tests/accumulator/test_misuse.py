"""Misuse inside a window is caught at its first occurrence, and the message says what was found and what to type."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from bigbatch.errors import UnreadableLoss, WindowBroken, WindowDisturbed
from tests.support.reference import trained, windows
from tests.support.training import MASKED, PLAIN, Training, micro_batches

BATCHES = micro_batches()  # of 3, 1, 4, 2, 5, 1 and 2 samples


# Steps and gradients by hand.


def test_a_step_by_hand_is_refused_and_the_window_goes_on() -> None:
    """`optimizer.step()` left over from the old loop: nothing is stepped, nothing is lost."""
    training = Training(steps=3)
    for batch in training.accumulator.over(BATCHES):
        if training.backward(batch) is None:
            with pytest.raises(WindowDisturbed, match=r"optimizer.step\(\) was called inside a window.*\n.*flush\(\)"):
                training.optimizer.step()
    training.assert_big_batches(*windows(BATCHES, 3))


@pytest.mark.parametrize("then", ["backward", "flush"])
@pytest.mark.parametrize("how", ["bfloat16", "float", "frozen"])
def test_a_model_that_is_cast_or_frozen_inside_a_window_is_noticed(how: str, then: str) -> None:
    """Its gradients would add up in another type from there on, or not at all."""
    training = Training(steps=3, case=PLAIN)
    training.backward(BATCHES[0])
    if how == "frozen":
        trained(training.model)[0].requires_grad_(False)
    else:
        getattr(training.model, how)()
    dtype = next(training.model.parameters()).dtype
    batch = {name: each.to(dtype) for name, each in BATCHES[0].items()}
    with pytest.raises(WindowDisturbed, match=r"(?s)(cast from torch.float64 to|frozen) .*accumulator.discard\(\)"):
        _ = training.backward(batch) if then == "backward" else training.accumulator.flush()


MEDDLING: dict[str, Callable[[Training], object]] = {
    "optimizer.zero_grad()": lambda t: t.optimizer.zero_grad(),
    "optimizer.zero_grad(set_to_none=False)": lambda t: t.optimizer.zero_grad(set_to_none=False),
    "model.zero_grad()": lambda t: t.model.zero_grad(),
    "model.zero_grad(set_to_none=False)": lambda t: t.model.zero_grad(set_to_none=False),
    "loss.backward()": lambda t: t.case.loss(t.model, BATCHES[1]).backward(),
    "loss.backward(inputs=...)": lambda t: t.case.loss(t.model, BATCHES[1]).backward(inputs=trained(t.model)[:1]),
    "clip_grad_norm_": lambda t: nn.utils.clip_grad_norm_(t.model.parameters(), 1e-3),
    "one gradient": lambda t: setattr(trained(t.model)[-1], "grad", None),
}
CHANGED = r"gradients changed inside a window, and not by this library.*\n.*accumulator.backward\(loss\).*discard\(\)"


@pytest.mark.parametrize("noticed", ["backward", "flush", "state_dict", "over"])
@pytest.mark.parametrize("how", MEDDLING)
def test_gradients_changed_by_hand_are_noticed(how: str, noticed: str) -> None:
    """At the next call, whichever it is; the window can then only be dropped, and the next one is exact."""
    training = Training(steps=3)
    accumulator = training.accumulator
    training.backward(BATCHES[0])
    MEDDLING[how](training)
    calls: dict[str, Callable[[], object]] = {
        "backward": lambda: training.backward(BATCHES[1]),
        "flush": accumulator.flush,
        "state_dict": accumulator.state_dict,
        "over": lambda: accumulator.over(BATCHES),
    }
    with pytest.raises(WindowDisturbed, match=CHANGED):
        calls[noticed]()
    with pytest.raises(WindowDisturbed, match=CHANGED):
        training.backward(BATCHES[1])
    accumulator.discard()
    training.assert_untouched()
    training.train(BATCHES[2:4])
    training.assert_big_batches(BATCHES[2:4])


def test_a_gradient_in_the_place_of_the_old_one_is_noticed() -> None:
    """Cleared and made anew by hand, a gradient may lie where the window's own lay."""
    for _ in range(50):
        training = Training(steps=3)
        training.backward(BATCHES[0])
        weight = trained(training.model)[0]
        weight.grad = None
        weight.grad = torch.ones_like(weight)
        with pytest.raises(WindowDisturbed, match=CHANGED):
            training.backward(BATCHES[0])


def test_gradients_from_before_the_window_are_refused() -> None:
    """They would be stepped with; the error says how many and how to clear them."""
    training = Training(steps=3)
    MASKED.loss(training.model, BATCHES[0]).backward()
    with pytest.raises(
        WindowDisturbed, match=r"4 of 4 parameters have a gradient before .*\n.*optimizer.zero_grad\(\)"
    ):
        training.backward(BATCHES[0])
    training.optimizer.zero_grad()
    training.train(BATCHES[:3])
    training.assert_big_batches(BATCHES[:3])


# Backwards that fail halfway.


def explode(_: Tensor) -> None:
    """Fail, as by running out of memory."""
    raise MemoryError


@pytest.mark.parametrize("place", [0, 1])
def test_a_backward_that_fails_breaks_the_window(place: int) -> None:
    """Its own exception passes; then every call says that the window is broken, until it is dropped."""
    training = Training(steps=3, case=PLAIN)
    for batch in BATCHES[:place]:
        training.backward(batch)
    body, batch = trained(training.model)[0], BATCHES[place]
    handle = body.register_hook(explode)  # the head has its gradient by then
    with pytest.raises(MemoryError):
        training.backward(batch)
    handle.remove()
    accumulator = training.accumulator
    calls: list[Callable[[], object]] = [lambda: training.backward(batch), lambda: accumulator.over(BATCHES)]
    for call in [*calls, accumulator.state_dict]:
        with pytest.raises(
            WindowBroken, match=r"failed with MemoryError and has added part.*\n.*accumulator.disc"
        ) as e:
            call()
        assert isinstance(e.value.__cause__, MemoryError)
    accumulator.discard()
    training.assert_untouched()
    training.train(BATCHES[:3])
    training.assert_big_batches(BATCHES[:3])


def test_a_graph_that_was_freed_is_an_error() -> None:
    """The same loss twice: torch's own words, or that it cannot be read, but no gradient counted twice."""
    training = Training(steps=3)
    loss = MASKED.loss(training.model, BATCHES[0])
    training.accumulator.backward(loss)
    with pytest.raises((RuntimeError, UnreadableLoss)):
        training.accumulator.backward(loss)
    training.accumulator.discard()
    training.train(BATCHES[:3])
    training.assert_big_batches(BATCHES[:3])
