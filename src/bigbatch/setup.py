"""What to train: the one object that `bigbatch train FILE.py` and its siblings ask a file for."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset

from bigbatch import arguments
from bigbatch.batch.split import balanced
from bigbatch.default_loss import own_loss
from bigbatch.distributed.discovery import refuse_tensor_parallelism
from bigbatch.errors import BigBatchError, ConfigurationError
from bigbatch.options import checked_loss_fn


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A model, its loss, its optimizer, its samples and the batch they are to be taken in.

    A file that `bigbatch train` can run has one function that returns it:

        def setup():
            model = nn.Linear(10, 2)
            loss_fn = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])
            optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
            data = TensorDataset(inputs, labels)
            sizes = {"batch_size": 64, "micro_batch_size": 16}
            return Setup(model=model, loss_fn=loss_fn, optimizer=optimizer, data=data, **sizes)

    Args:
        model: what is trained. Put it on its device; `loss_fn` puts the batch there. A layer that is in eval mode
            stays so, such as a frozen BatchNorm; a model that is in eval mode as a whole is put into training mode.
        optimizer: one, or several that step together.
        data: samples, not batches: the same samples are cut into micro-batches here and elsewhere into big ones.
        batch_size: samples behind one optimizer step.
        micro_batch_size: the most samples that go through the model at once; the whole batch where it is not given.
        loss_fn: called as `loss_fn(model, batch)`; `model(**batch).loss` where it is not given. It may run more than
            once for the same samples.
        epochs: passes over `data`.
        collate: makes a batch of samples, as `collate_fn` of a DataLoader.
        shuffle: a new order in every epoch; streams come as they are.
        evaluate: called as `evaluate(model)` after each epoch, in eval mode and without gradients; returns numbers
            by name, which are reported.
        clip_norm: as all below, what `Accumulator` takes under this name.
        scheduler: stepped once per update.
        scaler: unscaled, stepped and updated once per update; `loss_fn` returns the loss unscaled.
        gradient_dtype: what the gradients of bf16 and fp16 parameters are added up in; None: in their own.
        batch_norm: "exact" has BatchNorm in training mode normalize by the big batch: micro-batches run in lock-step.
            "refuse" it, or accept "micro"-batch statistics, which differ.
        counts: what an `Accumulator` takes for losses with several counts. It is not needed: `train` counts by itself.
        skip_nonfinite: leave the optimizer alone where the gradient has an inf or NaN.
    """

    model: nn.Module
    optimizer: Optimizer | Sequence[Optimizer]
    data: Dataset[Any] | Sequence[Any]
    batch_size: int
    micro_batch_size: int | None = None
    loss_fn: Callable[[Any, Any], Tensor] | None = None
    epochs: int = 1
    collate: Callable[[list[Any]], Any] | None = None
    shuffle: bool = True
    evaluate: Callable[[Any], Mapping[str, float]] | None = None
    clip_norm: float | None = None
    scheduler: LRScheduler | Sequence[LRScheduler] | None = None
    scaler: GradScaler | None = None
    gradient_dtype: torch.dtype | None = torch.float32
    batch_norm: Literal["exact", "refuse", "micro"] = "exact"
    counts: Callable[[Any], Any] | None = None
    skip_nonfinite: bool = False

    def __post_init__(self) -> None:
        model: object = self.model
        if not isinstance(model, nn.Module):
            raise ConfigurationError("model must be one nn.Module.", found=type(model).__name__)
        refuse_tensor_parallelism([model])
        optimizers = arguments.optimizers(self.optimizer, arguments.models(model))
        arguments.schedulers(self.scheduler, optimizers)
        arguments.positive("batch_size", self.batch_size)
        arguments.positive("epochs", self.epochs)
        size = self.batch_size if self.micro_batch_size is None else self.micro_batch_size
        if arguments.positive("micro_batch_size", size) > self.batch_size:
            found = f"batch_size={self.batch_size}, micro_batch_size={size}"
            raise ConfigurationError("A micro-batch is a part of the batch.", found=found)
        _check_data(self.data)
        checked_loss_fn(self.loss_fn)
        arguments.optional(collate=self.collate, evaluate=self.evaluate, counts=self.counts)
        arguments.optional(clip_norm=self.clip_norm, scaler=self.scaler, gradient_dtype=self.gradient_dtype)
        arguments.one_of("batch_norm", self.batch_norm, "exact", "refuse", "micro")
        arguments.truths(skip_nonfinite=self.skip_nonfinite)

    @property
    def sizes(self) -> list[int]:
        """Samples of each micro-batch of a whole batch: as few as there can be, of at most two sizes."""
        return balanced(self.batch_size, self.micro_batch_size or self.batch_size)

    @property
    def steps(self) -> int:
        """Micro-batches in one update."""
        return len(self.sizes)

    def batches(self, *, collated: bool = True) -> DataLoader[Any]:
        """Return one pass over the data in whole batches or lists of samples; the last may be short, and stays."""
        data: Any = self.data  # a plain sequence of samples serves as a Dataset
        shuffled = self.shuffle and not isinstance(data, IterableDataset)
        return DataLoader(data, self.batch_size, shuffled, collate_fn=self.collate if collated else list)

    def loss(self, batch: Any) -> Any:
        """Return the loss of one batch."""
        return (self.loss_fn or own_loss)(self.model, batch)


class UserCodeError(Exception):
    """A user's own code raised; the cause is its exception, the text says what was being called."""


@contextmanager
def calling(what: str) -> Iterator[None]:
    """Name the call into a user's file that an exception came out of; those of the library say what is wrong."""
    try:
        yield
    except (BigBatchError, UserCodeError):
        raise
    except (Exception, SystemExit) as error:  # a file that calls sys.exit() must not end the command unexplained
        raise UserCodeError(f"{what} failed") from error


def _check_data(data: Any) -> None:
    """Accept samples, one by one, and at least one of them."""
    if isinstance(data, IterableDataset):
        return
    is_sequence = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if isinstance(data, str | bytes | Mapping | DataLoader) or not is_sequence:
        raise ConfigurationError(
            "data must be samples, which a Setup cuts into batches: a torch Dataset or a sequence.",
            found=type(data).__name__,
            fix="data=TensorDataset(inputs, labels), data=list(samples), or data=loader.dataset",
        )
    if not len(data):
        raise ConfigurationError("data has no samples: see the path, filter or split that made it.")
