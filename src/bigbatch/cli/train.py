"""`bigbatch train`: a recipe by name, or a user's own file."""

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bigbatch.cli.terminal import FAILED, AsJson, fail, progress, running, show, show_json

if TYPE_CHECKING:
    from bigbatch.recipes.setup_run import Training

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
    as_json: AsJson = False,
) -> None:
    """Train an example of the teaching pages, or your own file.

    The examples are those of the teaching pages on gradient accumulation in PyTorch. Each is trained in five ways,
    which are compared.

    textbook: their experiment, a linear classifier with SGD, batches of 16 accumulated 4 times.

    adamw: their second example, AdamW with clipping, batches of 32 accumulated 4 times.

    FILE.py: your own, a file whose function setup() returns a bigbatch.Setup.
    """
    path = Path(what)
    with running(as_json=as_json):
        from bigbatch import arguments
        from bigbatch.cli.setup_file import refuse_launcher
        from bigbatch.recipes.experiment import RECIPES

        refuse_launcher("train")
        arguments.optional(clip_norm=clip)
        is_recipe = what in RECIPES
        if not is_recipe and not path.is_file():
            fail(f"{what} is no file, and no recipe.", f"{', '.join(RECIPES)}, or a file with setup()")
        if (seed if is_recipe else seeds) is not None:
            fail("--seed is for files, which are trained once; a recipe runs --seeds 5 of them.")
        if is_recipe:
            data = _train_recipe(what, clip, epochs, seeds or DEFAULT_SEEDS, as_json)
        else:
            data = _train_file(path, clip, epochs, seed or 0, as_json)
    if as_json:
        show_json(data)
    losses = [epoch["loss"] for epoch in data["epochs"]] if "file" in data else []
    broken = [number for number, loss in enumerate(losses, 1) if not math.isfinite(loss or 0.0)]
    if broken:
        advice = "Try a smaller learning rate, clip_norm=1.0, or skip_nonfinite=True if single batches are to blame."
        fail(f"the loss is not finite since epoch {broken[0]}", advice, FAILED)


def _train_recipe(name: str, clip: float | None, epochs: int | None, seeds: int, as_json: bool) -> dict[str, Any]:
    from bigbatch.recipes.arms import compare, report
    from bigbatch.recipes.experiment import RECIPES

    recipe = RECIPES[name]
    with progress(seeds * len(recipe.arms()) * (epochs or recipe.epochs)) as advance:
        found = compare(recipe, seeds=seeds, epochs=epochs, clip_norm=clip, on_epoch=advance)
    if not as_json:
        show(report(found))
    return dataclasses.asdict(found)


def _train_file(path: Path, clip: float | None, epochs: int | None, seed: int, as_json: bool) -> dict[str, Any]:
    """Train what the file's setup() returns, and print each epoch as soon as it is done."""
    import torch

    from bigbatch.cli.setup_file import read_setup
    from bigbatch.recipes.setup_run import expected_updates, train_setup

    torch.manual_seed(seed)
    setup = read_setup(path)
    setup = dataclasses.replace(setup, epochs=epochs or setup.epochs, clip_norm=clip or setup.clip_norm)
    with progress(expected_updates(setup)) as advance:
        training = train_setup(
            setup,
            on_update=lambda epoch: advance(f"epoch {epoch} of {setup.epochs}"),
            on_epoch=lambda training: None if as_json else show(_epoch(training, path.name, seed)),
        )
    if training.peak_bytes is not None and not as_json:
        show(f"Peak of CUDA memory: {training.peak_bytes / 2**20:,.0f} MiB.")
    return {"file": str(path), "seed": seed, **dataclasses.asdict(training)}


def _epoch(training: "Training", name: str, seed: int) -> str:
    """Return a line on the last epoch, below a title on the first."""
    epoch = training.epochs[-1]
    figures = {
        "loss": epoch.loss,
        **epoch.metrics,
        "updates": epoch.updates,
        "skipped": epoch.skipped or None,
        "clipped": epoch.clipped,
        "ms/update": 1e3 * epoch.seconds / max(epoch.updates, 1),
    }
    shown = [f"{key} {value:,.4g}" for key, value in figures.items() if value is not None]
    coupled = ", in lock-step" if training.lock_step and training.steps > 1 else ""
    sizes = f"batch {training.batch_size} in micro-batches of {training.micro_batch_size}{coupled}"
    title = f"{name}: {sizes}, seed {seed}\n" if len(training.epochs) == 1 else ""
    return f"{title}epoch {len(training.epochs)}: {', '.join(shown)}"
