"""Plan a batch: which size of micro-batch, how many steps, what it takes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from bigbatch import arguments
from bigbatch.batch.transfer import Mover
from bigbatch.batch.tree import Batch
from bigbatch.default_loss import own_loss
from bigbatch.distributed.fsdp_internals import sharded
from bigbatch.distributed.wrappers import data_parallel, silence
from bigbatch.errors import ConfigurationError, LossError, OutOfMemory
from bigbatch.lockstep.lone import Lone
from bigbatch.memory.budget import budget as bytes_of
from bigbatch.memory.budget import human, read, room
from bigbatch.memory.host import resident
from bigbatch.memory.probe import Stage
from bigbatch.memory.search import MARGIN, Choice, Probe, choose, even_sizes
from bigbatch.planner.coupled import awake_norms, coupled_notes, single_samples
from bigbatch.planner.plan_report import REFUSED, Plan, Row, advice, advice_when_nothing_fits
from bigbatch.planner.trace import Prediction, optimizer_bytes, predict, size_of, wider
from bigbatch.planner.waiting import Asking, Saved, Waiting, saved
from bigbatch.planner.waiting import bytes_of as samples_of
from bigbatch.state.snapshot import Randomness, devices_of, untouched
from bigbatch.window.gate import Admission
from bigbatch.wording import speaking_of

_DDP = ("require_backward_grad_sync", "require_forward_param_sync", "_static_graph_delay_allreduce_enqueued")
_FURTHER = 3  # probes where others wait beside
TRACED_MARGIN = 0.10  # a trace does not see what kernels allocate within themselves


def plan(
    model: nn.Module | Sequence[nn.Module],
    loss_fn: Callable[[Any, Any], Any] | None,
    batch: Any,
    *,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    memory: float | str | None = None,
) -> Plan:
    """Find the size of micro-batches for a batch, and say when accumulation is not the answer.

        print(bigbatch.plan(model, loss_fn, batch, optimizer=optimizer))
        print(bigbatch.plan(model, loss_fn, batch, optimizer=optimizer, memory="24GiB"))  # also without that GPU

    It measures on the model's own device, in six probes or less (ten where memory runs out on the way), and leaves
    model, gradients, buffers, optimizer and random generators as they were. Where the memory asked for is not there (a
    CPU alone and a GPU's bytes, or more bytes than this GPU has), it predicts by tracing.

    A model in DDP is planned by each rank alone; one that is sharded with `fully_shard` is planned before that.

    Args:
        model: on its device; one or several, as `loss_fn` takes them.
        loss_fn: called as `loss_fn(model, micro_batch)`; None: `model(**micro_batch).loss`.
        batch: all samples of one update, on any device; in DDP, this rank's part.
        optimizer: whose state is to fit, too. It need not have stepped.
        memory: a fraction, bytes or text such as "24GiB"; None: what this process holds and what is free.
    """
    return make_plan(model, loss_fn, batch, optimizer=optimizer, memory=memory)


def make_plan(
    model: Any,
    loss_fn: Callable[[Any, Any], Any] | None,
    batch: Any,
    *,
    optimizer: Any = None,
    memory: float | str | None = None,
    on_probe: Callable[[int], None] | None = None,
) -> Plan:
    """Plan, and tell `on_probe` the size of each probe before it is made."""
    models = arguments.models(model, ranks=True)
    optimizers = () if optimizer is None else arguments.optimizers(optimizer, models)
    _refuse_shards(models)
    device = _device(models)
    loss, asking = loss_fn or own_loss, Asking(models)
    work = _Work(model, models, optimizers, loss, Batch.of(batch), on_probe or (lambda _: None), asking)
    budget, tracing = bytes_of(memory, device), memory is not None and _must_trace(memory, device)
    randomness = Randomness(devices_of(models))  # a trace, too, runs the user's code, and that of optimizers
    try:
        with _without_reduction(models):
            found, waiting = _traced(work, budget, device) if tracing else _measured(work, budget, device)
        said = coupled_notes(models, found, inside=work.asking.inside, waiting=waiting)
        return replace(found, notes=(*found.notes, *said))
    finally:
        randomness.restore()


def _refuse_shards(models: Sequence[nn.Module]) -> None:
    """Refuse models whose every pass needs the other ranks, which do not plan."""
    if sharded(models):
        raise ConfigurationError(
            "plan measures in one process, and this model is sharded over several (fully_shard).\n\n"
            'Plan it before it is sharded; without the GPU, too:  plan(model, loss_fn, batch, memory="24GiB")'
        )


@contextmanager
def _without_reduction(models: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, DDP neither reduces nor broadcasts; afterwards it goes on as before."""
    wrappers = data_parallel(models)
    before = [{name: getattr(wrapper, name, None) for name in _DDP} for wrapper in wrappers]
    for wrapper in wrappers:
        silence(wrapper)
    try:
        yield
    finally:
        for wrapper, settings in zip(wrappers, before, strict=True):
            vars(wrapper).update(settings)


@dataclass(frozen=True)
class _Work:
    """What is planned for."""

    model: Any
    models: Sequence[nn.Module]
    optimizers: Sequence[Optimizer]
    loss: Callable[[Any, Any], Any]
    batch: Batch
    on_probe: Callable[[int], None]
    asking: Asking

    @property
    def waits(self) -> bool:
        """Whether micro-batches wait for each other inside of a model."""
        return self.asking.inside or self.norms

    @property
    def norms(self) -> bool:
        """Whether they do so at norms."""
        return bool(awake_norms(self.models))

    def waiting(self, saved: Saved, *, copied: bool) -> Waiting:
        """Say what waits, by what is saved of a micro-batch; samples do where they are `copied` to a device."""
        samples = samples_of(self.batch.take(slice(None))) if copied else 0
        return Waiting(saved, samples, self.batch.size, limited=self.norms)


def _must_trace(memory: float | str, device: torch.device) -> bool:
    """Tell whether the memory asked for is that of a device which is not here."""
    fraction, asked = read(memory)
    if fraction is not None:
        return False
    return device.type != "cuda" or asked > room(device).reachable


def _measured(work: _Work, budget: int, device: torch.device) -> tuple[Plan, Waiting | None]:
    # Gradients are there whether an optimizer is given or not; one without state stands in for it.
    trained = [p for module in work.models for p in module.parameters() if p.requires_grad]
    optimizers = work.optimizers or (torch.optim.SGD(trained, lr=0.0),)
    stage = Stage(work.models, optimizers, torch.float32, device, min(budget, room(device).reachable))
    mover, alone = Mover(device), Lone(work.models, device)
    admission = Admission(work.models, optimizers, "exact", "")
    refusals: list[str] = []
    held, while_stepping = _held(work.models, optimizers, device)

    def probe(size: int) -> Probe:
        def run() -> None:
            with work.asking.watched():
                returned = work.loss(work.model, mover.moved(work.batch.take(slice(0, size))))
            loss: Tensor = returned[0] if isinstance(returned, tuple) else returned
            with speaking_of("BigStep"):
                arguments.loss(loss, None)
            with _disable_current_modes():  # as in a window
                refusals.extend(_refusal(admission, loss))
            loss.backward()

        seen = stage.rehearse(size, lambda: alone.run(run, size))
        if seen.peak_bytes is not None:
            # The step of the optimizer comes after, when activations are gone: a phase of its own.
            seen = replace(seen, peak_bytes=max(seen.peak_bytes, held + while_stepping))
        return seen

    def weigh(size: int) -> Waiting:
        found: list[Saved] = []
        samples = work.batch.take(slice(0, size))

        def run() -> None:
            loss = partial(work.loss, work.model)
            found.append(saved(loss, mover.moved(samples), size, work.models, device, norms=work.norms))

        with untouched(work.models):
            alone.run(run, size)
        return work.waiting(found[0], copied=device.type == "cuda")

    on_cuda = device.type == "cuda"
    found = _search(work, probe, budget, MARGIN, weigh, elsewhere=on_cuda)
    made = found.plan(
        device=torch.cuda.get_device_name(device) if on_cuda else "this machine's CPU",
        resident=held,
        measured=True,
        notes=(*(() if on_cuda else (_WHOLE_PROCESS,)), *refusals[:1]),
    )
    return made, found.waiting


_WHOLE_PROCESS = "Peaks are the whole process's: what else it holds counts, too."


def _refusal(admission: Admission, loss: Tensor) -> list[str]:
    """Say that a step would refuse this loss, whatever its size."""
    try:
        admission.read(loss)
    except LossError as error:
        return [f"{REFUSED}: {str(error).splitlines()[0]}"]
    return []


def _held(models: Sequence[nn.Module], optimizers: Sequence[Optimizer], device: torch.device) -> tuple[int, int]:
    """Return what is held whatever the size, and what a step of the optimizers holds beside it for a while."""
    target: Literal["cuda", "cpu"] = "cuda" if device.type == "cuda" else "cpu"
    there = torch.cuda.memory_allocated(device) if target == "cuda" else resident()
    gradients = [p for module in models for p in module.parameters() if p.requires_grad and p.grad is None]
    try:
        state, while_stepping = optimizer_bytes(optimizers, target)
    except Exception:  # noqa: BLE001 - an optimizer may do in its step whatever it likes
        state, while_stepping = size_of([p for o in optimizers for g in o.param_groups for p in g["params"]]) * 2, 0
    made = size_of([v for o in optimizers for each in o.state.values() for v in each.values() if isinstance(v, Tensor)])
    return there + size_of(gradients) + wider(gradients) + max(0, state - made), while_stepping


def _traced(work: _Work, budget: int, device: torch.device) -> tuple[Plan, Waiting | None]:
    traced: list[Prediction] = []

    def probe(size: int) -> Probe:
        with single_samples(), work.asking.watched():
            traced.append(predict(work.model, work.loss, work.batch.take(slice(0, size)), work.optimizers))
        return Probe(size, traced[-1].peak)

    def weigh(size: int) -> Waiting:
        found: list[Saved] = []

        def loss_fn(model: Any, samples: Any) -> Tensor:
            found.append(saved(partial(work.loss, model), samples, size, work.models, None, norms=work.norms))
            return torch.zeros((), requires_grad=True)  # whose backward is of no interest

        with single_samples():
            predict(work.model, loss_fn, work.batch.take(slice(0, size)))
        return work.waiting(found[0], copied=True)

    found = _search(work, probe, budget, TRACED_MARGIN, weigh, elsewhere=True)
    here = "this machine has no GPU" if device.type == "cpu" else f"{device} has {human(room(device).reachable)}"
    note = f"Predicted by tracing, since {here}; {TRACED_MARGIN:.0%} are left free for what a trace does not see."
    notes = (note, "Times are not known: on the device itself, a smaller size may be as fast.")
    return found.plan(device="a GPU", resident=traced[0].resident, measured=False, notes=notes), found.waiting


@dataclass(frozen=True)
class _Found:
    """What the probes came to."""

    batch_size: int
    budget: int
    limit: int
    probes: tuple[Probe, ...]
    choice: Choice | None
    waiting: Waiting | None = None  # inside of a model
    elsewhere: bool = False  # whether there is a host's memory beside the device's

    def plan(self, *, device: str, resident: int, measured: bool, notes: tuple[str, ...]) -> Plan:
        """Say it."""
        choice = self.choice
        nothing_fits = advice_when_nothing_fits(resident, self.probes[0].peak_bytes, self.limit)
        return Plan(
            batch_size=self.batch_size,
            size=choice.size if choice else None,
            steps=choice.steps if choice else None,
            peak_bytes=choice.peak_bytes if choice else None,
            budget=self.budget,
            resident_bytes=resident,
            device=device,
            measured=measured,
            rows=tuple(self._row(probe, measured=measured) for probe in self.probes),
            advice=advice(choice, resident) if choice else nothing_fits,
            notes=notes,
        )

    def _row(self, probe: Probe, *, measured: bool) -> Row:
        told = self.choice.predicted(probe.size) if self.choice else None
        steps = -(-self.batch_size // probe.size)
        beside = self.waiting.beside(probe.size) if self.waiting and self.elsewhere and steps > 1 else None
        return Row(
            size=probe.size,
            steps=steps,
            predicted_bytes=told if measured else probe.peak_bytes,
            measured_bytes=probe.peak_bytes if measured else None,
            seconds_per_sample=probe.seconds / probe.size if probe.seconds and probe.peak_bytes else None,
            fits=probe.peak_bytes is not None and probe.peak_bytes + (beside or 0) <= self.limit,
            waiting_bytes=beside,
        )


def _search(
    work: _Work,
    probe: Callable[[int], Probe],
    budget: int,
    margin: float,
    weigh: Callable[[int], Waiting],
    *,
    elsewhere: bool,
) -> _Found:
    seen: list[Probe] = []
    largest = work.batch.size

    def observed(size: int) -> Probe:
        work.on_probe(size)
        seen.append(probe(size))
        return seen[-1]

    choice: Choice | None = None
    waiting: Waiting | None = None
    # A plan that finds no size says so: that is its answer, not an error.
    with suppress(OutOfMemory):
        choice = choose(observed, largest, budget, margin=margin)
        if choice.fits_whole and work.waits:
            # Micro-batches that wait for each other gain nothing, and alone none has shown how long that takes.
            untimed = tuple(replace(each, seconds=None) for each in choice.probes)
            choice = replace(choice, size=choice.largest, probes=untimed)
        if choice.steps > 1 and work.waits:
            waiting = weigh(choice.size)
            if elsewhere:
                choice = _leaving_room(choice, waiting, observed)
    probes = tuple(sorted(seen, key=lambda each: each.size))
    return _Found(largest, budget, int(budget * (1 - margin)), probes, choice, waiting, elsewhere)


def _leaving_room(choice: Choice, waiting: Waiting, probe: Callable[[int], Probe]) -> Choice:
    """Take a smaller size where what waits beside the chosen one does not fit, if there is one that leaves room."""

    def over(size: int, peak: int) -> bool:
        return peak + waiting.beside(size) > choice.limit

    for _ in range(_FURTHER):
        if not over(choice.size, choice.peak_bytes):
            break
        sizes = even_sizes(choice.largest, 0, choice.size)
        size = next((s for s in reversed(sizes) if not over(s, choice.predicted(s) or choice.limit)), None)
        if size is None:
            break
        seen = next((p for p in choice.probes if p.size == size), None) or probe(size)
        if seen.peak_bytes is None:
            break
        every = {p.size: p for p in (*choice.probes, seen)}
        choice = replace(choice, size=size, probes=tuple(every[s] for s in sorted(every)))
    return choice


def _device(models: Sequence[nn.Module]) -> torch.device:
    found = devices_of(models)
    if len(found) != 1:
        raise ConfigurationError(
            f"plan needs the model on one device; found {', '.join(sorted(map(str, found))) or 'no parameters'}.\n\n"
            "Move it first: model.to('cuda')"
        )
    return next(iter(found))
