"""Plan a batch: which size of micro-batch, how many steps, what it takes."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
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
from bigbatch.distributed.discovery import data_parallel, refuse_tensor_parallelism
from bigbatch.distributed.fsdp_internals import sharded
from bigbatch.distributed.team import speak
from bigbatch.errors import ConfigurationError, LossError, OutOfMemory
from bigbatch.memory.budget import budget as bytes_of
from bigbatch.memory.budget import human, read, room
from bigbatch.memory.meter import Stage
from bigbatch.memory.search import MARGIN, Choice, Probe, choose
from bigbatch.planner.plan_report import Plan, advice, row
from bigbatch.planner.trace import checked_loss, predict
from bigbatch.state.patch import Swap, swapped
from bigbatch.state.rng import Randomness
from bigbatch.state.scope import times_asked
from bigbatch.state.snapshot import devices_of
from bigbatch.window.awake_norms import batch_norms, is_awake
from bigbatch.window.gate import Admission

# What `speak` changes and plan restores: an Accumulator may have silenced the wrapper before.
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
            speak(wrapper, backward=False, forward=False)
        budget = bytes_of(memory, device)
        fraction, asked = (1.0, 0) if memory is None else read(memory)
        is_here = fraction is not None or (device.type == "cuda" and asked <= room(device).reachable)
        return _planned(task, budget, on_probe, measured=is_here)


@dataclass
class _Task:
    """What is planned for, and what was learned on the way."""

    model: Any
    models: Sequence[nn.Module]
    loss_fn: Callable[[Any, Any], Any]
    batch: Batch
    optimizers: Sequence[Optimizer]
    device: torch.device
    notes: list[str] = field(default_factory=list)
    refused: bool = False  # whether a step would refuse this loss
    held: int = 0  # bytes, at any size

    def on_the_device(self, budget: int) -> Callable[[int], Probe]:
        """Return what tries a size on the model's own device."""
        if self.device.type != "cuda":
            self.notes.append("Peaks are the whole process's: what else it holds counts, too.")
        # Gradients are there whether an optimizer is given or not; one without state stands in for it.
        trained = [p for module in self.models for p in module.parameters() if p.requires_grad]
        optimizers = self.optimizers or (torch.optim.SGD(trained, lr=0.0),)
        limit = min(budget, room(self.device).reachable)
        stage = Stage(self.models, optimizers, torch.float32, self.device, limit)
        mover, admission, self.held = Mover(self.device), Admission(self.models, optimizers, "exact", ""), stage.held

        def run(size: int) -> None:
            before = times_asked()
            loss = checked_loss(self.loss_fn(self.model, mover.moved(self.batch.take(slice(0, size)))))
            if times_asked() == before and not self.refused:
                try:
                    with _disable_current_modes():  # as in a window
                        admission.reader.read(loss)
                except LossError as error:
                    self.refused = True
                    self.notes.append(f"A step would refuse this loss: {str(error).splitlines()[0]}")
            loss.backward()

        return lambda size: stage.rehearse(size, lambda: run(size))

    def by_tracing(self) -> Callable[[int], Probe]:
        """Return what tries a size in a trace, for a GPU that is not here."""
        here = "this machine has no GPU"
        if self.device.type != "cpu":
            here = f"{self.device} has {human(room(self.device).reachable)}"
        self.notes.append(
            f"Predicted by tracing, since {here}; {_TRACED_MARGIN:.0%} are left free for what a trace does not see. "
            "Times are not known: on the device itself, a smaller size may be as fast."
        )

        def traced(size: int) -> Probe:
            found = predict(self.model, self.loss_fn, self.batch.take(slice(0, size)), self.optimizers)
            self.held = found.resident
            return Probe(size, found.peak)

        return traced


def _planned(task: _Task, budget: int, on_probe: Callable[[int], None], *, measured: bool) -> Plan:
    """Choose a size, and say why."""
    try_size = task.on_the_device(budget) if measured else task.by_tracing()
    margin = MARGIN if measured else _TRACED_MARGIN
    seen: dict[int, Probe] = {}
    choice: Choice | None = None
    total, before = task.batch.size, times_asked()

    def probe(size: int) -> Probe:
        on_probe(size)
        seen[size] = try_size(size)
        return seen[size]

    try:
        choice = choose(probe, total, budget, margin=margin)
    except OutOfMemory as error:  # a plan that finds no size says so: that is its answer
        told = tuple(str(error).splitlines())
    else:
        norms = [f"BatchNorm ('{name}')" for name, module in batch_norms(task.models) if is_awake(module)]
        if norms or times_asked() != before:
            choice = _coupled(task, choice, norms[0] if norms else "across")
        told = advice(choice)
    name = "this machine's CPU" if measured else "a GPU"
    return Plan(
        batch_size=total,
        size=choice.size if choice else None,
        steps=choice.steps if choice else None,
        peak_bytes=choice.peak_bytes if choice else None,
        budget=budget,
        resident_bytes=task.held,
        device=torch.cuda.get_device_name(task.device) if measured and task.device.type == "cuda" else name,
        measured=measured,
        rows=tuple(row(seen[size], total, int(budget * (1 - margin))) for size in sorted(seen)),
        advice=told,
        notes=tuple(task.notes),
        refused=task.refused,
    )


def _coupled(task: _Task, choice: Choice, by: str) -> Choice:
    """Return the size to take where samples are coupled, and note what waits because of it."""
    text = f"{by} couples the samples, which an Accumulator refuses. BigStep"
    if choice.fits_whole:
        # Micro-batches that wait for each other gain nothing, and alone none has shown how long that takes.
        task.notes.append(f"{text} takes all at once where that fits.")
        return replace(choice, size=choice.largest, probes=tuple(replace(p, seconds=None) for p in choice.probes))
    known = [(p.size, p.peak_bytes) for p in choice.probes if p.peak_bytes is not None]
    (size, least), (larger, most) = known[0], known[-1]
    all_of_them = human((most - least) / max(larger - size, 1) * choice.largest)
    task.notes.append(
        f"{text} runs micro-batches in lock-step. Where they wait for each other inside the model, the activations of "
        f"all, about {all_of_them}, wait beside these peaks, on the device or in host memory."
    )
    return choice
