"""What a proof came to: the difference of each parameter, the verdict, and the causes."""

import math
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from bigbatch.errors import ConfigurationError, GradientsDiffer
from bigbatch.verifying.table import text

EXACT = 1e-12  # relative, in float64: what counts as equal whatever the rounding
KINDS = (
    "batch-norm",
    "randomness",
    "buffers-written",
    "shared-state",
    "coupled-samples",
    "nonlinear-in-a-mean",
    "wrong-count",
    "counted-per-micro-batch",
    "missing-term",
    "unused-parameters",
    "low-precision-sums",
    "nondeterminism",
    "not-divided",
    "divided-twice",
    "wrong-scale",
    "dropped-micro-batch",
    "zeroed-inside",
    "stepped-inside",
    "clipped-inside",
)
FEW = 8  # times the measured rounding: two roundings of one number lie so far apart, hardly ever more


@dataclass(frozen=True)
class Difference:
    """How far the accumulated gradient of one parameter lies from the big batch's, relative to its size.

    Where the model cannot run in float64, the exact figures are NaN, and the own ones are against the big batch's
    gradient in the model's own dtype.
    """

    name: str
    shape: tuple[int, ...]
    exact_difference: float
    """In float64, where nothing but a mistake is larger than 1e-12."""
    exact_floor: float
    """In float64: the big batch against itself with its samples in another order."""
    own_difference: float
    """In the model's own dtype, against the truth in float64."""
    own_floor: float
    """In the model's own dtype: the big batch itself against the truth in float64."""

    @property
    def tolerance(self) -> float:
        """How far apart two roundings of this gradient may lie."""
        if math.isnan(self.exact_difference):
            return FEW * self.own_floor
        return max(EXACT, FEW * self.exact_floor)

    @property
    def excess(self) -> float:
        """The difference as a multiple of what rounding explains: above 1 it is a mistake."""
        found = self.own_difference if math.isnan(self.exact_difference) else self.exact_difference
        if self.tolerance == 0:
            return 0.0 if found == 0 else math.inf
        return found / self.tolerance

    @property
    def exact(self) -> bool:
        """Whether rounding explains it."""
        return self.excess <= 1


@dataclass(frozen=True)
class Cause:
    """One reason why the gradients differ, found by turning it off and seeing the difference go."""

    kind: str
    """A short name: "batch-norm", "randomness", "wrong-count" and so on; docs/verify.md has all."""
    where: str
    """The module's qualified name, or the operation; empty where it has no place."""
    share: float
    """How much of the difference goes when it is turned off, from 0 to 1."""
    found: str
    """The evidence, in a sentence."""
    remedy: str
    """What to type."""


def refuse_unknown(kinds: Collection[str]) -> None:
    """Refuse what is no set of kinds: a slip would accept nothing, and not say so."""
    unknown = [kinds] if isinstance(kinds, str) else sorted(set(kinds) - set(KINDS))
    if unknown:
        msg = (
            f"allow takes kinds of causes, in Python a set of them; found {unknown[0]!r}.\n"
            f"Take some of these:  {', '.join(KINDS)}"
        )
        raise ConfigurationError(msg)


@dataclass(frozen=True)
class Verification:
    """Whether the accumulated gradient is the big batch's, per parameter, and if not, why not.

    `print(verification)` shows the largest differences, the verdict and the causes.
    """

    exact: bool
    """Whether rounding explains all of the difference, in float64 and in the model's own dtype."""
    differences: tuple[Difference, ...]
    """One for each parameter that is trained, in the model's order."""
    causes: tuple[Cause, ...]
    samples: int
    """How many samples the batch has."""
    samples_proved: int
    """How many of them were in the proof: fewer where the whole batch did not fit into memory."""
    micro_batches: tuple[int, ...]
    """How many samples each micro-batch had."""
    dtype: str
    """The model's own, such as "bfloat16"."""
    loss: tuple[float, float]
    """Of the big batch, and as accumulated; NaN where it is not known."""
    accumulated_by: str = "BigStep"
    """What was put to the proof: "BigStep", your own "train_window", or, where BigStep refuses, "samples"."""
    unexplained: float = 0.0
    """What is left of the difference with all of the causes turned off."""
    notes: tuple[str, ...] = ()
    """What else a reader should know, in sentences: what was left out, what could not be had."""

    @property
    def worst(self) -> Difference | None:
        """The parameter that is furthest from what rounding explains; None where none is trained."""
        return max(self.differences, key=lambda each: each.excess, default=None)

    @property
    def in_float64(self) -> bool:
        """Whether the model could run in float64."""
        return not any(math.isnan(each.exact_difference) for each in self.differences)

    def raise_if_wrong(self, allow: Collection[str] = ()) -> None:
        """Raise `GradientsDiffer` unless the gradients are equal, as for a test suite.

            verify(model, loss_fn, batch, micro_batch_size=4).raise_if_wrong()
            verify(model, loss_fn, batch, micro_batch_size=4).raise_if_wrong(allow={"randomness"})  # with its dropout

        Args:
            allow: kinds of causes that are accepted. Where all of the causes are of these, and they explain all of the
                difference, nothing is raised.
        """
        if not self.accepted(allow):
            raise GradientsDiffer(str(self))

    def accepted(self, allow: Collection[str] = ()) -> bool:
        """Whether the gradients are equal but for causes of these kinds."""
        refuse_unknown(allow)
        kinds_found = {cause.kind for cause in self.causes}
        return self.exact or (bool(kinds_found) and kinds_found <= set(allow) and not self.unexplained)

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings and lists, as JSON has them: what is not a finite number is None."""
        found: dict[str, Any] = _plain(asdict(self))
        worst = self.worst
        found["worst"] = None if worst is None else worst.name
        return found

    def __str__(self) -> str:
        """Show the largest differences, the verdict and the causes."""
        return text(self)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
