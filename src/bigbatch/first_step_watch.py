"""A forward of the first check: its memory, its least precise numbers, and random numbers that a part draws again."""

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bigbatch.memory.meter import LiveBytes

# Arguments of fused kernels that draw random numbers inside, and the values that keep them from it.
_CALM = {"dropout_p": 0.0, "dropout": 0.0, "train": False, "training": False}


class Rows(NamedTuple):
    """Which samples of a piece a part has."""

    start: int
    size: int
    of: int


class Watch(LiveBytes):
    """Watches a forward. A piece writes the random numbers that it draws on a tape; a part reads those of its rows."""

    def __init__(self, tape: list[Tensor], rows: Rows | None) -> None:
        """Write on the tape, or read it for some rows."""
        super().__init__()
        self.lowest: torch.dtype | None = None
        self.certain = True  # whether a part had the same random numbers as the piece
        self.is_calmed = False  # whether a kernel was kept from drawing some, which its backward does not know
        self._tape, self._rows, self._place = tape, rows, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; numbers that are less precise than those it was given are rounded."""
        is_random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        result = super().__torch_dispatch__(partial(self._drawn, func) if is_random else func, types, args, kwargs)
        given = [torch.finfo(each.dtype).eps for each in tree_leaves((args, kwargs)) if _is_real(each)]
        for each in tree_leaves(result) if given else ():
            known = 0.0 if self.lowest is None else torch.finfo(self.lowest).eps
            if _is_real(each) and torch.finfo(each.dtype).eps > max(min(given), known):
                self.lowest = each.dtype
        return result

    def _drawn(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Run an operation that draws random numbers."""
        names = [argument.name for argument in func._schema.arguments]  # noqa: SLF001 - no public name
        calm = {name: value for name, value in _CALM.items() if name in names}
        if calm:
            self.is_calmed = True
            return func(**{**dict(zip(names, args, strict=False)), **kwargs, **calm})
        source = kwargs.get("generator")
        generators = [source] if source is not None else _generators(args, kwargs)
        states = [each.get_state() for each in generators]
        result = func(*args, **kwargs)
        tensors = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        if self._rows is None:
            self._tape.extend(each.clone() for each in tensors)
            return result
        for each, state in zip(generators, states, strict=True):
            each.set_state(state)
        for each in tensors:
            place, self._place = self._place, self._place + 1
            known = place < len(self._tape) and "randperm" not in func.name()  # no part of an order is a part's order
            rows = self._own_rows(self._rows, self._tape[place], each) if known else None
            self.certain = self.certain and rows is not None
            if rows is not None:
                each.copy_(rows)
        return result

    def _own_rows(self, rows: Rows, whole: Tensor, part: Tensor) -> Tensor | None:
        """Return the numbers of a part's rows, where they can be told."""
        if whole.dim() != part.dim():
            return None
        for dim, (many, few) in enumerate(zip(whole.shape, part.shape, strict=True)):
            times = few // rows.size
            if many == few:
                continue
            if many * rows.size == few * rows.of:
                whole = whole.narrow(dim, rows.start * times, few)
                self.certain = self.certain and times == 1  # or samples lie one behind the other, or they do not
            elif few < many:
                whole, self.certain = whole.narrow(dim, 0, few), False  # trimmed, perhaps
            else:
                return None
        return whole


def _generators(args: Any, kwargs: Any) -> list[torch.Generator]:
    """Return the default generators that an operation may draw from."""
    devices = {each.device for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
    devices |= {torch.device(kwargs["device"])} if kwargs.get("device") is not None else set()
    numbers = [device.index or 0 for device in devices if device.type == "cuda"]
    return [torch.default_generator, *(torch.cuda.default_generators[number] for number in numbers)]


def _is_real(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


@contextmanager
def quiet(resting: Sequence[nn.Module] = ()) -> Iterator[None]:
    """Put modules into eval mode, and drop warnings of pieces, as of a variance of one sample.

    What is compiled runs as it is written: under a mode dynamo would give it up for good.
    """
    before = [module.training for module in resting]
    compiles = "torch._dynamo" in sys.modules
    eagerly: Any = torch.compiler.set_stance("force_eager") if compiles else nullcontext()
    with warnings.catch_warnings(), eagerly:
        warnings.simplefilter("ignore")
        try:
            for module in resting:
                module.training = False
            yield
        finally:
            for module, training in zip(resting, before, strict=True):
                module.training = training
