# ruff: noqa: ARG005, E501  (every consumer takes the batch; a pattern is a line)
"""Every operation that the reader knows, along every axis: exact or refused, none wrong, none refused without a reason."""

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bigbatch.loss.graph import LOOKS_THROUGH, operation
from bigbatch.loss.origin import PURE_OF_WEIGHTS
from bigbatch.loss.rules import MATMULS, RULES
from tests.audit.judge import Batch, LossFunction, adds_up, judge, judge_big_step
from tests.audit.recipes import APART, CLOSED, ELSEWHERE, MIXED, UNSEEN, Net, Row, batches, rows

pytestmark = pytest.mark.filterwarnings(
    "ignore:this loss looks divided by steps:UserWarning",
    "ignore:this loss is a sum over data:UserWarning",
    "ignore:Using a target size:UserWarning",
    "ignore:An output with one or more elements was resized:UserWarning",
)

ROWS = rows()
AGAIN = {"square", "means", "itself"}  # what is tried once more with a model that takes tokens one by one
KNOWN = set(RULES) | set(MATMULS) | PURE_OF_WEIGHTS | LOOKS_THROUGH
SILENTLY_WRONG: dict[str, str] = {}  # accepted, and not the big batch's gradient: the worst there is
_KEPT = "Add|Sub|Rsub|Pow|Lerp|Addcmul|Addcdiv|Hypot|Fmod|Remainder|Copysign|Clamp|Complex|Polar"
FALSELY_REFUSED = {  # each sample is alone, and the graph could tell
    "a scale of data for each sample may be that of others": r"LinalgSolveTriangular-distances of a normal with a scale of data",
    "a wider tensor without gradient that is not saved may be other samples": rf"({_KEPT})-wider-data(-row)?",
    "a wider tensor without gradient is not asked for its second dimension": r"(?!(MseLoss|SmoothL1Loss|HuberLoss|BinaryCross.*|SoftMarginLoss|PreluKernel)-).*-own-and-wide-data",
    "a tensor that was detached is not known to be the sample's own": r"(Fmod|Remainder|MaskedFill|Binary.*|SoftMarginLoss)-own-step.*",
    "a parameter that a constant spreads is no weight": r"Bmm-parameter for each step",
    "a row of all the batch may be a sample, where there is one": r"Mean-of one long row",
    "of one sample a graph does not show where it lies": r".*, one sample",
    "a part of a scalar is taken for a function of it": r"Vdot-of all",
    "cross products and repeats have no rule: they do not say what they broadcast": r"Repeat-(steps|rows)",
}
Consumer = Callable[[Tensor, Batch], Tensor]


@functools.cache
def network(shape: tuple[int, ...], *, tokens: bool) -> Net:
    """A model that rows of the same shape share: nothing ever changes its weights."""
    return Net(shape, tokens=tokens)


def nodes(value: Tensor) -> set[str]:
    """The operations of a graph."""
    found, stack = set(), [value.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in found:
            found.add(node)
            stack.extend(below for below, _ in node.next_functions)
    return {operation(node) for node in found}


def samples_axis(row: Row, net: Net) -> int | None:
    """The axis of a row's result that grows with the batch, where there is one that grows as it does."""
    few, many = (row.make(net(b["x"]), b, net).shape for b in batches(row.shape, (4, 8), 0))
    if len(few) != len(many):
        return None
    grown = [d for d, (a, b) in enumerate(zip(few, many, strict=True)) if a != b]
    return grown[0] if len(grown) == 1 and (few[grown[0]], many[grown[0]]) == (4, 8) else None


def consumers(row: Row, net: Net) -> dict[str, Consumer]:
    """What people make of a tensor: a mean, a sum, a square, a distance from targets, a mean of means."""
    batch = batches(row.shape, row.windows[0][:1], 0)[0]
    value = row.make(net(batch["x"]), batch, net)
    if not value.dim():
        return {"itself": lambda v, b: v, **({"scaled": lambda v, b: 0.3 * v} if row.outcome == APART else {})}
    found: dict[str, Consumer] = {"square": lambda v, b: v.tanh().square().mean()}
    if row.brief:
        return found
    found |= {"mean": lambda v, b: v.mean(), "sum": lambda v, b: v.sum()}
    axis = samples_axis(row, net) if row.aligned else None
    if value.dim() > 1 and (row.outcome == MIXED or axis == 0):
        zeros = functools.partial(torch.zeros, dtype=torch.long)
        found["classes"] = lambda v, b: F.cross_entropy(v.real, zeros(v.shape[:1] + v.shape[2:]))
    if axis is not None:

        def weights(v: Tensor, b: Batch) -> Tensor:
            return b["w"].view([-1 if d == axis else 1 for d in range(v.dim())])

        found["weighed"] = lambda v, b: (v * weights(v, b)).mean()
        found["targets"] = lambda v, b: F.mse_loss(v, (weights(v, b) * 0.7).expand_as(v))
        if value.dim() > 1:
            found["means"] = lambda v, b: v.movedim(axis, 0).flatten(1).mean(1).exp().mean()
    return found


def losses(row: Row, net: Net) -> Iterator[tuple[str, LossFunction]]:
    """The losses that a row's result is put into."""

    def loss(consumer: Consumer) -> LossFunction:
        return lambda m, b: consumer(row.make(m(b["x"]), b, m), b)

    return ((name, loss(consumer)) for name, consumer in consumers(row, net).items())


def made(row: Row) -> list[list[Batch]]:
    """The micro-batches of a row's updates."""
    return [batches(row.shape, sizes, seed) for seed, sizes in enumerate(row.windows[: 1 if row.brief else 2])]


class WrongError(AssertionError):
    """A loss was accepted that does not give the big batch's gradient."""


class FalselyRefusedError(AssertionError):
    """A loss was refused whose samples stay apart."""


def marked(row: Row) -> Any:
    """A row, expected to fail where it is known to, and in the way that is known."""
    marks = [
        pytest.mark.xfail(reason=reason, strict=True, raises=error)
        for error, table in ((WrongError, SILENTLY_WRONG), (FalselyRefusedError, FALSELY_REFUSED))
        for reason, names in table.items()
        if re.fullmatch(names, str(row))
    ]
    return pytest.param(row, id=str(row), marks=marks)


def test_the_table_has_every_operation() -> None:
    """A rule without a row fails: a new operation cannot be left out of the audit. No two rows have the same name."""
    assert KNOWN - {row.name for row in ROWS} == set(ELSEWHERE)
    assert len({str(row) for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", [marked(row) for row in ROWS])
def test_an_operation_is_exact_or_refused(row: Row) -> None:
    """As the table says: accepted and exact where samples stay apart, refused where they meet, wrong nowhere."""
    net = network(row.shape, tokens=False)
    batch = batches(row.shape, row.windows[0][:1], 0)[0]
    assert row.name in nodes(row.make(net(batch["x"]), batch, net))
    for tokens in (False, True) if len(row.shape) > 1 else (False,):
        model = network(row.shape, tokens=tokens)
        tried = [(name, loss) for name, loss in losses(row, model) if not tokens or name in AGAIN]
        found = {name: judge(model, loss, made(row)) for name, loss in tried}
        told = {name: str(verdict)[:200] for name, verdict in found.items()}
        outcomes = {verdict.outcome for verdict in found.values()}
        assert "crashed" not in outcomes, told
        if "wrong" in outcomes and row.outcome != UNSEEN:
            raise WrongError(told)
        if row.outcome == APART and outcomes != {"exact"}:
            raise FalselyRefusedError(told)
        assert row.outcome != CLOSED or "refused" in outcomes, "it reads now: say so in the table"
    mixed = (not adds_up(net, loss, made(row), lambda b: (len(b["x"]),)) for _, loss in losses(row, net))
    assert row.outcome not in {MIXED, UNSEEN} or any(mixed), "nothing is mixed here: say so in the table"


@pytest.mark.parametrize("row", [row for row in ROWS if row.outcome == UNSEEN], ids=str)
def test_what_no_graph_shows_is_found_by_a_big_step(row: Row) -> None:
    """Where the batch has a say without gradient, the check of a BigStep refuses it, if it is not exact."""
    net = network(row.shape, tokens=False)
    for name, loss in losses(row, net):
        told = judge_big_step(net, loss, made(row), 2, check=True)
        assert told.outcome in {"exact", "refused"}, (name, str(told))
