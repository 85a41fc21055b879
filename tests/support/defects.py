"""Models, losses and loops with a mistake planted in each, and some without."""

import random
from collections.abc import Callable
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


class Centred(nn.Module):
    """A statistic of the batch that no layer of torch's takes."""

    def forward(self, x: Tensor) -> Tensor:
        """Subtract the mean of all samples."""
        return x - x.mean(0)


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


class Counting(nn.Module):
    """A number kept beside the buffers, that grows with every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Scale by the number of calls."""
        self.calls += 1
        return x * self.calls


class Noisy(nn.Module):
    """Random numbers that are no dropout, in training mode and out of it."""

    def forward(self, x: Tensor) -> Tensor:
        """Add noise."""
        return x + torch.randn_like(x)


_OUTSIDE = random.Random(0)  # noqa: S311 - not for secrets; nobody knows of it, and so nobody puts it back


class Restless(nn.Module):
    """Something that no random state can repeat; from the same beginning for each, so that a test is the same again."""

    def __init__(self) -> None:
        super().__init__()
        _OUTSIDE.seed(0)

    def forward(self, x: Tensor) -> Tensor:
        """Add a little from outside."""
        return x + 1e-3 * _OUTSIDE.random()


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


def by_samples(loss: Loss) -> Window:
    """Weigh by samples: right for a mean over samples."""

    def train_window(model: Any, micro_batches: list[Batch]) -> None:
        total = sum(len(labels) for _, labels in micro_batches)
        for batch in micro_batches:
            (loss(model, batch) * len(batch[1]) / total).backward()

    return train_window


def scaled(loss: Loss, factor: Callable[[int], float]) -> Window:
    """Weigh all alike: by 1/n as the textbooks do, by 1, by 1/n twice."""

    def train_window(model: Any, micro_batches: list[Batch]) -> None:
        for batch in micro_batches:
            (loss(model, batch) * factor(len(micro_batches))).backward()

    return train_window


def textbook(loss: Loss) -> Window:
    """Divide by the number of micro-batches."""
    return scaled(loss, lambda number: 1 / number)


def undivided(loss: Loss) -> Window:
    """Forget to."""
    return scaled(loss, lambda _: 1.0)


def divided_twice(loss: Loss) -> Window:
    """Do it once too often."""
    return scaled(loss, lambda number: 1 / number**2)


def without_last(loss: Loss) -> Window:
    """Leave the last micro-batch out."""

    def train_window(model: Any, micro_batches: list[Batch]) -> None:
        total = sum(len(labels) for _, labels in micro_batches)
        for batch in micro_batches[:-1]:
            (loss(model, batch) * len(batch[1]) / total).backward()

    return train_window


def zeroing(loss: Loss) -> Window:
    """Clear the gradients before each backward."""

    def train_window(model: Any, micro_batches: list[Batch]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        total = sum(len(labels) for _, labels in micro_batches)
        for batch in micro_batches:
            optimizer.zero_grad()
            (loss(model, batch) * len(batch[1]) / total).backward()
        optimizer.step()

    return train_window


def stepping(loss: Loss) -> Window:
    """Step after each backward."""

    def train_window(model: Any, micro_batches: list[Batch]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        total = sum(len(labels) for _, labels in micro_batches)
        for batch in micro_batches:
            (loss(model, batch) * len(batch[1]) / total).backward()
            optimizer.step()
            optimizer.zero_grad()

    return train_window


def clipping(loss: Loss) -> Window:
    """Clip after each backward."""

    def train_window(model: Any, micro_batches: list[Batch]) -> None:
        total = sum(len(labels) for _, labels in micro_batches)
        for batch in micro_batches:
            (loss(model, batch) * len(batch[1]) / total).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    return train_window


def penalty_each_time(model: Any, micro_batches: list[Batch]) -> None:
    """Weigh the data right, and add the regulariser for every micro-batch."""
    total = sum(len(labels) for _, labels in micro_batches)
    for batch in micro_batches:
        (mean(model, batch) * len(batch[1]) / total + penalty(model)).backward()
