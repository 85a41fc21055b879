"""Training by micro-batches is training by big batches: weights and optimizer state after several epochs."""

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.support.losses import READABLE
from tests.support.reference import Run, accumulated, assert_equal, big_batches
from tests.support.samples import Loss, mlp, rows
from tests.support.strategies import OPTIMIZERS, Epoch, clip_norms, epochs, optimizers, readable

pytestmark = pytest.mark.filterwarnings(
    "ignore:reduction.*divides the total loss:UserWarning",  # kl_div(reduction="mean")
    "ignore:this loss looks divided by steps:UserWarning",  # one of them is divided by 3
    "ignore:this loss is a sum over data:UserWarning",  # by a number that is also another size
)


def bounded(run: Run) -> bool:
    """Whether training did not diverge: there rounding grows from update to update until nothing equals itself."""
    return all(bool(w.isfinite().all()) and float(w.abs().max()) < 20 for w in run.weights if w.numel())


@given(epochs(readable), optimizers, clip_norms, st.integers(1, 3))
@settings(max_examples=200)
def test_training_is_exact(epoch: Epoch, optimizer: str, clip_norm: float | None, rounds: int) -> None:
    """Any readable loss, split, optimizer and clipping, over several windows and epochs."""
    options: dict[str, Any] = {"optimizer": OPTIMIZERS[optimizer], "clip_norm": clip_norm, "epochs": rounds}
    true = big_batches(epoch.case, epoch.batches, epoch.steps, **options)
    assume(bounded(true))
    assert_equal(accumulated(epoch.case, epoch.batches, epoch.steps, **options), true)


MASKED = "cross_entropy-functional-2-D-ignored-weights-mean"
NAMES = {MASKED, "next-token", "ignored+l2", "sum", "uncertainty-two-terms", "attention"}
CASES = {case.name: case for case in READABLE if case.name in NAMES}


@pytest.mark.parametrize("clip_norm", [None, 0.05], ids=["free", "clipped"])
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_every_optimizer_is_exact(case: Loss, optimizer: str, clip_norm: float | None) -> None:
    """Two epochs of five updates each, the last of them short, per optimizer, with and without clipping."""
    batches = case.micro_batches((3, 1, 4, 2, 2, 5, 1, 1, 3, 2, 4, 1, 2))
    options: dict[str, Any] = {"optimizer": OPTIMIZERS[optimizer], "clip_norm": clip_norm, "epochs": 2}
    assert_equal(accumulated(case, batches, 3, **options), big_batches(case, batches, 3, **options))


def test_adamw_with_its_default_eps() -> None:
    """Adam divides by the gradient's own size, so a wrong factor hides and a wrong mixture does not."""
    case = CASES[MASKED]
    batches = case.micro_batches((3, 1, 4, 2, 2, 5, 1))
    options: dict[str, Any] = {"optimizer": lambda p: torch.optim.AdamW(p, lr=0.01), "epochs": 3}
    assert_equal(accumulated(case, batches, 3, **options), big_batches(case, batches, 3, **options), tolerance=1e-10)


@pytest.mark.parametrize("factor", [1e-8, 1e8])
def test_tiny_and_huge_losses_keep_their_precision(factor: float) -> None:
    """Provisional weights are powers of two: they round nothing, whatever the loss's size."""
    case = Loss("scaled", mlp(), rows, lambda m, b: factor * (m(b["x"]) - b["value"]).pow(2).mean())
    batches = case.micro_batches((7, 1, 3))

    def optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1 / factor)

    ours = accumulated(case, batches, 3, optimizer=optimizer)
    assert_equal(ours, big_batches(case, batches, 3, optimizer=optimizer))


@pytest.mark.parametrize("sizes", [(1, 200), (200, 1), (1, 1, 1, 64), (33,)], ids=str)
def test_very_uneven_windows(sizes: tuple[int, ...]) -> None:
    """The provisional total of a first small micro-batch costs the large ones nothing."""
    case = CASES[MASKED]
    batches = case.micro_batches(sizes)
    assert_equal(accumulated(case, batches, len(sizes)), big_batches(case, batches, len(sizes)))


def test_a_loss_divided_by_steps_differs() -> None:
    """The comparison can fail: the textbook's own division is not the big batch."""
    case = CASES["next-token"]
    batches = case.micro_batches((3, 1, 4))
    with pytest.warns(UserWarning, match="divided by steps"):
        textbook = accumulated(case, batches, 3, loss=lambda m, b: case.loss(m, b) / 3)
    with pytest.raises(AssertionError, match="differs"):
        assert_equal(textbook, big_batches(case, batches, 3))
