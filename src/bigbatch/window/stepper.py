"""From a window's summed gradient to the step: correct, show, clip, step, each once."""

import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from bigbatch.caller import outside
from bigbatch.distributed.statement import in_words, of_optimizers
from bigbatch.distributed.team import Team
from bigbatch.errors import ConfigurationError, StateError, WindowDisturbed
from bigbatch.loss.count import Arrival, Count
from bigbatch.window.gradients import Gradients, all_parameters

if TYPE_CHECKING:
    from bigbatch.noise.monitor import GradientNoise
    from bigbatch.window.window import Window

_CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it
Witness: TypeAlias = "GradientNoise"  # sees a window with its first gradient alone, and with all of them


@dataclass
class Stepper:
    """The optimizers of a window and what is to happen when it closes."""

    optimizers: Sequence[Optimizer]
    schedulers: Sequence[LRScheduler] = ()
    scaler: GradScaler | None = None
    clip_norm: float | None = None
    skip_nonfinite: bool = False
    hooks: dict[object, Callable[[], None]] = field(default_factory=dict)
    witness: "Witness | None" = None
    team: Team = field(default_factory=Team)  # who makes the big batch together with this process
    arrival: Arrival = field(default_factory=Arrival)  # of each window's first count
    window: "weakref.ref[Window] | None" = None  # an optimizer stepped by hand while one is open raises
    weighed: bool = False  # whether the open window is one whose backward and step are others'
    by_hand: bool = False  # whether someone else has stepped since a batch was given out
    _doing: Literal["", "hook", "step", "schedule", "made"] = ""  # what a failure would be that of
    _moves: list[int] = field(default_factory=list)  # how far the schedulers were when we last left them
    _warned: bool = False
    _stepping: bool = False
    _stepped: bool = False

    def watch(self) -> None:
        """Notice where each step of the optimizers begins and ends, whoever calls it."""
        me = weakref.ref(self)

        def begins(*_: object) -> None:
            if (stepper := me()) is not None:
                stepper.notice()

        def ends(*_: object) -> None:
            stepper = me()
            # In a window of `weigh` a step of others may begin, as a scaler's does, but must not end.
            open_one = None if stepper is None or not stepper.weighed or stepper.window is None else stepper.window()
            if open_one is not None:
                error = WindowDisturbed(
                    "optimizer.step() was called before accumulator.settle(): it has stepped with gradients that are "
                    "not the big batch's.",
                    fix="accumulator.settle(); optimizer.step(). accumulator.discard() drops this window",
                )
                open_one.fail(error)
                raise error

        for optimizer in self.optimizers:
            for handle in (optimizer.register_step_pre_hook(begins), optimizer.register_step_post_hook(ends)):
                weakref.finalize(self, handle.remove)

    def before_step(self, hook: Callable[[], None]) -> Callable[[], None]:
        """Call `hook()` before each step; returns a function that removes it."""
        key = object()
        self.hooks[key] = hook
        return lambda: self.hooks.pop(key, None) and None

    def refuse_backward_by_hand(self) -> None:
        """Raise where the loop has a backward of its own."""
        if self.by_hand or any(p.grad is not None for p in all_parameters(self.optimizers)):
            raise WindowDisturbed(
                "a batch of `over` had no accumulator.backward(loss), and "
                f"{'optimizer.step() was called' if self.by_hand else 'the parameters have gradients'}: the loop has "
                "a backward of its own, loss.backward() or accelerator.backward(loss), and nothing is accumulated.",
                fix="accumulator.backward(loss) instead of it, and of what steps and clears",
            )

    def settings(self, gradient_dtype: torch.dtype | None) -> dict[str, str]:
        """Return what a step depends on, in words that are the same on every rank."""
        return {
            **of_optimizers(self.optimizers),
            "scheduler": " and ".join(type(each).__name__ for each in self.schedulers) or "None",
            "scaler": in_words(self.scaler.state_dict() if self.scaler is not None else None),
            "clip_norm": in_words(self.clip_norm),
            "skip_nonfinite": str(self.skip_nonfinite),
            "gradient_dtype": str(gradient_dtype),
        }

    def observe(self, witness: Witness) -> Callable[[], None]:
        """Show the windows to a witness; returns a function that ends it."""
        if not self.team.is_alone:
            raise ConfigurationError("GradientNoise measures one process alone: before you spread the training.")
        if self.witness is not None:
            raise ConfigurationError("another GradientNoise measures this already. End it first:  noise.stop()")
        self.witness = witness

        def end() -> None:
            self.witness = None if self.witness is witness else self.witness

        return end

    def open(self, window: "Window") -> "Witness | None":
        """Begin with a window, of which nothing is stepped yet; returns who wants to see it."""
        self.window, self._doing, self.weighed = weakref.ref(window), "", False
        return self.witness if self.witness is not None and self.witness.attends() else None

    def notice(self) -> None:
        """Hear of a step; raise where it is not ours and a window is open."""
        if self.window is not None and self.window() is not None and not self._stepping and not self.weighed:
            raise WindowDisturbed(
                "optimizer.step() was called inside a window. Nothing was stepped, and the window is as it was.",
                fix="accumulator.backward(loss) alone, which steps when the window is full; accumulator.flush() ends a "
                "window early",
                fix_in_step="the loop without that call: the step is made when all of the batch is added up",
            )
        self._stepped, self.by_hand = True, not self._stepping

    def step(self, gradients: Gradients, correction: Count) -> tuple[Tensor | None, bool | Tensor]:
        """Make the update; returns the gradient's norm before clipping, and whether the step was skipped."""
        # Those that have anything to step with.
        active = [o for o in self.optimizers if any(p.grad is not None for g in o.param_groups for p in g["params"])]
        if self.scaler is not None:
            _unscale(self.scaler, active)
        if self.hooks:
            gradients.scale(correction)
            correction = 1.0
            self._call_hooks()
        norm, factor, nonfinite = None, correction, None
        if self.clip_norm is not None or self.skip_nonfinite:
            norm = self.team.norm(gradients)
            if isinstance(correction, Tensor) or correction != 1.0:
                norm = norm * (correction.to(norm) if isinstance(correction, Tensor) else correction)
            if self.clip_norm is not None and self.clip_norm != float("inf"):
                clip = torch.clamp(self.clip_norm / (norm + _CLIP_EPSILON), max=1.0)
                factor = clip if not isinstance(factor, Tensor) and factor == 1.0 else factor * clip
            if self.skip_nonfinite and self.scaler is None:  # a scaler skips by itself
                nonfinite = ~torch.isfinite(norm)
        skipped = self._apply(gradients, factor, active, nonfinite)
        if self.schedulers:
            self._schedule(skipped=bool(skipped))
        self._doing = "made"
        return (norm if self.clip_norm is not None else None), skipped

    def hand_over(self, gradients: Gradients, correction: Count) -> None:
        """Correct the gradients and leave the step to others."""
        gradients.scale(correction)
        self._call_hooks()
        gradients.narrow()

    def _call_hooks(self) -> None:
        self._doing = "hook"
        for hook in list(self.hooks.values()):
            hook()
        self._doing = ""

    def _apply(
        self, gradients: Gradients, factor: Count, active: Sequence[Optimizer], nonfinite: Tensor | None
    ) -> bool | Tensor:
        fused = [_is_fused(optimizer) for optimizer in active]
        takes = bool(active) and self.scaler is None and all(fused)  # kernels that take numbers as attributes
        if nonfinite is not None and (self.schedulers or not takes or not all(map(_has_state, active))):
            if bool(nonfinite):  # the one host synchronisation
                return True
            nonfinite = None
        handed: dict[str, Tensor] = {}
        if takes and (isinstance(factor, Tensor) or factor != 1.0) and _all_float32(gradients):
            scale = 1.0 / factor  # the kernel divides by it on its way
            handed["grad_scale"] = (
                scale.to(gradients.device, torch.float32)
                if isinstance(scale, Tensor)
                else torch.full((), scale, device=gradients.device, dtype=torch.float32)
            )
        else:
            gradients.scale(factor)
        if takes and nonfinite is not None:
            handed["found_inf"] = nonfinite.float()
        gradients.narrow()
        self._step_all(active, fused, handed)
        if self.scaler is not None and active:
            if any(fused) and (flags := _found_inf(self.scaler, active)):  # such kernels skip by themselves
                nonfinite = torch.stack([flag.to(gradients.device) for flag in flags]).sum() > 0
            self.scaler.update()
        return nonfinite if nonfinite is not None else bool(active) and not self._stepped

    def _step_all(self, active: Sequence[Optimizer], fused: Sequence[bool], handed: dict[str, Tensor]) -> None:
        self._stepped, self._stepping = False, True
        try:
            for optimizer, is_fused in zip(active, fused, strict=True):
                self._doing = "step"
                vars(optimizer).update(handed)
                if self.scaler is None:
                    optimizer.step()
                else:
                    self.scaler.step(optimizer)
                if is_fused:  # torch 2.13 does not count what its fused kernels change
                    increment_version([p for group in optimizer.param_groups for p in group["params"]])
        finally:
            self._stepping = False
            for optimizer in active if handed else ():
                for name in handed:
                    vars(optimizer).pop(name, None)

    def _schedule(self, *, skipped: bool) -> None:
        """Step the schedulers, and warn where someone else has stepped them since we did."""
        found = [getattr(scheduler, "last_epoch", 0) for scheduler in self.schedulers]
        if not self._warned and any(now > then for now, then in zip(found, self._moves, strict=bool(self._moves))):
            self._warned = True
            warnings.warn(
                "scheduler.step() was called by hand, and the accumulator steps the scheduler it was given, too: the "
                "learning rate runs through its schedule too fast. Take the call out, or the argument scheduler=.",
                stacklevel=outside(),
            )
        for scheduler in () if skipped else self.schedulers:
            self._doing = "schedule"
            scheduler.step()
        self._moves = [getattr(scheduler, "last_epoch", 0) for scheduler in self.schedulers]

    @property
    def began(self) -> bool:
        """Whether the latest window's step has begun to change parameters: it cannot be made again."""
        return self._doing not in {"", "hook"}

    def rest(self) -> None:
        """Begin with something new, of which nothing is stepped yet."""
        self._doing = ""

    def give_up(self, error: BaseException) -> str:
        """Say what of a step failed and what is true since; the error carries it where the step had begun.

        The scaler is ready for the next window.
        """
        reason = str(error).partition("\n")[0]
        failed = f"failed with {type(error).__name__}" + (f": {reason}" if reason else "")
        told = {
            "": f"correcting and clipping the gradients {failed}. Nothing was stepped; some may be corrected already.",
            "hook": f"a before_step hook {failed}. Nothing was stepped; gradients were corrected, and hooks may have "
            "changed them.",
            "step": f"optimizer.step() {failed}. It may have changed some parameters.",
            "schedule": f"scheduler.step() {failed}. The optimizer has stepped; a scheduler has not.",
            "made": f"the optimizer has stepped, and then something {failed}. The update was made.",
        }[self._doing]
        if self.began and told not in getattr(error, "__notes__", ()) and hasattr(error, "add_note"):
            error.add_note(told)  # Python 3.10 has no notes
        if self.scaler is not None:
            for optimizer in self.optimizers:  # or it would refuse to unscale a second time
                self.scaler._per_optimizer_states.pop(id(optimizer), None)  # noqa: SLF001
        return told


def _unscale(scaler: GradScaler, active: Sequence[Optimizer]) -> None:
    """Divide the loss scale out, once; an inf anywhere skips all optimizers of the window."""
    for optimizer in active:
        scaler.unscale_(optimizer)
    if len(active) > 1 and (flags := _found_inf(scaler, active)):
        anywhere = torch.stack([flag.to(flags[0].device) for flag in flags]).sum()
        for flag in flags:
            flag.copy_(anywhere)


def _found_inf(scaler: GradScaler, active: Sequence[Optimizer]) -> list[Tensor]:
    each = active if scaler.is_enabled() else ()
    return [flag for o in each for flag in scaler._found_inf_per_device(o).values()]  # noqa: SLF001


def refuse_copy(owner: object, _protocol: object) -> NoReturn:
    """Raise, for copy and pickle: the copy would go on to watch the optimizers of the first."""
    name = type(owner).__name__
    raise StateError(
        f"a {name} cannot be copied or pickled: it watches the optimizer that it was made with.\n"
        f"Copy the model and the optimizer, make another {name} of them, and load_state_dict() into it what "
        "state_dict() of this one returns."
    )


def _is_fused(optimizer: Optimizer) -> bool:
    supports: Any = getattr(optimizer, "_step_supports_amp_scaling", False)
    return bool(supports) and all(group.get("fused") for group in optimizer.param_groups)


def _has_state(optimizer: Optimizer) -> bool:
    """Whether a skipped step has state to leave alone: fused SGD's first step would start its momentum from garbage."""
    return all(optimizer.state.get(p) for g in optimizer.param_groups for p in g["params"] if p.grad is not None)


def _all_float32(gradients: Gradients) -> bool:
    """Whether a kernel takes a plain number for all: it would round it for others, and over shards it takes none."""
    every = (p.grad for p in gradients.parameters if p.grad is not None)
    return all(g.dtype == torch.float32 and (type(g) is Tensor or not hasattr(g, "to_local")) for g in every)
