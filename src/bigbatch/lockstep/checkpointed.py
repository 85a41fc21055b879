"""One call of a model by torch's own checkpoint, where a first run that saves nothing will not do.

torch puts its random numbers back, and looks at shapes. What else the second run must find, and that it gives what the
first one gave, is looked after here.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from bigbatch.batch.tree import apart
from bigbatch.lockstep.differing import RunsDiffer, refuse_other_values
from bigbatch.lockstep.found_before import FoundBefore, version_of
from bigbatch.lockstep.holdings import Picture, holds
from bigbatch.lockstep.threads import Worker
from bigbatch.loss.count import LOW_PRECISION
from bigbatch.state.rng import Draws

_DEEP = 4  # structures in structures


class Checkpointed:
    """A call that runs when it is made, and again in backward."""

    def __init__(self, model: nn.Module, plain: Callable[..., Any], worker: Worker) -> None:
        """Have not run."""
        self._model, self._plain, self._worker = model, plain, worker
        self._inputs: list[tuple[Tensor, int]] = []
        self._objects: list[tuple[dict[str, Any], dict[str, Any]]] = []  # what goes in and has things in it
        self._values: list[Tensor] = []
        self._found: FoundBefore | None = None
        self._draws: Draws | None = None

    def call(self, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call the model."""
        given = apart((positional, named))  # the user's own dicts may be filled anew before backward
        # To its end: its results are compared.
        with set_checkpoint_early_stop(False):
            # The second run needs the numbers of more generators than torch knows of.
            return checkpoint(self._run, *given[0], use_reentrant=False, preserve_rng_state=False, **given[1])

    def _run(self, *positional: Any, **named: Any) -> Any:
        return self._first(positional, named) if self._found is None else self._again(positional, named)

    def _first(self, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
        picture = Picture(self._model)
        found = FoundBefore(picture, None)
        assert self._worker.round.streams is not None  # noqa: S101 - several run
        draws = Draws(self._worker.round.streams, picture.generators)
        inputs = [(tensor, version_of(tensor)) for tensor in _tensors((positional, named))]
        objects = [(vars(each), vars(each).copy()) for each in _objects((positional, named))]
        result = self._alone(positional, named)
        if any(version_of(tensor) != version for tensor, version in inputs):
            raise RunsDiffer.by_itself("its input in place")
        draws.settle()
        found.settle()
        self._inputs = inputs
        self._objects = [(there, {**there}) for there, before in objects if holds(there, before)]
        self._values = [tensor.detach().clone() for tensor in _results(result)]
        self._found, self._draws = found, draws
        return result

    def _again(self, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
        assert self._found is not None  # noqa: S101 - it ran
        assert self._draws is not None  # noqa: S101
        if any(version_of(tensor) != version for tensor, version in self._inputs):
            raise RunsDiffer.between("a tensor that the model was given")
        if not all(holds(*each) for each in self._objects):
            raise RunsDiffer.between("an object that the model was given")
        with self._found.again(), self._draws.again():
            result = self._alone(positional, named)
        if self._draws.differed:
            raise RunsDiffer.in_numbers()
        values = _results(result)
        if len(values) != len(self._values):
            raise RunsDiffer.in_path(f"it returns {len(values)} tensors with a gradient, and did {len(self._values)}")
        kinds = {*(p.dtype for p in self._model.parameters()), *(each.dtype for each in values)}
        low = any(kind in LOW_PRECISION for kind in kinds) or torch.is_autocast_enabled("cpu")
        refuse_other_values(self._values, values, low=low or torch.is_autocast_enabled("cuda"))
        return result

    def _alone(self, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run the model, and meet nobody inside."""
        self._worker.round.is_recomputing = True
        try:
            return self._plain(*positional, **named)
        finally:
            self._worker.round.is_recomputing = False


def _results(tree: Any) -> list[Tensor]:
    return [each for each in _tensors(tree) if each.requires_grad and each.is_floating_point()]


def _tensors(tree: Any, depth: int = _DEEP) -> Iterator[Tensor]:
    """Yield the tensors of a structure or of an object."""
    if isinstance(tree, Tensor):
        yield tree
    elif depth:
        for each in _inside(tree):
            yield from _tensors(each, depth - 1)


def _objects(tree: Any, depth: int = _DEEP) -> Iterator[Any]:
    """Yield the objects of a structure that have attributes."""
    if isinstance(tree, Tensor | nn.Module | type) or not depth:
        return
    if isinstance(getattr(tree, "__dict__", None), dict):
        yield tree
    for each in _inside(tree):
        yield from _objects(each, depth - 1)


def _inside(tree: Any) -> list[Any]:
    if isinstance(tree, str | bytes | nn.Module | type):
        return []
    if isinstance(tree, dict):
        return list(tree.values())
    if isinstance(tree, list | tuple | set):
        return list(tree)
    found = getattr(tree, "__dict__", None)
    return list(found.values()) if isinstance(found, dict) else []
