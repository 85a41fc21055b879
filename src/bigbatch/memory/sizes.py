"""The micro-batch sizes that fit, remembered by the shape of a sample."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from bigbatch.batch.batch import SampleShape
from bigbatch.batch.packing import expected_seconds
from bigbatch.errors import StateError
from bigbatch.memory.budget import budget
from bigbatch.memory.search import Choice, Probe, choose

_LARGER = 2  # times as many samples, or tokens: a size is looked for again
_LONGER = 1.25  # times as long: a budget of tokens is looked for again; growing from 16 to 4,096 takes it 25 times
# As `state_dict` writes them: "batch['x'] float32 [3, 4]; batch['y'] int64 []", "tokens", "tokens [512]".
_TENSOR = re.compile(r"(.+?) (\w+) \[([\d, ]*)\](?:; |$)")
_TOKENS = re.compile(r"tokens(?: \[(\d+)\])?")
ProbeSize = Callable[[int, int], Probe]  # of a size, within a limit


class _Learned(NamedTuple):
    """A size, and how many samples the batch had that it was found on; None where a larger one has failed."""

    size: int
    samples: int | None = None

    def serves(self, total: int) -> bool:
        """Whether it was found on a batch that was not much too small to tell."""
        return self.samples is None or total <= _LARGER * self.samples


class Sizes:
    """Finds how many samples, or tokens, go through the model at once, and never forgets what did not fit."""

    def __init__(self, given: int | Literal["auto"], memory: float | str | None, device: torch.device) -> None:
        """Take what the user gave; memory is read when a size has to be found."""
        self._given, self._memory, self._device = given, memory, device
        self._learned: dict[SampleShape, _Learned] = {}
        self._tokens: dict[int | None, _Learned] = {}  # by the length of the longest sample; None: a larger one failed
        if memory is not None:
            budget(memory, device)  # refuse nonsense now

    @property
    def most(self) -> int | None:
        """The most samples of a micro-batch, where the user has said so."""
        return None if self._given == "auto" else self._given

    def budget(self) -> int:
        """Return what may be used on the device, in bytes."""
        return budget(self._memory, self._device)

    def samples(self, shape: SampleShape, total: int, probe: ProbeSize, *, at_once: bool = False) -> int:
        """Return how many samples of this shape make a micro-batch, out of `total`; all `at_once` where that fits."""
        known = [learned.size for each, learned in self._learned.items() if each == shape and learned.serves(total)]
        if not known and self._given == "auto" and shape.tensors:
            # A size for larger samples fits these, too, so ragged batches are not tried anew.
            larger = [learned for each, learned in self._learned.items() if each.holds(shape)]
            known = sorted(learned.size for learned in larger if learned.serves(total))[-1:]
        sizes = [*known, *([] if self.most is None else [self.most])]
        if sizes:
            return min(*sizes, total)
        found = self._found(total, probe)
        self._learned[shape] = _Learned(total if at_once and found.fits_whole else found.size, total)
        return self._learned[shape].size

    def tokens(self, given: int | Literal["auto"], lengths: Sequence[int], probe: ProbeSize) -> int:
        """Return how many padded tokens make a micro-batch; `probe` tries a number of the longest samples.

        How many of the longest fit is measured. Of the budgets that were seen to fit, the one is taken that these
        samples are expected to need the least time with: a small one launches often, a large one pads much.
        """
        longest, number = max(*lengths, 1), len(lengths)
        most = [self._tokens[None].size] if None in self._tokens else []
        measured = [(length, learned) for length, learned in self._tokens.items() if length is not None]
        if isinstance(given, int) or (most and not measured):
            return min([*most, *([given] if isinstance(given, int) else [])])
        found = _nearest(measured, longest, number)
        if found is None:
            found = self._found_tokens(lengths, longest, probe)
            self._tokens[longest] = _Learned(found, number)
        return min([found, *most])

    def learn(self, shape: SampleShape, size: int) -> None:
        """Remember a size of samples of a shape that a larger one has failed for."""
        self._learned[shape] = _Learned(max(size, 1))

    def learn_tokens(self, size: int) -> None:
        """Remember a budget of tokens that a larger one has failed for."""
        self._tokens[None] = _Learned(max(size, 1))

    def _found_tokens(self, lengths: Sequence[int], longest: int, probe: ProbeSize) -> int:
        found = self._found(len(lengths), probe)
        fitting = [(p.size, p.seconds) for p in found.probes if p.fits(found.limit) and p.seconds]
        if not fitting:
            return longest * found.size
        least = min(seconds for _, seconds in fitting)
        per_token = min(seconds / (size * longest) for size, seconds in fitting)
        budgets = [longest * size for size, _ in fitting]
        return min(budgets, key=lambda tokens: expected_seconds(lengths, tokens, least, per_token))

    def _found(self, total: int, probe: ProbeSize) -> Choice:
        limit = self.budget()
        return choose(lambda size: probe(size, limit), total, limit)

    def state_dict(self) -> dict[str, dict[str, int]]:
        """Return what was learned, and what it was found with."""
        tokens = {"tokens" + (f" [{length}]" if length else ""): each for length, each in self._tokens.items()}
        every = {**{str(shape): each for shape, each in self._learned.items()}, **tokens}
        return {name: {key: n for key, n in each._asdict().items() if n is not None} for name, each in every.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what was learned before."""
        shapes: dict[SampleShape, _Learned] = {}
        tokens: dict[int | None, _Learned] = {}
        given: object = state
        for name, found in given.items() if isinstance(given, Mapping) else [("", given)]:
            shape, of_tokens = _shape(str(name)), _TOKENS.fullmatch(str(name))
            values: dict[str, Any] = found if isinstance(found, dict) else {}
            is_size = {"size"} <= values.keys() <= set(_Learned._fields) and all(map(_is_positive, values.values()))
            if not is_size or (shape is None and of_tokens is None):
                raise StateError(
                    "A learned size is a positive integer by the shape of a sample.", found=f"{name!r}: {found!r}"
                )
            if of_tokens is not None:
                tokens[int(of_tokens[1]) if of_tokens[1] else None] = _Learned(**values)
            elif shape is not None:
                shapes[shape] = _Learned(**values)
        self._learned, self._tokens = shapes, tokens


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


def _shape(text: str) -> SampleShape | None:
    """Read the shape of a sample as it was written; None where the text is none."""
    found = _TENSOR.findall(text)
    shape = SampleShape(tuple((path, dtype, tuple(map(int, re.findall(r"\d+", dims)))) for path, dtype, dims in found))
    return shape if str(shape) == text else None


def _is_positive(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number > 0
