"""Plan a batch: which size of micro-batch, how many steps, what it takes."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from bigbatch import arguments
from bigbatch.batch.batch import Batch
from bigbatch.batch.transfer import Mover
from bigbatch.default_loss import own_loss
from bigbatch.distributed.ddp_internals import silence
from bigbatch.distributed.discovery import data_parallel, refuse_tensor_parallelism
from bigbatch.distributed.fsdp_internals import sharded
from bigbatch.errors import ConfigurationError, LossError, OutOfMemory
from bigbatch.memory.budget import budget as bytes_of
from bigbatch.memory.budget import human, read, room
from bigbatch.memory.probe import Stage
from bigbatch.memory.search import MARGIN, Choice, Probe, choose
from bigbatch.planner.plan_report import Plan, Row, advice
from bigbatch.planner.trace import checked_loss, predict
from bigbatch.state.patch import Swap, swapped
from bigbatch.state.rng import Randomness
from bigbatch.state.scope import times_asked
from bigbatch.state.snapshot import devices_of
from bigbatch.window.awake_norms import batch_norms, is_awake
from bigbatch.window.gate import Admission

# What `silence` changes and plan restores: an Accumulator may have silenced the wrapper before.
_DDP = ("require_backward_grad_sync", "require_forward_param_sync", "_static_graph_delay_allreduce_enqueued")
_TRACED_MARGIN = 0.10  # a trace does not see what kernels allocate within themselves
_single = Swap(F, "_verify_batch_size", lambda _: lambda _: None)  # BatchNorm takes one sample, as beside others


def plan(
    model: nn.Module | Sequence[nn.Module],
    loss_fn: Callable[[Any, Any], Any] | None,
    batch: Any,
    *,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    memory: float | str | None = None,
    on_probe: Callable[[int], None] = lambda _: None,
) -> Plan:
    """Find the size of micro-batches for a batch, and say where accumulation is not needed.

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
        on_probe: called with each size before it is tried.
    """
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
    task = _Task(model, models, loss_fn or own_loss, Batch.of(batch), optimizers, device)
    with ExitStack() as stack:
        stack.callback(Randomness(devices).restore)  # a trace, too, runs the user's code, and that of optimizers
        stack.enter_context(swapped(_single))
        for _, norm in batch_norms(models):
            stack.callback(setattr, norm, "track_running_stats", norm.track_running_stats)
            norm.track_running_stats = False  # of the variance of one sample there is no estimate
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


class _Measuring:
    """Tries sizes on the model's own device."""

    margin, measured = MARGIN, True

    def __init__(self, task: _Task, budget: int) -> None:
        on_cuda = task.device.type == "cuda"
        self._task, self.refused = task, ""
        self.name = torch.cuda.get_device_name(task.device) if on_cuda else "this machine's CPU"
        self.notes = [] if on_cuda else ["Peaks are the whole process's: what else it holds counts, too."]
        # Gradients are there whether an optimizer is given or not; one without state stands in for it.
        trained = [p for module in task.models for p in module.parameters() if p.requires_grad]
        optimizers = task.optimizers or (torch.optim.SGD(trained, lr=0.0),)
        limit = min(budget, room(task.device).reachable)
        self._stage = Stage(task.models, optimizers, torch.float32, task.device, limit)
        self._mover, self._admission = Mover(task.device), Admission(task.models, optimizers, "exact", "")
        self.held = self._stage.held

    def probe(self, size: int) -> Probe:
        return self._stage.rehearse(size, lambda: self._run(size))

    def _run(self, size: int) -> None:
        before = times_asked()
        samples = self._mover.moved(self._task.batch.take(slice(0, size)))
        loss = checked_loss(self._task.loss_fn(self._task.model, samples))
        if times_asked() == before and not self.refused:
            try:
                with _disable_current_modes():  # as in a window
                    self._admission.reader.read(loss)
            except LossError as error:
                self.refused = f"A step would refuse this loss: {str(error).splitlines()[0]}"
                self.notes.append(self.refused)
        loss.backward()


class _Tracing:
    """Tries sizes in traces, for a GPU that is not here."""

    name, margin, measured, held, refused = "a GPU", _TRACED_MARGIN, False, 0, ""

    def __init__(self, task: _Task) -> None:
        self._task = task
        here = "this machine has no GPU"
        if task.device.type != "cpu":
            here = f"{task.device} has {human(room(task.device).reachable)}"
        self.notes = [
            f"Predicted by tracing, since {here}; {_TRACED_MARGIN:.0%} are left free for what a trace does not see.",
            "Times are not known: on the device itself, a smaller size may be as fast.",
        ]

    def probe(self, size: int) -> Probe:
        task = self._task
        traced = predict(task.model, task.loss_fn, task.batch.take(slice(0, size)), task.optimizers)
        self.held = traced.resident
        return Probe(size, traced.peak)


def _planned(task: _Task, bench: _Measuring | _Tracing, budget: int, on_probe: Callable[[int], None]) -> Plan:
    """Choose a size, and say why."""
    seen: dict[int, Probe] = {}
    choice: Choice | None = None
    total, before = task.batch.size, times_asked()

    def probe(size: int) -> Probe:
        on_probe(size)
        seen[size] = bench.probe(size)
        return seen[size]

    try:
        choice = choose(probe, total, budget, margin=bench.margin)
    except OutOfMemory as error:  # a plan that finds no size says so: that is its answer
        told = tuple(str(error).splitlines())
    else:
        norms = [f"BatchNorm ('{name}')" for name, module in batch_norms(task.models) if is_awake(module)]
        if norms or times_asked() != before:
            choice, note = _coupled(choice, norms[0] if norms else "across")
            bench.notes.append(note)
        told = advice(choice)
    limit = int(budget * (1 - bench.margin))
    rows = [
        Row(
            size=size,
            steps=-(-total // size),
            predicted_bytes=None if bench.measured else found.peak_bytes,
            measured_bytes=found.peak_bytes if bench.measured else None,
            seconds_per_sample=found.seconds / size if found.seconds and found.peak_bytes else None,
            fits=found.fits(limit),
        )
        for size, found in sorted(seen.items())
    ]
    return Plan(
        batch_size=total,
        size=choice.size if choice else None,
        steps=choice.steps if choice else None,
        peak_bytes=choice.peak_bytes if choice else None,
        budget=budget,
        resident_bytes=bench.held,
        device=bench.name,
        measured=bench.measured,
        rows=tuple(rows),
        advice=told,
        notes=tuple(bench.notes),
        refused=bool(bench.refused),
    )


def _coupled(choice: Choice, by: str) -> tuple[Choice, str]:
    """Return the size to take where samples are coupled, and what waits because of it."""
    if choice.fits_whole:
        # Micro-batches that wait for each other gain nothing, and alone none has shown how long that takes.
        choice = replace(choice, size=choice.largest, probes=tuple(replace(p, seconds=None) for p in choice.probes))
        return (
            choice,
            f"{by} couples the samples: BigStep takes all at once where that fits; an Accumulator refuses it.",
        )
    known = [(p.size, p.peak_bytes) for p in choice.probes if p.peak_bytes is not None]
    (size, least), (larger, most) = known[0], known[-1]
    all_of_them = human((most - least) / max(larger - size, 1) * choice.largest)
    return choice, (
        f"{by} couples the samples, so BigStep runs micro-batches in lock-step. Where they wait for each other inside "
        f"the model, the activations of all, about {all_of_them}, wait beside these peaks, "
        "on the device or in host memory. An Accumulator refuses it."
    )
