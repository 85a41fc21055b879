"""Mistakes in model, loss and loop: each is found, each pair of them, and nothing is named where nothing is wrong."""

from collections.abc import Callable
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bigbatch import Options, Verification, verify
from tests.support import defects
from tests.support.defects import Loss, Window

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "batch-norm": lambda: nn.BatchNorm1d(8),
    "randomness": lambda: nn.Dropout(0.3),
    "coupled-samples": defects.Attending,
    "state": defects.Fading,
}
HARMLESS: list[Callable[[], nn.Module]] = [
    lambda: nn.LayerNorm(8),
    lambda: nn.ReLU(inplace=True),
    lambda: nn.Dropout(0.0),
    lambda: nn.Linear(8, 8),
    lambda: nn.BatchNorm1d(8).eval(),
    lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
]
LOOPS: dict[str, tuple[Callable[[Loss], Window], set[str]]] = {
    "right": (defects.by_samples, set()),
    "textbook": (defects.textbook, {"wrong-count"}),
    "undivided": (defects.undivided, {"wrong-scale", "wrong-count"}),
    "divided twice": (defects.divided_twice, {"wrong-scale", "wrong-count"}),
    "without the last": (defects.without_last, {"dropped-micro-batch"}),
    "zeroing": (defects.zeroing, {"dropped-micro-batch"}),
    "stepping": (defects.stepping, {"stepped-inside"}),
    "clipping": (defects.clipping, {"clipping"}),
}
LOSSES: dict[str, tuple[Loss, set[str]]] = {
    "mean": (defects.mean, set()),
    "root": (defects.root, {"coupled-samples"}),
    "contrastive": (defects.contrastive, {"coupled-samples"}),
}
PLANTED = [*(("layer", name) for name in LAYERS), *(("loop", name) for name in LOOPS if name != "right")]
PLANTED += [("loss", name) for name in LOSSES if name != "mean"]
PAIRS = [pair for pair in combinations(PLANTED, 2) if pair[0][0] != pair[1][0] or pair[0][0] == "layer"]
middles = st.lists(st.sampled_from([*LAYERS, *range(len(HARMLESS))]), max_size=4, unique=True)


def verified(middle: list[str | int], loop: str, loss: str, seed: int) -> tuple[Verification, set[str]]:
    """Verify a loop with these layers, and return what is to be found, too."""
    torch.manual_seed(seed)
    layers = [HARMLESS[each]() if isinstance(each, int) else LAYERS[each]() for each in middle]
    (window, of_loop), (loss_fn, of_loss) = LOOPS[loop], LOSSES[loss]
    expected = {each for each in middle if isinstance(each, str)} | of_loop | of_loss
    model = defects.network(*layers)
    return verify(model, loss_fn, defects.samples(11), 4, train_window=window(loss_fn)), expected


@pytest.mark.parametrize("planted", [*((each,) for each in PLANTED), *PAIRS], ids=lambda p: " + ".join(n for _, n in p))
def test_each_mistake_and_each_pair_is_named(planted: tuple[tuple[str, str], ...]) -> None:
    """And nothing else."""
    chosen = {kind: name for kind, name in planted if kind != "layer"}
    middle: list[str | int] = [name for kind, name in planted if kind == "layer"]
    found, expected = verified(middle, chosen.get("loop", "right"), chosen.get("loss", "mean"), seed=3)
    assert {cause.kind for cause in found.causes} == expected, str(found)
    assert not found.exact
    assert all(cause.found.endswith(".") and cause.remedy for cause in found.causes)


@settings(max_examples=40)
@given(middles, st.sampled_from(sorted(LOOPS)), st.sampled_from(sorted(LOSSES)), st.integers(0, 1000))
def test_every_mistake_is_named_whatever_is_beside_it(middle: list[str | int], loop: str, loss: str, seed: int) -> None:
    """Layers without a mistake among them."""
    found, expected = verified(middle, loop, loss, seed)
    assert {cause.kind for cause in found.causes} == expected, str(found)
    assert found.exact == (not expected)


@settings(max_examples=45)
@given(middles, st.integers(1, 6), st.integers(5, 13), st.booleans(), st.integers(0, 1000))
def test_a_mistake_in_a_model_is_named_and_a_clean_one_is_never_accused(
    middle: list[str | int], size: int, number: int, loop: bool, seed: int
) -> None:
    """Whatever the sizes, with BigStep and with a right loop; BatchNorm is exact under BigStep."""
    torch.manual_seed(seed)
    middle = [each for each in middle if each != "batch-norm" or not loop]
    model = defects.network(*(HARMLESS[each]() if isinstance(each, int) else LAYERS[each]() for each in middle))
    window = defects.by_samples() if loop else None
    batch, size, unchecked = defects.samples(number), min(size, number - 1), Options(check=False)
    found = verify(model, defects.mean, batch, size, train_window=window, options=unchecked)
    expected = {each for each in middle if isinstance(each, str)} - {"batch-norm"}
    assert {cause.kind for cause in found.causes} == expected, str(found)
    assert found.exact == (not expected), str(found)
    assert expected or all(each.exact_difference <= 1e-12 for each in found.differences)
