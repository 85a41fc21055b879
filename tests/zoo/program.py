"""A program of the zoo: a model, a batch and a loss, and what each entrance has to make of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bigbatch import Options
from bigbatch.errors import BigBatchError

ROUNDING = 1e-10  # of the norm, in float64, over several updates
FLOAT32 = 1e-5  # where the library computes its loss, or something on the way to it, in float32
BFLOAT16 = 3e-2  # where autocast does
Loss = Callable[[Any, Any], Tensor]
Rows = dict[str, Any]  # a batch


@dataclass(frozen=True)
class Expected:
    """What an entrance makes of a program: exact, or refused with an error that has this word in it.

    `warned`: it is not exact, and a warning with this word says so.
    """

    error: type[BigBatchError] | None = None
    word: str = ""
    warned: str = ""

    def __str__(self) -> str:
        if self.warned:
            return f"warned: {self.warned}"
        return f"{self.error.__name__}: {self.word}" if self.error else "exact"


EXACT = Expected()


def refused(error: type[BigBatchError], word: str) -> Expected:
    """Refused for a reason that this word of the message tells from others."""
    return Expected(error, word)


def warned(word: str) -> Expected:
    """Not exact, as a warning says."""
    return Expected(warned=word)


@dataclass(frozen=True)
class Program:
    """One row of the table.

    Args:
        name: what people would call it.
        build: makes the model; the caller seeds it and turns it into float64.
        batch: so many samples, of a seed: a tree of tensors with samples along dimension 0, or a list with `collate`.
        loss: of the model and a batch; several in turn, each by the name of the part that it trains (a GAN).
        library: whose model or loss it is.
        accumulator: what an `Accumulator` makes of it.
        big_step: what a `BigStep` makes of it.
        tolerance: the largest relative distance that counts as equal.
        collate: makes a batch of a list of samples.
        settings: of `Accumulator`.
        options: of `BigStep`.
        unseen: its values come from the batch without gradient: the cause that `verify` must name. `BigStep` refuses it
            or is exact.
        micro_batch: how many samples a `BigStep` takes at once.
        buffers: whether buffers must be the big batch's, too.
        float64: whether the model is turned into float64.
        quick: whether it is tried in every run of the tests.
        cuts: how many samples each micro-batch of a window has.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Any]
    loss: Loss | Mapping[str, Loss]
    library: str = "torch"
    accumulator: Expected = EXACT
    big_step: Expected = EXACT
    tolerance: float = ROUNDING
    collate: Callable[[list[Any]], Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    unseen: str = ""
    micro_batch: int = 5
    buffers: bool = True
    float64: bool = True
    quick: bool = False
    cuts: tuple[int, ...] = (4, 3, 5)

    def model(self, device: torch.device) -> nn.Module:
        """The same model each time."""
        with torch.random.fork_rng():
            torch.manual_seed(5)
            model = self.build()
            with torch.no_grad():  # biases and gates begin at zero, and hide what hangs on them
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.add_(0.05 * torch.randn_like(parameter))
        return (model.double() if self.float64 else model).to(device)

    def losses(self) -> Mapping[str, Loss]:
        """Each loss by the part of the model that it trains; "" is all of it."""
        return self.loss if isinstance(self.loss, Mapping) else {"": self.loss}

    def big_step_options(self) -> Options:
        """Its options."""
        return Options(**self.options) if self.collate is None else Options(collate=self.collate, **self.options)
