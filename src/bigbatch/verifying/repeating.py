"""A model that does not do the same thing twice: where, and whether deterministic kernels would."""

import torch
from torch import Tensor

from bigbatch.state.oom import is_out_of_memory
from bigbatch.verifying.apart import tensors
from bigbatch.verifying.evidence import cause
from bigbatch.verifying.gradients import overall, relative
from bigbatch.verifying.looking import OUTSIDE, Stack, following
from bigbatch.verifying.runs import Runs
from bigbatch.verifying.table import number
from bigbatch.verifying.turning_off import NOTHING
from bigbatch.verifying.verification import Cause


def unlike_itself(runs: Runs, apart: float, share: float, *, loop: bool) -> Cause:
    """Say what it is that two runs of the same big batch, with the same random numbers, differ in."""
    after, refused = _deterministic(runs)
    where = _first_unlike(_outputs(runs), _outputs(runs)) or "backward"
    text = f"two runs of the same big batch with the same random state differ by {number(apart)}"
    if "CUBLAS_WORKSPACE_CONFIG" in refused:
        how = "CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment, and torch.use_deterministic_algorithms(True)"
    elif refused:
        text += f"; torch.use_deterministic_algorithms(True) refuses: {refused}"
        how = "Take another operation, which torch.use_deterministic_algorithms(True) accepts; no split is to blame."
    elif after is not None and after < apart / 100:
        text += f", and under torch.use_deterministic_algorithms(True) by {number(after)}"
        how = "torch.use_deterministic_algorithms(True)"
    else:
        text += ", and no deterministic kernel changes that: something keeps numbers of its own"
        how = (
            "Look for a torch.Generator, a clock, a counter or a file that forward reads; draw from torch's default "
            "generators, which can be put back."
        )
    return cause("nondeterminism", where, share, text, loop, how=how)


def _deterministic(runs: Runs) -> tuple[float | None, str]:
    """Return how far two runs lie apart with deterministic kernels, or why there are none."""
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(mode=True)
    try:
        one, other = runs.whole(), runs.whole()
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        return None, str(error).partition("\n")[0].rstrip(".") if "eterminis" in str(error) else ""
    finally:
        torch.use_deterministic_algorithms(mode=before, warn_only=warns)
    return overall(relative(one.gradients, other.gradients)), ""


def _outputs(runs: Runs) -> list[tuple[str, tuple[float, ...]]]:
    """Return a mark of what every call of a module gave."""
    seen: list[tuple[str, tuple[float, ...]]] = []

    def after(name: str, output: object) -> None:
        seen.append((name, tuple(_mark(each) for each in tensors(output))))

    with runs.standing(NOTHING) as standing, following(standing, Stack(), after=after), torch.no_grad():
        runs.call(standing, runs.samples.whole(runs.dtype))
    return seen


def _mark(tensor: Tensor) -> float:
    if tensor.is_complex():
        return 0.0
    flat = tensor.detach().double().flatten()
    return float(flat @ torch.arange(1, len(flat) + 1, device=flat.device, dtype=torch.float64).sqrt())


def _first_unlike(one: list[tuple[str, tuple[float, ...]]], other: list[tuple[str, tuple[float, ...]]]) -> str | None:
    for (name, marks), (_, again) in zip(one, other, strict=False):
        if marks != again:
            return name or OUTSIDE
    return None
