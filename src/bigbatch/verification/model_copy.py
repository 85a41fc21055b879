"""The model under test, the copies of it that runs train, and what a loop of somebody else's does to such a copy."""

import copy
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from bigbatch.errors import ConfigurationError, LossError
from bigbatch.state.oom import is_out_of_memory, let_go

Gradients: TypeAlias = Mapping[str, Tensor]  # by parameter, in float64; zero where one got none
TrainWindow: TypeAlias = Callable[[Any, list[Any]], Any]

_HOOKS: dict[str, Callable[[Any, Any], object]] = {
    "_backward_hooks": Tensor.register_hook,
    "_post_accumulate_grad_hooks": Tensor.register_post_accumulate_grad_hook,
}
USE_ARGUMENT = "the model that is passed in:  loss_fn = lambda model, batch: criterion(model(batch[0]), batch[1])"


class ModelCopy:
    """A model, one module or a sequence: that under test, or a copy that one run trains on."""

    def __init__(self, model: Any) -> None:
        self.model = model  # as loss_fn takes it
        self.models: tuple[nn.Module, ...] = tuple(model) if isinstance(model, list | tuple) else (model,)
        several = {f"[{number}]": each for number, each in enumerate(self.models)}
        root = self.models[0] if len(several) == 1 else nn.ModuleDict(several)
        self.modules = dict(root.named_modules())
        self.all_parameters = list(root.parameters())
        self.parameters = {name: p for name, p in root.named_parameters() if p.requires_grad}  # those that are trained
        if not self.parameters:
            raise ConfigurationError("no parameter of the model requires a gradient: there is nothing to verify.")
        self.device = next(iter(self.parameters.values())).device
        self.dtype = max(self.all_parameters, key=lambda p: p.numel() * p.is_floating_point()).dtype  # of the largest

    def called(self, name: str) -> str:
        """Return the name of a module; of a model as a whole its class."""
        return name or type(self.models[0]).__name__

    def refuse_reached(self) -> None:
        """Raise where a run on a copy left gradients in the model itself."""
        if any(p.grad is not None for p in self.all_parameters):
            _raise_used_itself()

    def twin(self, dtype: torch.dtype | None) -> "ModelCopy":
        """Return a copy for one run, with hooks on its parameters, in a dtype; None: its own."""
        kept = (v for module in self.modules.values() for v in vars(module).values() if isinstance(v, Tensor))
        memo: dict[int, Any] = {id(each): each.detach().clone() for each in kept if not each.is_leaf}
        try:
            found = ModelCopy(copy.deepcopy(self.model, memo))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            let_go(error, told=True)
            said = f"{type(error).__name__}: {first_line(error)}"
            problem = f"verify runs copies of the model, and this one cannot be copied: {said}"
            fix = "a model without files, locks, generators and handles in its attributes, which copy.deepcopy can copy"
            raise ConfigurationError(problem, fix=fix) from error
        for p, other in zip(self.all_parameters, found.all_parameters, strict=True):
            for attribute, register in _HOOKS.items():  # which copies of tensors lose
                for hook in (getattr(p, attribute, None) or {}).values():
                    register(other, hook)
        for each in found.models if dtype is not None else ():
            each.to(dtype)
        return found


def _raise_used_itself() -> NoReturn:
    problem = "loss_fn or train_window uses a model of its own, and not the copy that verify passes in"
    raise LossError(problem, fix=USE_ARGUMENT)


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says."""
    return str(error).strip().partition("\n")[0]


def read_gradients(parameters: Mapping[str, nn.Parameter], factor: float = 1.0) -> dict[str, Tensor]:
    """Copy the gradients of some parameters, dense and in float64, times a factor."""
    found = {}
    for name, p in parameters.items():
        gradient = torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
        found[name] = gradient.detach().to(torch.float64, copy=True) * factor
    return found


def add(gradients: Iterable[Gradients]) -> dict[str, Tensor]:
    """Add several up; of some, parameters may be missing."""
    found: dict[str, Tensor] = {}
    for name, gradient in (item for each in gradients for item in each.items()):
        found[name] = found[name] + gradient if name in found else gradient
    return found


class LoopRecord:
    """What a loop does in one window, where steps have no effect; an optimizer of the model `under_test` is refused."""

    def __init__(self, model: ModelCopy, under_test: ModelCopy, *, undo_clipping: bool) -> None:
        self.stepped: list[dict[str, Tensor]] = []  # the gradients at each step of an optimizer
        self.left: dict[str, Tensor] = {}  # in .grad after the window
        self.most_steps = 0  # of one optimizer
        self.clipped, self.clipped_by = 0, ""  # how often one parameter was, as parts may be one by one; the function
        self.autocast: torch.dtype | None = None  # the loop's own, inside the model
        self.loss = math.nan  # what it returned
        self._model, self._undo_clipping = model, undo_clipping
        self._refused = {id(p) for p in under_test.all_parameters}
        self._names = {id(p): name for name, p in model.parameters.items()}
        self._times = Counter[Any]()  # of clipping by parameter, of steps by optimizer
        self._weights: list[tuple[Tensor, Tensor]] = []

    @property
    def gradients(self) -> dict[str, Tensor]:
        """What it stepped with first; without a step what it left."""
        first = {name: each[name] for each in reversed(self.stepped or [self.left]) for name in each}
        return {name: first.get(name, torch.zeros_like(left)) for name, left in self.left.items()}

    def run(self, train_window: TrainWindow, micro_batches: list[Any]) -> None:
        """Run a loop over one window, under hooks."""
        with ExitStack() as stack:
            for each in self._model.models:
                each.register_forward_pre_hook(self._read_autocast, prepend=True)
            stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
            for function in (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_):
                name, replacement = function.__name__, partial(self._clip, function)
                for module in list(sys.modules.values()):  # each that has imported it by name
                    if getattr(module, "__dict__", {}).get(name) is function:
                        setattr(module, name, replacement)
                        stack.callback(setattr, module, name, function)
            returned = train_window(self._model.model, micro_batches)
        self.left = read_gradients(self._model.parameters)
        if isinstance(returned, int | float) or (isinstance(returned, Tensor) and returned.numel() == 1):
            self.loss = float(returned.detach() if isinstance(returned, Tensor) else returned)

    def _read_autocast(self, *_: object) -> None:
        if torch.is_autocast_enabled(self._model.device.type):
            self.autocast = torch.get_autocast_dtype(self._model.device.type)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Read the gradients, or have them read once a closure has made them, as Lightning's."""
        every = [p for group in optimizer.param_groups for p in group["params"]]
        if any(id(p) in self._refused for p in every):
            _raise_used_itself()
        own = [p for p in every if id(p) in self._names]
        self._weights = [(p, p.detach().clone()) for p in own]
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not own or not callable(closure):
            self._read_step(optimizer, own)
            return None

        def then_read() -> Any:
            loss = closure()
            self._read_step(optimizer, own)
            return loss

        return ((args[0], then_read, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": then_read})

    def _after_step(self, *_: object) -> None:
        """Undo the step; the next one reads what was added since."""
        with torch.no_grad():
            for p, weights in self._weights:
                p.copy_(weights)
                if p.grad is not None:
                    p.grad.zero_()
        self._weights = []

    def _read_step(self, optimizer: Optimizer, own: Sequence[Any]) -> None:
        if any(p.grad is not None for p in own):
            scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer divides by the loss scale itself
            factor = 1.0 if scale is None else 1.0 / float(scale)
            self.stepped.append(read_gradients({self._names[id(p)]: p for p in own}, factor))
            self._times[optimizer] += 1
            self.most_steps = max(self.most_steps, self._times[optimizer])

    def _clip(self, function: Callable[..., Any], given: Any, *args: Any, **kwargs: Any) -> Any:
        """Call one of torch's clipping functions; it has no effect where it is to have none."""
        every = [given] if isinstance(given, Tensor) else list(given)
        own: list[Any] = [p for p in every if id(p) in self._names and p.grad is not None]
        for p in own:
            self._times[function, id(p)] += 1
            if self._times[function, id(p)] > self.clipped:
                self.clipped, self.clipped_by = self.clipped + 1, function.__name__
        kept = [(p.grad, p.grad.detach().clone()) for p in own] if self._undo_clipping else []
        result = function(every, *args, **kwargs)
        with torch.no_grad():
            for gradient, value in kept:
                gradient.copy_(value)
        return result
