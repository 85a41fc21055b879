"""What a `BigStep` is given, checked before anything is changed."""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, Literal

from torch import nn
from torch.nn.parameter import is_lazy

from bigbatch.errors import ConfigurationError
from bigbatch.options import Options


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
