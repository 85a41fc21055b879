"""Try a program with an entrance: several updates, micro-batches of unequal size, beside true big batches."""

import math
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import bigbatch
from bigbatch import Accumulator, BigStep, errors, verify
from bigbatch.errors import BigBatchError
from bigbatch.update import Update
from tests.zoo.program import Expected, Loss, Program

UPDATES = 3
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

    steps: list[Tensor]
    norms: list[float]
    losses: list[float | None]  # None: not told, or told not to be exact
    buffers: Tensor
    untold: str = ""  # what was raised in the place of a loss


def expected(program: Program, entrance: str) -> Expected:
    """What the table says of this entrance."""
    return program.accumulator if entrance == "accumulator" else program.big_step


def is_met(program: Program, entrance: str, result: Result) -> bool:
    """Whether the table's expectation is met; what no graph shows is not asked of an Accumulator."""
    if entrance == "verify":
        return program.unseen in result.kind
    if any(word in said for word in _ACCUSATIONS for said in result.warnings):
        return False
    due = expected(program, entrance)
    if due.warned:
        return result.outcome == "wrong" and any(due.warned in said for said in result.warnings)
    if program.unseen:
        return result.outcome in {"exact", "refused"} or (result.outcome == "wrong" and entrance == "accumulator")
    if due.error is None:
        return result.outcome == "exact"
    return (
        result.outcome == "refused" and issubclass(getattr(errors, result.kind), due.error) and due.word in result.text
    )


def entrances(program: Program) -> tuple[str, ...]:
    """With what it is tried."""
    return ("accumulator", "big_step", "verify") if program.unseen else ("accumulator", "big_step")


def attempt(program: Program, entrance: str, *, seed: int = 0, device: torch.device | None = None) -> Result:
    """Try it, and say what came out."""
    device = device or torch.device("cpu")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = _attempted(program, entrance, seed, device)
    ours = sorted({str(each.message) for each in said if each.filename.startswith(_OURS)})
    return Result(result.outcome, result.distance, result.kind, result.text, ours)


def _attempted(program: Program, entrance: str, seed: int, device: torch.device) -> Result:
    true = None if entrance == "verify" else _run(program, seed, device, _true)
    try:
        if true is None:
            return _verified(program, seed, device)
        ours = _run(program, seed, device, _accumulated if entrance == "accumulator" else _stepped)
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
        batch = _moved(_given(program, sum(program.cuts), 100 * seed + number), device)
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


# Takes a batch and its cuts; makes an update and tells its norm and its loss, or what came in the place of that.
Taking = Callable[[Any, tuple[int, ...]], tuple[float, float | str | None]]
Maker = Callable[[Program, nn.Module, torch.optim.Optimizer, Loss, torch.device], Taking]


def _run(program: Program, seed: int, device: torch.device, maker: Maker) -> Run:
    """Train for a few updates, the last of a shorter window; parts of the model take turns."""
    model = program.model(device)
    parts = {part: [p for p in model.get_submodule(part).parameters() if p.requires_grad] for part in program.losses()}
    optimizers = {part: torch.optim.SGD(own, lr=0.1, momentum=0.9) for part, own in parts.items()}
    take = {part: maker(program, model, optimizers[part], program.losses()[part], device) for part in parts}
    run = Run([], [], [], torch.empty(0))
    trained = [p for own in parts.values() for p in own]
    before = _flat(trained)
    for number, cuts in enumerate([program.cuts] * (UPDATES - 1) + [program.cuts[:-1]]):
        batch = _given(program, sum(cuts), 100 * seed + number)
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


def _true(
    program: Program, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, device: torch.device
) -> Taking:
    """One forward and backward over all samples."""
    own = [p for group in optimizer.param_groups for p in group["params"]]

    def update(batch: Any, _: tuple[int, ...]) -> tuple[float, float | str | None]:
        value = loss(model, _moved(batch if program.collate is None else program.collate(batch), device))
        model.zero_grad()
        value.backward()
        norm = clip_grad_norm_(own, CLIP_NORM)
        optimizer.step()
        model.zero_grad()
        return float(norm), float(value.detach())

    return update


def _accumulated(
    program: Program, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, device: torch.device
) -> Taking:
    """The same, micro-batch by micro-batch."""
    accumulator = Accumulator(model, optimizer, steps=len(program.cuts), clip_norm=CLIP_NORM, **program.settings)

    def update(batch: Any, cuts: tuple[int, ...]) -> tuple[float, float | str | None]:
        made = None
        for micro_batch in accumulator.over(list(_cut(program, batch, cuts))):
            made = accumulator.backward(loss(model, _moved(micro_batch, device)))
        return _told(made)

    return update


def _stepped(
    program: Program, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, _: torch.device
) -> Taking:
    """The same by a BigStep."""
    given: dict[str, Any] = {"clip_norm": CLIP_NORM, "options": program.big_step_options()}
    step = BigStep(model, optimizer, loss, micro_batch_size=program.micro_batch, **given)
    return lambda batch, _: _told(step(batch))


def _told(made: Update | None) -> tuple[float, float | str | None]:
    if made is None or made.skipped or made.grad_norm is None:
        return math.nan, math.nan  # the optimizer was left alone
    try:
        loss = float(made.loss)
    except BigBatchError as error:
        return float(made.grad_norm), str(error)
    return float(made.grad_norm), loss if getattr(made, "loss_is_exact", True) else None


def _cut(program: Program, batch: Any, cuts: Iterable[int]) -> Iterator[Any]:
    start = 0
    for size in cuts:
        if program.collate is None:
            yield _mapped(batch, operator.itemgetter(slice(start, start + size)))
        else:
            yield program.collate(batch[start : start + size])
        start += size


def _given(program: Program, n: int, seed: int) -> Any:
    """A batch in the model's own precision."""
    batch = program.batch(n, seed)
    return batch if program.float64 else _mapped(batch, lambda t: t.float() if t.dtype == torch.float64 else t)


def _moved(batch: Any, device: torch.device) -> Any:
    return batch if device.type == "cpu" else _mapped(batch, lambda tensor: tensor.to(device))


def _mapped(tree: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: _mapped(value, function) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_mapped(value, function) for value in tree)
    return tree


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    flat = [tensor.detach().double().flatten().cpu() for tensor in tensors]
    return torch.cat(flat) if flat else torch.empty(0)
