"""The micro-batch sizes that fit, remembered by the shape of a sample."""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

import torch

from bigbatch.batch.packing import expected_seconds
from bigbatch.errors import OutOfMemory, StateError
from bigbatch.memory.budget import budget, human
from bigbatch.memory.host import resident
from bigbatch.memory.search import Choice, Probe, choose

TOKENS = "tokens"  # under this name: how many of them a packed micro-batch may have, where more have failed
_TOKENS_OF = re.compile(rf"{TOKENS} \[(\d+)\]")  # under these: how many were found with samples of this length
_LARGER = 2  # times as many samples, or tokens: a size is looked for again
_LONGER = 1.25  # times as long: a budget of tokens is looked for again; growing from 16 to 4,096 takes it 25 times
ProbeSize = Callable[[int, int], Probe]  # of a size, within a limit


class _Learned(NamedTuple):
    """A size, and how many samples the batch had that it was found on; None where a larger one has failed."""

    size: int
    samples: int | None = None


class Sizes:
    """Finds how many samples, or tokens, go through the model at once, and never forgets what did not fit."""

    def __init__(self, given: int | Literal["auto"], memory: float | str | None, device: torch.device) -> None:
        """Take what the user gave; memory is looked at when a size has to be found."""
        self._given, self._memory, self._device = given, memory, device
        self._learned: dict[str, _Learned] = {}
        if memory is not None:
            budget(memory, device)  # refuse nonsense now

    @property
    def most(self) -> int | None:
        """The most samples of a micro-batch, where the user has said so."""
        return None if self._given == "auto" else self._given

    def budget(self) -> int:
        """Return what may be used on the device, in bytes."""
        return budget(self._memory, self._device)

    def samples(self, signature: str, total: int, probe: ProbeSize, *, at_once: bool = False) -> int:
        """Return how many samples of this shape make a micro-batch, out of `total`; all `at_once` where that fits."""
        learned = self._known(signature, total)
        if learned is None and self._given == "auto":
            learned = self._for_larger(signature, total)
        known = [size for size in (learned, self._given) if isinstance(size, int)]
        if known:
            return min(*known, total)
        found = self._found(total, probe)
        self._learned[signature] = _Learned(total if at_once and found.fits_whole else found.size, total)
        return self._learned[signature].size

    def tokens(self, given: int | Literal["auto"], lengths: Sequence[int], probe: ProbeSize) -> int:
        """Return how many padded tokens make a micro-batch; `probe` tries a number of the longest samples.

        How many of the longest fit is measured. Of the budgets that were seen to fit, the one is taken that these
        samples are expected to need the least time with: a small one launches often, a large one pads much.
        """
        longest, number = max(*lengths, 1), len(lengths)
        most = [size for size in (self._known(TOKENS, number), given) if isinstance(size, int)]
        measured = [
            (int(of[1]), learned) for name, learned in self._learned.items() if (of := _TOKENS_OF.fullmatch(name))
        ]
        if isinstance(given, int) or (most and not measured):
            return min(most)
        found = _nearest(measured, longest, number)
        if found is None:
            found = self._found_tokens(lengths, longest, probe)
            self._learned[f"{TOKENS} [{longest}]"] = _Learned(found, number)
        return min([found, *most])

    def _found_tokens(self, lengths: Sequence[int], longest: int, probe: ProbeSize) -> int:
        found = self._found(len(lengths), probe)
        fitting = [p for p in found.probes if p.peak_bytes is not None and p.peak_bytes <= found.limit and p.seconds]
        if not fitting:
            return longest * found.size
        least = min(p.seconds or 0.0 for p in fitting)
        per_token = min((p.seconds or 0.0) / (p.size * longest) for p in fitting)
        budgets = [longest * p.size for p in fitting]
        return min(budgets, key=lambda b: expected_seconds(lengths, b, least, per_token))

    def _known(self, name: str, total: int) -> int | None:
        """Return what was learned, unless it was found on a batch that was much too small to tell."""
        learned = self._learned.get(name)
        if learned is None or (learned.samples is not None and total > _LARGER * learned.samples):
            return None
        return learned.size

    def _for_larger(self, signature: str, total: int) -> int | None:
        """Return a size that was found for larger samples: it fits these, too, so ragged batches are not tried anew."""
        found = [self._known(known, total) for known in self._learned if _is_larger(known, signature)]
        return max((size for size in found if size is not None), default=None)

    def _found(self, total: int, probe: ProbeSize) -> Choice:
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
        self._learned[name] = _Learned(max(size, 1))

    def state_dict(self) -> dict[str, dict[str, int]]:
        """Return what was learned, and what it was found with."""
        every = {name: learned._asdict() for name, learned in self._learned.items()}
        return {name: {key: n for key, n in each.items() if n is not None} for name, each in every.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what was learned before; a size may stand alone, without what it was found with."""
        given: object = state
        if not isinstance(given, Mapping):
            msg = f"learned sizes are a dict of positive integers by the shapes of samples; found {given!r}"
            raise StateError(msg)
        learned = {}
        for name, found in given.items():
            values = found if isinstance(found, Mapping) else {"size": found}
            fits = "size" in values and values.keys() <= set(_Learned._fields)
            if not isinstance(name, str) or not fits or not all(map(_is_positive, values.values())):
                msg = f"a learned size is a positive integer by the shape of a sample; found {name!r}: {found!r}"
                raise StateError(msg)
            learned[name] = _Learned(**values)
        self._learned = learned


def _nearest(measured: Sequence[tuple[int, _Learned]], longest: int, number: int) -> int | None:
    """Return a budget of tokens that fits so many samples of a length, found on samples as long or hardly shorter.

    None where none was, or only on batches that were much too small to tell: a budget is never larger than its batch.
    """
    for length, learned in sorted(measured):
        room = length * (learned.samples or number)
        if longest <= _LONGER * length and longest * number <= _LARGER * room:
            # Attention takes memory by the square of the length, so of longer samples as many tokens may be too many.
            return max(learned.size * length // max(length, longest), 1)
    return None


def _is_positive(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number > 0


def _is_larger(one: str, other: str) -> bool:
    """Whether samples of one shape have all that those of another have, and more in some dimension."""
    if "[" not in one or "[" not in other:  # tokens, or samples of any shape
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
