"""A frozen weight has no place in the graph: it is known by its memory, each time it is met."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import Accumulator
from bigbatch.errors import LossError, UnreadableLoss
from bigbatch.loss.origin import FrozenWeights, Surroundings
from bigbatch.loss.readings import Reader
from tests.support.reference import distance, sgd, trained
from tests.support.samples import CLASSES, generator, labels, normal, seeded

SIZES = (CLASSES, CLASSES, 3)  # as many rows as classes, so that a batch has the shape of the weight


class Adapted(nn.Module):
    """A trained body under a frozen head, as LoRA leaves it; the head may be the embedding's, tied."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, 5)
        self.body = nn.Linear(5, 5)
        self.head = nn.Linear(5, CLASSES, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.embedding.requires_grad_(requires_grad=False)
        self.head.requires_grad_(requires_grad=False)

    def features(self, x: Tensor) -> Tensor:
        """What the head is given."""
        return self.body(x).tanh()

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.features(x))


def adapted(*, tied: bool = False) -> Adapted:
    """The same weights each time."""
    model = seeded(lambda: Adapted(tied=tied))()
    assert isinstance(model, Adapted)
    return model


def batch(size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Features and labels."""
    by = generator(seed)
    return normal(size, 5, by=by), labels(size, by=by)


BATCHES = [batch(size, seed) for seed, size in enumerate(SIZES)]


def true_step(model: Adapted, batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """The weights after one real big batch."""
    optimizer = sgd(trained(model))
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    return [p.detach() for p in trained(model)]


def reading(model: nn.Module) -> Reader:
    """What an accumulator reads losses with."""
    return Reader(Surroundings(own=frozenset(map(id, trained(model))), is_weight=FrozenWeights([model])))


@pytest.mark.parametrize("kind", ["frozen", "tied", "autocast"])
def test_a_frozen_head_is_read_once(kind: str) -> None:
    """The second micro-batch is remembered, though autocast makes a new copy each time."""
    model = adapted(tied=kind == "tied").float()
    reader, fresh = reading(model), []
    for x, y in BATCHES[:2]:
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            reader.read(F.cross_entropy(model(x.float()), y))
        fresh.append(reader.fresh)
    assert fresh == [True, False]


def test_a_cast_of_a_single_number_is_read_again() -> None:
    """A buffer without dimensions, as of a temperature; the second copy is compared with what the first was of."""
    model, temperature = nn.Linear(2, 1), torch.tensor(0.5)
    model.register_buffer("temperature", temperature)
    is_own = FrozenWeights([model])
    for _ in range(2):
        assert is_own(temperature.double())
    assert not is_own(torch.tensor(0.25, dtype=torch.float64))


PLACED = ("batch data", "batch data under autocast", "the weight was moved", "the head was replaced")


@pytest.mark.parametrize("how", PLACED)
def test_what_lies_where_a_frozen_weight_lay_is_refused(how: str) -> None:
    """The graph looks the same, and so does its shape: batch data, or memory that a weight has left."""
    cast, dtype = how.endswith("autocast"), torch.float32 if how.startswith("batch") else torch.float64
    model = adapted().to(dtype)
    accumulator = Accumulator(model, sgd(trained(model)), steps=3)
    (x, y), (keys, _) = BATCHES[:2]

    def loss(weight: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            return F.cross_entropy(F.linear(model.features(x.to(dtype)), weight), y)

    for _ in range(2):
        accumulator.backward(loss(model.head.weight))
    left = keys.to(dtype) if how.startswith("batch") else model.head.weight.detach()
    if how == "the head was replaced":
        model.head = nn.Linear(5, CLASSES, bias=False).double().requires_grad_(requires_grad=False)
    elif how == "the weight was moved":
        model.head.weight.data = left.clone()
    with pytest.raises(UnreadableLoss, match="no parameter or buffer of the model"):
        accumulator.backward(loss(left))


def test_a_weight_that_was_loaded_anew_is_read() -> None:
    """It lies elsewhere from then on, and is the model's all the same."""
    model, twin = adapted(), adapted()
    accumulator = Accumulator(model, sgd(trained(model)), steps=2)
    for x, y in BATCHES[:2]:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone(), requires_grad=False)
        accumulator.backward(F.cross_entropy(model(x), y))
    assert distance([p.detach() for p in trained(model)], true_step(twin, BATCHES[:2])) <= 1e-12


def test_a_weight_computed_from_a_frozen_one_is_told_from_one_of_the_batch() -> None:
    """Both are a product of a parameter with a tensor without gradient, in graphs that look the same."""
    model = adapted()
    model.head.requires_grad_(requires_grad=True)
    model.register_buffer("base", torch.eye(5, dtype=torch.float64))
    reader = reading(model)
    x, y = BATCHES[0]

    def loss(base: Tensor) -> Tensor:
        return F.cross_entropy(model.features(x) @ (base @ model.head.weight.t()), y)

    for fresh in (True, False):
        reader.read(loss(model.get_buffer("base")))
        assert reader.fresh is fresh
    with pytest.raises(LossError, match="MmBackward"):
        reader.read(loss(x.t() @ x))
