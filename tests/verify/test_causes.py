"""A mistake is planted in the model, the loss or the loop: each is found by experiment, and named."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import Options, Verification, across, counted, verify
from tests.support import defects
from tests.support.defects import Batch, WithAux, by_samples, mean, network, samples

MICRO = Options(batch_norm="micro")
UNCHECKED = Options(check=False)


def found(verification: Verification) -> dict[str, str]:
    """Where each kind of cause was found."""
    return {cause.kind: cause.where for cause in verification.causes}


def right_count(model: Any, batch: Batch) -> Tensor:
    """A masked mean whose count is told."""
    return counted(defects.masked(model, batch), (batch[1] > 0).sum())


def wrong_count(model: Any, batch: Batch) -> Tensor:
    """A masked mean whose count is told wrong."""
    return counted(defects.masked(model, batch), len(batch[1]))


def bent_right(model: Any, batch: Batch) -> Tensor:
    """The root of the big batch's mean."""
    return across.once(across.mean(model(batch[0]).square().mean()).sqrt())


CLEAN: dict[str, Callable[[], Verification]] = {
    "a mean": lambda: verify(network(), mean, samples(), 4),
    "one sample at a time": lambda: verify(network(), mean, samples(), 1),
    "a count that is told": lambda: verify(network(), right_count, samples(), 4),
    "a sum and a regulariser": lambda: verify(network(), defects.sum_with_penalty, samples(), 4),
    "BatchNorm that meets": lambda: verify(network(nn.BatchNorm1d(8)), mean, samples(), 4),
    "BatchNorm at rest": lambda: verify(network(nn.BatchNorm1d(8).eval()), mean, samples(), 4, options=MICRO),
    "dropout at rest": lambda: verify(network(nn.Dropout(0.5)).eval(), mean, samples(), 4),
    "a root over the batch": lambda: verify(network(), bent_right, samples(), 4),
    "LayerNorm": lambda: verify(network(nn.LayerNorm(8)), mean, samples(), 4),
    "an in-place activation": lambda: verify(network(nn.ReLU(inplace=True)), mean, samples(), 4),
    "float64": lambda: verify(network().double(), mean, (samples()[0].double(), samples()[1]), 4),
    "a loop that weighs by samples": lambda: verify(network(), mean, samples(), 4, train_window=by_samples(mean)),
    "a regulariser in a loop": lambda: verify(
        network(), defects.with_penalty, samples(), 4, train_window=by_samples(defects.with_penalty)
    ),
    "the textbook's loop, equal micro-batches": lambda: verify(
        network(), mean, samples(12), 4, train_window=defects.textbook(mean)
    ),
}


@pytest.mark.parametrize("case", CLEAN)
def test_nothing_is_named_where_nothing_is_wrong(case: str) -> None:
    """Equal to 1e-12 in float64, and no cause."""
    torch.manual_seed(0)
    verification = CLEAN[case]()
    assert verification.exact, str(verification)
    assert not verification.causes
    assert all(each.exact_difference <= 1e-12 for each in verification.differences)


def test_equal_micro_batches_hide_wrong_weights_and_that_is_said() -> None:
    """Of a loop alone, and where nothing in the batch counts differently."""
    torch.manual_seed(0)
    textbook = defects.textbook(mean)
    note = (
        "All 3 micro-batches count the same, which hides a loop that weights them wrong. Take a size that does not "
        "divide the batch as well:  micro_batch_size=5"
    )
    assert verify(network(), mean, samples(12), 4, train_window=textbook).notes == (note,)
    assert not verify(network(), mean, samples(12), 4).notes
    assert not verify(network(), mean, samples(), 4, train_window=by_samples(mean)).notes
    inputs, labels = samples(12)
    labels[:3] = -100

    def counting(model: Any, micro_batches: list[Batch]) -> None:
        for inputs, labels in micro_batches:
            (F.cross_entropy(model(inputs), labels, reduction="sum") / 9).backward()

    masked = verify(network(), mean, (inputs, labels), 4, train_window=counting)
    assert masked.exact
    assert not masked.notes


IN_MODEL: dict[str, tuple[Callable[[], Verification], dict[str, str]]] = {
    "BatchNorm by the micro-batch": (
        lambda: verify(network(nn.BatchNorm1d(8)), mean, samples(), 4, options=MICRO),
        {"batch-norm": "1"},
    ),
    "BatchNorm that is refused": (
        lambda: verify(network(nn.BatchNorm1d(8)), mean, samples(), 4, options=Options(batch_norm="refuse")),
        {"batch-norm": "1"},
    ),
    "BatchNorm without running statistics": (
        lambda: verify(
            network(nn.BatchNorm1d(8, track_running_stats=False)), mean, samples(), 4, train_window=by_samples(mean)
        ),
        {"batch-norm": "1"},
    ),
    "dropout": (lambda: verify(network(nn.Dropout(0.3)), mean, samples(), 4), {"randomness": "1"}),
    "noise": (lambda: verify(network(defects.Noisy()), mean, samples(), 4), {"randomness": "1"}),
    "attention across samples": (
        lambda: verify(network(defects.Attending()), mean, samples(), 4, options=UNCHECKED),
        {"coupled-samples": "1"},
    ),
    "a mean across samples": (
        lambda: verify(network(defects.Centred()), mean, samples(), 4),
        {"coupled-samples": "1"},
    ),
    "a buffer": (lambda: verify(network(defects.Fading()), mean, samples(), 4), {"state": "1"}),
    "a number beside the buffers": (
        lambda: verify(network(defects.Counting()), mean, samples(), 4, options=UNCHECKED),
        {"state": "1"},
    ),
    "what cannot be repeated": (
        lambda: verify(network(defects.Restless()), mean, samples(), 4, options=UNCHECKED),
        {"nondeterminism": "1"},
    ),
    "BatchNorm and dropout": (
        lambda: verify(network(nn.BatchNorm1d(8), nn.Dropout(0.3)), mean, samples(), 4, options=MICRO),
        {"batch-norm": "1", "randomness": "2"},
    ),
}


@pytest.mark.parametrize("case", IN_MODEL)
def test_a_mistake_in_the_model_is_found_where_it_is(case: str) -> None:
    """The kind and the module, and nothing else."""
    torch.manual_seed(0)
    make, expected = IN_MODEL[case]
    verification = make()
    assert not verification.exact
    assert found(verification) == expected, str(verification)


IN_LOSS: dict[str, tuple[Callable[[], Verification], set[str]]] = {
    "a count that the graph cannot tell": (lambda: verify(network(), defects.masked, samples(), 4), {"wrong-count"}),
    "a count that is told wrong": (
        lambda: verify(network(), wrong_count, samples(), 4, options=UNCHECKED),
        {"wrong-count"},
    ),
    "the root of a mean": (lambda: verify(network(), defects.root, samples(), 4), {"coupled-samples"}),
    "the root of a mean, its count told": (
        lambda: verify(network(), lambda m, b: counted(defects.root(m, b), len(b[1])), samples(), 4),
        {"coupled-samples"},
    ),
    "samples against samples": (lambda: verify(network(), defects.contrastive, samples(), 4), {"coupled-samples"}),
    "a regulariser in a sum that is told to be one": (
        lambda: verify(network(), lambda m, b: counted(defects.sum_with_penalty(m, b), "sum"), samples(), 4),
        {"wrong-count"},
    ),
    "a head that some micro-batches do not use": (
        lambda: verify(WithAux(), defects.sometimes, samples(), 4),
        {"wrong-count"},
    ),
}


@pytest.mark.parametrize("case", IN_LOSS)
def test_a_mistake_in_the_loss_is_found(case: str) -> None:
    """Its kind, and nothing else."""
    torch.manual_seed(1)
    make, expected = IN_LOSS[case]
    verification = make()
    assert not verification.exact
    assert set(found(verification)) == expected, str(verification)


NOTHING_COUNTED = torch.tensor([1, 2, 0, 1, 0, 0, 0, 0, 1, 2, 1])  # of the second micro-batch


def clamped(model: Any, batch: Batch) -> Tensor:
    """What the remedy says."""
    mask = (batch[1] > 0).to(batch[0].dtype)
    loss = (F.cross_entropy(model(batch[0]), batch[1], reduction="none") * mask).sum() / mask.sum().clamp(min=1)
    return counted(loss, mask.sum())


def test_a_masked_mean_over_nothing_is_told_what_helps() -> None:
    """No weight makes a NaN nothing: its remedy does, and is proved."""
    torch.manual_seed(1)
    batch = samples()[0], NOTHING_COUNTED
    for window in (None, defects.textbook(defects.masked)):
        verification = verify(network(), defects.masked, batch, 4, train_window=window)
        assert set(found(verification)) == {"wrong-count"}
        assert "Micro-batch 2 of 3 has a loss of nan by itself" in verification.causes[0].found
        assert "loss.sum() / count.clamp(min=1); return counted(loss, count)" in str(verification)
    assert verify(network(), clamped, batch, 4).exact


def test_a_micro_batch_that_counts_nothing_has_no_weight() -> None:
    """One term, one count: it is not taken for several."""
    torch.manual_seed(1)

    def ignoring(model: Any, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], ignore_index=0)

    batch = torch.randn(12, 6), torch.tensor([1, 2, 0, 1, 0, 0, 0, 0, 1, 2, 1, 2])
    verification = verify(network(), ignoring, batch, 4, train_window=defects.textbook(ignoring))
    assert set(found(verification)) == {"wrong-count"}, str(verification)
    told = verification.causes[0].found
    assert "the big batch weights them 0.429 : 0 : 0.571, in proportion to (batch[1] != 0).sum()" in told
    assert verify(network(), ignoring, batch, 4).exact


def test_terms_that_share_all_parameters_are_told_apart_by_their_counts() -> None:
    """No weight per micro-batch is right; weighing each term by its own count is."""
    torch.manual_seed(1)

    def two_terms(model: Any, batch: Batch) -> Tensor:
        logits = model(batch[0])
        return F.cross_entropy(logits, batch[1], ignore_index=0) + 0.5 * logits.square().mean()

    verification = verify(network(), two_terms, samples(), 4, train_window=by_samples(two_terms))
    assert set(found(verification)) == {"wrong-count"}, str(verification)
    assert "Weighting each term by its own count, as BigStep does" in verification.causes[0].found


class Named(NamedTuple):
    """What a model returns."""

    logits: Tensor


class Naming(nn.Module):
    """A model that ends in an operation of its own, and returns a named tuple or a plain one."""

    def __init__(self, kind: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.scale, self.kind = network(), nn.Parameter(torch.ones(3)), kind

    def forward(self, x: Tensor) -> Any:
        """Scale what the network gives."""
        return self.kind(self.inner(x) * self.scale)


@pytest.mark.parametrize("kind", [Named, lambda logits: (logits,), lambda logits: {0: logits}])
def test_a_bent_mean_is_in_the_loss_whatever_the_model_returns(kind: Callable[[Tensor], Any]) -> None:
    """Samples are changed inside of it, too."""
    torch.manual_seed(1)

    def root(model: Any, batch: Batch) -> Tensor:
        logits: Tensor = model(batch[0])[0]
        return logits.square().mean().sqrt()

    verification = verify(Naming(kind), root, samples(), 4, train_window=by_samples(root))
    assert found(verification) == {"coupled-samples": "loss_fn"}, str(verification)


@pytest.mark.parametrize("number", [11, 12])
@pytest.mark.parametrize("loop", [by_samples, defects.textbook])
def test_one_that_is_left_out_is_all_of_it_where_the_others_are_averaged(loop: Any, number: int) -> None:
    """The weights of those that are left add up to one, and still the difference is that of the one."""
    torch.manual_seed(1)

    def train_window(model: Any, micro_batches: list[Batch]) -> None:
        loop(mean)(model, [micro_batches[0], micro_batches[2]])

    verification = verify(network(), mean, samples(number), 4, train_window=train_window)
    assert verification.causes[0].kind == "dropped-micro-batch", str(verification)
    assert "Micro-batch 2 of 3" in verification.causes[0].found


def without_first(model: Any, micro_batches: list[Batch]) -> None:
    """A loop that begins too late."""
    total = sum(len(labels) for _, labels in micro_batches)
    for batch in micro_batches[1:]:
        (mean(model, batch) * len(batch[1]) / total).backward()


def only_last(model: Any, micro_batches: list[Batch]) -> None:
    """A backward that was meant to be inside."""
    losses = [mean(model, batch) for batch in micro_batches]
    losses[-1].backward()


def test_a_turned_sign_is_called_that() -> None:
    """And no division by less than nothing."""

    def uphill(model: Any, micro_batches: list[Batch]) -> None:
        for batch in micro_batches:
            (-mean(model, batch) * len(batch[1]) / 11).backward()

    torch.manual_seed(0)
    (sign,) = verify(network(), mean, samples(), 4, train_window=uphill).causes
    assert sign.kind == "wrong-scale"
    assert sign.found == "The gradient is -1 times the big batch's: its sign is turned, so a step goes uphill."


def test_what_a_count_is_under_class_weights() -> None:
    """No count in the batch is in proportion; it is said what it may be."""

    def weighted(model: Any, batch: Batch) -> Tensor:
        scores = model(batch[0])
        return F.cross_entropy(scores, batch[1], weight=torch.tensor([1.0, 5.0, 0.1], dtype=scores.dtype))

    torch.manual_seed(0)
    (count,) = verify(network(), weighted, samples(), 4, train_window=defects.textbook(weighted)).causes
    assert "weight[labels].sum() under class weights" in count.remedy
    (known,) = verify(network(), mean, samples(), 4, train_window=defects.textbook(mean)).causes
    assert "len(batch[0])" in known.remedy
    assert "class weights" not in known.remedy


class Scaled(nn.Module):
    """Its last layer's output, by a running size that the batch has just changed: written and read in one forward."""

    run: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)
        self.register_buffer("run", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        """Divide by it."""
        found: Tensor = self.last(x)
        self.run.mul_(0.9).add_(0.1 * found.detach().abs().mean(0))
        return found / self.run


def test_what_a_model_does_behind_its_last_layer_is_not_the_losss() -> None:
    """Samples that meet in a model's own forward are blamed on it; those that meet in the loss, on that."""
    torch.manual_seed(0)
    model = verify(Scaled(), mean, samples(), 4, train_window=by_samples(mean))
    assert found(model) == {"state": "Scaled", "coupled-samples": "loss_fn"}

    def contrastive(model: Any, batch: Batch) -> Tensor:
        scores = model(batch[0])
        return F.cross_entropy(scores @ scores.T, torch.arange(len(scores)))

    loss = verify(network(), contrastive, samples(), 4, train_window=by_samples(contrastive))
    assert found(loss) == {"coupled-samples": "loss_fn"}


def summed(model: Any, batch: Batch) -> Tensor:
    """A sum over samples."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def clamping(model: Any, micro_batches: list[Batch]) -> None:
    """Clip the whole gradient by value, by hand."""
    by_samples(mean)(model, micro_batches)
    for p in model.parameters():
        p.grad.clamp_(-0.02, 0.02)


def shrinking(model: Any, micro_batches: list[Batch]) -> None:
    """Clip the whole gradient by norm, by hand."""
    by_samples(mean)(model, micro_batches)
    norm = sum(float(p.grad.square().sum()) for p in model.parameters()) ** 0.5
    for p in model.parameters():
        p.grad.mul_(0.01 / norm)


def clipping_values(model: Any, micro_batches: list[Batch]) -> None:
    """Clip by value after each backward."""
    for batch in micro_batches:
        (mean(model, batch) * len(batch[1]) / 11).backward()
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)


IN_LOOP: dict[str, tuple[Callable[[], nn.Module], defects.Loss, int, defects.Window, tuple[str, str]]] = {
    "a masked mean": (network, defects.masked, 12, defects.textbook(defects.masked), ("wrong-count", "!= 0).sum()")),
    "not divided": (network, mean, 12, defects.undivided(mean), ("wrong-scale", "it was not divided")),
    "divided twice": (network, mean, 12, defects.divided_twice(mean), ("wrong-scale", "micro-batches twice")),
    "by too many": (network, mean, 12, defects.scaled(mean, lambda _: 1 / 8), ("wrong-scale", "by 8 instead of 3")),
    "a loss scale": (network, mean, 12, defects.scaled(mean, lambda n: 65536 / n), ("wrong-scale", "a power of two")),
    "uphill": (network, mean, 12, defects.scaled(mean, lambda n: -1 / n), ("wrong-scale", "its sign is turned")),
    "a regularizer each time": (
        network,
        defects.with_penalty,
        11,
        defects.penalty_each_time,
        ("wrong-count", "3 times per window; it should be added 1 times: it was added for each micro-batch"),
    ),
    "a regularizer left out": (
        network,
        defects.with_penalty,
        11,
        by_samples(mean),
        ("wrong-count", "not in the window"),
    ),
    "a sum and a regularizer": (
        network,
        defects.sum_with_penalty,
        11,
        defects.undivided(defects.sum_with_penalty),
        ("wrong-count", "3 times per window"),
    ),
    "a sum that is divided": (network, summed, 12, defects.textbook(summed), ("wrong-scale", "a sum was divided")),
    "two counts": (WithAux, defects.two_counts, 11, by_samples(defects.two_counts), ("wrong-count", "several terms")),
    "a head that some do not use": (
        WithAux,
        defects.sometimes,
        11,
        by_samples(defects.sometimes),
        ("wrong-count", "several terms"),
    ),
    "the first dropped": (network, mean, 11, without_first, ("dropped-micro-batch", "nothing was cleared")),
    "cleared": (network, mean, 11, defects.zeroing(mean), ("dropped-micro-batch", "cleared inside the window")),
    "clipped by value by hand": (network, mean, 11, clamping, ("clipping", "beyond 0.02")),
    "clipped by norm by hand": (network, mean, 11, shrinking, ("wrong-scale", "times the big batch's")),
    "clipped each time by value": (network, mean, 11, clipping_values, ("clipping", "clipped 3 times")),
}


@pytest.mark.parametrize("case", IN_LOOP)
def test_a_mistake_in_a_loop_is_found(case: str) -> None:
    """Its kind and its evidence, and nothing else."""
    torch.manual_seed(1)
    make, loss, number, train_window, (kind, evidence) = IN_LOOP[case]
    verification = verify(make(), loss, samples(number), 4, train_window=train_window)
    assert [cause.kind for cause in verification.causes] == [kind], str(verification)
    assert evidence in verification.causes[0].found


class Stateful(nn.Module):
    """A recurrent cell that goes on from where the last call ended."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(6, 8), nn.Linear(8, 3)
        self.h: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Go on from the mean of the last hidden states."""
        start = x.new_zeros(len(x), 8) if self.h is None else self.h.mean(0).expand(len(x), 8)
        hidden = self.cell(x, start)
        self.h = hidden.detach()
        found: Tensor = self.head(hidden)
        return found


def test_a_recurrent_state_that_goes_on_is_state() -> None:
    """With BigStep and in a loop: each micro-batch begins with the state that the last one left."""
    torch.manual_seed(0)
    for window in (None, by_samples(mean)):
        verification = verify(Stateful(), mean, samples(), 4, train_window=window)
        assert found(verification) == {"state": "Stateful"}, str(verification)


class Keeping(nn.Module):
    """Keeps a weight of its samples for later, as an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        """Keep it."""
        self.weight = 1 + x.detach().abs().mean(1)
        return x


def without_offset(model: Any, batch: Batch) -> Tensor:
    """A contrastive loss whose own rows are looked for where the first micro-batch's are."""
    scores = model(batch[0])
    return F.cross_entropy(scores @ across.gather(scores * 0.5 + 1).T, torch.arange(len(scores)))


def reading(model: Any, batch: Batch) -> Tensor:
    """Reads after a `gather` what the model kept before it."""
    scores = model(batch[0])
    every = across.gather(scores * 0.5 + 1)
    own = across.offset() + torch.arange(len(scores))
    return (F.cross_entropy(scores @ every.T, own, reduction="none") * model[1].weight).mean()


@pytest.mark.parametrize("loss", [without_offset, reading])
@pytest.mark.parametrize("options", [None, UNCHECKED], ids=["checked", "unchecked"])
def test_a_wrong_use_of_all_samples_is_coupled(loss: Any, options: Options | None) -> None:
    """It is never advised to use `across`, which it does already."""
    torch.manual_seed(0)
    verification = verify(network(Keeping()), loss, samples(12), 4, options=options)
    assert not verification.exact
    assert "coupled-samples" in found(verification), str(verification)
    assert verification.causes[-1].remedy.startswith("The loss uses all samples already")
