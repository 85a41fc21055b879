"""Plan a batch: which size of micro-batch, how many steps, what it takes."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
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
from bigbatch.memory.budget import human, read, resident, room
from bigbatch.memory.probe import Stage
from bigbatch.memory.search import MARGIN, Choice, Probe, choose
from bigbatch.planner.coupled import Coupling
from bigbatch.planner.plan_report import REFUSED, Plan, Row, advice, advice_when_nothing_fits
from bigbatch.planner.trace import checked_loss, optimizer_bytes, predict, wider
from bigbatch.state.rng import Randomness
from bigbatch.state.snapshot import devices_of
from bigbatch.window.gate import Admission

# What `silence` changes and plan restores: an Accumulator may have silenced the wrapper before.
_DDP = ("require_backward_grad_sync", "require_forward_param_sync", "_static_graph_delay_allreduce_enqueued")
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
    on_probe: Callable[[int], None] = lambda _: None,
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
    devices = devices_of(models)
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices))) or "no parameters"
        raise ConfigurationError("plan needs the model on one device.", found=found, fix="model.to('cuda')")
    (device,) = devices
    whole = Batch.of(batch)
    coupling = Coupling(models, _tensors(batch), whole.size)
    task = _Task(model, models, loss_fn or own_loss, whole, optimizers, device, coupling)
    with ExitStack() as stack:
        stack.callback(Randomness(devices).restore)  # a trace, too, runs the user's code, and that of optimizers
        for wrapper in data_parallel(models):
            stack.callback(vars(wrapper).update, {name: getattr(wrapper, name, None) for name in _DDP})
            silence(wrapper)
        budget = bytes_of(memory, device)
        fraction, asked = (1.0, 0) if memory is None else read(memory)
        is_here = fraction is not None or (device.type == "cuda" and asked <= room(device).reachable)
        return _planned(task, _Measuring(task, budget) if is_here else _Tracing(task), budget, on_probe)


@dataclass(frozen=True)
class _Task:
    """What is planned for."""

    model: Any
    models: Sequence[nn.Module]
    loss_fn: Callable[[Any, Any], Any]
    batch: Batch
    optimizers: Sequence[Optimizer]
    device: torch.device
    coupling: Coupling

    def loss(self, samples: Any, size: int, device: torch.device) -> Any:
        """Call the loss function on some samples."""
        return self.coupling.call(size, lambda: self.loss_fn(self.model, samples), _tensors(samples), device)


def _tensors(samples: Any) -> list[Tensor]:
    return [leaf for _, leaf in leaves(samples) if isinstance(leaf, Tensor)]


class _Measuring:
    """Tries sizes on the model's own device."""

    margin, measured = MARGIN, True

    def __init__(self, task: _Task, budget: int) -> None:
        on_cuda = task.device.type == "cuda"
        self._task, task.coupling.has_host = task, on_cuda
        self.name = torch.cuda.get_device_name(task.device) if on_cuda else "this machine's CPU"
        self.notes = [] if on_cuda else ["Peaks are the whole process's: what else it holds counts, too."]
        # Gradients are there whether an optimizer is given or not; one without state stands in for it.
        trained = [p for module in task.models for p in module.parameters() if p.requires_grad]
        optimizers = task.optimizers or (torch.optim.SGD(trained, lr=0.0),)
        limit = min(budget, room(task.device).reachable)
        self._stage = Stage(task.models, optimizers, torch.float32, task.device, limit)
        self._mover, self._admission = Mover(task.device), Admission(task.models, optimizers, "exact", "")
        self.held, self._step = _held(trained, optimizers, task.device)

    def probe(self, size: int) -> Probe:
        seen = self._stage.rehearse(size, lambda: self._run(size))
        if seen.peak_bytes is None:
            return seen
        # The step of the optimizer comes after, when activations are gone: a phase of its own.
        return replace(seen, peak_bytes=max(seen.peak_bytes, self.held + self._step))

    def _run(self, size: int) -> None:
        coupling = self._task.coupling
        is_readable = not coupling.is_new(size)
        samples = self._mover.moved(self._task.batch.take(slice(0, size)))
        loss = checked_loss(self._task.loss(samples, size, self._task.device))
        if is_readable and not coupling.asked and not any(note.startswith(REFUSED) for note in self.notes):
            try:
                with _disable_current_modes():  # as in a window
                    self._admission.read(loss)
            except LossError as error:
                self.notes.append(f"{REFUSED}: {str(error).splitlines()[0]}")
        loss.backward()


class _Tracing:
    """Tries sizes in traces, for a GPU that is not here."""

    name, margin, measured, held = "a GPU", TRACED_MARGIN, False, 0

    def __init__(self, task: _Task) -> None:
        self._task = task
        here = "this machine has no GPU"
        if task.device.type != "cpu":
            here = f"{task.device} has {human(room(task.device).reachable)}"
        self.notes = [
            f"Predicted by tracing, since {here}; {TRACED_MARGIN:.0%} are left free for what a trace does not see.",
            "Times are not known: on the device itself, a smaller size may be as fast.",
        ]

    def probe(self, size: int) -> Probe:
        task, on_cpu = self._task, torch.device("cpu")
        while True:
            samples = task.batch.take(slice(0, size))
            traced = predict(task.model, lambda _, given: task.loss(given, size, on_cpu), samples, task.optimizers)
            if not task.coupling.is_new(size):  # else it has just shown that it asks for other samples
                self.held = traced.resident
                return Probe(size, traced.peak)


def _held(trained: Sequence[Tensor], optimizers: Sequence[Optimizer], device: torch.device) -> tuple[int, int]:
    """Return what is held whatever the size, and what a step of the optimizers holds beside it for a while."""
    target: Literal["cuda", "cpu"] = "cuda" if device.type == "cuda" else "cpu"
    there = torch.cuda.memory_allocated(device) if target == "cuda" else resident()
    gradients = [p for p in trained if p.grad is None]
    try:
        state, while_stepping = optimizer_bytes(optimizers, target)
    except Exception:  # noqa: BLE001 - an optimizer may do in its step whatever it likes
        state, while_stepping = 2 * sum(p.nbytes for o in optimizers for g in o.param_groups for p in g["params"]), 0
    kept = [v for o in optimizers for each in o.state.values() for v in each.values() if isinstance(v, Tensor)]
    to_come = max(0, state - sum(v.nbytes for v in kept))
    return there + sum(p.nbytes for p in gradients) + wider(gradients) + to_come, while_stepping


def _planned(task: _Task, bench: _Measuring | _Tracing, budget: int, on_probe: Callable[[int], None]) -> Plan:
    """Choose a size, and say why."""
    seen: dict[int, Probe] = {}
    choice: Choice | None = None
    coupling, total, limit = task.coupling, task.batch.size, int(budget * (1 - bench.margin))

    def probe(size: int) -> Probe:
        if size not in seen:
            on_probe(size)
            seen[size] = bench.probe(size)
        return seen[size]

    def with_others(size: int) -> Probe:
        found = probe(size)
        alone = found.peak_bytes
        return found if alone is None else replace(found, peak_bytes=alone + (coupling.beside(size) or 0))

    # A plan that finds no size says so: that is its answer, not an error. Of sizes beside which others do not fit,
    # one that fits alone is told.
    for each in (with_others, probe):
        with suppress(OutOfMemory):
            choice = choose(each, total, budget, margin=bench.margin)
            choice = replace(choice, probes=tuple(seen[p.size] for p in choice.probes))
            break
    if choice and choice.fits_whole and coupling.inside:
        # Micro-batches that wait for each other gain nothing, and alone none has shown how long that takes.
        choice = replace(choice, size=total, probes=tuple(replace(p, seconds=None) for p in choice.probes))
    waits = choice is not None and choice.steps > 1

    def row(found: Probe) -> Row:
        told = None if choice is None else choice.predicted(found.size)
        beside = coupling.beside(found.size) if waits else None
        return Row(
            size=found.size,
            steps=-(-total // found.size),
            predicted_bytes=told if bench.measured else found.peak_bytes,
            measured_bytes=found.peak_bytes if bench.measured else None,
            seconds_per_sample=found.seconds / found.size if found.seconds and found.peak_bytes else None,
            fits=found.fits(limit - (beside or 0)),
            waiting_bytes=beside,
        )

    told = advice(choice, bench.held) if choice else advice_when_nothing_fits(bench.held, seen[1].peak_bytes, limit)
    found = Plan(
        batch_size=total,
        size=choice.size if choice else None,
        steps=choice.steps if choice else None,
        peak_bytes=choice.peak_bytes if choice else None,
        budget=budget,
        resident_bytes=bench.held,
        device=bench.name,
        measured=bench.measured,
        rows=tuple(row(seen[size]) for size in sorted(seen)),
        advice=told,
        notes=tuple(bench.notes),
    )
    return replace(found, notes=(*found.notes, *coupling.notes(found)))
