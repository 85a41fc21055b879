"""Does a loss couple samples? Change some samples on their way, and see whether the gradients of others move.

In a mean or a sum over samples, the gradient that comes back to a sample depends on that sample alone.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from bigbatch.verification.causes.model import OUTSIDE, Disabled, follow
from bigbatch.verification.model_copy import ModelCopy
from bigbatch.verification.runner import Runner, attempt

_PART = 0.9  # of another sample, mixed into one: between the two there is nothing that a loss could not take


def coupling_place(runner: Runner, off: Disabled, tolerance: float) -> str:
    """Return where samples are coupled behind the layers: in the loss or in the model's own forward; else nothing."""
    calls = attempt(lambda: _sampled_calls(runner, off), list[tuple[int, int]]())
    if not calls or not _couples(runner, off, calls[0], tolerance):
        return ""
    # What shows from the model's own output on is in the loss. A model that returns its loss has no such output.
    in_loss = runner.has_loss_fn and _couples(runner, off, calls[-1], tolerance)
    return OUTSIDE if in_loss else f"{type(runner.model.own.models[0]).__name__}.forward"


def _sampled_calls(runner: Runner, off: Disabled) -> list[tuple[int, int]]:
    """Return the calls of layers whose output has samples, each with the dimension of its samples."""
    number = runner.samples.batch.size
    every, fewer = (_shapes(runner, off, n) for n in (number, number // 2))
    found = []
    for call, shape in every.items():
        other = fewer.get(call, ())
        for dim in range(min(2, len(shape)) if len(other) == len(shape) else 0):
            if shape[dim] % number == 0 and 0 < shape[dim] // number * (number // 2) == other[dim]:
                found.append((call, dim))
                break
    return found


def _shapes(runner: Runner, off: Disabled, samples: int) -> dict[int, tuple[int, ...]]:
    """Return the shapes of what layers with weights return, by the number of the call."""
    shapes: dict[int, tuple[int, ...]] = {}
    whole = samples == runner.samples.batch.size
    with runner.copy(off, runner.samples.sizes if whole else (samples,)) as model:
        layers = {
            n
            for n, m in model.modules.items()
            if m in model.models or next(m.parameters(recurse=False), None) is not None
        }

        def seen(call: int, name: str, output: Any) -> None:
            tensor = _with_gradient(output)
            if name in layers and tensor is not None:
                shapes[call] = tuple(tensor.shape)

        _number_calls(model, off, seen)
        runner.forward(model, 0, samples)
    return shapes


def _couples(runner: Runner, off: Disabled, call: tuple[int, int], tolerance: float) -> bool:
    plain, mixed = (_returned(runner, off, *call, mix=mix) for mix in (False, True))
    if plain is None or mixed is None or plain.shape != mixed.shape or not bool(torch.isfinite(mixed).all()):
        return False
    size = float(plain.norm())
    return bool(size) and float((mixed - plain).norm()) > tolerance * size


def _returned(runner: Runner, off: Disabled, place: int, dim: int, *, mix: bool) -> Tensor | None:
    """Return the gradients that come back to the second half of the micro-batches; the first is mixed, or is not."""
    sizes, samples = runner.samples.sizes, runner.samples.batch.size
    first = sum(sizes[: len(sizes) // 2])
    caught: list[Tensor] = []

    def replaced(call: int, _name: str, output: Any) -> Any:
        found = _with_gradient(output) if call == place else None
        if found is None:
            return None
        rows = found.detach().movedim(dim, 0)
        half = rows.shape[0] // samples * first
        if mix:
            rows = torch.cat([(1 - _PART) * rows[:half] + _PART * rows[half : half + 1], rows[half:]])
        caught.append(rows.movedim(0, dim).clone().requires_grad_())
        instead = caught[0].clone()  # a leaf may not be written into, as an in-place ReLU does
        return tree_map(lambda leaf: instead if leaf is found else leaf, output)

    def around(model: ModelCopy) -> nullcontext[None]:
        _number_calls(model, off, replaced)
        return nullcontext()

    attempt(lambda: runner.whole(off, around=around), None)
    if not caught or caught[0].grad is None:
        return None
    gradient = caught[0].grad.movedim(dim, 0)
    return gradient[gradient.shape[0] // samples * first :].double()


def _number_calls(model: ModelCopy, off: Disabled, seen: Callable[[int, str, Any], Any]) -> None:
    """Number the calls of modules, but for those inside one that runs once for each micro-batch."""
    stack, calls = list[str](), 0

    def after(name: str, output: Any) -> Any:
        nonlocal calls
        if off.split.keys() & set(stack):
            return None
        calls += 1
        return seen(calls, name, output)

    follow(model, stack, after=after)


def _with_gradient(output: Any) -> Tensor | None:
    """Return the first tensor of an output that gradients come back to."""
    leaves = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
    return next((leaf for leaf in leaves if leaf.is_floating_point() and leaf.requires_grad), None)
