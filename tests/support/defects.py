"""Models, losses and loops with a mistake planted in each, and some without."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
Loss = Callable[[Any, Any], Tensor]
Window = Callable[[Any, list[Any]], Any]
FEATURES, WIDTH, CLASSES = 6, 8, 3


def samples(number: int = 11) -> Batch:
    """Inputs and labels; eleven cut by four leave a short last micro-batch."""
    return torch.randn(number, FEATURES), torch.randint(0, CLASSES, (number,))


def network(*layers: nn.Module) -> nn.Sequential:
    """A small model with some layers in its middle."""
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), *layers, nn.Tanh(), nn.Linear(WIDTH, CLASSES))


# In the model.


class Attending(nn.Module):
    """Attention from each sample to all others of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Mix samples."""
        return x + torch.softmax(self.query(x) @ x.T, -1) @ x


class Applied(nn.Module):
    """A function of all samples, without parameters."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        return self.function(x)


centred = partial(Applied, lambda x: x - x.mean(0))  # a statistic of the batch that no layer of torch's takes
noisy = partial(Applied, lambda x: x + torch.randn_like(x))  # random numbers of no dropout, in training mode and out
drawing = partial(Applied, lambda x: x * random.random())  # noqa: S311 - no secret; of Python's, which no graph shows


def restless() -> nn.Module:
    """Something that no random state can repeat; from the same beginning for each, so that a test is the same again."""
    outside = random.Random(0)  # noqa: S311 - not for secrets
    return Applied(lambda x: x + 1e-3 * outside.random())


class Fading(nn.Module):
    """A buffer that is written in forward, and read in the next one."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """Scale by less each time."""
        found = x * self.scale
        self.scale = self.scale * 0.5
        return found


class WithAux(nn.Module):
    """Two heads on one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(FEATURES, WIDTH)
        self.head, self.aux = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the classes, and what the second head reads."""
        hidden = self.trunk(x).tanh()
        return self.head(hidden), hidden


# In the loss.


def mean(model: Any, batch: Batch) -> Tensor:
    """A mean over samples: nothing is wrong with it."""
    return F.cross_entropy(model(batch[0]), batch[1])


def masked(model: Any, batch: Batch) -> Tensor:
    """A mean over the samples of class 1 and above, as people write it: the graph cannot tell its count."""
    mask = (batch[1] > 0).to(batch[0].dtype)
    return (F.cross_entropy(model(batch[0]), batch[1], reduction="none") * mask).sum() / mask.sum()


def root(model: Any, batch: Batch) -> Tensor:
    """The root of a mean."""
    return model(batch[0]).square().mean().sqrt()


def contrastive(model: Any, batch: Batch) -> Tensor:
    """Each sample against all others of its batch."""
    found = F.normalize(model(batch[0]), dim=-1)
    return F.cross_entropy(5 * found @ found.T, torch.arange(len(found)))


def penalty(model: Any) -> Tensor:
    """A term of parameters alone."""
    return 0.1 * torch.stack([p.square().sum() for p in model.parameters()]).sum()


def with_penalty(model: Any, batch: Batch) -> Tensor:
    """A mean, and a regulariser."""
    return mean(model, batch) + penalty(model)


def sum_with_penalty(model: Any, batch: Batch) -> Tensor:
    """A sum, and a regulariser."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum") + penalty(model)


def sometimes(model: Any, batch: Batch) -> Tensor:
    """A second term where there is something for it in the batch."""
    logits, hidden = model(batch[0])
    chosen = batch[0][:, 0] > 0.4
    loss = F.cross_entropy(logits, batch[1])
    return loss + model.aux(hidden[chosen]).square().mean() if chosen.any() else loss


def two_counts(model: Any, batch: Batch) -> Tensor:
    """Two terms, averaged over different things."""
    logits, hidden = model(batch[0])
    mask = (batch[1] > 0).to(batch[0].dtype)
    return F.cross_entropy(logits, batch[1]) + (model.aux(hidden).squeeze(-1) * mask).sum() / mask.sum()


# In the loop.


Step = Callable[[Any, torch.optim.Optimizer], object]


def by_samples(
    loss: Loss = mean,
    *,
    weigh: Callable[[int, int, int], float] = lambda size, total, number: size / total,  # noqa: ARG005
    chosen: slice = slice(None),
    before: Step = lambda model, optimizer: None,  # noqa: ARG005
    after: Step = lambda model, optimizer: None,  # noqa: ARG005
    end: Step = lambda model, optimizer: None,  # noqa: ARG005
) -> Window:
    """Weigh by samples, which is right for a mean over samples; or go wrong in one of these ways.

    Args:
        loss: of the model and a micro-batch.
        weigh: the weight of a micro-batch, from its samples, those of the window and the number of micro-batches.
        chosen: the micro-batches that are trained.
        before: called before each backward.
        after: called after each backward.
        end: called at the end.
    """

    def train_window(model: Any, micro_batches: list[Batch]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        total, number = sum(len(labels) for _, labels in micro_batches), len(micro_batches)
        for batch in micro_batches[chosen]:
            before(model, optimizer)
            (loss(model, batch) * weigh(len(batch[1]), total, number)).backward()
            after(model, optimizer)
        end(model, optimizer)

    return train_window


def step(_: Any, optimizer: torch.optim.Optimizer) -> None:
    """Make a step."""
    optimizer.step()


def step_and_clear(_: Any, optimizer: torch.optim.Optimizer) -> None:
    """Make a step, and clear gradients."""
    optimizer.step()
    optimizer.zero_grad()


def clip(model: Any, _: torch.optim.Optimizer) -> None:
    """Clip the norm."""
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


textbook = partial(by_samples, weigh=lambda _size, _total, number: 1 / number)
undivided = partial(by_samples, weigh=lambda _size, _total, _number: 1.0)
divided_twice = partial(by_samples, weigh=lambda _size, _total, number: 1 / number**2)
without_last = partial(by_samples, chosen=slice(-1))
zeroing = partial(by_samples, before=lambda _, optimizer: optimizer.zero_grad(), end=step)
stepping = partial(by_samples, after=step_and_clear)
clipping = partial(by_samples, after=clip)


def penalty_each_time(model: Any, micro_batches: list[Batch]) -> None:
    """Weigh the data right, and add the regulariser for every micro-batch."""
    total = sum(len(labels) for _, labels in micro_batches)
    for batch in micro_batches:
        (mean(model, batch) * len(batch[1]) / total + penalty(model)).backward()
