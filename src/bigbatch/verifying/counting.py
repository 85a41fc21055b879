"""What a batch shows that weights may be in proportion to: samples, targets that are not ignored, a mask."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from bigbatch.batches.splitting import leaves
from bigbatch.verifying.samples import Samples

_IGNORED = -100


def expression_of(samples: Samples, weights: Sequence[float]) -> str | None:
    """Return what to type for a count that is in proportion to the weights; None where nothing is."""
    rows = [dict(_counts(samples.micro_batch(place, None))) for place in range(len(weights))]
    for expression in rows[0]:
        counts = [row.get(expression, math.nan) for row in rows]
        total = math.fsum(counts)
        if total > 0 and all(
            math.isclose(count / total, weight, rel_tol=1e-4) for count, weight in zip(counts, weights, strict=True)
        ):
            return expression
    return None


def _counts(batch: Any) -> Iterator[tuple[str, float]]:
    found = [(path, leaf) for path, leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    for path, leaf in found[:1]:
        yield f"len({path})", float(len(leaf))
    for path, leaf in found:
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
