"""Mixed precision with less work: weights cast once per window, their gradients added up in float32 as they are made.

Under autocast a float32 weight is cast for every micro-batch, and its gradient is made in bfloat16, rounded, cast back
and added to the float32 sum. All but the first cast are for nothing, and a matrix product can add to a float32
matrix by itself. Where micro-steps are captured, linear layers and large embeddings whose weights are ours do so inside
`with weights:`. What they compute is the same, but for one rounding of each weight gradient that is left out.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from bigbatch.execute.graph_record import NotCapturable
from bigbatch.loss.graph import stands_for
from bigbatch.state.patch import Swap
from bigbatch.window.gradients import all_parameters

_LARGE_TABLE = 2**20  # elements of an embedding; a smaller one is quickly filled with zeros


class CastWeights:
    """The weights of some models in low precision, renewed once per window."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        """Find the parameters that may take the short way; nothing is cast yet."""
        self._parameters = {id(p): p for p in all_parameters(optimizers)}
        self._own: frozenset[int] = frozenset()  # of them those that qualify, in the window that is open
        self._low: dict[tuple[int, torch.dtype], Tensor] = {}
        self._fresh: set[tuple[int, torch.dtype]] = set()
        self._swaps = (Swap(F, "linear", self._upon_linear), Swap(F, "embedding", self._upon_embedding))
        self._task: int | None = None  # the number of the window's own backward, while it runs

    @staticmethod
    def serves(models: Sequence[nn.Module], device: torch.device) -> bool:
        """Whether the short way is open: not for compiled code, nor for wrappers that wait for gradient hooks."""
        if device.type != "cuda" or not _adds_to_float32(device):
            return False
        return not any(
            isinstance(module, DistributedDataParallel)
            or type(module).__name__ == "OptimizedModule"
            or getattr(module, "_compiled_call_impl", None) is not None
            for model in models
            for module in model.modules()
        )

    def __enter__(self) -> None:
        """Take the place of `F.linear` and `F.embedding`, for weights of ours, on whatever thread recomputes them."""
        self._own = frozenset(number for number, p in self._parameters.items() if _qualifies(p))
        self._fresh.clear()  # the optimizer has stepped since
        for swap in self._swaps:
            swap.enter(self)

    def __exit__(self, *_: object) -> None:
        for swap in self._swaps:
            swap.leave(self)
        self._own = frozenset()

    def _upon_linear(self, plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002 - torch's name
            if not (id(weight) in self._own and input.is_cuda and torch.is_autocast_enabled("cuda") and _is_training()):
                return plain(input, weight, bias)
            dtype = torch.get_autocast_dtype("cuda")
            low = bias if bias is None else self._cast(bias, dtype) if id(bias) in self._own else bias.to(dtype)
            beside = self._cast(weight, dtype), low, self  # in a tuple: the graph should not know of them
            found: Tensor = _Linear.apply(input.to(dtype), weight, bias, beside)  # type: ignore[no-untyped-call]
            return found

        return linear

    def _upon_embedding(self, plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def embedding(input: Tensor, weight: Tensor, *usual: Any, **named: Any) -> Tensor:  # noqa: A002
            given = dict(zip(("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"), usual), **named)  # noqa: B905
            given.pop("norm_type", None)
            large = id(weight) in self._own and weight.numel() >= _LARGE_TABLE and _is_training()
            options = any(value is not None and value is not False for value in given.values())
            if not large or options or torch.are_deterministic_algorithms_enabled():
                return plain(input, weight, *usual, **named)
            found: Tensor = _Embedding.apply(input, weight, self)  # type: ignore[no-untyped-call]
            return found

        return embedding

    @contextmanager
    def adding_up(self, loss: Tensor) -> Iterator[None]:
        """Say that the backward of `loss` inside is the window's own, whose gradients are to be added up."""
        assert loss.grad_fn is not None  # noqa: S101 - checked when it was read
        handle = loss.grad_fn.register_prehook(self._begin)
        try:
            yield
        finally:
            handle.remove()
            self._task = None

    def _begin(self, _gradients: tuple[Tensor, ...]) -> None:
        # A backward inside of it, as a hook may run one, has a number of its own.
        self._task = torch._C._current_graph_task_id()  # noqa: SLF001 - no public name

    def refuse_foreign(self) -> None:
        """Raise in a backward that is not the window's own: its gradients must not be added up."""
        if self._task is None or self._task != torch._C._current_graph_task_id():  # noqa: SLF001
            raise NotCapturable("its loss or a hook runs a backward of its own under autocast, as a gradient penalty")

    def renew(self) -> None:
        """Cast all weights that were cast before, at once: what a captured graph reads."""
        stale = [key for key in self._low if key not in self._fresh]
        if stale:
            weights = [self._parameters[number].detach() for number, _ in stale]
            torch._foreach_copy_([self._low[key] for key in stale], weights)
            self._fresh.update(stale)

    def _cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        key = (id(weight), dtype)
        if key not in self._fresh and torch.cuda.is_current_stream_capturing():
            msg = "a weight was not cast before the capture"  # it would be cast in every replay
            raise RuntimeError(msg)
        if key not in self._low:
            self._low[key] = weight.detach().to(dtype)
        elif key not in self._fresh:
            self._low[key].copy_(weight.detach())  # the same memory: a captured graph knows it
        self._fresh.add(key)
        return self._low[key]


@cache
def _adds_to_float32(device: torch.device) -> bool:
    """Whether this torch can add a product of low precision to a float32 matrix."""
    low = torch.zeros(16, 16, dtype=torch.bfloat16, device=device)
    try:
        torch.addmm(low.float(), low, low, out_dtype=torch.float32, out=low.float())
    except (TypeError, RuntimeError):
        return False
    return True


def _qualifies(parameter: Tensor) -> bool:
    """Whether nobody else waits for the gradient of a parameter: hooks would see nothing."""
    hooked = getattr(parameter, "_backward_hooks", None) or getattr(parameter, "_post_accumulate_grad_hooks", None)
    plain = type(parameter.data) is Tensor  # no DTensor, nor another tensor with ways of its own
    return plain and parameter.requires_grad and parameter.dtype == torch.float32 and parameter.is_cuda and not hooked


def _is_training() -> bool:
    """Whether a backward will follow, and no transform of torch.func, which our functions do not know."""
    return torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active()  # noqa: SLF001 - no public name


class _Linear(torch.autograd.Function):
    """A linear layer in low precision whose weight gradient is added to a float32 sum as it is made."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor, bias: Tensor | None, beside: tuple[Any, ...]) -> Tensor:
        low, low_bias, ctx.owner = beside
        ctx.save_for_backward(given, low)
        ctx.weight, ctx.biased = weight, bias is not None and bias.requires_grad
        product: Tensor = torch._C._nn.linear(given, low, low_bias)  # noqa: SLF001 - F.linear is ourselves here
        return product

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.owner.refuse_foreign()
        (above,) = gradients
        given, low = ctx.saved_tensors
        rows, columns, weight = above.reshape(-1, above.shape[-1]), given.reshape(-1, given.shape[-1]), ctx.weight
        if weight.grad is None:
            weight.grad = torch.mm(rows.t(), columns, out_dtype=torch.float32)
        else:
            torch.addmm(weight.grad, rows.t(), columns, out_dtype=torch.float32, out=weight.grad)
        below = above @ low if ctx.needs_input_grad[0] else None
        bias = rows.sum(0, dtype=torch.float32) if ctx.biased else None
        return below, None, bias, None


class _Embedding(torch.autograd.Function):
    """An embedding whose gradient is added row by row, without a table of zeros for every micro-batch."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, owner: CastWeights) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.weight, ctx.owner = weight, owner
        return torch.embedding(weight, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.owner.refuse_foreign()
        (above,) = gradients
        (rows,) = ctx.saved_tensors
        weight = ctx.weight
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        weight.grad.index_add_(0, rows.reshape(-1), above.reshape(-1, above.shape[-1]).to(weight.dtype))
        return None, None, None


# The reader sees through ours: a graph with them reads as one without.
stands_for(_Linear, "Linear")
stands_for(_Embedding, "Embedding")
