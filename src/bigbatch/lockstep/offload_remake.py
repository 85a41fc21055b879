"""What is cheaper to compute again than to store: a normalised activation, of the input that BatchNorm keeps anyway.

Of a convolution, a BatchNorm and a ReLU autograd saves two large tensors: the convolution's output, which the norm
needs in backward, and the ReLU's, which the next convolution needs. The second is a function of the first, value by
value.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from bigbatch.loss.graph import stands_for
from bigbatch.state.patch import Swap

# Of one tensor, value by value, with `inplace` as their only other way.
_ACTIVATIONS = ("relu", "relu6", "silu", "hardswish", "leaky_relu", "elu", "mish")
_relu = F.relu


@dataclass(frozen=True)
class Recipe:
    """How to make a tensor of another that is kept."""

    source: Any  # the norm's input, as it is kept
    normalise: Callable[[Tensor], Tensor]
    activate: "partial[Tensor] | None" = None


class Recipes:
    """How the tensors of a window were made, as long as they live; `store` and `load` keep what they were made of."""

    def __init__(self, store: Callable[[Tensor], Any], load: Callable[[Any], Tensor]) -> None:
        self.store, self._load = store, load
        self.forget()

    def forget(self) -> None:
        """Know of none: forward is over, or the window."""
        # By their memory, to which the reference keeps the name.
        self._known: dict[int, tuple[StorageWeakRef, tuple[Any, ...], Recipe]] = {}
        self._latest: tuple[Recipe, Tensor] | None = None

    def hooks(self) -> AbstractContextManager[Any]:
        """Have what autograd saves inside stored, or made again where there is a recipe."""
        return saved_tensors_hooks(self._pack, self._unpack)

    @property
    def in_force(self) -> bool:
        """Whether it is these hooks that take what is saved, and not those of a checkpoint inside."""
        return _in_force() is self

    def _pack(self, tensor: Tensor) -> Any:
        return self.of(tensor) or self.store(tensor)

    def _unpack(self, packed: Any) -> Tensor:
        return self.made(packed) if isinstance(packed, Recipe) else self._load(packed)

    _unpack.shows = True  # type: ignore[attr-defined]  # a loss's small tensors are where they were: the reader may look

    def made(self, recipe: Recipe) -> Tensor:
        """Make a tensor again; the latest is still there: a convolution and the activation below both ask for it."""
        if self._latest is None or self._latest[0] is not recipe:
            self._latest = None  # its memory may serve
            found = recipe.normalise(self._load(recipe.source))
            self._latest = recipe, found if recipe.activate is None else recipe.activate(found)
        return self._latest[1]

    def add(self, result: Tensor, recipe: Recipe) -> None:
        """Remember how a tensor was made."""
        reference = StorageWeakRef(result.untyped_storage())
        self._known[reference.cdata] = reference, view_of(result), recipe

    def of(self, tensor: Tensor) -> Recipe | None:
        """Return how a tensor was made, if it is as it was then."""
        if type(tensor) is not Tensor or tensor.layout != torch.strided:  # others may have no memory of their own
            return None
        known = self._known.get(tensor.untyped_storage()._cdata)  # noqa: SLF001
        return known[2] if known is not None and known[1] == view_of(tensor) else None


def _in_force() -> Recipes | None:
    """Return the recipes whose hooks take what is saved on this thread, and not those of a checkpoint inside."""
    autograd: Any = torch._C._autograd  # noqa: SLF001 - no public name
    top = autograd._top_saved_tensors_default_hooks(True)  # noqa: FBT003, SLF001
    owner = getattr(top[0], "__self__", None) if top is not None else None
    return owner if isinstance(owner, Recipes) else None


def _knowing(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def activation(input: Tensor, *arguments: Any, **named: Any) -> Tensor:  # noqa: A002 - torch's name
        # Not inside of a checkpoint: there it would be another operation when it runs again.
        recipes = _in_force() if torch.is_grad_enabled() and input.requires_grad else None
        recipe = recipes.of(input) if recipes is not None else None
        if recipes is None or recipe is None or recipe.activate is not None or arguments:
            return plain(input, *arguments, **named)
        inplace = bool(named.pop("inplace", False))
        own = replace(recipe, activate=partial(plain, **named))
        found: Tensor = _Activated.apply(input, inplace, recipes, recipe, own)  # type: ignore[no-untyped-call]
        recipes.add(found, own)
        return found

    return activation


class _Activated(torch.autograd.Function):
    """An activation whose backward makes its input again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inplace: bool, recipes: Recipes, recipe: Recipe, own: Recipe) -> Tensor:  # noqa: FBT001, PLR0917 - `apply` takes no names
        ctx.recipes, ctx.recipe, ctx.own, function = recipes, recipe, own, own.activate
        assert function is not None  # noqa: S101 - it is one of an activation
        if inplace:
            ctx.mark_dirty(x)
        return function(x, inplace=inplace)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        recipes, function = ctx.recipes, ctx.own.activate
        if function.func is _relu:  # the gradient goes where the result is above zero: that is there already
            below = torch.ops.aten.threshold_backward(gradients[0], recipes.made(ctx.own), 0)
        else:
            with torch.enable_grad():
                x = recipes.made(ctx.recipe).detach().requires_grad_()
                (below,) = torch.autograd.grad(function(x), x, gradients[0])
        return below, None, None, None, None


def view_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return how a tensor sees its memory, and as of which change: two of one memory that agree hold the same."""
    seen = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
    turned = (tensor.is_conj(), tensor.is_neg())  # a conjugate is a view that looks like what it is of
    return *seen, *turned, tensor._version  # noqa: SLF001 - torch's counter of changes


stands_for(_Activated, "Relu")  # pointwise, as that is
# Inside of these the activations of normalised values are known as such, on workers that have recipes.
activation_swaps = [Swap(F, name, _knowing) for name in _ACTIVATIONS]
