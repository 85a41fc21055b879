"""What to train: the one object that `bigbatch train FILE.py` and its siblings ask a file for."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from bigbatch import setup_checks
from bigbatch.batch.split import balanced
from bigbatch.errors import ConfigurationError


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
        model: what is trained. Put it on its device; `loss_fn` puts the batch there. A layer that is in eval mode
            stays so, such as a frozen BatchNorm; a model that is in eval mode as a whole is put into training mode.
        optimizer: one, or several that step together.
        data: samples, not batches: the same samples are cut into micro-batches here and elsewhere into big ones.
        batch_size: samples behind one optimizer step.
        micro_batch_size: the most samples that go through the model at once; the whole batch where it is not given.
        loss_fn: called as `loss_fn(model, batch)`; `model(**batch).loss` where it is not given. Where it, or the model,
            asks for all samples of the batch (`across`), micro-batches run in lock-step, by a `BigStep`.
        epochs: passes over `data`.
        collate: makes a batch of samples, as `collate_fn` of a DataLoader.
        shuffle: a new order in every epoch; streams come as they are.
        evaluate: called as `evaluate(model)` after each epoch, in eval mode and without gradients; returns numbers
            by name, which are reported.
        clip_norm: as `scheduler` and all below, what `Accumulator` takes under this name.
        scheduler: stepped once per update.
        scaler: unscaled, stepped and updated once per update; `loss_fn` returns the loss unscaled.
        gradient_dtype: what the gradients of bf16 and fp16 parameters are added up in; None: in their own.
        batch_norm: "exact" has BatchNorm in training mode normalise by the big batch: micro-batches run in lock-step,
            by a `BigStep`. "refuse" it, or accept "micro"-batch statistics, which differ.
        counts: a function from a batch to the counts of the loss's terms, for losses with several counts.
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
        setup_checks.model(self.model)
        setup_checks.optimizer(self.optimizer, self.model)
        setup_checks.sizes(self.batch_size, self.micro_batch_size, self.epochs)
        setup_checks.data(self.data, collated=self.collate is not None)
        setup_checks.functions(loss_fn=self.loss_fn, collate=self.collate, evaluate=self.evaluate, counts=self.counts)
        setup_checks.accumulation(
            self.optimizer,
            clip_norm=self.clip_norm,
            scheduler=self.scheduler,
            scaler=self.scaler,
            gradient_dtype=self.gradient_dtype,
            batch_norm=self.batch_norm,
            skip_nonfinite=self.skip_nonfinite,
        )

    @property
    def sizes(self) -> list[int]:
        """Samples of each micro-batch of a whole batch: as few as there can be, of at most two sizes."""
        return balanced(self.batch_size, self.micro_batch_size or self.batch_size)

    @property
    def steps(self) -> int:
        """Micro-batches in one update."""
        return len(self.sizes)

    def micro_batches(self) -> DataLoader[Any]:
        """One pass over the data, cut into micro-batches; the last may be short, none is dropped."""
        data: Any = self.data  # a plain sequence of samples serves as a Dataset
        stream = isinstance(data, IterableDataset)
        sizes = self.sizes
        plain: DataLoader[Any] = DataLoader(
            data, batch_size=sizes[0], shuffle=self.shuffle and not stream, collate_fn=self.collate
        )
        if len(set(sizes)) == 1:
            return plain
        if stream:
            return DataLoader(_Parts(data, sizes), batch_size=None, collate_fn=self.collate or default_collate)
        return DataLoader(data, batch_sampler=_Parts(plain.sampler, sizes), collate_fn=self.collate)

    def loss(self, batch: Any) -> Tensor:
        """The loss of one batch, refused in the words of who wrote it where it is none."""
        if self.loss_fn is not None:
            return setup_checks.loss("loss_fn", self.loss_fn(self.model, batch))
        if not isinstance(batch, Mapping):
            raise ConfigurationError(
                f"Setup without loss_fn computes model(**batch).loss, but a batch of data is a "
                f"{type(batch).__name__}, not a mapping of names to tensors.\n"
                f"Say how a loss is made of it:\n{setup_checks.LOSS_FN}"
            )
        outputs = self.model(**batch)
        if not hasattr(outputs, "loss"):
            raise ConfigurationError(
                f"Setup without loss_fn computes model(**batch).loss, but the model returned a "
                f"{type(outputs).__name__}, which has no .loss.\n"
                f"Say how a loss is made of it:\n{setup_checks.LOSS_FN}"
            )
        return setup_checks.loss("model(**batch).loss", outputs.loss)


class _Parts(IterableDataset[list[Any]]):
    """Things in lists of some sizes, over and over: a batch is as many of them as there are sizes."""

    def __init__(self, things: Iterable[Any], sizes: Sequence[int]) -> None:
        self._things, self._sizes = things, sizes

    def __iter__(self) -> Iterator[list[Any]]:
        source = iter(self._things)
        for size in cycle(self._sizes):
            part = list(islice(source, size))
            if not part:
                return
            yield part
