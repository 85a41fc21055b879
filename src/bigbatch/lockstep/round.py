"""What the workers of one window share while they run in lock-step."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor, nn

from bigbatch.distributed.ranks import Ranks
from bigbatch.lockstep.norm_kernels import Constants
from bigbatch.lockstep.offload_store import Offload
from bigbatch.state.rng import Streams

Norms = dict[int, tuple[str, nn.Module]]  # a layer and its name, by the id of its running mean or its weight


class OwnParameters:
    """Which parameters some models have, and in which memory.

    Micro-batches take turns in the midst of a `functional_call` or of an exchange of `p.data`. So such calls end in
    another order than they began, and leave other parameters behind.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        """Note them."""
        self._places = [
            (module._parameters, name, parameter, parameter.data)  # noqa: SLF001 - where functional_call puts others
            for model in models
            for module in model.modules()
            for name, parameter in module._parameters.items()  # noqa: SLF001
            if parameter is not None and type(parameter.data) is Tensor  # others may have no memory of their own
        ]

    def restore(self) -> list[str]:
        """Put all of them back; returns the names of those that were others."""
        found = []
        for table, name, parameter, data in self._places:
            if table.get(name) is not parameter or parameter.data_ptr() != data.data_ptr():
                table[name], parameter.data = parameter, data
                found.append(name)
        return found


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
    free_workspaces: Callable[[], None] | None = None  # called where a worker begins to wait
    shared: list[tuple[Tensor, str]] = field(default_factory=list)  # values of all micro-batches, and who made them
    marked: defaultdict[int, list[tuple[str, Tensor]]] = field(default_factory=lambda: defaultdict(list))  # by `once`
    is_backward: bool = False  # whether all forwards are over
    is_recomputing: bool = False  # whether a model runs that keeps its inputs alone, and cannot wait inside

    def __post_init__(self) -> None:
        """Without ranks, the samples are those of this process."""
        self.all_samples = self.all_samples or sum(self.sizes)

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody else to wait for: the micro-batch is the whole batch."""
        return len(self.sizes) == 1 and self.ranks is None and self.mode != "probe"
