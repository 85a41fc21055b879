"""How a batch is run: which micro-batches it is cut into, and what is tried instead where that fails."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from bigbatch.batch.batch import Batch
from bigbatch.batch.split import Division, lengths_of, refuse_loss_of_content
from bigbatch.batch.transfer import Mover
from bigbatch.caller import outside
from bigbatch.errors import OutOfMemory, SeveralCounts
from bigbatch.execute.graph_record import NotCapturable
from bigbatch.memory.meter import Stage
from bigbatch.memory.search import Probe
from bigbatch.memory.sizes import ProbeSize, Sizes
from bigbatch.options import Options
from bigbatch.state.oom import is_out_of_memory, let_go, missing
from bigbatch.state.scope import NeedsLockStep


@dataclass(frozen=True)
class Execution:
    """How the micro-batches of a batch are run; a remedy makes another one of it."""

    lockstep: bool = False  # in any case: the loss has asked for other micro-batches
    count_first: bool = False  # several counts are learned in a pass of their own
    graph_steps: bool = False  # micro-steps are captured
    graph_windows: bool = False  # windows in lock-step are captured


def remedy(now: Execution, error: BaseException, *, side_by_side: bool) -> Execution | None:
    """Return how to run a batch where it failed with an error; None where this is no matter of how."""
    asked = {
        NeedsLockStep: {"lockstep": True},
        SeveralCounts: {"count_first": True},  # the graph cannot tell them before the last micro-batch
        # Micro-steps and windows in lock-step are apart, of other losses.
        NotCapturable: {"graph_windows" if side_by_side else "graph_steps": False},
    }
    better = replace(now, **next((change for kind, change in asked.items() if isinstance(error, kind)), {}))
    if better == now:
        return None
    if isinstance(error, NotCapturable):
        warnings.warn(
            f"this model cannot be captured as a CUDA graph: {error}. It is launched kernel by kernel, which gives "
            "the same gradients. Take Options(cuda_graph=True) out to be rid of this warning.",
            stacklevel=outside(),
        )
    return better


def is_short(error: BaseException) -> bool:
    """Whether memory has run out, and nobody has said yet that nothing helps."""
    return is_out_of_memory(error) and not isinstance(error, OutOfMemory)


def no_room(error: BaseException, where: str, since: str, fix: str) -> OutOfMemory:
    """Say where memory has run out for good, and what is true since."""
    return OutOfMemory(f"out of memory {where}; {missing(error)}. {since}", fix=fix)


class Divider:
    """Cuts one batch after the other, with the sizes that were learned from those before."""

    def __init__(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], sizes: Sizes, options: Options, mover: Mover
    ) -> None:
        self._models, self._optimizers, self._sizes, self._options = models, optimizers, sizes, options
        self._mover = mover
        self._stage: tuple[int, Stage] | None = None  # where sizes are tried, within a limit

    def divide(self, whole: Batch, run: Callable[[Any, Division], None], *, lockstep: bool) -> Division:
        """Choose the micro-batches; `run` runs one of a division, to see what it takes."""
        if self._options.lengths is None:
            try_size: ProbeSize = lambda size, limit: self._rehearse(Division.even(whole, size), limit, run)  # noqa: E731
            # Micro-batches that wait for each other are no faster, nor smaller, than all at once.
            size = self._sizes.samples(whole.signature(), whole.size, try_size, at_once=lockstep)
            return Division.even(whole, size)
        lengths = lengths_of(whole, self._options.lengths)
        longest, order = max(*lengths, 1), sorted(range(whole.size), key=lambda i: -lengths[i])

        def probe(size: int, limit: int) -> Probe:
            chosen = order[:size]
            rehearsed = Division.packed(whole.only(chosen), [lengths[i] for i in chosen], longest * size)
            return self._rehearse(rehearsed, limit, run)

        budget = self._sizes.tokens(self._options.token_budget, lengths, probe)
        division = Division.packed(whole, lengths, budget, self._sizes.most, alike=self._options.cuda_graph)
        refuse_loss_of_content(whole, lengths, division.width)
        return division

    def _rehearse(self, division: Division, limit: int, run: Callable[[Any, Division], None]) -> Probe:
        if self._stage is None or self._stage[0] != limit:
            dtype = self._options.gradient_dtype
            self._stage = limit, Stage(self._models, self._optimizers, dtype, self._mover.device, limit)
        first = lambda: run(self._mover.moved(division.micro_batch(0)), division)  # noqa: E731
        return self._stage[1].rehearse(division.sizes[0], first)

    def shrink(self, division: Division, error: BaseException, *, lockstep: bool) -> None:
        """Take smaller micro-batches from now on, or give up where one sample does not fit."""
        size = max(division.sizes)
        what = "one sample" if division.longest is None else f"one sample of length {max(division.longest)}"
        # None where it was no micro-batch that failed, but a check or the step; side by side it may be any of them.
        at = None if lockstep else self._mover.at
        alone = division.longest is not None and at is not None and division.sizes[at] == 1
        if size <= 1 or alone:  # a sample longer than the budget stays alone, whatever the budget
            let_go(error, told=True)
            raise no_room(
                error,
                f"with {what} at a time",
                "The model, the optimizer and the random state are as they were before this step.",
                "activation checkpointing (torch.utils.checkpoint, or model.gradient_checkpointing_enable()), shorter "
                "sequences, autocast to bfloat16, or an optimizer with less state",
            ) from error
        if division.longest is None:
            self._sizes.learn(division.batch.signature(), size // 2)
        else:
            groups = zip(division.sizes, division.longest, strict=True)
            self._sizes.learn(None, max(number * wide for number, wide in groups if number > 1) // 2)
