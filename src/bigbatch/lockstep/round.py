"""What the workers of one window share while they run in lock-step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from bigbatch.distributed.ranks import Ranks
from bigbatch.errors import LossError
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

    def _moved(self) -> list[tuple[dict[str, Any], str, nn.Parameter, Tensor]]:
        return [
            (table, name, parameter, data)
            for table, name, parameter, data in self._places
            if table.get(name) is not parameter or parameter.data_ptr() != data.data_ptr()
        ]

    def refuse_others(self) -> None:
        """Raise where the models have other parameters now."""
        for _, name, _, _ in self._moved():
            raise LossError(
                f"a parameter '{name}' is another one after the forwards of a window than before: micro-batches "
                "take turns in the midst of torch.func.functional_call or an exchange of p.data.",
                fix="other weights with BatchNorm in evaluation mode, or a model of their own: "
                "BigStep([model, teacher], optimizer, loss_fn)",
            )

    def restore(self) -> None:
        """Put all of them back."""
        for table, name, parameter, data in self._moved():
            table[name] = parameter
            parameter.data = data


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
    same_terms: set[str] = field(default_factory=set)  # places of terms that were the same in every micro-batch
    constants: Constants = field(default_factory=Constants)
    ranks: Ranks | None = None
    all_samples: int = 0  # of all ranks
    samples_before: int = 0  # of the ranks before this one
    streams: Streams | None = None  # of random numbers, one for each micro-batch
    own_parameters: OwnParameters | None = None
    offload: Offload | None = None
    free_workspaces: Callable[[], None] | None = None  # called where a worker begins to wait
    shared: list[tuple[Tensor, str]] = field(default_factory=list)  # values of all micro-batches, and who made them
    is_backward: bool = False  # whether all forwards are over
    is_recomputing: bool = False  # whether a model runs that keeps its inputs alone, and cannot wait inside

    def __post_init__(self) -> None:
        """Without ranks, the samples are those of this process."""
        self.all_samples = self.all_samples or sum(self.sizes)

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody else to wait for: the micro-batch is the whole batch."""
        return len(self.sizes) == 1 and self.ranks is None and self.mode != "probe"
