"""What a verification compares, and what its result says."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

from bigbatch import Options, errors, verify
from bigbatch.verification.result import KINDS, Cause, Difference, Verification
from tests.support import defects
from tests.support.bombs import OUT_OF_MEMORY
from tests.support.defects import Batch, by_samples, mean, network, samples
from tests.support.messages import approve


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


class Knowing(nn.Linear):
    """A model with a loss of its own, as an attribute of what it returns."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
        """Return it."""
        return SimpleNamespace(loss=mean(super().forward, (x, labels)))


def tokens(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    """A mean over the tokens of sequences."""
    labels = torch.where(given["attention_mask"] > 0, 1, -100)
    return F.cross_entropy(model(given["x"]).flatten(0, 1), labels.flatten())


X, Y = samples()
MASK = (torch.arange(7) < torch.tensor([2, 7, 3, 5, 7, 1])[:, None]).float()
SEQUENCES = {"x": torch.randn(6, 7, 4) * MASK[..., None], "attention_mask": MASK}
PACKED = {"options": Options(lengths="attention_mask", token_budget=8)}
PAIRS = [(x, int(y)) for x, y in zip(X, Y, strict=True)]
COLLATED = {"options": Options(collate=default_collate)}
# The model, its loss, a batch, and other arguments: what a BigStep takes can be verified.
TAKEN: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "several models": ([nn.Linear(6, 8), nn.Linear(8, 3)], lambda m, b: mean(lambda x: m[1](m[0](x)), b), (X, Y), {}),
    "a model's own loss": (Knowing(6, 3), None, {"x": X, "labels": Y}, {}),
    "extras": (network(), lambda m, b: (mean(m, b), {"inputs": b[0]}), (X, Y), {}),
    "a list of samples": (network(), mean, PAIRS, COLLATED),
    "a list in a loop": (network(), mean, PAIRS, {**COLLATED, "train_window": by_samples(mean)}),
    "packed sequences": (nn.Linear(4, 3), tokens, SEQUENCES, PACKED),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_a_step_takes_is_verified(name: str) -> None:
    """In float64, too; parameters of several models have the model's number, and packed micro-batches their sizes."""
    model, loss_fn, batch, more = TAKEN[name]
    found = verify(model, loss_fn, batch, 4, **more)
    assert found.exact, str(found)
    names = ["[0].weight", "[0].bias", "[1].weight", "[1].bias"]
    assert not isinstance(model, list) or [each.name for each in found.differences] == names
    assert sum(found.micro_batches) == found.samples
    assert more is not PACKED or len(found.micro_batches) > 2


# Precision.


def test_sums_in_low_precision_are_found() -> None:
    """Exact in float64, and a bfloat16 sum of many that agree in sign loses more than the big batch does."""
    model, batch = nn.Linear(6, 3).bfloat16(), (torch.rand(512, 6) + 0.5, torch.zeros(512, dtype=torch.long))

    def summed(given: Any, batch: Batch) -> Tensor:
        return given(batch[0].to(given.weight.dtype)).sum(1).mean()

    found = verify(model, summed, batch, 1, train_window=by_samples(summed))
    assert [cause.kind for cause in found.causes] == ["precision"], str(found)
    assert found.worst.exact_difference <= 1e-12
    assert str(found).count("Exact in float64, not in bfloat16")
    assert verify(model, summed, batch, 1).exact  # float32 sums
    narrow = verify(model, summed, batch, 1, options=Options(gradient_dtype=None))
    assert "gradient_dtype=torch.float32" in narrow.causes[0].remedy


def test_a_model_that_does_not_run_in_float64_is_judged_in_its_own() -> None:
    """And says so."""

    def narrow(model: Any, batch: Batch) -> Tensor:
        if batch[0].dtype == torch.float64:
            raise RuntimeError("expected scalar type Float but found Double")
        return mean(model, batch)

    found = verify(network(), narrow, samples(), 4)
    assert found.exact, str(found)
    assert not found.in_float64
    assert "This does not run in float64 (RuntimeError: expected scalar type Float" in found.notes[0]
    assert found.to_dict()["differences"][0]["exact_difference"] is None


def test_a_loop_under_autocast_is_judged_by_a_big_batch_under_autocast() -> None:
    """Its rounding is the autocast's, not a mistake."""

    def lowered(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return mean(model, batch)

    found = verify(network(), mean, samples(), 4, train_window=by_samples(lowered))
    assert found.exact, str(found)
    assert found.differences[0].own_floor > 1e-4


# Memory.


@pytest.mark.parametrize("error", OUT_OF_MEMORY)
def test_a_batch_that_does_not_fit_is_proved_in_part(error: Callable[[], BaseException]) -> None:
    """Half of it, or a quarter, and the text says how much."""

    def small(model: Any, batch: Batch) -> Tensor:
        if len(batch[1]) > 5:
            raise error()
        return mean(model, batch)

    found = verify(network(), small, samples(22), 2, train_window=defects.textbook(small))
    assert [cause.kind for cause in found.causes] == ["wrong-count"]
    assert (found.samples, found.samples_proved, found.micro_batches) == (22, 5, (2, 2, 1))
    assert "5 of 22 samples" in str(found)
    assert "the first 5 samples were compared, in micro-batches of 2." in found.notes[0]


def test_what_does_not_fit_in_float64_is_judged_in_its_own_dtype_or_is_an_error() -> None:
    """All of the batch, once float64 was given up; with two samples there is nothing left to halve."""

    def never(_: Any, batch: Batch) -> Tensor:
        raise torch.OutOfMemoryError(f"Tried to allocate 20.00 GiB for {len(batch)}")

    found = verify(network(), lambda m, b: (never if b[0].dtype == torch.float64 else mean)(m, b), samples(5), 2)
    assert found.exact, str(found)
    assert (found.samples_proved, found.in_float64) == (5, False)
    assert found.notes[0].startswith("Not even two samples fit into memory in float64, so it was judged in float32")
    with pytest.raises(errors.OutOfMemory) as raised:
        verify(network(), never, samples(3), 1)
    approve("verify", "nothing fits", raised.value)


# What is said.


def test_the_result_as_plain_data() -> None:
    """JSON takes it, and has all fields; a loop that returns its loss is asked for it."""
    found = verify(network(), mean, samples(), 4)
    data = json.loads(json.dumps(found.to_dict()))
    assert set(data) == {*Verification.__dataclass_fields__, "worst"}
    assert (data["micro_batches"], data["dtype"]) == ([4, 4, 3], "float32")
    assert data["loss"][0] == pytest.approx(data["loss"][1])
    assert found.worst in found.differences
    loop = by_samples(mean)
    assert verify(network(), mean, samples(), 4, train_window=lambda *given: loop(*given) or 0.25).loss[1] == 0.25


NAN = math.nan
# In float64 with its rounding, and in the model's own dtype with its rounding.
EQUAL = [(9e-13, 1e-16, 0.0, 1e-7), (7e-8, 1e-8, 0.0, 1e-7), (NAN, 1e-16, 7e-7, 1e-7), (NAN, 1e-16, 0.0, 0.0)]
APART = [(2e-12, 1e-16, 0.0, 1e-7), (9e-8, 1e-8, 0.0, 1e-7), (NAN, 1e-16, 1e-30, 0.0)]


def test_a_difference_is_judged_by_its_rounding() -> None:
    """1e-12 in float64 or eight times the measured rounding; without float64, the model's own."""
    assert [Difference("weight", (2, 3), *each).exact for each in EQUAL + APART] == [True] * 4 + [False] * 3


RIGHT, OFF = (Difference("weight", (2, 3), far, 1e-16, 0.0, 1e-7) for far in (0.0, 0.5))
# What was found, the verdict in words, and what a test suite may accept.
VERDICTS: list[tuple[Difference, tuple[str, ...], str, set[str] | None]] = [
    (RIGHT, (), "Exact: the gradient of 4 of 8 samples in 2 micro-batches", set()),
    (OFF, ("randomness",), "Equal in distribution: ", {"randomness"}),
    (RIGHT, ("precision",), "Exact in float64, not in float32: ", {"precision"}),
    (RIGHT, ("wrong-count",), "No proof: ", {"wrong-count", "randomness"}),
    (OFF, ("randomness", "batch-norm"), "Not exact: ", {"randomness", "batch-norm"}),
    (OFF, (), "Not exact: ", None),
]


@pytest.mark.parametrize(("difference", "kinds", "verdict", "accepted"), VERDICTS)
def test_the_verdict_in_words_and_what_a_test_suite_accepts(
    difference: Difference, kinds: tuple[str, ...], verdict: str, accepted: set[str] | None
) -> None:
    """An AssertionError with the whole text, unless the kinds of all causes are accepted."""
    causes = tuple(Cause(kind, "", "Seen.", "Do this.") for kind in kinds)
    exact = difference is RIGHT and not kinds
    found = Verification(exact, (difference,), causes, 8, 4, (2, 2), "float32", (1.0, math.nan))
    assert verdict in str(found)
    assert found.to_dict()["loss"] == [1.0, None]
    if accepted is not None:
        found.raise_if_wrong(allow=accepted)
    for allow in [set(), *({kind} for kind in KINDS)]:
        if not exact and (accepted is None or not set(kinds) <= allow):
            with pytest.raises(AssertionError, match=verdict) as raised:
                found.raise_if_wrong(allow=allow)
            assert isinstance(raised.value, errors.GradientsDiffer)


def test_the_text_has_table_verdict_and_causes() -> None:
    """The worst first, at most ten rows."""
    layers = [nn.Linear(8, 8) for _ in range(6)]
    text = str(verify(network(*layers, nn.BatchNorm1d(8)), mean, samples(), 4, options=Options(batch_norm="micro")))
    parts = ["parameter", "and 8 more", "Not exact: the gradient of 11 samples in 3", "1. batch-norm at 7"]
    places = [text.index(part) for part in [*parts, "goes away", 'Options(batch_norm="exact")']]
    assert places == sorted(places)


def test_a_refusal_of_big_step_is_noted_and_its_cause_is_found() -> None:
    """It goes on without BigStep; where the figures are equal, no cause is named, and it is no proof all the same."""
    torch.manual_seed(1)
    found = verify(network(), defects.masked, samples(), 4)
    assert found.notes[0].startswith(f"BigStep refuses this: {found.refused}")
    assert "return counted(loss, (batch[1] != 0).sum())" in found.causes[0].remedy
    even = torch.randn(8, 6), torch.tensor([0, 1] * 4)
    equal = verify(network(), defects.masked, even, 4)
    assert (equal.exact, equal.causes) == (False, ())
    assert "No proof: " in str(equal)
    dropping = verify(network(nn.Dropout(0.3)), defects.masked, even, 4)
    assert [cause.kind for cause in dropping.causes] == ["randomness"]
    with pytest.raises(errors.GradientsDiffer):
        dropping.raise_if_wrong(allow={"randomness"})


def test_the_documentation_lists_every_kind() -> None:
    """A kind that is shown can be looked up."""
    page = (Path(__file__).parents[2] / "docs/verify.md").read_text()
    assert all(f"`{kind}`" in page for kind in KINDS)


SIX = (nn.BatchNorm1d(8), nn.Dropout(0.3), defects.Attending(), defects.Fading())
COSTS = [((), None, 6, 11), ((), by_samples, 6, 6), (SIX, defects.undivided, 10, 22)]


@pytest.mark.parametrize(("layers", "loop", "least", "most"), COSTS, ids=["exact", "an exact loop", "six causes"])
def test_what_a_verification_costs(layers: Any, loop: Any, least: int, most: int) -> None:
    """How often all samples go through the model, as the documentation has it."""
    passed = 0

    def counting(model: Any, batch: Batch) -> Tensor:
        nonlocal passed
        passed += len(batch[1])
        return mean(model, batch)

    verify(network(*layers), counting, samples(), 4, train_window=None if loop is None else loop(counting))
    assert least * 11 <= passed <= most * 11, passed / 11
