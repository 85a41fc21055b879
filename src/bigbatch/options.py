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
        lengths: object = self.lengths
        if lengths is not None and not isinstance(lengths, str) and not callable(lengths):
            msg = f"lengths must be the name of a mask or a function from a batch; found {lengths!r}"
            raise ConfigurationError(msg)
        budget: object = self.token_budget
        if budget != "auto" and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 1):
            msg = f'token_budget must be a positive integer or "auto"; found {budget!r}'
            raise ConfigurationError(msg)
        if budget != "auto" and self.lengths is None:
            msg = f"token_budget={budget} needs lengths: name the mask, as in Options(lengths='attention_mask')"
            raise ConfigurationError(msg)
        collate: object = self.collate
        if collate is not None and not callable(collate):
            msg = f"collate must be a function from a list of samples to a batch; found {collate!r}"
            raise ConfigurationError(msg)
        for name in ("cuda_graph", "check"):
            if not isinstance(getattr(self, name), bool):
                msg = f"{name} must be True or False; found {getattr(self, name)!r}"
                raise ConfigurationError(msg)
        if self.cuda_graph and self.lengths is not None and self.collate is not None:
            msg = (
                "cuda_graph=True serves micro-batches whose shapes come again. With lengths= alone they are trimmed to "
                "a few widths; with collate= the width is its own choice.\n"
                "Give batches that are padded on the right instead of lists, or take cuda_graph=True out."
            )
            raise ConfigurationError(msg)
        if self.batch_norm not in {"exact", "refuse", "micro"}:
            msg = f'batch_norm must be "exact", "refuse" or "micro"; found {self.batch_norm!r}'
            raise ConfigurationError(msg)
        if self.activations not in {"auto", "keep", "recompute", "offload"}:
            msg = f'activations must be "auto", "keep", "recompute" or "offload"; found {self.activations!r}'
            raise ConfigurationError(msg)
        arguments.gradient_dtype(self.gradient_dtype)
        arguments.skip_nonfinite(self.skip_nonfinite)


def checked_loss_fn(loss_fn: object) -> Callable[[Any, Any], Any] | None:
    """Accept a function of a model and a batch, or none."""
    if loss_fn is None:
        return None
    found = type(loss_fn).__name__
    if callable(loss_fn) and not isinstance(loss_fn, nn.Module):
        try:
            found = f"one that takes {signature(loss_fn)}"
            signature(loss_fn).bind(None, None)
        except TypeError:
            pass  # it takes others
        except ValueError:
            return loss_fn  # some functions of C have no signature
        else:
            return loss_fn
    msg = (
        f"loss_fn must be a function loss_fn(model, batch) -> loss; found {found}.\n"
        "Wrap a criterion:  BigStep(model, optimizer, lambda model, batch: criterion(model(batch[0]), batch[1]))"
    )
    raise ConfigurationError(msg)


def checked_options(options: object) -> Options:
    """Accept options, or none."""
    if options is None or isinstance(options, Options):
        return options or Options()
    msg = f"options must be an Options, as in BigStep(..., options=Options(cuda_graph=True)); found {options!r}"
    raise ConfigurationError(msg)


def checked_size(size: object, options: Options) -> int | Literal["auto"]:
    """Accept a number of samples, or "auto" where any size gives the same update."""
    if not (isinstance(size, str) and size == "auto"):
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            msg = f'micro_batch_size must be a positive integer or "auto"; found {size!r}'
            raise ConfigurationError(msg)
        return size
    if options.batch_norm == "micro" and options.lengths is None:
        msg = (
            'batch_norm="micro" makes the result depend on the size of a micro-batch, so it must not depend on how '
            "much memory there is.\nChoose the size yourself:  BigStep(..., micro_batch_size=32)"
        )
        raise ConfigurationError(msg)
    return "auto"


def refuse_for_shards(options: Options, size: object) -> None:
    """Refuse what would take another number of passes on every rank."""
    wrong, instead = (
        ('micro_batch_size="auto" tries sizes', "Give the size yourself:  BigStep(..., micro_batch_size=8)")
        if size == "auto"
        else ("Options(lengths=...) packs each rank's batch in its own way", "Leave lengths= out of the Options.")
        if options.lengths is not None
        else ("Options(cuda_graph=True) replays without meeting", "Leave cuda_graph=True out of the Options.")
        if options.cuda_graph
        else ("", "")
    )
    if wrong:
        msg = (
            "every pass through a model that is sharded with fully_shard is a meeting of all ranks, and "
            f"{wrong}.\n{instead}"
        )
        raise ConfigurationError(msg)


def refuse_lazy(models: Sequence[nn.Module]) -> None:
    """Refuse layers that have no size before their first forward: what a step changes must be known before it."""
    for model in models:
        for name, module in model.named_modules():
            own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
            if any(is_lazy(each) for each in own):
                msg = (
                    f"{type(module).__name__} '{name}' has no size yet: a lazy layer gets it in its first forward.\n"
                    "Run one before BigStep is made:  with torch.no_grad(): model(inputs)"
                )
                raise ConfigurationError(msg)
