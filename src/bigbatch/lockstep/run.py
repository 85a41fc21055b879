"""The micro-batches of a window side by side: forward until all have a loss, then backward, meeting on the way."""

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn

from bigbatch import arguments
from bigbatch.caller import outside
from bigbatch.distributed import rank_collectives
from bigbatch.distributed.ranks import Ranks
from bigbatch.errors import UnreadableLoss
from bigbatch.execute.micro_step import Runner
from bigbatch.execute.workspaces import workspaces_given_back
from bigbatch.lockstep.activations import MeetsInside, recomputing
from bigbatch.lockstep.batch_norm import batch_norm_met, norms_of
from bigbatch.lockstep.collectives import refuse_changed
from bigbatch.lockstep.constants import Constants
from bigbatch.lockstep.offload_remake import activations_known
from bigbatch.lockstep.offload_store import Offload
from bigbatch.lockstep.own_parameters import OwnParameters
from bigbatch.lockstep.recompute import Calls, RunsDiffer
from bigbatch.lockstep.room import Waiting, refuse_too_much
from bigbatch.lockstep.round import Round
from bigbatch.lockstep.thread_state import Carried
from bigbatch.lockstep.threads import Crew, Worker, current
from bigbatch.loss import refusals
from bigbatch.loss.terms import Term
from bigbatch.memory.host import host_available, resident
from bigbatch.memory.meter import saved_bytes
from bigbatch.state.rng import Streams
from bigbatch.state.snapshot import devices_of, untouched
from bigbatch.window.window import Window

_WAITING = 1.25  # times what autograd saves of one micro-batch: more of all others does not wait on the device
_WAITING_REPLAYED = 0.4  # likewise where windows are replayed: copies cost the host nothing then
_FILLED = 0.9  # of the room on a device: more is not filled with activations that wait
Result = TypeVar("Result")
Activations = Literal["auto", "keep", "recompute", "offload"]


class Together:
    """Runs micro-batches of one model in lock-step."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        runner: Runner,
        device: torch.device,
        given: Activations,
        *,
        norms_meet: bool = True,
    ) -> None:
        """Have no threads yet; `given` says where activations stay while micro-batches wait.

        Without `norms_meet` BatchNorm is left to normalise by the micro-batch.
        """
        self._models, self._runner, self._device, self._given = models, runner, device, given
        self._norms_meet = norms_meet
        self._crew = Crew()
        self._constants = Constants()
        self._looked = False  # whether a window has gone well
        self._same_terms: set[str] = set()  # places of terms that were seen to be the same in every micro-batch
        self.statistics: set[int] = set()  # ids of buffers that norms have moved together, once per window
        self._inside = False  # whether micro-batches meet inside the model
        self._recomputed = False  # whether the latest window was to run it again
        self._valued = True  # whether its first run can do without saving anything
        self._compared = False  # whether its second run has been seen to give what the first gave
        self._settled = self._valued, self._inside  # as they were when a window last went well
        self._tight = False  # whether keeping all activations has been too much
        self._offload: Offload | None = None
        self._waiting = Waiting()
        self._of_a_sample: float | None = None  # bytes of the latest window's that wait

    def run(self, window: Window, micro_batches: Iterator[Any], sizes: Sequence[int]) -> list[Any]:
        """Add all micro-batches to the window; returns their extras."""
        whole = self._runner.whole
        if whole is None or window.ranks is not None:  # ranks meet inside, and no graph waits for others
            return self._launched(window, micro_batches, sizes)
        whole.held = self._constants.all
        kind = f"{self._activations(len(sizes))} {tuple(sizes)}"
        return whole.run(window, micro_batches, kind, self._runner.state, partial(self._launched, sizes=sizes))

    def _launched(self, window: Window, micro_batches: Iterator[Any], sizes: Sequence[int]) -> list[Any]:
        activations = self._activations(len(sizes))
        offload: Offload | None = None
        around: AbstractContextManager[None] = nullcontext()
        self._recomputed = activations == "recompute"
        saves_memory = self._device.type == "cuda" and (activations != "keep" or window.recording)
        leaving = workspaces_given_back() if saves_memory else None
        calls, of_all = cast("Calls | None", None), list[bool]()
        if self._recomputed and self._valued:
            own = frozenset(map(id, window.gradients.parameters))
            # By a proxy: a window keeps the error that it failed with, that holds a graph, and the graph these calls.
            wanted = partial(self._runner.wanted, weakref.proxy(window))
            calls = Calls(wanted, own, comparing=not self._compared)
        if self._recomputed:
            around = recomputing(self._models, calls)
        elif activations == "offload":
            offload, around = self._offloading(sizes)

        def task() -> Any:
            worker = current()
            assert worker is not None  # noqa: S101 - a task runs on a worker
            saving = offload.recipes.hooks() if offload is not None else nullcontext()
            micro_batch = next(micro_batches)  # one task at a time: each takes its own
            with saving:
                loss, extra = self._runner.loss(micro_batch)
            del micro_batch
            terms = self._runner.read(loss)
            _end_of_drawing(worker)
            backwards = worker.meet("the end of forward", (loss, terms), turn)
            del loss, terms
            backwards.pop(worker.number)()
            if leaving is not None:
                leaving()
            return extra

        def turn(found: list[tuple[Tensor, list[Term]]]) -> dict[int, Callable[[], None]]:
            worker = current()
            assert worker is not None  # noqa: S101 - the last of them
            _refuse_changes(worker)
            worker.round.is_backward = True
            if calls is not None:
                calls.refuse_changed()
            spared.enter_context(self._runner.sparing_others())  # known to be needed by now
            if offload is not None:
                offload.turn()
            of_all.append(not self._looked and len(found) > 1 and _is_of_all_alone(found))
            return dict(enumerate(self._runner.weighed(window, found)))

        with around, ExitStack() as spared:
            round_ = self._round(sizes)
            round_.offload, round_.free_workspaces = offload, leaving
            self._add_ranks(round_, window.ranks)
            extras = self._side_by_side([task] * len(sizes), round_)
        if window.ranks is not None:
            window.ranks.elsewhere = False  # all have met for the last time, and come to their statements
        _tell_of_cost(of_all)
        self._compared = self._compared or calls is not None
        self._settled, self._looked = (self._valued, self._inside), True
        return extras

    def _offloading(self, sizes: Sequence[int]) -> tuple[Offload, AbstractContextManager[None]]:
        replayed = self._runner.whole is not None
        self._offload = self._offload or Offload(self._device, sparing=replayed)
        waiting = _WAITING_REPLAYED if replayed else _WAITING
        limit = None if self._of_a_sample is None else int(waiting * self._of_a_sample * max(sizes))
        return self._offload, self._offload.window(limit, self._own_tensors(), tuple(sizes))

    def each(
        self,
        evaluate: Callable[[Any], Result],
        micro_batches: Sequence[Any],
        sizes: Sequence[int],
        *,
        resting: bool = False,
    ) -> list[Result]:
        """Evaluate something of some micro-batches that are one batch together.

        Where it is `resting`, BatchNorm uses what it has learned, and micro-batches meet there for nothing.
        """

        def task(micro_batch: Any) -> Callable[[], Result]:
            def run() -> Result:
                found = evaluate(micro_batch)
                _end_of_drawing(current())
                _refuse_changes(current())
                return found

            return run

        round_ = self._round(sizes)
        round_.mode = "resting" if resting else "train"
        return self._side_by_side([task(each) for each in micro_batches], round_)

    def rehearse(self, run: Callable[[Any], object], micro_batch: Any, size: int) -> None:
        """Run one micro-batch alone that is meant to run beside others."""
        round_ = self._round([size])
        round_.mode, round_.same_terms, round_.moved_statistics = "probe", set(), set()
        run_alone(self._crew, partial(run, micro_batch), self._device, round_)

    def fall_back(self, error: BaseException, *, out_of_memory: bool) -> bool:
        """Have activations stay elsewhere, where that is ours to choose; returns whether to run the window again."""
        again = self._elsewhere(error, out_of_memory=out_of_memory)
        if not again:  # nothing was to be gained: an error of the user's own says nothing of later windows
            self._valued, self._inside = self._settled
        return again

    def _elsewhere(self, error: BaseException, *, out_of_memory: bool) -> bool:
        same_again = isinstance(error, MeetsInside | RunsDiffer)  # torch's own way of running again would find the same
        if self._recomputed and self._valued and not out_of_memory and not same_again:
            self._valued = not isinstance(error, Exception)  # what is the user's own error comes once more
            return not self._valued
        if self._given != "auto":
            return False
        # A model's own loss is in what is run again, so its count cannot be read without running it; and a model that
        # changes its input cannot run again. What is the user's own error comes once more.
        if (
            self._recomputed
            and not self._inside
            and isinstance(error, MeetsInside | RunsDiffer | UnreadableLoss | RuntimeError)
        ):
            self._inside = not out_of_memory
            return self._inside
        if out_of_memory and not self._tight and self._device.type == "cuda":
            self._tight = True
            return True
        return False

    def make_room(self, micro_batch: Callable[[], Any], sizes: Sequence[int], shape: str, budget: int) -> None:
        """Decide where activations wait; raise before the window begins where the host's memory will not hold them.

        `budget` is what may be used on the device. What a micro-batch's activations take is measured on one, once for
        samples of a `shape`.
        """
        if len(sizes) == 1 or self._given == "keep" or self._activations(len(sizes)) == "recompute":
            return
        on_device = self._device.type == "cuda"
        host = host_available() + (self._offload.held if self._offload is not None else 0)
        there = host if on_device else min(host, max(budget - resident(), 0))
        free = budget - torch.cuda.memory_allocated(self._device) if on_device else there
        self._of_a_sample = self._waiting.of(
            shape,
            lambda: self._measured(micro_batch(), sizes[0]) / sizes[0],
            lambda each: each * sum(sizes) <= min(_FILLED * free, there),
        )
        needed = int(self._of_a_sample * sum(sizes))
        if on_device:
            self._tight = self._tight or needed > _FILLED * free
        if not on_device or self._activations(len(sizes)) == "offload":
            refuse_too_much(sum(sizes), needed, there, budgeted=there < host)

    def _measured(self, micro_batch: Any, size: int) -> int:
        """Return how much autograd saves of one micro-batch."""
        found: list[int] = []
        with untouched(self._models):
            self.rehearse(
                lambda each: found.append(saved_bytes(lambda: self._runner.loss(each), self._models, self._device)),
                micro_batch,
                size,
            )
        return found[0]

    def _activations(self, micro_batches: int) -> Literal["keep", "recompute", "offload"]:
        if micro_batches == 1:
            return "keep"
        if self._given == "offload" and self._device.type != "cuda":
            return "keep"  # a host's memory is where it is
        if self._given != "auto":
            return self._given
        if not self._inside and not self._meets_in_model():
            return "recompute"
        return "offload" if self._tight else "keep"

    def _own_tensors(self) -> Callable[[], Iterator[Tensor]]:
        """Return what tells the models' tensors of the moment; which modules they have is looked up once."""
        modules = (module for model in self._models for module in model.modules())
        own = [each for module in modules for each in (module._parameters, module._buffers)]  # noqa: SLF001 - quicker
        return lambda: (tensor for each in own for tensor in each.values() if tensor is not None)

    def _meets_in_model(self) -> bool:
        return self._norms_meet and any(arguments.is_awake(module) for _, module in arguments.batch_norms(self._models))

    def _round(self, sizes: Sequence[int]) -> Round:
        return Round(
            tuple(sizes),
            norms=norms_of(self._models) if self._norms_meet else None,
            moved_statistics=self.statistics,
            same_terms=self._same_terms,
            constants=self._constants,
        )

    def _add_ranks(self, round_: Round, ranks: Ranks | None) -> None:
        """Learn how many samples other ranks have, before micro-batches meet those; in norms without a word."""
        if ranks is None:
            return
        own = sum(round_.sizes)
        with rank_collectives.collective(ranks, "the beginning of a window", self._device):  # or another is elsewhere
            every = rank_collectives.numbers(ranks, own, self._device)
        ranks.elsewhere = self._meets_in_model()
        round_.ranks, round_.all_samples, round_.samples_before = ranks, sum(every), sum(every[: ranks.rank])

    def _side_by_side(self, tasks: Sequence[Callable[[], Result]], round_: Round) -> list[Result]:
        if len(tasks) == 1:
            return run_alone(self._crew, tasks[0], self._device, round_)
        own = round_.own_parameters = OwnParameters(self._models)
        # No generator of a device can be asked while its numbers are captured; a graph that draws any is not used.
        capturing = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        streams = round_.streams = Streams(frozenset() if capturing else devices_of(self._models), len(tasks))

        def with_own_numbers(number: int, task: Callable[[], Result]) -> Callable[[], Result]:
            def run() -> Result:
                streams.begin(number)
                return task()

            return run

        try:
            with batch_norm_met(), activations_known() if round_.offload is not None else nullcontext():
                numbered = [with_own_numbers(number, task) for number, task in enumerate(tasks)]
                return self._crew.run(numbered, Carried.here(self._device), round_)
        except BaseException:
            own.restore()
            raise
        finally:
            streams.close()


def run_alone(crew: Crew, task: Callable[[], Result], device: torch.device, round_: Round) -> list[Result]:
    """Run one micro-batch in a window of its own."""
    with batch_norm_met():
        return crew.run([task], Carried.here(device), round_)


def run_probe(models: Sequence[nn.Module], device: torch.device, task: Callable[[], object], size: int) -> None:
    """Run a task on one micro-batch alone, as if others were there: BatchNorm takes a single sample."""
    run_alone(Crew(), task, device, Round((size,), mode="probe", norms=norms_of(models)))


def _tell_of_cost(of_all: Sequence[bool]) -> None:
    if any(of_all):
        warnings.warn(
            "this loss is made of values of all micro-batches alone (bigbatch.across), so each micro-batch computes "
            "all of it. That is exact; a mean over rows of own samples is less work (docs/coupled.md).",
            stacklevel=outside(),
        )


def _is_of_all_alone(found: Sequence[tuple[Tensor, Sequence[Term]]]) -> bool:
    """Whether a loss is made of values of all micro-batches alone; raises where it is not the same in each."""
    if any(term.kind != "once" or term.name == "counted" for _, terms in found for term in terms):
        return False
    values = [float(loss.detach()) for loss, _ in found]
    tolerance = 1e-9 if found[0][0].dtype == torch.float64 else 1e-3
    if max(values) - min(values) > tolerance * max(*map(abs, values), 1e-30):
        raise refusals.shared_alone(values)
    return True


def _refuse_changes(worker: Worker | None) -> None:
    """A forward is over: what all micro-batches share must be as it was, and is let go."""
    if worker is not None:
        refuse_changed(worker.round.shared)
        if worker.number + 1 == worker.size:
            worker.round.shared.clear()
            if worker.round.own_parameters is not None:
                worker.round.own_parameters.refuse_others()


def _end_of_drawing(worker: Worker | None) -> None:
    """A forward is over: see whether it has drawn random numbers."""
    if worker is not None and worker.round.streams is not None:
        worker.round.streams.end(worker.number)
