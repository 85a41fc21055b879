"""What is kept alive: no graph beyond its backward, no batch beyond its turn, nothing that grows with the windows."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import counted
from tests.support.samples import Batch, rows
from tests.support.training import MASKED, Training, micro_batches


class Watched(Training):
    """A training, and weak references to what its model computed."""

    def __init__(self) -> None:
        super().__init__(steps=3, clip_norm=1.0)
        self.refs: list[weakref.ref[Tensor]] = []
        self.model.register_forward_hook(lambda _, __, output: self.refs.append(weakref.ref(output)))

    def alive(self) -> int:
        """How many of the outputs are still there."""
        return sum(ref() is not None for ref in self.refs)


LOSSES: dict[str, Callable[[nn.Module, Batch], Tensor]] = {
    "masked": MASKED.loss,
    "sum+regulariser": lambda m, b: m(b["x"]).pow(2).sum() + sum(p.norm() for p in m.parameters()),
    "counted": lambda m, b: counted(m(b["x"]).pow(2).sum() / 7, len(b["x"])),
    "stacked": lambda m, b: torch.stack([m(b["x"]).pow(2).mean(), m(b["x"]).abs().mean()]).mean(),
    "bf16": lambda m, b: F.cross_entropy(m(b["x"]), b["label"]).bfloat16(),
}


@pytest.fixture(autouse=True)
def without_cycles() -> Iterator[None]:
    """What is freed must be freed by itself: a graph that waits for the collector holds memory."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("name", LOSSES)
def test_no_graph_outlives_its_backward_and_no_batch_its_turn(name: str) -> None:
    """In mid-window and after the update; `over` holds the batch it looked ahead to, and none of those it gave out."""
    watched = Watched()
    losses, batches = list[weakref.ref[Tensor]](), list[weakref.ref[Tensor]]()

    def loader() -> Iterator[Batch]:
        for seed, size in enumerate((3, 1, 4, 2, 5)):
            batch = rows(size, seed)
            batches.append(weakref.ref(batch["x"]))
            yield batch
            del batch

    for batch in watched.accumulator.over(loader()):
        loss = LOSSES[name](watched.model, batch)
        losses.append(weakref.ref(loss))
        watched.accumulator.backward(loss)
        del loss
        assert not any(ref() is not None for ref in losses)
        assert watched.alive() == 0
        assert sum(ref() is not None for ref in batches) <= 2
    del batch
    assert len(losses) == 5
    assert not any(ref() is not None for ref in batches)


@pytest.mark.parametrize("fails", [False, True])
def test_no_graph_outlives_a_window_that_ends_otherwise(fails: bool) -> None:
    """With a refused loss, or dropped after a failure, which is kept until then; it is let go of once its error is."""
    watched = Watched()

    def end(out: Tensor) -> None:
        if fails:
            out.register_hook(lambda _: 1 // 0)
        with pytest.raises((ValueError, ZeroDivisionError), match=r"by zero|does not add up"):
            watched.accumulator.backward(out.pow(2).mean() if fails else out.pow(2).mean().sqrt())
        watched.accumulator.discard()

    end(watched.model(rows(3, 0)["x"]))
    gc.collect()  # an exception and its traceback are a cycle of Python's own
    assert watched.alive() == 0


def tensors() -> int:
    """How many tensors there are."""
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


@pytest.mark.parametrize("ragged", [False, True], ids=["even", "ragged"])
def test_nothing_grows_with_the_windows(ragged: bool) -> None:
    """Also of losses whose shape is never the same: as many tensors as after ten windows; then all is let go of."""
    training = Training(steps=2, clip_norm=1.0)
    batches = micro_batches(tuple(range(1, 41)) if ragged else (2,) * 40)
    training.train(batches[:20])
    before = tensors()
    for _ in range(4):
        training.train(batches)
    assert tensors() <= before
    gone: list[weakref.ref[Any]] = [weakref.ref(training.accumulator), weakref.ref(training.model)]
    del training
    assert [ref() for ref in gone] == [None, None]
