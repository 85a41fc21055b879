"""Loops that keep their own backward and step: `weigh` and `settle` give them the big batch's gradient."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bigbatch import Update
from bigbatch.errors import BatchNormError, LossError, SeveralCounts, WindowError
from tests.support.messages import approve
from tests.support.ranks import run_on_ranks
from tests.support.reference import big_batches, trained, windows
from tests.support.samples import Batch, Loss, mlp, rows, seeded
from tests.support.training import MASKED, PLAIN, Training, micro_batches


def cosines(model: Any, batch: Batch) -> Tensor:
    """A loss of pairs."""
    found = F.normalize(model(batch["x"]), dim=1)
    return F.cross_entropy(found @ found.T, torch.arange(len(found)))


# Ignored targets and class weights; elements; two terms in one ratio.
RATIO = Loss(
    "ratio", mlp(), rows, lambda m, b: F.cross_entropy(m(b["x"]), b["label"]) + 0.1 * F.mse_loss(m(b["x"]), b["value"])
)
EXACT = {"masked": MASKED, "plain": PLAIN, "two terms": RATIO}
NORMED = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
REFUSED: dict[str, tuple[Loss, type[Exception]]] = {
    "batch norm": (Loss("norm", NORMED, rows, PLAIN.loss), BatchNormError),
    "contrastive": (Loss("pairs", mlp(), rows, cosines), LossError),
    "rmse": (Loss("rmse", mlp(), rows, lambda m, b: PLAIN.loss(m, b).sqrt()), LossError),
    "a sum": (Loss("several", mlp(), rows, lambda m, b: PLAIN.loss(m, b) + m(b["x"]).abs().sum()), SeveralCounts),
}


class Weighing(Training):
    """A loop that keeps its own backward and step."""

    def weigh(self, batch: Batch, *, before: float = 1.0, after: float = 1.0) -> None:
        """One micro-batch; somebody divides its loss before it is weighed, or after."""
        loss = self.case.loss(self.model, batch) / before
        (self.accumulator.weigh(loss, times=before * after) / after).backward()

    def settle(self) -> Update:
        """End a window, and step."""
        update = self.accumulator.settle()
        assert update is not None
        self.optimizer.step()
        self.optimizer.zero_grad()
        return update

    def train_windows(self, every: Sequence[Sequence[Batch]], **divided: float) -> list[float]:
        """Return the loss of each window."""
        losses = []
        for window in every:
            for batch in window:
                self.weigh(batch, **divided)
            losses.append(float(self.settle().loss))
        return losses


@pytest.mark.parametrize("divided", [{}, {"before": 4.0}, {"after": 4.0}], ids=["", "before", "after"])
@pytest.mark.parametrize("name", EXACT)
def test_a_loop_with_its_own_backward_is_exact(name: str, divided: dict[str, float]) -> None:
    """Its losses, too; also where a framework divides a loss by the number of micro-batches."""
    training, batches = Weighing(steps=4, case=EXACT[name]), micro_batches(case=EXACT[name])
    losses = training.train_windows(windows(batches, 4), **divided)
    training.assert_big_batches(*windows(batches, 4))
    assert losses == pytest.approx(big_batches(EXACT[name], batches, 4).losses, rel=1e-12)


def on_ranks(rank: int, kind: str) -> None:
    """Take every other micro-batch of each window, in all cases."""
    for case in EXACT.values():
        model, every = case.model(), windows(micro_batches(case=case), 4)
        options: dict[str, Any] = {} if kind == "ddp" else {"group": dist.group.WORLD}
        training = Weighing(4, case=case, model=DistributedDataParallel(model) if kind == "ddp" else model, **options)
        training.train_windows([window[rank::2] for window in every])
        training.assert_big_batches(*every)


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["ddp", "group"])
def test_two_ranks_are_exact(kind: str) -> None:
    """Gradients are added up where the window is settled."""
    assert run_on_ranks(2, on_ranks, kind) == [None, None]


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_add_up_is_refused(name: str) -> None:
    """As in `backward`; and the parameters have no gradients of it."""
    case, kind = REFUSED[name]
    training = Weighing(steps=2, case=case)
    with pytest.raises(kind):
        training.accumulator.weigh(case.loss(training.model, case.batch(4, 0)))
    training.assert_untouched()
    assert training.accumulator.settle() is None


def test_a_scaler_scales_what_was_weighed() -> None:
    """Whoever has one multiplies the loss with it, and divides by it after `settle`."""
    training, scaler, batches = Weighing(steps=4), torch.amp.GradScaler("cpu", init_scale=2.0**10), micro_batches()[:4]
    for batch in batches:
        scaler.scale(training.accumulator.weigh(training.case.loss(training.model, batch))).backward()
    training.accumulator.settle()
    scaler.step(training.optimizer)
    training.assert_big_batches(batches)


def test_a_micro_batch_without_targets_adds_nothing() -> None:
    """Nor does a window of such; there is nothing to step with."""
    training, batches = Weighing(steps=4), micro_batches()
    batches[0]["partly"].fill_(-100)
    training.weigh(batches[0])
    assert training.settle().skipped
    training.assert_untouched()
    training.train_windows([batches[:4]])
    training.assert_big_batches(batches[:4])


def started(*, by_backward: bool = False) -> Weighing:
    """A window with one micro-batch."""
    training = Weighing(steps=2)
    (training.backward if by_backward else training.weigh)(BATCH)
    return training


def loss(training: Weighing) -> Tensor:
    """Return that of another micro-batch."""
    return training.case.loss(training.model, OTHER)


BATCH, OTHER = micro_batches()[:2]
WRONG: dict[str, Callable[[Weighing], object]] = {
    "no backward after weigh": lambda t: [t.accumulator.weigh(loss(t)) for _ in range(2)],
    "no backward before settle": lambda t: (t.accumulator.weigh(loss(t)), t.accumulator.settle()),
    "step before settle": lambda t: t.optimizer.step(),
    "flush after weigh": lambda t: t.accumulator.flush(),
    "backward after weigh": lambda t: t.backward(OTHER),
    "weigh after backward": lambda t: t.accumulator.weigh(loss(t)),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_window_of_weigh_is_not_is_refused(name: str) -> None:
    """A share would be missing, a step be made with the provisional sum, or the window be of two kinds."""
    training = started(by_backward=name == "weigh after backward")
    with pytest.raises(WindowError) as raised:
        WRONG[name](training)
    approve("window", name, raised.value)
    training.accumulator.discard()


def test_a_step_may_run_the_last_backward_in_its_closure() -> None:
    """As Lightning does; hooks see the big batch before it is handed over."""
    training, seen = started(), list[Tensor]()
    training.accumulator.before_step(lambda: seen.extend(p.grad for p in trained(training.model) if p.grad is not None))

    def closure() -> float:
        training.weigh(OTHER)
        training.accumulator.settle()
        assert [id(each) for each in seen] == [id(p.grad) for p in trained(training.model)]
        return 0.0

    training.optimizer.step(closure)
    training.assert_big_batches([BATCH, OTHER])
