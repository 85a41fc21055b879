"""What the workers of one window share while they run in lock-step."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor, nn

from bigbatch.distributed.ranks import Ranks
from bigbatch.lockstep.norm_kernels import Constants
from bigbatch.lockstep.offload_store import Offload
from bigbatch.state.rng import Streams

Norms = dict[int, tuple[str, nn.Module]]  # a layer and its name, by the id of its running mean or its weight


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
