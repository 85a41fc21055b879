"""A training of a user's file, as text: epoch by epoch, while it runs."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bigbatch.cli.terminal import next_step, paragraph
from bigbatch.recipes.training import Epoch, Training

HUGE = 1e6
NUMBER = 8  # letters, as of 123.4567


def print_epoch(training: Training, path: Path, seed: int, console: Console) -> None:
    """Print the last epoch that is done, in a line that stays whatever comes after; before the first, what it is."""
    if len(training.epochs) == 1:
        paragraph(console, _headline(training, path, seed))
        console.print()
    names = _names(training.epochs)
    headings = ("epoch", "updates", "loss", *names, "ms/update")
    if len(training.epochs) == 1 or names != _names(training.epochs[:-1]):
        _print_row(headings, headings, console)
    epoch = training.epochs[-1]
    cells = (
        str(len(training.epochs)),
        f"{epoch.updates:,}",
        "unknown" if epoch.loss is None else _number(epoch.loss),
        *(_number(epoch.metrics[name]) if name in epoch.metrics else "" for name in names),
        f"{1e3 * epoch.seconds / max(epoch.updates, 1):.2f}",
    )
    _print_row(cells, headings, console)


def print_end(training: Training, path: Path, seed: int, console: Console) -> None:
    """Print, below all epochs, what it cost and what to try next."""
    console.print()
    updates = sum(epoch.updates for epoch in training.epochs)
    skipped = sum(epoch.skipped for epoch in training.epochs)
    if training.clip_norm is not None:
        clipped = sum(epoch.clipped or 0 for epoch in training.epochs)
        norm = f"{training.clip_norm:g}"
        paragraph(console, f"{clipped:,} of {updates:,} updates had a gradient to clip, of a norm above {norm}.")
    if skipped:
        what = "batch" if skipped == 1 else "batches"
        paragraph(console, f"{skipped:,} {what} made no update: nothing was counted, or a gradient was not finite.")
    if training.peak_bytes is not None:
        paragraph(console, f"Peak of CUDA memory: {training.peak_bytes / 2**20:,.0f} MiB.")
    next_step(console, f"train {shlex.quote(str(path))} --seed {seed + 1}", "how much of this is luck?")


def _headline(training: Training, path: Path, seed: int) -> str:
    steps = f"{training.micro_batch_size} × {training.steps}"
    if training.micro_batch_size * training.steps != training.batch_size:
        steps = f"up to {steps}"
    clipped = f", clipped at {training.clip_norm:g}" if training.clip_norm is not None else ""
    coupled = ", in lock-step" if training.lock_step and training.steps > 1 else ""
    return f"{path.name}: batch {training.batch_size} = {steps}{coupled}{clipped}, seed {seed}"


def _print_row(cells: Sequence[str], headings: Sequence[str], console: Console) -> None:
    """Print cells below their headings; what an epoch will bring is not known before, so numbers have room."""
    widths = [max(len(name), NUMBER if place > 1 else 0) for place, name in enumerate(headings)]
    row = "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
    console.print(row, markup=False, soft_wrap=True)


def _names(epochs: Sequence[Epoch]) -> list[str]:
    return list(dict.fromkeys(name for epoch in epochs for name in epoch.metrics))


def _number(value: float) -> str:
    """Write four places, or the order of magnitude where a training has run away."""
    return f"{value:.4f}" if abs(value) < HUGE else f"{value:.2e}"
