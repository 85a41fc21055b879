"""Sums in low precision: what a window loses in the model's own dtype beyond what the big batch loses there, too."""

from collections.abc import Mapping

import torch
from torch import Tensor

from bigbatch.loss.count import LOW_PRECISION
from bigbatch.verifying.evidence import cause
from bigbatch.verifying.gradients import Gradients, overall, relative
from bigbatch.verifying.places import Places
from bigbatch.verifying.runs import Runs
from bigbatch.verifying.table import number
from bigbatch.verifying.trying import tried
from bigbatch.verifying.verification import Cause
from bigbatch.verifying.weights import Fit, fitted, supposed

_MORE = 3  # times what the big batch itself loses: less may be chance
_TELLING = 32  # elements: the rounding of fewer may be small by chance
_LOW = (torch.bfloat16, torch.float16, torch.float32)


def lost_in_sums(
    runs: Runs, truth: Gradients, own: Mapping[str, float], floors: Mapping[str, float], *, loop: bool
) -> list[Cause]:
    """See whether the same micro-batches, added up in float64, come nearer to the truth. Runs in the model's dtype."""
    found, floor = overall(own), overall(floors)
    low = runs.subject.dtype in LOW_PRECISION
    if not low or not found > max(_MORE * floor, torch.finfo(runs.subject.dtype).eps):
        return []
    weights = tried(lambda: _weights(runs, truth), None)
    if weights is None:
        return []
    after = overall(relative(runs.weighed(weights), truth))
    if not found > _MORE * max(after, floor):
        return []
    dtype = str(runs.subject.dtype).removeprefix("torch.")
    text = (
        f"in {dtype} the gradient is off by {number(found)}, where the big batch's own is off by {number(floor)}; the "
        f"same micro-batches added up in float64 come to {number(after)}"
    )
    return [cause("low-precision-sums", f"{dtype} gradients", 1 - after / found, text, loop)]


def lost_in_some(runs: Runs, truth: Gradients, own: Mapping[str, float], floors: Mapping[str, float]) -> list[str]:
    """Name the parameter whose sums lost most, where all of them together lose no more than the big batch does."""
    dtype = runs.subject.dtype
    if dtype not in LOW_PRECISION:
        return []
    enough = [name for name, p in runs.subject.parameters.items() if p.numel() >= _TELLING]
    lost = [name for name in enough if own[name] > max(_MORE * floors[name], torch.finfo(dtype).eps)]
    weights = tried(lambda: _weights(runs, truth), None) if lost else None
    if weights is None:
        return []
    after = relative(runs.weighed(weights), truth)
    lost = [name for name in lost if own[name] > _MORE * after[name]]
    if not lost:
        return []
    worst, name = max(lost, key=lambda each: own[each] / max(floors[each], 1e-30)), str(dtype).removeprefix("torch.")
    said = (
        f"In {name} the gradient of '{worst}' is off by {number(own[worst])}, where the big batch's own is off by "
        f"{number(floors[worst])}; the same micro-batches added up in float64 come to {number(after[worst])}. All "
        "parameters together lose no more than a few times what the big batch does, so that is no failure; sums in "
        "float32 would spare it."
    )
    return [said]


def rounded(gradients: Gradients, differences: Mapping[str, float], *, loop: bool) -> list[Cause]:
    """See whether a float64 model's gradients went through fewer digits: each is a number of a smaller dtype."""
    for dtype in _LOW:
        every = [g for g in gradients.values() if g is not None and g.numel()]
        if every and all(_is_of(g, dtype) for g in every):
            name = str(dtype).removeprefix("torch.")
            text = (
                f"every element of the gradient is a {name} number, though the model ran in float64: it was added up "
                f"or kept in {name}, which costs {number(overall(differences))}"
            )
            return [cause("low-precision-sums", f"{name} gradients", 1.0, text, loop)]
    return []


def _is_of(gradient: Tensor, dtype: torch.dtype) -> bool:
    return bool((gradient.to(dtype).double() == gradient).all())


def _weights(runs: Runs, truth: Gradients) -> tuple[float, ...] | None:
    """Return the right weights of the micro-batches, as precisely as the model's own dtype shows them."""
    sizes = runs.samples.sizes
    by_samples = tuple(size / sum(sizes) for size in sizes)
    dtype, runs.dtype = runs.dtype, torch.float64
    try:
        numbers = {name: p.numel() for name, p in runs.subject.parameters.items()}
        places = Places.in_gradients(truth, numbers)
        parts = runs.parts(places).gradients
        fit: Fit = fitted(places.of(truth), parts) or supposed(places.of(truth), parts, by_samples, sizes)
    finally:
        runs.dtype = dtype
    return fit.weights if fit.residual < 1e-5 else None  # noqa: PLR2004 - else the terms weigh differently
