"""Try the whole zoo and write down what came out: `python -m tests.zoo --seed 1`, or `make zoo`.

It goes on where it was stopped, as long as neither the code nor the libraries have changed.
"""

import hashlib
import logging
import os
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

import bigbatch
from tests.faults import campaign
from tests.faults.outcomes import Case, Outcome, run_cases
from tests.zoo.libraries import missing, version
from tests.zoo.table import OPEN, PROGRAMS
from tests.zoo.trial import attempt, is_met

_NOTE = (
    "Other people's models and losses, three updates each of unequal micro-batches, compared with true big batches in "
    "float64; each is what the table (tests/zoo) says. exact: with the largest relative distance of steps, gradient "
    "norms, losses and buffers. The batch may make values without gradient, which no graph shows to an Accumulator: "
    "there it may be wrong, a BigStep refuses them, and verify names their cause."
)
_BY_NAME = {program.name: program for program in PROGRAMS}
_LIBRARIES = sorted({program.library for program in PROGRAMS})
_EVERY = [(program, entrance) for program in PROGRAMS for entrance in program.entrances()]


def draw(seed: int, count: int = len(_EVERY), device: str = "cpu") -> Iterator[Case]:
    """Every program with every entrance, or as many of them."""
    for number, (program, entrance) in enumerate(_EVERY[:count]):
        yield Case("zoo", number, seed, entrance, program.name, device, program.library)


class Laboratory:
    """Tries programs in this process."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        logging.getLogger("torch").setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
        self._missing = {library: missing(library) for library in _LIBRARIES}

    def try_out(self, case: Case) -> Outcome:
        """Try one; what is as the table says, or open, is fine."""
        program = _BY_NAME[case.mode]
        if reason := self._missing[program.library]:
            return Outcome("not reached", reason)
        try:
            result = attempt(program, case.entrance, seed=case.seed, device=torch.device(case.place))
        except Exception as error:  # noqa: BLE001 - the program itself does not run here, without us
            return Outcome("not reached", f"does not run as one big batch: {type(error).__name__}: {error}")
        is_open = f"{program.name}/{case.entrance}" in OPEN
        if is_met(program, case.entrance, result) != is_open:
            return Outcome("fine", f"{result}{' (open)' if is_open else ''}")
        due = program.unseen if case.entrance == "verify" else str(program.due(case.entrance))
        return Outcome("wrong", f"{result}, expected {due}: {' '.join([result.text, *result.warnings])}")


def _made_with() -> str:
    """Return what results depend on, in short."""
    code = hashlib.sha256("".join(map(version, _LIBRARIES)).encode())
    for path in sorted([*Path(bigbatch.__file__).parent.rglob("*.py"), *Path(__file__).parent.glob("*.py")]):
        code.update(path.read_bytes())
    return code.hexdigest()[:16]


if __name__ == "__main__":
    parser = campaign.parser(__doc__ or "")
    parser.set_defaults(seed=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("words", nargs="*", help="only programs with one of these in their names; writes nothing")
    given = parser.parse_args()
    cases = partial(draw, device=given.device)
    if given.words:
        chosen = [case for case in cases(given.seed) if any(word in case.mode for word in given.words)]
        for case, outcome in zip(chosen, run_cases("tests.zoo.__main__", chosen), strict=True):
            print(f"{case.mode}/{case.entrance}: {outcome.kind}, {outcome.words}")
        raise SystemExit
    notes = [_NOTE, ", ".join(f"{library} {version(library)}" for library in _LIBRARIES)]
    part = campaign.Part(
        "zoo", given.count or len(_EVERY), cases, partial(run_cases, "tests.zoo.__main__"), _made_with()
    )
    campaign.main("zoo", given, [part], notes)
