"""What a `Setup` refuses: what was found, and what to type instead."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from bigbatch import arguments
from bigbatch.distributed.fsdp_internals import sharded
from bigbatch.distributed.launcher import started
from bigbatch.errors import ConfigurationError, LossError

LOSS_FN = "    loss_fn=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])"
_CALLS = {"loss_fn": "model, batch", "collate": "samples", "evaluate": "model", "counts": "batch"}
_FEW = 8  # tensors in a tuple that is rather a data set than a list of samples


def model(found: object) -> None:
    """Accept one module."""
    if isinstance(found, type) and issubclass(found, nn.Module):
        raise ConfigurationError(
            f"Setup(model={found.__name__}): this is the class, not a model.\nMake one:  model={found.__name__}(...)"
        )
    if isinstance(found, list | tuple):
        raise ConfigurationError(
            "Setup(model=[...]): a Setup has one model.\nPut several into one:  model=nn.ModuleList([first, second])"
        )
    if not isinstance(found, nn.Module):
        raise ConfigurationError(
            f"Setup(model={_shown(found)}): model is an nn.Module; this is {_kind(found)}.\n"
            "For example:  model=nn.Linear(10, 2)"
        )
    if sharded([found]) or (isinstance(found, DistributedDataParallel) and found.process_group.size() > 1):
        raise ConfigurationError(
            f"Setup(model={type(found).__name__}(...)): a Setup is run by one process, and this model is spread over "
            "several (DDP, fully_shard).\n"
            "Give the plain model. Over several devices, train in a loop of your own, as examples/ranks/ddp.py does."
        )
    arguments.models(found, ranks=True)


def refuse_launcher(command: str) -> None:
    """Refuse to run a command where torchrun has started several processes."""
    if started() > 1:
        raise ConfigurationError(
            f"`bigbatch {command}` runs in one process, and torchrun has started {started()}.\n"
            f"Type `bigbatch {command} FILE.py` without torchrun. To train on several devices, start from "
            "examples/ranks/ddp.py, or examples/ranks/fsdp2.py for a sharded model."
        )


def optimizer(found: object, trained: nn.Module) -> None:
    """Accept one optimizer of the model or several."""
    for each in found if isinstance(found, list | tuple) else (found,):
        if isinstance(each, type) and issubclass(each, Optimizer):
            raise ConfigurationError(
                f"Setup(optimizer={each.__name__}): this is the class, not an optimizer.\n"
                f"Make one:  optimizer={each.__name__}(model.parameters(), lr=...)"
            )
        if not isinstance(each, Optimizer):
            raise ConfigurationError(
                f"Setup(optimizer={_shown(each)}): optimizer is a torch.optim.Optimizer, or a list of them; this is "
                f"{_kind(each)}.\nFor example:  optimizer=torch.optim.SGD(model.parameters(), lr=0.1)"
            )
    arguments.optimizers(found, (trained,))


def sizes(batch: object, micro: object, epochs: object) -> None:
    """Accept positive integers, and a micro-batch that is a part of the batch."""
    batch_size = _count("batch_size", batch)
    _count("epochs", epochs)
    if micro is None:
        return
    micro_size = _count("micro_batch_size", micro)
    given = f"Setup(batch_size={batch_size}, micro_batch_size={micro_size})"
    if micro_size > batch_size:
        raise ConfigurationError(
            f"{given}: a micro-batch is a part of the batch.\n"
            f"Did you mean batch_size={micro_size}, micro_batch_size={batch_size}?"
        )


def _count(name: str, value: object) -> int:
    """Refuse what is not a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        usual = {"epochs": 1, "micro_batch_size": 16}.get(name, 64)
        raise ConfigurationError(
            f"Setup({name}={_shown(value)}): {name} is a positive integer.\nFor example:  {name}={usual}"
        )
    return value


def data(found: object, *, collated: bool) -> None:
    """Accept samples, one by one, and at least one of them."""
    if isinstance(found, DataLoader):
        raise ConfigurationError(
            "Setup(data=DataLoader(...)): data is samples, which are cut into batches here.\n"
            "Pass what the loader was made of:\n"
            "    Setup(data=loader.dataset, collate=loader.collate_fn, ...)"
        )
    if isinstance(found, IterableDataset):
        return
    if isinstance(found, str | bytes | Mapping) or not (hasattr(found, "__getitem__") and hasattr(found, "__len__")):
        raise ConfigurationError(
            f"Setup(data={_shown(found)}): data needs len() and [number], as a torch Dataset or a list of samples has, "
            f"or to be an IterableDataset; this is {_kind(found)}.\n"
            "Of tensors, make a data set:  data=TensorDataset(inputs, labels)\n"
            "Of a generator, make a list:  data=list(samples)"
        )
    if not collated and isinstance(found, list | tuple):
        _refuse_columns(found)
    if not len(found):
        raise ConfigurationError(
            f"Setup(data={type(found).__name__} of length 0): there is nothing to train on.\n"
            "Look at what made it: a path, a filter, a split."
        )


def _refuse_columns(found: Sequence[Any]) -> None:
    """Refuse (inputs, labels), whose two "samples" are all inputs and all labels."""
    few = 1 < len(found) <= _FEW and all(isinstance(each, Tensor) and each.ndim for each in found)
    if few and len({each.shape for each in found}) > 1 and len({len(each) for each in found}) == 1:
        raise ConfigurationError(
            f"Setup(data=({', '.join(f'tensor of {tuple(each.shape)}' for each in found)})): as samples these are "
            f"{len(found)}, not {len(found[0])}.\nMake a data set of them:  data=TensorDataset(inputs, labels)"
        )


def functions(**found: object) -> None:
    """Accept what can be called as it will be."""
    for name, function in found.items():
        if function is None:
            continue
        arguments = _CALLS[name]
        if name == "loss_fn" and _is_criterion(function):
            criterion = getattr(function, "__name__", type(function).__name__)
            raise ConfigurationError(
                f"Setup({name}={criterion}): it is called as {name}({arguments}), and {criterion} takes outputs and "
                f"targets.\nCall it in a function:\n{LOSS_FN}"
            )
        if not callable(function):
            raise ConfigurationError(
                f"Setup({name}={_shown(function)}): {name} is a function; this is {_kind(function)}.\n"
                f"Write one:  def {name}({arguments}): ..."
            )
        if not takes(function, len(arguments.split(", "))):
            raise ConfigurationError(
                f"Setup({name}=...): it is called as {name}({arguments}), and this one takes "
                f"{inspect.signature(function)}.\nWrite it so:  def {name}({arguments}): ..."
            )


def takes(function: Any, number: int) -> bool:
    """Whether a function can be called with so many arguments; True where Python cannot tell."""
    try:
        inspect.signature(function).bind(*range(number))
    except ValueError:  # some built-in functions have no signature
        return True
    except TypeError:
        return False
    return True


def accumulation(
    optimizers: Any,
    *,
    clip_norm: object,
    scheduler: object,
    scaler: object,
    gradient_dtype: object,
    batch_norm: object,
    skip_nonfinite: object,
) -> None:
    """Accept what an `Accumulator` accepts, now, and not after the first batch was made."""
    arguments.clip_norm(clip_norm)
    arguments.schedulers(scheduler, optimizers if isinstance(optimizers, list | tuple) else (optimizers,))
    arguments.scaler(scaler)
    arguments.gradient_dtype(gradient_dtype)
    if batch_norm not in {"exact", "refuse", "micro"}:
        msg = f'batch_norm must be "exact", "refuse" or "micro"; found {batch_norm!r}'
        raise ConfigurationError(msg)
    arguments.skip_nonfinite(skip_nonfinite)


def loss(name: str, value: Any) -> Tensor:
    """Refuse what is no loss, naming what gave it."""
    gave = f"{name} returned" if name == "loss_fn" else f"{name} is"
    if not isinstance(value, Tensor):
        raise LossError(f"{gave} {_kind(value)}, not a tensor.\n{_advice(name, value)}")
    if value.numel() != 1:
        raise LossError(
            f"{gave} a tensor of shape {tuple(value.shape)}, not one number.\n"
            "Reduce it to a mean or a sum:  loss.mean(), or criterion(..., reduction='mean')"
        )
    if value.is_complex():
        raise LossError(f"{gave} a complex number, {value.dtype}.\nTake loss.real or loss.abs()")
    if not value.requires_grad:
        raise LossError(
            f"{gave} a loss without a graph: it was computed under torch.no_grad(), detached, made by "
            "torch.tensor(...), or from frozen parameters.\nCompute it from the model's output with gradients on."
        )
    return value


def _advice(name: str, value: object) -> str:
    """What to return instead of something that is no tensor."""
    if hasattr(value, "loss"):
        return "Return its loss:  return model(**batch).loss"
    if value is None and name == "loss_fn":
        return "Does it end with `return loss`?"
    if value is None:
        return "A model that computes its own loss needs the labels among the names of its batch."
    if isinstance(value, float | int):
        return "Leave it a tensor, which knows its gradients: no .item(), no float()."
    return f"Return the loss alone:\n{LOSS_FN}"


def _is_criterion(function: object) -> bool:
    """Tell nn.CrossEntropyLoss() and F.cross_entropy, which take outputs and targets."""
    home = type(function).__module__ if isinstance(function, nn.Module) else getattr(function, "__module__", "")
    return home in {"torch.nn.modules.loss", "torch.nn.functional"}


def _shown(value: object) -> str:
    """A value as it would be typed, where that is short, or its type."""
    if isinstance(value, type):
        return value.__name__
    return repr(value) if isinstance(value, str | int | float | None) else f"{type(value).__name__}(...)"


def _kind(value: object) -> str:
    """What a value is: a dict, the class Linear, None."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
