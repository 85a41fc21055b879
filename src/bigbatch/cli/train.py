"""`bigbatch train`: a recipe by name, or a user's own file."""

import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bigbatch.cli.terminal import errors_as_text, fail, progress, results

if TYPE_CHECKING:
    from bigbatch.recipes.recipe import Recipe

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
    seed: Annotated[int | None, typer.Option(metavar="N", help="Files: the random seed. [default: 0]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Train a textbook example or your own file.

    An example is trained in five ways, which are compared.

    textbook: a linear classifier with SGD, batches of 16 accumulated 4 times, as the pages have it.

    adamw: the pages' second example, AdamW with clipping, 32 accumulated 4 times.

    FILE.py: a file whose function setup() returns a bigbatch.Setup.
    """
    if clip is not None and not (math.isfinite(clip) and clip > 0):
        fail(f"--clip {clip:g}: the largest norm of a gradient is a positive number", "--clip 1.0 is the usual one")
    with errors_as_text():
        if what.endswith(".py") or "/" in what or Path(what).is_file():
            if seeds is not None:
                fail("--seeds is for recipes; a file is trained once", f"bigbatch train {what} --seed {seeds}")
            _train_file(Path(what), clip, epochs, seed or 0, as_json)
        else:
            if seed is not None:
                fail("--seed is for files; a recipe runs seeds 0, 1, 2, ...", f"bigbatch train {what} --seeds 5")
            _train_recipe(_recipe(what), clip, epochs, seeds or DEFAULT_SEEDS, as_json)


def _recipe(name: str) -> "Recipe":
    """The recipe of this name."""
    from bigbatch.recipes.catalog import RECIPES

    if name not in RECIPES:
        fail(
            f"no recipe is called {name!r}",
            f"the recipes are {', '.join(RECIPES)}; your own training goes by its file: bigbatch train {name}.py",
        )
    return RECIPES[name]


def _train_recipe(recipe: "Recipe", clip: float | None, epochs: int | None, seeds: int, as_json: bool) -> None:
    """Compare the arms under a progress bar, then report."""
    from bigbatch.cli.comparison_report import print_comparison
    from bigbatch.recipes.compare import compare
    from bigbatch.recipes.findings import findings

    with progress() as bar:
        total = seeds * len(recipe.arms()) * (epochs or recipe.epochs)
        task = bar.add_task(recipe.name, total=total)

        def on_epoch(seed: int, arm: str) -> None:
            bar.update(task, advance=1, description=f"seed {seed + 1} of {seeds}, {arm}")

        comparison = compare(recipe, seeds=seeds, epochs=epochs, clip_norm=clip, on_epoch=on_epoch)
    if as_json:
        typer.echo(json.dumps({**dataclasses.asdict(comparison), "findings": findings(comparison)}, indent=2))
    else:
        print_comparison(comparison, results(), clipped=clip is not None)


def _train_file(path: Path, clip: float | None, epochs: int | None, seed: int, as_json: bool) -> None:
    """Train what the file's setup() returns, under a progress bar, then report."""
    import torch

    from bigbatch.cli.setup_file import read_setup
    from bigbatch.cli.training_report import print_training
    from bigbatch.recipes.training import expected_updates, train_setup

    torch.manual_seed(seed)
    setup = read_setup(path)
    setup = dataclasses.replace(setup, epochs=epochs or setup.epochs, clip_norm=clip or setup.clip_norm)
    with progress() as bar:
        task = bar.add_task(path.name, total=expected_updates(setup))

        def on_update(epoch: int) -> None:
            bar.update(task, advance=1, description=f"epoch {epoch} of {setup.epochs}")

        training = train_setup(setup, on_update=on_update)
    if as_json:
        typer.echo(json.dumps({"file": str(path), "seed": seed, **dataclasses.asdict(training)}, indent=2))
    else:
        print_training(training, path, seed, results())
