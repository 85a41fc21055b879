"""What few users of `BigStep` need to set, and what its other arguments may be."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parameter import is_lazy

from bigbatch import arguments
from bigbatch.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Options:
    """What few need; every default is the safe one.

    Args:
        lengths: how long each sample is, which allows packing: the name of a mask in a dict batch ("attention_mask"),
            or a function from the batch to one number per sample. Tensors must be padded on the right.
        token_budget: the most padded tokens in a micro-batch, with `lengths`; "auto" finds what fits.
        collate: makes a micro-batch of a list of samples, where a batch is such a list.
        batch_norm: "exact" has BatchNorm in training mode normalise by the big batch: micro-batches run in lock-step
            and meet there. "refuse" it, or accept "micro"-batch statistics, which differ, by 18 to 120 % of the
            gradient where we measured.
        activations: where they stay while micro-batches in lock-step wait for each other. "keep" them: the memory of
            the big batch. "recompute": the model runs again in backward, one micro-batch at a time, where they meet
            outside of it, as in a contrastive loss. "offload" them to the host's memory. "auto" recomputes where they
            meet outside of the model, and else keeps what fits and offloads what does not.
        cuda_graph: capture a micro-step once per shape and replay it: for small micro-batches, where launching kernels
            takes longer than running them. Where micro-batches run in lock-step, a whole window is captured. With
            `lengths`, micro-batches are trimmed to one of eight widths per power of two, so that shapes come again.
            Falls back, saying so once, where a model cannot be captured.
        gradient_dtype: what the gradients of bf16 and fp16 parameters are added up in; None: in their own.
        skip_nonfinite: leave the optimizer alone where the gradient has an inf or NaN.
        check: before updates 1, 2, 4, 16 and 128, compare the gradient of some samples with that of parts of them:
            see that samples are not coupled, and, with `lengths`, that padding does not change it. False leaves both
            out, but for padding that counts, and asks what a sum is over that is divided by a tensor.
        group: the processes that make a big batch together; by default those that the model's DistributedDataParallel
            was made for.
        mesh: gone: use `group`.
    """

    lengths: str | Callable[[Any], Any] | None = None
    token_budget: int | Literal["auto"] = "auto"  # noqa: S105 - no password
    collate: Callable[[list[Any]], Any] | None = None
    batch_norm: Literal["exact", "refuse", "micro"] = "exact"
    activations: Literal["auto", "keep", "recompute", "offload"] = "auto"
    cuda_graph: bool = False
    gradient_dtype: torch.dtype | None = torch.float32
    skip_nonfinite: bool = False
    check: bool = True
    group: ProcessGroup | None = None
    mesh: None = None

    def __post_init__(self) -> None:
        """Refuse what cannot work, when it is written."""
        arguments.mesh(self.mesh)
        arguments.optional(lengths=self.lengths, collate=self.collate, gradient_dtype=self.gradient_dtype)
        arguments.size("token_budget", self.token_budget)
        arguments.one_of("batch_norm", self.batch_norm, "exact", "refuse", "micro")
        arguments.one_of("activations", self.activations, "auto", "keep", "recompute", "offload")
        arguments.truths(cuda_graph=self.cuda_graph, skip_nonfinite=self.skip_nonfinite, check=self.check)
        if self.token_budget != "auto" and self.lengths is None:  # noqa: S105 - no password
            problem = f"token_budget={self.token_budget} needs lengths."
            raise ConfigurationError(problem, fix="Options(lengths='attention_mask', ...)")
        if self.cuda_graph and self.lengths is not None and self.collate is not None:
            raise ConfigurationError(
                "cuda_graph=True serves micro-batches whose shapes come again; with lengths= and collate= they do not.",
                fix="batches that are padded on the right instead of lists, or cuda_graph=False",
            )


def checked_loss_fn(loss_fn: object) -> Callable[[Any, Any], Any] | None:
    """Accept a function of a model and a batch, or none."""
    found = type(loss_fn).__name__
    if loss_fn is None:
        return None
    if callable(loss_fn) and not isinstance(loss_fn, nn.Module):
        if arguments.takes(loss_fn, 2):
            return loss_fn
        found = f"one that takes {signature(loss_fn)}"
    raise ConfigurationError(
        f"loss_fn must be a function loss_fn(model, batch) -> loss; found {found}.",
        fix="lambda model, batch: criterion(model(batch[0]), batch[1])",
    )


def checked_options(options: object) -> Options:
    """Accept options, or none."""
    if options is None or isinstance(options, Options):
        return options or Options()
    problem = f"options must be an Options; found {options!r}"
    raise ConfigurationError(problem, fix="BigStep(..., options=Options(cuda_graph=True))")


def checked_size(size: object, options: Options, device: torch.device, *, sharded: bool) -> int | Literal["auto"]:
    """Accept a number of samples, or "auto" where any size gives the same update."""
    if options.cuda_graph and device.type != "cuda":
        raise ConfigurationError(f"cuda_graph=True needs the model on a CUDA device; found it on {device}")
    chosen = arguments.size("micro_batch_size", size)
    is_auto = chosen == "auto"
    if is_auto and options.batch_norm == "micro" and options.lengths is None:
        raise ConfigurationError(
            'batch_norm="micro" makes the result depend on the size of a micro-batch, so it must not depend on memory.',
            fix="BigStep(..., micro_batch_size=32)",
        )
    if sharded and (is_auto or options.lengths is not None or options.cuda_graph):
        raise ConfigurationError(
            "every pass through a model that is sharded with fully_shard needs all ranks, so each must make as many: "
            'micro_batch_size="auto", lengths= and cuda_graph=True do not see to that.',
            fix="BigStep(..., micro_batch_size=8), without lengths= and cuda_graph=True",
        )
    return chosen


def refuse_lazy(models: Sequence[nn.Module]) -> None:
    """Refuse layers that have no size before their first forward: what a step changes must be known before it."""
    for name, module in (each for model in models for each in model.named_modules()):
        if any(map(is_lazy, (*module.parameters(recurse=False), *module.buffers(recurse=False)))):
            raise ConfigurationError(
                f"{type(module).__name__} '{name}' has no size yet: a lazy layer gets it in its first forward.",
                fix="with torch.no_grad(): model(inputs), before BigStep is made",
            )
