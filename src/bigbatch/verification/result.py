"""What a verification came to: differences, verdict, causes and what to type against them, and all of it as text."""

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bigbatch.errors import ConfigurationError, GradientsDiffer
from bigbatch.planner.plan_report import aligned

EXACT = 1e-12  # relative, in float64: what counts as equal whatever the rounding
OUTSIDE = "loss_fn"  # the place of what happens where no module runs
# Of each kind, what to type.
ADVICE = {
    "batch-norm": "Normalize by the big batch, as BigStep does; or use GroupNorm, or LayerNorm; or freeze it.\n"
    'Options(batch_norm="exact")  or  model.get_submodule({first!r}).eval()',
    "randomness": "Nothing to repair: another split draws other numbers; the gradients are equal in distribution.\n"
    "Accept it:  verify(...).raise_if_wrong(allow={{'randomness'}})",
    "wrong-scale": "Have BigStep or an Accumulator weight the loss; to clip, use torch.nn.utils.\n"
    "In a loop:  (loss * count / total).backward(), where total is the count of the window",
    "wrong-count": "Weight each micro-batch by what its loss was averaged over, and a regularizer once.\n"
    "In a loss_fn:  return counted(loss, {count}), or counted(penalty, 'once')\n"
    "In a loop:  (loss * {count} / total).backward(), or accumulator.backward(loss)",
    "coupled-samples": "No loop over micro-batches can be exact here. In BigStep use the other samples; or attend, "
    "pool and normalize within a sample.\n"
    "across.gather(x), where own rows begin at across.offset(); across.mean(x), across.sum(x)  (docs/coupled.md)",
    "dropped-micro-batch": "Clear gradients after optimizer.step() alone, and step after the last micro-batch, too, as "
    "accumulator.over does.",
    "stepped-inside": "Step once in a window:  if (i + 1) % {steps} == 0: optimizer.step(); optimizer.zero_grad()",
    "state": "Write it after the update, not in forward; or have forward read a copy that only the update changes.",
    "clipping": "Clip once in a window, after the last backward and right before optimizer.step(), or by clip_norm.",
    "precision": "Add up in float32, as Accumulator and BigStep do with gradient_dtype=torch.float32, or train float32 "
    "weights under autocast.",
    "nondeterminism": "Try torch.use_deterministic_algorithms(True), and draw from torch's default generators.",
    "unknown": "",
}
KINDS = tuple(ADVICE)
_FACTOR = 8  # times the measured rounding: two roundings of one number are hardly ever further apart
_ROWS, _NAMES = 10, 2  # that are shown
_BY = {
    "BigStep": ", as BigStep accumulates them,",
    "train_window": ", as your train_window accumulates them,",
    "samples": ", weighted by their samples,",
}


@dataclass(frozen=True)
class Difference:
    """How far the accumulated gradient of one parameter is from the big batch's, relative to its size.

    Where the model cannot run in float64, the exact figures are NaN, and the own ones are against the big batch's
    gradient in the model's own dtype.
    """

    name: str
    shape: tuple[int, ...]
    exact_difference: float  # in float64, where nothing but a mistake is larger than 1e-12
    exact_floor: float  # in float64: the big batch against itself with its samples in another order
    own_difference: float  # in the model's own dtype, against the truth in float64
    own_floor: float  # in the model's own dtype: the big batch itself against the truth in float64

    @property
    def difference(self) -> float:
        """The difference that is judged: in float64, where the model can run in it."""
        return self.own_difference if math.isnan(self.exact_difference) else self.exact_difference

    @property
    def tolerance(self) -> float:
        """How far apart two roundings of this gradient may be."""
        return _FACTOR * self.own_floor if math.isnan(self.exact_difference) else max(EXACT, _FACTOR * self.exact_floor)

    @property
    def excess(self) -> float:
        """The difference as a multiple of what rounding explains: above 1 it is a mistake."""
        if self.tolerance == 0:
            return math.inf if self.difference else 0.0
        return self.difference / self.tolerance

    @property
    def exact(self) -> bool:
        """Whether rounding explains it."""
        return self.excess <= 1


@dataclass(frozen=True)
class Cause:
    """One reason why the gradients differ, found by turning it off and seeing the difference go away."""

    kind: str  # "batch-norm", "randomness", "wrong-count" and so on; docs/verify.md lists all
    where: str  # the module's qualified name, or the operation; empty where it has no place
    found: str  # the evidence, in a sentence
    remedy: str  # what to type

    def __str__(self) -> str:
        where = f" at {self.where}" if self.where else ""
        return f"{self.kind}{where}\n{self.found}\n{self.remedy}".rstrip()


def cause(kind: str, where: str, found: str, **of_text: Any) -> Cause:
    """Make a cause with the advice of its kind."""
    return Cause(kind, where, f"{found[:1].upper()}{found[1:]}.", ADVICE[kind].format(**of_text))


@dataclass(frozen=True)
class Verification:
    """Whether the accumulated gradient is the big batch's, per parameter, and if not, why not.

    `print(verification)` shows the largest differences, the verdict and the causes.
    """

    exact: bool  # whether rounding explains all of the difference, in float64 and in the model's own dtype
    differences: tuple[Difference, ...]  # one for each parameter that is trained, in the model's order
    causes: tuple[Cause, ...]
    samples: int  # of the batch
    samples_proved: int  # that were compared: fewer where the whole batch did not fit into memory
    micro_batches: tuple[int, ...]  # how many samples each one had
    dtype: str  # the model's own, such as "bfloat16"
    loss: tuple[float, float]  # of the big batch, and as accumulated; NaN where it is not known
    accumulated_by: str = "BigStep"  # or your own "train_window", or, where BigStep raises, "samples"
    refused: str = ""  # what BigStep raises for this loss, where the figures are those of accumulating anyway
    notes: tuple[str, ...] = ()  # what else a reader should know, in sentences

    @property
    def worst_first(self) -> tuple[Difference, ...]:
        """All parameters, that which is furthest from what rounding explains first."""
        return tuple(sorted(self.differences, key=lambda each: -each.excess))

    @property
    def worst(self) -> Difference:
        """The parameter that is furthest from what rounding explains."""
        return self.worst_first[0]

    @property
    def in_float64(self) -> bool:
        """Whether the model could run in float64."""
        return not any(math.isnan(each.exact_difference) for each in self.differences)

    def raise_if_wrong(self, allow: Collection[str] = ()) -> None:
        """Raise `GradientsDiffer` unless the gradients are equal, as for a test suite.

            verify(model, loss_fn, batch, micro_batch_size=4).raise_if_wrong()
            verify(model, loss_fn, batch, micro_batch_size=4).raise_if_wrong(allow={"randomness"})  # with its dropout

        Args:
            allow: kinds of causes that are accepted. Nothing is raised where all causes are of these kinds.
        """
        if not self.accepted(allow):
            raise GradientsDiffer(str(self))

    def accepted(self, allow: Collection[str] = ()) -> bool:
        """Whether the gradients are equal but for causes of these kinds."""
        refuse_unknown(allow)
        kinds = {cause.kind for cause in self.causes}
        return self.exact or (bool(kinds) and kinds <= set(allow) and not self.refused)

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings and lists, as JSON has them: what is not a finite number is None."""
        plain = json.loads(json.dumps(asdict(self)), parse_constant=lambda _: None)
        return {**plain, "worst": self.worst.name}

    def __str__(self) -> str:
        lines = aligned([header(self.dtype), *map(row, self.worst_first[:_ROWS])])
        left = len(self.differences) - _ROWS
        lines += [f"and {left:,} more, each closer to the big batch's"] if left > 0 else []
        causes = [f"{place}. {cause}" for place, cause in enumerate(self.causes, 1)]
        return "\n\n".join(["\n".join(lines), headline(self), *causes, *self.notes])


def refuse_unknown(kinds: Collection[str]) -> None:
    """Raise for what is no set of kinds: a slip would accept nothing, silently."""
    unknown = [kinds] if isinstance(kinds, str) else sorted(set(kinds) - set(KINDS))
    if unknown:
        problem, fix = "allow must be a set of kinds of causes.", f"some of these: {', '.join(KINDS)}"
        raise ConfigurationError(problem, found=repr(unknown[0]), fix=fix)


def headline(found: Verification) -> str:
    """Return the verdict in one sentence."""
    of = f" of {found.samples:,}" if found.samples_proved < found.samples else ""
    cut = f"{found.samples_proved:,}{of} samples in {len(found.micro_batches):,} micro-batches"
    gradient, far = f"the gradient of {cut}{_BY[found.accumulated_by]}", number(found.worst.difference)
    dtype = "float64" if found.in_float64 else found.dtype
    if found.exact:
        return f"Exact: {gradient} is the big batch's, to {far} in {dtype}."
    if found.accepted({"randomness"}):
        return f"Equal in distribution: {gradient} differs from the big batch's by its random numbers alone."
    if found.worst.exact and any(cause.kind == "precision" for cause in found.causes):
        return f"Exact in float64, not in {found.dtype}: {gradient} loses more than the big batch's does."
    if found.worst.exact:
        return f"No proof: {gradient} came out as the big batch's, to {far} in {dtype}, but see below."
    return f"Not exact: {gradient} differs from the big batch's, by {far} at {found.worst.name}."


def header(dtype: str) -> tuple[str, ...]:
    """Return the titles of the columns."""
    return ("parameter", "shape", "float64", "rounding", dtype if dtype != "float64" else "own", "rounding")


def row(each: Difference) -> tuple[str, ...]:
    """Return the figures of one parameter."""
    figures = (each.exact_difference, each.exact_floor, each.own_difference, each.own_floor)
    return (each.name, "×".join(map(str, each.shape)) or "1", *map(number, figures))


def number(value: float) -> str:
    """Write a relative difference with two digits."""
    return "-" if math.isnan(value) else "0" if value == 0 else f"{value:.1e}" if value < 0.01 else f"{value:.2g}"  # noqa: PLR2004


def listed(names: Sequence[str]) -> str:
    """Name the first two, and say how many more there are."""
    return ", ".join(names[:_NAMES]) + (f" and {len(names) - _NAMES:,} more" if len(names) > _NAMES else "")
