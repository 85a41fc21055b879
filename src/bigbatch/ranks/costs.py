"""What several ranks cost: what each sends in an update, and what it holds of the gradients, by when they are reduced.

All of it is read off the wrapper's own state: which parameters travel together, how they are padded and cut, in which
types they are gathered and reduced. Bytes are what a ring sends, which no way of reducing can undercut: of n ranks each
sends (n - 1)/n of what is gathered or scattered, and twice that of what is reduced for all.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bigbatch.ranks.groups import groups_of, sharded
from bigbatch.ranks.replicas import replicas_of
from bigbatch.ranks.wrappers import group_of
from bigbatch.reading.counts import LOW_PRECISION

Kind = Literal["all-gather", "reduce-scatter", "all-reduce"]


@dataclass(frozen=True)
class Collective:
    """One thing that ranks do together, in every update so many times."""

    kind: Kind
    bytes: int  # of the whole: what all parts make together
    ranks: int
    times: int

    @property
    def sent(self) -> int:
        """What a rank sends in an update, at least; it receives as much."""
        once = self.bytes * (self.ranks - 1) // self.ranks
        return self.times * once * (2 if self.kind == "all-reduce" else 1)


@dataclass(frozen=True)
class Way:
    """One way of reducing gradients, and what it costs a rank."""

    name: str
    how: str  # what to type for it
    weights_sent: int  # per update, to gather the weights of other ranks
    gradients_sent: int
    sent: int  # in all; as much is received
    gradients_held: int  # bytes between two micro-batches
    held_on: str
    collectives: tuple[Collective, ...]


@dataclass(frozen=True)
class Costs:
    """What an update costs each of several ranks."""

    wrapper: str
    ranks: int
    replicas: int  # of the model; fewer than ranks where it is sharded
    micro_batches: int  # on each rank
    ways: tuple[Way, ...]
    notes: tuple[str, ...]


def costs(models: Sequence[nn.Module], wrappers: Sequence[DistributedDataParallel], steps: int) -> Costs | None:
    """Return the costs of models in DDP or sharded by `fully_shard`; None of any other."""
    parts = sharded(models)
    if parts:
        return _of_shards([group for part in parts for group in groups_of(part)], _roots(parts), steps)
    if wrappers and (ranks := group_of(wrappers).size()) > 1:
        return of_replicas(models, ranks, steps, "DistributedDataParallel")
    return None


def of_replicas(models: Sequence[nn.Module], ranks: int, steps: int, wrapper: str) -> Costs:
    """Return the costs of whole models on every rank: gradients add up locally, and are reduced once."""
    trained = {id(p): p for model in models for p in model.parameters() if p.requires_grad}.values()
    size = sum(p.numel() * _summed_in(p.dtype).itemsize for p in trained)
    way = _way("once per update", "the default", (Collective("all-reduce", size, ranks, 1),), size, _place(trained))
    note = "Gradients add up on each rank and are reduced when its window closes, however many micro-batches it has."
    return Costs(wrapper, ranks, ranks, steps, (way,), (note,))


def gathered_at_once(models: Sequence[nn.Module]) -> int:
    """Return the most bytes of whole weights that a pass through sharded models holds beside its shards."""
    parts = sharded(models)
    roots = _roots(parts)
    every = [_Group(group, root=group in roots) for part in parts for group in groups_of(part)]
    freed = sorted((group.whole for group in every if group.gathers_again), reverse=True)
    return sum(group.whole for group in every if not group.gathers_again) + sum(freed[:2])  # one, and the next one


def _of_shards(groups: Sequence[Any], roots: Sequence[Any], steps: int) -> Costs:
    every = [_Group(group, root=group in roots) for group in groups]
    gathers = tuple(each for group in every for each in group.gathers(steps))
    part, whole = sum(group.part_held for group in every), sum(group.whole_held for group in every)
    device = groups[0].device
    offloaded = any(parameter.offload_to_cpu for group in groups for parameter in group.fsdp_params)
    home = "cpu" if offloaded else device.type
    apart = replicas_of(groups) is not None  # until the window closes
    if not apart:
        name, reductions = "every micro-batch", [each for group in every for each in group.reductions(steps)]
    else:
        name = "every micro-batch, replicas once"
        reductions = [each for group in every for each in group.scatters(steps)] + list(_among_replicas(every))
    ways = (
        _way(name, "the default", (*gathers, *reductions), part, home),
        _way(
            "once per update",
            "overlap=True",
            (*gathers, *(each for group in every for each in group.reductions(1))),
            whole if steps > 1 else part,
            device.type if steps > 1 else home,
        ),
    )
    shards, replicas = max(group.shards for group in every), max(group.replicas for group in every)
    notes = tuple(_notes(every, ways, apart=apart, offloaded=offloaded and device.type != "cpu"))
    return Costs("fully_shard", shards * replicas, replicas, steps, ways, notes)


class _Group:
    """One of FSDP's groups of parameters, as it travels."""

    def __init__(self, group: Any, *, root: bool) -> None:
        mesh = group.mesh_info
        self.shards: int = getattr(mesh, "shard_mesh_size", 1)
        self.replicas: int = getattr(mesh, "replicate_mesh_size", 1)
        self._group, self._root = group, root
        own = [(each, each.sharded_param) for each in group.fsdp_params]
        self.gathered_in = {_gathered_in(each, p) for each, p in own}
        self.whole = sum(self._padded(each) * _gathered_in(each, p).itemsize for each, p in own)
        trained = [(each, p) for each, p in own if p.requires_grad]
        self.reduced_in = {_reduced_in(each, p) for each, p in trained}
        dtypes = [_reduced_in(each, p).itemsize for each, p in trained]
        self._reduced = sum(self._padded(each) * size for (each, _), size in zip(trained, dtypes, strict=True))
        self.whole_held = sum(each._orig_size.numel() * s for (each, _), s in zip(trained, dtypes, strict=True))  # noqa: SLF001
        self.part_held = sum(self._held(each, p) for each, p in trained)
        self.parts = [(_summed_in(p.dtype), int(each.sharded_size.numel())) for each, p in trained]  # as they are sent

    def _padded(self, parameter: Any) -> int:
        return int(parameter.padded_sharded_param_size.numel()) * self.shards

    def _held(self, parameter: Any, shard: Tensor) -> int:
        """Return what a rank's own part of a gradient takes: padded as it came, unless it was widened."""
        if shard.dtype in LOW_PRECISION:
            return int(parameter.sharded_size.numel()) * torch.float32.itemsize
        return self._padded(parameter) // self.shards * shard.element_size()

    @property
    def gathers_again(self) -> bool:
        """Whether a backward finds weights freed after the forward."""
        # The outermost module keeps its own, unless it was told otherwise: FSDP finds that out in its first forward.
        keeps = self._root and getattr(self._group.modules[0]._get_fsdp_state(), _AUTO, True)  # noqa: SLF001
        freed = self._group.post_forward_mesh_info is not None and not keeps
        return freed and getattr(self._group, "unshard_in_backward", True)

    def gathers(self, steps: int) -> Iterator[Collective]:
        """All-gathers of an update: one in a forward, and one in a backward if it finds the weights freed."""
        if self.shards > 1:
            yield Collective("all-gather", self.whole, self.shards, steps)
        if self.gathers_again and (among := self._group.post_forward_mesh_info.shard_mesh_size) > 1:
            yield Collective("all-gather", self.whole, among, steps)

    def reductions(self, times: int) -> Iterator[Collective]:
        """Reductions of an update that reduces so many times, over replicas as well."""
        yield from self.scatters(times)
        if self._reduced and self.replicas > 1:
            yield Collective("all-reduce", self._reduced // self.shards, self.replicas, times)

    def scatters(self, times: int) -> Iterator[Collective]:
        """Reductions among shards alone."""
        if self._reduced and self.shards > 1:
            yield Collective("reduce-scatter", self._reduced, self.shards, times)


_AUTO = "_auto_reshard_after_forward"


def _among_replicas(groups: Sequence[_Group]) -> Iterator[Collective]:
    """Additions over replicas when a window closes: of all groups' parts together, by their types."""
    sizes: dict[torch.dtype, int] = {}
    for dtype, number in (each for group in groups for each in group.parts):
        sizes[dtype] = sizes.get(dtype, 0) + number * dtype.itemsize
    for size in filter(None, sizes.values()):
        yield Collective("all-reduce", size, groups[0].replicas, 1)


def _roots(parts: Sequence[Any]) -> list[Any]:
    """Return the groups of the modules that are inside of no other."""
    inner = {id(module) for part in parts for module in part.modules() if module is not part}
    return [group for part in parts if id(part) not in inner for group in groups_of(part)]


def _way(name: str, how: str, collectives: tuple[Collective, ...], held: int, place: str) -> Way:
    weights = sum(each.sent for each in collectives if each.kind == "all-gather")
    sent = sum(each.sent for each in collectives)
    return Way(name, how, weights, sent - weights, sent, held, place, collectives)


def _notes(groups: Sequence[_Group], ways: Sequence[Way], *, apart: bool, offloaded: bool) -> Iterator[str]:
    again = sum(group.gathers_again for group in groups)
    where = (
        "forward and, freed in between, in every backward"
        if again == len(groups)
        else f"forward and, freed in between, those of {again} of {len(groups)} groups in every backward"
        if again
        else "forward, and kept until the backward"
    )
    yield f"Weights are gathered in every {where}, in {_named(groups, 'gathered_in')}; both ways pay for that."
    often = "Gradients are reduced in " + _named(groups, "reduced_in")
    if any(group.replicas > 1 for group in groups):
        often += f": scattered among {groups[0].shards} ranks, then added up over {groups[0].replicas} replicas"
    yield f"{often}."
    if apart:
        yield "By default replicas are added up after an update's last backward, however many micro-batches it has."
    if offloaded:
        yield "By default a rank's gradients wait in host memory (CPUOffloadPolicy); whole ones stay on the device."
    if ways[1].gradients_held > ways[0].gradients_held:
        yield "BigStep reduces with every micro-batch; reducing once is Accumulator's."


def _named(groups: Sequence[_Group], what: str) -> str:
    found = {dtype for group in groups for dtype in getattr(group, what)}
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in found)) or "nothing"


def _gathered_in(parameter: Any, own: Tensor) -> torch.dtype:
    return _or(parameter.mp_policy.param_dtype, own.dtype)  # its own: a group may have several from torch 2.15 on


def _reduced_in(parameter: Any, own: Tensor) -> torch.dtype:
    return _or(parameter.mp_policy.reduce_dtype or parameter.mp_policy.param_dtype, own.dtype)


def _or(wanted: torch.dtype | None, own: torch.dtype) -> torch.dtype:
    """Return the type that a policy asks for; it has no say in what is not of floating point."""
    return wanted if wanted is not None and own.is_floating_point else own


def _summed_in(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in LOW_PRECISION else dtype


def _place(tensors: Any) -> str:
    return next((tensor.device.type for tensor in tensors), "cpu")
