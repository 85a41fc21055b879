"""Losses and models whose micro-batches meet, with a mistake in what they do there: `verify` names that."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import Accumulator, Options, across, verify
from tests.defects import Batch, mean, network, samples

UNCHECKED = Options(check=False)


def contrastive(model: Any, batch: Batch, *, own: Callable[[int], Tensor]) -> Tensor:
    """Each sample against all, its own one where `own` looks for it."""
    scores = model(batch[0])
    return F.cross_entropy(scores @ across.gather(scores * 0.5 + 1).T, own(len(scores)))


def right(model: Any, batch: Batch) -> Tensor:
    """Own rows where they are among all."""
    return contrastive(model, batch, own=lambda number: across.offset() + torch.arange(number))


def without_offset(model: Any, batch: Batch) -> Tensor:
    """Own rows where the first micro-batch's are."""
    return contrastive(model, batch, own=torch.arange)


def averaged_sums(model: Any, batch: Batch) -> Tensor:
    """A ratio of sums, each averaged by samples."""
    scores = model(batch[0])
    error, size = scores.square().sum(), batch[0].square().sum()
    return across.once(across.mean(error) / across.mean(size))


def summed_means(model: Any, batch: Batch) -> Tensor:
    """The root of a mean, which is added up."""
    return across.once((across.sum(model(batch[0]).square().mean()) + 1).sqrt())


class Keeping(nn.Module):
    """Keeps a weight of its samples for later, as an attribute."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), norm, nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Keep it before micro-batches may take turns."""
        hidden = self.first(x)
        self.weight = 1 + hidden.detach().abs().mean(1)
        scores: Tensor = self.last(self.norm(hidden).relu())
        return scores


def reading_it(model: Any, batch: Batch) -> Tensor:
    """Read what was kept, after BatchNorm."""
    return (F.cross_entropy(model(batch[0]), batch[1], reduction="none") * model.weight).mean()


def reading_it_after_across(model: Any, batch: Batch) -> Tensor:
    """Read what was kept, after a question."""
    scores = model(batch[0])
    every = across.gather(scores * 0.5 + 1)
    own = across.offset() + torch.arange(len(scores))
    return (F.cross_entropy(scores @ every.T, own, reduction="none") * model.weight).mean()


CASES: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, str], str]] = {
    "no offset": (
        network,
        without_offset,
        {"coupled-samples": "across.gather"},
        "own = across.offset() + torch",
    ),
    "sums averaged": (network, averaged_sums, {"wrong-count": "across.mean"}, "across.sum(x). across.mean(x) weighs"),
    "means added up": (network, summed_means, {"wrong-count": "across.sum"}, "across.mean(x). across.sum(x) adds up"),
    "kept beside BatchNorm": (
        lambda: Keeping(nn.BatchNorm1d(8)),
        reading_it,
        {"shared-state": "norm"},
        "Micro-batches take turns at BatchNorm and at `across`: what the model",
    ),
    "kept beside across": (
        lambda: Keeping(nn.Identity()),
        reading_it_after_across,
        {"shared-state": ""},
        "Micro-batches take turns at BatchNorm and at `across`: what the model",
    ),
}


@pytest.mark.parametrize("options", [None, UNCHECKED], ids=["checked", "unchecked"])
@pytest.mark.parametrize("name", CASES)
def test_what_is_wrong_at_a_meeting_is_named(name: str, options: Options | None) -> None:
    """By experiment, with all of the difference; never by asking for what is there already."""
    torch.manual_seed(0)
    make, loss_fn, causes, remedy = CASES[name]
    made = {"ask": across.gather, "sum": across.sum, "mean": across.mean}
    # What was kept of micro-batches of another size fails, unless it was refused before.
    wrong = verify(make(), loss_fn, samples(12 if options and "kept" in name else 11), 4, options=options)
    assert not wrong.exact
    assert {cause.kind: cause.where for cause in wrong.causes} == causes, str(wrong)
    assert wrong.causes[0].share == pytest.approx(1, abs=1e-6)
    assert remedy in wrong.causes[0].remedy
    assert "Ask for the other samples" not in str(wrong)
    assert "counted(" not in str(wrong)
    assert 'Options(batch_norm="exact")' not in str(wrong)
    assert made == {"ask": across.gather, "sum": across.sum, "mean": across.mean}


def test_what_is_kept_outside_of_the_model_is_what_the_step_says() -> None:
    """No experiment reaches it: the first step has seen that a micro-batch alone runs, and beside others does not."""
    torch.manual_seed(0)
    kept: dict[str, Tensor] = {}

    def loss_fn(model: Any, batch: Batch) -> Tensor:
        kept["weight"] = 1 + batch[0].abs().mean(1)
        scores = model(batch[0])
        every = across.gather(scores * 0.5 + 1)
        own = across.offset() + torch.arange(len(scores))
        return (F.cross_entropy(scores @ every.T, own, reduction="none") * kept["weight"]).mean()

    wrong = verify(network(), loss_fn, samples(12), 4)
    assert [cause.kind for cause in wrong.causes] == ["shared-state"], str(wrong)
    assert wrong.causes[0].found.startswith("A micro-batch runs alone, and fails beside others")
    assert "Return it, or pass it on as an argument." in wrong.causes[0].remedy


def test_dropout_beside_a_mistake_is_another_cause() -> None:
    """Each found with the other turned off."""
    torch.manual_seed(0)
    wrong = verify(network(nn.Dropout(0.3)), without_offset, samples(11), 4)
    assert {cause.kind for cause in wrong.causes} == {"randomness", "coupled-samples"}, str(wrong)


def test_equal_micro_batches_hide_what_across_adds_up_and_that_is_said() -> None:
    """What BigStep weighs by itself needs no such word, nor do micro-batches that differ."""
    torch.manual_seed(0)
    note = (
        "All 5 micro-batches count the same, which hides a loss that weighs them wrong. Take a size that does not "
        "divide the batch as well:  micro_batch_size=3"
    )
    found = verify(network(), averaged_sums, samples(10), 2, options=UNCHECKED)
    assert found.exact
    assert found.notes == (note,)
    assert not verify(network(), averaged_sums, samples(10), 3, options=UNCHECKED).exact
    assert not verify(network(), right, samples(10), 3).notes
    assert not verify(network(), mean, samples(10), 2).notes


def test_equal_parts_that_the_step_refuses_are_advised_on_what_across_does() -> None:
    """The first step cuts unequal parts, and the figures show nothing yet."""
    torch.manual_seed(0)
    refused = verify(network(), averaged_sums, samples(10), 5)
    assert not refused.exact
    assert [cause.kind for cause in refused.causes] == ["coupled-samples"]
    assert refused.causes[0].remedy.startswith("It asks for all samples already")
    assert "across.sum(x) adds up sums" in refused.causes[0].remedy


def test_norms_that_are_refused_are_advised_by_what_refuses_them() -> None:
    """Exactness is in force, or was declined: the refusal knows which."""
    torch.manual_seed(0)
    declined = verify(network(nn.BatchNorm1d(8)), mean, samples(11), 4, options=Options(batch_norm="refuse"))
    assert [cause.kind for cause in declined.causes] == ["batch-norm"]
    assert declined.causes[0].remedy.startswith('Either leave batch_norm="exact"')


@pytest.mark.parametrize("over", [False, True])
def test_a_proof_is_no_part_of_the_next_loss(over: bool) -> None:
    """What it has asked for says nothing of an accumulator's own."""
    model, other = network(), network()
    accumulator = Accumulator(other, torch.optim.SGD(other.parameters(), lr=0.1), steps=1)
    for batch in accumulator.over([samples(6)]) if over else [samples(6)]:
        verify(model, right, samples(6), 4)
        assert accumulator.backward(mean(other, batch)) is not None
