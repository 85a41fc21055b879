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
from bigbatch.distributed.ddp_internals import hooked, is_quiet, left_out
from bigbatch.distributed.fsdp_internals import groups_of, members, sharded
from bigbatch.distributed.replicas import Replicas
from bigbatch.distributed.shards import Shards
from bigbatch.distributed.team import Team
from bigbatch.errors import ConfigurationError
from bigbatch.loss.count import LOW_PRECISION

_NO_OVERLAP = (
    "Accumulator(...) without overlap=True: all else is the same, and gradients cross the wire once per update"
)
_UNSUPPORTED = {
    "FullyShardedDataParallel": ("FSDP1 is not supported", "torch.distributed.fsdp.fully_shard(model)"),
    "DeepSpeedEngine": (
        "a DeepSpeed engine accumulates, clips and steps by itself",
        "the plain model in DistributedDataParallel, or sharded with torch.distributed.fsdp.fully_shard",
    ),
    "DataParallel": (
        "nn.DataParallel splits each micro-batch again and adds up in one process",
        "DistributedDataParallel(model), started with torchrun",
    ),
}


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
    wrappers = data_parallel(models)
    if overlap:
        _refuse_overlap_beside(models, wrappers, trained)
    if not (dist.is_available() and dist.is_initialized()):
        if group is not None:
            raise ConfigurationError(
                "group= needs torch.distributed.", fix="torch.distributed.init_process_group() first, under torchrun"
            )
        _warn_of_others()
        return Team(wrappers)
    chosen = _given_group(group)
    parts = sharded(models)
    if parts:
        _refuse_loose(models)
        return Shards(parts, chosen, overlap=overlap)
    if dist.get_world_size() > 1 and not wrappers:
        _refuse_hidden_wrappers(models)
    if wrappers:
        chosen = _group_of(wrappers, chosen)
    elif chosen is None:
        _warn_of_others()
    _refuse_what_ddp_does(wrappers, overlap=overlap)
    if overlap:
        _refuse_overlap_of(models, wrappers)
    if chosen is None or dist.get_world_size(chosen) == 1:
        return Team(wrappers)
    return Replicas(chosen, wrappers, () if wrappers else models, overlap=overlap)


def data_parallel(models: Sequence[nn.Module]) -> list[DistributedDataParallel]:
    """Return the DDP wrappers in some models, nested ones too; refuse wrappers that reduce in their own way."""
    found: dict[int, DistributedDataParallel] = {}
    for name, module in (named for model in models for named in model.named_modules()):
        kind = next((kind.__name__ for kind in type(module).__mro__ if kind.__name__ in _UNSUPPORTED), None)
        if kind is not None:
            why, instead = _UNSUPPORTED[kind]
            where = f" ({name})" if name else ""
            raise ConfigurationError(f"this model{where} is wrapped in {kind}: {why}.", fix=instead)
        if isinstance(module, DistributedDataParallel):
            found[id(module)] = module
    return list(found.values())


def _refuse_hidden_wrappers(models: Sequence[nn.Module]) -> None:
    """Raise where a model was given without the DDP wrapper that its forward will be called through."""
    own = {id(p) for model in models for p in model.parameters()}
    for each in gc.get_objects():
        # By its type: asking some objects for their class imports or warns.
        if issubclass(type(each), DistributedDataParallel) and any(id(p) in own for p in each.parameters()):
            raise ConfigurationError(
                "this model's parameters belong to a DistributedDataParallel, and the model was given without it: DDP "
                "would reduce every micro-batch's gradient by itself.",
                fix="Accumulator(ddp_model, optimizer, ...), not ddp_model.module",
            )


def refuse_tensor_parallelism(models: Sequence[nn.Module]) -> None:
    """Raise where parameters are in parts over ranks otherwise than by fully_shard."""
    every = [group.mesh_info.mesh for part in sharded(models) for group in groups_of(part)]
    by_shards = [set(mesh.mesh.flatten().tolist()) for mesh in every]
    for name, parameter in (named for model in models for named in model.named_parameters()):
        spread: Any = parameter
        ranks = set(spread.device_mesh.mesh.flatten().tolist()) if hasattr(spread, "device_mesh") else set()
        # DDP(..., device_mesh=...) puts plain tensors in their place, and keeps what they were.
        if (len(ranks) > 1 and ranks not in by_shards) or hasattr(spread, "_st_info"):
            over = f" over ranks {sorted(ranks)}" if ranks else ""
            raise ConfigurationError(
                f"{name} is in parts{over}, as tensor parallelism makes it (parallelize_module, distribute_module), "
                "which bigbatch does not support.",
                fix="the plain model, in fully_shard(model) or DistributedDataParallel(model)",
            )


def _refuse_what_ddp_does(wrappers: Sequence[DistributedDataParallel], *, overlap: bool) -> None:
    """Raise where DDP was told to do what would not be done, or would be done twice."""
    if any(getattr(wrapper, "mixed_precision", None) is not None for wrapper in wrappers):
        raise ConfigurationError(
            "this model is wrapped in DistributedDataParallel(..., mixed_precision=...), which casts gradients back "
            "only where DDP reduces each of them.",
            fix="autocast instead of mixed_precision=:  with torch.autocast(device, torch.bfloat16): ...",
        )
    if any(not is_quiet(wrapper) and not wrapper.require_backward_grad_sync for wrapper in wrappers):
        raise ConfigurationError(
            "this DistributedDataParallel is inside of no_sync(), and would reduce by itself after it.",
            fix="the Accumulator or BigStep made outside of no_sync(), and a loop without it",
        )
    if not overlap and hooked(wrappers):
        raise ConfigurationError(
            "this DistributedDataParallel has a communication hook, and gradients are reduced without DDP, so it would "
            "not be called.",
            fix="the model without register_comm_hook(...); or Accumulator(..., overlap=True), which has DDP reduce in "
            "a window's last backward",
        )


def _refuse_overlap_of(models: Sequence[nn.Module], wrappers: Sequence[DistributedDataParallel]) -> None:
    """Raise where DDP's own reduction in a window's last backward would miss something."""
    trained = (p for model in models for p in model.parameters() if p.requires_grad)
    found = (
        "it needs a DistributedDataParallel to do so, and there is none"
        if not wrappers
        else "with find_unused_parameters=True DDP leaves out what the last micro-batch does not use, though others did"
        if any(wrapper.find_unused_parameters for wrapper in wrappers)
        else "bf16 and fp16 parameters add up in float32 here, which DDP's buckets do not hold"
        if any(p.dtype in LOW_PRECISION for p in trained)
        else ""
    )
    if found:
        raise ConfigurationError(
            f"overlap=True has DDP reduce the gradients in a window's last backward, and {found}.", fix=_NO_OVERLAP
        )


def _refuse_overlap_beside(
    models: Sequence[nn.Module], wrappers: Sequence[DistributedDataParallel], trained: Sequence[Tensor]
) -> None:
    """Raise where a last backward reduces what nobody trains, or somebody trains what it does not reduce."""
    known = {id(p) for p in trained}
    missing = sum(p.requires_grad and id(p) not in known for model in models for p in model.parameters())
    if missing and (wrappers or sharded(models)):
        raise ConfigurationError(
            "overlap=True has gradients reduced in a window's last backward, which waits for every one, and "
            f"{missing} trainable parameters of the model are in no optimizer here, so they get none.",
            fix="parameter.requires_grad_(False) before the model is wrapped or sharded, or no overlap=True",
        )
    left = left_out(wrappers, trained) if wrappers else 0
    if left:
        raise ConfigurationError(
            f"overlap=True has DDP reduce in a window's last backward, and {left} parameters of the optimizer are none "
            "that it reduces: they are outside of what it wraps, it was told to ignore them, or they were frozen when "
            "it was made.",
            fix="all of them inside of the module that DDP wraps, or no overlap=True",
        )


def _refuse_loose(models: Sequence[nn.Module]) -> None:
    """Refuse parameters that no reduction reaches."""
    # As their modules have them now, which may have been made anew since.
    infos = [each._module_info for part in sharded(models) for group in groups_of(part) for each in group.fsdp_params]  # noqa: SLF001
    reached = {id(getattr(info.module, info.param_name)) for info in infos}
    for model in models:
        loose = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in reached]
        if loose:
            raise ConfigurationError(
                f"{len(loose)} parameters of this model are outside of fully_shard, {loose[0]} the first: nothing "
                "reduces their gradients.",
                fix="fully_shard(model) after its parts",
            )


def _given_group(group: object) -> dist.ProcessGroup | None:
    """Return the ranks that `group=` speaks of."""
    outside_: object = dist.GroupMember.NON_GROUP_MEMBER
    if group is not None and group == outside_:
        raise ConfigurationError(
            "this process is not in the group of group=: new_group(...) has returned no group here.",
            fix="on each process the group that it belongs to; group=None on one that trains alone",
        )
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ConfigurationError(
            "group must be a torch.distributed.ProcessGroup, such as torch.distributed.group.WORLD.",
            found=repr(group),
        )
    return group


def _group_of(wrappers: Sequence[DistributedDataParallel], given: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the processes that share the gradients of some wrapped models; what was given must say the same."""
    groups: list[Any] = [wrapper.process_group for wrapper in wrappers]
    if len({members(group) for group in groups}) > 1:
        raise ConfigurationError(
            "these models are wrapped for different groups of processes, and one window has one big batch.",
            fix="one group for all of them, or an accumulator for each",
        )
    found: dist.ProcessGroup = groups[0]
    if given is not None and members(found) != members(given):
        raise ConfigurationError(
            f"this model is wrapped in DistributedDataParallel for ranks {list(members(found))}, which have the same "
            "weights: ranks that train together would part from the others.",
            found=f"group= of ranks {list(members(given))}",
            fix="no group=, or DistributedDataParallel(model, process_group=group)",
        )
    return found if given is None else given


def _warn_of_others() -> None:
    """Warn where other processes are there, or were started with this one, and it has found none to train with."""
    if dist.is_available() and dist.is_initialized():
        size, how, begin, apart = dist.get_world_size(), "", "", _GROUP_OF_ONE
    else:
        size, how = started(), " that were started together, and torch.distributed is not initialised"
        begin, apart = "Call torch.distributed.init_process_group() first. ", ""
    if size > 1:
        warnings.warn(_BY_ITSELF.format(size=size, how=how, begin=begin, apart=apart), stacklevel=outside())


def started() -> int:
    """Return how many processes a launcher such as torchrun says that it has started."""
    said = os.environ.get("WORLD_SIZE", "")
    told = all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    return int(said) if said.isdecimal() and told else 1


_BY_ITSELF = (
    "this process is one of {size}{how}, and nothing says that they train this model together: each would train one of "
    "its own, on its own batches alone.\n"
    "{begin}Wrap the model first, and make the Accumulator or BigStep after that:  "
    "model = DistributedDataParallel(model), or fully_shard(model). Without a wrapper, say who trains together:  "
    "group=torch.distributed.group.WORLD (for BigStep in Options(group=...)).\n"
    "To train apart on purpose, {apart}filter this warning."
)
_GROUP_OF_ONE = (
    "give a group of one process:  group=torch.distributed.new_group([rank], use_local_synchronization=True); or "
)
