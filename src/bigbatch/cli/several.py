"""A command that a launcher runs in several processes: one of them speaks, and they end together."""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import TYPE_CHECKING

import typer

from bigbatch.cli.failures import FAILED, errors_as_text

if TYPE_CHECKING:
    from bigbatch.recipes.launching import Place


def is_a_further_one() -> bool:
    """Tell whether torchrun has started another process before this one; without loading torch."""
    return "MASTER_ADDR" in os.environ and os.environ.get("RANK", "0") != "0"


@contextmanager
def one_of_several(seed: int) -> Iterator["Place | None"]:
    """Join the processes that torchrun has started, where it has; errors are shown once, by the first that has one."""
    from bigbatch.recipes.launching import joined

    place = joined(seed)
    if place is None:
        with errors_as_text():
            yield None
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere:  # noqa: PTH123 - it is no file
        try:
            whose = errors_as_text(f"rank {place.rank}: ")
            with whose, nullcontext() if place.speaks else redirect_stdout(nowhere), _failing_once(place):
                if not place.speaks:  # what the others have to say is what the first one says
                    warnings.simplefilter("ignore")
                yield place
                place.wait_for_all()  # the first may be evaluating still, and connections end together
        except BaseException:
            sys.stderr.flush()
            place.has_said_why()
            raise
    import torch.distributed as dist

    dist.destroy_process_group()


@contextmanager
def _failing_once(place: "Place") -> Iterator[None]:
    """Let through what happened on the rank that failed first; the others wait until it is said, and end silently."""
    from bigbatch.recipes.launching import lost_connection

    try:
        yield
    except Exception as error:
        if not place.fails_first():
            place.wait_for_the_first()
            raise typer.Exit(FAILED) from None
        lost = lost_connection(error)
        if lost is not None:
            raise lost from error
        raise
