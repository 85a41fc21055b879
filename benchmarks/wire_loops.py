"""The loops whose messages are counted, each as its documentation writes it, on a model that DDP has wrapped.

Each function builds what trains and returns a function that makes one update of a list of equal micro-batches.
"""

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from benchmarks.models import perceptron
from benchmarks.silence import silence
from bigbatch import Accumulator, BigStep

Batch = tuple[Tensor, Tensor]
Train = Callable[[list[Batch]], object]
SAMPLES = 4  # in a micro-batch; what crosses the wire does not depend on it
RATE = 0.1


def plain_model() -> nn.Module:
    """Return 0.67 M parameters in float32, the same on every rank."""
    torch.manual_seed(0)
    return perceptron()


def micro_batches(rank: int, steps: int) -> list[Batch]:
    """Return one update's."""
    by = torch.Generator().manual_seed(rank)
    return [
        (torch.randn(SAMPLES, 784, generator=by), torch.randint(10, (SAMPLES,), generator=by)) for _ in range(steps)
    ]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean over a micro-batch."""
    return cross_entropy(model(batch[0]), batch[1])


def every_micro_batch(bare: nn.Module, steps: int) -> Train:
    """DDP as it comes, with accumulation written around it: it reduces in every backward."""
    model = DistributedDataParallel(bare)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def train(batches: list[Batch]) -> None:
        for batch in batches:
            (loss_of(model, batch) / steps).backward()
        optimizer.step()
        optimizer.zero_grad()

    return train


def no_sync(bare: nn.Module, steps: int) -> Train:
    """All but the last micro-batch under no_sync, forward and backward."""
    model = DistributedDataParallel(bare)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def train(batches: list[Batch]) -> None:
        with model.no_sync():
            for batch in batches[:-1]:
                (loss_of(model, batch) / steps).backward()
        (loss_of(model, batches[-1]) / steps).backward()
        optimizer.step()
        optimizer.zero_grad()

    return train


def accelerate(bare: nn.Module, steps: int) -> Train:
    """Hugging Face Accelerate, model and optimizer prepared."""
    from accelerate import Accelerator

    with silence("accelerate"):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
        model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=RATE))

    def train(batches: list[Batch]) -> None:
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()

    return train


def accumulator(bare: nn.Module, steps: int) -> Train:
    """The three lines."""
    model = DistributedDataParallel(bare)
    ours = Accumulator(model, torch.optim.SGD(model.parameters(), lr=RATE), steps=steps)

    def train(batches: list[Batch]) -> None:
        for batch in batches:
            ours.backward(loss_of(model, batch))

    return train


def overlapped(bare: nn.Module, steps: int) -> Train:
    """The same, where DDP reduces in the last backward, beside its computation."""
    model = DistributedDataParallel(bare)
    ours = Accumulator(model, torch.optim.SGD(model.parameters(), lr=RATE), steps=steps, overlap=True)

    def train(batches: list[Batch]) -> None:
        for batch in batches:
            ours.backward(loss_of(model, batch))

    return train


def big_step(bare: nn.Module, steps: int) -> Train:  # noqa: ARG001 - as many as the batch has
    """The two lines, on all micro-batches in one."""
    model = DistributedDataParallel(bare)
    ours = BigStep(model, torch.optim.SGD(model.parameters(), lr=RATE), loss_of, micro_batch_size=SAMPLES)

    def train(batches: list[Batch]) -> None:
        ours((torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])))

    return train


OURS = ("bigbatch Accumulator", "the same, overlap=True", "bigbatch BigStep")


def all_loops() -> dict[str, Callable[[nn.Module, int], Train]]:
    """Every contestant that is installed."""
    hand: dict[str, Callable[[nn.Module, int], Train]] = {
        "DDP, reduced every micro-batch": every_micro_batch,
        "DDP with no_sync": no_sync,
    }
    theirs = {"Accelerate": accelerate} if find_spec("accelerate") else {}
    return {**hand, **theirs, **dict(zip(OURS, (accumulator, overlapped, big_step), strict=True))}
