"""Nine small trainings in float64, each of which asks accumulation one question.

A case holds samples, not batches: its micro-batches are what a plain `DataLoader` makes of them with
`batch_size=micro_batch`, and the true big batches what the same loader makes with `batch_size=micro_batch * steps`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from bigbatch import across

Batch = dict[str, Tensor]
IGNORED = -100
FEATURES, CLASSES, HIDDEN, LENGTH = 8, 4, 16, 32


@dataclass(frozen=True)
class Case:
    """One training run: a model, its samples, the loss, and how the samples are cut."""

    name: str
    model: Callable[[], nn.Module]
    samples: Batch
    loss: Callable[[nn.Module, Batch], Tensor]
    micro_batch: int = 4
    steps: int = 4
    learning_rate: float = 0.5
    counts: Callable[[Batch], tuple[Tensor | int, ...]] | None = None
    coupled: bool = False  # no weights on micro-batches make it exact, so `Accumulator` must refuse it
    meeting: Callable[[nn.Module, Batch], Tensor] | None = None  # the same loss, over all micro-batches

    def fresh_model(self) -> nn.Module:
        """Return the same model for every contestant."""
        torch.manual_seed(1)
        return self.model().double()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """SGD without momentum: a wrong gradient shows at its own size, neither damped nor fed on."""
        return torch.optim.SGD(model.parameters(), lr=self.learning_rate)

    def micro_batches(self) -> "DataLoader[Batch]":
        """What fits in memory."""
        return DataLoader(Samples(self.samples), batch_size=self.micro_batch)

    def big_batches(self) -> "DataLoader[Batch]":
        """What was wanted: each is the concatenation of a window's micro-batches."""
        return DataLoader(Samples(self.samples), batch_size=self.micro_batch * self.steps)


class Samples(Dataset[Batch]):
    """Tensors seen sample by sample, under their names."""

    def __init__(self, tensors: Batch) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, index: int) -> Batch:
        return {name: tensor[index] for name, tensor in self.tensors.items()}


class TwoTowers(nn.Module):
    """A CLIP in miniature: two encoders and a temperature that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(FEATURES, HIDDEN)
        self.right = nn.Linear(FEATURES, HIDDEN)
        self.log_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the two encoders make of their sides, and the temperature."""
        one, other = F.normalize(self.left(left), dim=-1), F.normalize(self.right(right), dim=-1)
        return one, other, self.log_scale.exp()


class Tagger(nn.Module):
    """One label a token, one score a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh())
        self.tags = nn.Linear(HIDDEN, CLASSES)
        self.score = nn.Linear(HIDDEN, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits for every token, and the score of each sequence."""
        hidden = self.body(x)
        return self.tags(hidden), self.score(hidden.mean(dim=1)).squeeze(-1)


def perceptron(outputs: int = CLASSES) -> nn.Module:
    """Return two linear layers."""
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, outputs))


def normalised_perceptron() -> nn.Module:
    """Return the same with a BatchNorm between."""
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Classify."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


def weighted_cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Classify, rare classes counting more: the mean is over the weights that happen to be in the batch."""
    weight = torch.tensor([0.1, 0.5, 2.0, 8.0], dtype=torch.float64)
    return F.cross_entropy(model(batch["x"]), batch["y"], weight=weight)


def masked_cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Tag tokens: the mean is over those that are not padding."""
    tags, _ = model(batch["x"])
    return F.cross_entropy(tags.flatten(0, 1), batch["y"].flatten(), ignore_index=IGNORED)


def tags_and_score(model: nn.Module, batch: Batch) -> Tensor:
    """One mean over tokens and one over sequences: their counts are in no constant ratio."""
    tags, score = model(batch["x"])
    tagging = F.cross_entropy(tags.flatten(0, 1), batch["y"].flatten(), ignore_index=IGNORED)
    return tagging + 0.5 * F.mse_loss(score, batch["score"])


def tags_and_score_counts(batch: Batch) -> tuple[Tensor, int]:
    """What the two means above are over, in the order they are written."""
    return (batch["y"] != IGNORED).sum(), len(batch["score"])


def contrastive(model: nn.Module, batch: Batch) -> Tensor:
    """Find each sample's partner among the whole batch: every other sample is a negative."""
    one, other, scale = model(batch["left"], batch["right"])
    partner = torch.arange(len(one))
    return 0.5 * (F.cross_entropy(scale * one @ other.T, partner) + F.cross_entropy(scale * other @ one.T, partner))


def contrastive_across(model: nn.Module, batch: Batch) -> Tensor:
    """The same, among the samples of all micro-batches."""
    one, other, scale = model(batch["left"], batch["right"])
    partner = across.offset() + torch.arange(len(one))
    left = F.cross_entropy(scale * one @ across.gather(other).T, partner)
    return 0.5 * (left + F.cross_entropy(scale * other @ across.gather(one).T, partner))


def root_mean_square(model: nn.Module, batch: Batch) -> Tensor:
    """Regress: a root over a mean, so that means of micro-batches do not add up."""
    return F.mse_loss(model(batch["x"]).squeeze(-1), batch["score"]).sqrt()


def root_mean_square_across(model: nn.Module, batch: Batch) -> Tensor:
    """The same, of the mean over all micro-batches."""
    return across.once(across.mean(F.mse_loss(model(batch["x"]).squeeze(-1), batch["score"])).sqrt())


def all_cases() -> Iterator[Case]:
    """Yield the rows of the table, in its order."""
    yield Case("equal micro-batches", perceptron, labelled(160), cross_entropy)
    yield Case("short last window", perceptron, labelled(9 * 4), cross_entropy)
    yield Case("short last micro-batch", perceptron, labelled(4 * 16 - 2), cross_entropy)
    yield Case("class weights", perceptron, labelled(160), weighted_cross_entropy)
    yield Case("masked tokens, own model", Tagger, ragged(160), masked_cross_entropy)
    yield Case("two loss terms", Tagger, ragged(160), tags_and_score, counts=tags_and_score_counts)
    yield Case("batch norm", normalised_perceptron, labelled(160), cross_entropy, coupled=True)
    yield Case(
        "contrastive, learned temperature", TwoTowers, pairs(160), contrastive, coupled=True, meeting=contrastive_across
    )
    yield Case(
        "nonlinear in a mean (RMSE)",
        lambda: perceptron(1),
        labelled(160),
        root_mean_square,
        coupled=True,
        meeting=root_mean_square_across,
    )


def labelled(count: int) -> Batch:
    """Samples with a class, common or rare, and a score of heavy tails."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(count, FEATURES, dtype=torch.float64, generator=draw)
    return {"x": x, "y": classes(x, draw), "score": x.sum(dim=1) ** 3 / 20}


def ragged(count: int) -> Batch:
    """Sequences that carry labels up to a random length; most are short, and the long ones differ from them."""
    draw = torch.Generator().manual_seed(0)
    share = torch.rand(count, 1, dtype=torch.float64, generator=draw)
    lengths = LENGTH**share
    x = torch.randn(count, LENGTH, FEATURES, dtype=torch.float64, generator=draw) + 2 * share[..., None]
    y = classes(x, draw).masked_fill(torch.arange(LENGTH) >= lengths, IGNORED)
    return {"x": x, "y": y, "score": x.mean(dim=(1, 2))}


def pairs(count: int) -> Batch:
    """Two noisy views of the same thing."""
    draw = torch.Generator().manual_seed(0)
    left, noise = torch.randn(2, count, FEATURES, dtype=torch.float64, generator=draw)
    return {"left": left, "right": left + 0.5 * noise}


def classes(x: Tensor, draw: torch.Generator) -> Tensor:
    """Labels that can be learned, the first common and the last rare."""
    directions = torch.randn(x.shape[-1], CLASSES, dtype=torch.float64, generator=draw)
    return (x @ directions + torch.arange(CLASSES, 0, -1)).argmax(dim=-1)
