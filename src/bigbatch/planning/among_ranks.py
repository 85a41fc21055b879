"""A plan on one of several ranks: what it measures alone, and what all of them must do together.

A rank whose model is in DDP measures alone, and says nothing. Every pass through a model that is sharded with
`fully_shard` is a meeting of all ranks: all of them plan, run the same sizes, and go by the largest peak and time.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from bigbatch.errors import ConfigurationError, RankFailed
from bigbatch.memory.budget import human
from bigbatch.memory.sizing import Probe
from bigbatch.planning.report import Plan
from bigbatch.ranks.costs import Costs, costs, gathered_at_once, of_replicas
from bigbatch.ranks.groups import flat, groups_of, sharded
from bigbatch.ranks.launcher import is_of_the_wire
from bigbatch.ranks.replicas import within_a_replica
from bigbatch.ranks.wrappers import data_parallel, members, silence

_DDP = ("require_backward_grad_sync", "require_forward_param_sync", "_static_graph_delay_allreduce_enqueued")


_GONE = (
    "a rank that planned together with this one has ended in the midst of a pass, which is a meeting of all ranks; it "
    "may have run out of memory. The error is in that rank's own output.\n\n"
    "If it has, start again with a budget below what is free, which a plan keeps to: memory=0.8"
)


class Company:
    """The ranks that some models are trained on together."""

    def __init__(self, models: Sequence[nn.Module], ranks: int = 1) -> None:
        """Find out how they are wrapped; `ranks` is how many there are where they are not."""
        self._models, self._ranks = models, ranks
        self._wrappers = data_parallel(models)
        self._parts = sharded(models)
        every = [flat(group.mesh_info.mesh) for part in self._parts for group in groups_of(part)]
        self._groups = list({members(group): group for group in every}.values())

    @property
    def meets(self) -> bool:
        """Whether every pass is a meeting."""
        return bool(self._parts)

    @property
    def device(self) -> torch.device | None:
        """Where sharded models compute, which is not where their shards are if those are offloaded."""
        found = [group.device for part in self._parts for group in groups_of(part)]
        return torch.device(found[0]) if found else None

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Inside, DDP reduces nothing, and sharded models reduce in every pass, each replica by itself.

        As in a window; both go on as before afterwards.
        """
        ddp = [(wrapper, name, getattr(wrapper, name, None)) for wrapper in self._wrappers for name in _DDP]
        groups = [(group, group.reduce_grads) for part in self._parts for group in groups_of(part)]
        for wrapper in self._wrappers:
            silence(wrapper)
        for part in self._parts:
            part.reshard()  # a forward without a backward leaves the outermost module's weights whole
        for group, _ in groups:
            group.reduce_grads = True
        try:
            with within_a_replica([group for group, _ in groups]):
                yield
        except RuntimeError as error:
            if self.meets and is_of_the_wire(error):
                raise RankFailed(_GONE) from error
            raise
        finally:
            for wrapper, name, was in ddp:
                setattr(wrapper, name, was)
            for group, reduces in groups:
                group.reduce_grads = reduces

    def refuse_tracing(self) -> None:
        """Raise where a plan for a device that is not here is wanted of a sharded model."""
        if self.meets:
            raise ConfigurationError(
                "a model that is sharded with fully_shard cannot be planned for a device that is not here: its passes "
                "are meetings of all ranks, and cannot be traced.\n\n"
                "Plan where it is, for what is free or a part of it, on every rank: memory=None or memory=0.8"
            )

    def most(self, number: float) -> float:
        """Return the largest of all ranks' numbers, where they meet."""
        if not self.meets:
            return number
        found = torch.tensor([number], dtype=torch.float64, device=self.device)
        for group in self._groups:
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
        return float(found.item())

    def agreed(self, probe: Probe) -> Probe:
        """Return what a probe came to on the rank where it took most."""
        if not self.meets:
            return probe
        if probe.peak_bytes is None:
            # Said to nobody: others wait for this rank inside the model, and hear of it when its process ends.
            raise RankFailed(
                f"a pass of {probe.size:,} samples through this sharded model ran out of memory on this rank, and "
                "cannot be taken back: it is a meeting of all ranks, which have gone on.\n\n"
                "Start again with a budget below what is free, which a plan keeps to: memory=0.8"
            )
        peak = probe.peak_bytes + (gathered_at_once(self._models) if self.device == torch.device("cpu") else 0)
        return replace(probe, peak_bytes=int(self.most(peak)), seconds=self.most(probe.seconds or 0.0))

    def costs(self, found: Plan) -> Costs | None:
        """Return what the planned update costs each rank."""
        steps = found.steps or found.batch_size
        told = self._costs(steps)
        if told is None or len(told.ways) == 1:
            return told
        notes = list(told.notes)
        if steps > 1:
            more = told.ways[1].gradients_held - told.ways[0].gradients_held
            notes.append(f"Peaks above are with the default; overlap=True adds {human(max(more, 0))} to them.")
        else:
            notes += self._otherwise(found)
        return replace(told, notes=tuple(notes))

    def _costs(self, steps: int) -> Costs | None:
        told = costs(self._models, self._wrappers, steps)
        if told is None and self._ranks > 1:
            return of_replicas(self._models, self._ranks, steps, "none")
        return told

    def _otherwise(self, found: Plan) -> Iterator[str]:
        """Say what more micro-batches would cost, where the plan needs only one, with which all ways are the same."""
        row = next((row for row in reversed(found.rows) if row.steps > 1), None)
        told = self._costs(row.steps) if row is not None else None
        if row is not None and told is not None:
            every, once = told.ways
            yield (
                f"With one micro-batch in an update, both ways are the same. In {row.steps:,} micro-batches of "
                f"{row.size:,}, a rank would send {human(every.sent)} and hold {human(every.gradients_held)} of "
                f"gradients; with overlap=True, {human(once.sent)} and {human(once.gradients_held)}."
            )
