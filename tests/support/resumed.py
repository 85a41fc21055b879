"""The second half of an interrupted training, in another process: `python -m tests.support.resumed SAVED RESULT`."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from tests.support.losses import READABLE, SEVERAL
from tests.support.samples import Batch, Loss, mlp, rows
from tests.support.training import MASKED, SIZES, Training

STOP = 5  # micro-batches, of windows of three: in the middle of the second


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer with a state of its own to be carried over."""
    return torch.optim.AdamW(parameters, lr=0.01)


_BF16 = Loss("bf16", lambda: mlp()().bfloat16(), rows, lambda m, b: F.cross_entropy(m(b["x"].bfloat16()), b["partly"]))
_FP16 = Loss("fp16", mlp(), rows, lambda m, b: MASKED.loss(m, b).half())


@dataclass(frozen=True)
class Interrupted:
    """A training that is stopped in mid-window."""

    case: Loss
    options: Callable[[], dict[str, Any]] = dict

    def start(self) -> Training:
        """A fresh training; the same in every process."""
        return Training(steps=3, case=self.case, optimizer=adamw, **self.options())

    @property
    def batches(self) -> list[Batch]:
        """All micro-batches of the epoch."""
        return self.case.micro_batches(SIZES)


TRAININGS: dict[str, Interrupted] = {
    "masked": Interrupted(MASKED, lambda: {"clip_norm": 0.5}),
    "sum+regulariser": Interrupted(next(case for case in READABLE if case.name == "sum+l2")),
    "mean+regulariser": Interrupted(next(case for case in READABLE if case.name == "mean+norms")),
    "several-counts": Interrupted(SEVERAL[1], lambda: {"counts": SEVERAL[1].counts}),
    "bf16": Interrupted(_BF16),
    "bf16-own": Interrupted(_BF16, lambda: {"gradient_dtype": None}),
    "fp16-scaled": Interrupted(_FP16, lambda: {"scaler": torch.amp.GradScaler("cpu")}),
}


def first_half(name: str) -> dict[str, Any]:
    """Train up to the stop, and return what a checkpoint would hold."""
    training = TRAININGS[name].start()
    for place, batch in enumerate(training.accumulator.over(TRAININGS[name].batches), start=1):
        training.backward(batch)
        if place == STOP:
            break
    parts = {name: getattr(training, name) for name in ("model", "optimizer", "accumulator", "scaler")}
    return {name: None if part is None else part.state_dict() for name, part in parts.items()}


def second_half(name: str, saved: dict[str, Any]) -> Training:
    """Load a checkpoint and train on."""
    training = TRAININGS[name].start()
    for part, state in saved.items():
        if state is not None:
            getattr(training, part).load_state_dict(state)
    training.train(TRAININGS[name].batches[STOP:])
    return training


def main(saved: str, result: str) -> None:
    """Go on with every training of a file, and write their weights to another."""
    torch.set_num_threads(1)
    checkpoints = torch.load(Path(saved), weights_only=True)
    torch.save({name: second_half(name, each).weights for name, each in checkpoints.items()}, Path(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
