"""Which parameters of a sharded model each backward has reached: all ranks that scatter together must reach the same.

FSDP puts the gradients of a group that are there one after the other and adds up what comes to lie at the same place.
Where one rank runs another part of the model than the next, of the same size, that is another parameter's.
"""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from bigbatch.distributed.fsdp_internals import held


class Reached:
    """What the backwards of one window have reached, on this rank."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        """Watch the gradients of some parameters, which are shards."""
        self._parameters = parameters
        self.backwards = 0  # until now
        self.partial = 0  # of them have not reached all
        self.digest = 0  # one number of all that were reached, in order

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note which parameters a backward inside reduces gradients of."""
        before = self._gradients()
        yield
        both = zip(before, self._gradients(), strict=True)
        flags = bytes(now is not was or version != then for (was, then), (now, version) in both)
        self.backwards += 1
        self.partial += not all(flags)
        self.digest = zlib.crc32(flags, self.digest)

    def _gradients(self) -> list[tuple[Tensor | None, int]]:
        """Return each gradient, held so that no new one can take its place, and how often something was added."""
        every = [None if p.grad is None else held(p.grad) for p in self._parameters]
        return [(each, 0 if each is None else each._version) for each in every]  # noqa: SLF001 - torch's own counter
