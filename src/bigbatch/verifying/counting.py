"""What a batch shows that weights may be in proportion to: samples, targets that are not ignored, a mask."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bigbatch.batch.tree import leaves
from bigbatch.verifying.samples import Samples

_IGNORED = -100
_TARGETS = re.compile("label|target", re.IGNORECASE)


@dataclass(frozen=True)
class Counts:
    """What can be counted in each micro-batch, by what to type for it."""

    rows: tuple[dict[str, float], ...]

    @classmethod
    def of(cls, samples: Samples) -> "Counts":
        """Count in all of them."""
        return cls(tuple(dict(_counts(samples.micro_batch(place, None))) for place in range(len(samples.sizes))))

    def in_proportion_to(self, weights: Sequence[float]) -> str | None:
        """Return what weights are in proportion to; None where nothing is."""
        whole = math.fsum(weights)
        for expression in self.rows[0]:
            counts, total = [row.get(expression, math.nan) for row in self.rows], self.total(expression)
            if total > 0 and all(
                math.isclose(count / total, weight / whole, rel_tol=1e-4)
                for count, weight in zip(counts, weights, strict=True)
            ):
                return expression
        return None

    def larger_by(self, right: str, factor: float) -> str | None:
        """Return what comes to so many times the right count; None where nothing does."""
        wanted = factor * self.total(right)
        others = (each for each in self.rows[0] if each != right)
        return next((each for each in others if math.isclose(self.total(each), wanted, rel_tol=1e-4)), None)

    @property
    def alike(self) -> bool:
        """Whether all micro-batches count the same: as many samples, targets that are not ignored, ones of a mask."""
        telling = [expression for expression in self.rows[0] if not expression.endswith("!= 0).sum()")]  # or a class
        return all(row.get(each) == self.rows[0][each] for row in self.rows for each in telling)

    def total(self, expression: str) -> float:
        """Add up over all micro-batches."""
        return math.fsum(row.get(expression, math.nan) for row in self.rows)


def _counts(batch: Any) -> Iterator[tuple[str, float]]:
    found = [(path, leaf) for path, leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    for path, leaf in found[:1]:
        yield f"len({path})", float(len(leaf))
    for path, leaf in sorted(
        found, key=lambda each: not _TARGETS.search(each[0])
    ):  # what is counted is a target, mostly
        if leaf.is_floating_point() or leaf.is_complex():
            if bool(((leaf == 0) | (leaf == 1)).all()):
                yield f"{path}.sum()", float(leaf.sum())
            continue
        yield f"({path} != {_IGNORED}).sum()", float((leaf != _IGNORED).sum())
        if leaf.dim() > 1:
            yield f"({path}[..., 1:] != {_IGNORED}).sum()", float((leaf[..., 1:] != _IGNORED).sum())
        yield f"({path} != 0).sum()", float((leaf != 0).sum())
        if leaf.dim() > 1:
            yield f"({path}[..., 1:] != 0).sum()", float((leaf[..., 1:] != 0).sum())
