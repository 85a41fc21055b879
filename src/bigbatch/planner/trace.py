"""Predict the peak of a training step without its device, by computing with tensors that have shapes and no numbers."""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from bigbatch import arguments
from bigbatch.batch.tree import mapped
from bigbatch.errors import ConfigurationError, spoken_to_step
from bigbatch.memory.meter import LiveBytes
from bigbatch.planner.cuda_like import like_cuda, scratch

_aten = torch.ops.aten
Target = Literal["cuda", "cpu"]
_BLOCK = {"cuda": 512, "cpu": 1}  # bytes that storages are rounded up to
# cuBLAS keeps a workspace for each thread that calls it: the forward's and the backward's. 32 MiB each on Hopper,
# 8 MiB on what is older.
_WORKSPACES = {"cuda": 2 * (32 << 20), "cpu": 0}


@dataclass(frozen=True)
class Prediction:
    """What a training step holds, in bytes, part by part; its phases do not overlap, so the largest is the peak."""

    weights: int  # and buffers
    gradients: int
    optimizer_state: int
    batch: int
    forward: int  # the most that the forward holds beside the above
    backward: int  # the most that the backward holds beside the above
    optimizer_step: int  # the most that the optimizer's step holds beside the above, the batch not counted
    workspaces: int  # of libraries, kept for good

    @property
    def resident(self) -> int:
        """What is held all the time."""
        return self.weights + self.gradients + self.optimizer_state + self.workspaces

    @property
    def peak(self) -> int:
        """The most that is held at once."""
        return self.resident + max(self.batch + max(self.forward, self.backward), self.optimizer_step)


def predict(
    model: nn.Module | Sequence[nn.Module],
    loss_fn: Callable[[Any, Any], Any],
    batch: Any,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    *,
    target: Target = "cuda",
) -> Prediction:
    """Trace a forward, a backward and a step of the optimizer, gradients and its state allocated.

    Nothing is computed and nothing allocated: the model may be larger than this machine. What a kernel allocates and
    frees within itself is not seen (cuDNN's workspaces), but for the largest that are known.

    Args:
        model: as `loss_fn` takes it.
        loss_fn: called as `loss_fn(model, batch)`; may return `(loss, extras)`.
        batch: one micro-batch, on any device.
        optimizer: whose state and step are counted, where it is given.
        target: the kind of device to predict for.
    """
    models = tuple(model) if isinstance(model, Sequence) else (model,)
    optimizers = tuple(optimizer) if isinstance(optimizer, Sequence) else (optimizer,)
    with (
        warnings.catch_warnings(),
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.autograd.set_multithreading_enabled(mode=False),
        like_cuda() if target == "cuda" else nullcontext(),
    ):
        warnings.simplefilter("ignore")  # what a real step warns of, it will say itself
        live = _Trace(target)
        inputs = mapped(batch, lambda _, leaf: live.fake(leaf) if isinstance(leaf, Tensor) else leaf)
        with live.faked(models):
            held = [t for module in models for t in (*module.parameters(), *module.buffers())]
            trained = list({id(p): p for p in held if p.requires_grad}.values())
            weights = live.add(held)
            for p in trained:
                p.grad = torch.empty_like(p)
            gradients = live.add([p.grad for p in trained]) + _wider(trained)
            state, step = live.stepped(optimizers)
            samples = live.add(inputs)
            before = live.peak = live.now
            with live:
                loss = checked_loss(loss_fn(model, inputs))
            forward, live.peak = live.peak - before, live.now
            with live:
                loss.backward()
            backward = live.peak - before
    return Prediction(weights, gradients, state, samples, forward, backward, step, _WORKSPACES[target])


class _Trace(LiveBytes):
    """Fake tensors by the real ones they stand for; counts what of them is alive."""

    def __init__(self, target: Target) -> None:
        super().__init__(block=_BLOCK[target])
        self._target, self._faked = target, list[Optimizer]()
        self._made: dict[int, tuple[Tensor, Tensor]] = {}  # with the real one, so that its id stays its own

    @torch.no_grad()
    def stepped(self, optimizers: Sequence[Optimizer]) -> tuple[int, int]:
        """Step optimizers of the stand-ins; return the bytes of their state, and what a step holds beside it."""
        faked = list(map(self._optimizer, optimizers))
        before = at_rest = self.now
        self.add([v for each in faked for state in each.state.values() for v in state.values()])
        for _ in range(2):  # the first one makes the state
            at_rest = self.peak = self.now
            with self:
                for each in faked:
                    each.step()
        self._faked = faked  # alive as long as the trace is
        return at_rest - before, self.peak - at_rest

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation on stand-ins, and count its storages and what a CUDA kernel allocates within itself."""
        if func is torch.ops.prim.device.default:
            return func(*args, **(kwargs or {}))
        args, kwargs = tree_map(self._on_the_cpu, (args, kwargs or {}))
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        # Of what depends on numbers, the most memory that it can ask for.
        outputs = super().__torch_dispatch__(_DATA_DEPENDENT.get(func, func), types, args, kwargs)
        self.peak = max(self.peak, self.now + scratch(func, args))
        return outputs

    def _on_the_cpu(self, value: Any) -> Any:
        """Take a stand-in for a real tensor on a device: all fake tensors here are on the CPU."""
        is_here = not isinstance(value, Tensor) or isinstance(value, FakeTensor) or value.device.type == "cpu"
        return value if is_here else self.fake(value)

    def fake(self, real: Tensor) -> Tensor:
        """Return the stand-in of a tensor: always the same for the same one, so that tied weights stay tied."""
        if id(real) not in self._made:
            fake = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="cpu")
            if isinstance(real, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=real.requires_grad)
            elif real.requires_grad:
                fake.requires_grad_()
            self._made[id(real)] = (real, fake)
        return self._made[id(real)][1]

    def _optimizer(self, real: Optimizer) -> Optimizer:
        """Return an optimizer of the stand-ins; hooks, and schedulers that patched the real one, stay behind."""
        tensors = [p for group in real.param_groups for p in group["params"]]
        tensors += [v for state in real.state.values() for v in state.values() if isinstance(v, Tensor)]
        made = copy.deepcopy(real, {id(tensor): self.fake(tensor) for tensor in tensors})
        # On CUDA torch takes the foreach kernels by itself, whose temporaries are as large as the weights.
        for group in made.param_groups:
            if self._target == "cuda" and group.get("foreach", 0) is None and not group.get("fused"):
                group["foreach"] = True
        return made

    @contextmanager
    def faked(self, models: Sequence[nn.Module]) -> Iterator[None]:
        """Inside, the models hold stand-ins; afterwards they are as before, with all attributes that a forward may set.

        The models themselves and no copies: a loss function may have closed over them, and not use what it is handed.
        """
        modules = list(dict.fromkeys(module for model in models for module in model.modules()))
        tensors: list[dict[str, Any]] = [t for m in modules for t in (m._parameters, m._buffers)]  # noqa: SLF001
        held = [*map(vars, modules), *tensors]
        before = [dict(each) for each in held]
        try:
            for each in tensors:  # setattr would register anew
                each.update({name: self.fake(tensor) for name, tensor in each.items() if tensor is not None})
            yield
        finally:
            for each, was in zip(held, before, strict=True):
                each.clear()
                each.update(was)


def _number(subject: Tensor) -> float | bool:
    """Answer `.item()`: a logged loss, or a count of steps, which no shape depends on."""
    if subject.is_floating_point():
        return 1.0
    if subject.dtype == torch.bool:
        return False
    raise ConfigurationError(
        "This model cannot be traced: it reads an integer out of a tensor, as .item() and int() do, and a trace has "
        "shapes alone.",
        fix="plan(...) on the device itself, where it is measured",
    )


def _indexed(subject: Tensor, given: Sequence[Tensor | None]) -> Tensor:
    indices: list[Tensor | None] = []
    for index in given:
        if index is not None and index.dtype in {torch.bool, torch.uint8}:
            indices += [index.new_empty(index.numel(), dtype=torch.int64)] * index.dim()
        else:
            indices.append(index)
    found: Tensor = _aten.index.Tensor(subject, indices)
    return found


# Operations whose result depends on numbers: every mask is all true, which is the most memory it can ask for.
_DATA_DEPENDENT: dict[Any, Callable[..., Any]] = {
    _aten.equal.default: lambda *_: False,
    _aten._local_scalar_dense.default: _number,  # noqa: SLF001
    _aten.nonzero.default: lambda x: x.new_empty((x.numel(), x.dim()), dtype=torch.int64),
    _aten.masked_select.default: lambda x, mask: x.new_empty(torch.broadcast_shapes(x.shape, mask.shape).numel()),
    _aten.index.Tensor: _indexed,
}


def checked_loss(returned: Any) -> Tensor:
    """Return the loss that a loss function returned, alone or before its extras."""
    loss: Tensor = returned[0] if isinstance(returned, tuple) else returned
    with spoken_to_step():
        arguments.loss(loss)
    return loss


def _wider(parameters: Sequence[Tensor]) -> int:
    """Return what gradients of half precision take beyond their own size: they are added up in float32."""
    halves = [p for p in parameters if p.is_floating_point() and p.element_size() < torch.float32.itemsize]
    return sum(p.numel() * (torch.float32.itemsize - p.element_size()) for p in halves)
