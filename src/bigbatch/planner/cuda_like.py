"""Let fake tensors on the CPU behave as they would on CUDA, where that changes what is kept for the backward.

A backward of fake CUDA tensors needs a CUDA build of torch, so a trace runs as on a CPU. There, dropout keeps its mask
in floats, attention with dropout keeps a square matrix, and autocast leaves norms and softmax in half precision. On
CUDA, each is otherwise. Inside `with like_cuda():` they are as on CUDA: kernels are put in front of torch's
own, and taken out at its end.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from bigbatch.state.patch import Swap, swapped

_aten = torch.ops.aten
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)  # noqa: SLF001

# What autocast runs in float32 on CUDA and leaves alone on a CPU; from torch's table of CUDA operations.
_FLOAT32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm group_norm rms_norm
    frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss
    nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
    multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits
    dist pdist cdist renorm logsumexp upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d
    upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d
""".split()
# These are told to return float32, and make no copy of what comes in.
_INTO_FLOAT32 = "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum sum sum.dim_IntList".split()


@contextmanager
def like_cuda() -> Iterator[None]:
    """Trace as on CUDA; not for tensors that hold numbers, and not beside other threads that compute."""
    library = torch.library.Library("aten", "IMPL")
    with ExitStack() as stack:
        stack.callback(library._destroy)  # noqa: SLF001 - torch has no other way to take kernels out
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that a kernel of its own is in front of no more
            _register(library)
        stack.enter_context(swapped(_init))
        if torch.is_autocast_enabled("cuda"):
            stack.enter_context(torch.autocast("cpu", torch.get_autocast_dtype("cuda")))
        yield


def scratch(func: Callable[..., Any], args: tuple[Any, ...]) -> int:
    """Return what a CUDA kernel allocates and frees within itself, where it is as large as what it returns."""
    if func is not _aten._scaled_dot_product_flash_attention_for_cpu_backward.default:  # noqa: SLF001
        return 0
    query = args[1]  # its gradient is added up in float32, beside a number per row
    return 4 * int(query.numel() + query.numel() // query.shape[-1])


def _register(library: torch.library.Library) -> None:
    # A CPU's autocast computes all of a cross-entropy in float32; CUDA's knows its parts alone.
    library.impl("cross_entropy_loss", _aten.cross_entropy_loss.default.decompose, "AutocastCPU")
    for name in (*_FLOAT32, *_INTO_FLOAT32):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCPU"):  # noqa: SLF001
            library.impl(name, _autocast(name), "AutocastCPU")
    library.impl("softmax.int", _softmax(_aten._softmax), "AutogradCPU")  # noqa: SLF001
    library.impl("log_softmax.int", _softmax(_aten._log_softmax), "AutogradCPU")  # noqa: SLF001
    library.impl("dropout", _dropout, "AutogradCPU")
    library.impl("scaled_dot_product_attention", _attention, "AutogradCPU")


def _autocast(name: str) -> Callable[..., Any]:
    """Make autocast's kernel for an operation that is computed in float32, or returns it."""
    packet, _, overload = name.partition(".")
    operation: Callable[..., Any] = getattr(getattr(_aten, packet), overload or "default")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if name not in _INTO_FLOAT32:
            args, kwargs = tuple(map(_float32, args)), {key: _float32(value) for key, value in kwargs.items()}
        elif _is_half(args[0]) and not any(isinstance(each, torch.dtype) for each in (*args, kwargs.get("dtype"))):
            args, kwargs = tuple(arg for arg in args if arg is not None), {**kwargs, "dtype": torch.float32}
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):  # noqa: SLF001 - as autocast's own kernels do
            return operation(*args, **kwargs)

    return kernel


def _float32(value: Any) -> Any:
    return value.float() if _is_half(value) else value


def _is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in {torch.bfloat16, torch.float16}


def _softmax(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Read half precision and write float32 in one kernel, whose backward writes half precision again."""

    def softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
        to_float = _is_half(x) and dtype == torch.float32
        return kernel(x if dtype is None or to_float else x.to(dtype), dim, to_float)

    return softmax


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:  # noqa: FBT001 - the operation's own signature
    """Keep one byte per element."""
    return torch.native_dropout(x, p, train)[0] if train and 0 < p < 1 else x * 1 if train and p else x


def _attention(  # noqa: PLR0917 - the operation's own signature
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,  # noqa: ARG001 - drawn inside the kernel: it keeps nothing
    is_causal: bool = False,  # noqa: FBT001, FBT002
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Keep the output and one number per row: the flash, the memory-efficient and cuDNN's kernel alike."""
    fused = all(t.dim() == 4 for t in (query, key, value)) and query.shape[-1] == value.shape[-1]  # noqa: PLR2004
    if not fused or (attn_mask is not None and attn_mask.requires_grad):
        kernel = _aten._scaled_dot_product_attention_math  # noqa: SLF001
        plain: Tensor = kernel(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)[0]
        return plain
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.empty_like(attn_mask, dtype=query.dtype)
    # Fewer heads of keys than of queries are not repeated: gradients have the inputs' shapes.
    kernel = _aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
    attended: Tensor = kernel(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return attended


def _on_the_cpu(plain: Callable[..., None]) -> Callable[..., None]:
    """Take the place of `torch.autocast.__init__`: let `torch.autocast("cuda", ...)` act on the CPU."""

    def init(
        self: torch.autocast, device_type: str, dtype: torch.dtype | None = None, *rest: Any, **kwargs: Any
    ) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        plain(self, device_type, dtype, *rest, **kwargs)

    return init


_init = Swap(torch.autocast, "__init__", _on_the_cpu)
