"""A weight that is computed on the way is a weight if it is made of parameters; if that is unclear, it is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, spectral_norm

from bigbatch import Accumulator, BigStep
from bigbatch.errors import CoupledLoss, LossError, UnreadableLoss
from tests.reference import TOLERANCE, accumulated, assert_equal, big_batches, distance, sgd, trained
from tests.refused import square
from tests.samples import CLASSES, Batch, Loss, join, rows, seeded

SPLIT = (3, 4, 2, 1)
HIDDEN = 5
Compute = Callable[["Head"], Tensor]


class Head(nn.Module):
    """A body, and a last layer whose weight is computed in each forward."""

    constant: Tensor

    def __init__(self, compute: Compute, *, frozen: bool = False) -> None:
        super().__init__()
        self.body = nn.Linear(3, HIDDEN)
        self.weight = nn.Parameter(torch.randn(CLASSES, HIDDEN), requires_grad=not frozen)
        self.up, self.down = nn.Parameter(torch.randn(CLASSES, 2)), nn.Parameter(torch.randn(2, HIDDEN))
        self.size = nn.Parameter(torch.rand(CLASSES, 1) + 1)
        self.bias = nn.Parameter(torch.randn(CLASSES))
        self.register_buffer("constant", torch.rand(CLASSES, HIDDEN) + 0.5)
        self.compute = compute

    @property
    def merged(self) -> Tensor:
        """W + B A."""
        return self.weight + 0.5 * self.up @ self.down

    def features(self, x: Tensor) -> Tensor:
        """What the last layer is given."""
        return self.body(x).tanh()

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return F.linear(self.features(x), self.compute(self), self.bias)


def dora(head: Head) -> Tensor:
    """Direction and size apart; the norm takes no gradient, as its authors have it."""
    return head.size * head.merged / head.merged.norm(dim=1, keepdim=True).detach()


def standardised(head: Head) -> Tensor:
    """Weight standardisation."""
    mean, variance = head.weight.mean(1, keepdim=True), head.weight.var(1, keepdim=True, unbiased=False)
    return (head.weight - mean) / torch.sqrt(variance + 1e-5)


def rounded(head: Head) -> Tensor:
    """Quantised, with the gradient of what was not."""
    return head.weight + ((4 * head.weight).round() / 4 - head.weight).detach()


def written(head: Head) -> Tensor:
    """A class that is left out."""
    weight = head.weight.clone()
    weight[0] = 0
    return weight


def low_rank(head: Head) -> Tensor:
    """The singular values, made equal."""
    left, _, right = torch.linalg.svd(head.merged, full_matrices=False)
    return left @ right


COMPUTED: dict[str, Compute] = {
    "merged-lora": lambda head: head.merged,
    "dora": dora,
    "dora-through-the-norm": lambda head: head.size * F.normalize(head.merged),
    "standardised": standardised,
    "rounded": rounded,
    "written": written,
    "singular-values": low_rank,
    "times-a-buffer": lambda head: head.merged * head.constant,
    "plus-a-buffer": lambda head: head.merged + head.constant,
    "diagonal": lambda head: torch.diag(head.size[:, 0]) @ head.weight,
    "softmax-of-classes": lambda head: head.weight.softmax(0),
    "solved": lambda head: torch.linalg.solve(torch.eye(CLASSES).double() + head.up @ head.up.T, head.weight),
    "all-rows-of-a-table": lambda head: F.embedding(torch.arange(CLASSES), head.weight),
}


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """The usual one."""
    return F.cross_entropy(model(batch["x"]), batch["label"])


def assert_exact(case: Loss) -> None:
    """As one big batch: micro-batch by micro-batch, and cut by a BigStep."""
    batches = case.micro_batches(SPLIT)
    true = big_batches(case, batches, steps=len(SPLIT))
    assert_equal(accumulated(case, batches, steps=len(SPLIT)), true)
    model = case.model()
    BigStep(model, sgd(trained(model)), case.loss, micro_batch_size=3)(join(batches))
    assert distance([p.detach() for p in trained(model)], true.weights) <= TOLERANCE


def refusal(model: nn.Module, loss: Callable[[Any, Batch], Tensor], size: int = 4) -> LossError:
    """What an accumulator says to it."""
    accumulator = Accumulator(model, sgd(trained(model)), steps=2)
    with pytest.raises(LossError) as caught:
        accumulator.backward(loss(model, rows(size, 0)))
    return caught.value


@pytest.mark.parametrize("name", COMPUTED)
def test_a_computed_weight_is_a_weight(name: str) -> None:
    """Whatever it is computed by, of parameters and of what is the model's own."""
    assert_exact(Loss(name, seeded(lambda: Head(COMPUTED[name])), rows, cross_entropy))


@pytest.mark.parametrize("name", ["merged-lora", "dora", "dora-through-the-norm", "singular-values", "plus-a-buffer"])
def test_a_computed_weight_on_a_frozen_one_is_a_weight(name: str) -> None:
    """As adapters are trained: the layer's own is frozen."""
    assert_exact(Loss(name, seeded(lambda: Head(COMPUTED[name], frozen=True)), rows, cross_entropy))


def body_and(change: Callable[[nn.Linear], object], *, square: bool = False) -> Callable[[], nn.Module]:
    """A model whose last layer is changed."""

    def make() -> nn.Module:
        last = nn.Linear(CLASSES if square else HIDDEN, CLASSES)
        change(last)
        return nn.Sequential(nn.Linear(3, last.in_features), nn.Tanh(), last)

    return seeded(make)


PARAMETRIZED: dict[str, Callable[[], nn.Module]] = {
    "orthogonal": body_and(parametrizations.orthogonal),
    "orthogonal-square": body_and(parametrizations.orthogonal, square=True),
    "orthogonal-cayley": body_and(lambda m: parametrizations.orthogonal(m, orthogonal_map="cayley"), square=True),
    "orthogonal-plain": body_and(lambda m: parametrizations.orthogonal(m, use_trivialization=False)),
    "weight-norm": body_and(parametrizations.weight_norm),
    "weight-norm-of-columns": body_and(lambda m: parametrizations.weight_norm(m, dim=1)),
    "spectral-norm-at-rest": lambda: body_and(parametrizations.spectral_norm)().eval(),
    "spectral-norm-of-old-at-rest": lambda: body_and(spectral_norm)().eval(),
}


@pytest.mark.parametrize("name", PARAMETRIZED)
def test_a_parametrized_layer_is_a_layer(name: str) -> None:
    """What torch offers, as the last layer."""
    assert_exact(Loss(name, PARAMETRIZED[name], rows, cross_entropy))


def test_a_parametrized_layer_without_a_body() -> None:
    """Then the batch itself is what the weight is multiplied with, and has no gradient."""

    def make() -> nn.Module:
        return parametrizations.orthogonal(nn.Linear(3, CLASSES))

    assert_exact(Loss("alone", seeded(make), rows, cross_entropy))


def test_a_weight_from_the_left_and_of_a_convolution() -> None:
    """Wherever a computed weight stands."""
    head = seeded(lambda: Head(dora))
    assert_exact(
        Loss(
            "left",
            head,
            rows,
            lambda m, b: F.cross_entropy((torch.linalg.qr(m.merged.T)[0].T @ m.features(b["x"]).T).T, b["label"]),
        )
    )

    class Wide(Head):
        @property
        def merged(self) -> Tensor:
            return torch.linalg.qr(self.weight.T)[0].T

    assert_exact(
        Loss(
            "convolution",
            seeded(lambda: Wide(dora)),
            rows,
            lambda m, b: F.cross_entropy(
                F.conv1d(m.features(b["x"])[..., None], m.merged[..., None])[..., 0], b["label"]
            ),
        )
    )


def test_a_weight_from_the_left_beside_a_mean_of_everything() -> None:
    """Its rows are classes, and must not be taken for the samples."""

    def loss(model: Any, batch: Batch) -> Tensor:
        weight = torch.diag(model.size[:, 0]) @ model.weight
        found: Tensor = (weight @ model.features(batch["x"]).T).square().mean()
        return found

    assert_exact(Loss("left", seeded(lambda: Head(dora)), rows, loss))


@pytest.mark.parametrize("side", ["left", "right"])
def test_below_a_computed_weight_is_the_model(side: str) -> None:
    """As below a layer: what it does there is its own affair, also by a function that nobody knows."""

    def loss(model: Any, batch: Batch) -> Tensor:
        inside, weight = square(model.features(batch["x"])), model.merged.tanh()
        return F.cross_entropy((weight @ inside.T).T if side == "left" else inside @ weight.T, batch["label"])

    assert_exact(Loss(side, seeded(lambda: Head(dora)), rows, loss))


def test_what_is_computed_of_parameters_may_be_added_to_logits() -> None:
    """By an operation of which nothing is known, or by a product: none of it is a sample's."""
    for added in (lambda m: torch.linalg.svd(m.merged)[1], lambda m: m.down[:1].tanh() @ m.weight.T):
        assert_exact(
            Loss(
                "added",
                seeded(lambda: Head(dora)),
                rows,
                lambda m, b, added=added: F.cross_entropy(m(b["x"]) + added(m), b["label"]),  # type: ignore[misc]
            )
        )


def test_what_is_added_to_logits_and_cannot_be_told_is_not_accused() -> None:
    """Of parameters and a tensor without gradient: it may be a constant."""

    def loss(model: Any, batch: Batch) -> Tensor:
        constant = torch.ones(1, HIDDEN, dtype=torch.float64)
        return F.cross_entropy(model(batch["x"]) + (model.down[:1] + constant) @ model.weight.T, batch["label"])

    error = refusal(seeded(lambda: Head(dora))(), loss)
    assert isinstance(error, UnreadableLoss)
    assert "AddBackward" in str(error)


def test_a_spectral_norm_in_training_is_another_weight_in_each_micro_batch() -> None:
    """It really is, so it is refused; not as coupled samples, and with what helps."""
    for change in (parametrizations.spectral_norm, spectral_norm):
        error = refusal(body_and(change)(), cross_entropy)
        assert isinstance(error, UnreadableLoss)
        assert "turns its vectors in each forward" in str(error)
        assert ".eval()" in str(error)
        assert "count=n" in str(error)
        assert "coupled" not in str(error)
    model, twin = body_and(parametrizations.spectral_norm)(), body_and(parametrizations.spectral_norm)()
    batches = [rows(size, seed) for seed, size in enumerate((3, 3))]
    for batch in batches:
        (cross_entropy(model, batch) / 2).backward()
    cross_entropy(twin, join(batches)).backward()
    ours, true = ([p.grad for p in trained(each) if p.grad is not None] for each in (model, twin))
    assert distance(ours, true) > 1e-10  # its vectors are almost settled from the start


BATCH_MADE: dict[str, tuple[Callable[[Any, Batch], Tensor], type[LossError], str]] = {
    "a mean of the batch": (
        lambda m, b: F.linear(m.features(b["x"]), m.merged * m.features(b["x"]).mean(0)),
        CoupledLoss,
        "Mean",
    ),
    "a mean of the batch, solved": (
        lambda m, b: m.features(b["x"]) @ torch.linalg.pinv(m.weight + m.features(b["x"]).mean(0)),
        UnreadableLoss,
        "LinalgPinv",
    ),
    "other samples": (lambda m, b: m.features(b["x"]) @ m.features(b["x2"]).T, CoupledLoss, "matrix product"),
    "a bias of the batch": (
        lambda m, b: F.linear(m.features(b["x"]), m.weight, m.features(b["x"]).mean(0)[:CLASSES]),
        CoupledLoss,
        "Mean",
    ),
    "a dot product with the batch": (
        lambda m, b: F.linear(m.features(b["x"]), m.weight / torch.dot(m.weight[0], m.features(b["x"])[0].detach())),
        UnreadableLoss,
        "DotBackward",
    ),
    "rows by label": (lambda m, b: m.features(b["x"]) @ m.weight[b["label"]].T, UnreadableLoss, "IndexBackward"),
    "rows selected by label": (
        lambda m, b: m.features(b["x"]) @ m.weight.index_select(0, b["label"]).T,
        UnreadableLoss,
        "IndexSelectBackward",
    ),
    "an embedding of labels": (
        lambda m, b: m.features(b["x"]) @ F.embedding(b["label"], m.weight).T,
        UnreadableLoss,
        "EmbeddingBackward",
    ),
    "rows gathered by label": (
        lambda m, b: m.features(b["x"]) @ m.weight.gather(0, b["label"][:, None].expand(-1, HIDDEN)).T,
        UnreadableLoss,
        "GatherBackward",
    ),
    "detached keys beside prototypes": (
        lambda m, b: m.features(b["x"]) @ torch.cat([m.weight, m.features(b["x"]).detach()]).T,
        UnreadableLoss,
        "CatBackward",
    ),
    "a batch that a parameter scales": (
        lambda m, b: m.features(b["x"]) @ (m.size[0] * b["value"] @ m.constant).T,
        UnreadableLoss,
        "MulBackward",
    ),
    "a gram matrix of the batch": (
        lambda m, b: m.features(b["x"]) @ torch.matrix_exp(0.1 * m.features(b["x"]).T @ m.features(b["x"])),
        UnreadableLoss,
        "LinalgMatrixExp",
    ),
}


@pytest.mark.parametrize("size", [2, 4, 7])
@pytest.mark.parametrize("name", BATCH_MADE)
def test_a_weight_that_is_made_of_the_batch_is_refused(name: str, size: int) -> None:
    """With gradient it is coupled; without, it cannot be told, and it is not said to be."""
    logits, kind, found = BATCH_MADE[name]
    error = refusal(
        seeded(lambda: Head(dora))(),
        lambda m, b: F.cross_entropy(logits(m, b), b["label"] % logits(m, b).shape[1]),
        size,
    )
    assert isinstance(error, kind)
    first = str(error).splitlines()[0]
    assert any(word in first for word in found.split("|")), first
    assert ("are coupled" in first) == isinstance(error, CoupledLoss)


@pytest.mark.parametrize("name", [name for name, (_, kind, _) in BATCH_MADE.items() if kind is not CoupledLoss])
def test_what_to_type_is_said(name: str) -> None:
    """In the words of an accumulator, and of a BigStep."""
    logits, _, _ = BATCH_MADE[name]

    def loss(model: Any, batch: Batch) -> Tensor:
        return F.cross_entropy(logits(model, batch), batch["label"] % 2)

    model = seeded(lambda: Head(dora))()
    assert "accumulator.backward(loss, count=n)" in str(refusal(model, loss))
    with pytest.raises(LossError, match=r"return counted\(loss, n\)"):
        BigStep(model, sgd(trained(model)), loss, micro_batch_size=3)(rows(7, 0))


def test_a_table_that_is_the_model_s_own_is_known() -> None:
    """As the error says: registered, an index is no batch's."""

    class Chosen(Head):
        order: Tensor

        def __init__(self) -> None:
            super().__init__(lambda head: head.weight[self.order])
            self.register_buffer("order", torch.tensor([1, 0, 3, 2]))

    assert_exact(Loss("chosen", seeded(Chosen), rows, cross_entropy))


class Centred(nn.Module):
    """A parametrization of one's own."""

    def forward(self, weight: Tensor) -> Tensor:
        """Around the mean of the classes."""
        return weight - weight.mean(0)


def test_a_reading_of_a_computed_weight_is_remembered() -> None:
    """The second micro-batch of one shape is not read anew."""
    model = body_and(lambda m: parametrize.register_parametrization(m, "weight", Centred()))()
    accumulator = Accumulator(model, sgd(trained(model)), steps=2)
    fresh = []
    for seed in range(2):
        accumulator.backward(cross_entropy(model, rows(4, seed)))
        fresh.append(accumulator._admission.reader.fresh)
    assert fresh == [True, False]


def test_a_copy_of_a_buffer_is_looked_at_again() -> None:
    """Batch data in its place: the graph looks the same."""

    class Turned(Head):
        vector: Tensor
        taken: Tensor

        def __init__(self) -> None:
            super().__init__(lambda head: head.weight * (head.weight @ self.taken)[:, None])
            self.register_buffer("vector", torch.rand(HIDDEN))

    model: Any = seeded(Turned)().eval()
    accumulator = Accumulator(model, sgd(trained(model)), steps=3)
    model.taken = model.vector.clone()
    accumulator.backward(cross_entropy(model, rows(4, 0)))
    model.taken = model.features(rows(4, 1)["x"]).mean(0).detach()
    with pytest.raises(UnreadableLoss, match="MvBackward"):
        accumulator.backward(cross_entropy(model, rows(4, 1)))
    accumulator.discard()


def test_a_norm_that_begins_to_move_is_looked_at_again() -> None:
    """A spectral norm that was at rest: the graph looks the same."""
    model = body_and(parametrizations.spectral_norm)().eval()
    accumulator = Accumulator(model, sgd(trained(model)), steps=3)
    accumulator.backward(cross_entropy(model, rows(4, 0)))
    model.train()
    with pytest.raises(UnreadableLoss, match="turns its vectors"):
        accumulator.backward(cross_entropy(model, rows(4, 1)))
    accumulator.discard()
