"""A finished training of a user's file, as text."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from bigbatch.recipes.training import Training


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
            "unknown" if epoch.loss is None else f"{epoch.loss:.4f}",
            *(f"{epoch.metrics[name]:.4f}" if name in epoch.metrics else "" for name in names),
            f"{1e3 * epoch.seconds / max(epoch.updates, 1):.2f}",
        )
    steps = f"{training.micro_batch_size} × {training.steps}"
    clipped = f", clipped at {training.clip_norm:g}" if training.clip_norm is not None else ""
    console.print(f"{path.name}: batch {training.batch_size} = {steps}{clipped}, seed {seed}\n")
    console.print(table)
    console.print()
    skipped = sum(epoch.skipped for epoch in training.epochs)
    if skipped:
        console.print(f"{skipped:,} windows made no update.")
    if training.peak_bytes is not None:
        console.print(f"Peak of CUDA memory: {training.peak_bytes / 2**20:,.0f} MiB.")
    console.print(f"Next: bigbatch train {path} --seed {seed + 1}  (how much of this is luck?)", soft_wrap=True)
