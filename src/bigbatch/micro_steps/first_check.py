"""The first-step check at work: which samples to look at, how to evaluate them, and when enough was seen."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from bigbatch.batches.division import Division
from bigbatch.batches.moving import Mover
from bigbatch.micro_steps.coupling import Part, calm, refuse_counted_padding, refuse_coupled
from bigbatch.micro_steps.restoring import Randomness, devices_of, untouched
from bigbatch.micro_steps.running import Runner
from bigbatch.micro_steps.survival import is_out_of_memory
from bigbatch.options import Options

_UNCHECKED = (
    "this loss draws random numbers that evaluation mode does not turn off, or fails there, so the first step could "
    "not see whether samples are coupled: whether a micro-batch's loss is that of its halves. If no sample looks at "
    "another, all is well; Options(check=False) says that you know."
)


class FirstCheck:
    """Looks once, before a first update, whether a batch may be cut and trimmed at all.

    Not every batch has two samples, or padding: what one does not show is looked for in the next.
    """

    def __init__(self, models: Sequence[nn.Module], runner: Runner, mover: Mover, options: Options) -> None:
        """Have seen nothing yet."""
        self._models, self._runner, self._mover = models, runner, mover
        # Statistics of the micro-batch were accepted: only in evaluation mode do they couple nothing.
        self._always_calm = options.batch_norm == "micro"
        self._left = {"samples", "padding"} if options.check else set[str]()
        self._warned = False
        if options.lengths is None:
            self._left.discard("padding")

    def __call__(self, division: Division) -> set[str]:
        """Refuse what cannot be cut; returns what was looked at, to be `passed` when the update is made."""
        seen = set()
        if "padding" in self._left and self._padding(division):
            seen.add("padding")
        if "samples" in self._left and division.batch.size > 1:
            self._samples(division)
            seen.add("samples")
        return seen

    def passed(self, seen: set[str]) -> None:
        """Look for these no more."""
        self._left -= seen

    def _samples(self, division: Division) -> None:
        """See that a micro-batch's loss is that of its halves."""
        number = max(range(len(division)), key=division.sizes.__getitem__)
        group, longest = division.indices(division.groups[number]), None
        middle, together = len(group) // 2, self._part
        if division.longest is not None:
            longest = division.longest[number]
        if len(group) == 1:  # two at a time may be too many, but hardly without a graph
            group = [i for pair in division.groups[:2] for i in division.indices(pair)]
            middle, together = 1, self._value
            if division.longest is not None:
                longest = max(division.longest[:2])
        parts = self._calmly(
            lambda: [
                self._part(division.part(group[:middle], longest)),
                self._part(division.part(group[middle:], longest)),
                together(division.part(group, longest)),
            ]
        )
        if parts is not None:
            refuse_coupled(parts[2], parts[:2], len(group))

    def _padding(self, division: Division) -> bool:
        """See that a loss does not change when padding is cut off; False where there is none to cut."""
        if division.longest is None:
            return False
        shortest, number = min(zip(division.longest, range(len(division)), strict=True))
        if shortest == division.width:
            return False
        group = division.indices(division.groups[number])[-2:]
        if division.batch.collate is not None:  # it pads as far as the samples that it is given need
            self._collated_padding(division, division.indices(division.groups[0])[0], group[-1])
            return True
        parts = self._calmly(lambda: [self._part(division.part(group, wide)) for wide in (division.width, shortest)])
        if parts is not None:
            refuse_counted_padding(*parts)
        return True

    def _collated_padding(self, division: Division, longest: int, shortest: int) -> None:
        """See that a short sample's loss is the same beside a long one."""
        chosen = [longest], [shortest], [longest, shortest]
        parts = self._calmly(lambda: [self._part(division.part(each, None)) for each in chosen])
        if parts is not None:
            refuse_coupled(parts[2], parts[:2], 2)

    def _part(self, micro_batch: Any) -> Part:
        loss, _ = self._runner.loss(self._mover.moved(micro_batch))
        return Part.of(loss, self._runner.read(loss))

    def _value(self, micro_batch: Any) -> Part:
        try:
            with torch.no_grad():
                loss, _ = self._runner.loss(self._mover.moved(micro_batch))
                return Part.of(loss, ())
        except Exception:  # noqa: BLE001 - two at a time are more than was asked for
            return Part.unknown()

    def _calmly(self, evaluate: Callable[[], list[Part]]) -> list[Part] | None:
        """Evaluate losses without random numbers: as things are, without dropout, or in evaluation mode."""
        as_they_are: list[AbstractContextManager[None]] = [] if self._always_calm else [nullcontext()]
        without_dropout = [] if self._always_calm else [calm(self._models, dropout_alone=True)]
        for circumstances in (*as_they_are, *without_dropout, calm(self._models)):
            with untouched(self._models), circumstances:
                randomness = Randomness(devices_of(self._models))
                try:
                    parts = evaluate()
                except Exception as error:
                    # The first time it is the user's error; in evaluation mode a model may do something else.
                    if isinstance(circumstances, nullcontext) or is_out_of_memory(error):
                        raise
                    break
                if not randomness.drawn():
                    return parts
        if not self._warned:
            self._warned = True
            warnings.warn(_UNCHECKED, stacklevel=6)
        return None
