"""What a loss must pass before its gradient is added: no BatchNorm by the micro-batch, terms that can be read."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.optim import Optimizer

from bigbatch import checks
from bigbatch.errors import BatchNormError
from bigbatch.reading.frozen import FrozenWeights
from bigbatch.reading.reader import Reader
from bigbatch.reading.samples import Surroundings
from bigbatch.reading.terms import Term
from bigbatch.windows.gradients import all_parameters

_SCANS = 8  # whole graphs looked through: the first ones that look unlike each other


class Admission:
    """Looks at the losses of some models before they are used."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        batch_norm: Literal["refuse", "micro"],
        accepting: str,
    ) -> None:
        """Know the models' parameters and frozen weights; `accepting` is what to type to accept micro-batch norms."""
        self._models = tuple(models)
        self._refuses, self._accepting = batch_norm == "refuse", accepting
        self.batch_norms: list[tuple[str, BatchNorm]] = []
        surroundings = Surroundings(
            own=frozenset(id(p) for p in all_parameters(optimizers)),
            is_weight=FrozenWeights(self._models),
            micro_batch_norm=not self._refuses,
        )
        self.reader = Reader(surroundings)
        self._scans = 0
        self.may_wake = False  # a BatchNorm of a model that we do not know rests: only its graph shows if it still does
        self.only_own = True  # gradients go to our optimizers' parameters alone

    def open(self) -> None:
        """Look up the BatchNorm layers, at the start of a window."""
        if self._refuses:
            self.batch_norms = checks.batch_norms(self._models)

    def look(self) -> None:
        """Refuse BatchNorm in training mode, before each micro-batch is used."""
        if self.batch_norms:
            checks.batch_norms_rest(self.batch_norms, self._accepting)

    def read(self, loss: Tensor) -> list[Term]:
        """Return the terms of a loss, or raise a LossError that says what to type."""
        return self.reader.read(loss)

    def scan(self, loss: Tensor) -> None:
        """Look through a whole new graph for what the walk to the model's edge does not meet; some milliseconds."""
        if not self.may_wake and (not self.reader.fresh or self._scans >= _SCANS):
            return
        self._scans += 1
        found = checks.scan(loss)
        if found.reentrant_checkpoint:
            self.only_own = False  # it cannot run a backward with a chosen set of parameters
        if self._refuses:
            if found.batch_norm:
                raise BatchNormError(checks.foreign_batch_norm(self._accepting))
            self.may_wake = self.may_wake or (found.resting and not self.batch_norms)
