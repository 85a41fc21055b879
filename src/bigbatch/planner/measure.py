"""Plan a batch: which size of micro-batch, how many steps, what it takes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from bigbatch import arguments
from bigbatch.batch.batch import Batch
from bigbatch.batch.transfer import Mover
from bigbatch.batch.tree import leaves
from bigbatch.default_loss import own_loss
from bigbatch.distributed.ddp_internals import silence
from bigbatch.distributed.discovery import data_parallel, refuse_tensor_parallelism
from bigbatch.distributed.fsdp_internals import sharded
from bigbatch.errors import ConfigurationError, LossError, OutOfMemory
from bigbatch.memory.budget import budget as bytes_of
from bigbatch.memory.budget import human, read, room
from bigbatch.memory.host import resident
from bigbatch.memory.meter import saved_bytes
from bigbatch.memory.probe import Stage
from bigbatch.memory.search import MARGIN, Choice, Probe, choose, even_sizes
from bigbatch.planner.coupled import Coupling, Waiting, coupled_notes
from bigbatch.planner.plan_report import REFUSED, Plan, Row, advice, advice_when_nothing_fits
from bigbatch.planner.trace import Prediction, optimizer_bytes, predict, wider
from bigbatch.state.rng import Randomness
from bigbatch.state.snapshot import devices_of
from bigbatch.window.gate import Admission
from bigbatch.wording import speaking_of

TRACED_MARGIN = 0.10  # a trace does not see what kernels allocate within themselves
_DDP = ("require_backward_grad_sync", "require_forward_param_sync", "_static_graph_delay_allreduce_enqueued")
_FURTHER = 3  # probes where others wait beside


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
    """Plan, and call `on_probe` with the size of each probe before it is made."""
    models = arguments.models(model, ranks=True)
    refuse_tensor_parallelism(models)
    optimizers = () if optimizer is None else arguments.optimizers(optimizer, models)
    if sharded(models):
        raise ConfigurationError(
            "plan measures in one process, and this model is sharded over several (fully_shard).",
            fix='plan(model, loss_fn, batch, memory="24GiB")  before it is sharded; without the GPU, too',
        )
    device, coupling = _device(models), Coupling(models)
    work = _Work(model, models, optimizers, loss_fn or own_loss, Batch.of(batch), device, coupling)
    randomness = Randomness(devices_of(models))  # a trace, too, runs the user's code, and that of optimizers
    try:
        with _without_reduction(models):
            budget = bytes_of(memory, device)
            bench = _tracing(work) if memory is not None and _must_trace(memory, device) else _measuring(work, budget)
            return _planned(work, bench, budget, on_probe or (lambda _: None))
    finally:
        randomness.restore()


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
    device: torch.device
    coupling: Coupling
    saved: dict[int, int] = field(default_factory=dict)  # bytes that autograd saves of a micro-batch, by its size

    def forward(self, samples: Any, size: int, device: torch.device) -> Any:
        """Call the loss function on some samples; of a coupled model note, once, what autograd saves beside them."""
        returned: list[Any] = []
        with self.coupling.watched():
            if not self.is_new(size):
                return self.loss(self.model, samples)
            given = _tensors(samples)
            found = saved_bytes(lambda: returned.append(self.loss(self.model, samples)), self.models, device, given)
            self.saved[size] = found
            return returned.pop()

    def is_new(self, size: int) -> bool:
        """Whether what autograd saves is to be noted: by hooks, behind which no reader looks for counts."""
        return self.coupling.inside and size not in self.saved


@dataclass(frozen=True)
class _Bench:
    """Where sizes are tried: on the model's own device, or in a trace for one that is not here."""

    device: str
    margin: float
    measured: bool
    has_host: bool  # whether there is a host's memory beside the device's
    probe: Callable[[int], Probe]
    resident: Callable[[], int]
    notes: list[str] = field(default_factory=list)


def _must_trace(memory: float | str, device: torch.device) -> bool:
    """Tell whether the memory asked for is that of a device which is not here."""
    fraction, asked = read(memory)
    return fraction is None and (device.type != "cuda" or asked > room(device).reachable)


def _measuring(work: _Work, budget: int) -> _Bench:
    """Try sizes on the model's own device."""
    device, on_cuda = work.device, work.device.type == "cuda"
    # Gradients are there whether an optimizer is given or not; one without state stands in for it.
    trained = [p for module in work.models for p in module.parameters() if p.requires_grad]
    optimizers = work.optimizers or (torch.optim.SGD(trained, lr=0.0),)
    stage = Stage(work.models, optimizers, torch.float32, device, min(budget, room(device).reachable))
    mover, admission = Mover(device), Admission(work.models, optimizers, "exact", "")
    held, while_stepping = _held(work.models, optimizers, device)
    notes = [] if on_cuda else ["Peaks are the whole process's: what else it holds counts, too."]

    def probe(size: int) -> Probe:
        def run() -> None:
            is_hooked = work.is_new(size)
            returned = work.forward(mover.moved(work.batch.take(slice(0, size))), size, device)
            loss: Tensor = returned[0] if isinstance(returned, tuple) else returned
            with speaking_of("BigStep"):
                arguments.loss(loss)
            if not is_hooked and not work.coupling.asked and not any(note.startswith(REFUSED) for note in notes):
                with _disable_current_modes():  # as in a window
                    notes.extend(_refusal(admission, loss))
            loss.backward()

        seen = stage.rehearse(size, run)
        if seen.peak_bytes is not None:
            # The step of the optimizer comes after, when activations are gone: a phase of its own.
            seen = replace(seen, peak_bytes=max(seen.peak_bytes, held + while_stepping))
        return seen

    name = torch.cuda.get_device_name(device) if on_cuda else "this machine's CPU"
    return _Bench(name, MARGIN, True, on_cuda, probe, lambda: held, notes)  # noqa: FBT003


def _tracing(work: _Work) -> _Bench:
    """Try sizes in traces, for a GPU that is not here."""
    traced: list[Prediction] = []
    here = "this machine has no GPU"
    if work.device.type != "cpu":
        here = f"{work.device} has {human(room(work.device).reachable)}"

    def probe(size: int) -> Probe:
        def loss_fn(_: Any, samples: Any) -> Any:
            return work.forward(samples, size, torch.device("cpu"))

        traced.append(predict(work.model, loss_fn, work.batch.take(slice(0, size)), work.optimizers))
        return Probe(size, traced[-1].peak)

    notes = [
        f"Predicted by tracing, since {here}; {TRACED_MARGIN:.0%} are left free for what a trace does not see.",
        "Times are not known: on the device itself, a smaller size may be as fast.",
    ]
    return _Bench("a GPU", TRACED_MARGIN, False, True, probe, lambda: traced[0].resident, notes)  # noqa: FBT003


def _tensors(samples: Any) -> list[Tensor]:
    return [leaf for _, leaf in leaves(samples) if isinstance(leaf, Tensor)]


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
        state, while_stepping = 2 * sum(p.nbytes for o in optimizers for g in o.param_groups for p in g["params"]), 0
    kept = [v for o in optimizers for each in o.state.values() for v in each.values() if isinstance(v, Tensor)]
    to_come = max(0, state - sum(v.nbytes for v in kept))
    return there + sum(p.nbytes for p in gradients) + wider(gradients) + to_come, while_stepping


def _planned(work: _Work, bench: _Bench, budget: int, on_probe: Callable[[int], None]) -> Plan:
    """Choose a size, and say why."""
    seen: dict[int, Probe] = {}
    choice: Choice | None = None
    waiting: Waiting | None = None

    def probe(size: int) -> Probe:
        on_probe(size)
        seen[size] = bench.probe(size)
        return seen[size]

    # A plan that finds no size says so: that is its answer, not an error.
    with suppress(OutOfMemory):
        choice = choose(probe, work.batch.size, budget, margin=bench.margin)
        if choice.fits_whole and work.coupling.inside:
            # Micro-batches that wait for each other gain nothing, and alone none has shown how long that takes.
            untimed = tuple(replace(each, seconds=None) for each in choice.probes)
            choice = replace(choice, size=choice.largest, probes=untimed)
        if choice.steps > 1 and choice.size in work.saved:
            whole = _tensors(work.batch.take(slice(None))) if bench.has_host else []  # copied to a device
            of_a_sample, samples = work.saved[choice.size] / choice.size, sum(leaf.nbytes for leaf in whole)
            waiting = Waiting(of_a_sample, samples, work.batch.size, at_norms=bool(work.coupling.norms))
            choice = _leaving_room(choice, waiting, probe) if bench.has_host else choice
    probes = [seen[size] for size in sorted(seen)]
    limit, held = int(budget * (1 - bench.margin)), bench.resident()
    found = Plan(
        batch_size=work.batch.size,
        size=choice.size if choice else None,
        steps=choice.steps if choice else None,
        peak_bytes=choice.peak_bytes if choice else None,
        budget=budget,
        resident_bytes=held,
        device=bench.device,
        measured=bench.measured,
        rows=tuple(_row(each, choice, limit, bench, waiting, work.batch.size) for each in probes),
        advice=advice(choice, held) if choice else advice_when_nothing_fits(held, probes[0].peak_bytes, limit),
        notes=tuple(bench.notes),
    )
    return replace(found, notes=(*found.notes, *coupled_notes(work.coupling, found, waiting)))


def _row(  # noqa: PLR0917
    probe: Probe, choice: Choice | None, limit: int, bench: _Bench, waiting: Waiting | None, batch_size: int
) -> Row:
    steps = -(-batch_size // probe.size)
    beside = waiting.beside(probe.size) if waiting and bench.has_host and steps > 1 else None
    told = choice.predicted(probe.size) if choice else None
    return Row(
        size=probe.size,
        steps=steps,
        predicted_bytes=told if bench.measured else probe.peak_bytes,
        measured_bytes=probe.peak_bytes if bench.measured else None,
        seconds_per_sample=probe.seconds / probe.size if probe.seconds and probe.peak_bytes else None,
        fits=probe.fits(limit - (beside or 0)),
        waiting_bytes=beside,
    )


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
            "plan needs the model on one device.",
            found=", ".join(sorted(map(str, found))) or "no parameters",
            fix="model.to('cuda')",
        )
    return next(iter(found))
