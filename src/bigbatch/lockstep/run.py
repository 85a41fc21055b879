"""Run the micro-batches of a window side by side: forward until all have a loss, then backward, meeting on the way."""

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bigbatch.caller import outside
from bigbatch.errors import LossError
from bigbatch.execute.graph_record import free_workspaces
from bigbatch.execute.micro_step import Runner
from bigbatch.lockstep import batch_norm
from bigbatch.lockstep.activations import Activations
from bigbatch.lockstep.collectives import are_the_same, refuse_changed, refuse_unlike
from bigbatch.lockstep.model_state import OwnParameters
from bigbatch.lockstep.offload_remake import activation_swaps
from bigbatch.lockstep.offload_store import Offload
from bigbatch.lockstep.recompute import Recompute
from bigbatch.lockstep.round import Constants, Round
from bigbatch.lockstep.thread_state import Carried
from bigbatch.lockstep.threads import Crew, Worker
from bigbatch.loss import refusals
from bigbatch.loss.count import Term
from bigbatch.memory.meter import saved_bytes
from bigbatch.state.patch import swapped
from bigbatch.state.rng import Streams
from bigbatch.state.snapshot import devices_of, untouched
from bigbatch.window.awake_norms import batch_norms, is_awake
from bigbatch.window.window import Window

_WAITING = 1.25  # times what autograd saves of one micro-batch: more of all others does not wait on the device
_WAITING_REPLAYED = 0.4  # likewise where windows are replayed: copies cost the host nothing then
_COMPARED = frozenset({0, 1, 2, 15, 127})  # windows in which recomputed values are compared on a device, too
Result = TypeVar("Result")
Value = TypeVar("Value")


class Together:
    """Runs micro-batches of one model in lock-step."""

    def __init__(
        self, models: Sequence[nn.Module], runner: Runner, device: torch.device, given: Any, *, norms_meet: bool = True
    ) -> None:
        """Have no threads yet; `given` says where activations stay while micro-batches wait.

        Without `norms_meet` BatchNorm is left to normalize by the micro-batch.
        """
        self._models, self._runner, self._device, self._norms_meet = models, runner, device, norms_meet
        self.where = Activations(given, device, self._meets_in_model)
        self._crew, self._constants = Crew(), Constants()
        self._windows = 0  # that went well
        self._same_terms: set[tuple[int, str]] = set()  # see `Round`
        self.statistics: set[int] = set()  # ids of buffers that norms have moved together, once per window
        self._offload: Offload | None = None

    def run(self, window: Window, micro_batches: Iterator[Any], sizes: Sequence[int]) -> list[Any]:
        """Add all micro-batches to the window; returns their extras."""
        whole = self._runner.whole
        if whole is None or window.ranks is not None:  # ranks meet inside, and no graph waits for others
            return self._launched(window, micro_batches, sizes)
        return whole.run(
            window,
            micro_batches,
            partial(self._launched, sizes=sizes),
            settings=self._runner.settings(),
            kind=f"{self.where.mode(len(sizes))} {tuple(sizes)}",
            reads=self._constants.all,
        )

    def _launched(self, window: Window, micro_batches: Iterator[Any], sizes: Sequence[int]) -> list[Any]:
        mode, round_, extras = self.where.mode(len(sizes)), self._round(sizes), [None] * len(sizes)
        if self._device.type == "cuda" and (mode != "keep" or window.recording):
            round_.free_workspaces = free_workspaces
        ranks, recompute, is_alike = window.ranks, None, False

        def forward(number: int) -> tuple[Tensor, list[Term]]:
            offload, micro_batch = round_.offload, next(micro_batches)  # one task at a time: each takes its own
            with offload.recipes.hooks() if offload is not None else nullcontext():
                loss, extras[number] = self._runner.loss(micro_batch)
            del micro_batch
            return loss, self._runner.read(loss)

        def weighed(found: list[tuple[Tensor, list[Term]]]) -> list[Callable[[], None]]:
            nonlocal is_alike
            around.enter_context(self._runner.sparing_others())  # known to be needed by now
            if round_.offload is not None:
                round_.offload.turn()
            is_alike = not self._windows and len(found) > 1 and _is_of_all_alone(found)
            return self._runner.weighed(window, found)

        self.where.recomputed = mode == "recompute"
        with ExitStack() as around:
            if mode == "recompute":
                # By a proxy: a window keeps the error that it failed with, that a graph, and the graph these calls.
                wanted = partial(self._runner.wanted, weakref.proxy(window))
                comparing = self._windows in _COMPARED and not window.recording
                recompute = Recompute(wanted, frozenset(map(id, window.gradients.parameters)), comparing)
                around.enter_context(recompute.of(self._models))
            if mode == "offload":
                around.enter_context(self._offloading(round_))
            if ranks is not None:  # learn how many samples they have, before micro-batches meet those
                with ranks.collective("the beginning of a window", self._device):  # or another is elsewhere
                    every = ranks.numbers(sum(sizes), self._device)
                ranks.elsewhere = self._meets_in_model()  # in norms without a word
                round_.ranks, round_.all_samples, round_.samples_before = ranks, sum(every), sum(every[: ranks.rank])
            self._side_by_side(forward, weighed, round_)
        if ranks is not None:
            ranks.elsewhere = False  # all have met for the last time, and come to their statements
        if is_alike:
            warnings.warn(
                "this loss is made of values of all micro-batches alone (bigbatch.across), so each micro-batch "
                "computes all of it. That is exact; a mean over rows of own samples is less work (docs/coupled.md).",
                stacklevel=outside(),
            )
        self.where.passed(recompute.calls if recompute is not None else 0)
        self._windows += 1
        return extras

    def _offloading(self, round_: Round) -> AbstractContextManager[None]:
        replayed = self._runner.whole is not None
        self._offload = round_.offload = self._offload or Offload(self._device, sparing=replayed)
        waiting, each = _WAITING_REPLAYED if replayed else _WAITING, self.where.of_a_sample
        limit = None if each is None else int(waiting * each * max(round_.sizes))
        modules = (module for model in self._models for module in model.modules())  # looked up once
        own = [each for module in modules for each in (module._parameters, module._buffers)]  # noqa: SLF001 - quicker
        kept = lambda: (tensor for each in own for tensor in each.values() if tensor is not None)  # noqa: E731
        return self._offload.window(limit, kept)

    def each(
        self,
        forward: Callable[[int], Value],
        weighed: Callable[[list[Value]], list[Callable[[], Result]]],
        sizes: Sequence[int],
        *,
        resting: bool = False,
    ) -> list[Result]:
        """Run the forward of each micro-batch, and then what `weighed` makes of all of them: each one's backward.

        Where it is `resting`, BatchNorm uses what it has learned, and micro-batches meet there for nothing.
        """
        return self._side_by_side(forward, weighed, self._round(sizes, "resting" if resting else "train"))

    def rehearse(self, run: Callable[[Any], Result], micro_batch: Any, size: int) -> Result:
        """Run one micro-batch alone as if others were there: BatchNorm takes a single sample."""
        with swapped(batch_norm.swap):
            carried, round_ = Carried.here(self._device), self._round([size], "probe")
            return self._crew.run(lambda _: run(micro_batch), carried, round_)[0]

    def make_room(self, micro_batch: Callable[[], Any], sizes: Sequence[int], shape: str, budget: int) -> None:
        """Decide where activations wait; raise before the window begins where the host's memory will not hold them."""
        if len(sizes) == 1:
            return

        def measure() -> float:
            saved = lambda each: saved_bytes(lambda: self._runner.loss(each), self._models, self._device)  # noqa: E731
            with untouched(self._models):
                return self.rehearse(saved, micro_batch(), sizes[0]) / sizes[0]

        pinned = self._offload.memory.held if self._offload is not None else 0
        self.where.make_room(measure, sum(sizes), shape, budget=budget, pinned=pinned)

    def _meets_in_model(self) -> bool:
        return self._norms_meet and any(is_awake(module) for _, module in batch_norms(self._models))

    def _round(self, sizes: Sequence[int], mode: Any = "train") -> Round:
        norms = batch_norm.norms_of(self._models) if self._norms_meet else None
        return Round(tuple(sizes), mode, norms, self.statistics, self._same_terms, self._constants)

    def _side_by_side(
        self,
        forward: Callable[[int], Value],
        weighed: Callable[[list[Value]], list[Callable[[], Result]]],
        round_: Round,
    ) -> list[Result]:
        """Run each forward, a barrier at which all values are weighed, and each backward."""
        several = len(round_.sizes) > 1
        own = OwnParameters(self._models if several else ())

        def turn(found: list[Value]) -> dict[int, Callable[[], Result]]:
            for each in round_.shared:
                refuse_changed(*each)
            round_.shared.clear()
            refuse_unlike(round_)
            if others := own.restore():
                raise LossError(
                    f"a parameter '{others[0]}' is another one after the forwards of a window than before: "
                    "micro-batches take turns in the midst of torch.func.functional_call or an exchange of p.data.",
                    fix="other weights with BatchNorm in evaluation mode, or a model of their own: "
                    "BigStep([model, teacher], optimizer, loss_fn)",
                )
            round_.is_backward = True
            return dict(enumerate(weighed(found)))

        def task(worker: Worker) -> Result:
            if round_.streams is not None:
                round_.streams.begin(worker.number)
            found = forward(worker.number)
            if round_.streams is not None:
                round_.streams.end(worker.number)
            backwards = worker.meet("the end of forward", found, turn)
            del found
            result = backwards.pop(worker.number)()
            round_.free_workspaces()
            return result

        with ExitStack() as around:
            around.enter_context(swapped(batch_norm.swap, *(activation_swaps if round_.offload is not None else ())))
            if several:
                # No generator of a device can be asked while it is captured; a graph that draws any is not used.
                capturing = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
                devices = frozenset() if capturing else devices_of(self._models)
                round_.streams = around.enter_context(closing(Streams(devices, len(round_.sizes))))
            try:
                return self._crew.run(task, Carried.here(self._device), round_)
            except BaseException:
                own.restore()
                raise


def _is_of_all_alone(found: Sequence[tuple[Tensor, Sequence[Term]]]) -> bool:
    """Whether a loss is made of values of all micro-batches alone; raises where it is not the same in each."""
    if any(term.kind != "once" or term.name == "counted" for _, terms in found for term in terms):
        return False
    values = [float(loss.detach()) for loss, _ in found]
    if not are_the_same(values, found[0][0].dtype):
        raise refusals.shared_alone(values)
    return True
