"""Hypothesis strategies for what holds a batch: any container that a loader may yield, around the tensors of any loss.

A structure wraps a dict of tensors and opens it again, so each of them meets every loss of `tests.support.losses`.
"""

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor
from transformers import BatchEncoding
from transformers.modeling_outputs import ModelOutput

from tests.support.losses import READABLE, SEVERAL
from tests.support.samples import Batch, Loss

SHARED_ROWS = 17  # more than any batch here has samples
LARGEST = 9


@dataclasses.dataclass(frozen=True)
class Structure:
    """A way to hold a batch's tensors, and the way back; prints as its name."""

    name: str
    wrap: Callable[[Batch], Any]
    unwrap: Callable[[Any], Batch]
    kind: type | None = None  # that every micro-batch must have, too
    of_any: bool = True  # whether it may hold other things than tensors

    def __str__(self) -> str:
        return self.name

    def loss(self, case: Loss) -> Callable[[Any, Any], Tensor]:
        """The loss of a wrapped micro-batch."""

        def loss_fn(model: Any, batch: Any) -> Tensor:
            assert self.kind is None or type(batch) is self.kind
            return case.loss(model, self.unwrap(batch))

        return loss_fn


def samples_of(batch: Batch) -> int:
    """How many samples a plain batch has."""
    return len(next(iter(batch.values())))


# Containers that say the names of what they hold.


def _by_name(made: Any) -> Batch:
    names = [field.name for field in dataclasses.fields(made)] if dataclasses.is_dataclass(made) else made._fields
    return {name: getattr(made, name) for name in names}


def _named_tuple(batch: Batch) -> Any:
    return namedtuple("Samples", list(batch))(**batch)  # noqa: PYI024 - the fields are those of the loss's data


def _frozen(batch: Batch) -> Any:
    return dataclasses.make_dataclass("Samples", list(batch), frozen=True, slots=True)(**batch)


@dataclasses.dataclass
class Picky:
    """A dataclass whose making does something: it must not be made a second time."""

    tensors: Batch
    double: bool = dataclasses.field(init=False, default=False)
    twins: Any = None

    def __post_init__(self) -> None:
        assert self.twins is None
        self.twins = (self.tensors, [self.tensors])


def _twins(made: Picky) -> Batch:
    one, (other,) = made.twins
    assert all(torch.equal(one[name], other[name]) for name in one)
    return one


# Company: what else a batch may hold.


def _in_company(batch: Batch) -> Any:
    n = samples_of(batch)
    numbers = torch.arange(n)
    return {
        "tensors": batch,
        "numbers": numbers,
        "names": [f"sample {i}" for i in range(n)],
        "array": np.arange(n) * 2,
        "paths": tuple(f"{i}.png" for i in range(n)),
        "split": "train",
        "epoch": 3,
        "rate": 0.5,
        "nothing": None,
        "scale": torch.tensor(2.0),
        "row": torch.ones(1, 4),
        "none": torch.empty(0, 3),
        "shared": torch.arange(SHARED_ROWS),
        "classes": ["cat", "dog"] * SHARED_ROWS,
    }


def _out_of_company(made: Any) -> Batch:
    numbers = made["numbers"].tolist()
    assert made["names"] == [f"sample {i}" for i in numbers]
    assert made["paths"] == tuple(f"{i}.png" for i in numbers)
    assert made["array"].tolist() == [2 * i for i in numbers]
    assert (made["split"], made["epoch"], made["rate"], made["nothing"]) == ("train", 3, 0.5, None)
    assert (made["scale"].item(), made["row"].shape, len(made["none"])) == (2.0, (1, 4), 0)
    assert made["shared"].tolist() == list(range(SHARED_ROWS))
    assert len(made["classes"]) == 2 * SHARED_ROWS
    return made["tensors"]


def _nested(batch: Batch) -> Any:
    names = list(batch)
    half = len(names) // 2
    return [
        " ".join(names),
        (OrderedDict((n, batch[n]) for n in names[:half]), {"deep": [batch[n] for n in names[half:]]}),
    ]


def _unnested(made: Any) -> Batch:
    names, (first, rest) = made
    return {**first, **dict(zip(names.split()[len(first) :], rest["deep"], strict=True))}


STRUCTURES = [
    Structure("dict", dict, dict, dict),
    Structure("default-dict", lambda batch: defaultdict(list, batch), dict, defaultdict),
    Structure("user-dict", UserDict, dict, UserDict),
    Structure("proxy", MappingProxyType, dict),
    Structure("batch-encoding", BatchEncoding, dict, BatchEncoding),
    Structure("model-output", ModelOutput, dict, ModelOutput),
    Structure("pairs", lambda batch: tuple(batch.items()), dict, tuple),
    Structure("named-tuple", _named_tuple, _by_name),
    Structure("dataclass-frozen-slots", _frozen, _by_name),
    Structure("dataclass-picky", Picky, _twins, Picky, of_any=False),
    Structure("nested", _nested, _unnested, list),
    Structure("company", _in_company, _out_of_company, dict, of_any=False),
]  # fmt: skip
structures = st.sampled_from(STRUCTURES)

# Losses whose samples lie along a first dimension, read from a single one, too.
cuttable = st.sampled_from([case for case in [*READABLE, *SEVERAL] if case.smallest == 1])
batch_sizes = st.lists(st.integers(1, LARGEST), min_size=1, max_size=3)
micro_batch_sizes = st.integers(1, LARGEST + 3)
