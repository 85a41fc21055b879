"""Two runs of a model that should be one: what is said where they are not."""

from collections.abc import Iterable

import torch
from torch import Tensor

from bigbatch.errors import LossError

_SAME = 1e-2  # of the largest value, and less in high precision: kernels that add in no fixed order differ by far less
_KEEP = 'or keep activations:  Options(activations="keep")'
_OTHER_VALUES = (
    "the model returned other values when it was run again in backward with the same input. It depends on something "
    "outside of it that has changed in between, such as a global that loss_fn sets before it calls the model; its own "
    f"attributes are put back.\nGive it as an argument:  model(x, condition); {_KEEP}"
)
_OTHER_PATH = (
    "the model took another way when it was run again in backward with the same input: {what}. Its values are the same "
    "for now, as where weights begin at zero, but its gradient is another one. It depends on something outside of it "
    "that has changed in between, such as a global that loss_fn sets before it calls the model; its own attributes are "
    f"put back.\nGive it as an argument:  model(x, condition); {_KEEP}"
)
_CHANGED_BETWEEN = (
    "{what} was changed between the model's run and its second run in backward, which would not find what the first "
    f"one found.\nGive it as an argument:  model(x, condition); change it after the update; {_KEEP}"
)
_CHANGES_ITSELF = (
    "the model changes {what} when it runs, so a second run in backward would be another one.\n"
    f"Do that in loss_fn, after the model has run; {_KEEP}"
)
_OTHER_NUMBERS = (
    "the model was run again in backward and did not draw the random numbers that it drew the first time: another "
    "thread has drawn some while it ran, as one that augments images may.\n"
    f"Have that thread draw from a generator of its own:  torch.Generator(); {_KEEP}"
)


class RunsDiffer(LossError):
    """A model gave other values the second time, or would."""

    @classmethod
    def in_path(cls, what: str) -> "RunsDiffer":
        """The second run computes something else."""
        return cls(_OTHER_PATH.format(what=what))

    @classmethod
    def between(cls, what: str) -> "RunsDiffer":
        """Something that the first run found has been changed since."""
        return cls(_CHANGED_BETWEEN.format(what=what))

    @classmethod
    def by_itself(cls, what: str) -> "RunsDiffer":
        """The first run changes what the second would have to find."""
        return cls(_CHANGES_ITSELF.format(what=what))

    @classmethod
    def in_numbers(cls) -> "RunsDiffer":
        """The second run has drawn other random numbers."""
        return cls(_OTHER_NUMBERS)


def refuse_other_values(first: Iterable[Tensor], second: Iterable[Tensor], *, low: bool) -> None:
    """Raise where two runs gave other values; `low`: the precision on the way is, so they may be further apart."""
    for one, other in zip(first, second, strict=True):
        if one.shape != other.shape or _distance(one, other.detach()) > _same(one, low=low):
            raise RunsDiffer(_OTHER_VALUES)


def _same(result: Tensor, *, low: bool) -> float:
    """Return how far two runs may be apart: as much as the lowest precision on the way may make them."""
    exact = result.is_floating_point() or result.is_complex()
    return _SAME if low or not exact else min(_SAME, torch.finfo(result.dtype).eps ** 0.5)


def _distance(first: Tensor, second: Tensor) -> float:
    """Return how far two results are apart, as a part of the largest value; not finite values agree with all."""
    if not first.numel():
        return 0.0
    finite = first.isfinite()
    apart = (first - second).abs().masked_fill(~finite, 0.0).nan_to_num(nan=torch.inf)
    return float(apart.max() / first.abs().masked_fill(~finite, 0.0).max().clamp(min=1e-30))
