# ruff: noqa: D102
"""A model with every kind of state that a forward may change, and failures at every point of a window."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.faults.injecting import ERRORS
from tests.faults.injecting import OUT_OF_MEMORY as NAMES
from tests.support.reference import state, trained, weights
from tests.support.samples import CLASSES, Batch

POINTS = ("forward", "module hook", "loss", "backward", "gradient hook", "parameter hook")
OTHER: list[Callable[[], BaseException]] = [
    *(ERRORS[name] for name in ("RuntimeError", "KeyboardInterrupt")),
    lambda: ValueError("user error"),
    lambda: StopIteration("done"),
    lambda: ValueError("out of memory"),  # a text alone makes no error of memory
]


def _caused() -> BaseException:
    error = RuntimeError("backend failed")
    error.__cause__ = MemoryError()
    return error


OUT_OF_MEMORY = [*(ERRORS[name] for name in sorted(NAMES)), _caused]


@dataclass
class Bomb:
    """Goes off at one point of a micro-step with more than `fits` samples, after it was passed `after` times."""

    point: str = ""
    fits: int = 0
    after: int = 0
    error: Callable[[], BaseException] = MemoryError
    went_off: int = 0
    seen: list[int] = field(default_factory=list)  # sizes of all forwards

    def pass_by(self, point: str, samples: int) -> None:
        """Come to a point of a micro-step."""
        if point == "forward":
            self.seen.append(samples)
        if point != self.point or samples <= self.fits:
            return
        self.after -= 1
        if self.after < 0:
            self.went_off += 1
            raise self.error()


class Fuse(torch.autograd.Function):
    """An identity whose backward may fail."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bomb: Bomb) -> Tensor:
        ctx.bomb, ctx.samples = bomb, len(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.bomb.pass_by("backward", ctx.samples)
        return gradients[0], None


class Restless(nn.Module):
    """Dropout, and buffers of every kind: counted in place, replaced, changed through `.data`, never changed."""

    calls: Tensor
    mean: Tensor
    quiet: Tensor
    table: Tensor

    def __init__(self, bomb: Bomb | None = None) -> None:
        super().__init__()
        self.bomb = bomb or Bomb()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.first = nn.Linear(3, 6).double()
            self.last = nn.Linear(6, CLASSES).double()
        self.dropout = nn.Dropout(0.4)
        self.samples = 0
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))
        self.register_buffer("quiet", torch.zeros(6, dtype=torch.float64))
        self.register_buffer("table", torch.linspace(0.5, 1.5, 6, dtype=torch.float64))
        self.register_buffer("absent", None)
        self.last.register_forward_hook(lambda *_: self.bomb.pass_by("module hook", self.samples))
        self.last.weight.register_hook(lambda _: self.bomb.pass_by("parameter hook", self.samples))

    def forward(self, x: Tensor) -> Tensor:
        self.samples = len(x)
        hidden = Fuse.apply(torch.tanh(self.first(x)), self.bomb) * self.table  # type: ignore[no-untyped-call]
        samples = len(x)
        hidden.register_hook(lambda _: self.bomb.pass_by("gradient hook", samples))
        hidden = self.dropout(hidden)
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        self.quiet.data += hidden.detach().sum(0)
        self.bomb.pass_by("forward", len(x))
        return self.last(hidden)


def restless_loss(model: Any, batch: Batch) -> Tensor:
    """A masked cross-entropy whose inputs are jittered by three generators."""
    loss = F.cross_entropy(_jittered(model, batch), batch["partly"])
    model.bomb.pass_by("loss", len(batch["x"]))
    return loss


def two_counts(model: Any, batch: Batch) -> Tensor:
    """The same with a second term over something else, which needs a pass of counting."""
    out = _jittered(model, batch)
    loss = F.cross_entropy(out, batch["partly"]) + 0.3 * F.mse_loss(out, batch["value"])
    model.bomb.pass_by("loss", len(batch["x"]))
    return loss


def _jittered(model: Any, batch: Batch) -> Tensor:
    jitter = random.random() + np.random.rand() + float(torch.rand(()))  # noqa: NPY002, S311 - those that are restored
    out: Tensor = model(batch["x"] + 0.1 * jitter)
    return out


def seed(number: int = 0) -> None:
    """Set all three generators."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 - the one that is restored


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """All that a step may change, in comparable form."""
    numbers: Any = np.random.get_state()  # noqa: NPY002 - the one that is restored
    found: list[Any] = [
        [w.tolist() for w in weights(model)],
        [None if p.grad is None else p.grad.tolist() for p in trained(model)],
        [s.tolist() for s in state(optimizer)],
        {name: buffer.tolist() for name, buffer in model.named_buffers()},
        [m.training for m in model.modules()],
        [getattr(p, "grad_dtype", None) for p in trained(model)],  # torch 2.9 has none
        torch.get_rng_state().numpy().tobytes(),
        random.getstate(),
        (numbers[1].tobytes(), numbers[2:]),
    ]
    return found
