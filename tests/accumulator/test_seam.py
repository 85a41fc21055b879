"""Loops that keep their own backward and step: `weigh` and `settle` give them the big batch's gradient."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bigbatch import Accumulator
from bigbatch.errors import BatchNormError, LossError, WindowError
from tests.support.messages import approve
from tests.support.ranks import run_on_ranks
from tests.support.reference import distance, weights

Batch = tuple[Tensor, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]
CLASSES = 4
WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.5], dtype=torch.float64)


def model(*, norm: bool = False) -> nn.Module:
    """Return the same small model every time."""
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(6) if norm else nn.Tanh()
    return nn.Sequential(nn.Linear(5, 6), middle, nn.Linear(6, CLASSES)).double()


def micro_batch(size: int, seed: int) -> Batch:
    """Return inputs and labels, some of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (size,), generator=generator)
    labels[torch.rand(size, generator=generator) < 0.3] = -100
    return torch.randn(size, 5, generator=generator, dtype=torch.float64), labels


def plain(net: nn.Module, batch: Batch) -> Tensor:
    """Return a mean over samples."""
    return net(batch[0]).logsumexp(1).mean()


def class_weights(net: nn.Module, batch: Batch) -> Tensor:
    """Return a mean over weights of classes."""
    return F.cross_entropy(net(batch[0]), batch[1].clamp(min=0), weight=WEIGHTS)


def masked(net: nn.Module, batch: Batch) -> Tensor:
    """Return a mean over the targets that are not ignored."""
    return F.cross_entropy(net(batch[0]), batch[1])


def two_terms(net: nn.Module, batch: Batch) -> Tensor:
    """Return means over samples and over elements: in one ratio."""
    found = net(batch[0])
    return F.cross_entropy(found, batch[1].clamp(min=0)) + 0.1 * F.mse_loss(found, torch.zeros_like(found))


def contrastive(net: nn.Module, batch: Batch) -> Tensor:
    """Return a loss of pairs."""
    found = F.normalize(net(batch[0]), dim=1)
    return F.cross_entropy(found @ found.T, torch.arange(len(found)))


def rmse(net: nn.Module, batch: Batch) -> Tensor:
    """Return what is not linear in a mean."""
    return net(batch[0]).pow(2).mean().sqrt()


EVEN, SHORT_BATCH = [4] * 8, [4] * 7 + [2]
EXACT: dict[str, tuple[Loss, list[int]]] = {
    "short last window": (plain, [4] * 6),
    "class weights": (class_weights, EVEN),
    "masked tokens": (masked, SHORT_BATCH),
    "two loss terms": (two_terms, SHORT_BATCH),
}


def train(
    net: nn.Module, loss: Loss, windows: Sequence[Sequence[Batch]], *, divided: float = 1.0, **options: Any
) -> Any:
    """Run a loop of one's own; returns its losses and weights."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    accumulator = Accumulator(net, optimizer, steps=4, **options)
    losses = []
    for window in windows:
        for batch in window:
            (accumulator.weigh(loss(net, batch), times=divided) / divided).backward()
        update = accumulator.settle()
        assert update is not None
        losses.append(float(update.loss))
        optimizer.step()
        optimizer.zero_grad()
    return losses, [p.detach().clone() for p in net.parameters()]


def truth(loss: Loss, windows: Sequence[Sequence[Batch]]) -> Any:
    """Train with the big batches."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for window in windows:
        value = loss(net, (torch.cat([x for x, _ in window]), torch.cat([y for _, y in window])))
        losses.append(float(value.detach()))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    return losses, [p.detach() for p in net.parameters()]


def windows_of(sizes: Sequence[int]) -> list[list[Batch]]:
    """Return windows of four micro-batches; the last may have fewer."""
    every = [micro_batch(size, seed) for seed, size in enumerate(sizes)]
    return [every[first : first + 4] for first in range(0, len(every), 4)]


def right(found: Any, true: Any) -> None:
    """Losses and weights are those of the big batches."""
    assert found[0] == pytest.approx(true[0], rel=1e-12)
    assert distance(found[1], true[1]) <= 1e-12


@pytest.mark.parametrize("divided", [1.0, 4.0])
@pytest.mark.parametrize("case", EXACT)
def test_a_loop_with_its_own_backward_is_exact(case: str, divided: float) -> None:
    """Also where a framework divides the loss before its backward."""
    loss, sizes = EXACT[case]
    windows = windows_of(sizes)
    right(train(model(), loss, windows, divided=divided), truth(loss, windows))


def on_ranks(rank: int, kind: str) -> dict[str, Any]:
    """Take every other micro-batch of each window, in all cases; or have three refused."""
    found: dict[str, Any] = {}
    for name, (loss, sizes) in EXACT.items():
        options: dict[str, Any] = {} if kind == "ddp" else {"group": dist.group.WORLD}
        net = DistributedDataParallel(model()) if kind == "ddp" else model()
        found[name] = train(net, loss, [window[rank::2] for window in windows_of(sizes)], **options)
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["ddp", "group"])
def test_two_ranks_are_exact(kind: str) -> None:
    """Gradients are added up where the window is settled."""
    for found in run_on_ranks(2, on_ranks, kind):
        if isinstance(found, BaseException):
            raise found
        for name, (loss, sizes) in EXACT.items():
            right(found[name], truth(loss, windows_of(sizes)))


@pytest.mark.parametrize(
    ("loss", "norm", "kind"),
    [(plain, True, BatchNormError), (contrastive, False, LossError), (rmse, False, LossError)],
    ids=["batch norm", "contrastive", "rmse"],
)
def test_what_couples_samples_is_refused(loss: Loss, norm: bool, kind: type[Exception]) -> None:
    """As in `backward`; and the parameters have no gradients of it."""
    net = model(norm=norm)
    accumulator = Accumulator(net, torch.optim.SGD(net.parameters(), lr=0.1), steps=2)
    with pytest.raises(kind):
        accumulator.weigh(loss(net, micro_batch(4, 0)))
    assert all(p.grad is None for p in net.parameters())
    assert accumulator.settle() is None


def test_a_scaler_scales_what_was_weighed() -> None:
    """Whoever has one multiplies the loss with it, and divides by it after `settle`."""
    net, windows = model().float(), windows_of(SHORT_BATCH)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    accumulator = Accumulator(net, optimizer, steps=4)
    for x, y in windows[1]:
        scaler.scale(accumulator.weigh(masked(net, (x.float(), y)))).backward()
    accumulator.settle()
    scaler.unscale_(optimizer)
    found = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    whole = torch.cat([x for x, _ in windows[1]]).float(), torch.cat([y for _, y in windows[1]])
    true = torch.autograd.grad(masked(net, whole), list(net.parameters()))
    assert distance(found, list(true)) <= 1e-5


def test_a_micro_batch_without_targets_adds_nothing() -> None:
    """Nor does a window of such; there is nothing to step with."""
    x, y = micro_batch(4, 0)
    nothing, windows = (x, torch.full_like(y, -100)), windows_of(EVEN)
    right(train(model(), masked, [[nothing, *windows[0]]]), truth(masked, windows[:1]))
    net = model()
    accumulator = Accumulator(net, torch.optim.SGD(net.parameters(), lr=0.1), steps=4)
    accumulator.weigh(masked(net, nothing)).backward()
    update = accumulator.settle()
    assert update is not None
    assert update.skipped
    assert all(p.grad is None for p in net.parameters())


class Started:
    """A window with one micro-batch."""

    def __init__(self, *, by_backward: bool = False) -> None:
        self.net = model()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.accumulator = Accumulator(self.net, self.optimizer, steps=2)
        if by_backward:
            self.accumulator.backward(self.loss(0))
        else:
            self.accumulator.weigh(self.loss(0)).backward()

    def loss(self, seed: int) -> Tensor:
        """Return another loss."""
        return masked(self.net, micro_batch(4, seed))


WRONG: dict[str, Callable[[Started], object]] = {
    "no backward after weigh": lambda s: [s.accumulator.weigh(s.loss(seed)) for seed in (1, 2)],
    "no backward before settle": lambda s: (s.accumulator.weigh(s.loss(1)), s.accumulator.settle()),
    "step before settle": lambda s: s.optimizer.step(),
    "flush after weigh": lambda s: s.accumulator.flush(),
    "backward after weigh": lambda s: s.accumulator.backward(s.loss(1)),
    "weigh after backward": lambda s: s.accumulator.weigh(s.loss(1)),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_window_of_weigh_is_not_is_refused(name: str) -> None:
    """A share would be missing, a step be made with the provisional sum, or the window be of two kinds."""
    started = Started(by_backward=name == "weigh after backward")
    with pytest.raises(WindowError) as raised:
        WRONG[name](started)
    approve("window", name, raised.value)
    started.accumulator.discard()


def test_a_step_may_run_the_last_backward_in_its_closure() -> None:
    """As Lightning does."""
    started = Started()

    def closure() -> float:
        loss = started.loss(1)
        started.accumulator.weigh(loss).backward()
        started.accumulator.settle()
        return float(loss.detach())

    started.optimizer.step(closure)
    started.optimizer.zero_grad()
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    (x, y), (u, v) = micro_batch(4, 0), micro_batch(4, 1)
    masked(net, (torch.cat([x, u]), torch.cat([y, v]))).backward()
    optimizer.step()
    assert distance(weights(started.net), weights(net)) <= 1e-12


def test_hooks_see_the_big_batch_before_it_is_handed_over() -> None:
    """And may change it."""
    started = Started()
    seen: list[Tensor] = []
    started.accumulator.before_step(lambda: seen.extend(p.grad for p in started.net.parameters() if p.grad is not None))
    started.accumulator.settle()
    assert [id(each) for each in seen] == [id(p.grad) for p in started.net.parameters()]
