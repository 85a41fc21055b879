"""`bigbatch train`: a recipe by name, or a user's own file."""

import dataclasses
import math
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bigbatch.cli.terminal import FAILED, AsJson, Results, fail, print_json, progress, running

if TYPE_CHECKING:
    from bigbatch.recipes.arms import ArmResult, Comparison, Spread
    from bigbatch.recipes.setup_run import Training

DEFAULT_SEEDS = 5
_HUGE = 1e6
_TABLE_WIDTH = 66


def train(  # noqa: PLR0917 - typer calls it, by name
    what: Annotated[
        str, typer.Argument(metavar="NAME|FILE.py", help="A recipe (textbook, adamw), or a file with setup().")
    ] = "textbook",
    clip: Annotated[float | None, typer.Option(metavar="NORM", help="Clip each update's gradient norm.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, metavar="N", help="Passes over the samples.")] = None,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help=f"Recipes: how many seeds to average. [default: {DEFAULT_SEEDS}]"),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, metavar="N", help="Files: the random seed. [default: 0]")] = None,
    as_json: AsJson = False,
) -> None:
    """Train an example of the teaching pages, or your own file.

    The examples are those of the teaching pages on gradient accumulation in PyTorch. Each is trained in five ways,
    which are compared.

    textbook: their experiment, a linear classifier with SGD, batches of 16 accumulated 4 times.

    adamw: their second example, AdamW with clipping, batches of 32 accumulated 4 times.

    FILE.py: your own, a file whose function setup() returns a bigbatch.Setup.
    """
    if clip is not None and not (math.isfinite(clip) and clip > 0):
        fail(f"--clip {clip:g}: the largest norm of a gradient is a positive number", "--clip 1.0 is usual")
    from bigbatch.recipes.experiment import RECIPES

    # A file is told from a recipe by its looks, so that a missing file is not called a missing recipe.
    path = Path(what)
    is_file = what not in RECIPES and (path.suffix != "" or path.name != what or path.exists())
    with running(as_json=as_json and is_file):
        from bigbatch.cli.setup_file import refuse_launcher

        refuse_launcher("train")
        if is_file:
            if seeds is not None:
                fail("--seeds is for recipes; a file is trained once", f"bigbatch train {what} --seed {seeds}")
            training = _train_file(path, clip, epochs, seed or 0, as_json)
        else:
            if seed is not None:
                fail("--seed is for files; a recipe runs seeds 0, 1, ...", f"bigbatch train {what} --seeds 5")
            _train_recipe(what, clip, epochs, seeds or DEFAULT_SEEDS, as_json)
            return
    if as_json:
        print_json({"file": str(path), "seed": seed or 0, **dataclasses.asdict(training)})
    broken = [n for n, epoch in enumerate(training.epochs, 1) if not math.isfinite(epoch.loss or 0.0)]
    if broken:
        advice = "Try a smaller learning rate, clip_norm=1.0, or skip_nonfinite=True if single batches are to blame."
        fail(f"the loss is not finite since epoch {broken[0]}", advice, FAILED)


# A recipe.


def _train_recipe(name: str, clip: float | None, epochs: int | None, seeds: int, as_json: bool) -> None:
    """Compare the arms under a progress bar, then report."""
    from bigbatch.cli.setup_file import suggest
    from bigbatch.recipes.arms import compare, findings
    from bigbatch.recipes.experiment import RECIPES

    if name not in RECIPES:
        near = suggest([*RECIPES, *(path.name for path in Path().glob("*.py"))], name, "train")
        known = f"The recipes are {', '.join(RECIPES)}; your own training goes by its file: `bigbatch train FILE.py`."
        fail(f"no recipe is called {name!r}", near or known)
    recipe = RECIPES[name]
    with progress(name, seeds * len(recipe.arms()) * (epochs or recipe.epochs)) as (_, advance):

        def on_epoch(seed: int, arm: str) -> None:
            advance(f"seed {seed + 1} of {seeds}, {arm}")

        comparison = compare(recipe, seeds=seeds, epochs=epochs, clip_norm=clip, on_epoch=on_epoch)
    if as_json:
        print_json({**dataclasses.asdict(comparison), "findings": findings(comparison)})
    else:
        _print_comparison(comparison, findings(comparison), Results(), clipped=clip is not None)


def _print_comparison(comparison: "Comparison", found: "Sequence[str]", results: Results, *, clipped: bool) -> None:
    """Print the table, what was found, and what to try next."""
    from rich.table import Table

    clip = f", clipped at {comparison.clip_norm:g}" if comparison.clip_norm is not None else ""
    results.paragraph(
        f"{comparison.origin}: {comparison.title}{clip}.\n"
        f"Seeds: {comparison.seeds}, epochs: {comparison.epochs}; the same first weights and order of samples in all "
        f"arms; loss and accuracy on {comparison.validation:,} other samples; {comparison.dtype}, one CPU thread, "
        f"torch {comparison.torch}.\n",
    )
    is_narrow = results.width < _TABLE_WIDTH
    rows = _rows(comparison, " " if is_narrow else "\n")
    if is_narrow:  # one arm after the other
        for arm in comparison.arms:
            lines = [f"  {label}: {value(arm)}" for label, value in rows.items()]
            results.print("\n".join([arm.name, *lines, ""]), markup=False)
    else:
        # Arms are columns, since five of them fit where nine measurements would not.
        table = Table("", box=None, pad_edge=False, padding=(0, 1))
        for arm in comparison.arms:
            kind, _, rest = arm.name.partition(" ")
            table.add_column(f"{kind}\n" + rest.replace(", ", "\n"), justify="right", no_wrap=True)
        for label, value in rows.items():
            table.add_row(label, *(value(arm) for arm in comparison.arms))
        results.print(table)
        results.print()
    around = "±: standard deviation over seeds. " if comparison.seeds > 1 else ""
    results.paragraph(
        f"textbook: the loop as the teaching pages print it. {around}Time: the fastest epoch's. Memory: tensors alive "
        "at once in an update, its micro-batches among them, weights and data set not. Distance: of the final weights, "
        f"relative, from those of the true batch of {comparison.batch} at the same rate; worst seed.",
    )
    results.paragraph("".join(f"\n{sentence}\n" for sentence in found))
    following = ("train --clip 1.0", "the teaching pages' bonus: clip the accumulated gradient")
    if clipped:
        following = ("train adamw", "the teaching pages' second example")
    if comparison.recipe != "textbook":
        following = ("train FILE.py", "yours: a function setup() that returns a bigbatch.Setup")
    results.next_step(*following)


def _rows(comparison: "Comparison", between: str) -> dict[str, Callable[["ArmResult"], str]]:
    """Return how to fill each row; `between` stands between a mean and its spread."""
    from bigbatch.recipes.arms import relative

    def spread(value: "Spread", factor: float, digits: int) -> str:
        around = "" if value.std is None else f"{between}± {factor * value.std:.{digits}f}"
        return f"{factor * value.mean:.{digits}f}{around}"

    true, batch = comparison.arms[3], comparison.batch
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
        f"distance from true {batch}": lambda arm: "itself" if arm is true else relative(arm.distance),
    }
    if comparison.clip_norm is None:
        del rows["updates clipped"]
    return rows


# A file.


def _train_file(path: Path, clip: float | None, epochs: int | None, seed: int, as_json: bool) -> "Training":
    """Train what the file's setup() returns, and print each epoch as soon as it is done."""
    import torch

    from bigbatch.cli.setup_file import read_setup
    from bigbatch.recipes.setup_run import expected_updates, train_setup

    torch.manual_seed(seed)
    results = Results()
    setup = read_setup(path, "train")
    setup = dataclasses.replace(setup, epochs=epochs or setup.epochs, clip_norm=clip or setup.clip_norm)
    with progress(path.name, expected_updates(setup)) as (bar, advance):

        def on_update(epoch: int) -> None:
            advance(f"epoch {epoch} of {setup.epochs}")

        def on_epoch(training: "Training") -> None:
            if as_json:
                return
            bar.stop()  # stdout and stderr may be one terminal
            if len(training.epochs) == 1:
                results.paragraph(f"{path.name}: {_sizes(training)}, seed {seed}\n")
            _print_epoch(training, results)
            bar.start()

        training = train_setup(setup, on_update=on_update, on_epoch=on_epoch)
    if not as_json:
        _print_end(training, results)
        results.next_step(f"train {shlex.quote(str(path))} --seed {seed + 1}", "how much of this is luck?")
    return training


def _sizes(training: "Training") -> str:
    """Return the head of a report, such as `batch 64 = 16 × 4, in lock-step`."""
    steps = f"{training.micro_batch_size} × {training.steps}"
    if training.micro_batch_size * training.steps != training.batch_size:
        steps = f"up to {steps}"
    coupled = ", in lock-step" if training.lock_step and training.steps > 1 else ""
    clipped = f", clipped at {training.clip_norm:g}" if training.clip_norm is not None else ""
    return f"batch {training.batch_size} = {steps}{coupled}{clipped}"


def _print_epoch(training: "Training", results: Results) -> None:
    """Print the last epoch, under headings where they are new: what a later one will bring is not known before."""
    *before, epoch = training.epochs
    told = {name for each in before for name in each.metrics}
    names = list(dict.fromkeys(name for each in training.epochs for name in each.metrics))
    cells = {
        "epoch": str(len(training.epochs)),
        "updates": f"{epoch.updates:,}",
        "loss": "unknown" if epoch.loss is None else _number(epoch.loss),
        **{name: _number(epoch.metrics[name]) if name in epoch.metrics else "" for name in names},
        "ms/update": f"{1e3 * epoch.seconds / max(epoch.updates, 1):.2f}",
    }
    widths = [max(len(name), 8 if place > 1 else 0) for place, name in enumerate(cells)]
    for row in ([] if before and told >= set(names) else [cells.keys()]) + [cells.values()]:
        results.plain("  ".join(map(str.rjust, row, widths)))


def _number(value: float) -> str:
    """Write four places, or the order of magnitude where a training has run away."""
    return f"{value:.4f}" if abs(value) < _HUGE else f"{value:.2e}"


def _print_end(training: "Training", results: Results) -> None:
    """Print, below all epochs, what it cost."""
    updates, skipped = (sum(getattr(each, name) for each in training.epochs) for name in ("updates", "skipped"))
    said = []
    if training.clip_norm is not None:
        clipped = sum(epoch.clipped or 0 for epoch in training.epochs)
        what = f"{clipped:,} of {updates:,} updates had a gradient to clip"
        said.append(f"{what}, of a norm above {training.clip_norm:g}.")
    if skipped:
        what = f"{skipped:,} batch{'es' * (skipped > 1)} made no update"
        said.append(f"{what}: nothing was counted, or a gradient was not finite.")
    if training.peak_bytes is not None:
        said.append(f"Peak of CUDA memory: {training.peak_bytes / 2**20:,.0f} MiB.")
    results.paragraph("\n".join(["", *said]))
