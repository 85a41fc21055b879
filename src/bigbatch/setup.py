"""What to train: the one object that `bigbatch train FILE.py` and its siblings ask a file for."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset

from bigbatch.errors import ConfigurationError

Optimizers = Optimizer | Sequence[Optimizer]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A model, its loss, its optimizer, its samples and the batch they are to be taken in.

    A file that `bigbatch train` can run has one function that returns it:

        def setup():
            model = nn.Linear(10, 2)
            return Setup(
                model=model,
                loss_fn=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
                optimizer=torch.optim.SGD(model.parameters(), lr=0.4),
                data=TensorDataset(inputs, labels),
                batch_size=64,
                micro_batch_size=16,
            )

    Args:
        model: what is trained. Put it on its device; `loss_fn` puts the batch there.
        optimizer: one, or several that step together.
        data: samples, not batches: the same samples are cut into micro-batches here and elsewhere into big ones.
        batch_size: samples behind one optimizer step.
        micro_batch_size: samples that go through the model at once; the whole batch where it is not given.
        loss_fn: called as `loss_fn(model, batch)`; `model(**batch).loss` where it is not given.
        epochs: passes over `data`.
        clip_norm: the largest norm of the big batch's gradient.
        scheduler: stepped once per update.
        collate: makes a batch of samples, as `collate_fn` of a DataLoader.
        shuffle: a new order in every epoch; streams come as they are.
        evaluate: called as `evaluate(model)` after each epoch, in eval mode and without gradients; returns numbers
            by name, which are reported.
    """

    model: nn.Module
    optimizer: Optimizers
    data: Dataset[Any] | Sequence[Any]
    batch_size: int
    micro_batch_size: int | None = None
    loss_fn: Callable[[Any, Any], Tensor] | None = None
    epochs: int = 1
    clip_norm: float | None = None
    scheduler: LRScheduler | None = None
    collate: Callable[[list[Any]], Any] | None = None
    shuffle: bool = True
    evaluate: Callable[[Any], Mapping[str, float]] | None = None

    def __post_init__(self) -> None:
        _require_count("batch_size", self.batch_size)
        _require_count("epochs", self.epochs)
        if self.micro_batch_size is not None:
            _require_count("micro_batch_size", self.micro_batch_size)
            _require_whole_steps(self.batch_size, self.micro_batch_size)
        _require_samples(self.data)

    @property
    def steps(self) -> int:
        """Micro-batches in one update."""
        return self.batch_size // (self.micro_batch_size or self.batch_size)

    def micro_batches(self) -> DataLoader[Any]:
        """One pass over the data, cut into micro-batches; the last may be short, none is dropped."""
        return DataLoader(
            self.data,  # type: ignore[arg-type]  # a plain sequence of samples serves as a Dataset
            batch_size=self.micro_batch_size or self.batch_size,
            shuffle=self.shuffle and not isinstance(self.data, IterableDataset),
            collate_fn=self.collate,
        )

    def loss(self, batch: Any) -> Tensor:
        """The loss of one batch."""
        if self.loss_fn is not None:
            return self.loss_fn(self.model, batch)
        if not isinstance(batch, Mapping):
            raise ConfigurationError(
                f"Setup without loss_fn computes model(**batch).loss, but a batch of data is a "
                f"{type(batch).__name__}, not a mapping of names to tensors.\n\n"
                "Say how a loss is made of it:\n"
                "    Setup(..., loss_fn=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))"
            )
        loss: Tensor = self.model(**batch).loss
        return loss


def _require_count(name: str, value: object) -> None:
    """Refuse what is not a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"Setup({name}={value!r}): {name} is a positive integer.")


def _require_whole_steps(batch: int, micro: int) -> None:
    """Refuse a batch that no whole number of micro-batches makes up."""
    if micro > batch:
        raise ConfigurationError(
            f"Setup(batch_size={batch}, micro_batch_size={micro}): a micro-batch is a part of the batch.\n\n"
            f"Did you mean batch_size={micro}, micro_batch_size={batch}?"
        )
    if batch % micro:
        nearest = [size for size in (batch - batch % micro, batch - batch % micro + micro) if size]
        raise ConfigurationError(
            f"Setup(batch_size={batch}, micro_batch_size={micro}): {batch} is not a multiple of {micro}.\n\n"
            f"Take batch_size={' or '.join(map(str, nearest))}, or a micro_batch_size that divides {batch}."
        )


def _require_samples(data: object) -> None:
    """Refuse batches where samples are asked for."""
    if isinstance(data, DataLoader):
        raise ConfigurationError(
            "Setup(data=DataLoader(...)): data is samples, which are cut into batches here.\n\n"
            "Pass what the loader was made of:\n"
            "    Setup(data=loader.dataset, collate=loader.collate_fn, ...)"
        )
    if isinstance(data, IterableDataset) or (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        return
    raise ConfigurationError(
        f"Setup(data={type(data).__name__}): data needs len() and [index], as a torch Dataset or a list has, or "
        "to be an IterableDataset.\n\nOf a generator, make a list:\n    Setup(data=list(samples), ...)"
    )
