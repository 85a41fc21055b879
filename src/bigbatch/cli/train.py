"""`bigbatch train`: a recipe by name, or a user's own file."""

import dataclasses
import math
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bigbatch.cli.failures import FAILED, errors_as_text, fail
from bigbatch.cli.terminal import escaped, hidden, print_json, progress, results

if TYPE_CHECKING:
    from bigbatch.recipes.experiment import Recipe
    from bigbatch.recipes.training import Training

DEFAULT_SEEDS = 5


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
    with errors_as_text():
        from bigbatch.cli.setup_file import refuse_launcher

        refuse_launcher("train")
        if _is_file(what):
            if seeds is not None:
                fail("--seeds is for recipes; a file is trained once", f"bigbatch train {what} --seed {seeds}")
            _train_file(Path(what), clip, epochs, seed or 0, as_json)
        else:
            if seed is not None:
                fail("--seed is for files; a recipe runs seeds 0, 1, 2, ...", f"bigbatch train {what} --seeds 5")
            _train_recipe(_recipe(what), clip, epochs, seeds or DEFAULT_SEEDS, as_json)


def _is_file(what: str) -> bool:
    """Tell a file from a recipe, by its looks, so that a missing file is not called a missing recipe."""
    from bigbatch.recipes.experiment import RECIPES

    path = Path(what)
    return what not in RECIPES and (path.suffix != "" or path.name != what or path.exists())


def _recipe(name: str) -> "Recipe":
    from bigbatch.cli.setup_file import suggest
    from bigbatch.recipes.experiment import RECIPES

    if name not in RECIPES:
        near = suggest([*RECIPES, *(path.name for path in Path().glob("*.py"))], name)
        known = f"The recipes are {', '.join(RECIPES)}; your own training goes by its file: `bigbatch train FILE.py`."
        fail(f"no recipe is called {name!r}", near or known)
    return RECIPES[name]


def _train_recipe(recipe: "Recipe", clip: float | None, epochs: int | None, seeds: int, as_json: bool) -> None:
    """Compare the arms under a progress bar, then report."""
    from bigbatch.cli.comparison_report import print_comparison
    from bigbatch.recipes.arms import compare
    from bigbatch.recipes.findings import findings

    with progress() as bar:
        task = bar.add_task(recipe.name, total=seeds * len(recipe.arms()) * (epochs or recipe.epochs))

        def on_epoch(seed: int, arm: str) -> None:
            bar.update(task, advance=1, description=f"seed {seed + 1} of {seeds}, {arm}")

        comparison = compare(recipe, seeds=seeds, epochs=epochs, clip_norm=clip, on_epoch=on_epoch)
    if as_json:
        print_json({**dataclasses.asdict(comparison), "findings": findings(comparison)})
    else:
        print_comparison(comparison, results(), clipped=clip is not None)


def _train_file(path: Path, clip: float | None, epochs: int | None, seed: int, as_json: bool) -> None:
    """Train what the file's setup() returns, and print each epoch as soon as it is done."""
    import torch

    from bigbatch.cli.setup_file import read_setup
    from bigbatch.cli.training_report import print_end, print_epoch
    from bigbatch.recipes.training import expected_updates, train_setup

    torch.manual_seed(seed)
    console = results()
    # What their code prints must not stand among the JSON.
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        setup = read_setup(path)
        setup = dataclasses.replace(setup, epochs=epochs or setup.epochs, clip_norm=clip or setup.clip_norm)
        with progress() as bar:
            task = bar.add_task(escaped(path.name), total=expected_updates(setup))

            def on_update(epoch: int) -> None:
                bar.update(task, advance=1, description=f"epoch {epoch} of {setup.epochs}")

            def on_epoch(training: "Training") -> None:
                if not as_json:
                    with hidden(bar):
                        print_epoch(training, path, seed, console)

            training = train_setup(setup, on_update=on_update, on_epoch=on_epoch)
    if as_json:
        print_json({"file": str(path), "seed": seed, **dataclasses.asdict(training)})
    else:
        print_end(training, path, seed, console)
    broken = [n for n, epoch in enumerate(training.epochs, 1) if not math.isfinite(epoch.loss or 0.0)]
    if broken:
        advice = "Try a smaller learning rate, clip_norm=1.0, or skip_nonfinite=True if single batches are to blame."
        fail(f"the loss is not finite since epoch {broken[0]}", advice, FAILED)
