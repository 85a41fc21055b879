"""Sums in low precision, and models that do not do the same thing twice."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from bigbatch.state.oom import is_out_of_memory
from bigbatch.verification.causes.model import OUTSIDE, follow
from bigbatch.verification.causes.remedies import cause
from bigbatch.verification.causes.weights import fit, sampled_elements, take, usual_fit
from bigbatch.verification.result import Cause, number
from bigbatch.verification.runner import NOTHING, Runner, attempt
from bigbatch.verification.tolerance import Gradients, overall, relative

_MORE = 3  # times what the big batch itself loses: less may be chance
_ELEMENTS = 32  # the rounding of fewer may be small by chance
_LOWER = (torch.bfloat16, torch.float16, torch.float32)


def lost_in_sums(
    runner: Runner, truth: Gradients, own: Mapping[str, float], floors: Mapping[str, float], notes: list[str]
) -> list[Cause]:
    """Compare with the same micro-batches added up in float64; where that costs one parameter alone, note it."""
    dtype = runner.model.own.dtype
    if dtype not in _LOWER[:2]:
        return []
    eps, parameters = torch.finfo(dtype).eps, runner.model.own.parameters
    found, floor, short = overall(own), overall(floors), str(dtype).removeprefix("torch.")
    lost = [n for n, p in parameters.items() if p.numel() >= _ELEMENTS and own[n] > max(_MORE * floors[n], eps)]
    every = found > max(_MORE * floor, eps)
    weights = attempt(lambda: _right_weights(runner, truth), None) if every or lost else None
    if weights is None:
        return []
    in_float64 = relative(runner.weighted(weights), truth)
    after = overall(in_float64)
    if every and found > _MORE * max(after, floor):
        text = (
            f"in {short} the gradient is off by {number(found)}, where the big batch's own is off by {number(floor)}; "
            f"the same micro-batches added up in float64 come to {number(after)}"
        )
        return [cause("precision", f"{short} gradients", text, loop=runner.is_loop)]
    worst = max(lost, key=lambda n: own[n] / max(floors[n], 1e-30), default=None)
    if worst is not None and own[worst] > _MORE * in_float64[worst]:
        notes.append(
            f"In {short} the gradient of '{worst}' is off by {number(own[worst])}, where the big batch's own is off by "
            f"{number(floors[worst])}; the same micro-batches added up in float64 come to {number(in_float64[worst])}. "
            "All parameters together lose no more than a few times what the big batch does, so that is no failure."
        )
    return []


def _right_weights(runner: Runner, truth: Gradients) -> tuple[float, ...] | None:
    """Return the right weights of the micro-batches, found in float64; None where terms have different ones."""
    dtype, runner.dtype = runner.dtype, torch.float64
    try:
        indices = sampled_elements(truth, {name: p.numel() for name, p in runner.model.own.parameters.items()})
        parts = runner.per_micro_batch(NOTHING, lambda gradients: take(gradients, indices)).gradients
        chosen = take(truth, indices)
        found = fit(chosen, parts) or usual_fit(chosen, parts, runner.samples.sizes)
    finally:
        runner.dtype = dtype
    return found.weights if found.residual < 1e-5 else None  # noqa: PLR2004


def kept_in_less(gradients: Gradients, found: float, *, loop: bool) -> list[Cause]:
    """Whether a float64 model's gradients went through fewer digits: each element is a number of a smaller dtype."""
    every = [g for g in gradients.values() if g is not None and g.numel()]
    for dtype in _LOWER:
        if every and all(bool((g.to(dtype).double() == g).all()) for g in every):
            short = str(dtype).removeprefix("torch.")
            text = (
                f"every element of the gradient is a {short} number, though the model ran in float64: it was added up "
                f"or kept in {short}, which costs {number(found)}"
            )
            return [cause("precision", f"{short} gradients", text, loop=loop)]
    return []


def irreproducible(runner: Runner, apart: float) -> Cause:
    """Find where two runs of the same big batch differ, and whether deterministic kernels change that."""
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(mode=True)
    try:
        after = overall(relative(runner.whole().gradients, runner.whole().gradients))
        text = f"; under torch.use_deterministic_algorithms(True) by {number(after)}"
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        text = f"; torch.use_deterministic_algorithms(True) raises: {str(error).partition(chr(10))[0].rstrip('.')}"
    finally:
        torch.use_deterministic_algorithms(mode=before, warn_only=warns)
    pairs = zip(_outputs(runner), _outputs(runner), strict=False)
    where = next((name or OUTSIDE for (name, one), (_, other) in pairs if one != other), "backward")
    found = f"two runs of the same big batch with the same random state differ by {number(apart)}{text}"
    return cause("nondeterminism", where, found, loop=runner.is_loop)


def _outputs(runner: Runner) -> list[tuple[str, list[float]]]:
    """Return a checksum of what every call of a module returned."""
    seen: list[tuple[str, list[float]]] = []

    def after(name: str, output: object) -> None:
        seen.append((name, [_checksum(each) for each in tree_leaves(output) if isinstance(each, Tensor)]))

    with runner.copy(NOTHING, runner.samples.sizes) as model, torch.no_grad():
        follow(model, [], after=after)
        runner.forward(model, 0, runner.samples.batch.size)
    return seen


def _checksum(tensor: Tensor) -> float:
    flat = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    flat = flat.double().flatten()
    return float(flat @ torch.arange(1, len(flat) + 1, device=flat.device, dtype=torch.float64).sqrt())
