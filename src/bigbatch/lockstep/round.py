"""What the workers of one window share while they run in lock-step."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from bigbatch.distributed.ranks import Ranks
from bigbatch.execute.graph_record import NotCapturable
from bigbatch.lockstep.offload_store import Offload
from bigbatch.state.rng import Streams

Norms = dict[int, tuple[str, nn.Module]]  # a layer and its name, by the id of its running mean or its weight
_MOST = 512  # constants


class Constants:
    """Small tensors that the sizes of a window give: made on a device once, and kept for the windows to come.

    A captured window reads them where they are, so it holds on to them.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], Tensor] = {}

    def get(self, key: tuple[object, ...], device: torch.device, make: Callable[[], Tensor]) -> Tensor:
        """Return a tensor that was made before, or make it; `key` names its numbers."""
        place = (*key, device)
        if place not in self._made:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                # It would be filled by the replays of one graph alone.
                raise NotCapturable("its micro-batches met with other numbers of values than in the window before")
            while len(self._made) >= _MOST:
                self._made.pop(next(iter(self._made)))
            self._made[place] = make()
        return self._made[place]

    def all(self) -> list[Tensor]:
        """Return all that there are."""
        return list(self._made.values())


@dataclass
class Round:
    """The state of one window.

    Mode "probe" runs one micro-batch alone as if the others were there. Mode "resting" has BatchNorm normalize by its
    running statistics.
    """

    sizes: tuple[int, ...]  # samples of each micro-batch
    mode: Literal["train", "resting", "probe"] = "train"
    norms: Norms | None = None  # None: BatchNorm normalizes by the micro-batch
    moved_statistics: set[int] = field(default_factory=set)  # ids of buffers that norms have moved together
    same_terms: set[tuple[int, str]] = field(default_factory=set)  # marked terms that were once seen to be the same
    constants: Constants = field(default_factory=Constants)
    ranks: Ranks | None = None
    all_samples: int = 0  # of all ranks
    samples_before: int = 0  # of the ranks before this one
    streams: Streams | None = None  # of random numbers, one for each micro-batch
    offload: Offload | None = None
    free_workspaces: Callable[[], None] = lambda: None  # called where a worker begins to wait
    shared: list[tuple[Tensor, str]] = field(default_factory=list)  # values of all micro-batches, and who made them
    marked: defaultdict[int, list[tuple[str, Tensor]]] = field(default_factory=lambda: defaultdict(list))  # by `once`
    is_backward: bool = False  # whether all forwards are over
    is_recomputing: bool = False  # whether a model runs that keeps its inputs alone, and cannot wait inside

    def __post_init__(self) -> None:
        self.all_samples = sum(self.sizes)

    @property
    def meets(self) -> bool:
        """Whether norms have others to normalize with, and are to."""
        return self.norms is not None and (len(self.sizes) > 1 or self.ranks is not None or self.mode == "probe")
