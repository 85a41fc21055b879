"""Faults on one of two ranks: it raises, dies, stops for a while or runs out of memory, in the midst of training.

Real processes, a real gloo group. Afterwards both have made all updates, to the weights of an undisturbed run; or each
has ended in time with an error that says why, with the weights of the updates that it had made.
"""

import random
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bigbatch import across
from bigbatch.distributed.fsdp_internals import local, parameters_of, sharded
from bigbatch.distributed.ranks import Ranks
from bigbatch.errors import BigBatchError, RankFailed
from tests.faults.injecting import Fault, Spilled
from tests.faults.outcomes import Case, Outcome, run_cases
from tests.faults.programs import Batch, Net, made, rows
from tests.support.ranks import RankFailed as RankDied
from tests.support.ranks import run_on_ranks

RANKS, UPDATES = 2, 3
LIMIT = 30.0  # seconds until a rank hangs
TIMEOUT, SHORT_TIMEOUT = 20.0, 3.0  # of the group: until a rank that does not answer is given up

_IN_THE_LOSS = ("forward", "loss", "backward")
_MESSAGES = ("before a message", "after a message", "in a collective")
PLACES = (*_IN_THE_LOSS, *_MESSAGES, "loader", "before_step hook", "optimizer before", "optimizer after")
# "group": the model is not wrapped. "uneven": a rank has fewer batches. "again": a step is made again, where it may be.
MODES = {
    "Accumulator": ("ddp", "fsdp", "group", "uneven, group"),
    "BigStep": ("ddp", "ddp, again", "across", "across, again", "batch norm", "fsdp"),
}
ERRORS = ("user's own", "OutOfMemoryError", "CPU allocator", "KeyboardInterrupt")


def draw(seed: int, count: int) -> Iterator[Case]:
    """Draw cases: every mode, place and error as often as another, but for long stops, which take long."""
    errors = [*ERRORS, *ERRORS, *ERRORS, "SIGKILL", "SIGKILL", "SIGKILL", "SIGSTOP", "SIGSTOP", "SIGSTOP for long"]
    for number in range(count):
        by = random.Random(f"{seed}-{number}")  # noqa: S311 - a draw, not a secret
        entrance = by.choice(list(MODES))
        place = by.choice(PLACES)
        at = 1000 * by.randrange(RANKS) + by.randint(1, 6 if place in _IN_THE_LOSS else 3)
        yield Case("ranks", number, seed, entrance, by.choice(MODES[entrance]), place, by.choice(errors), at)


run = partial(run_cases, __name__)


@dataclass
class Result:
    """What one rank came to."""

    done: int = 0  # updates
    states: list[list[float]] = field(default_factory=list)  # its weights: at first, and after each update
    weights: list[float] = field(default_factory=list)  # in the end
    reached: bool = False  # whether the fault has come
    error: str = ""  # what it ended with
    is_known: bool = True  # whether that was bigbatch's, or what was injected, or did not come through bigbatch


class _Ended(Exception):
    """Ends a process with a result, as a user's would: its connections close."""


class Laboratory:
    """Runs cases; what undisturbed ranks come to is kept."""

    def __init__(self) -> None:
        self._undisturbed: dict[tuple[str, str], list[Any]] = {}

    def try_out(self, case: Case) -> Outcome:
        """Run one case on two ranks."""
        key = case.entrance, case.mode
        if key not in self._undisturbed:
            self._undisturbed[key] = found = _run(None, case)
            assert all(each is not None and each.done == UPDATES for each in found), found
        return _judged(case, _run(case, case), self._undisturbed[key])


def _run(fault: Case | None, case: Case) -> list[Any]:
    """Return what each rank came to; None of one that was killed, "hang" of those that have not ended."""
    patience = SHORT_TIMEOUT if fault is not None and fault.error == "SIGSTOP for long" else TIMEOUT
    try:
        found = run_on_ranks(RANKS, _trained, case, fault, limit=LIMIT, patience=patience)
    except RankDied:
        return ["hang"] * RANKS
    results = [each.args[0] if isinstance(each, _Ended) else each for each in found]
    return [each if isinstance(each, Result) else None for each in results]


def _judged(case: Case, found: Sequence[Any], undisturbed: Sequence[Result]) -> Outcome:
    faulty, time = divmod(case.at, 1000)
    mine, other = found[faulty], found[1 - faulty]
    of_memory = case.error in {"OutOfMemoryError", "CPU allocator"}
    in_the_loss = case.mode in {"ddp", "across"} and case.entrance == "BigStep" and case.place in _IN_THE_LOSS
    survivable = case.error == "SIGSTOP" or (of_memory and in_the_loss)
    kind, words = "fine", ""
    if "hang" in found:
        kind, words = "hang", f"a rank has not ended after {LIMIT:g} s"
    elif mine is not None and not mine.reached:
        return Outcome("not reached")
    elif (mine is None) != (case.error == "SIGKILL") or other is None:
        kind, words = "unclear", "a rank died without a word"
    elif unknown := [each.error for each in found if each is not None and not each.is_known]:
        kind, words = "unclear", unknown[0]
    else:
        for rank, each in enumerate(found):
            ahead = rank == faulty and case.place == "optimizer after"  # it may have made that step
            true = undisturbed[rank].states[each.done :][: 1 + ahead] if each is not None else []
            if each is not None and not any(each.weights == pytest.approx(w, rel=1e-12, abs=1e-14) for w in true):
                kind, words = "wrong", f"other weights after {each.done} updates; {each.error}"
        if kind == "fine" and survivable and not all(each is not None and each.done == UPDATES for each in found):
            kind, words = "lost", f"this could have gone on: {(mine or other).error}"
    return Outcome(kind, words and f"rank {faulty}, {case.place}, time {time}: {words}")


def _trained(rank: int, case: Case, fault: Case | None) -> Result:
    warnings.simplefilter("ignore")
    injected = Fault()
    if fault is not None and fault.at // 1000 == rank:
        injected = Fault(fault.place, fault.at % 1000, fault.error)
    injected.active = True
    training = _Training(rank, case, injected)
    result = training.result
    try:
        with (
            patch.object(Ranks, "_gather", injected.around(Ranks._gather, "before a message", "after a message")),
            patch.object(dist, "all_reduce", injected.around(dist.all_reduce, "in a collective")),
            patch.object(dist, "all_gather", injected.around(dist.all_gather, "in a collective")),
        ):
            training.run()
    except BaseException as error:  # noqa: BLE001 - told to whoever asked
        result.error = f"{type(error).__name__}: {str(error).replace(chr(10), ' ')[:200]}"
        within = any("/bigbatch/" in frame.filename for frame in traceback.extract_tb(error.__traceback__))
        result.is_known = isinstance(error, BigBatchError) or injected.is_own(error) or not within
    result.reached = injected.reached
    result.weights = training.weights()
    if fault is None:
        return result
    if not result.error:
        with suppress(Exception):  # the other may be gone
            dist.barrier()
    raise _Ended(result)


class _Training:
    """One rank's program."""

    def __init__(self, rank: int, case: Case, fault: Fault) -> None:
        self._mode, self.result = case.mode, Result()
        options: dict[str, Any] = {"group": dist.group.WORLD} if "group" in case.mode else {}
        self._made = made(case.entrance, fault, net=self._net, loss=self._loss, hook=True, clip_norm=1.0, **options)
        updates = UPDATES - (rank == 1 and "uneven" in case.mode)
        sizes = (2, 3) * updates if case.entrance == "Accumulator" else (4,) * updates
        self._batches = (fault.around(lambda batch: batch, "loader")(batch) for batch in rows(sizes, seed=1 + rank))
        self.run = self._accumulate if case.entrance == "Accumulator" else self._big_steps
        self.result.states.append(self.weights())

    def _net(self, fault: Fault) -> nn.Module:
        net = Net(fault, norm=self._mode == "batch norm", outputs=2)
        if self._mode == "fsdp":
            sharding: Any = import_module("torch.distributed.fsdp")
            sharding.fully_shard(net)
            return net
        return net if "group" in self._mode else DistributedDataParallel(net)

    def _loss(self, network: nn.Module, batch: Batch) -> Tensor:
        out: Tensor = network(batch["x"])
        return (out - across.mean(out.mean(0)) if "across" in self._mode else out).pow(2).mean()

    def weights(self) -> list[float]:
        """Return this rank's own, without asking others."""
        # What has failed inside a sharded model leaves whole parameters in the place of shards.
        own = [each.sharded_param for each in parameters_of(sharded([self._made.model]))]
        parameters = [local(p).detach() for p in own or self._made.model.parameters()]
        return [number for p in parameters for number in p.flatten().tolist()]

    def _updated(self) -> None:
        self.result.done += 1
        self.result.states.append(self.weights())

    def _accumulate(self) -> None:
        accumulator = self._made.entrance
        for batch in accumulator.over(self._batches):
            if accumulator.backward(self._made.loss(self._made.model, batch)) is not None:
                self._updated()
        if self.result.done == UPDATES - 1 and "uneven" in self._mode:  # the rest was made with those that had batches
            self._updated()

    def _big_steps(self) -> None:
        for batch in self._batches:
            try:
                self._made.entrance(batch)
            except (Spilled, RankFailed) as error:
                allowed = isinstance(error, Spilled) or "failed in this window" in str(error)
                if not ("again" in self._mode and allowed):
                    raise
                self._made.entrance(batch)
            self._updated()
