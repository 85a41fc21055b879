"""`bigbatch train`: a recipe by name, or a user's own file."""

import dataclasses
import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bigbatch.cli.failures import FAILED, fail, running
from bigbatch.cli.terminal import escaped, hidden, next_step, paragraph, print_json, progress, results

if TYPE_CHECKING:
    from rich.console import Console

    from bigbatch.recipes.training import Training

DEFAULT_SEEDS = 5
_HUGE = 1e6


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
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Train an example of the teaching pages, or your own file.

    The examples are those of the teaching pages on gradient accumulation in PyTorch. Each is trained in five ways,
    which are compared.

    textbook: their experiment, a linear classifier with SGD, batches of 16 accumulated 4 times.

    adamw: their second example, AdamW with clipping, batches of 32 accumulated 4 times.

    FILE.py: your own, a file whose function setup() returns a bigbatch.Setup.
    """
    if clip is not None and not (math.isfinite(clip) and clip > 0):
        fail(f"--clip {clip:g}: the largest norm of a gradient is a positive number", "--clip 1.0 is the usual one")
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
                fail("--seed is for files; a recipe runs seeds 0, 1, 2, ...", f"bigbatch train {what} --seeds 5")
            _train_recipe(what, clip, epochs, seeds or DEFAULT_SEEDS, as_json)
            return
    if as_json:
        print_json({"file": str(path), "seed": seed or 0, **dataclasses.asdict(training)})
    broken = [n for n, epoch in enumerate(training.epochs, 1) if not math.isfinite(epoch.loss or 0.0)]
    if broken:
        advice = "Try a smaller learning rate, clip_norm=1.0, or skip_nonfinite=True if single batches are to blame."
        fail(f"the loss is not finite since epoch {broken[0]}", advice, FAILED)


def _train_recipe(name: str, clip: float | None, epochs: int | None, seeds: int, as_json: bool) -> None:
    """Compare the arms under a progress bar, then report."""
    from bigbatch.cli.comparison_report import print_comparison
    from bigbatch.cli.setup_file import suggest
    from bigbatch.recipes.arms import compare, findings
    from bigbatch.recipes.experiment import RECIPES

    if name not in RECIPES:
        near = suggest([*RECIPES, *(path.name for path in Path().glob("*.py"))], name, "train")
        known = f"The recipes are {', '.join(RECIPES)}; your own training goes by its file: `bigbatch train FILE.py`."
        fail(f"no recipe is called {name!r}", near or known)
    recipe = RECIPES[name]
    with progress() as bar:
        task = bar.add_task(recipe.name, total=seeds * len(recipe.arms()) * (epochs or recipe.epochs))

        def on_epoch(seed: int, arm: str) -> None:
            bar.update(task, advance=1, description=f"seed {seed + 1} of {seeds}, {arm}")

        comparison = compare(recipe, seeds=seeds, epochs=epochs, clip_norm=clip, on_epoch=on_epoch)
    if as_json:
        print_json({**dataclasses.asdict(comparison), "findings": findings(comparison)})
    else:
        print_comparison(comparison, results(), clipped=clip is not None)


def _train_file(path: Path, clip: float | None, epochs: int | None, seed: int, as_json: bool) -> "Training":
    """Train what the file's setup() returns, and print each epoch as soon as it is done."""
    import torch

    from bigbatch.cli.setup_file import read_setup
    from bigbatch.recipes.training import expected_updates, train_setup

    torch.manual_seed(seed)
    console = results()
    setup = read_setup(path, "train")
    setup = dataclasses.replace(setup, epochs=epochs or setup.epochs, clip_norm=clip or setup.clip_norm)
    with progress() as bar:
        task = bar.add_task(escaped(path.name), total=expected_updates(setup))

        def on_update(epoch: int) -> None:
            bar.update(task, advance=1, description=f"epoch {epoch} of {setup.epochs}")

        def on_epoch(training: "Training") -> None:
            if not as_json:
                with hidden(bar):
                    if len(training.epochs) == 1:
                        paragraph(console, f"{path.name}: {_sizes(training)}, seed {seed}\n")
                    _print_epoch(training, console)

        training = train_setup(setup, on_update=on_update, on_epoch=on_epoch)
    if not as_json:
        _print_end(training, console)
        next_step(console, f"train {shlex.quote(str(path))} --seed {seed + 1}", "how much of this is luck?")
    return training


def _sizes(training: "Training") -> str:
    """Return the head of a report, such as `batch 64 = 16 × 4, in lock-step`."""
    steps = f"{training.micro_batch_size} × {training.steps}"
    if training.micro_batch_size * training.steps != training.batch_size:
        steps = f"up to {steps}"
    coupled = ", in lock-step" if training.lock_step and training.steps > 1 else ""
    clipped = f", clipped at {training.clip_norm:g}" if training.clip_norm is not None else ""
    return f"batch {training.batch_size} = {steps}{coupled}{clipped}"


def _print_epoch(training: "Training", console: "Console") -> None:
    """Print the last epoch, under headings where they are new: what a later one will bring is not known before."""

    def print_row(cells: list[str]) -> None:
        widths = [max(len(name), 8 if place > 1 else 0) for place, name in enumerate(headings)]
        row = "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        console.print(row, markup=False, soft_wrap=True)

    epochs = training.epochs
    names = list(dict.fromkeys(name for epoch in epochs for name in epoch.metrics))
    headings = ["epoch", "updates", "loss", *names, "ms/update"]
    if len(epochs) == 1 or not set(names) <= {name for epoch in epochs[:-1] for name in epoch.metrics}:
        print_row(headings)
    epoch = epochs[-1]
    loss = "unknown" if epoch.loss is None else _number(epoch.loss)
    metrics = [_number(epoch.metrics[name]) if name in epoch.metrics else "" for name in names]
    time = f"{1e3 * epoch.seconds / max(epoch.updates, 1):.2f}"
    print_row([str(len(epochs)), f"{epoch.updates:,}", loss, *metrics, time])


def _number(value: float) -> str:
    """Write four places, or the order of magnitude where a training has run away."""
    return f"{value:.4f}" if abs(value) < _HUGE else f"{value:.2e}"


def _print_end(training: "Training", console: "Console") -> None:
    """Print, below all epochs, what it cost."""
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
