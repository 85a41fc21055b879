"""Does a loss look from one sample to another? Change some samples on their way, and see if the others' gradients move.

In a mean or a sum over samples, the gradient that comes back to a sample is its own affair. In the root of a mean it is
the same but for a factor that all share; in a contrastive loss it is another one.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor

from bigbatch.verifying.looking import Stack, following
from bigbatch.verifying.runs import Runs
from bigbatch.verifying.subject import Standing
from bigbatch.verifying.trying import tried
from bigbatch.verifying.turning_off import Off

Shape = Literal["separate", "nonlinear", "coupled", "unknown"]
_PART = 0.9  # of another sample, mixed into one: between the two there is nothing that a loss could not take


def shape_of_loss(runs: Runs, off: Off, tolerance: float) -> Shape:
    """Say how the loss depends on several samples at once, from the first module on."""
    return _shape(runs, off, tolerance, "first")


def shape_after_model(runs: Runs, off: Off, tolerance: float) -> Shape:
    """The same from the model's own output on: what is seen from there is in the loss, not in the model.

    A model that returns its loss is looked at from its last layer on.
    """
    return _shape(runs, off, tolerance, "last")


def _shape(runs: Runs, off: Off, tolerance: float, which: Literal["first", "last"]) -> Shape:
    calls = _calls(runs, off)
    if not calls:
        return "unknown"
    place, dim = calls[0] if which == "first" else calls[-1]
    plain, mixed = _returned(runs, off, place, dim, mix=False), _returned(runs, off, place, dim, mix=True)
    if plain is None or mixed is None or plain.shape != mixed.shape:
        return "unknown"
    size = float(plain.norm())
    if not size or not bool(torch.isfinite(plain).all() & torch.isfinite(mixed).all()):
        return "unknown"
    if float((mixed - plain).norm()) <= tolerance * size:
        return "separate"
    factor = float((mixed * plain).sum()) / size**2
    return "nonlinear" if float((mixed - factor * plain).norm()) <= tolerance * size else "coupled"


def _calls(runs: Runs, off: Off) -> list[tuple[int, int]]:
    """Return the numbers of those calls of layers whose outputs have samples, and along which dimension.

    Along it there are fewer rows for fewer samples: a table of positions may have as many by chance.
    """
    samples = runs.samples.number
    every = _outputs(runs, off, samples)
    fewer = _outputs(runs, off, samples // 2)
    found = []
    for number, shape in every.items():
        other = fewer.get(number, ())
        dims = [
            d for d in range(min(2, len(shape))) if len(shape) == len(other) and _scales(shape[d], other[d], samples)
        ]
        if dims:
            found.append((number, dims[0]))
    return found


def _scales(rows: int, fewer: int, samples: int) -> bool:
    return rows > 0 and rows % samples == 0 and rows // samples * (samples // 2) == fewer


def _outputs(runs: Runs, off: Off, samples: int) -> dict[int, tuple[int, ...]]:
    """Return the shapes of what layers with weights give, by the number of the call."""
    seen: dict[int, tuple[int, ...]] = {}
    counter = _Counter(off)
    sizes = runs.samples.sizes if samples == runs.samples.number else ()
    with runs.standing(off, sizes) as standing:
        layers = _layers(standing)

        def after(name: str, output: Any) -> None:
            number, found = counter.next(), _with_gradient(output)
            if number is not None and name in layers and found is not None:
                seen[number] = tuple(found.shape)

        with following(standing, counter.stack, after=after):
            runs.call(standing, runs.samples.rows(0, samples, runs.dtype))
    return seen


def _returned(runs: Runs, off: Off, place: int, dim: int, *, mix: bool) -> Tensor | None:
    """Return the gradients that come back to the second half of the samples, where the first is mixed or is not."""
    samples, first, counter = runs.samples.number, _first_half(runs), _Counter(off)
    caught: list[Tensor] = []

    def after(_name: str, output: Any) -> Any:
        if counter.next() != place:
            return None
        found = _with_gradient(output)
        if found is None:
            return None
        rows = found.detach().movedim(dim, 0)
        half = rows.shape[0] // samples * first
        if mix:
            rows = torch.cat([(1 - _PART) * rows[:half] + _PART * rows[half : half + 1], rows[half:]])
        caught.append(rows.movedim(0, dim).clone().requires_grad_())
        return _put(output, found, caught[0].clone())  # a leaf may not be written into, as an in-place ReLU does

    def around(standing: Standing) -> AbstractContextManager[None]:
        return following(standing, counter.stack, after=after)

    tried(lambda: runs.whole(off, around=around), None)
    if not caught or caught[0].grad is None:
        return None
    gradient = caught[0].grad.movedim(dim, 0)
    return gradient[gradient.shape[0] // samples * first :].double()


def _first_half(runs: Runs) -> int:
    """Return how many samples the first half of the micro-batches has: within one they may be beside each other."""
    sizes = runs.samples.sizes
    return sum(sizes[: len(sizes) // 2])


class _Counter:
    """Numbers the calls of modules, but for those inside of one that runs several times, for each micro-batch."""

    def __init__(self, off: Off) -> None:
        self._number, self._apart = -1, off.apart_names
        self.stack = Stack()

    def next(self) -> int | None:
        if self._apart.intersection(self.stack.names):
            return None
        self._number += 1
        return self._number


def _layers(standing: Standing) -> set[str]:
    """Name the modules that have weights of their own, and the model itself, behind whose output there is no more."""
    modules = standing.modules.items()
    return {name for name, m in modules if m in standing.models or next(m.parameters(recurse=False), None) is not None}


def _with_gradient(output: Any) -> Tensor | None:
    """Return the first tensor of an output that gradients come back to."""
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else (output,)
    return next((v for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.requires_grad), None)


def _put(output: Any, found: Tensor, instead: Tensor) -> Any:
    if output is found:
        return instead
    if isinstance(output, tuple):
        made = [instead if each is found else each for each in output]
        return type(output)(*made) if hasattr(output, "_fields") else tuple(made)
    if isinstance(output, dict):
        for key, value in output.items():
            if value is found:
                output[key] = instead
        return output
    return None
