"""The micro-batch sizes that fit, remembered by the shape of a sample."""

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Literal

import torch

from bigbatch.batches.packing import expected_seconds
from bigbatch.errors import OutOfMemory, StateError
from bigbatch.memory.budget import budget, human
from bigbatch.memory.host import resident
from bigbatch.memory.sizing import Choice, Probe, choose

TOKENS = "tokens"  # under this name: how many of them a packed micro-batch may have
_LARGER = 2  # times as many samples: a size is looked for again
ProbeSize = Callable[[int, int], Probe]  # of a size, within a limit


class Sizes:
    """Finds how many samples, or tokens, go through the model at once, and never forgets what did not fit."""

    def __init__(self, given: int | Literal["auto"], memory: float | str | None, device: torch.device) -> None:
        """Take what the user gave; memory is looked at when a size has to be found."""
        self._given, self._memory, self._device = given, memory, device
        self._learned: dict[str, int] = {}
        self._found_with: dict[str, int] = {}  # how many samples the batch had that a size was found on
        if memory is not None:
            budget(memory, device)  # refuse nonsense now

    @property
    def most(self) -> int | None:
        """The most samples of a micro-batch, where the user has said so."""
        return None if self._given == "auto" else self._given

    def samples(self, signature: str, total: int, probe: ProbeSize) -> int:
        """Return how many samples of this shape make a micro-batch, out of `total`."""
        learned = self._known(signature, total)
        if learned is None and self._given == "auto":
            learned = self._for_larger(signature, total)
        known = [size for size in (learned, self._given) if isinstance(size, int)]
        if known:
            return min(*known, total)
        self._learned[signature] = self._found(signature, total, probe).size
        return self._learned[signature]

    def tokens(self, given: int | Literal["auto"], lengths: Sequence[int], probe: ProbeSize) -> int:
        """Return how many padded tokens make a micro-batch; `probe` tries a number of the longest samples.

        How many of the longest fit is measured. Of the budgets that were seen to fit, the one is taken that these
        samples are expected to need the least time with: a small one launches often, a large one pads much.
        """
        known = [size for size in (self._known(TOKENS, len(lengths)), given) if isinstance(size, int)]
        if known:
            return min(known)
        longest = max(*lengths, 1)
        found = self._found(TOKENS, len(lengths), probe)
        fitting = [p for p in found.probes if p.peak_bytes is not None and p.peak_bytes <= found.limit and p.seconds]
        self._learned[TOKENS] = longest * found.size
        if fitting:
            least = min(p.seconds or 0.0 for p in fitting)
            per_token = min((p.seconds or 0.0) / (p.size * longest) for p in fitting)
            budgets = [longest * p.size for p in fitting]
            self._learned[TOKENS] = min(budgets, key=lambda b: expected_seconds(lengths, b, least, per_token))
        return self._learned[TOKENS]

    def _known(self, name: str, total: int) -> int | None:
        """Return what was learned, unless it was found on a batch that was much too small to tell."""
        if total > _LARGER * self._found_with.get(name, total):
            return None
        return self._learned.get(name)

    def _for_larger(self, signature: str, total: int) -> int | None:
        """Return a size that was found for larger samples: it fits these, too, so ragged batches are not tried anew."""
        found = [self._known(known, total) for known in self._learned if _is_larger(known, signature)]
        return max((size for size in found if size is not None), default=None)

    def _found(self, name: str, total: int, probe: ProbeSize) -> Choice:
        self._found_with[name] = total
        limit = budget(self._memory, self._device)
        try:
            return choose(lambda size: probe(size, limit), total, limit)
        except OutOfMemory as error:
            if self._device.type == "cuda":
                raise
            msg = f"{error}\nThis process holds {human(resident())} by now, its code and libraries included."
            raise OutOfMemory(msg) from None

    def learn(self, name: str, size: int) -> None:
        """Remember a size that a larger one has failed for, by the shape of a sample or for tokens."""
        self._learned[name] = max(size, 1)
        self._found_with.pop(name, None)

    def state_dict(self) -> dict[str, int]:
        """Return what was learned."""
        return dict(self._learned)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what was learned before."""
        given: object = state
        if not isinstance(given, Mapping):
            msg = f"learned sizes are a dict of positive integers by the shapes of samples; found {given!r}"
            raise StateError(msg)
        for name, size in given.items():
            if not isinstance(name, str) or isinstance(size, bool) or not isinstance(size, int) or size < 1:
                msg = f"a learned size is a positive integer by the shape of a sample; found {name!r}: {size!r}"
                raise StateError(msg)
        self._learned = dict(state)
        self._found_with.clear()


def _is_larger(one: str, other: str) -> bool:
    """Whether samples of one shape have all that those of another have, and more in some dimension."""
    if one == TOKENS:
        return False
    for mine, theirs in zip_longest(one.split("; "), other.split("; "), fillvalue=""):
        name, _, sizes = mine.rpartition(" [")
        other_name, _, other_sizes = theirs.rpartition(" [")
        dims, other_dims = (text.rstrip("]").split(", ") for text in (sizes, other_sizes))
        if name != other_name or len(dims) != len(other_dims):
            return False
        if any(int(a or 0) < int(b or 0) for a, b in zip(dims, other_dims, strict=True)):
            return False
    return True
