"""What a plan has to say of models whose samples are coupled."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from bigbatch import checks
from bigbatch.memory.budget import human
from bigbatch.memory.host import host_available
from bigbatch.planning.report import Plan


@contextmanager
def single_samples() -> Iterator[None]:
    """Let BatchNorm take a single sample, as it does beside others; what it keeps of one is of no use."""
    functional: Any = F
    refuse, plain = functional._verify_batch_size, functional.batch_norm  # noqa: SLF001 - what raises there

    def batch_norm(x: Tensor, mean: Tensor | None, variance: Tensor | None, *rest: Any, **named: Any) -> Any:
        training = named.get("training", rest[2] if len(rest) > 2 else False)  # noqa: PLR2004 - after weight and bias
        if training and x.numel() == x.shape[1]:
            mean = variance = None
        return plain(x, mean, variance, *rest, **named)

    functional._verify_batch_size, functional.batch_norm = lambda _: None, batch_norm  # noqa: SLF001
    try:
        yield
    finally:
        functional._verify_batch_size, functional.batch_norm = refuse, plain  # noqa: SLF001


def awake_norms(models: Sequence[nn.Module]) -> list[str]:
    """Name the BatchNorm layers that normalise by the batch."""
    return [name for name, module in checks.batch_norms(models) if checks.is_awake(module)]


def coupled_notes(models: Sequence[nn.Module], found: Plan) -> tuple[str, ...]:
    """Say where activations wait while micro-batches run in lock-step, and whether there is room."""
    awake = awake_norms(models)
    if not awake or found.size is None:
        return ()
    if found.steps == 1:
        said = f"BatchNorm ('{awake[0]}') couples the samples: BigStep takes all at once where that fits, and otherwise"
        return (f"{said} runs micro-batches in lock-step; an Accumulator, as in bigbatch train, refuses it.",)
    peaks = [(row.size, row.measured_bytes or row.predicted_bytes) for row in found.rows]
    known = [(size, peak) for size, peak in peaks if peak is not None]
    said = (
        f"BatchNorm ('{awake[0]}'{' and others' if len(awake) > 1 else ''}) couples the samples: micro-batches run in "
        "lock-step, and the activations of the whole batch"
    )
    if len(known) < 2:  # noqa: PLR2004 - a line has two points
        return (f"{said} wait on the device or in host memory.",)
    (small, low), (large, high) = known[0], known[-1]
    waiting = int((high - low) / (large - small) * found.batch_size)
    there = host_available()
    room = "more than is free: a step would be refused" if waiting > there else f"of {human(there)} that are free"
    return (f"{said}, about {human(max(waiting, 0))}, wait in host memory where the device has no room, {room}.",)
