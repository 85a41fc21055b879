"""Try a program with an entrance: several updates, micro-batches of unequal size, beside true big batches."""

import math
import operator
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils import _pytree as pytree

import bigbatch
from bigbatch import Accumulator, BigStep, Options, errors, verify
from bigbatch.errors import BigBatchError
from bigbatch.update import Update
from tests.zoo.program import Loss, Program

UPDATES = 3
Told = tuple[float, float | str | None]  # the norm; the loss, why there is none, or None where it is not exact
CLIP_NORM = 1.0  # keeps every update in bounds; the norm before clipping is compared, so a wrong factor shows
# No row of the table divides by its steps or draws random numbers: who is told so is accused falsely.
_ACCUSATIONS = ("looks divided", "random numbers")
_OURS = (str(Path(bigbatch.__file__).parent), str(Path(__file__).parent))


@dataclass(frozen=True)
class Result:
    """What came out of a trial."""

    outcome: str  # exact, wrong, refused, crashed; for verify: named, unnamed
    distance: float | None = None
    kind: str = ""
    text: str = ""
    warnings: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        shown = "" if self.distance is None else f" {self.distance:.0e}"
        return f"{self.outcome}{shown}{' ' + self.kind if self.kind else ''}"


@dataclass
class Run:
    """What a run left behind, one entry per update."""

    steps: list[Tensor] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)  # None: not told, or told not to be exact
    buffers: Tensor = field(default_factory=lambda: torch.empty(0))
    untold: str = ""  # what was raised in the place of a loss


def is_met(program: Program, entrance: str, result: Result) -> bool:
    """Whether the table's expectation is met; what no graph shows is not asked of an Accumulator."""
    if entrance == "verify":
        return program.unseen in result.kind
    if any(word in said for word in _ACCUSATIONS for said in result.warnings):
        return False
    due = program.due(entrance)
    if due.warned:
        return result.outcome == "wrong" and any(due.warned in said for said in result.warnings)
    if program.unseen:
        return result.outcome in {"exact", "refused"} or (result.outcome == "wrong" and entrance == "accumulator")
    if due.error is None:
        return result.outcome == "exact"
    kind = getattr(errors, result.kind, object)
    return result.outcome == "refused" and issubclass(kind, due.error) and due.word in result.text


def attempt(program: Program, entrance: str, *, seed: int = 0, device: torch.device | None = None) -> Result:
    """Try it, and say what came out."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = _attempted(program, entrance, seed, device or torch.device("cpu"))
    ours = sorted({str(each.message) for each in said if each.filename.startswith(_OURS)})
    return Result(result.outcome, result.distance, result.kind, result.text, ours)


def _attempted(program: Program, entrance: str, seed: int, device: torch.device) -> Result:
    true = None if entrance == "verify" else _run(program, "", seed, device)
    try:
        if true is None:
            return _verified(program, seed, device)
        ours = _run(program, entrance, seed, device)
    except BigBatchError as error:
        return Result("refused", kind=type(error).__name__, text=str(error))
    except Exception as error:  # noqa: BLE001 - whatever comes out is the result
        return Result("crashed", kind=type(error).__name__, text=str(error))
    distance, where = _difference(program, ours, true)
    if distance <= program.tolerance and ours.untold:
        return Result("crashed", kind="update.loss", text=ours.untold)
    return Result("exact" if distance <= program.tolerance else "wrong", distance, text=where)


def _verified(program: Program, seed: int, device: torch.device) -> Result:
    (loss,) = program.losses().values()
    found, causes = None, ""
    for number in range(UPDATES):  # a batch that happens not to be coupled is exact
        batch = _batch(program, sum(program.cuts), 100 * seed + number, device)
        found = verify(program.model(device), loss, batch, micro_batch_size=program.micro_batch)
        causes = "" if found.exact else ", ".join(cause.kind for cause in found.causes)
        if causes:
            break
    return Result("named" if causes else "unnamed", kind=causes, text=str(found))


def _difference(program: Program, ours: Run, true: Run) -> tuple[float, str]:
    """The largest relative distance, and of what."""
    found = [(_distance(a, b), f"step {i}") for i, (a, b) in enumerate(zip(ours.steps, true.steps, strict=True))]
    for name in ("norms", "losses"):
        pairs = zip(getattr(ours, name), getattr(true, name), strict=True)
        found += [(abs(a - b) / max(abs(b), 1.0), f"{name} {i}") for i, (a, b) in enumerate(pairs) if a is not None]
    if program.buffers:
        found.append((_distance(ours.buffers, true.buffers), "buffers"))
    return max((math.inf if math.isnan(distance) else distance, where) for distance, where in found)


def _distance(ours: Tensor, true: Tensor) -> float:
    return float((ours - true).norm() / true.norm().clamp_min(1e-3)) if true.numel() else 0.0


def _run(program: Program, entrance: str, seed: int, device: torch.device) -> Run:
    """Train for a few updates, the last of a shorter window; parts of the model take turns."""
    model = program.model(device)
    parts = {part: [p for p in model.get_submodule(part).parameters() if p.requires_grad] for part in program.losses()}
    take = {part: _taking(program, entrance, model, own, program.losses()[part]) for part, own in parts.items()}
    run = Run()
    trained = [p for own in parts.values() for p in own]
    before = _flat(trained)
    for number, cuts in enumerate([program.cuts] * (UPDATES - 1) + [program.cuts[:-1]]):
        batch = _batch(program, sum(cuts), 100 * seed + number, device)
        for part in parts:
            norm, loss = take[part](batch, cuts)
            run.norms.append(norm)
            run.losses.append(None if isinstance(loss, str) else loss)
            run.untold = loss if isinstance(loss, str) else run.untold
        after = _flat(trained)
        run.steps.append(after - before)
        before = after
    run.buffers = _flat(b for b in model.buffers() if b.is_floating_point())
    return run


def _taking(
    program: Program, entrance: str, model: nn.Module, own: list[nn.Parameter], loss: Loss
) -> Callable[[Any, tuple[int, ...]], Told]:
    """Return what makes an update of a batch and its cuts, and tells the norm and the loss, or why there is none."""
    optimizer = torch.optim.SGD(own, lr=0.1, momentum=0.9)
    if entrance == "big_step":
        given: dict[str, Any] = {"clip_norm": CLIP_NORM, "options": Options(collate=program.collate)}
        step = BigStep(model, optimizer, loss, micro_batch_size=program.micro_batch, **given)
        return lambda batch, _: _told(step(batch))
    accumulator = None
    if entrance == "accumulator":
        accumulator = Accumulator(
            model, optimizer, **{"steps": len(program.cuts), "clip_norm": CLIP_NORM, **program.settings}
        )

    def take(batch: Any, cuts: tuple[int, ...]) -> Told:
        if accumulator is not None:
            made = None
            for micro_batch in accumulator.over([_cut(program, batch, sum(cuts[:i]), n) for i, n in enumerate(cuts)]):
                made = accumulator.backward(loss(model, micro_batch))
            return _told(made)
        value = loss(model, batch if program.collate is None else program.collate(batch))
        model.zero_grad()
        value.backward()
        norm = clip_grad_norm_(own, CLIP_NORM)
        optimizer.step()
        model.zero_grad()
        return float(norm), float(value.detach())

    return take


def _told(made: Update | None) -> Told:
    if made is None or made.skipped or made.grad_norm is None:
        return math.nan, math.nan  # the optimizer was left alone
    try:
        return float(made.grad_norm), float(made.loss) if getattr(made, "loss_is_exact", True) else None
    except BigBatchError as error:
        return float(made.grad_norm), str(error)


def _cut(program: Program, batch: Any, start: int, size: int) -> Any:
    if program.collate is None:
        return pytree.tree_map(operator.itemgetter(slice(start, start + size)), batch)
    return program.collate(batch[start : start + size])


def _batch(program: Program, n: int, seed: int, device: torch.device) -> Any:
    """A batch in the model's own precision."""
    own = {} if program.float64 else {torch.float64: torch.float32}
    return pytree.tree_map(lambda t: t.to(device, own.get(t.dtype, t.dtype)), program.batch(n, seed))


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    flat = [tensor.detach().double().flatten().cpu() for tensor in tensors]
    return torch.cat(flat) if flat else torch.empty(0)
