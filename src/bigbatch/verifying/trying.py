"""An experiment may fail where training does not: BatchNorm wants more than one sample, a model more than a part."""

from collections.abc import Callable
from typing import TypeVar

from bigbatch.state.oom import is_out_of_memory, let_go

Found = TypeVar("Found")


def tried(experiment: Callable[[], Found], otherwise: Found) -> Found:
    """Return what an experiment finds, or what stands for one that failed; running out of memory is told."""
    try:
        return experiment()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        let_go(error)
        return otherwise
