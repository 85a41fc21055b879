"""Several mistakes at once: each is found, and nothing else is named."""

from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bigbatch import Options, verify
from tests import defects
from tests.defects import Loss, Window

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "batch-norm": lambda: nn.BatchNorm1d(8),
    "randomness": lambda: nn.Dropout(0.3),
    "coupled-samples": defects.Attending,
    "buffers-written": defects.Fading,
}
HARMLESS: list[Callable[[], nn.Module]] = [
    lambda: nn.LayerNorm(8),
    lambda: nn.ReLU(inplace=True),
    lambda: nn.Dropout(0.0),
    lambda: nn.Linear(8, 8),
    lambda: nn.BatchNorm1d(8).eval(),
]
LOOPS: dict[str, tuple[Callable[[Loss], Window], set[str]]] = {
    "right": (defects.by_samples, set()),
    "textbook": (defects.textbook, {"wrong-count"}),
    "undivided": (defects.undivided, {"not-divided", "wrong-count"}),
    "divided twice": (defects.divided_twice, {"divided-twice", "wrong-count"}),
    "without the last": (defects.without_last, {"dropped-micro-batch"}),
    "zeroing": (defects.zeroing, {"zeroed-inside"}),
    "stepping": (defects.stepping, {"stepped-inside"}),
    "clipping": (defects.clipping, {"clipped-inside"}),
}
LOSSES: dict[str, tuple[Loss, set[str]]] = {
    "mean": (defects.mean, set()),
    "root": (defects.root, {"nonlinear-in-a-mean"}),
    "contrastive": (defects.contrastive, {"coupled-samples"}),
}
middles = st.lists(st.sampled_from([*LAYERS, *range(len(HARMLESS))]), max_size=3, unique=True)


def planted(middle: list[str | int]) -> nn.Sequential:
    """A model with these layers in its middle."""
    return defects.network(*(HARMLESS[each]() if isinstance(each, int) else LAYERS[each]() for each in middle))


@settings(max_examples=40)
@given(middles, st.sampled_from(sorted(LOOPS)), st.sampled_from(sorted(LOSSES)), st.integers(0, 1000))
def test_every_mistake_in_model_loss_and_loop_is_found(
    middle: list[str | int], loop: str, loss: str, seed: int
) -> None:
    """Whatever stands beside it."""
    torch.manual_seed(seed)
    (window, of_loop), (loss_fn, of_loss) = LOOPS[loop], LOSSES[loss]
    expected = {each for each in middle if isinstance(each, str)} | of_loop | of_loss
    if of_loss:
        expected -= {"wrong-count"}  # no weights are right there
    found = verify(planted(middle), loss_fn, defects.samples(11), 4, train_window=window(loss_fn))
    assert {cause.kind for cause in found.causes} == expected, str(found)
    assert found.exact == (not expected)


@settings(max_examples=20)
@given(middles, st.integers(1, 5), st.integers(0, 1000))
def test_every_mistake_in_a_model_is_found_under_big_step(middle: list[str | int], size: int, seed: int) -> None:
    """But for BatchNorm, which micro-batches meet at: that is none."""
    torch.manual_seed(seed)
    expected = {each for each in middle if isinstance(each, str)} - {"batch-norm"}
    found = verify(planted(middle), defects.mean, defects.samples(11), size, options=Options(check=False))
    assert {cause.kind for cause in found.causes} == expected, str(found)
