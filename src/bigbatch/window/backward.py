"""One backward: what it starts with, how it runs with little Python around it, and weights of single terms inside.

`torch.autograd.backward` checks what it is given at length, about 25 microseconds a call, which a linear model feels.
We know what we give, so we hand it to the engine as that function does in the end; where a torch has no such engine,
we call the function.
"""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.autograd.graph import Node

from bigbatch.errors import LossError, SeveralCounts
from bigbatch.loss.count import LOW_PRECISION, Count, Term
from bigbatch.loss.graph import is_leaf
from bigbatch.window.gradients import Gradients
from bigbatch.window.tally import Weights

_Hook: TypeAlias = Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]
_IN_FLOAT32 = "Compute the loss in float32:  criterion(logits.float(), labels)"
_engine: Any = getattr(torch.autograd.Variable, "_execution_engine", None)
_run: Any = getattr(_engine, "run_backward", None)


def run_backward(loss: Tensor, start: Tensor, leaves: tuple[Tensor, ...] | None) -> None:
    """Add the gradient of `loss`, times `start`, to the leaves; to all that it depends on where none are given."""
    if _run is None:
        torch.autograd.backward(loss, start, inputs=leaves)
    else:
        keep_graph, create_graph = False, False
        _run((loss,), (start,), keep_graph, create_graph, leaves or (), allow_unreachable=True, accumulate_grad=True)


class Starts:
    """What the backwards of one window start with: weight times loss scale; and what is to be made good at its end."""

    residual: Count = 1.0  # what low-precision losses could not be weighed with; gradients are in units of it
    _scale: Tensor | None = None  # that this window began with: another user of the scaler may change it meanwhile

    def __init__(self, scaler: GradScaler | None, gradients: Gradients) -> None:
        self._scaler, self._gradients = scaler, gradients

    def of(self, weight: Count, loss: Tensor, *, first: bool, scaled: bool = True) -> Tensor:
        """Return the start of a loss's backward; `first` where no gradient of the window is there yet.

        Where it is not `scaled`, others multiply with the loss scale.
        """
        scale, dtype = self.scale(loss.device) if scaled else None, loss.dtype
        residual: Count = 1.0
        if dtype in LOW_PRECISION:
            # bf16 holds a power of two exactly. In fp16 a backward that starts with a small weight underflows, so all
            # of the weight is left; but a scaler, where there is one, is tuned to what it does then.
            is_whole = dtype == torch.float16 and scale is None
            if isinstance(weight, Tensor):
                residual = torch.where(weight > 0, weight if is_whole else torch.frexp(weight)[0] * 2, 1.0)
            else:
                residual = (weight if is_whole else math.frexp(weight)[0] * 2) or 1.0
            weight = weight / residual
        is_same = isinstance(residual, float) and isinstance(self.residual, float) and residual == self.residual
        if not first and not is_same:
            self._gradients.scale(self.residual / residual)
        self.residual = residual
        if isinstance(weight, Tensor):
            start = weight.to(loss.device, torch.float32 if dtype in LOW_PRECISION else dtype)
        else:
            start = torch.full((), weight, dtype=dtype, device=loss.device)
        return (start if scale is None else start * scale).to(dtype).reshape(loss.shape)

    def undivided(self, times: float, gradient: Tensor) -> Count:
        """Return what makes the value of a loss whole that others divide, before it was weighed or after that.

        The gradient that has come to it tells which.
        """
        if times == 1.0:
            return times
        scale = self.scale()
        one = torch.ones_like(gradient) if scale is None else scale.to(gradient)
        return torch.where(torch.isclose(gradient * times, one).reshape(()), 1.0, times)

    def scale(self, device: torch.device | None = None) -> Tensor | None:
        """Return the loss scale that is in the gradients, or would be; None without a scaler."""
        if self._scale is None and self._scaler is not None:
            self._scale = self._scaler.scale(torch.ones((), device=device or self._gradients.device)).clone()
        return self._scale

    def correction(self) -> Count:
        """Return what else gradients are to be multiplied with."""
        if self._scaler is None or (scale := self.scale()) is None:
            return self.residual
        # The scale that they will be divided by over the one they have: 1, unless others use the scaler, too.
        ratio = self._scaler.scale(torch.ones_like(scale)).double() / scale.double()
        return self.residual * (ratio.item() if ratio.is_cpu else ratio)


def refuse_rounded_weights(losses: list[Tensor], weights: list[Weights]) -> None:
    """Refuse low-precision losses of micro-batches that weigh differently: what is left over is one for all of them."""
    whole = [each.whole for each in weights]
    alike = all(isinstance(weight, float) and weight == whole[0] for weight in whole)
    if losses[0].dtype in LOW_PRECISION and len(losses) > 1 and not alike:
        raise LossError(
            f"micro-batches that run side by side have losses of {losses[0].dtype} and weigh differently, and such a "
            f"loss would round their weights.\n{_IN_FLOAT32}"
        )


def weigh_terms(weights: Weights, loss: Tensor, terms: list[Term], factors: dict[Node, Tensor]) -> list[Any]:
    """Put each term's own weight on its node, where terms have different ones; returns the handles.

    Their backward notes in `factors` what gradient has come to each term.
    """
    if weights.each and loss.dtype in LOW_PRECISION:
        names = ", ".join(term.name for term in terms)
        raise SeveralCounts(
            f"the terms of this loss ({names}) need weights of their own, and a {loss.dtype} loss would round them.\n"
            f"{_IN_FLOAT32}"
        )
    of = dict(weights.each)
    for term in terms:
        if term.node is not None and term.node in of and (term.shared or is_leaf(term.node)):
            raise SeveralCounts(
                f"a term of this loss ({term.name}) needs a weight of its own, and is a bare parameter, or its value "
                "is used elsewhere in the loss, too.\n"
                "Give the term a place of its own:  counted(term, 'once'), or counted(term, n) for a mean over n things"
            )
    return [node.register_prehook(_weigher(node, weight, factors)) for node, weight in of.items()]


def _weigher(node: Node, weight: Count, factors: dict[Node, Tensor]) -> _Hook:
    def weigh(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        factors[node] = gradients[0].detach()
        factor = weight.to(gradients[0].dtype) if isinstance(weight, Tensor) else weight
        return (gradients[0] * factor, *gradients[1:])

    return weigh
