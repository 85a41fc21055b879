"""What a model's run finds in its modules, and changes there: a second run finds the same, and leaves no trace.

A vector of a spectral norm, a running centre: one micro-batch after the other moves it, and in backward it is where the
last one has left it. An adapter or a condition that `loss_fn` sets on the model for a call: in backward it is that of
the last call.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bigbatch.lockstep.differing import RunsDiffer
from bigbatch.lockstep.holdings import Held, Holder, Picture, Place, entries, put, with_values

_SMALL = 1 << 16  # bytes of a tensor that is copied or held on the chance that it is needed
_WITH_NAN = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


class FoundBefore:
    """What a model holds before a run."""

    def __init__(self, picture: Picture, moving: frozenset[Place] | None) -> None:
        """Copy tensors that will be written into; where that is not known, buffers, and what else is small.

        The picture is one of what the model holds now.
        """
        self._picture = picture
        self._strangers = picture.strangers
        self._versions = _versions(picture.tensors)
        self._copies: dict[int, Tensor] = {}
        if moving is None or moving:
            found = [each.tensor for each in picture.tensors if _is_copied(each, moving)]
            self._copies = {id(tensor): tensor.detach().clone() for tensor in found}
        self._is_left = True  # whether the model holds the same things after the run

    def written(self) -> frozenset[Place]:
        """Return where the run has written into tensors."""
        return frozenset(each.place for each in self._written())

    def settle(self, *, restless: bool = True) -> list[int]:
        """The run is over: keep what a second run needs, or raise where that is not there.

        Returns the numbers of the picture's holders that hold other things than before. A model that is not `restless`
        is not looked at for those: if there were some after all, they would only be held for longer.
        """
        written = self._written()
        for each in written:
            if id(each.tensor) not in self._copies:
                raise RunsDiffer.by_itself(_said_of(each))
        needed = {id(each.tensor) for each in written}
        self._copies = {
            key: copied for key, copied in self._copies.items() if key in needed or _bytes(copied) <= _SMALL
        }
        # Of what is inside of other objects nothing is put back: it must be the same, unless the run changes it itself.
        self._strangers = [each for each in self._strangers if each.is_same]
        changed = self._picture.changed() if restless and not self._picture.is_current() else []
        if changed:
            self._is_left = False
            self._picture = self._picture.of({number: self._light(number) for number in changed})
        self._versions = _versions(self._picture.tensors)
        return changed

    @contextmanager
    def again(self) -> Iterator[None]:
        """Put all of it where it was before the run, and afterwards where it is now."""
        self._refuse_changed()
        picture = self._picture
        if self._is_left and not self._copies and picture.is_current():
            yield  # a run that changes nothing has changed nothing the second time
            return
        found = self._contents()
        now = {number: picture.holders[number].copy() for number in {*picture.changed(), *found}}
        try:
            for number in now:
                put(picture.holders[number], found.get(number, picture.contents[number]))
            yield
        finally:
            # What has changed by now was put back, or is a trace of this run.
            for number in {*picture.changed(), *now}:
                put(picture.holders[number], now.get(number, picture.contents[number]))

    def _contents(self) -> dict[int, Holder]:
        """Return what was found in holders of tensors that were written into since, with those as they were."""
        # Copies of copies: backward may need what the run has read, and they may be asked for again.
        fresh = {key: copied.clone() for key, copied in self._copies.items()}
        moved = {each.place[0] for each in self._picture.tensors if id(each.tensor) in fresh}
        pairs = enumerate(zip(self._picture.holders, self._picture.contents, strict=True))
        return {
            number: with_values(content, lambda value: fresh.get(id(value), value))
            for number, (holder, content) in pairs
            if id(holder) in moved
        }

    def _written(self) -> list[Held]:
        tensors = self._picture.tensors
        now = zip(tensors, self._versions, _versions(tensors), strict=True)
        return [each for each, before, after in now if each.quiet or before != after]

    def _refuse_changed(self) -> None:
        """Raise where something is no longer as the run has left it, and cannot be put back."""
        now = _versions(self._picture.tensors)
        if now != self._versions:
            for each, before, after in zip(self._picture.tensors, self._versions, now, strict=True):
                if before != after and id(each.tensor) not in self._copies:
                    raise RunsDiffer.between(each.name)
        for stranger in self._strangers:
            if not stranger.is_same:
                raise RunsDiffer.between(f"what is in {stranger.name}")

    def _light(self, number: int) -> Holder:
        """Return what a holder held that the run has changed, without activations that others have left there.

        A model that puts its attention maps aside finds those of the run before, and does not read them. To hold them
        would be to keep the activations of all micro-batches. Nothing but NaN in their place makes a model that does
        read them return NaN, which is not what it returned.
        """
        content = self._picture.contents[number]
        if self._picture.is_registered(number):
            return content
        there = {id(value) for _, value in entries(self._picture.holders[number])}
        return with_values(content, lambda value: value if id(value) in there else _light(value))


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written into, as far as torch counts."""
    return -1 if tensor.is_inference() else tensor._version  # noqa: SLF001 - torch's own counter


def _versions(tensors: Sequence[Held]) -> list[int]:
    try:
        return [each.tensor._version for each in tensors]  # noqa: SLF001
    except RuntimeError:
        return [version_of(each.tensor) for each in tensors]


def _is_copied(each: Held, moving: frozenset[Place] | None) -> bool:
    if each.tensor.requires_grad:  # a copy would be no part of its graph
        return False
    if moving is not None:
        return each.place in moving
    return each.registered == "_buffers" or (each.registered is None and _bytes(each.tensor) <= _SMALL)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _said_of(each: Held) -> str:
    if each.registered == "_parameters":
        return "its own parameters"
    kind = "buffer" if each.registered else "tensor"
    return f"a {kind} for some micro-batches, and not for the first, {each.name},"


def _light(value: Any) -> Any:
    """Return something without its large tensors: in their place are others of the same shape that hold no memory."""
    if type(value) in {list, tuple}:
        return type(value)(_light(each) for each in value)
    if type(value) is dict:
        return {key: _light(each) for key, each in value.items()}
    if not isinstance(value, Tensor) or value.dtype not in _WITH_NAN or _bytes(value) <= _SMALL:
        return value
    return torch.full((), float("nan"), dtype=value.dtype, device=value.device).expand(value.shape)
