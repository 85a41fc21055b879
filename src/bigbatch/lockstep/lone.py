"""One micro-batch alone that is meant to run beside others, for whoever wants to know what it takes."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from bigbatch.lockstep.batch_norm import batch_norm_met, norms_of
from bigbatch.lockstep.thread_state import Carried
from bigbatch.lockstep.threads import Crew


class Lone:
    """Runs one micro-batch after the other, each as if the others were there."""

    def __init__(
        self, models: Sequence[nn.Module], device: torch.device, crew: Crew | None = None, *, norms_meet: bool = True
    ) -> None:
        """Use the threads of a crew, or one of its own. Without `norms_meet` BatchNorm is left as it is."""
        self._models, self._device, self._crew = models, device, crew or Crew()
        self._norms_meet = norms_meet

    def run(self, task: Callable[[], object], size: int) -> None:
        """Run a task on a micro-batch of `size` samples. BatchNorm takes a single one, as it would beside others."""
        norms = norms_of(self._models) if self._norms_meet else None
        notes: dict[str, Any] = {"sizes": (size,), "rehearsing": True, "seen once": set[str](), "norms": norms}
        with batch_norm_met():
            self._crew.run([task], Carried.here(self._device), notes)
