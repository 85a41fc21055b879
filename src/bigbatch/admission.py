"""What a loss must pass before its gradient is added: no BatchNorm by the micro-batch, terms that can be read."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.optim import Optimizer

from bigbatch import checks
from bigbatch.errors import BatchNormError
from bigbatch.gradients import all_parameters
from bigbatch.reading.frozen import FrozenWeights
from bigbatch.reading.reader import Reader
from bigbatch.reading.samples import Surroundings
from bigbatch.reading.terms import Term

_SCANS = 8  # whole graphs looked through: the first ones that look unlike each other


class Admission:
    """Looks at the losses of some models before they are used."""

    def __init__(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], batch_norm: Literal["refuse", "micro"]
    ) -> None:
        """Know whose parameters and frozen weights are the models' own."""
        self._models = tuple(models)
        self._refuses = batch_norm == "refuse"
        self._batch_norms: list[tuple[str, BatchNorm]] = []
        surroundings = Surroundings(
            own=frozenset(id(p) for p in all_parameters(optimizers)),
            is_weight=FrozenWeights(self._models),
            micro_batch_norm=not self._refuses,
        )
        self._reader = Reader(surroundings)
        self._scans = 0
        self.only_own = True  # gradients go to our optimizers' parameters alone

    def open(self) -> None:
        """Look for BatchNorm layers at the start of a window, and refuse those in training mode."""
        if self._refuses:
            self._batch_norms = checks.batch_norms(self._models)
            checks.batch_norms_rest(self._batch_norms)

    def read(self, loss: object, scaler: GradScaler | None) -> list[Term]:
        """Return the terms of a loss, or raise."""
        checks.loss(loss, scaler)
        assert isinstance(loss, Tensor)  # noqa: S101 - just checked
        terms = self._reader.read(loss)
        if self._reader.fresh and self._scans < _SCANS:
            self._scans += 1
            found = checks.scan(loss)
            self.only_own = self.only_own and not found.reentrant_checkpoint
            if found.batch_norm and self._refuses:
                raise BatchNormError(checks.FOREIGN_BATCH_NORM)
        return terms
