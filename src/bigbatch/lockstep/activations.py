"""Where the activations of a window stay while its micro-batches wait for each other.

`keep`: where they are; a window then needs the big batch's memory. `recompute`: the model runs again in backward, one
micro-batch at a time, which serves where micro-batches meet outside of it. `offload`: in pinned host memory, copied
beside the computation and fetched ahead of it in backward.
"""

from collections.abc import Callable
from typing import Literal

import torch

from bigbatch.errors import OutOfMemory, UnreadableLoss
from bigbatch.lockstep.model_state import CannotRecompute
from bigbatch.memory.budget import host_available, human, resident

_FILLED = 0.9  # of the room on a device: more is not filled with activations that wait
_SHAPES = 16  # of samples that are measured; of others the largest is taken, and measured where it would not fit
Mode = Literal["keep", "recompute", "offload"]


class Activations:
    """Chooses where activations wait, window after window."""

    _must_wait = False  # whether a model that could be recomputed has turned out not to be
    _is_tight = False  # whether keeping all activations has been too much
    recomputed = False  # whether the latest window was
    of_a_sample: float | None = None  # bytes that wait, of the latest window's samples

    def __init__(
        self, given: Literal["auto", "keep", "recompute", "offload"], device: torch.device, meets: Callable[[], bool]
    ) -> None:
        """`given` is the user's choice; `meets` tells whether micro-batches meet inside of a model."""
        self._given, self._device, self._meets = given, device, meets
        self._known: dict[str, float] = {}  # bytes of a sample that wait, by the samples' shape

    def mode(self, micro_batches: int) -> Mode:
        """Choose for a window."""
        if micro_batches == 1 or (self._given == "offload" and self._device.type != "cuda"):
            return "keep"  # a host's memory is where it is
        if self._given != "auto":
            return self._given
        if not self._must_wait and not self._meets():
            return "recompute"
        return "offload" if self._is_tight else "keep"

    def passed(self, calls: int) -> None:
        """Say that a window went well, in which so many calls of models were seen: without any, none is recomputed."""
        self._must_wait = self._must_wait or (self.recomputed and not calls)

    def fall_back(self, error: BaseException, *, out_of_memory: bool) -> bool:
        """Choose another way where this one failed, if that is ours; returns whether to run the window again."""
        if self._given != "auto":
            return False
        if out_of_memory:
            again = self._device.type == "cuda" and not self._is_tight
            self._is_tight = self._is_tight or again
        else:
            # A model's own loss is in what is recomputed, so its count cannot be read.
            again = self.recomputed and isinstance(error, CannotRecompute | UnreadableLoss) and not self._must_wait
            self._must_wait = self._must_wait or again
        return again

    def make_room(self, measure: Callable[[], float], samples: int, shape: str, *, budget: int, pinned: int) -> None:
        """Choose by what there is room for; raise before the window begins where the host's memory will not do.

        `measure` tells what a sample's activations take, asked once for samples of a `shape`. `budget` is what may be
        used on the device, and `pinned` what is held of the host's memory already.
        """
        if self._given == "keep" or self.mode(samples) == "recompute":
            return
        on_device = self._device.type == "cuda"
        host = host_available() + pinned
        there = host if on_device else min(host, max(budget - resident(), 0))
        free = budget - torch.cuda.memory_allocated(self._device) if on_device else there
        most = max(self._known.values(), default=0.0)
        if shape in self._known or len(self._known) < _SHAPES or most * samples > min(_FILLED * free, there):
            if shape not in self._known:
                self._known[shape] = measure()
            most = self._known[shape]
        self.of_a_sample, needed = most, int(most * samples)
        self._is_tight = self._is_tight or (on_device and needed > _FILLED * free)
        if needed > there and (not on_device or self.mode(samples) == "offload"):
            raise OutOfMemory(
                f"the samples of this batch are coupled, so the activations of all {samples} wait in the host's memory "
                "while micro-batches run in lock-step. Nothing was changed.",
                found=f"about {human(needed)}, and {human(there)} for them{' within memory=' if there < host else ''}",
                fix="a smaller batch, activation checkpointing between the norms, or GroupNorm; or "
                'Options(activations="keep"), which does not look',
            )
