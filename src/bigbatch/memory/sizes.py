"""The micro-batch sizes that fit, remembered by the shape of a sample."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from bigbatch.batch.batch import SampleShape
from bigbatch.batch.split import pack
from bigbatch.errors import StateError
from bigbatch.memory.budget import budget
from bigbatch.memory.search import Choice, Probe, choose

_LARGER = 2  # times as many samples, or tokens: a size is looked for again
_LONGER = 1.25  # times as long: a budget of tokens is looked for again; growing from 16 to 4,096 takes it 25 times
# As `state_dict` writes them: "batch['x'] float32 [3, 4]; batch['y'] int64 []", "tokens", "tokens [512]".
_TENSOR = re.compile(r"(.+?) (\w+) \[([\d, ]*)\](?:; |$)")
_TOKENS = re.compile(r"tokens(?: \[(\d+)\])?")
ProbeSize = Callable[[int, int], Probe]  # of a size, within a limit
Key: TypeAlias = SampleShape | int | None  # of a budget of tokens: the length of the longest sample; None: one failed


class _Learned(NamedTuple):
    """A size, and how many samples the batch had that it was found on; None where a larger one has failed."""

    size: int
    samples: int | None = None


class Sizes:
    """Finds how many samples, or tokens, go through the model at once, and never forgets what did not fit."""

    def __init__(self, given: int | Literal["auto"], memory: float | str | None, device: torch.device) -> None:
        self.most = None if given == "auto" else given  # samples of a micro-batch, where the user has said so
        self._memory, self._device = memory, device
        self._learned: dict[Key, _Learned] = {}
        if memory is not None:
            budget(memory, device)  # refuse nonsense now

    def budget(self) -> int:
        """Return what may be used on the device, in bytes."""
        return budget(self._memory, self._device)

    def samples(self, shape: SampleShape, total: int, probe: ProbeSize, *, at_once: bool = False) -> int:
        """Return how many samples of this shape make a micro-batch, out of `total`; all `at_once` where that fits."""
        every = {
            key: learned.size
            for key, learned in self._learned.items()
            # One that was found on a batch that was much too small to tell does not serve.
            if isinstance(key, SampleShape) and (learned.samples is None or total <= _LARGER * learned.samples)
        }
        known = [every[shape]] if shape in every else []
        if not known and self.most is None and shape.tensors:
            # A size for larger samples fits these, too, so ragged batches are not tried anew.
            known = sorted(size for key, size in every.items() if key.holds(shape))[-1:]
        known += [] if self.most is None else [self.most]
        if known:
            return min(*known, total)
        found = self._found(total, probe)
        size = total if at_once and found.fits_whole else found.size
        self._learned[shape] = _Learned(size, total)
        return size

    def tokens(self, given: int | Literal["auto"], lengths: Sequence[int], probe: ProbeSize) -> int:
        """Return how many padded tokens make a micro-batch; `probe` tries a number of the longest samples.

        How many of the longest fit is measured. Of the budgets that were seen to fit, the one is taken that these
        samples are expected to need the least time with: a small one launches often, a large one pads much.
        """
        longest, number = max(*lengths, 1), len(lengths)
        most = [self._learned[None].size] if None in self._learned else []
        measured = sorted((key, learned) for key, learned in self._learned.items() if isinstance(key, int))
        if given != "auto" or (most and not measured):
            return min(most if given == "auto" else [*most, given])
        for length, learned in measured:
            # None serves that was found on a batch much too small to tell: a budget is never larger than its batch.
            if longest <= _LONGER * length and longest * number <= _LARGER * length * (learned.samples or number):
                # Attention takes memory by the square of the length, so of longer samples as many may be too many.
                return min([max(learned.size * length // max(length, longest), 1), *most])
        found = self._found(number, probe)
        fitting = [(longest * p.size, p.seconds) for p in found.probes if p.fits(found.limit) and p.seconds]
        size = longest * found.size
        if fitting:
            least, per_token = min(each for _, each in fitting), min(each / tokens for tokens, each in fitting)
            size = min(
                (tokens for tokens, _ in fitting),  # a micro-batch takes as long as to launch it, at least
                key=lambda tokens: sum(
                    max(least, per_token * len(group) * wide) for group, wide in pack(lengths, tokens)
                ),
            )
        self._learned[longest] = _Learned(size, number)
        return min([size, *most])

    def learn(self, shape: SampleShape | None, size: int) -> None:
        """Remember a size of samples of a shape, or a budget of tokens, that a larger one has failed for."""
        self._learned[shape] = _Learned(max(size, 1))

    def _found(self, total: int, probe: ProbeSize) -> Choice:
        limit = self.budget()
        return choose(lambda size: probe(size, limit), total, limit)

    def state_dict(self) -> dict[str, dict[str, int]]:
        """Return what was learned, and what it was found with."""
        every: dict[str, dict[str, int]] = {}
        for key, learned in self._learned.items():
            name = str(key) if isinstance(key, SampleShape) else "tokens" if key is None else f"tokens [{key}]"
            every[name] = {field: number for field, number in learned._asdict().items() if number is not None}
        return every

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what was learned before."""
        learned: dict[Key, _Learned] = {}
        given: object = state
        for name, found in given.items() if isinstance(given, Mapping) else [("", given)]:
            values: dict[str, Any] = found if isinstance(found, dict) else {}
            of_tokens, tensors = _TOKENS.fullmatch(str(name)), _TENSOR.findall(str(name))
            shape = SampleShape(
                tuple((path, dtype, tuple(map(int, re.findall(r"\d+", n)))) for path, dtype, n in tensors)
            )
            is_size = {"size"} <= values.keys() <= set(_Learned._fields)
            is_size = is_size and all(type(number) is int and number > 0 for number in values.values())
            if not is_size or not (of_tokens or str(shape) == name):
                problem = "A learned size is a positive integer by the shape of a sample."
                raise StateError(problem, found=f"{name!r}: {found!r}")
            key = shape if of_tokens is None else of_tokens[1]
            learned[int(key) if isinstance(key, str) else key] = _Learned(**values)
        self._learned = learned
