"""The ways to accumulate that are put to the proof: this library's own, a plain one, and a loop that others wrote."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from bigbatch.batch.batch import Batch
from bigbatch.big_step import BigStep
from bigbatch.options import Options
from bigbatch.verifying.gradients import Gradients, taken, wide
from bigbatch.verifying.loops import TrainWindow, Watched, watched
from bigbatch.verifying.samples import Samples, cast
from bigbatch.verifying.subject import Standing

LossFunction = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Accumulated:
    """What one window came to."""

    gradients: Gradients
    loss: float = math.nan
    sizes: tuple[int, ...] | None = None  # of the micro-batches, where the way has cut them itself
    watched: Watched | None = None


class Way(Protocol):
    """A way to accumulate."""

    @property
    def name(self) -> str:
        """Return what a verification calls it."""
        ...

    def run(self, standing: Standing, loss: LossFunction, samples: Samples, dtype: torch.dtype | None) -> Accumulated:
        """Accumulate the gradients of all samples."""
        ...


@dataclass(frozen=True)
class OwnWay:
    """`BigStep`, as its user has it; what it refuses it raises."""

    size: int
    options: Options
    name: str = "BigStep"

    @property
    def unchecked(self) -> "OwnWay":
        """The same without the first check, which would refuse experiments, too."""
        return replace(self, options=replace(self.options, check=False))

    def run(self, standing: Standing, loss: LossFunction, samples: Samples, dtype: torch.dtype | None) -> Accumulated:
        """Make one update, with a rate of nothing."""
        found: dict[str, Tensor | None] = {}
        sizes: list[int] = []

        def seen(model: Any, micro_batch: Any) -> Any:
            sizes.append(Batch.of(micro_batch, shared=samples.batch.shared).size)
            return loss(model, micro_batch)

        optimizer = torch.optim.SGD(standing.parameters.values(), lr=0.0)
        options = self.options
        if dtype is not None and options.collate is not None:
            inner = options.collate
            options = replace(options, collate=lambda some: cast(inner(some), dtype))

        def read(*_: object) -> None:
            found.update({name: wide(p.grad) for name, p in standing.parameters.items()})

        optimizer.register_step_pre_hook(read)
        whole = samples.batch.whole if options.collate is not None else samples.in_dtype(dtype)
        with warnings.catch_warnings():
            # What BigStep cannot see is proved here, and one process is enough for that.
            words = "this (loss draws random numbers|process is one of)|the model changes buffers|parameter '.*' has a"
            warnings.filterwarnings("ignore", message=words)
            loss_fn = seen if options.lengths else loss
            step = BigStep(standing.model, optimizer, loss_fn, micro_batch_size=self.size, options=options)
            update = step(whole)
        if not found:  # it was skipped: nothing counted
            found = dict.fromkeys(standing.parameters)
        value = float(update.loss) if update.loss_is_exact else math.nan
        return Accumulated(found, value, tuple(sizes[-update.micro_batches :]) or None)


@dataclass(frozen=True)
class Plain:
    """One backward per micro-batch, each weighed by its samples: what is left where `BigStep` refuses."""

    name: str = "samples"

    def run(self, standing: Standing, loss: LossFunction, samples: Samples, dtype: torch.dtype | None) -> Accumulated:
        """Add up."""
        total = 0.0
        for place, size in enumerate(samples.sizes):
            part = loss(standing.model, samples.micro_batch(place, dtype))
            weight = size / samples.number
            part.backward(torch.full_like(part, weight))
            total += weight * float(part.detach())
        return Accumulated(taken(standing.parameters), total)


@dataclass(frozen=True)
class Loop:
    """A loop that others wrote."""

    train_window: TrainWindow
    clipping: bool = False
    stepping: bool = True
    name: str = "train_window"

    def run(self, standing: Standing, loss: LossFunction, samples: Samples, dtype: torch.dtype | None) -> Accumulated:
        """Run its window, and read what it steps with."""
        del loss  # it has its own
        micro_batches = samples.micro_batches(dtype)
        found = watched(self.train_window, standing, micro_batches, clipping=self.clipping, stepping=self.stepping)
        gradients = found.gradients if self.stepping else found.over_all_steps
        return Accumulated(gradients, found.returned, watched=found)
