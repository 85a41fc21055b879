"""From models to the processes that make a big batch together: found, or refused, when an object is made."""

import gc
import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bigbatch.caller import outside
from bigbatch.distributed.fsdp_internals import groups_of, sharded
from bigbatch.distributed.reduction import Replicas, Shards
from bigbatch.distributed.team import Team
from bigbatch.errors import ConfigurationError
from bigbatch.loss.count import LOW_PRECISION

_UNSUPPORTED = frozenset({"FullyShardedDataParallel", "DeepSpeedEngine", "DataParallel"})


def team_of(
    models: Sequence[nn.Module],
    group: dist.ProcessGroup | None,
    *,
    overlap: bool = False,
    trained: Sequence[Tensor] = (),
) -> Team:
    """Return the processes that share the gradients of some models, or this one alone.

    `overlap` has gradients of all that is `trained` reduced in the last backward of a window.
    """
    refuse_tensor_parallelism(models)
    wrappers, parts = data_parallel(models), sharded(models)
    initialized = dist.is_available() and dist.is_initialized()
    if group is not None and not (initialized and isinstance(group, dist.ProcessGroup)):
        raise ConfigurationError(
            "group must be a torch.distributed.ProcessGroup that this process belongs to.",
            found=repr(group),
            fix="torch.distributed.init_process_group() under torchrun, then group=torch.distributed.group.WORLD, or "
            "what new_group(ranks) returns on its members",
        )
    if not initialized:
        _warn_of_others(started())
        return Team(wrappers)
    if overlap:
        _refuse_overlap(models, wrappers, parts, trained)
    if parts:
        _refuse_loose(models)
        shards = Shards(parts, overlap=overlap)
        _one_group([shards.group], group)
        return shards
    if not wrappers and dist.get_world_size() > 1:
        _refuse_hidden_wrappers(models)
        if group is None:
            _warn_of_others(dist.get_world_size())
    chosen = _one_group([wrapper.process_group for wrapper in wrappers], group)
    if chosen is None or dist.get_world_size(chosen) == 1:
        return Team(wrappers)
    return Replicas(chosen, wrappers, () if wrappers else models, overlap=overlap)


def data_parallel(models: Sequence[nn.Module]) -> list[DistributedDataParallel]:
    """Return the DDP wrappers in some models, nested ones too; refuse wrappers that reduce in their own way."""
    every = list({id(module): module for model in models for module in model.modules()}.values())
    found = _UNSUPPORTED & {kind.__name__ for module in every for kind in type(module).__mro__}
    wrappers = [module for module in every if isinstance(module, DistributedDataParallel)]
    if any(getattr(wrapper, "mixed_precision", None) is not None for wrapper in wrappers):
        found |= {"DistributedDataParallel(..., mixed_precision=...)"}
    if found:
        raise ConfigurationError(
            "a wrapper of this model reduces gradients, accumulates, casts or splits batches in a way of its own.",
            found=", ".join(found),
            fix="DistributedDataParallel(model) or torch.distributed.fsdp.fully_shard(model), started with torchrun; "
            "torch.autocast for mixed precision",
        )
    return wrappers


def _refuse_hidden_wrappers(models: Sequence[nn.Module]) -> None:
    """Raise where a model was given without the DDP wrapper that its forward will be called through."""
    # By their types: asking some objects for their class imports or warns.
    wrappers = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
    if {p for model in models for p in model.parameters()} & {p for each in wrappers for p in each.parameters()}:
        raise ConfigurationError(
            "this model was given without its DistributedDataParallel, which would reduce every micro-batch.",
            fix="Accumulator(ddp_model, optimizer, ...), not ddp_model.module",
        )


def refuse_tensor_parallelism(models: Sequence[nn.Module]) -> None:
    """Raise where parameters are in parts over ranks otherwise than by fully_shard."""
    by_shards = [_ranks_of(group.mesh_info.mesh) for part in sharded(models) for group in groups_of(part)]
    for name, parameter in (named for model in models for named in model.named_parameters()):
        ranks = _ranks_of(parameter.device_mesh) if hasattr(parameter, "device_mesh") else set()
        # DDP(..., device_mesh=...) puts plain tensors in their place, and keeps what they were.
        if (len(ranks) > 1 and ranks not in by_shards) or hasattr(parameter, "_st_info"):
            raise ConfigurationError(
                f"{name} is in parts over ranks by tensor parallelism, which bigbatch does not support.",
                fix="the plain model, in fully_shard(model) or DistributedDataParallel(model)",
            )


def _ranks_of(mesh: Any) -> set[int]:
    return set(mesh.mesh.flatten().tolist())


def _refuse_overlap(
    models: Sequence[nn.Module],
    wrappers: Sequence[DistributedDataParallel],
    parts: Sequence[object],
    trained: Sequence[Tensor],
) -> None:
    """Raise where a last backward that reduces would miss something; what DDP leaves out is told when it has."""
    parameters = {id(p): p for model in models for p in model.parameters() if p.requires_grad}
    if (
        not (wrappers or parts)
        or parameters.keys() - {id(p) for p in trained}
        or any(wrapper.find_unused_parameters for wrapper in wrappers)
        or (wrappers and any(p.dtype in LOW_PRECISION for p in parameters.values()))
    ):
        raise ConfigurationError(
            "overlap=True needs an optimizer for every trainable parameter, and either fully_shard, or "
            "DistributedDataParallel of float32 or float64 parameters without find_unused_parameters=True.",
            fix="Accumulator(...) without overlap=True: gradients still cross the wire once per update",
        )


def _refuse_loose(models: Sequence[nn.Module]) -> None:
    every = (named for model in models for named in model.named_parameters())
    if loose := [name for name, p in every if p.requires_grad and not hasattr(p, "device_mesh")]:
        problem = f"{len(loose)} parameters of this model are outside of fully_shard, which alone reduces gradients."
        raise ConfigurationError(problem, found=", ".join(loose[:3]), fix="fully_shard(model) after its parts")


def _one_group(found: Sequence[Any], given: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the processes that share gradients, as their wrappers and `group=` say alike."""
    groups: list[dist.ProcessGroup] = [*found, *([] if given is None else [given])]
    members = sorted({tuple(sorted(dist.get_process_group_ranks(group))) for group in groups})
    if len(members) > 1:
        raise ConfigurationError(
            "the models and group= name different processes, and one window has one big batch.",
            found=" and ".join(f"ranks {list(each)}" for each in members),
            fix="a wrapped model without group=; one group for all models, or an accumulator for each",
        )
    return groups[-1] if groups else None


def started() -> int:
    """Return how many processes a launcher such as torchrun says that it has started."""
    said = os.environ.get("WORLD_SIZE", "") if {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys() else ""
    return int(said) if said.isdecimal() else 1


def _warn_of_others(size: int) -> None:
    """Warn where other processes are there, or were started with this one, and it has found none to train with."""
    if size > 1:
        warnings.warn(
            f"this process is one of {size}, and nothing says that they train this model together: each would train "
            "its own.\nUse: torch.distributed.init_process_group(), then DistributedDataParallel(model) or "
            "fully_shard(model); or, without a wrapper, group=torch.distributed.group.WORLD (for BigStep in "
            "Options(group=...)). To train apart on purpose, give a group of this process alone.",
            stacklevel=outside(),
        )
