"""`make kills`: a training process that is killed at random moments, and resumed until it is done."""

import gc
import math
import os
import random
import select
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import Accumulator, BigStep, Options
from tests.faults import campaign
from tests.faults.outcomes import Case, Outcome
from tests.faults.workers import run_cases, serve

EPOCHS, SAMPLES = 2, 17
_KILLS = 5  # of one training, at most: then it may end
_PATIENCE = 60.0  # seconds for what takes a fraction of one
PROGRESS: int | None = None  # where a child tells of its checkpoints


class Loader:
    """Shuffled batches of uneven size, whose place can be saved and loaded in mid-epoch."""

    def __init__(self, size: int) -> None:
        self._size, self._given, self._resumed, self.epoch = size, 0, False, 0

    def __iter__(self) -> Iterator[Tensor]:
        """Go on where a state says, else begin an epoch."""
        if not self._resumed:
            self._given = 0
        self._resumed = False
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch)).split(self._size)
        while self._given < len(order):
            self._given += 1
            yield order[self._given - 1]

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, and how many batches of it were given out."""
        return {"epoch": self.epoch, "given": self._given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Have the next iteration begin there."""
        self.epoch, self._given, self._resumed = state["epoch"], state["given"], True


class Sized(Loader):
    """The same with a length."""

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return math.ceil(SAMPLES / self._size)


def network(*, norm: bool = False) -> nn.Module:
    """A small model with dropout, and perhaps BatchNorm; the same weights every time."""
    torch.manual_seed(5)
    layers = [nn.Linear(3, 4), nn.BatchNorm1d(4) if norm else nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 2)]
    return nn.Sequential(*layers).double()


DATA = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LABELS = torch.randint(2, (SAMPLES,), generator=torch.Generator().manual_seed(1))
LABELS[::5] = -100


class Training:
    """What is saved together: everything that the next batch depends on."""

    def __init__(self, folder: Path, model: nn.Module, loader: Loader) -> None:
        self.path = folder / "checkpoint.pt"
        self.model, self.loader = model, loader
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.parts: dict[str, Any] = {"model": model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def save(self, loader: Any) -> None:
        """Write a checkpoint; whoever is killed here leaves the one before."""
        state = {name: part.state_dict() for name, part in self.parts.items()}
        state |= {"loader": loader.state_dict(), "random": torch.get_rng_state()}
        unfinished = self.path.with_suffix(".unfinished")
        torch.save(state, unfinished)
        unfinished.replace(self.path)
        if PROGRESS is not None:
            os.write(PROGRESS, b".")

    def resume(self) -> None:
        """Load the checkpoint, where there is one."""
        if self.path.exists():
            state = torch.load(self.path, weights_only=True)
            for name, part in self.parts.items():
                part.load_state_dict(state[name])
            self.loader.load_state_dict(state["loader"])
            torch.set_rng_state(state["random"])

    def finish(self) -> None:
        """Leave the final weights."""
        done = self.path.with_name("done.pt")
        torch.save([self.model.state_dict(), self.optimizer.state_dict()], done.with_suffix(".unfinished"))
        done.with_suffix(".unfinished").replace(done)


def accumulate(folder: Path, loader: Loader, *, inner: bool) -> None:
    """Train as the README does, and save after each micro-batch, in mid-window too."""
    training = Training(folder, network(), loader)
    accumulator = Accumulator(training.model, training.optimizer, steps=3, clip_norm=1.0, scheduler=training.scheduler)
    training.parts["accumulator"] = accumulator
    training.resume()
    for epoch in range(loader.epoch, EPOCHS):
        loader.epoch = epoch
        batches = accumulator.over(loader)
        for batch in batches:
            accumulator.backward(F.cross_entropy(training.model(DATA[batch]), LABELS[batch]))
            training.save(loader if inner else batches)
    training.finish()


def big_steps(folder: Path, *, size: Any, norm: bool = False) -> None:
    """Train with big batches, and save after each."""
    loader = Sized(5)
    training = Training(folder, network(norm=norm), loader)
    step = BigStep(
        training.model,
        training.optimizer,
        lambda model, batch: F.cross_entropy(model(DATA[batch]), LABELS[batch]),
        micro_batch_size=size,
        clip_norm=1.0,
        scheduler=training.scheduler,
        options=Options(check=True),
    )
    training.parts["step"] = step
    training.resume()
    for epoch in range(loader.epoch, EPOCHS):
        loader.epoch = epoch
        for batch in loader:
            step(batch)
            training.save(loader)
    training.finish()


PROGRAMS: dict[tuple[str, str], Callable[[Path], None]] = {
    ("Accumulator", "over, sized"): lambda folder: accumulate(folder, Sized(2), inner=True),
    ("Accumulator", "over, unsized"): lambda folder: accumulate(folder, Loader(2), inner=False),
    ("BigStep", "plain"): lambda folder: big_steps(folder, size=2),
    ("BigStep", "BatchNorm"): lambda folder: big_steps(folder, size=2, norm=True),
}


def draw(seed: int, count: int) -> Iterator[Case]:
    """Draw trainings; `at` is the seed of the moments at which they are killed."""
    by = random.Random(f"kills {seed}")  # noqa: S311 - no secret
    for number in range(count):
        entrance, mode = by.choice(sorted(PROGRAMS))
        yield Case("kills", number, seed, entrance, mode, "anywhere", "SIGKILL", by.randrange(10**6))


def run(cases: Sequence[Case]) -> Iterator[Outcome]:
    """Run them in a process that starts each training by a fork: importing torch anew would take most of the time."""
    return run_cases("tests.faults.kills", cases)


class Killer:
    """Starts trainings and kills them."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        self._true: dict[tuple[str, str], tuple[float, Any]] = {}
        for program in PROGRAMS.values():  # what is imported and made at the first call need not be made in each child
            with tempfile.TemporaryDirectory() as folder:
                program(Path(folder))
        gc.collect()
        gc.freeze()

    def undisturbed(self, program: tuple[str, str]) -> tuple[float, Any]:
        """Return how long a training takes, and what it leaves."""
        if program not in self._true:
            with tempfile.TemporaryDirectory() as folder:
                began = time.monotonic()
                assert _start(PROGRAMS[program], Path(folder)) == 0, "it does not even train"
                self._true[program] = time.monotonic() - began, _left(Path(folder))
        return self._true[program]

    def try_out(self, case: Case) -> Outcome:
        """Kill a training at moments that the case draws, resume it until it is done, and compare."""
        program = (case.entrance, case.mode)
        by = random.Random(case.at)  # noqa: S311 - no secret
        seconds, true = self.undisturbed(program)
        with tempfile.TemporaryDirectory() as name:
            folder, kills, resumed = Path(name), 0, 0
            while not (folder / "done.pt").exists():
                resumed += (folder / "checkpoint.pt").exists()
                moment = None if resumed and kills >= _KILLS else (by.randint(0, 3), by.uniform(0.0, seconds / 12))
                ended = _start(PROGRAMS[program], folder, moment)
                if ended is None and moment is None:
                    return Outcome("hang", f"resumed {resumed} times it did not end in {_PATIENCE:.0f} s")
                if ended:
                    return Outcome("lost", f"resumed {resumed} times it ended with status {ended}")
                kills += ended is None
                if ended == 0 and not resumed:  # too fast: once more
                    for path in folder.iterdir():
                        path.unlink()
            found = _left(folder)
        same = all(torch.equal(a, b) for a, b in zip(found, true, strict=True))
        return Outcome("fine") if same else Outcome("wrong", f"resumed {resumed} times, the final weights are others")


def _left(folder: Path) -> list[Tensor]:
    model, optimizer = torch.load(folder / "done.pt", weights_only=True)
    states = [value for each in optimizer["state"].values() for value in each.values()]
    return [torch.as_tensor(value) for value in [*model.values(), *states]]


def _start(program: Callable[[Path], None], folder: Path, moment: tuple[int, float] | None = None) -> int | None:
    """Run a training in a process of its own; returns its status, or None where it was killed.

    It is killed so many seconds after so many checkpoints, or when patience ends.
    """
    read, write = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            globals()["PROGRESS"] = write
            program(folder)
            status = 0
        except BaseException as error:  # noqa: BLE001 - its status tells
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)  # noqa: T201
        finally:
            os._exit(status)
    os.close(write)
    checkpoints, seconds = moment or (sys.maxsize, 0.0)
    deadline = time.monotonic() + _PATIENCE
    while checkpoints and select.select([read], [], [], max(0.0, deadline - time.monotonic()))[0]:
        if not os.read(read, 1):  # it has ended
            break
        checkpoints -= 1
    time.sleep(seconds)
    done, status = os.waitpid(child, os.WNOHANG)
    if not done:
        if moment is not None or time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    os.close(read)
    return None if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)


_NOTES = [
    (
        "A training is killed (SIGKILL) up to five times, at random moments of its run, and resumed from its last "
        "checkpoint: model, optimizer, scheduler, accumulator or step, loader and random numbers, written to a file "
        "that is then renamed. fine: the final weights and optimizer state are, bit by bit, those of a run that nobody "
        "killed."
    ),
]


def main() -> None:
    """Run a campaign; without arguments that are its own, serve cases to another process."""
    if sys.argv[1:] == ["--serve"]:
        serve(Killer().try_out)
        return
    given = campaign.parser(__doc__ or "").parse_args()
    seed = campaign.seed_of("kills", given.seed)
    part = campaign.Part("kills", given.count or 200, draw, run)
    if given.case is not None:
        case = list(draw(seed, given.case + 1))[-1]
        print(case, *run([case]), sep="\n")  # noqa: T201 - a runner's result
        return
    campaign.end(campaign.run("kills", seed, [part], _NOTES))


if __name__ == "__main__":
    main()
