"""A comparison of arms as text: a table, a few sentences, and what to try next."""

from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from bigbatch.cli.terminal import next_step, paragraph
from bigbatch.recipes.arms import ArmResult, Comparison, Spread
from bigbatch.recipes.findings import findings, relative

ONE_LINE_WIDTH = 100
TABLE_WIDTH = 66


def print_comparison(comparison: Comparison, console: Console, *, clipped: bool) -> None:
    """Print all that `bigbatch train` says of a recipe."""
    clip = f", clipped at {comparison.clip_norm:g}" if comparison.clip_norm is not None else ""
    paragraph(console, f"{comparison.origin}: {comparison.title}{clip}.")
    paragraph(
        console,
        f"{_of(comparison.seeds, 'seed')}, {_of(comparison.epochs, 'epoch')}, the same first weights and order of "
        f"samples in all arms; loss and accuracy on {comparison.validation:,} other samples; {comparison.dtype}, one "
        f"CPU thread, torch {comparison.torch}.",
    )
    console.print()
    if console.width < TABLE_WIDTH:
        _print_blocks(comparison, console)
    else:
        console.print(_table(comparison, one_line=console.width >= ONE_LINE_WIDTH))
    console.print()
    paragraph(
        console,
        "textbook: the loop as the teaching pages print it. "
        + ("±: standard deviation over seeds. " if comparison.seeds > 1 else "")
        + "Time: the fastest epoch's. Memory: tensors alive at once in an update, "
        "its micro-batches among them, weights and data set not. Distance: of the final weights, relative, from "
        f"those of the true batch of {comparison.batch} at the same rate; worst seed.",
    )
    for sentence in findings(comparison):
        console.print()
        paragraph(console, sentence)
    console.print()
    next_step(console, *_next(comparison, clipped=clipped))


def _rows(comparison: Comparison, between: str) -> list[tuple[str, Callable[[ArmResult], str]]]:
    """Return a label and how to fill it, for each row; `between` stands between a mean and its spread."""

    def spread(value: Spread, factor: float, digits: int) -> str:
        around = "" if value.std is None else f"{between}± {factor * value.std:.{digits}f}"
        return f"{factor * value.mean:.{digits}f}{around}"

    rows: dict[str, Callable[[ArmResult], str]] = {
        "learning rate": lambda arm: f"{arm.learning_rate:g}",
        "updates": lambda arm: f"{arm.updates:,}",
        "updates clipped": lambda arm: "" if arm.clipped is None else f"{arm.clipped.updates.mean:.4g}",
        "samples used": lambda arm: f"{arm.samples_used:,}",
        "loss": lambda arm: spread(arm.loss, 1, 3),
        "accuracy %, epoch 1": lambda arm: spread(arm.accuracy_first, 100, 1),
        f"accuracy %, epoch {comparison.epochs}": lambda arm: spread(arm.accuracy_last, 100, 1),
        "ms per update": lambda arm: f"{arm.ms_per_update:.2f}",
        "peak memory, KiB": lambda arm: f"{arm.peak_bytes / 1024:.1f}",
        f"distance from true {comparison.batch}": lambda arm: (
            "itself" if arm is comparison.arms[3] else relative(arm.distance)
        ),
    }
    if comparison.clip_norm is None:
        del rows["updates clipped"]
    return list(rows.items())


def _table(comparison: Comparison, *, one_line: bool) -> Table:
    """Return arms as columns, since five of them fit where nine measurements would not."""
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    table.add_column("")
    for arm in comparison.arms:
        table.add_column(_heading(arm.name), justify="right", no_wrap=True)
    for label, value in _rows(comparison, " " if one_line else "\n"):
        table.add_row(label, *(value(arm) for arm in comparison.arms))
    return table


def _heading(name: str) -> str:
    """Write 'bigbatch 16 × 4, rescaled' on three lines."""
    kind, _, rest = name.partition(" ")
    return f"{kind}\n" + rest.replace(", ", "\n")


def _print_blocks(comparison: Comparison, console: Console) -> None:
    """Print one arm after the other, for terminals too narrow for a table."""
    for arm in comparison.arms:
        console.print(f"\n{arm.name}" if arm is not comparison.arms[0] else arm.name)
        for label, value in _rows(comparison, " "):
            console.print(f"  {label}: {value(arm)}")


def _next(comparison: Comparison, *, clipped: bool) -> tuple[str, str]:
    """Return the next thing worth typing, and why."""
    if comparison.recipe != "textbook":
        return "train FILE.py", "yours: a function setup() that returns a bigbatch.Setup"
    if not clipped:
        return "train --clip 1.0", "the teaching pages' bonus: clip the accumulated gradient"
    return "train adamw", "the teaching pages' second example"


def _of(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
