"""The judge of the audit: a loss is accumulated and computed over the true big batch; is it exact, refused or wrong?"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bigbatch import Accumulator, BigStep
from bigbatch.errors import BatchNormError, LossError
from bigbatch.options import Options
from tests.support.samples import join

Batch = dict[str, Tensor]
LossFunction = Callable[[Any, Batch], Tensor]
TOLERANCE = 1e-12  # relative, in float64
FLOOR = 0.1  # a gradient below this may be the rounding of larger numbers that cancel


class Recorder(torch.optim.Optimizer):
    """An optimizer that takes down the gradients of each step and leaves the weights alone."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self.taken: list[Tensor] = []

    def step(self, closure: object = None) -> None:  # type: ignore[override]  # no closure is ever given
        """Take down the gradients."""
        del closure
        self.taken.append(gradient([p for group in self.param_groups for p in group["params"]]))


@dataclass(frozen=True)
class Verdict:
    """What became of a loss: `exact`, `refused`, `wrong` or `crashed`, and the words or the distance."""

    outcome: str
    words: str = ""

    def __str__(self) -> str:
        return f"{self.outcome}: {self.words}" if self.words else self.outcome


def gradient(parameters: Sequence[nn.Parameter]) -> Tensor:
    """All gradients as one vector; zeros where there is none."""
    return torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).detach().double().flatten() for p in parameters]
    )


def plain(model: nn.Module, loss: LossFunction, batch: Batch) -> Tensor:
    """The gradient of one forward and backward over a batch."""
    model.zero_grad()
    loss(model, batch).backward()
    found = gradient(list(model.parameters()))
    model.zero_grad()
    return found


def distance(ours: Tensor, true: Tensor) -> float:
    """How far a gradient is from the true one, relative to its size."""
    found = float((ours - true).norm() / true.norm().clamp_min(FLOOR))
    return found if found == found else float("inf")  # noqa: PLR0124 - NaN is far from everything


def judge(model: nn.Module, loss: LossFunction, windows: Sequence[Sequence[Batch]]) -> Verdict:
    """Accumulate each window with one Accumulator and compare each update with the true big batch."""
    recorder = Recorder(list(model.parameters()))
    accumulator = Accumulator(model, recorder, steps=len(windows[0]))

    def run() -> None:
        for window in windows:
            for batch in window:
                accumulator.backward(loss(model, batch))

    return _judged(run, model, loss, windows, recorder)


def judge_big_step(
    model: nn.Module, loss: LossFunction, windows: Sequence[Sequence[Batch]], size: int, *, check: bool
) -> Verdict:
    """The same with a BigStep, which cuts the windows' big batches by itself."""
    recorder = Recorder(list(model.parameters()))
    step = BigStep(model, recorder, loss, micro_batch_size=size, options=Options(check=check))

    def run() -> None:
        for window in windows:
            step(join(window))

    return _judged(run, model, loss, windows, recorder)


def _judged(
    run: Callable[[], None],
    model: nn.Module,
    loss: LossFunction,
    windows: Sequence[Sequence[Batch]],
    recorder: Recorder,
) -> Verdict:
    model.zero_grad()
    told = Verdict("exact")
    try:
        run()
    except (LossError, BatchNormError) as error:
        told = Verdict("refused", f"{type(error).__name__}: {error}")
    except Exception as error:  # noqa: BLE001 - whatever else it raises is the finding
        return Verdict("crashed", f"{type(error).__name__}: {error}")
    finally:
        model.zero_grad()
    if told.outcome == "exact" and len(recorder.taken) != len(windows):
        return Verdict("wrong", f"{len(recorder.taken)} updates of {len(windows)}")
    for number, (window, ours) in enumerate(zip(windows, recorder.taken, strict=False)):  # also before a refusal
        true = plain(model, loss, join(window))
        off = distance(ours, true)
        if off <= TOLERANCE:
            continue
        # Micro-batches that cancel leave the rounding of their own size.
        size = max(float(plain(model, loss, batch).norm()) for batch in window)
        nudged = {key: x + 1e-14 * x.sin() if x.is_floating_point() else x for key, x in join(window).items()}
        rounding = distance(plain(model, loss, nudged), true)  # large where it divides by what should be zero
        if off * float(true.norm().clamp_min(FLOOR)) / max(size, FLOOR) > max(TOLERANCE, 100 * rounding):
            return Verdict("wrong", f"update {number} is off by {off:.1e}")
    return told


def adds_up(
    model: nn.Module,
    loss: LossFunction,
    windows: Sequence[Sequence[Batch]],
    weights: Callable[[Batch], Sequence[float]],
) -> bool:
    """Whether some weights that a count could give make the micro-batches' gradients the big batch's.

    `weights(batch)` are the counts that a loss may have been averaged over; a plain sum is always tried, too.
    """
    candidates: set[int] | None = None
    for window in windows:
        true = plain(model, loss, join(window))
        parts = torch.stack([plain(model, loss, batch) for batch in window])
        counts = torch.tensor([[1.0, *weights(batch)] for batch in window], dtype=torch.float64)
        shares = counts / counts.sum(0)
        shares[:, 0] = 1.0
        added = {which for which in range(shares.shape[1]) if distance(shares[:, which] @ parts, true) < 1e-9}
        candidates = added if candidates is None else candidates & added
    return bool(candidates)
