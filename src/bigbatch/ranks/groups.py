"""What FSDP keeps of a sharded module: its groups of parameters, and the whole ones that stand in for shards."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn


def sharded(models: Sequence[nn.Module]) -> list[Any]:
    """Return the sharded parts of some models; by name, since importing FSDP takes as long as all of torch."""
    every = (module for model in models for module in model.modules())
    return [module for module in every if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)]


def groups_of(part: Any) -> list[Any]:
    """Return FSDP's groups of parameters of a sharded module: those that travel together."""
    state = part._get_fsdp_state()  # noqa: SLF001 - no public name
    found = getattr(state, "_fsdp_param_groups", None)
    return list(found if found is not None else filter(None, [state._fsdp_param_group]))  # noqa: SLF001 - until 2.11


def stand_ins(models: Sequence[nn.Module], own: Iterable[Tensor]) -> Iterator[Tensor]:
    """Return the whole parameters of which some shards are parts: from a forward to its backward, a model has those."""
    shards = {id(shard) for shard in own}
    for each in (p for part in sharded(models) for group in groups_of(part) for p in group.fsdp_params):
        if id(each.sharded_param) in shards and hasattr(each, "_unsharded_param"):
            yield each._unsharded_param  # noqa: SLF001 - its property wants it to be filled


def whole_weights(models: Sequence[nn.Module]) -> Iterator[Tensor]:
    """Return all whole parameters that stand in for shards, those that FSDP has freed since a forward, too."""
    for each in (p for part in sharded(models) for group in groups_of(part) for p in group.fsdp_params):
        if hasattr(each, "_unsharded_param"):
            yield each._unsharded_param  # noqa: SLF001
