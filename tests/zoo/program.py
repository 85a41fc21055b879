"""A program of the zoo: a model, a batch and a loss, and what each entrance has to make of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bigbatch.errors import BigBatchError

ROUNDING = 1e-10  # of the norm, in float64, over several updates
FLOAT32 = 1e-5  # where the library computes its loss, or something on the way to it, in float32
BFLOAT16 = 3e-2  # where autocast does
Loss = Callable[[Any, Any], Tensor]
Rows = dict[str, Any]  # a batch


@dataclass(frozen=True)
class Expected:
    """What an entrance makes of a program: it is exact, or refused with an error that has this word in it."""

    error: type[BigBatchError] | None = None
    word: str = ""
    warned: str = ""  # it is not exact, and a warning with this word says so

    def __str__(self) -> str:
        refusal = f"{self.error.__name__}: {self.word}" if self.error else "exact"
        return f"warned: {self.warned}" if self.warned else refusal


EXACT = Expected()
refused = Expected  # for a reason that this word of the message tells from others


@dataclass(frozen=True)
class Program:
    """One row of the table."""

    name: str  # what people would call it
    build: Callable[[], nn.Module]  # makes the model; the caller seeds it and turns it into float64
    batch: Callable[[int, int], Any]  # so many samples, of a seed: tensors with samples along dimension 0, or a list
    loss: (
        Loss | Mapping[str, Loss]
    )  # of the model and a batch; several in turn, each by the part that it trains (a GAN)
    library: str = "torch"  # whose model or loss it is
    accumulator: Expected = EXACT  # what an `Accumulator` makes of it
    big_step: Expected = EXACT  # what a `BigStep` makes of it
    tolerance: float = ROUNDING  # the largest relative distance that counts as equal
    collate: Callable[[list[Any]], Any] | None = None  # makes a batch of a list of samples
    settings: Mapping[str, Any] = field(default_factory=dict)  # of `Accumulator`
    unseen: str = ""  # its values come from the batch without gradient: the cause that `verify` must name
    micro_batch: int = 5  # how many samples a `BigStep` takes at once
    buffers: bool = True  # whether buffers must be the big batch's, too
    float64: bool = True  # whether the model is turned into float64
    quick: bool = False  # whether it is tried in every run of the tests
    cuts: tuple[int, ...] = (4, 3, 5)  # how many samples each micro-batch of a window has

    def model(self, device: torch.device) -> nn.Module:
        """The same model each time."""
        with torch.random.fork_rng():
            torch.manual_seed(5)
            model = self.build()
            for parameter in model.parameters():  # biases and gates begin at zero, and hide what hangs on them
                if parameter.requires_grad:
                    parameter.data.add_(0.05 * torch.randn_like(parameter))
        return (model.double() if self.float64 else model).to(device)

    def losses(self) -> Mapping[str, Loss]:
        """Each loss by the part of the model that it trains; "" is all of it."""
        return self.loss if isinstance(self.loss, Mapping) else {"": self.loss}

    def due(self, entrance: str) -> Expected:
        """What the table says of an entrance."""
        return self.accumulator if entrance == "accumulator" else self.big_step

    def entrances(self) -> tuple[str, ...]:
        """With what it is tried."""
        return ("accumulator", "big_step", "verify") if self.unseen else ("accumulator", "big_step")
