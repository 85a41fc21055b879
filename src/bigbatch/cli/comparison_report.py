"""A comparison of arms as text: a table, a few sentences, and what to try next."""

from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from bigbatch.cli.terminal import next_step, paragraph
from bigbatch.recipes.arms import ArmResult, Comparison, Spread, findings, relative

ONE_LINE_WIDTH = 100
TABLE_WIDTH = 66


def print_comparison(comparison: Comparison, console: Console, *, clipped: bool) -> None:
    """Print all that `bigbatch train` says of a recipe."""
    clip = f", clipped at {comparison.clip_norm:g}" if comparison.clip_norm is not None else ""
    paragraph(
        console,
        f"{comparison.origin}: {comparison.title}{clip}.\n"
        f"Seeds: {comparison.seeds}, epochs: {comparison.epochs}; the same first weights and order of samples in all "
        f"arms; loss and accuracy on {comparison.validation:,} other samples; {comparison.dtype}, one CPU thread, "
        f"torch {comparison.torch}.\n",
    )
    one_line = not TABLE_WIDTH <= console.width < ONE_LINE_WIDTH
    rows = _rows(comparison, " " if one_line else "\n")
    if console.width < TABLE_WIDTH:  # one arm after the other
        for arm in comparison.arms:
            lines = [f"  {label}: {value(arm)}" for label, value in rows.items()]
            console.print("\n".join([arm.name, *lines, ""]), markup=False)
    else:
        # Arms are columns, since five of them fit where nine measurements would not.
        table = Table("", box=None, pad_edge=False, padding=(0, 1))
        for arm in comparison.arms:
            kind, _, rest = arm.name.partition(" ")
            table.add_column(f"{kind}\n" + rest.replace(", ", "\n"), justify="right", no_wrap=True)
        for label, value in rows.items():
            table.add_row(label, *(value(arm) for arm in comparison.arms))
        console.print(table)
        console.print()
    around = "±: standard deviation over seeds. " if comparison.seeds > 1 else ""
    paragraph(
        console,
        f"textbook: the loop as the teaching pages print it. {around}Time: the fastest epoch's. Memory: tensors alive "
        "at once in an update, its micro-batches among them, weights and data set not. Distance: of the final weights, "
        f"relative, from those of the true batch of {comparison.batch} at the same rate; worst seed.",
    )
    for sentence in findings(comparison):
        paragraph(console, f"\n{sentence}")
    console.print()
    if comparison.recipe != "textbook":
        next_step(console, "train FILE.py", "yours: a function setup() that returns a bigbatch.Setup")
    elif clipped:
        next_step(console, "train adamw", "the teaching pages' second example")
    else:
        next_step(console, "train --clip 1.0", "the teaching pages' bonus: clip the accumulated gradient")


def _rows(comparison: Comparison, between: str) -> dict[str, Callable[[ArmResult], str]]:
    """Return how to fill each row; `between` stands between a mean and its spread."""

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
    return rows
