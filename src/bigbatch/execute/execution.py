"""How a batch is run, and what is tried instead where that fails."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

from bigbatch.caller import outside
from bigbatch.errors import SeveralCounts
from bigbatch.execute.graph_record import NotCapturable
from bigbatch.execute.precast import ForeignBackward
from bigbatch.state.scope import NeedsLockStep


@dataclass(frozen=True)
class Execution:
    """How the micro-batches of a batch are run; a remedy makes another one of it."""

    lockstep: bool = False  # in any case: the loss has asked for other micro-batches
    count_first: bool = False  # several counts are learned in a pass of their own
    graph_steps: bool = False  # micro-steps are captured
    graph_windows: bool = False  # windows in lock-step are captured
    casts: bool = True  # weights are cast once per window, where that serves


Remedy = Callable[[Execution, BaseException], Execution | None]


def to_lockstep(now: Execution, error: BaseException) -> Execution | None:
    """Run micro-batches in lock-step where a loss asks for others."""
    return replace(now, lockstep=True) if isinstance(error, NeedsLockStep) and not now.lockstep else None


def count_first(now: Execution, error: BaseException) -> Execution | None:
    """Learn several counts before the first backward: the graph cannot tell them before the last micro-batch."""
    return replace(now, count_first=True) if isinstance(error, SeveralCounts) and not now.count_first else None


def launch(now: Execution, error: BaseException) -> Execution | None:
    """Launch what cannot be captured; micro-steps and windows in lock-step are apart, of other losses."""
    if not isinstance(error, NotCapturable) or not (now.graph_steps or now.graph_windows):
        return None
    warnings.warn(
        f"this model cannot be captured as a CUDA graph: {error}. It is launched kernel by kernel, which gives "
        "the same gradients. Take Options(cuda_graph=True) out to be rid of this warning.",
        stacklevel=outside(),
    )
    return replace(now, graph_windows=False) if error.of_window else replace(now, graph_steps=False)


def cast_each_time(now: Execution, error: BaseException) -> Execution | None:
    """Cast weights for each micro-batch where a loss runs a backward of its own, which ours would add to."""
    return replace(now, casts=False) if isinstance(error, ForeignBackward) and now.casts else None
