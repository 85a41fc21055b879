"""The counts of a loss with several terms, learned in a pass of its own, before the first backward."""

from collections.abc import Iterable
from typing import Any

from bigbatch.errors import LossError
from bigbatch.execute.micro_step import Runner
from bigbatch.loss.count import Count, TotalOfSum


def totals(runner: Runner, micro_batches: Iterable[Any]) -> tuple[Count, ...]:
    """Return what each term over data comes to in all micro-batches."""
    rows = [row for micro_batch in micro_batches if (row := _counts(runner, micro_batch)) is not None]
    if len({tuple(kind for kind, _ in row) for row in rows}) > 1:
        shown = ", ".join(str(len(row)) for row in rows[:8])
        msg = (
            f"the loss changes within a batch: its micro-batches have {shown} terms over data. A big batch has one "
            "loss: write every term for every micro-batch, as counted(term, n) with n = 0 where it does not "
            "apply."
        )
        raise LossError(msg)
    columns = [list(column) for column in zip(*rows, strict=True)]
    sums = [sum((count for _, count in column[1:]), start=column[0][1]) for column in columns]
    pairs = zip(columns, sums, strict=True)
    return tuple(TotalOfSum(1.0) if column[0][0] == "sum" else total for column, total in pairs)


def _counts(runner: Runner, micro_batch: Any) -> list[tuple[str, Count]] | None:
    loss, _ = runner.loss(micro_batch)
    terms = runner.read(loss)  # none of a loss of zero
    return [(term.kind, term.count) for term in terms if term.kind != "once"] if terms else None
