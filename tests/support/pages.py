"""Plans and verifications of all kinds, and their pages."""

import math
from dataclasses import replace

from bigbatch.planner.plan_report import Plan, Row
from bigbatch.report.pages import plan_page, verify_page
from bigbatch.verification.result import Cause, Difference, Verification

EVIL = """<script>alert("1")</script><img src=x onerror='alert(2)'>&amp;$\\alpha$'"</svg></style>日本🙂"""
GIB = 1 << 30


def row(size: int, peak: float | None, ms: float | None, *, fits: bool = True) -> Row:
    """Make a row of a plan for a batch of 256; peaks are in GiB."""
    return Row(size, -(-256 // size), None if peak is None else int(peak * GIB), None if ms is None else ms / 1e3, fits)


PLAN = Plan(
    batch_size=256,
    size=32,
    steps=8,
    peak_bytes=int(18.5 * GIB),
    budget=24 * GIB,
    resident_bytes=int(3.3 * GIB),
    device="a large GPU",
    measured=True,
    rows=(row(1, 3.92, 21.2), row(8, 7.45, 6.4), row(32, 18.5, 4.68), row(64, None, None, fits=False)),
    advice=("Time per sample is still falling.",),
    notes=("Peaks are the whole process's.",),
)
TRACED = replace(PLAN, measured=False, rows=(row(1, 3.9, None), row(32, 18.5, None), row(64, 33, None, fits=False)))
NOTHING = replace(TRACED, size=None, steps=None, peak_bytes=None, rows=(row(1, 30, None, fits=False),), advice=())
EASY = replace(PLAN, budget=400 * GIB, size=256, steps=1, rows=(row(1, 0.4, 90), row(256, 1.1, 0.01)))
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
    accumulated_by="train_window",
)
DIFFERS = replace(
    EXACT,
    exact=False,
    differences=(RIGHT, WRONG, replace(RIGHT, name="bias", exact_difference=math.nan, own_difference=0.0)),
    causes=(CAUSE, replace(CAUSE, kind="wrong-count", where="")),
    samples_proved=32,
    micro_batches=(5,) * 7,
    accumulated_by="BigStep",
    notes=("The whole batch did not fit.",),
)
EVIL_CAUSES = Cause(EVIL, EVIL, EVIL, EVIL), CAUSE


def of_plan(plan: Plan, name: str = "train.py") -> str:
    """Return the page of a plan."""
    return plan_page(plan, name=name, next_step="bigbatch train, with micro_batch_size=32 in the Setup.")


PAGES = {
    "plan, measured": of_plan(PLAN),
    "plan, traced": of_plan(TRACED),
    "plan, nothing fits": of_plan(NOTHING),
    "plan, far below the budget": of_plan(EASY),
    "plan, evil": of_plan(replace(PLAN, device=EVIL, advice=(EVIL,), notes=(EVIL,)), EVIL),
    "verify, exact": verify_page(EXACT, name="train.py"),
    "verify, differs": verify_page(DIFFERS, name="train.py"),
    "verify, evil": verify_page(
        replace(DIFFERS, differences=(replace(WRONG, name=EVIL), RIGHT), causes=EVIL_CAUSES, dtype=EVIL, notes=(EVIL,)),
        name=EVIL,
    ),
}
