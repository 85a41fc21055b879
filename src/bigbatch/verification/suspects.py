"""What in a model may make the difference, and how an experiment turns it off in a copy of the model.

Random numbers, written state, BatchNorm; and modules that couple samples, which cannot be turned off.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from bigbatch.state.rng import Randomness
from bigbatch.state.snapshot import devices_of
from bigbatch.verification.model_copy import ModelCopy
from bigbatch.verification.result import OUTSIDE, listed

if TYPE_CHECKING:
    from bigbatch.verification.runner import Runner

_OF_TORCH = frozenset(vars(nn.Module()))  # attributes that every module has
_HELD = 0.5  # what stands for every number that is drawn
_MOVED = 0.1  # of a weight: how far away "elsewhere" is
_CALM = {"dropout_p": 0.0, "dropout": 0.0, "train": False, "training": False}  # arguments of kernels that drop

Off: TypeAlias = frozenset[str]  # what is turned off: kinds of causes, and
NOTHING: Off = frozenset()
OUTPUTS: Off = frozenset({"the model's outputs are detached: what is left comes from parameters alone"})
PLACE: Off = frozenset({"the weights are elsewhere"})


def turn_off(off: Off, model: ModelCopy) -> AbstractContextManager[Any]:
    """Turn it off in a copy for good."""
    with torch.no_grad():
        for p in model.parameters.values() if off & PLACE else ():
            p.mul_(1 + _MOVED * torch.arange(p.numel(), device=p.device).cos().reshape(p.shape).to(p.dtype))
    for each in model.models if off & OUTPUTS else ():
        each.register_forward_hook(lambda _module, _args, output: _copy(output))
    for module in model.modules.values():
        if "batch-norm" in off and isinstance(module, BatchNorm):
            module.register_forward_pre_hook(_rest, prepend=True)
        elif "state" in off and not isinstance(module, BatchNorm):
            module.register_forward_pre_hook(partial(_restore, state_of(module)), prepend=True)
    if "randomness" not in off:
        return nullcontext()
    randomness = Randomness(devices_of(model.models))  # Python's and numpy's can only be repeated
    for each in model.models:
        each.register_forward_pre_hook(lambda *_: randomness.restore(), prepend=True)
    return Held()  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _rest(norm: Any, inputs: Any) -> None:
    """Have BatchNorm use its running statistics, in each forward: a loop may turn training mode on."""
    norm.training = False
    if norm.running_mean is None:
        channels = inputs[0].shape[1]
        norm.running_mean, norm.running_var = inputs[0].new_zeros(channels), inputs[0].new_ones(channels)


def _restore(kept: dict[str, Any], module: nn.Module, _: object) -> None:
    """Restore a module's own state, and not a whole model's: in lock-step all forwards begin before one ends."""
    for name in state_of(module).keys() - kept.keys():
        delattr(module, name)
    for name, value in _copy(kept).items():
        (module._buffers if name in module._buffers else vars(module))[name] = value  # noqa: SLF001


class Held(TorchDispatchMode):
    """Makes every random number a constant, and has dropout drop nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is torch.ops.aten.detach.default and not isinstance(args[0], Tensor):
            return torch.tensor(args[0])  # a number in a graph, which torch hands to a mode as it is
        arguments = func._schema.arguments  # noqa: SLF001 - an operation has no other signature
        given = {a.name: a.default_value for a in arguments if a.has_default_value()}
        given |= {**dict(zip((a.name for a in arguments), args, strict=False)), **(kwargs or {})}
        calm = {argument: value for argument, value in _CALM.items() if argument in given}
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if calm and (draws or isinstance(given.get("dropout_p", given.get("dropout")), float)):
            return func(**{**given, **calm})
        found = func(*args, **(kwargs or {}))
        for each in _tensors(found) if draws else ():
            is_order = func.overloadpacket is torch.ops.aten.randperm  # other integers are 0
            each.copy_(torch.arange(len(each), device=each.device)) if is_order else each.fill_(_HELD)
        return found


def state_of(module: nn.Module) -> dict[str, Any]:
    """Copy the buffers of one module, and the values that it keeps as plain attributes beside them."""
    plain = {name: value for name, value in vars(module).items() if name not in _OF_TORCH and _is_plain(value)}
    found: dict[str, Any] = _copy({**plain, **dict(module.named_buffers(recurse=False))})
    return found


def _is_plain(value: Any) -> bool:
    leaves = tree_leaves(value)
    return all(isinstance(x, int | float | str | Tensor | None) and not isinstance(x, nn.Parameter) for x in leaves)


def _copy(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, tree)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class Suspect(NamedTuple):
    """Something in the model that may be a cause."""

    kind: str
    names: list[str]
    evidence: str  # seen before any experiment


def random_numbers(runner: "Runner") -> Suspect | None:
    """Look for modules that draw random numbers in training."""
    calls, _ = _recorded(runner, runner.batch.size)
    drew = list(dict.fromkeys(call.name for call in calls if call.draws))
    return Suspect("randomness", drew, f"random numbers are drawn by {_listed(runner, drew)}") if drew else None


def written_state(runner: "Runner") -> Suspect | None:
    """Look for buffers and attributes that a forward changes; not those of BatchNorm."""
    _, written = _recorded(runner, runner.batch.size)
    evidence = f"forward writes {listed(list(written))}, which the next micro-batch reads"
    return Suspect("state", list(dict.fromkeys(written.values())), evidence) if written else None


def training_norms(runner: "Runner") -> Suspect | None:
    """Look for BatchNorms that normalize by the samples of a micro-batch."""
    norms = {name: module for name, module in runner.model.modules.items() if isinstance(module, BatchNorm)}
    names = [name for name, module in norms.items() if module.training or module.running_mean is None]
    evidence = f"{_listed(runner, names)}: normalized by the samples of the micro-batch"
    return Suspect("batch-norm", names, evidence) if names else None


LOOKS: tuple[Callable[["Runner"], Suspect | None], ...] = (  # for what can be turned off; each hides those behind it
    random_numbers,
    written_state,
    training_norms,
)


class _Call(NamedTuple):
    """A call of a module; what happens outside of all modules comes last, without tensors."""

    name: str
    given: list[Tensor]
    returned: list[Tensor]
    draws: bool  # whether it draws random numbers


def _recorded(runner: "Runner", samples: int) -> tuple[list[_Call], dict[str, str]]:
    """Run the first samples; return the calls in the order of their ends, and what they wrote with its module."""
    given: list[tuple[str, list[Tensor]]] = [(OUTSIDE, [])]
    calls: list[_Call] = []
    drew: list[str] = []

    def look() -> None:
        if marks[-1].drawn():
            drew.append(given[-1][0])
            marks.append(Randomness(runner.devices))

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        look()
        given.append((names[id(module)], _tensors(_copy((args, kwargs)))))

    def leave(_module: nn.Module | None, _args: Any, output: Any) -> None:
        look()
        name, taken = given.pop()
        calls.append(_Call(name, taken, _tensors(_copy(output)), name in drew))

    with runner.copy() as model, torch.no_grad():
        names = {id(module): name for name, module in model.modules.items()}
        before = {name: state_of(m) for name, m in model.modules.items() if not isinstance(m, BatchNorm)}
        marks = [Randomness(runner.devices)]
        for module in model.modules.values():
            module.register_forward_pre_hook(enter, with_kwargs=True)
            module.register_forward_hook(leave)
        runner.loss_fn(model.model, runner.take(slice(0, samples)))
        leave(None, (), ())
        written = {
            f"{name}.{key}" if name else key: name
            for name, was in before.items()
            for key, value in state_of(model.modules[name]).items()
            if not _is_same(was.get(key), value)
        }
    return calls, written


def coupling_place(runner: "Runner", tolerance: float) -> str:
    """Return the first innermost module whose output for some samples depends on the others; else the loss."""
    some, every = (_recorded(runner, samples)[0] for samples in (runner.sizes[0], runner.batch.size))
    for one, other in zip(some, every, strict=False):
        is_layer = one.name == other.name and all(each.dim() for each in one.returned)  # and returns no loss
        same = is_layer and _agree(one.given, other.given, tolerance)
        if same and not _agree(one.returned, other.returned, tolerance):
            return runner.model.called(one.name)
    return OUTSIDE if runner.has_loss_fn else f"{runner.model.called('')}.forward"


def _agree(some: list[Tensor], every: list[Tensor], tolerance: float) -> bool:
    """Whether tensors are the beginnings of others, in every dimension."""
    for one, other in zip(some, every, strict=False):
        if one.dim() == other.dim() and all(a <= b for a, b in zip(one.shape, other.shape, strict=True)):
            begun = other[tuple(map(slice, one.shape))].double().nan_to_num()
            if (one.double().nan_to_num() - begun).norm() > tolerance * begun.norm():
                return False
    return True


def irreproducible_place(runner: "Runner") -> str:
    """Return the first module that returns something else in a second run of the same big batch, or "backward"."""
    runs = zip(*(_recorded(runner, runner.batch.size)[0] for _ in range(2)), strict=False)
    return next((one.name or OUTSIDE for one, other in runs if not _is_same(one.returned, other.returned)), "backward")


def _is_same(one: Any, other: Any) -> bool:
    leaves, others = tree_leaves(one), tree_leaves(other)
    return len(leaves) == len(others) and all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else type(a) is type(b) and a == b
        for a, b in zip(leaves, others, strict=True)
    )


def _listed(runner: "Runner", names: list[str]) -> str:
    kinds = {name: type(module).__name__ for name, module in runner.model.modules.items()}
    return listed([f"{kinds[name]} '{name}'" if name in kinds and name else kinds.get(name, name) for name in names])
