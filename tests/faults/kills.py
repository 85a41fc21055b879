"""`make kills`: a training process that is killed at random moments, and resumed until it is done."""

import gc
import multiprocessing
import random
import tempfile
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.faults import campaign
from tests.faults.injecting import Fault
from tests.faults.outcomes import Case, Outcome, run_cases
from tests.faults.programs import SizedStream, Stream, program

MODES = {
    "Accumulator": ("unsized over", "clip, schedule, hook", "scaler", "bf16", "two optimizers", "skip_nonfinite"),
    "BigStep": ("several counts", "auto", "across, auto", "BatchNorm", "scaler, schedule, hook", "skip_nonfinite"),
}
EPOCHS = 4
_KILLS = 5  # of one training, at most: then it may end
_PATIENCE = 60.0  # seconds for what takes a fraction of one


def train(folder: Path, entrance: str, mode: str) -> None:
    """Train as the README does, and save after each batch, in mid-window too."""
    torch.manual_seed(0)
    made = program(entrance, mode, Fault())
    loader = (Stream if made.loop == "stream" else SizedStream)(made.batches, made.fault)
    path, first = folder / "checkpoint.pt", 0
    if path.exists():
        state = torch.load(path, weights_only=True)
        for part, saved in zip([*made.parts, made.entrance, loader], state["parts"], strict=True):
            part.load_state_dict(saved)
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        first = state["epoch"]
    for epoch in range(first, EPOCHS):
        batches = made.entrance.over(loader) if entrance == "Accumulator" else loader
        for batch in batches:
            if entrance == "BigStep":
                made.entrance(batch)
            else:
                count = () if made.count is None else (made.count(batch),)
                made.entrance.backward(made.loss(made.model, batch), *count)
            reached = batches if made.loop == "stream" else loader
            numbers = {"torch": torch.get_rng_state(), "python": random.getstate()}
            _save({"parts": [*made.parts, made.entrance, reached], "epoch": epoch, **numbers}, path)
    _save({"parts": made.parts}, folder / "done.pt")


def _save(state: dict[str, Any], path: Path) -> None:
    """Save the states of parts; whoever is killed before the end leaves the file before."""
    states = [
        {name: value for name, value in part.state_dict().items() if not callable(value)} for part in state["parts"]
    ]
    torch.save({**state, "parts": states}, path.with_name("unfinished"))
    path.with_name("unfinished").replace(path)


def draw(seed: int, count: int) -> Iterator[Case]:
    """Draw trainings; `at` is the seed of the moments at which they are killed."""
    by = random.Random(f"kills {seed}")  # noqa: S311 - no secret
    for number in range(count):
        entrance = by.choice(sorted(MODES))
        mode = by.choice(MODES[entrance])
        yield Case("kills", number, seed, entrance, mode, "anywhere", "SIGKILL", by.randrange(10**6))


# In a process that starts each training by a fork: importing torch anew would take most of the time.
run = partial(run_cases, "tests.faults.kills")


class Laboratory:
    """Starts trainings and kills them."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        self._true: dict[tuple[str, str], tuple[float, Any]] = {}
        for key in ((entrance, mode) for entrance, modes in MODES.items() for mode in modes):
            with tempfile.TemporaryDirectory() as folder:  # what is imported at the first call is there in each child
                train(Path(folder), *key)
        gc.collect()
        gc.freeze()

    def try_out(self, case: Case) -> Outcome:
        """Kill a training at moments that the case draws, resume it until it is done, and compare."""
        key = (case.entrance, case.mode)
        if key not in self._true:
            with tempfile.TemporaryDirectory() as name:
                began = time.monotonic()
                assert _start(Path(name), *key) == 0, "it does not even train"
                self._true[key] = time.monotonic() - began, _left(Path(name))
        seconds, true = self._true[key]
        by = random.Random(case.at)  # noqa: S311 - no secret
        with tempfile.TemporaryDirectory() as name:
            folder, kills, resumed = Path(name), 0, 0
            while not (folder / "done.pt").exists():
                resumed += (folder / "checkpoint.pt").exists()
                last = resumed and kills >= _KILLS
                ended = _start(folder, *key, _PATIENCE if last else by.uniform(0.0, seconds / 2))
                if ended or (ended is None and last):
                    what = ("lost", f"with status {ended}") if ended else ("hang", f"not in {_PATIENCE:.0f} s")
                    return Outcome(what[0], f"resumed {resumed} times it ended {what[1]}")
                kills += ended is None
                if ended == 0 and not resumed:  # too fast: once more
                    for path in folder.iterdir():
                        path.unlink()
            found = _left(folder)
        same = len(found) == len(true) and all(torch.equal(a, b) for a, b in zip(found, true, strict=True))
        return Outcome("fine") if same else Outcome("wrong", f"resumed {resumed} times, the final weights are others")


def _left(folder: Path) -> list[Tensor]:
    leaves = pytree.tree_leaves(torch.load(folder / "done.pt", weights_only=True))
    return [torch.as_tensor(leaf) for leaf in leaves if isinstance(leaf, Tensor | float | int)]


def _start(folder: Path, entrance: str, mode: str, seconds: float = _PATIENCE) -> int | None:
    """Run a training in a process of its own; returns its status, or None where it was killed after these seconds."""
    child = multiprocessing.get_context("fork").Process(target=train, args=(folder, entrance, mode))
    child.start()
    child.join(seconds)
    ended = child.exitcode
    if ended is None:
        child.kill()
        child.join()
    return ended


_NOTES = [
    (
        "A training is killed (SIGKILL) up to five times, at random moments of its run, and resumed from its last "
        "checkpoint: models, optimizers, scheduler, scaler, accumulator or step, loader and random numbers, written to "
        "a file that is then renamed. fine: the final weights and all other state are, bit by bit, those of a run that "
        "nobody killed."
    )
]


if __name__ == "__main__":
    given = campaign.parser(__doc__ or "").parse_args()
    campaign.main("kills", given, [campaign.Part("kills", given.count or 200, draw, run)], _NOTES)
