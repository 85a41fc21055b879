"""What is kept alive: no graph beyond its backward, no batch beyond its turn, nothing that grows with the windows."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import Accumulator, counted
from tests.support.reference import sgd, trained
from tests.support.samples import Batch, mlp, rows
from tests.support.training import MASKED, Training, micro_batches


class Watched:
    """A model that keeps weak references to what it computed."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.refs: list[weakref.ref[Tensor]] = []
        model.register_forward_hook(self._watch)

    def _watch(self, _module: nn.Module, _inputs: Any, output: Tensor) -> None:
        self.refs.append(weakref.ref(output))

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
def test_no_graph_outlives_its_backward(name: str) -> None:
    """In mid-window and after the update, losses and activations of earlier micro-batches are gone."""
    model = mlp()()
    watched = Watched(model)
    accumulator = Accumulator(model, sgd(trained(model)), steps=3, clip_norm=1.0)
    losses: list[weakref.ref[Tensor]] = []
    for batch in accumulator.over(rows(size, seed) for seed, size in enumerate((3, 1, 4, 2, 5))):
        loss = LOSSES[name](model, batch)
        losses.append(weakref.ref(loss))
        accumulator.backward(loss)
        del loss
        assert not any(ref() is not None for ref in losses)
        assert watched.alive() == 0
    assert len(losses) == 5


def test_no_graph_outlives_a_refusal() -> None:
    """A loss that could not be read is let go of once its error is."""
    model = mlp()()
    watched = Watched(model)
    accumulator = Accumulator(model, sgd(trained(model)), steps=2)

    def refused(batch: Batch) -> None:
        with pytest.raises(ValueError, match="does not add up"):
            accumulator.backward(model(batch["x"]).pow(2).mean().sqrt())

    refused(rows(3, 0))
    refused(rows(2, 1))
    gc.collect()  # an exception and its traceback are a cycle of Python's own
    assert watched.alive() == 0


def test_no_graph_outlives_a_dropped_window() -> None:
    """A backward that failed is kept as the cause of the window's end, until that is dropped."""
    model = mlp()()
    watched = Watched(model)
    accumulator = Accumulator(model, sgd(trained(model)), steps=2)

    def fail(_gradient: Tensor) -> None:
        raise MemoryError

    out = model(rows(3, 0)["x"])
    out.register_hook(fail)
    with pytest.raises(MemoryError):
        accumulator.backward(out.pow(2).mean())
    del out
    accumulator.discard()
    gc.collect()
    assert watched.alive() == 0


def test_batches_are_let_go_of() -> None:
    """`over` holds the batch it looked ahead to, and none of those it gave out."""
    refs: list[weakref.ref[Tensor]] = []

    def loader() -> Iterator[Tensor]:
        for _ in range(5):
            batch = torch.randn(2, 3, dtype=torch.float64)
            refs.append(weakref.ref(batch))
            yield batch
            del batch

    model = mlp()()
    accumulator = Accumulator(model, sgd(trained(model)), steps=2)
    most = 0
    for batch in accumulator.over(loader()):
        accumulator.backward(model(batch).pow(2).mean())
        most = max(most, sum(ref() is not None for ref in refs))
    del batch
    assert most == 2
    assert sum(ref() is not None for ref in refs) == 0


def tensors() -> int:
    """How many tensors there are."""
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


@pytest.mark.parametrize("ragged", [False, True], ids=["even", "ragged"])
def test_nothing_grows_with_the_windows(ragged: bool) -> None:
    """200 windows, also of losses whose shape is never the same: as many tensors as after ten."""
    training = Training(steps=2, clip_norm=1.0)
    batches = micro_batches(tuple(range(1, 41)) if ragged else (2,) * 40)
    training.train(batches[:20])
    before = tensors()
    for _ in range(10):
        training.train(batches)
    assert tensors() <= before


def test_an_accumulator_is_let_go_of_at_once() -> None:
    """Model and optimizer state are too large to wait for the garbage collector."""
    training = Training(steps=2)
    training.train(micro_batches())
    gone: list[weakref.ref[Any]] = [weakref.ref(training.accumulator), weakref.ref(training.model)]
    del training
    assert [ref() for ref in gone] == [None, None]
