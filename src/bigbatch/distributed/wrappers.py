"""What a model is wrapped in, and which processes share its gradients."""

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bigbatch.distributed.fsdp_internals import groups_of, sharded
from bigbatch.errors import ConfigurationError

# Where a graph is said to be static, DDP reduces after its first backward, whatever it was told: unless it has.
_FIRST = "_static_graph_delay_allreduce_enqueued"
_REFUSED = {
    "FullyShardedDataParallel": "FSDP1 is not supported, and torch itself has moved on: shard with "
    "torch.distributed.fsdp.fully_shard(model)",
    "DeepSpeedEngine": "a DeepSpeed engine accumulates, clips and steps by itself: train the plain model, wrapped in "
    "DistributedDataParallel, or sharded with torch.distributed.fsdp.fully_shard",
    "DataParallel": "nn.DataParallel splits each micro-batch again and adds up in one process: wrap the model in "
    "DistributedDataParallel and start it with torchrun",
}


def data_parallel(models: Sequence[nn.Module]) -> list[DistributedDataParallel]:
    """Return the DDP wrappers in some models, nested ones too; refuse wrappers that reduce in their own way."""
    found: dict[int, DistributedDataParallel] = {}
    for model in models:
        for name, module in model.named_modules():
            kind = next((kind.__name__ for kind in type(module).__mro__ if kind.__name__ in _REFUSED), None)
            if kind is not None:
                where = f" ({name})" if name else ""
                raise ConfigurationError(f"this model{where} is wrapped in {kind}: {_REFUSED[kind]}.")
            if isinstance(module, DistributedDataParallel):
                found[id(module)] = module
    return list(found.values())


def refuse_hidden_wrappers(models: Sequence[nn.Module]) -> None:
    """Raise where a model was given without the DDP wrapper that its forward will be called through."""
    own = {id(p) for model in models for p in model.parameters()}
    for each in gc.get_objects():
        # By its type: asking some objects for their class imports or warns.
        if issubclass(type(each), DistributedDataParallel) and any(id(p) in own for p in each.parameters()):
            msg = (
                "this model's parameters belong to a DistributedDataParallel, and the model was given without it: DDP "
                "would reduce every micro-batch's gradient by itself.\n"
                "Give the wrapped one:  Accumulator(ddp_model, optimizer, ...), not ddp_model.module"
            )
            raise ConfigurationError(msg)


def refuse_tensor_parallelism(models: Sequence[nn.Module]) -> None:
    """Raise where parameters are in parts over ranks otherwise than by fully_shard."""
    every = [group.mesh_info.mesh for part in sharded(models) for group in groups_of(part)]
    by_shards = [set(mesh.mesh.flatten().tolist()) for mesh in every]
    for model in models:
        for name, parameter in model.named_parameters():
            spread: Any = parameter
            ranks = set(spread.device_mesh.mesh.flatten().tolist()) if hasattr(spread, "device_mesh") else set()
            # DDP(..., device_mesh=...) puts plain tensors in their place, and keeps what they were.
            if (len(ranks) > 1 and ranks not in by_shards) or hasattr(spread, "_st_info"):
                raise ConfigurationError(_IN_PARTS.format(name, f" over ranks {sorted(ranks)}" if ranks else ""))


_IN_PARTS = (
    "{} is in parts{}, as tensor parallelism makes it (parallelize_module, distribute_module), which bigbatch does not "
    "support: of models in parts it trains those of fully_shard alone.\n"
    "Leave parallelize_module out, and shard or wrap the plain model:  fully_shard(model), or "
    "DistributedDataParallel(model)"
)


def refuse_hooks(wrappers: Sequence[DistributedDataParallel]) -> None:
    """Raise where DDP was given a way to reduce that would not be taken."""
    if hooked(wrappers):
        raise ConfigurationError(HOOKED)


def hooked(wrappers: Sequence[DistributedDataParallel]) -> int:
    """Return how many wrappers have a communication hook, one of torch's own included."""
    return sum(bool(told(wrapper).get("comm_hook")) for wrapper in wrappers)


HOOKED = (
    "this DistributedDataParallel has a communication hook, and gradients are reduced without DDP, so it would not be "
    "called.\n"
    "Take register_comm_hook(...) out; or have DDP reduce in a window's last backward:  Accumulator(..., overlap=True)"
)


def refuse_no_sync(wrappers: Sequence[DistributedDataParallel]) -> None:
    """Raise inside of no_sync(), at whose end DDP would begin to reduce by itself."""
    if any(wrapper not in _quiet and not wrapper.require_backward_grad_sync for wrapper in wrappers):
        msg = (
            "this DistributedDataParallel is inside of no_sync(), and would reduce by itself after it.\n"
            "Make the Accumulator or BigStep outside of no_sync(), and leave no_sync() out of the loop."
        )
        raise ConfigurationError(msg)


def refuse_cast(wrappers: Sequence[DistributedDataParallel]) -> None:
    """Raise where DDP casts parameters by itself, and gradients back where it reduces."""
    if any(getattr(wrapper, "mixed_precision", None) is not None for wrapper in wrappers):
        msg = (
            "this model is wrapped in DistributedDataParallel(..., mixed_precision=...), which casts parameters for "
            "every forward, and their gradients back only where DDP reduces each of them.\n"
            "Take mixed_precision= out and compute under autocast:  with torch.autocast(device, torch.bfloat16): ..."
        )
        raise ConfigurationError(msg)


def refuse_overlap(wrappers: Sequence[DistributedDataParallel], low_precision: bool) -> None:  # noqa: FBT001
    """Raise where DDP's own reduction in a window's last backward would miss something."""
    found = (
        "it needs a DistributedDataParallel to do so, and there is none"
        if not wrappers
        else "with find_unused_parameters=True DDP leaves out what the last micro-batch does not use, though others did"
        if any(wrapper.find_unused_parameters for wrapper in wrappers)
        else "bf16 and fp16 parameters add up in float32 here, which DDP's buckets do not hold"
        if low_precision
        else ""
    )
    if found:
        msg = (
            f"overlap=True has DDP reduce the gradients in a window's last backward, and {found}.\n"
            "Take overlap=True out: all else is the same, and gradients cross the wire once per update, too."
        )
        raise ConfigurationError(msg)


def left_out(wrappers: Sequence[DistributedDataParallel], trained: Sequence[Tensor]) -> int:
    """Return how many of the parameters that are trained no wrapper reduces."""
    within = [p for wrapper in wrappers for p in wrapper._module_parameters if p.requires_grad]  # noqa: SLF001
    known = {id(p) for p in within}
    outside = sum(p.requires_grad and id(p) not in known for p in trained)
    # Those that were frozen when a wrapper was made are in its module, and it knows nothing of them.
    reduced: int = sum(told(wrapper)["num_parameter_tensors"] for wrapper in wrappers)
    return outside + max(len(within) - reduced, 0)


def told(wrapper: DistributedDataParallel) -> dict[str, Any]:
    """Return what a wrapper says of itself, in some microseconds."""
    found: dict[str, Any] = wrapper._get_ddp_logging_data()  # noqa: SLF001 - no public name
    return found


def members(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Return the ranks of a group, as the world numbers them."""
    return tuple(sorted(dist.get_process_group_ranks(group)))


def given_group(group: object) -> dist.ProcessGroup | None:
    """Return the ranks that `group=` speaks of."""
    outside: object = dist.GroupMember.NON_GROUP_MEMBER
    if group is not None and group == outside:
        msg = (
            "this process is not in the group of group=: new_group(...) has returned no group here.\n"
            "Give each process the group that it belongs to; one that trains alone needs none:  group=None"
        )
        raise ConfigurationError(msg)
    if group is not None and not isinstance(group, dist.ProcessGroup):
        msg = f"group must be a torch.distributed.ProcessGroup, such as torch.distributed.group.WORLD; found {group!r}"
        raise ConfigurationError(msg)
    return group


def group_of(wrappers: Sequence[DistributedDataParallel]) -> dist.ProcessGroup:
    """Return the processes that share the gradients of some wrapped models."""
    groups: list[Any] = [wrapper.process_group for wrapper in wrappers]
    if len({members(group) for group in groups}) > 1:
        msg = (
            "these models are wrapped for different groups of processes, and one window has one big batch.\n"
            "Wrap all of them for the same group, or use an accumulator for each."
        )
        raise ConfigurationError(msg)
    found: dist.ProcessGroup = groups[0]
    return found


def refuse_other_group(wrappers: Sequence[DistributedDataParallel], given: dist.ProcessGroup) -> None:
    """Raise where what was given is not what models are wrapped for."""
    theirs, found = (list(members(group)) for group in (group_of(wrappers), given))
    if theirs != found:
        msg = (
            f"this model is wrapped in DistributedDataParallel for ranks {theirs}, which have the same weights, and "
            f"group= says {found}: ranks that train together would part from the others.\n"
            "Leave group= out, or wrap the model for that group:  DistributedDataParallel(model, process_group=group)"
        )
        raise ConfigurationError(msg)


@dataclass
class _Quiet:
    """A wrapper that is kept quiet: by how many, and whether its first backward was over before."""

    first: bool
    owners: int = 0


_quiet: "weakref.WeakKeyDictionary[DistributedDataParallel, _Quiet]" = weakref.WeakKeyDictionary()


def keep_quiet(owner: object, wrappers: Sequence[DistributedDataParallel]) -> None:
    """Have DDP reduce nothing by itself, as long as `owner` lives, or another who wanted the same."""
    for wrapper in wrappers:
        _quiet.setdefault(wrapper, _Quiet(getattr(wrapper, _FIRST, False))).owners += 1
        silence(wrapper)
        weakref.finalize(owner, _speak, weakref.ref(wrapper))


def silence(wrapper: DistributedDataParallel) -> None:
    """Have a wrapper's next forward and backward reduce nothing, and its forward send no buffers."""
    wrapper.require_backward_grad_sync = False
    wrapper.require_forward_param_sync = False
    setattr(wrapper, _FIRST, True)


def let_speak(wrapper: DistributedDataParallel) -> None:
    """Have its next backward reduce what has been added up until then; its forward sends no buffers."""
    wrapper.require_backward_grad_sync = True
    wrapper.require_forward_param_sync = False  # until its forward says that the backward will reduce
    setattr(wrapper, _FIRST, False)


def has_reduced(wrapper: DistributedDataParallel) -> bool:
    """Whether a backward that was to reduce has done so: all of it, after a forward through the wrapper."""
    if not wrapper.require_forward_param_sync:  # its forward says so here; no_sync() and .module leave it out
        return False
    try:
        wrapper._check_reducer_finalized()  # noqa: SLF001
    except RuntimeError:  # it waits for a gradient that has not come
        return False
    return True


def _speak(reference: "weakref.ref[DistributedDataParallel]") -> None:
    """Leave a wrapper as it was, if this was the last who kept it quiet."""
    wrapper = reference()
    if wrapper is None:
        return
    found = _quiet[wrapper]
    found.owners -= 1
    if not found.owners:
        del _quiet[wrapper]
        wrapper.require_backward_grad_sync = wrapper.require_forward_param_sync = True
        setattr(wrapper, _FIRST, found.first)
