"""Plans and verifications of all kinds, and their pages."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

from bigbatch.planner.plan_report import Plan, Row
from bigbatch.report.plan_page import plan_page
from bigbatch.report.verify_page import verify_page
from bigbatch.verification.result import Cause, Difference, Verification

EVIL = """<script>alert("1")</script><img src=x onerror='alert(2)'>&amp;$\\alpha$'"</svg></style>日本🙂"""
GIB = 1 << 30


def row(size: int, predicted: float | None, measured: float | None, ms: float | None, *, fits: bool = True) -> Row:
    """Make a row of a plan for a batch of 256; sizes are in GiB."""
    told, seen = (None if each is None else int(each * GIB) for each in (predicted, measured))
    return Row(size, -(-256 // size), told, seen, None if ms is None else ms / 1e3, fits)


PLAN = Plan(
    batch_size=256,
    size=32,
    steps=8,
    peak_bytes=int(18.5 * GIB),
    budget=24 * GIB,
    resident_bytes=int(3.3 * GIB),
    device="a large GPU",
    measured=True,
    rows=(
        row(1, 3.9, 3.92, 21.2),
        row(8, 7.2, 7.45, 6.4),
        row(32, 18.6, 18.5, 4.68),
        row(40, 22.1, 22.3, 4.71),
        row(64, 33, None, None, fits=False),
    ),
    advice=("Time per sample is still falling.",),
    notes=("Peaks are the whole process's.",),
)
TRACED = replace(
    PLAN, measured=False, rows=(row(1, 3.9, None, None), row(32, 18.5, None, None), row(64, 33, None, None, fits=False))
)
NOTHING = replace(TRACED, size=None, steps=None, peak_bytes=None, rows=(row(1, 30, None, None, fits=False),), advice=())
EASY = replace(PLAN, budget=400 * GIB, size=256, steps=1, rows=(row(1, 0.4, 0.4, 90), row(256, 1, 1.1, 0.01)))
PLANS = {"measured": PLAN, "traced": TRACED, "nothing fits": NOTHING, "far below the budget": EASY}

RIGHT = Difference("layer.0.weight", (16, 8), 3e-16, 2e-16, 4e-8, 3e-8)
WRONG = Difference("norm.weight", (8,), 0.21, 2e-16, 0.21, 3e-8)
CAUSE = Cause("batch-norm", "layer.1.norm", "Frozen, 93 % of the difference goes.", "Freeze it:\n    norm.eval()")
EXACT = Verification(
    exact=True,
    differences=tuple(replace(RIGHT, name=f"layer.{n}.weight") for n in range(50)),
    causes=(),
    samples=64,
    samples_proved=64,
    micro_batches=(16,) * 4,
    dtype="float32",
    loss=(2.3, 2.3),
)
DIFFERS = replace(
    EXACT,
    exact=False,
    differences=(RIGHT, WRONG, replace(RIGHT, name="bias", exact_difference=0.0)),
    causes=(CAUSE, replace(CAUSE, kind="wrong-count", where="")),
    samples_proved=32,
    micro_batches=(5,) * 7,
    notes=("The whole batch did not fit.",),
)
ODD = replace(
    DIFFERS,
    differences=(
        replace(WRONG, own_difference=math.inf),
        replace(RIGHT, exact_difference=math.nan, exact_floor=math.nan, own_floor=0.0, own_difference=0.0),
    ),
    loss=(math.nan, math.nan),
)
FOUND = {"exact": EXACT, "differs": DIFFERS, "odd": ODD}


@cache
def of_plan(plan: Plan, name: str = "train.py") -> str:
    """Return the page of a plan."""
    return plan_page(plan, name=name, next_step=(f"bigbatch train {name}", "with micro_batch_size=32 in its Setup"))


@cache
def of_verification(found: Verification, name: str = "train.py") -> str:
    """Return the page of a verification."""
    return verify_page(found, name=name)


PAGES: dict[str, Callable[[], str]] = {
    **{f"plan, {name}": partial(of_plan, plan) for name, plan in PLANS.items()},
    **{f"verify, {name}": partial(of_verification, found) for name, found in FOUND.items()},
}

EVIL_PLAN = replace(PLAN, device=EVIL, advice=(EVIL,), notes=(EVIL,))
EVIL_FOUND = replace(
    DIFFERS,
    differences=(replace(WRONG, name=EVIL), RIGHT),
    causes=(Cause(EVIL, EVIL, EVIL, EVIL),),
    dtype=EVIL,
    notes=(EVIL,),
)
