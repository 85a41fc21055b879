"""What the batch size asks of the learning rate.

A batch κ times larger means κ times fewer updates from the same samples. At an unchanged learning rate
training is therefore slower per sample, however exact the gradients are. Three rules say what to change:

- linear, η → η·κ, for SGD. Goyal et al. 2017 (arXiv 1706.02677) trained ResNet-50 this way up to batches
  of 8,192, with the first epochs warmed up, and report that it breaks down beyond.
- square root, η → η·√κ, for Adam and RMSprop. Malladi et al. 2022 (2205.10287) derive it from stochastic
  differential equations, where gradient noise dominates; their rule also moves β₁ and ε, which stay here.
- β₂ → β₂^κ, with `scale_beta2=True`, which keeps the half-life of Adam's second moment the same number of samples.
  Marek et al. 2025 (2507.07101) propose it and leave β₁ alone.

The last paper also advises *against* accumulation: unless several devices train several replicas, it found
small batches, with β₂ rescaled, at least as good per FLOP, and more forgiving. So where no recipe fixes the
batch, a smaller one is worth a try first; `scale_lr(optimizer, 512, 8)` goes that way too.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import Tensor
from torch.optim import LBFGS, SGD, Adam, Adamax, NAdam, Optimizer, RAdam, RMSprop, SparseAdam
from torch.optim.lr_scheduler import LinearLR, LRScheduler

from bigbatch import arguments
from bigbatch.errors import ConfigurationError

Rule = Literal["auto", "linear", "sqrt"]

_BY_ROOT = (Adam, Adamax, NAdam, RAdam, SparseAdam, RMSprop)  # AdamW is an Adam


@dataclass(frozen=True)
class GroupScaling:
    """What changed in one parameter group; `beta2_*` is None where it stays."""

    lr_before: float
    lr_after: float
    beta2_before: float | None = None
    beta2_after: float | None = None

    def __str__(self) -> str:
        text = f"lr {self.lr_before:g} -> {self.lr_after:g}"
        if self.beta2_before is not None and self.beta2_after is not None:
            text += f", beta2 {self.beta2_before:g} -> {self.beta2_after:g}"
        return text


@dataclass(frozen=True)
class Scaling:
    """What `scale_lr` changed, group by group; `str()` of it says it in a line."""

    optimizer: str
    rule: Literal["linear", "sqrt"]
    from_batch: int
    to_batch: int
    groups: tuple[GroupScaling, ...]

    def __str__(self) -> str:
        head = f"{self.optimizer}, batch {self.from_batch} -> {self.to_batch}, {self.rule} rule: "
        if len(set(self.groups)) == 1:
            return head + str(self.groups[0])
        return head + "; ".join(f"group {i}: {group}" for i, group in enumerate(self.groups))


def scale_lr(
    optimizer: Optimizer,
    from_batch: int,
    to_batch: int,
    rule: Rule = "auto",
    *,
    scale_beta2: bool = False,
    quiet: object = None,
) -> Scaling:
    """Carry a learning rate that suited batches of `from_batch` samples over to batches of `to_batch`.

    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> print(scale_lr(optimizer, from_batch=16, to_batch=64))
    SGD, batch 16 -> 64, linear rule: lr 0.1 -> 0.4

    In every parameter group, in place, with κ = `to_batch` / `from_batch`:

        group["lr"] *= κ ** 1.0 or 0.5                      # "linear" for SGD, "sqrt" for Adam and RMSprop
        group["betas"] = β₁, β₂ ** κ                        # with scale_beta2=True; RMSprop's `alpha` likewise

    Call it before making a scheduler, which takes its base rates from the optimizer once. A rule is a place
    to start from: see the module's docstring for the papers, one of which advises against accumulating on a
    single device where no recipe fixes the batch, since a small batch does at least as well there.
    """
    if quiet is not None:
        raise ConfigurationError("quiet= is gone: scale_lr prints nothing.", fix="print(scale_lr(...))")
    _check_optimizer("scale_lr", optimizer)
    chosen = _choose_rule(optimizer, rule)
    what = ", the samples behind one optimizer step: micro-batch x steps x ranks"
    kappa = arguments.positive("to_batch", to_batch, what) / arguments.positive("from_batch", from_batch, what)
    factor = kappa if chosen == "linear" else math.sqrt(kappa)
    power = kappa if scale_beta2 and isinstance(optimizer, _BY_ROOT) else None
    groups = tuple(_scale_group(*each, factor, power) for each in enumerate(optimizer.param_groups))
    # Only now that every group has passed: a refusal leaves the optimizer as it was.
    for group, change in zip(optimizer.param_groups, groups, strict=True):
        group["lr"] = _replaced(group["lr"], change.lr_after)
        if change.beta2_after is not None and "alpha" in group:
            group["alpha"] = change.beta2_after
        elif change.beta2_after is not None:
            group["betas"] = group["betas"][0], _replaced(group["betas"][1], change.beta2_after)
    return Scaling(type(optimizer).__name__, chosen, from_batch, to_batch, groups)


def warmup(optimizer: Optimizer, updates: int) -> LRScheduler:
    """A scheduler that raises the learning rate linearly over the first `updates` updates, then leaves it.

    Update n runs at n / `updates` of the full rate: the first one already moves, number `updates` is the
    first at full rate. It counts updates, not micro-batches, when stepped once per update:

    >>> accumulator = Accumulator(model, optimizer, steps=4, scheduler=warmup(optimizer, 100))

    It multiplies the rate, so it chains: `ChainedScheduler([warmup(...), cosine])` or, one after the other,
    `SequentialLR(optimizer, [warmup(optimizer, 100), cosine], milestones=[100])`.

    Goyal et al. 2017 warm up over the first five epochs, since the linear rule fails while the weights change
    fastest.
    """
    _check_optimizer("warmup", optimizer)
    arguments.positive("updates", updates, ", the optimizer steps until the full rate")
    return LinearLR(optimizer, start_factor=1 / updates, end_factor=1.0, total_iters=updates - 1)


def _check_optimizer(function: str, optimizer: object) -> None:
    """Raise where this is not one optimizer, or one whose rate no batch size asks to change."""
    if not isinstance(optimizer, Optimizer) or (function == "scale_lr" and isinstance(optimizer, LBFGS)):
        raise ConfigurationError(
            f"{function} takes one first-order torch.optim.Optimizer.",
            found=type(optimizer).__name__,
            fix=f"for each in optimizers: {function}(each, ...)" if isinstance(optimizer, list | tuple) else "",
        )


def _choose_rule(optimizer: Optimizer, rule: Rule) -> Literal["linear", "sqrt"]:
    """Return the rule asked for, or the one that the optimizer's class is known to follow."""
    arguments.one_of("rule", rule, *get_args(Rule))
    if rule != "auto":
        return rule
    if isinstance(optimizer, (SGD, *_BY_ROOT)):
        return "linear" if isinstance(optimizer, SGD) else "sqrt"
    raise ConfigurationError(
        f"No published rule is known here for {type(optimizer).__name__}: name the one that it follows.",
        fix='scale_lr(..., rule="linear")  # where steps grow with gradients, as SGD\'s; rule="sqrt" where they do not',
    )


def _scale_group(index: int, group: dict[str, Any], factor: float, power: float | None) -> GroupScaling:
    """Return what one group is to become: its rate times a factor, its beta2 perhaps to a power."""
    if "initial_lr" in group:
        raise ConfigurationError(
            f"Parameter group {index} has an initial_lr: a scheduler was made from this optimizer, or its state was "
            "loaded. A scheduler keeps base rates of its own and would undo the change.",
            fix="scale_lr(optimizer, from_batch, to_batch) before the scheduler is made",
        )
    before = float(group["lr"])
    after = before * factor
    if not math.isfinite(after) or before < 0:
        raise ConfigurationError(f"Parameter group {index} would go from lr {before:g} to {after:g}.")
    if power is None:
        return GroupScaling(before, after)
    decay = float(group["alpha"] if "alpha" in group else group["betas"][1])
    scaled: float = decay**power
    if decay > 0 and not min(decay, 0.5) <= scaled < 1:  # it would forget all at once, or nothing ever
        raise ConfigurationError(
            f"Parameter group {index} has beta2={decay:g}, a half-life of {math.log(0.5) / math.log(decay):.3g} "
            f"updates, which cannot be kept: in batches {power:g} times the size beta2 would be {scaled:.3g}.",
            fix="scale_lr(...) without scale_beta2, which scales the rate alone",
        )
    return GroupScaling(before, after, decay, scaled)


def _replaced(before: Any, after: float) -> Any:
    """Return a new value; a tensor is filled, since groups may share one, and CUDA graphs hold its address."""
    return before.fill_(after) if isinstance(before, Tensor) else after
