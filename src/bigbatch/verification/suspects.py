"""What in a model may make the difference: random numbers, written state, BatchNorm, modules that couple samples."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.utils._pytree import tree_leaves

from bigbatch.state.rng import Randomness
from bigbatch.verification.result import OUTSIDE, listed
from bigbatch.verification.runner import Runner
from bigbatch.verification.switches import NOTHING, Off, state_of


class Suspect(NamedTuple):
    """Something in the model that may be a cause."""

    kind: str
    names: list[str]
    evidence: str  # seen before any experiment


def random_numbers(runner: Runner) -> Suspect | None:
    """Look for modules that draw random numbers in training."""
    drew = list(dict.fromkeys(call.name for call in _recorded(runner, NOTHING, runner.batch.size) if call.draws))
    return Suspect("randomness", drew, f"random numbers are drawn by {_listed(runner, drew)}") if drew else None


def written_state(runner: Runner) -> Suspect | None:
    """Look for buffers and attributes that a forward changes; not those of BatchNorm."""
    with runner.copy(frozenset({"randomness"})) as model, torch.no_grad():
        modules = {name: module for name, module in model.modules.items() if not isinstance(module, BatchNorm)}
        before = {name: state_of(module) for name, module in modules.items()}
        runner.forward(model, runner.batch.size)
        written = {
            f"{name}.{key}" if name else key: name
            for name, module in modules.items()
            for key, value in state_of(module).items()
            if not _is_same(before[name].get(key), value)
        }
    evidence = f"forward writes {listed(list(written))}, which the next micro-batch reads"
    return Suspect("state", list(dict.fromkeys(written.values())), evidence) if written else None


def training_norms(runner: Runner) -> Suspect | None:
    """Look for BatchNorms that normalize by the samples of a micro-batch."""
    norms = {name: module for name, module in runner.model.modules.items() if isinstance(module, BatchNorm)}
    names = [name for name, module in norms.items() if module.training or module.running_mean is None]
    evidence = f"{_listed(runner, names)}: normalized by the samples of the micro-batch"
    return Suspect("batch-norm", names, evidence) if names else None


Tensors = list[Tensor]


class _Call(NamedTuple):
    """A call of a module; what happens outside of all modules comes last, without tensors."""

    name: str
    given: Tensors
    returned: Tensors
    draws: bool  # whether it draws random numbers


def _recorded(runner: Runner, off: Off, samples: int) -> list[_Call]:
    """Run the first samples; return the calls in the order of their ends."""
    given: list[tuple[str, Tensors]] = [(OUTSIDE, [])]
    calls: list[_Call] = []
    drew: list[str] = []

    def look() -> None:
        if marks[-1].drawn():
            drew.append(given[-1][0])
            marks.append(Randomness(runner.devices))

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        look()
        given.append((names[id(module)], _tensors((args, kwargs))))

    def leave(_module: nn.Module, _args: Any, output: Any) -> None:
        look()
        name, taken = given.pop()
        calls.append(_Call(name, taken, _tensors(output), name in drew))

    with runner.copy(off) as model, torch.no_grad():
        names = {id(module): name for name, module in reversed(model.modules.items())}
        marks = [Randomness(runner.devices)]
        for module in dict.fromkeys(model.modules.values()):
            module.register_forward_pre_hook(enter, with_kwargs=True)
            module.register_forward_hook(leave)
        runner.forward(model, samples)
        look()
    return [*calls, _Call(OUTSIDE, [], [], OUTSIDE in drew)]


def coupling_place(runner: Runner, off: Off, tolerance: float) -> str:
    """Return the first innermost module whose output for some samples depends on the others; else the loss."""
    some, every = (_recorded(runner, off, samples) for samples in (runner.sizes[0], runner.batch.size))
    for one, other in zip(some, every, strict=False):
        is_layer = one.name == other.name and all(each.dim() for each in one.returned)  # and returns no loss
        same = is_layer and _agree(one.given, other.given, tolerance)
        if same and not _agree(one.returned, other.returned, tolerance):
            return runner.model.called(one.name)
    return OUTSIDE if runner.has_loss_fn else f"{runner.model.called('')}.forward"


def _agree(some: Tensors, every: Tensors, tolerance: float) -> bool:
    """Whether tensors are the beginnings of others, in every dimension."""
    for one, other in zip(some, every, strict=False):
        if one.dim() == other.dim() and all(a <= b for a, b in zip(one.shape, other.shape, strict=True)):
            begun = other[tuple(map(slice, one.shape))].double().nan_to_num()
            if (one.double().nan_to_num() - begun).norm() > tolerance * begun.norm():
                return False
    return True


def irreproducible_place(runner: Runner) -> str:
    """Return the first module that returns something else in a second run of the same big batch, or "backward"."""
    runs = zip(*(_recorded(runner, NOTHING, runner.batch.size) for _ in range(2)), strict=False)
    return next((one.name or OUTSIDE for one, other in runs if not _is_same(one.returned, other.returned)), "backward")


def _tensors(tree: Any) -> Tensors:
    return [leaf.detach().clone() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _is_same(one: Any, other: Any) -> bool:
    leaves, others = tree_leaves(one), tree_leaves(other)
    return len(leaves) == len(others) and all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else type(a) is type(b) and a == b
        for a, b in zip(leaves, others, strict=True)
    )


def _listed(runner: Runner, names: Sequence[str]) -> str:
    """Name modules with their classes."""
    kinds = {name: type(module).__name__ for name, module in runner.model.modules.items()}
    return listed([f"{kinds[name]} '{name}'" if name in kinds and name else kinds.get(name, name) for name in names])
