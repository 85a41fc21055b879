"""Clipping by torch's own functions, noticed, and left out where the gradient before it is wanted.

Frameworks call the same functions, under the name by which each of them has imported them; so what these call in turn
is what is watched.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import clip_grad

from bigbatch.verifying.gradients import wide

BY_NORM, BY_VALUE = "clip_grad_norm_", "clip_grad_value_"


@dataclass
class Clipped:
    """What was clipped in a window."""

    times: int = 0  # of one parameter: parts of a model may be clipped one by one
    by: str = ""  # the function of torch
    sizes: dict[str, float] = field(default_factory=dict)  # the norms of gradients, as clipping found them first
    _of_each: dict[tuple[str, str], int] = field(default_factory=dict)

    def note(self, names: Iterable[str], by: str, parameters: Mapping[str, nn.Parameter]) -> None:
        """Count, and look at the gradients."""
        for name in names:
            times = self._of_each[by, name] = self._of_each.get((by, name), 0) + 1
            gradient = wide(parameters[name].grad)
            if gradient is not None:
                self.sizes.setdefault(name, float(gradient.norm()))
            if times > self.times:
                self.times, self.by = times, by


@contextmanager
def clips(found: Clipped, parameters: Mapping[str, nn.Parameter], *, undone: bool) -> Iterator[None]:
    """Notice clipping, and leave it out where it is to be `undone`; what is another model's is clipped as asked."""
    with _by_norm(found, parameters, undone=undone), _by_value(found, parameters, undone=undone):
        yield


@contextmanager
def _by_norm(found: Clipped, parameters: Mapping[str, nn.Parameter], *, undone: bool) -> Iterator[None]:
    own = {id(p): name for name, p in parameters.items()}

    def instead(inner: Callable[..., Any]) -> Callable[..., Any]:
        def clip(given: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> None:
            every = [given] if isinstance(given, Tensor) else list(given)
            names = [own[id(p)] for p in every if id(p) in own]
            found.note(names, BY_NORM, parameters)
            if not (names and undone):
                inner(every, *args, **kwargs)

        return clip

    with _replaced("_clip_grads_with_norm_", instead):
        yield


@contextmanager
def _by_value(found: Clipped, parameters: Mapping[str, nn.Parameter], *, undone: bool) -> Iterator[None]:
    """Clipping by value groups the gradients first: those that are left out of the groups it does not see."""

    def instead(inner: Callable[..., Any]) -> Callable[..., Any]:
        def group(lists: list[list[Tensor | None]], *args: Any, **kwargs: Any) -> Any:
            if sys._getframe(1).f_code.co_name != BY_VALUE:  # noqa: SLF001 - clipping by norm groups them, too
                return inner(lists, *args, **kwargs)
            own = {id(p.grad): name for name, p in parameters.items() if p.grad is not None}
            found.note([own[id(each)] for each in lists[0] if id(each) in own], BY_VALUE, parameters)
            others = [each for each in lists[0] if not (undone and id(each) in own)]
            return inner([others], *args, **kwargs) if others else {}

        return group

    with _replaced("_group_tensors_by_device_and_dtype", instead):
        yield


@contextmanager
def _replaced(name: str, instead: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Put another function into torch's module for a while; in another torch, what is clipped is seen as it is."""
    inner = getattr(clip_grad, name, None)
    if inner is None:
        yield
        return
    setattr(clip_grad, name, instead(inner))
    try:
        yield
    finally:
        setattr(clip_grad, name, inner)
