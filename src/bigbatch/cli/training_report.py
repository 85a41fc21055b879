"""A finished training of a user's file, as text."""

import math
import shlex
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bigbatch.cli.terminal import next_step, paragraph
from bigbatch.recipes.training import Training

HUGE = 1e6


def print_training(training: Training, path: Path, seed: int, console: Console) -> None:
    """Epoch by epoch, then what it cost and what to try next."""
    names = list(dict.fromkeys(name for epoch in training.epochs for name in epoch.metrics))
    table = Table(box=None, pad_edge=False)
    for heading in ("epoch", "updates", "loss", *names, "ms/update"):
        table.add_column(heading, justify="right", overflow="fold")
    for number, epoch in enumerate(training.epochs, start=1):
        table.add_row(
            str(number),
            f"{epoch.updates:,}",
            "unknown" if epoch.loss is None else _number(epoch.loss),
            *(_number(epoch.metrics[name]) if name in epoch.metrics else "" for name in names),
            f"{1e3 * epoch.seconds / max(epoch.updates, 1):.2f}",
        )
    steps = f"{training.micro_batch_size} × {training.steps}"
    if training.micro_batch_size * training.steps * training.ranks != training.batch_size:
        steps = f"up to {steps}"
    clipped = f", clipped at {training.clip_norm:g}" if training.clip_norm is not None else ""
    ranks = f" on each of {training.ranks} ranks" if training.ranks > 1 else ""
    paragraph(console, f"{path.name}: batch {training.batch_size} = {steps}{ranks}{clipped}, seed {seed}")
    console.print()
    console.print(table)
    console.print()
    for sentence in _remarks(training):
        paragraph(console, sentence)
    next_step(console, f"train {shlex.quote(str(path))} --seed {seed + 1}", "how much of this is luck?")


def _number(value: float) -> str:
    """Four places, or the order of magnitude where a training has run away."""
    return f"{value:.4f}" if abs(value) < HUGE else f"{value:.2e}"


def _remarks(training: Training) -> Iterator[str]:
    """What is worth a sentence, where it happened."""
    updates = sum(epoch.updates for epoch in training.epochs)
    skipped = sum(epoch.skipped for epoch in training.epochs)
    if training.clip_norm is not None:
        clipped = sum(epoch.clipped or 0 for epoch in training.epochs)
        yield f"{clipped:,} of {updates:,} updates had a gradient to clip, of a norm above {training.clip_norm:g}."
    if skipped:
        what = "window" if skipped == 1 else "windows"
        yield f"{skipped:,} {what} made no update: nothing was counted, or a gradient was not finite."
    if any(epoch.loss is not None and not math.isfinite(epoch.loss) for epoch in training.epochs):
        yield (
            "The loss is not finite: try a smaller learning rate, clip_norm=1.0, or skip_nonfinite=True if single "
            "batches are to blame."
        )
    if training.peak_bytes is not None:
        yield f"Peak of CUDA memory: {training.peak_bytes / 2**20:,.0f} MiB."
