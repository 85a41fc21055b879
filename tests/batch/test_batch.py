"""Cutting a batch: every sample once, in order, in the structure it came in; what has no samples goes along whole."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bigbatch.batch.batch import Batch, SampleShape
from bigbatch.batch.split import Division, balanced, joined
from bigbatch.errors import BatchError, ConfigurationError
from tests.support.batches import LARGEST, SHARED_ROWS, STRUCTURES, Structure, structures
from tests.support.messages import approve
from tests.support.samples import rows


@given(st.integers(1, 500), st.integers(1, 600))
@settings(max_examples=100)
def test_micro_batches_are_balanced(total: int, largest: int) -> None:
    """As few as there can be, of at most two sizes that differ by one, the larger first."""
    sizes = balanced(total, largest)
    assert sum(sizes) == total
    assert len(sizes) == -(-total // largest)
    assert max(sizes) <= largest
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(structures, st.integers(2, LARGEST), st.integers(1, LARGEST + 3), st.integers(0, 99))
@settings(max_examples=80)
def test_the_micro_batches_are_the_batch(structure: Structure, n: int, size: int, seed: int) -> None:
    """Joined again they are the samples as they came; the batch itself is as it was."""
    batch = rows(n, seed)
    wrapped = structure.wrap(batch)
    division = Division.even(Batch.of(wrapped), size)
    parts = [structure.unwrap(part) for part in map(division.micro_batch, range(len(division)))]
    assert [len(part["x"]) for part in parts] == balanced(n, size) == list(division.sizes)
    for name, leaf in batch.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), leaf)
        assert torch.equal(structure.unwrap(wrapped)[name], leaf)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:size].tolist()
    whole = Batch.of(wrapped)  # by their numbers, as packing does
    for taken in (whole.take(order), whole.only(order).take(range(len(order)))):
        assert all(torch.equal(structure.unwrap(taken)[name], leaf[order]) for name, leaf in batch.items())


# Which leaves have samples.


@pytest.mark.parametrize(
    ("batch", "size", "sampled"),
    [
        (torch.zeros(5, 2), 5, {"batch"}),
        ({"x": torch.zeros(5), "s": torch.tensor(1.0)}, 5, {"batch['x']"}),
        ({"x": torch.zeros(5), "y": torch.zeros(5), "w": torch.zeros(3)}, 5, {"batch['x']", "batch['y']"}),
        ({"x": torch.zeros(5), "w": torch.zeros(1, 3)}, 5, {"batch['x']"}),
        ({"x": torch.zeros(5), "e": torch.zeros(0), "y": torch.zeros(5)}, 5, {"batch['x']", "batch['y']"}),
        ({"x": torch.zeros(1, 3), "y": torch.zeros(1)}, 1, {"batch['x']", "batch['y']"}),
        ([torch.zeros(2), ["a", "b"], ["a", "b", "c"]], 2, {"batch[0]", "batch[1]"}),
        ([torch.zeros(2), *range(40)], 2, {"batch[0]"}),
        ((torch.zeros(3), (1, 2, 3), (4, 5)), 3, {"batch[0]", "batch[1]"}),
        ((torch.zeros(3), np.zeros((3, 2)), np.float64(1.0)), 3, {"batch[0]", "batch[1]"}),
        ((np.zeros((3, 2)), np.zeros(3)), 3, {"batch[0]", "batch[1]"}),
        ((torch.zeros(1, 10), torch.zeros(1), torch.zeros(5)), 1, {"batch[0]", "batch[1]"}),  # five class weights
        (([torch.zeros(2, 3), torch.zeros(2, 3)], torch.zeros(2)), 2, {"batch[0][0]", "batch[0][1]", "batch[1]"}),
        ({"views": [torch.zeros(6, 3), torch.zeros(6, 5)]}, 6, {"batch['views'][0]", "batch['views'][1]"}),
        ([[torch.zeros(8, 4), torch.zeros(8, 4)]] * 2, 8, {f"batch[{i}][{j}]" for i in (0, 1) for j in (0, 1)}),
    ],
)
def test_samples_are_found_by_agreement(batch: Any, size: int, sampled: set[str]) -> None:
    """Most leaves decide; one row, no row or no dimension has no say."""
    found = Batch.of(batch)
    assert (found.size, set(found.sampled)) == (size, sampled)


UNCUT: dict[str, Any] = {
    "a disagreement": {"x": torch.zeros(4, 3), "y": torch.zeros(5)},
    "a disagreement of many": [torch.zeros(4 + i % 2) for i in range(12)],
    "a disagreement with nothing": {"x": torch.zeros(0, 3), "w": torch.zeros(4)},
    "empty": {"x": torch.zeros(0, 3), "y": torch.zeros(0), "w": torch.zeros(4)},
    "no tensor": {"x": 3, "y": "text"},
    "samples": [(torch.zeros(3), 1), (torch.zeros(3), 2)],
    "packed": nn.utils.rnn.pack_sequence([torch.zeros(2), torch.zeros(1)]),
}


@pytest.mark.parametrize("name", UNCUT)
def test_batches_that_cannot_be_cut(name: str) -> None:
    """Each says what was found, and what to pass."""
    with pytest.raises(BatchError) as caught:
        Batch.of(UNCUT[name])
    approve("batch", name, caught.value)


@pytest.mark.parametrize("whole", [[], ("a", "b"), (), None, {"x": 3}, {}, torch.tensor(3.0), iter([1])])
def test_what_holds_no_samples(whole: Any) -> None:
    """Whether `collate` would make a batch of them or not."""
    if whole != ("a", "b"):
        with pytest.raises(BatchError, match=r"a list of samples\.|this batch is empty"):
            Batch.of(whole, collate=list)
    with pytest.raises(BatchError, match="no tensor with samples"):
        Batch.of(whole)


@pytest.mark.parametrize(
    "batch",
    [
        ([torch.zeros(3, 8, 8) for _ in range(5)], torch.zeros(5)),
        {"images": tuple(torch.zeros(3, 8 + i, 8) for i in range(5)), "labels": torch.zeros(5), "ids": list("abcde")},
        (torch.zeros(5, 3), [torch.tensor(i) for i in range(5)]),
        (tuple(torch.zeros(3, 8, 8) for _ in range(5)), tuple({"boxes": torch.zeros(i, 4)} for i in range(5))),
    ],
)
def test_a_list_of_one_entry_per_sample_is_told_how_to_pass(batch: Any) -> None:
    """Images of any size, and their targets: their channels are no samples."""
    with pytest.raises(BatchError, match=r"(?s)of 5, one for each sample.*collate_fn=list.*Options\(collate="):
        Batch.of(batch)


def test_what_is_shared_is_remembered_by_its_path() -> None:
    """Tensors and lists that did not agree once are not cut later, when they happen to agree."""
    first = Batch.of({"x": torch.zeros(6), "y": torch.zeros(6), "w": torch.zeros(4), "names": ["a"] * 4})
    assert first.shared == {"batch['w']", "batch['names']"}
    later = Batch.of({"x": torch.zeros(4), "w": torch.zeros(4), "names": ["a"] * 4}, shared=first.shared)
    assert later.sampled == {"batch['x']"}
    assert Batch.of({"w": torch.zeros(3)}, shared=first.shared).size == 3  # another kind of batch


def test_the_signature_is_of_one_sample() -> None:
    """The same for any number of samples, another for another shape or dtype."""

    def of(*shape: int, dtype: torch.dtype = torch.float32) -> SampleShape:
        return Batch.of(
            {"x": torch.zeros(*shape, dtype=dtype), "w": torch.zeros(1, SHARED_ROWS), "n": ["a"] * 3}
        ).signature()

    assert of(20, 3) == of(40, 3) == SampleShape((("batch['x']", "float32", (3,)),))
    assert len({of(20, 3), of(20, 4), of(20, 3, dtype=torch.int64), of(20, 3, 1)}) == 4


def test_a_batch_changed_in_place_is_noticed() -> None:
    """Through a view of it, too; a look changes nothing."""
    batch = Batch.of({"x": torch.zeros(4, 2), "y": torch.zeros(4)})
    batch.take(slice(0, 2))["x"].sum()
    batch.refuse_changed()
    batch.take([0, 1])["x"].add_(1)  # a copy
    batch.refuse_changed()
    batch.take(slice(0, 2))["x"].add_(1)
    with pytest.raises(BatchError, match="changed its batch in place"):
        batch.refuse_changed()


def test_arrays_may_be_written_into() -> None:
    """Nothing tells when an array was changed, so every micro-batch has its own: those that all share, too."""
    x, weight = np.arange(12.0).reshape(4, 3), np.ones(3)
    batch = Batch.of({"x": x, "weight": weight, "tensor": torch.zeros(4), "names": list("abcd")})
    assert batch.take([2, 0])["names"] == ["c", "a"]
    for indices in (slice(0, 4), [2, 0]):
        taken = batch.take(indices)
        taken["x"] -= 5
        taken["weight"][:] = 0
    assert x.sum() == 66
    assert weight.sum() == 3


@pytest.mark.parametrize("structure", [each for each in STRUCTURES if each.of_any], ids=str)
def test_samples_that_collate_may_take_apart(structure: Structure) -> None:
    """Whatever holds them: arrays are its own, tensors are the same, and a change of one is noticed."""

    def held(made: Any) -> list[Any]:
        return [structure.unwrap(sample)["x"] for sample in made]

    def empty(samples: list[Any]) -> list[Any]:
        for leaf in held(samples):
            leaf[:] = 0
        return samples

    ones: Any = np.ones(3)
    arrays = [structure.wrap({"x": ones.copy()}) for _ in range(3)]
    made = Batch.of(arrays, collate=empty).take(slice(0, 3))
    assert all(not leaf.any() for leaf in held(made))
    assert all(leaf.all() for leaf in held(arrays))
    assert structure.name == "proxy" or list(map(type, made)) == list(map(type, arrays))
    tensors = [structure.wrap({"x": torch.ones(3)}) for _ in range(3)]
    batch = Batch.of(tensors, collate=list)
    assert all(a is b for a, b in zip(held(tensors), held(batch.take([0, 1, 2])), strict=True))
    batch.refuse_changed()
    held(tensors)[-1].add_(1)
    with pytest.raises(BatchError, match="collate has changed its samples in place"):
        batch.refuse_changed()
    batch.only([0]).refuse_changed()  # a part of it for a probe


# Joining.


@given(st.permutations(range(7)), st.integers(1, 7))
@settings(max_examples=40)
def test_rows_return_to_their_places(order: list[int], size: int) -> None:
    """Whatever order the samples ran in."""
    rows_of = torch.arange(7.0)[:, None] * torch.ones(3)
    sizes = balanced(7, size)
    parts = [rows_of[torch.tensor(list(group))] for group in torch.tensor(order).split(sizes)]
    assert torch.equal(joined(parts, sizes, order), rows_of)
    ragged = [part[:, : 1 + number % 3] for number, part in enumerate(parts)]
    back: Any = joined(ragged, sizes, order)
    assert [float(row[0]) for row in back] == list(range(7))


def test_what_is_not_per_sample() -> None:
    """Numbers are stacked, other shapes and other things make lists, nothing stays nothing."""
    assert joined([None, None], [2, 1], None) is None
    assert joined([torch.tensor(1.0), torch.tensor(2.0)], [2, 1], None).tolist() == [1, 2]
    assert [part.shape[0] for part in joined([torch.zeros(5), torch.ones(4)], [2, 1], None)] == [5, 4]
    assert joined([{"a": "x"}, {"a": "y"}], [2, 1], None) == {"a": ["x", "y"]}
    for other in ({"b": 1}, None):
        with pytest.raises(ConfigurationError, match="differ in structure"):
            joined([{"a": 1}, other], [2, 1], None)
