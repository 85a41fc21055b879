"""Predict the peak of a training step without its device, by computing with tensors that have shapes and no numbers."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from bigbatch.distributed.fsdp_internals import local
from bigbatch.errors import ConfigurationError
from bigbatch.planner.cuda_like import like_cuda
from bigbatch.planner.fakes import Fakes, faked
from bigbatch.planner.live_storages import LiveStorages

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
    where: str  # the operation at which the peak is reached

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
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    target: Literal["cuda", "cpu"] = "cuda",
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
    optimizers = () if optimizer is None else tuple(optimizer) if isinstance(optimizer, Sequence) else (optimizer,)
    live, fakes = LiveStorages(_BLOCK[target]), Fakes()
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # what a real step warns of, it will say itself
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(faked(models, fakes))
        stack.enter_context(like_cuda() if target == "cuda" else nullcontext())
        stack.enter_context(torch.autograd.set_multithreading_enabled(mode=False))
        inputs = fakes.batch(batch)
        trace = _Trace(models, [fakes.optimizer(o) for o in optimizers], live, target)
        return trace.step(inputs, lambda: loss_fn(model, inputs))


def optimizer_bytes(optimizers: Sequence[Optimizer], target: str) -> tuple[int, int]:
    """Return what the optimizers' state will take when it is all there, and what a step holds beside it for a while."""
    live, fakes = LiveStorages(_BLOCK[target]), Fakes()
    with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True):
        warnings.simplefilter("ignore")
        trace = _Trace((), [fakes.optimizer(o) for o in optimizers], live, target)
        parameters = [p for o in trace.optimizers for group in o.param_groups for p in group["params"]]
        for p in parameters:
            p.grad = torch.empty_like(p)
        live.add([parameters, [p.grad for p in parameters]])
        return trace.optimizer_only()


@dataclass(frozen=True)
class _Trace:
    """A step of stand-ins, counted."""

    models: Sequence[nn.Module]
    optimizers: Sequence[Optimizer]
    live: LiveStorages
    target: str

    def step(self, batch: Any, compute_loss: Callable[[], Any]) -> Prediction:
        live = self.live
        held = [t for module in self.models for t in (*module.parameters(), *module.buffers())]
        parameters = list({id(p): p for p in held if p.requires_grad}.values())
        for p in parameters:
            p.grad = torch.empty_like(p)
        weights = live.add(held)
        gradients = live.add([p.grad for p in parameters]) + wider(parameters)
        with live, live.phase("state"):
            optimizer_state = self._make_state()
        samples = live.add(batch)
        before = live.now
        with live:
            with live.phase("forward"):
                loss = _loss(compute_loss())
            with live.phase("backward"):
                loss.backward()
            del loss
            after = live.now
            with live.phase("step"):
                self._step()
        inside = {name: live.peaks[name] - before for name in ("forward", "backward")}
        step = live.peaks["step"] - after
        last = max(inside, key=lambda name: inside[name])
        return Prediction(
            weights=weights,
            gradients=gradients,
            optimizer_state=optimizer_state,
            batch=samples,
            forward=inside["forward"],
            backward=inside["backward"],
            optimizer_step=step,
            workspaces=_WORKSPACES[self.target],
            where=f"{last}: {live.where[last]}" if samples + inside[last] >= step else "the optimizer's step",
        )

    def optimizer_only(self) -> tuple[int, int]:
        with self.live, self.live.phase("state"):
            state = self._make_state()
            with self.live.phase("step"):
                self._step()
        return state, self.live.peaks["step"] - self.live.now

    def _make_state(self) -> int:
        """Make the optimizers' state, as their first step does; return its bytes."""
        before = self.live.now
        for each in self.optimizers:
            self.live.add([v for state in each.state.values() for v in state.values() if isinstance(v, Tensor)])
            for group in each.param_groups:
                # On CUDA torch takes the foreach kernels by itself, whose temporaries are as large as the weights.
                if self.target == "cuda" and group.get("foreach", 0) is None and not group.get("fused"):
                    group["foreach"] = True
        self._step()
        return self.live.now - before

    def _step(self) -> None:
        with torch.no_grad():
            for each in self.optimizers:
                each.step()


def _loss(returned: Any) -> Tensor:
    loss = returned[0] if isinstance(returned, tuple) else returned
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        raise ConfigurationError(
            f"loss_fn(model, batch) must return a loss with a graph; found {type(loss).__name__}.\n\n"
            "Compute it from the model's output with gradients on."
        )
    return loss


def wider(parameters: Sequence[Tensor]) -> int:
    """Return what gradients of half precision take beyond their own size: they are added up in float32."""
    halves = [local(p) for p in parameters if p.is_floating_point() and p.element_size() < torch.float32.itemsize]
    return sum(p.numel() * (torch.float32.itemsize - p.element_size()) for p in halves)


def size_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of some tensors; what they share counts once."""
    storages = [local(t).untyped_storage() for t in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())  # noqa: SLF001
