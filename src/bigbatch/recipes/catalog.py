"""The recipes that have a name."""

import torch
from torch import Tensor

from bigbatch.recipes.recipe import Recipe


def _sums_above_zero(inputs: Tensor, _: torch.Generator) -> Tensor:
    """Class 1 where the features sum above 0."""
    return (inputs.sum(dim=1) > 0).long()


def _of_a_random_teacher(inputs: Tensor, generator: torch.Generator) -> Tensor:
    """The largest output of a random linear map: classes that a linear model can learn."""
    classes = 10
    teacher = torch.randn(inputs.shape[1], classes, generator=generator, dtype=inputs.dtype)
    return (inputs @ teacher).argmax(dim=1)


TEXTBOOK = Recipe(
    name="textbook",
    origin="The experiment of the teaching pages on gradient accumulation in PyTorch",
    title="1,000 samples of 10 features, label = whether they sum above 0; Linear(10, 2), SGD 0.1",
    features=10,
    classes=2,
    labels=_sums_above_zero,
    make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    micro_batch=16,
    steps=4,
    claim="about 70 % validation accuracy before accumulating and 78 % after, and faster training",
)

ADAMW = Recipe(
    name="adamw",
    origin="The second example of the teaching pages on gradient accumulation in PyTorch",
    title="1,000 samples of 100 features, 10 classes of a random linear teacher; Linear(100, 10), AdamW 0.001",
    features=100,
    classes=10,
    labels=_of_a_random_teacher,
    make_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    micro_batch=32,
    steps=4,
    clip_norm=1.0,
)

RECIPES = {recipe.name: recipe for recipe in (TEXTBOOK, ADAMW)}
