"""`state_dict`: stop in mid-window, go on in a new process, and end in bitwise the same weights."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bigbatch.errors import StateError, UnreadableLoss, WindowBroken, WindowOpen
from bigbatch.window.gradients import Gradients
from tests.support.reference import big_batches
from tests.support.resumed import TRAININGS, first_half, second_half
from tests.support.samples import mlp
from tests.support.training import MASKED, PLAIN, Training, micro_batches

BATCHES = micro_batches()  # of 3, 1, 4, 2, 5, 1 and 2 samples
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[torch.Tensor]]:
    """The final weights of every training that was stopped here and went on in another process."""
    folder = tmp_path_factory.mktemp("resumed")
    torch.save({name: first_half(name) for name in TRAININGS}, folder / "saved.pt")
    command = [sys.executable, "-m", "tests.support.resumed", str(folder / "saved.pt"), str(folder / "result.pt")]
    subprocess.run(command, cwd=ROOT, check=True)
    found: dict[str, list[torch.Tensor]] = torch.load(folder / "result.pt", weights_only=True)
    return found


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_goes_on_in_a_new_process(name: str, resumed: dict[str, list[torch.Tensor]]) -> None:
    """Bit for bit the weights of a training that was never stopped; without the open window it would show."""
    whole, saved = TRAININGS[name].start(), first_half(name)
    whole.train(TRAININGS[name].batches)
    assert all(torch.equal(a, b) for a, b in zip(resumed[name], whole.weights, strict=True))
    saved["accumulator"]["window"] = None
    without = second_half(name, saved)
    assert not all(torch.equal(a, b) for a, b in zip(without.weights, whole.weights, strict=True))


def stopped(steps: int = 3, **options: Any) -> Training:
    """A training with a window of two micro-batches open."""
    training = Training(steps, **options)
    for batch in BATCHES[:2]:
        training.backward(batch)
    return training


def test_between_windows_there_is_little_to_save() -> None:
    """No window: the next one starts afresh, with the steps of who loads."""
    training, other = Training(steps=3), Training(steps=5)
    training.train(BATCHES[:3])
    saved = training.accumulator.state_dict()
    assert saved["window"] is None
    other.model.load_state_dict(training.model.state_dict())
    other.accumulator.load_state_dict(saved)
    assert other.accumulator.steps == 5
    other.train(BATCHES[3:])
    other.assert_big_batches(BATCHES[:3], BATCHES[3:])


def loaded(saved: Any, steps: int = 3) -> Training:
    """A training that goes on with a window."""
    training = Training(steps)
    training.accumulator.load_state_dict(saved)
    assert training.accumulator.remaining == 1
    return training


def test_a_state_is_a_copy_that_may_be_flushed_or_discarded() -> None:
    """Training on does not change what was saved; a loaded window ends as any other."""
    training = stopped()
    saved = training.accumulator.state_dict()
    training.backward(BATCHES[2])
    for _ in range(2):
        gone_on, discarded = loaded(saved, steps=5), loaded(saved)
        assert gone_on.backward(BATCHES[4]) is not None
        gone_on.assert_big_batches([*BATCHES[:2], BATCHES[4]])
        discarded.accumulator.discard()
        discarded.assert_untouched()
    update = loaded(saved).accumulator.flush()
    assert update is not None
    assert update.micro_batches == 2
    assert float(update.loss) == pytest.approx(big_batches(MASKED, BATCHES[:2], 2).losses[0], rel=1e-6)


def test_a_window_that_could_not_be_loaded_is_not_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for want of memory: nothing goes on as if there had been no window, until it is loaded or discarded."""
    training, saved = Training(steps=3), stopped().accumulator.state_dict()

    def failing(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Gradients, "preset", failing)
        with pytest.raises(MemoryError):
            training.accumulator.load_state_dict(saved)
    training.assert_untouched()
    with pytest.raises(WindowBroken, match="could not be loaded"):
        training.accumulator.flush()
    training.accumulator.load_state_dict(saved)
    training.backward(BATCHES[2])
    training.assert_big_batches(BATCHES[:3])


def test_a_loaded_window_can_be_left_open_again() -> None:
    """Leaving the loop that went on with it is leaving a window open."""
    training = Training(steps=4)
    training.accumulator.load_state_dict(stopped(steps=4).accumulator.state_dict())
    training.backward(next(iter(training.accumulator.over(BATCHES[2:]))))
    with pytest.raises(WindowOpen, match="3 of 4 micro-batches"):
        training.accumulator.over(BATCHES)


def test_a_loaded_window_remembers_its_factors() -> None:
    """A factor that changes over the stop is as suspicious as any."""
    training, other = (Training(steps=3, case=PLAIN) for _ in range(2))
    training.accumulator.backward(0.5 * PLAIN.loss(training.model, BATCHES[0]))
    other.accumulator.load_state_dict(training.accumulator.state_dict())
    with pytest.raises(UnreadableLoss, match="not the same in all micro-batches"):
        other.accumulator.backward(0.3 * PLAIN.loss(other.model, BATCHES[1]))


# States that do not fit.


def edited(without: str = "", **changes: Any) -> dict[str, Any]:
    """A good state with something else in it, or without a part of its window."""
    state = {**stopped().accumulator.state_dict(), **changes}
    state["window"].pop(without, None)
    return state


def half() -> Training:
    """A training with fewer parameters."""
    model = mlp()()
    model[0].requires_grad_(requires_grad=False)  # type: ignore[index]  # nn.Sequential
    return Training(3, model=model)


NO_STATE: dict[str, tuple[Any, Callable[[], Training], str]] = {
    "none": (None, stopped, r"not the state_dict\(\) of an Accumulator: it should hold version, steps and window"),
    "optimizer's": (torch.optim.SGD(mlp()().parameters(), lr=0.1).state_dict(), stopped, "not the state_dict"),
    "version": (edited(version=99), stopped, "Got version 99, not 1"),
    "no window": (edited(window={"micro_batches": 2}), stopped, "not the window of an Accumulator"),
    "number of parameters": (edited(), half, "with 4 trainable .* has 2"),
    "shapes": (edited(), lambda: Training(3, case=PLAIN, model=mlp(7)()), "does not fit"),
    "gradient_dtype": (first_half("bf16")["accumulator"], TRAININGS["bf16-own"].start, "gradient_dtype"),
    "damaged": (edited(without="total"), lambda: Training(3), "it should hold .*total"),
}


@pytest.mark.parametrize("name", NO_STATE)
def test_what_is_no_state_is_refused(name: str) -> None:
    """And nothing is left of the attempt; where a window was open, it goes on where the state was none at all."""
    state, start, text = NO_STATE[name]
    training = start()
    with pytest.raises(StateError, match=text):
        training.accumulator.load_state_dict(state)
    if training.accumulator.remaining < 3:
        training.backward(BATCHES[2])
        training.assert_big_batches(BATCHES[:3])
    else:
        assert all(p.grad is None for p in training.model.parameters())
        assert training.accumulator.flush() is None


def test_a_state_saved_before_is_read() -> None:
    """The state of a window as version 1 writes it, in full: it must go on to load."""
    saved = stopped().accumulator.state_dict()["window"]
    counts = {"micro_batches": 2, "provisional": 17.1, "total": 7.4, "loss": 9.243996592497307, "loss_known": True}
    terms = {"kind": "mean", "names": ("NllLoss",), "in_ratio": None, "reference": [5.7], "factors": [()], "came": []}
    window = {"gradients": saved["gradients"], "residual": 1.0, "double": True, "totals": None, **counts, **terms}
    training = loaded({"version": 1, "steps": 3, "window": window})
    update = training.backward(BATCHES[2])
    assert update is not None
    training.assert_big_batches(BATCHES[:3])
    assert update.loss.item() == pytest.approx(big_batches(MASKED, BATCHES[:3], 3).losses[0], rel=1e-12)
