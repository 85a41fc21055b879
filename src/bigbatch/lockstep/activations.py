"""Where the activations of a window stay while its micro-batches wait for each other.

`keep`: where they are; a window then needs the big batch's memory. `recompute`: the model is run again in backward, one
micro-batch at a time, which serves where micro-batches meet outside of it. `offload`: in pinned host memory, copied
beside the computation and fetched ahead of it in backward (`offloading.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from bigbatch.errors import ConfigurationError
from bigbatch.lockstep.checkpointed import Checkpointed
from bigbatch.lockstep.round import Round
from bigbatch.lockstep.threads import Worker, current


class MeetsInside(ConfigurationError):
    """Micro-batches meet inside of a model that is to be recomputed."""


class Calls(Protocol):
    """Makes the calls of a window's models."""

    def call(self, model: nn.Module, plain: Callable[..., Any], worker: Worker, *given: Any) -> Any:
        """Call a model with positional and named arguments."""


@contextmanager
def recomputing(models: Sequence[nn.Module], calls: Calls | None) -> Iterator[None]:
    """Have the calls of these models keep nothing but their inputs, and run again in backward.

    `calls` makes them, where it can; torch's own checkpoint where there is none.
    """
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(_recomputed(model, calls))
        yield


@contextmanager
def _recomputed(model: nn.Module, calls: Calls | None) -> Iterator[None]:
    plain: Callable[..., Any] = model.forward
    was_set = "forward" in vars(model)
    model.forward = _Forward(model, plain, calls)
    try:
        yield
    finally:
        if was_set:
            model.forward = plain
        else:
            del model.forward


class _Forward:
    """Stands in a model's place for its forward while a window runs."""

    def __init__(self, model: nn.Module, plain: Callable[..., Any], calls: Calls | None) -> None:
        self._model, self._plain, self._calls = model, plain, calls

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        worker = current()
        if worker is None or worker.round.is_recomputing or not torch.is_grad_enabled():
            return self._plain(*arguments, **named)
        if self._calls is not None:
            return self._calls.call(self._model, self._plain, worker, arguments, named)
        return Checkpointed(self._model, self._plain, worker).call(arguments, named)

    def __reduce__(self) -> Any:
        """A copy of the model, as of a teacher that loss_fn makes of it, has its own forward and knows no window."""
        return _itself, (self._plain,)


def _itself(plain: Callable[..., Any]) -> Callable[..., Any]:
    return plain


def refuse_meeting_while_recomputing(round_: Round, name: str) -> None:
    """Raise where micro-batches meet inside of a model that is to be recomputed one at a time."""
    if round_.is_recomputing:
        msg = (
            f'activations="recompute" runs the model again one micro-batch at a time, and this model has {name} '
            "inside, where micro-batches meet: all of them would have to be kept at once.\n"
            'Take Options(activations="offload"), which keeps them in host memory, or "keep".'
        )
        raise MeetsInside(msg)
