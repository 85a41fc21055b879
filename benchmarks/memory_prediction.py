"""How well a trace without a GPU predicts the peak of a training step on one.

    python -m benchmarks.memory_prediction [--device cuda] [--only GPT] [--json] [--out FOLDER]

For three kinds of model and three sizes of micro-batch each, the peak is predicted by tracing and then measured:
forward, backward and a step of the optimizer, with gradients and its state allocated.
"""

import argparse
import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import models
from benchmarks.machine import this_machine
from benchmarks.peak_memory import peak_bytes
from benchmarks.report import RESULTS, Grid, Report, progress
from bigbatch.memory.budget import human
from bigbatch.planner.trace import Prediction, predict

Batch = tuple[Tensor, Tensor]
BAR = 0.10
HELD = ("weights", "gradients", "optimizer state", "workspaces")


@dataclass(frozen=True)
class Case:
    """A model, its samples and the sizes to try; `small` stands in for it where there is no GPU."""

    name: str
    model: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    classes: int
    sizes: tuple[int, int, int]
    autocast: bool = False

    def batch(self, size: int, device: str) -> Batch:
        """Return samples and a label for every prediction."""
        inputs = self.inputs(size)
        predictions = size if inputs.is_floating_point() else inputs.numel()
        return inputs.to(device), torch.randint(self.classes, (predictions,)).to(device)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross-entropy."""
        with torch.autocast(batch[0].device.type, dtype=torch.bfloat16, enabled=self.autocast):
            return F.cross_entropy(model(batch[0]).view(-1, self.classes), batch[1])


class Bottleneck(nn.Module):
    """Three convolutions around a shortcut."""

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        out = 4 * inner
        self.body = nn.Sequential(
            *_conv(channels, inner, 1),
            nn.ReLU(),
            *_conv(inner, inner, 3, stride),
            nn.ReLU(),
            *_conv(inner, out, 1),
        )
        same = stride == 1 and channels == out
        self.shortcut = nn.Identity() if same else nn.Sequential(*_conv(channels, out, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        """Add what the convolutions found."""
        return F.relu(self.body(x) + self.shortcut(x))


def _conv(channels: int, out: int, kernel: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    """Return a convolution and its norm: groups, since BatchNorm would couple the samples."""
    return nn.Conv2d(channels, out, kernel, stride, kernel // 2, bias=False), nn.GroupNorm(32, out)


def resnet_50() -> nn.Module:
    """Return ResNet-50 with GroupNorm: 25.6 M parameters."""
    layers: list[nn.Module] = [*_conv(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for stage, (inner, blocks) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)]):
        for number in range(blocks):
            layers.append(Bottleneck(channels, inner, 2 if stage and not number else 1))
            channels = 4 * inner
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


def small_cnn() -> nn.Module:
    """Return two bottlenecks, for a machine without a GPU."""
    return nn.Sequential(
        *_conv(3, 64, 7, 2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        Bottleneck(64, 32, 1),
        Bottleneck(128, 32, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def wide_mlp() -> nn.Module:
    """Return a perceptron of 61 M parameters."""
    hidden = [layer for _ in range(3) for layer in (nn.Linear(4096, 4096), nn.GELU())]
    return nn.Sequential(nn.Linear(2048, 4096), nn.GELU(), *hidden, nn.Dropout(0.1), nn.Linear(4096, 1000))


def cases(device: str) -> list[Case]:
    """What is predicted on this kind of device."""
    if device.startswith("cuda"):
        return [
            Case(
                "GPT-124M, bf16 autocast",
                models.gpt_124m,
                lambda n: torch.randint(50304, (n, 1024)),
                50304,
                (1, 8, 32),
                autocast=True,
            ),
            Case("ResNet-50, GroupNorm", resnet_50, lambda n: torch.randn(n, 3, 224, 224), 1000, (8, 64, 256)),
            Case("MLP, 61 M", wide_mlp, lambda n: torch.randn(n, 2048), 1000, (256, 4096, 32768)),
        ]
    return [
        Case("GPT, 4 layers of 128", models.small_gpt, lambda n: torch.randint(65, (n, 64)), 65, (1, 8, 32)),
        Case("two bottlenecks", small_cnn, lambda n: torch.randn(n, 3, 64, 64), 10, (1, 4, 16)),
        Case("MLP 784→512→512→10", models.perceptron, lambda n: torch.randn(n, 784), 10, (32, 256, 2048)),
    ]


@dataclass(frozen=True)
class Measured:
    """One prediction and what came of it."""

    model: str
    size: int
    predicted: int
    measured: int
    reserved: int
    ratio: float
    parts: dict[str, int]  # of the prediction
    phases: dict[str, int]  # measured: what is held, and the peak of each phase beside that


def measure(case: Case, device: str) -> Iterator[Measured]:
    """Yield one row for each size."""
    cuda = device.startswith("cuda")
    torch.manual_seed(0)
    model = case.model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=cuda)
    _train(case, model, optimizer, case.batch(1, device))  # libraries' workspaces and the optimizer's state
    for size in case.sizes:
        told = predict(model, case.loss, case.batch(size, "cpu"), optimizer, target="cuda" if cuda else "cpu")
        gc.collect()
        yield _row(case, size, told, _measured(case, model, optimizer, size, device))
    optimizer.zero_grad(set_to_none=True)


def _train(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    case.loss(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)  # as in the middle of a window, gradients are there


def _measured(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, size: int, device: str) -> dict[str, int]:
    """Return what is held while nothing runs and what each phase takes beside it; `total` is the peak of all."""
    cuda = device.startswith("cuda")
    before = torch.cuda.memory_allocated() if cuda else _bytes_of(model, optimizer)
    batch = case.batch(size, device)
    samples = sum(-(-t.nbytes // 512) * 512 if cuda else t.nbytes for t in batch)
    loss, forward = peak_bytes(lambda: case.loss(model, batch), device)
    kept = torch.cuda.memory_allocated() - before - samples if cuda else 0
    del loss
    # A backward alone frees what the forward made, so on a CPU, which counts from its start, both run together.
    _, both = peak_bytes(lambda: case.loss(model, batch).backward(), device)
    reserved = torch.cuda.max_memory_reserved() if cuda else 0
    _, step = peak_bytes(optimizer.step, device)
    optimizer.zero_grad(set_to_none=False)
    total = before + max(samples + both, step)
    phases = {"held": before, "batch": samples, "forward": forward, "kept for backward": kept}
    return phases | {"forward and backward": both, "step": step, "total": total, "reserved": reserved}


def _bytes_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    state = [v for each in optimizer.state.values() for v in each.values() if isinstance(v, Tensor)]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers(), *gradients, *state))


def _row(case: Case, size: int, told: Prediction, phases: dict[str, int]) -> Measured:
    parts = {
        "weights": told.weights,
        "gradients": told.gradients,
        "optimizer state": told.optimizer_state,
        "workspaces": told.workspaces,
        "batch": told.batch,
        "forward": told.forward,
        "backward": told.backward,
        "step": told.optimizer_step,
    }
    ratio = told.peak / phases["total"]
    return Measured(case.name, size, told.peak, phases["total"], phases["reserved"], ratio, parts, phases)


def grids(rows: list[Measured]) -> list[Grid]:
    """The ratios first, then the parts that explain them."""
    ratios: list[tuple[str, ...]] = [
        (
            f"{row.model}, {row.size:,}",
            human(row.predicted),
            human(row.measured),
            f"{row.ratio:.3f}",
            "yes" if abs(row.ratio - 1) <= BAR else "no",
        )
        for row in rows
    ]
    parts: list[tuple[str, ...]] = [
        (
            f"{row.model}, {row.size:,}",
            _pair(
                row.predicted - row.parts["batch"] - max(row.parts["forward"], row.parts["backward"]),
                row.phases["held"],
            ),
            _pair(row.parts["forward"], row.phases["forward"]),
            _pair(max(row.parts["forward"], row.parts["backward"]), row.phases["forward and backward"]),
            _pair(row.parts["step"], row.phases["step"]),
        )
        for row in rows
    ]
    return [
        Grid("Peak of a training step", ("", "predicted", "measured", "ratio", f"within {BAR:.0%}"), ratios),
        Grid(
            "Its phases, predicted / measured",
            ("", "held all the time", "forward", "forward and backward", "optimizer's step"),
            parts,
        ),
    ]


def _pair(predicted: int, measured: int) -> str:
    return f"{human(predicted)} / {human(measured)}"


def main() -> int:
    """Predict, measure, show, keep. Fails where a prediction is off by more than the bar."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--only", default="", metavar="TEXT", help="models whose name contains this")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the tables")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for memory-prediction.json and .md")
    options = parser.parse_args()
    chosen = [case for case in cases(options.device) if options.only.lower() in case.name.lower()]
    rows: list[Measured] = []
    with progress() as bar:
        task = bar.add_task("", total=sum(len(case.sizes) for case in chosen))
        for case in chosen:
            bar.update(task, description=case.name)
            for row in measure(case, options.device):
                rows.append(row)
                bar.advance(task)
    note = (
        "Predicted by `bigbatch.planner.trace.predict` on tensors without numbers; measured with gradients and "
        "optimizer state allocated, as in the middle of a window. On a CPU the tensors are counted, not the process."
    )
    report = Report("memory-prediction", this_machine(options.device), grids(rows), [note], list(rows))
    report.show(as_json=options.json)
    report.write(options.out)
    return int(any(abs(row.ratio - 1) > BAR for row in rows))


if __name__ == "__main__":
    sys.exit(main())
