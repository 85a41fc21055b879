"""What a backward starts with: the weight, as far as the precision of the loss can hold it, and the loss scale."""

import math

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from bigbatch.loss.count import LOW_PRECISION, Count
from bigbatch.window.gradients import Gradients
from bigbatch.window.stepper import Stepper


class Starts:
    """The starts of one window, and what they leave to be made good at its end."""

    residual: Count = 1.0  # what a low-precision loss could not be weighed with
    _held_scale: Tensor | None = None

    def __init__(self, stepper: Stepper, gradients: Gradients) -> None:
        """Have nothing to make good yet."""
        self._stepper, self._gradients = stepper, gradients

    def of(self, weight: Count, loss: Tensor, *, first: bool, scaled: bool = True) -> Tensor:
        """Return the start of a loss's backward; `first` where no gradient of the window is there yet.

        Where it is not `scaled`, others multiply with the loss scale.
        """
        scaler, dtype = self._stepper.scaler if scaled else None, loss.dtype
        if dtype in LOW_PRECISION:
            weight = self._low_precision(weight, whole=dtype == torch.float16 and scaler is None, first=first)
        else:  # perhaps a low-precision loss came before
            self._gradients.scale(self.residual)
            self.residual = 1.0
        if isinstance(weight, Tensor):
            gradient = weight.to(loss.device, torch.float32 if dtype in LOW_PRECISION else dtype)
        else:
            gradient = torch.full((), weight, dtype=dtype, device=loss.device)
        if scaler is not None:
            gradient = gradient * self._scale(scaler, loss.device)
        return gradient.to(dtype).reshape(loss.shape)

    def undivided(self, times: float, gradient: Tensor) -> Count:
        """Return what makes the value of a loss whole that others divide, before it was weighed or after that.

        The gradient that has come to it tells which.
        """
        if times == 1.0:
            return times
        scale = self.scale()
        one = torch.ones_like(gradient) if scale is None else scale.to(gradient)
        return torch.where(torch.isclose(gradient * times, one).reshape(()), 1.0, times)

    def scale(self) -> Tensor | None:
        """Return the loss scale that is in the gradients, or would be."""
        scaler = self._stepper.scaler
        return None if scaler is None else self._scale(scaler, self._gradients.device)

    def correction(self) -> Count:
        """Return what else gradients are to be multiplied with."""
        scaler = self._stepper.scaler
        if scaler is None:
            return self.residual
        held = self._scale(scaler, self._gradients.device)
        # The scale that they will be divided by over the one they have: 1, unless others use the scaler, too.
        ratio = scaler.scale(torch.ones_like(held)).double() / held.double()
        return self.residual * (ratio.item() if ratio.is_cpu else ratio)

    def _scale(self, scaler: GradScaler, device: torch.device) -> Tensor:
        """Return the loss scale that this window began with: another user of the scaler may change it meanwhile."""
        if self._held_scale is None:
            self._held_scale = scaler.scale(torch.ones((), device=device)).clone()
        return self._held_scale

    def _low_precision(self, weight: Count, *, whole: bool, first: bool) -> Count:
        """Split a weight into a power of two, which bf16 holds exactly, and a residual.

        `whole`: all of it goes into the residual. That is for fp16, in which a backward that starts with a small weight
        underflows; a scaler, where there is one, is tuned to what it does then.
        The gradients are kept in units of the latest residual, so they are rescaled, in float32, when it changes.
        """
        if isinstance(weight, Tensor):
            residual: Count = torch.where(weight > 0, weight if whole else torch.frexp(weight)[0] * 2, 1.0)
        else:
            residual = weight if whole else math.frexp(weight)[0] * 2
        if not first and not (isinstance(residual, float) and residual == self.residual):
            self._gradients.scale(self.residual / residual)
        self.residual = residual
        return weight / residual
