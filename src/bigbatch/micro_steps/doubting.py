"""Before an accusation: what a model really computes in, and whether it does the same twice.

A loss in float64 may stand on float32, also where no gradient comes and no graph shows it, and kernels may add up in
any order. Then a micro-batch's loss is that of its halves up to another rounding than its own dtype's. How far is
measured where it can be: on a micro-batch whose halves are the same samples. Any statistic of it is that of its halves,
so what they differ by is rounding, or what looks at single samples, for which the dtype sets a limit.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bigbatch.micro_steps.coupling import Part, apart, sized, tolerance_of
from bigbatch.micro_steps.survival import let_go

_RUNS = 2  # of the same samples, beside the first
_TIMES = 100  # as far as two roundings of the same: a few of them may be near to each other by chance
# Numbers that are only moved are not rounded; a batch may well be in less than the model that it is cast for.
_MOVES = frozenset(
    "_to_copy clone copy_ detach alias lift_fresh index index_select gather embedding cat stack where flip roll "
    "empty empty_like empty_strided new_empty new_empty_strided zeros zeros_like new_zeros ones ones_like new_ones "
    "full full_like new_full fill_ zero_ scalar_tensor arange".split()
)

Evaluate = Callable[[], list[Part]]


class Precisions(TorchDispatchMode):
    """Notes the lowest precision that numbers are rounded to on their way."""

    def __init__(self) -> None:
        """Have seen nothing yet."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.lowest: torch.dtype | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do it, and look at what came out."""
        del types
        result = func(*args, **(kwargs or {}))
        made, given = _floating(result), _floating((args, kwargs))
        moves = getattr(func, "is_view", False) or getattr(func, "overloadpacket", func).__name__ in _MOVES
        for dtype in made:
            rounds = not moves or any(_is_lower(dtype, each) for each in given)
            if rounds and (self.lowest is None or _is_lower(dtype, self.lowest)):
                self.lowest = dtype
        return result


def rounding(parts: Sequence[Part], evaluate: Evaluate, controls: Sequence[Evaluate]) -> float:
    """Return how far rounding may move the losses of some samples, relatively, as a closer look tells it.

    Args:
        parts: as they were found.
        evaluate: evaluates them again.
        controls: evaluate the same of samples that are there twice: first the halves, then both together. Without
            them it is what the dtype allows, or what repeating it shows.
    """
    own = max(part.tolerance for part in parts)
    precisions = Precisions()
    try:
        with precisions:
            runs = [evaluate()]
        runs += [evaluate() for _ in range(_RUNS - 1)]
        spread = max(_spread([part.value for part in each]) for each in zip(parts, *runs, strict=True))
        limit = tolerance_of(precisions.lowest) if precisions.lowest is not None else own
        if not controls:
            repeated = min(_TIMES * spread, tolerance_of(torch.float32))
            return max(limit, own, repeated)
        if _TIMES * spread > own:  # what does not repeat itself may be kernels that add up in less, and in any order
            limit = max(limit, tolerance_of(torch.float32))
        if limit <= own:
            return own
        measured = max(spread, *(apart(each[-1], each[:-1]) for each in (control() for control in controls)))
    except Exception as error:  # noqa: BLE001 - a model may not like to be looked at: then it is as it was found
        let_go(error)
        return own
    return max(own, min(limit, _TIMES * measured))


def _floating(tree: Any) -> set[torch.dtype]:
    return {each.dtype for each in tree_leaves(tree) if isinstance(each, Tensor) and each.is_floating_point()}


def _is_lower(one: torch.dtype, other: torch.dtype) -> bool:
    return torch.finfo(one).eps > torch.finfo(other).eps


def _spread(values: Sequence[float]) -> float:
    """Return how far values lie apart, relatively; what is not a number says nothing."""
    found = (max(values) - min(values)) / sized(*values)
    return found if math.isfinite(found) else 0.0
