"""Packing: any lengths in any budget, the fewest groups and the least padding, and the untrimmed batch's update."""

import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from bigbatch import BigStep, Options
from bigbatch.batch.batch import Batch as Cut
from bigbatch.batch.split import Padding, lengths_of, pack, pack_alike, rounded, width_of
from bigbatch.errors import BatchError, CoupledLoss
from tests.support.messages import approve
from tests.support.packed import LENGTHS, LOSSES, attentive, text, token_loss
from tests.support.reference import distance, sgd, trained, weights
from tests.support.samples import CLASSES, Batch, generator, seeded

os.environ.setdefault("HF_HUB_OFFLINE", "1")
lengths_lists = st.lists(st.integers(0, 12), min_size=1, max_size=9)
budgets = st.sampled_from([*range(1, 41), "auto"])


# The groups.


@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=60),
    st.integers(1, 900),
    st.integers(0, 70),
    st.none() | st.integers(1, 20),
)
@settings(max_examples=100)
def test_groups_that_should_be_alike_are(lengths: list[int], budget: int, extra: int, most: int | None) -> None:
    """Every sample once, wide enough, within the budget; all but the longest group are full, and widths are few."""
    width = max(*lengths, 1) + extra
    first, *full = groups = pack_alike(lengths, budget, most, width=width)
    assert sorted(i for group, _ in groups for i in group) == list(range(len(lengths)))
    allowed = most or len(lengths)
    for group, wide in groups:
        assert max(lengths[i] for i in group) <= wide <= width
        assert wide == width or wide == rounded(wide)
        assert len(group) == 1 or (len(group) * wide <= budget and len(group) <= allowed)
    assert all(len(group) == min(max(budget // wide, 1), allowed) for group, wide in full)
    assert len(first[0]) <= min(max(budget // first[1], 1), allowed)
    assert len({(len(group), wide) for group, wide in groups}) <= len({wide for _, wide in groups}) + 1


def test_few_widths_serve_all_lengths() -> None:
    """Eight for each doubling, so that shapes come again, none much longer than it must be; and nothing is cut off."""
    assert len({rounded(length) for length in range(1, 1025)}) == 40
    assert all(length <= rounded(length) <= max(length * 9 / 8, length + 7) for length in range(1, 4097))
    assert all(pack_alike([10, 100], 64, width=width) == [([1], 100), ([0], 40)] for width in (0, 5, 99))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 20), st.none() | st.integers(1, 4))
@settings(max_examples=80)
def test_no_other_grouping_is_better(lengths: list[int], budget: int, most: int | None) -> None:
    """Every sample once; of all ways to group within the budget the fewest groups, and of those the least padding."""

    def cost(groups: list[list[int]]) -> tuple[int, int]:
        return len(groups), sum(map(padded, groups))

    def padded(group: list[int]) -> int:
        return len(group) * max(1, *(lengths[i] for i in group))

    def fits(group: list[int]) -> bool:
        return len(group) == 1 or (padded(group) <= budget and len(group) <= (most or len(group)))

    found = pack(lengths, budget, most)
    assert sorted(i for group, _ in found for i in group) == list(range(len(lengths)))
    assert all(wide * len(group) == padded(group) and fits(group) for group, wide in found)
    every = (groups for groups in partitions(list(range(len(lengths)))) if all(map(fits, groups)))
    assert cost([group for group, _ in found]) == min(map(cost, every))


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """Every way to make groups of some items."""
    if not items:
        yield []
        return
    first, *rest = items
    for groups in partitions(rest):
        yield [[first], *groups]
        for place in range(len(groups)):
            yield [*groups[:place], [first, *groups[place]], *groups[place + 1 :]]


# The update.


@given(
    lengths=lengths_lists,
    budget=budgets,
    most=st.none() | st.integers(1, 4),
    loss=st.sampled_from(sorted(LOSSES)),
    how=st.sampled_from(sorted(LENGTHS)),
    extra=st.integers(0, 3),
    seed=st.integers(0, 99),
)
@settings(max_examples=40)
def test_a_packed_batch_is_the_untrimmed_one(
    *, lengths: list[int], budget: Any, most: int | None, loss: str, how: str, extra: int, seed: int
) -> None:
    """Any lengths, budget, loss and source of lengths: the update of the batch as it came, over three steps.

    Every tensor with places is trimmed to the longest of its micro-batch: that is what packing is for.
    """
    assume(any(lengths))
    model, twin, seen = attentive(), attentive(), list[Batch]()
    optimizer = sgd(trained(twin))

    def loss_fn(m: Any, batch: Batch) -> Tensor:
        seen.append(batch)
        return LOSSES[loss](m, batch)

    options = Options(lengths=LENGTHS[how], token_budget=budget)
    step = BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=most or "auto", options=options)
    for number in range(3):
        seen.clear()
        batch = text(lengths, seed + number, extra)
        update = step(batch)
        optimizer.zero_grad()
        true = LOSSES[loss](twin, batch)
        true.backward()
        optimizer.step()
        assert distance(weights(model), weights(twin)) <= 1e-12
        if loss != "both":
            assert abs(update.loss.item() - true.item()) <= 1e-12
        assert step.padding is not None
        assert how == "larger" or step.padding.given == batch["tokens"].numel()
    assert step.padding is not None
    width = max(lengths) + extra
    for part in seen:  # of the last step, in which nothing is compared
        longest, number = max(1, int(part["lengths"].max()) + (how == "larger")), len(part["lengths"])
        # Of lengths beyond the padding nobody knows what they are of, and nothing is trimmed.
        wide = width if how == "larger" and not extra else min(longest, width)
        for name in ("tokens", "attention_mask", "labels", "position_ids"):
            assert part[name].shape == (number, wide)
        assert number == 1 or budget == "auto" or number * longest <= budget
        assert number <= (most or number)
    assert loss == "both" or how == "larger" or step.padding.padded == sum(part["tokens"].numel() for part in seen)


@pytest.mark.parametrize(("kind", "budget"), [("llama", 12), ("bert", 30)])
def test_hugging_face_models_are_packed_exactly(kind: str, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`model(**batch).loss` in float64, where their own code lets it be."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(Tensor, "float", lambda self: self)  # their losses call it, as a float32 model does not notice
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    sizes, off = (
        dict(zip(names, (11, 8, 2, 2, 12), strict=True)),
        ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    )
    config, of = (
        (transformers.LlamaConfig(**sizes), transformers.LlamaForCausalLM)
        if kind == "llama"
        else (transformers.BertConfig(**sizes, **dict.fromkeys(off, 0.0)), transformers.BertForMaskedLM)
    )
    model, twin = (seeded(lambda: of(config))() for _ in range(2))
    made = text([3, 7, 1, 5, 7, 2], 1)
    kept = ("tokens", "attention_mask", "labels")
    batch = transformers.BatchEncoding({each.replace("tokens", "input_ids"): made[each] for each in kept})
    options = Options(lengths="attention_mask", token_budget=budget)
    update = BigStep(model, sgd(trained(model)), options=options)(batch)
    true = twin(**batch).loss
    true.backward()
    sgd(trained(twin)).step()
    assert distance(weights(model), weights(twin)) <= 1e-6  # RMSNorm and softmax round to float32 inside
    assert abs(update.loss.item() - true.item()) <= 1e-6


# Extras.


def test_extras_return_in_the_batchs_own_order() -> None:
    """Joined where rows are alike, a list per sample where micro-batches were trimmed to other widths."""
    batch = text([2, 7, 1, 5, 7, 3])

    def loss_fn(m: Any, part: Batch) -> Any:
        return token_loss(m, part), {"lengths": part["lengths"], "tokens": part["tokens"]}

    extras = step_for(loss_fn)(batch).extras
    assert torch.equal(extras["lengths"], batch["lengths"])
    for row, whole, length in zip(extras["tokens"], batch["tokens"], batch["lengths"].tolist(), strict=True):
        assert torch.equal(row[:length], whole[:length])


# What is refused.


def step_for(loss_fn: Any = token_loss, **options: Any) -> BigStep:
    """A step that packs."""
    model, given = attentive(), {"lengths": "attention_mask", "token_budget": 10, **options}
    return BigStep(model, sgd(trained(model)), loss_fn, options=Options(**given))


def texts(lengths: Sequence[int], seed: int = 0) -> list[Batch]:
    """A list of samples, each of its own length."""
    batch = text(lengths, seed)
    return [
        {name: batch[name][number, :length] for name in ("tokens", "attention_mask", "labels", "position_ids")}
        for number, length in enumerate(lengths)
    ]


def collated(samples: list[Batch]) -> Batch:
    """Pad to the longest."""
    pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    made = {name: pad([each[name] for each in samples]) for name in ("tokens", "attention_mask")}
    labels = pad([each["labels"] for each in samples], padding_value=-100)
    return {**made, "labels": labels, "position_ids": torch.arange(labels.shape[1]).repeat(len(samples), 1)}


OF_LISTS: dict[str, Any] = {"collate": collated, "lengths": lambda b: [len(each["tokens"]) for each in b]}


def scored(model: Any, batch: Batch) -> Tensor:
    """A score of every token at every place."""
    found: Tensor = model(batch["tokens"], batch["attention_mask"])
    return found


def all_places(model: Any, batch: Batch) -> Tensor:
    """A mean over all places, masked ones as zeros."""
    return (scored(model, batch) * batch["attention_mask"][..., None]).pow(2).mean()


def random_targets(model: Any, batch: Batch) -> Tensor:
    """Tokens to predict are drawn, so counts are random, and padding is none of them."""
    labels = torch.where(torch.rand(batch["labels"].shape) < 0.3, batch["labels"], -100)
    labels[0, 0] = batch["labels"][0, 0]  # at least one
    return F.cross_entropy(scored(model, batch).flatten(0, 1), labels.flatten())


def class_weights(model: Any, batch: Batch) -> Tensor:
    """A count that is added up in float32 may round differently beside padding."""
    logits, weight = scored(model, batch).float(), torch.tensor([0.1, 1.7, 0.3, 2.4])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), weight=weight)


COUNTING: dict[str, tuple[Any, bool]] = {  # losses, and whether they count padding
    "places": (all_places, True),
    "noisy places": (lambda *given: all_places(*given) + 0 * torch.rand(()).double(), True),  # its value says nothing
    "noisy tokens": (lambda *given: token_loss(*given) + 0 * torch.rand(()).double(), False),
    "targets": (random_targets, False),
    "class weights": (class_weights, False),
    "tokens": (token_loss, False),
}


@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("name", COUNTING)
def test_padding_is_refused_where_it_counts(name: str, check: bool, lists: bool) -> None:
    """By the count, also where values are random or nobody asked to compare them, or where `collate` has padded."""
    (loss_fn, wrong), lengths = COUNTING[name], [2, 7, 1, 5, 7, 3, 6]
    for budget, number in product([7, 21], range(3)):
        torch.manual_seed(number)
        step = step_for(loss_fn, check=check, token_budget=budget, **(OF_LISTS if lists else {}))
        with pytest.raises(BatchError, match="this loss counts padding") if wrong else nullcontext():
            step(texts(lengths, number) if lists else text(lengths, number))


@pytest.mark.filterwarnings("ignore:the check of this batch could not run")
@given(lengths=lengths_lists, budget=st.integers(1, 40), check=st.booleans(), lists=st.booleans())
@settings(max_examples=25)
def test_no_look_takes_more_memory_than_the_step(lengths: list[int], budget: int, check: bool, lists: bool) -> None:
    """Whatever has a graph has at most the budget's tokens, or one sample; where that is not to be had, it may fail."""
    lengths = [max(length, 1) for length in lengths]

    def loss_fn(m: Any, batch: Batch) -> Tensor:
        number, width = batch["tokens"].shape
        if torch.is_grad_enabled() and number * width > max(budget, *lengths):
            raise torch.OutOfMemoryError
        return token_loss(m, batch)

    step = step_for(loss_fn, check=check, token_budget=budget, **(OF_LISTS if lists else {}))
    step(texts(lengths) if lists else text(lengths))
    assert step.state_dict()["sizes"] == {}  # nothing failed


@pytest.mark.parametrize("how", ["left", "gaps", "left, by a function", "content"])
def test_what_is_no_padding_on_the_right_is_refused(how: str) -> None:
    """Lengths alone do not tell the side; the content does."""
    batch = text([2, 7, 1, 5])
    options = {"lengths": lambda b: b["lengths"]} if "function" in how else {}
    if how == "gaps":
        batch["attention_mask"][1, 3] = 0
    elif how == "content":
        batch["features"] = torch.arange(28.0).view(4, 7)
    else:
        batch = {name: leaf.flip(1) if leaf.dim() > 1 else leaf for name, leaf in batch.items()}
    with pytest.raises(BatchError) as caught:
        step_for(**options)(batch)
    approve("batch", f"padding: {how}", caught.value)
    if how == "content":
        batch["features"] = batch["features"][:, None]
        step_for()(batch)


def test_a_wider_tensor_is_not_taken_for_the_padded_ones() -> None:
    """Where widths are found equally often, the narrowest that holds the longest sample is meant."""
    batch = text([2, 5, 1])
    batch = {"features": torch.rand(3, 9), "tokens": batch["tokens"], "lengths": batch["lengths"]}
    assert width_of(Cut.of(batch), 5) == 5


NO_LENGTHS: dict[str, Any] = {
    "no such mask": "mask",
    "no table": "lengths",
    "labels": "labels",  # what is ignored by -100 is not 0: nothing would be packed, without a word
    "too few": lambda b: b["lengths"][:2],
    "negative": lambda b: -b["lengths"],
    "a table": lambda b: b["attention_mask"],
    "a number": lambda _: 3,
    "none": lambda _: None,
}


@pytest.mark.parametrize("name", NO_LENGTHS)
def test_lengths_that_are_none(name: str) -> None:
    """Each says what was found."""
    with pytest.raises(BatchError) as caught:
        lengths_of(Cut.of(text([2, 7, 1, 5])), NO_LENGTHS[name])
    approve("batch", f"lengths: {name}", caught.value)


def test_padding_is_told() -> None:
    """What went through the model, beside what was needed and what came."""
    step = step_for(token_budget=14)
    before = step.padding
    assert before is None
    step(text([2, 7, 1, 5]))
    assert step.padding == Padding(real=15, padded=14 + 4, given=28)
    assert str(step.padding) == "18 tokens for 15 real ones (17% padding); 28 as the batch came"
    assert "0 real ones" in str(Padding(0, 3, 3))


class Listening(nn.Module):
    """Sounds whose features are normalized over time, padding included, as Wav2Vec2 and Hubert may do."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.norm, self.head = nn.Linear(1, 4), nn.GroupNorm(4, 4), nn.Linear(4, CLASSES)
        with torch.no_grad():
            self.head.weight *= 1e-3  # as at the start of a fine-tuning

    def forward(self, sounds: Tensor, mask: Tensor) -> Tensor:
        """(n, time) → (n, classes)."""
        features = self.norm(self.features(sounds[..., None]).transpose(1, 2)).transpose(1, 2).tanh()
        scores: Tensor = self.head((features * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))
        return scores


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_padding_in_a_norm_is_refused_where_the_loss_hardly_shows_it(dtype: torch.dtype) -> None:
    """The gradient is far off all the same."""
    source = generator(0)
    lengths = torch.tensor([12, 3, 5, 4, 12, 6, 2, 3])
    mask = (torch.arange(12) < lengths[:, None]).to(dtype)
    batch = {
        "sounds": torch.randn(8, 12, generator=source, dtype=torch.float64).to(dtype) * mask,
        "mask": mask,
        "label": torch.randint(CLASSES, (8,), generator=source),
    }
    model = seeded(Listening)().to(dtype)

    def loss_fn(model: Any, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["sounds"], batch["mask"]), batch["label"])

    step = BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=2, options=Options(lengths="mask"))
    with pytest.raises(CoupledLoss, match="padding that the loss counts"):
        step(batch)
