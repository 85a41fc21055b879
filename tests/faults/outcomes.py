"""What a campaign of faults is made of: cases, what came of them, and the processes that run them."""

import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection

# fine: all is as promised, and training went on to the same weights. wrong: to others, without a word. lost: a batch,
# a window or an interrupt is gone. leaked: something was left changed. unclear: an error that tells nothing.
OUTCOMES = ("fine", "not reached", "wrong", "lost", "leaked", "hang", "unclear")
_START, _LIMIT = 600.0, 60.0  # seconds until a process is ready; and without an outcome, then it hangs
_END = 5.0  # seconds in which it may end by itself


@dataclass(frozen=True)
class Case:
    """One fault; everything that is needed to run it again."""

    part: str  # "single", "ranks" or "kills"
    number: int  # its place in the draw
    seed: int  # the campaign's
    entrance: str  # "Accumulator" or "BigStep"
    mode: str
    place: str  # "op", "call", "forward", ...
    error: str
    at: int = 0  # which time, where that is part of the draw


@dataclass(frozen=True)
class Outcome:
    """What came of a case."""

    kind: str  # one of OUTCOMES
    words: str = ""  # what was seen, on one line

    @property
    def is_bad(self) -> bool:
        """Whether a promise was not kept."""
        return self.kind not in {"fine", "not reached"}


def run_cases(module: str, cases: Sequence[Case]) -> Iterator[Outcome]:
    """Run cases by the module's `Laboratory().try_out`, in a process that is started anew where one hangs or dies."""
    context = multiprocessing.get_context("spawn")
    left = list(cases)
    while left:
        ours, theirs = context.Pipe()
        child = context.Process(target=_serve, args=(module, theirs))
        child.start()
        theirs.close()
        try:
            if ours.poll(_START):
                ours.recv()
            while left:
                ours.send(left[0])
                outcome = ours.recv() if ours.poll(_LIMIT) else Outcome("hang", f"no word for {_LIMIT:.0f} s")
                left.pop(0)
                yield outcome
                if outcome.kind == "hang":
                    break
        except (EOFError, OSError):
            child.join()
            left.pop(0)
            yield Outcome("lost", f"the process ended with status {child.exitcode}")
        finally:
            ours.close()
            child.join(_END)  # by itself, it ends the ranks that it has started
            child.kill()
            child.join()


def _serve(module: str, pipe: Connection) -> None:
    laboratory = import_module(module).Laboratory()
    pipe.send("ready")
    while True:
        try:
            case = pipe.recv()
        except EOFError:
            return
        pipe.send(laboratory.try_out(case))
