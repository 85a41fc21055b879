"""Faults on one of two ranks: it raises, dies, stops for a while or runs out of memory, in the midst of training.

Real processes, a real gloo group. Afterwards both have made all updates, to the weights of an undisturbed run; or each
has ended in time with an error that says why, with the weights of the updates that it had made.
"""

import os
import random
import signal
import subprocess
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bigbatch import Accumulator, BigStep, Options, across
from bigbatch.distributed.fsdp_internals import local, parameters_of, sharded
from bigbatch.distributed.ranks import Ranks
from bigbatch.errors import BigBatchError, RankFailed
from tests.faults.outcomes import Case, Outcome
from tests.support.ranks import RankFailed as RankDied
from tests.support.ranks import run_on_ranks

RANKS, UPDATES, CLASSES = 2, 3, 4
LIMIT = 30.0  # seconds until a rank hangs
TIMEOUT, SHORT_TIMEOUT = 20.0, 3.0  # of the group: until a rank that does not answer is given up
STOPPED = {"SIGSTOP": 0.3, "SIGSTOP for long": 2 * SHORT_TIMEOUT}

# How often each place comes up in a run, at least about; later ones are not reached.
PLACES = {
    "batch": 3,
    "forward": 6,
    "loss": 6,
    "backward": 6,
    "before a message": 4,
    "after a message": 4,
    "in a collective": 6,
    "before_step hook": 3,
    "before optimizer.step": 3,
    "after optimizer.step": 3,
}
MODES = {
    "Accumulator": ("ddp", "fsdp", "group", "uneven"),
    "BigStep": ("plain", "plain, again", "across", "across, again", "batch norm", "fsdp"),
}
ERRORS: dict[str, BaseException] = {
    "ValueError": ValueError("injected"),
    "OutOfMemoryError": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 32.00 MiB (injected)"),
    "RuntimeError of memory": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 32 bytes. Error code 12 (injected)"
    ),
    "KeyboardInterrupt": KeyboardInterrupt("injected"),
}
_OF_MEMORY = ("OutOfMemoryError", "RuntimeError of memory")
_IN_THE_LOSS = ("forward", "loss", "backward")


def draw(seed: int, count: int) -> Iterator[Case]:
    """Draw cases: every mode, place and error as often as another, but for long stops, which take long."""
    errors = [*ERRORS, *ERRORS, *ERRORS, "SIGKILL", "SIGKILL", "SIGKILL", "SIGSTOP", "SIGSTOP", "SIGSTOP for long"]
    for number in range(count):
        by = random.Random(f"{seed}-{number}")  # noqa: S311 - a draw, not a secret
        entrance = by.choice(list(MODES))
        place = by.choice(list(PLACES))
        at = 1000 * by.randrange(RANKS) + by.randint(1, PLACES[place])
        yield Case("ranks", number, seed, entrance, by.choice(MODES[entrance]), place, by.choice(errors), at)


def run(cases: Sequence[Case]) -> Iterator[Outcome]:
    """Run each on two ranks."""
    undisturbed: dict[tuple[str, str], list[Any]] = {}
    for case in cases:
        key = case.entrance, case.mode
        if key not in undisturbed:
            found = _run(None, case)
            assert all(each is not None and each.done == UPDATES for each in found), found
            undisturbed[key] = found
        yield _judge(case, _run(case, case), undisturbed[key])


@dataclass
class Result:
    """What one rank came to."""

    done: int = 0  # updates
    states: list[list[float]] = field(default_factory=list)  # its weights: at first, and after each update
    weights: list[float] = field(default_factory=list)  # in the end
    reached: bool = False  # whether the fault has come
    error: str = ""  # the type it ended with, and its text
    words: str = ""
    known: bool = False  # whether that was ours, or what was injected
    within: bool = False  # whether it came through code of bigbatch


class _Ended(Exception):
    """Ends a process with a result, as a user's would: its connections close."""


def _run(fault: Case | None, case: Case) -> list[Result | None]:
    """Return what each rank came to; None of one that was killed. A rank that hangs has an error of that name."""
    patience = SHORT_TIMEOUT if fault is not None and fault.error == "SIGSTOP for long" else TIMEOUT
    try:
        found = run_on_ranks(RANKS, _trained, case, fault, limit=LIMIT, patience=patience)
    except RankDied:
        return [Result(error="hang")] * RANKS
    results = [each.args[0] if isinstance(each, _Ended) else each for each in found]
    return [each if isinstance(each, Result) else None for each in results]


def _judge(case: Case, found: Sequence[Result | None], undisturbed: Sequence[Result]) -> Outcome:
    faulty = case.at // 1000
    mine, other = found[faulty], found[1 - faulty]
    kind, words = "fine", ""
    if any(each is not None and each.error == "hang" for each in found):
        kind, words = "hang", f"a rank has not ended after {LIMIT:g} s"
    elif mine is not None and not mine.reached:
        kind = "not reached"
    elif (mine is None) != (case.error == "SIGKILL") or other is None:
        kind, words = "unclear", "a rank died without a word"
    else:
        for rank, each in enumerate(found):
            if each is not None and kind == "fine":
                ahead = rank == faulty and case.place == "after optimizer.step"  # it may have made that step
                states = undisturbed[rank].states[each.done :][: 1 + ahead]
                kind, words = _judge_rank(each, states)
        survivable = case.error == "SIGSTOP" or (
            case.error in _OF_MEMORY and case.mode in {"plain", "across"} and case.place in _IN_THE_LOSS
        )
        if kind == "fine" and survivable and not all(each is not None and each.done == UPDATES for each in found):
            ended = mine or other
            kind, words = "lost", f"this could have gone on: {ended.error}: {ended.words}"
    return Outcome(kind, words and f"rank {faulty}, {case.place}, time {case.at % 1000}: {words}")


def _judge_rank(found: Result, states: Sequence[Sequence[float]]) -> tuple[str, str]:
    """Say what became of one rank, whose weights should be in one of some states."""
    if found.error and not found.known and found.within:
        return "unclear", f"{found.error}: {found.words}"
    if not any(found.weights == pytest.approx(true, rel=1e-12, abs=1e-14) for true in states):
        return "wrong", f"other weights after {found.done} updates; {found.error}"
    return "fine", ""


def _trained(rank: int, case: Case, fault: Case | None) -> Result:
    warnings.simplefilter("ignore")
    result = Result()
    injected = _Fault(fault, rank, result)
    training = _Training(rank, case, injected, result)
    try:
        with (
            patch.object(Ranks, "_gather", injected.around(Ranks._gather, "before a message", "after a message")),
            patch.object(dist, "all_reduce", injected.around(dist.all_reduce, "in a collective")),
            patch.object(dist, "all_gather", injected.around(dist.all_gather, "in a collective")),
        ):
            training.run()
    except BaseException as error:  # noqa: BLE001 - told to whoever asked
        result.error, result.words = type(error).__name__, str(error).replace("\n", " ")[:200]
        result.known = isinstance(error, BigBatchError) or "injected" in str(error)
        result.within = any("/bigbatch/" in frame.filename for frame in traceback.extract_tb(error.__traceback__))
    result.weights = training.weights()
    if fault is None:
        return result
    if not result.error:
        with suppress(Exception):  # the other may be gone
            dist.barrier()
    raise _Ended(result)


class _Fault:
    """Comes once, at the k-th time of its place, on its rank."""

    def __init__(self, case: Case | None, rank: int, result: Result) -> None:
        self.place = case.place if case is not None and case.at // 1000 == rank else ""
        self._error, self._left = ("", 0) if case is None else (case.error, case.at % 1000)
        self._result = result

    def __call__(self, *_: object) -> None:
        """Hear that its place has come up."""
        self._left -= 1
        if self._left:
            return
        self._result.reached = True
        if self._error == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._error in STOPPED:
            subprocess.Popen(["/bin/sh", "-c", f"sleep {STOPPED[self._error]}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
            return
        raise ERRORS[self._error]

    def at(self, place: str) -> "Callable[..., None]":
        """Return what to call there."""
        return self if place and place == self.place else lambda *_: None

    def around(self, function: Any, before: str, after: str = "") -> Any:
        """Return a function with places before and after it."""
        first, last = self.at(before), self.at(after)

        def call(*arguments: Any, **named: Any) -> Any:
            first()
            found = function(*arguments, **named)
            last()
            return found

        return call


class _Training:
    """One rank's program."""

    def __init__(self, rank: int, case: Case, fault: _Fault, result: Result) -> None:
        self._rank, self._fault, self._result = rank, fault, result
        self._mode, _, again = case.mode.partition(", ")
        self._again = bool(again)  # whether a step that failed is made again, as its error allows
        torch.manual_seed(0)
        layers = [nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, CLASSES)]
        if self._mode == "batch norm":
            layers.insert(1, nn.BatchNorm1d(8))
        self._network: Any = nn.Sequential(*layers).double()
        self._options: dict[str, Any] = {}
        if self._mode == "fsdp":
            import_module("torch.distributed.fsdp").fully_shard(self._network)
        elif self._mode in {"group", "uneven"}:
            self._options["group"] = dist.group.WORLD
        else:
            self._network = DistributedDataParallel(self._network)
        self._optimizer = torch.optim.SGD(self._network.parameters(), lr=0.1, momentum=0.9)
        self._run = self._accumulate if case.entrance == "Accumulator" else self._big_steps
        self._optimizer.register_step_pre_hook(fault.at("before optimizer.step"))
        self._optimizer.register_step_post_hook(fault.at("after optimizer.step"))
        self._network.register_forward_pre_hook(fault.at("forward"))

    def run(self) -> None:
        """Train."""
        self._result.states.append(self.weights())
        self._run()

    def weights(self) -> list[float]:
        """Return this rank's own, without asking others."""
        # What has failed inside a sharded model leaves whole parameters in the place of shards.
        shards = [each.sharded_param for each in parameters_of(sharded([self._network]))]
        found: list[float] = torch.cat(
            [local(p).detach().flatten() for p in shards or self._network.parameters()]
        ).tolist()
        return found

    def _batch(self, update: int, size: int) -> Tensor:
        self._fault.at("batch")()
        by = torch.Generator().manual_seed(100 * update + 10 * self._rank + size)
        return torch.randn(size, 5, generator=by, dtype=torch.float64)

    def _loss(self, network: nn.Module, batch: Tensor) -> Tensor:
        out: Tensor = network(batch)
        if self._fault.place == "backward" and out.requires_grad:
            out.register_hook(self._fault)
        loss = (out - across.mean(out.mean(0))).pow(2).mean() if self._mode == "across" else out.pow(2).mean()
        self._fault.at("loss")()
        return loss

    def _made(self) -> None:
        self._result.done += 1
        self._result.states.append(self.weights())

    def _accumulate(self) -> None:
        accumulator = Accumulator(self._network, self._optimizer, steps=2, clip_norm=1.0, **self._options)
        accumulator.before_step(self._fault.at("before_step hook"))
        accumulator.before_step(lambda: None)
        own = UPDATES - (self._mode == "uneven" and self._rank == 1)
        batches = (self._batch(update, 2 + number) for update in range(own) for number in range(2))
        for batch in accumulator.over(batches):
            if accumulator.backward(self._loss(self._network, batch)) is not None:
                self._made()
        if own < UPDATES:  # the rest was made with those that had batches left
            self._made()

    def _big_steps(self) -> None:
        step = BigStep(
            self._network,
            self._optimizer,
            self._loss,
            micro_batch_size=2,
            clip_norm=1.0,
            options=Options(**self._options),
        )
        step.before_step(self._fault.at("before_step hook"))
        for update in range(UPDATES):
            batch = self._batch(update, 4)
            try:
                step(batch)
            except (ValueError, RankFailed) as error:
                allowed = "injected" in str(error) or "failed in this window" in str(error)
                if not (self._again and allowed):
                    raise
                step(batch)
            self._made()
