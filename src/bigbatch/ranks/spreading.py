"""Gradients of which every rank holds a part: by `fully_shard`, by tensor parallelism, or by both at once."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from bigbatch.ranks.meshes import groups_by_dimension, members


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, in its own memory."""
    if type(tensor) is Tensor:  # what it has not takes a plain tensor long to say
        return tensor
    whole: Any = tensor
    return whole.to_local() if hasattr(tensor, "to_local") else tensor


def held(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor itself, not a view of it: its version tells of whatever is added to it."""
    found: Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


class Spread:
    """How the parameters of a model are spread over ranks."""

    def __init__(self, peers: dist.ProcessGroup | None) -> None:
        """Know who has other parts of this rank's model, and the same samples (`peers`)."""
        self._groups = {} if peers is None else {members(peers): peers}
        self._peers = frozenset(self._groups)
        self._known: dict[Any, frozenset[tuple[int, ...]]] = {}

    def norm(self, parameters: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return the norm of a gradient of which this rank has a part; each of its numbers counts once.

        What is in parts over a group of ranks is added up over it; what each of them has whole is averaged, so that an
        inf or NaN of one is seen by all.
        """
        parts: dict[frozenset[tuple[int, ...]], list[Tensor]] = {}
        for parameter in parameters:
            found = parts.setdefault(self._over(parameter), [])
            if parameter.grad is not None:
                found.append(local(parameter.grad))
        precise = torch.float32 if device.type == "mps" else torch.float64
        norms = [torch.nn.utils.get_total_norm(each) for each in parts.values()]
        totals = torch.stack([each.to(device, precise) for each in norms]).square()
        for ranks, group in self._groups.items():
            shares = [1.0 if ranks in over else 1.0 / len(ranks) for over in parts]
            totals *= torch.tensor(shares, dtype=precise, device=device)
            dist.all_reduce(totals, group=group)
        widest = max((each.dtype for each in norms), key=lambda dtype: dtype.itemsize)
        return totals.sum().sqrt().to(widest)

    def held_by_all(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return those that ranks with the same samples have in common: each has the same of them."""
        return [parameter for parameter in parameters if not self._over(parameter) & self._peers]

    def _over(self, parameter: Tensor) -> frozenset[tuple[int, ...]]:
        """Return the groups of ranks that hold different parts of a parameter."""
        spread: Any = parameter
        if not hasattr(parameter, "placements"):
            return frozenset()
        key = spread.device_mesh, spread.placements
        if key not in self._known:
            every = zip(groups_by_dimension(parameter), spread.placements, strict=True)
            parted = [group for group, placement in every if not placement.is_replicate()]
            found = {members(group): group for group in parted if dist.get_world_size(group) > 1}
            self._groups.update(found)
            self._known[key] = frozenset(found)
        return self._known[key]


def unscale_parts(
    scaler: GradScaler, optimizers: Sequence[Optimizer], share_flags: Callable[[Sequence[Tensor]], None]
) -> None:
    """Divide the loss scale out of this rank's parts; an inf in any part, on any rank, is one for all optimizers.

    torch's own way takes gradients of one mesh alone, and shares a flag as the first of them is spread.
    """
    if not scaler.is_enabled() or not optimizers:
        return
    whole = Parts([p.grad for o in optimizers for g in o.param_groups for p in g["params"] if p.grad is not None])
    scaler.unscale_(whole)  # type: ignore[arg-type]  # it asks for nothing else
    states = scaler._per_optimizer_states  # noqa: SLF001
    state = states.pop(id(whole))
    flags = list(state["found_inf_per_device"].values())
    share_flags(flags)
    anywhere = torch.stack([flag.to(flags[0].device) for flag in flags]).sum()
    for flag in flags:
        flag.copy_(anywhere)
    for optimizer in optimizers:
        states[id(optimizer)] = dict(state)


class Parts:
    """Gradients in parts, as an optimizer has them."""

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        """Hold each by a tensor that has it."""
        self.param_groups = [{"params": [_holder(local(gradient)) for gradient in gradients]}]


def _holder(gradient: Tensor) -> Tensor:
    found = gradient.detach()
    found.grad = gradient
    return found
