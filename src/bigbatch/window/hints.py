"""What is probably a mistake, though it may be meant: each is warned of once."""

import math
import sys
import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from bigbatch.caller import outside
from bigbatch.errors import BigBatchError, CoupledLoss
from bigbatch.loss.count import Count, Term
from bigbatch.loss.graph import operation, saved_number, unseen

if TYPE_CHECKING:
    from bigbatch.loss.readings import Reader
    from bigbatch.window.tally import Ledger

_KNOWN_HOOKS = ("bigbatch.", "torch.distributed.", "wandb.")  # they add nothing, or reduce
_COMPARED = 8  # losses that come with a count, with what their graphs show


class Hints:
    """What an accumulator has warned of."""

    saw_layers = saw_hooks = _of_division = False
    to_compare = _COMPARED
    _compared: tuple[float, float] | None = None  # the first of the window

    def check_division(self, loss: Tensor, terms: Sequence[Term], steps: int, ranks: int) -> None:
        """Warn of a loss that is divided by `steps`, the number of ranks or both."""
        found = next((each for each in (steps, ranks, steps * ranks) if _looks_divided(loss, terms, each)), 0)
        if self._of_division or not found:
            return
        self._of_division = True
        warnings.warn(
            f"this loss looks divided by steps or the number of ranks ({found}) already, as loops by hand do; bigbatch "
            f"averages by itself, so its gradients would be {found} times too small. Pass the undivided loss. If you "
            f"mean it, say it as a factor:  accumulator.backward(loss * {1 / found:g})",
            stacklevel=outside(),
        )

    def compare_count(self, reader: "Reader", loss: Tensor, given: Count, *, first_of_window: bool) -> None:
        """Warn where counts that come with losses are not in proportion to those that the graphs show."""
        left, self.to_compare = self.to_compare - 1, 0
        try:
            with warnings.catch_warnings():  # they ask for the count, which is given
                warnings.simplefilter("ignore")
                (term,) = reader.read(loss)
        except (BigBatchError, ValueError):  # several terms, or one that cannot be read: that is what a count is for
            return
        counts = (given, term.count)
        if term.kind != "mean" or any(isinstance(each, Tensor) and not each.is_cpu for each in counts):
            return
        given, shown = map(float, counts)
        self.to_compare, first = left, (not first_of_window and self._compared) or (given, shown)
        self._compared = first if first[1] else None
        if not math.isclose(given * first[1], first[0] * shown, rel_tol=1e-6):
            self.to_compare = 0
            warnings.warn(
                f"count= is {first[0]:g} and {given:g} in two micro-batches whose losses are means over {first[1]:g} "
                f"and {shown:g} ({term.name}), so the gradient is not the big batch's.\n"
                "Leave count= out: it is read from the loss. Ignore this where you want other weights.",
                stacklevel=outside(),
            )

    def check_layers(self, models: Sequence[nn.Module]) -> None:
        """Refuse or name, once, the layers whose gradient depends on what micro-batch a sample is in."""
        named = [each for model in models for each in model.named_modules()]
        for name, layer in named:
            if getattr(layer, "scale_grad_by_freq", False) and layer.weight.requires_grad:
                raise CoupledLoss(
                    f"layer '{name}' divides each row's gradient by how often the row is in a micro-batch, and the big "
                    "batch would divide by how often it is in all of them.",
                    fix="scale_grad_by_freq=False",
                )
        self.saw_layers = True
        moving = [name.partition(".parametrizations.")[0] for name, layer in named if _has_power_iteration(layer)]
        if moving:
            warnings.warn(
                f"spectral_norm of layer '{moving[0]}' ({len(moving)} in all) is in training mode: its power iteration "
                "runs once per micro-batch, where the big batch would run it once, so the gradients differ.\n"
                "For the big batch's, call layer.eval() after the first backward of a window and layer.train() before "
                "the next window; or accept the difference.",
                stacklevel=outside(),
            )

    def check_gradient_hooks(self, models: Sequence[nn.Module], parameters: Iterable[Tensor]) -> None:
        """Say, once, what a user's hook on a parameter's gradient does in a window of several micro-batches."""
        self.saw_hooks = True
        kinds = "_backward_hooks", "_post_accumulate_grad_hooks"
        for p in parameters:
            hooks = [hook for kind in kinds for hook in (getattr(p, kind, None) or {}).values()]
            called = [getattr(hook, "func", hook) for hook in hooks]  # what a functools.partial calls
            if any(not str(getattr(each, "__module__", "")).startswith(_KNOWN_HOOKS) for each in called):
                name = next((name for model in models for name, own in model.named_parameters() if own is p), "")
                warnings.warn(
                    f"parameter '{name}' has a gradient hook: it runs on the gradient of each micro-batch, not on the "
                    "big batch's. That is exact for a mask or a factor, and not for clipping or anything else that is "
                    "not linear.\n"
                    "To clip, use clip_norm=, or change the big batch's gradient in before_step(function).",
                    stacklevel=outside(),
                )
                return


def _looks_divided(value: Tensor, terms: Sequence[Term], number: int) -> bool:
    """Tell whether the last thing done to the loss was to divide it by a number, `loss / steps`.

    A factor of one over it, `0.5 * loss`, is a weight; and so is the mean of as many terms, or a sum over as many rows.
    """
    node = value.grad_fn
    is_weight = number == 1 or len(terms) == number or any(term.divided for term in terms)
    if node is None or is_weight or operation(node) != "Div":
        return False
    with unseen():
        return saved_number(node, "other") == number


def _has_power_iteration(layer: nn.Module) -> bool:
    """Whether a layer's spectral norm moves whenever it runs."""
    each = (layer, *layer._forward_pre_hooks.values())  # noqa: SLF001 - where the older one is
    return layer.training and any(type(one).__name__ in {"_SpectralNorm", "SpectralNorm"} for one in each)


class Forgotten:
    """Knows the window that is open, and warns where its owner goes before it is closed, dropped or saved.

    It holds the counts of the window alone: what is told at the end must not keep a model alive until then.
    """

    ledger: "Ledger | None" = None  # of the open window

    def __init__(self, owner: object) -> None:
        """Watch over an owner, also at the end of the program."""
        self._error = id(vars(sys).get("last_value"))  # the last one that was shown, in a notebook
        frame = sys._getframe(outside() - 1)  # noqa: SLF001 - as `warnings` has it
        self._made = frame.f_code.co_filename, frame.f_lineno  # where it goes may be in Python's own end
        weakref.finalize(owner, self._warn)

    def told(self) -> None:
        """Note that the user knows of the window as it stands: it was saved, or an error has told of it."""
        if self.ledger is not None:
            self.ledger.told = self.ledger.micro_batches

    def _warn(self) -> None:
        ledger, failed = self.ledger, sys.exc_info()[0] is not None or id(vars(sys).get("last_value")) != self._error
        if ledger is not None and ledger.micro_batches != ledger.told and not failed:
            text = (
                f"a window was left open with {ledger.micro_batches} of {ledger.steps} micro-batches, and made no "
                "update. Use: accumulator.flush(), or accumulator.over(loader); accumulator.discard() drops it."
            )
            warnings.warn_explicit(text, UserWarning, *self._made)
