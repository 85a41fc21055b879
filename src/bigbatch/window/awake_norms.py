"""BatchNorm in training mode normalizes each micro-batch by itself: found, and refused where that is not accepted."""

from collections.abc import Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

from bigbatch.errors import BatchNormError


def batch_norms(modules: Sequence[nn.Module]) -> list[tuple[str, BatchNorm]]:
    """Return the BatchNorm layers of the models, by name."""
    every = [*modules]
    for module in every:  # it grows; names are made where they are asked for, since each window looks
        if isinstance(module, BatchNorm):
            return [(name, m) for model in modules for name, m in model.named_modules() if isinstance(m, BatchNorm)]
        every += [below for below in module._modules.values() if below is not None]  # noqa: SLF001 - as modules() does
    return []


def is_awake(module: BatchNorm) -> bool:
    """Tell whether a BatchNorm normalizes by the batch."""
    return module.training or module.running_mean is None


def refuse_awake(layers: Sequence[tuple[str, BatchNorm]], accepting: str) -> None:
    """Refuse BatchNorm in training mode: it would normalize by the micro-batch."""
    for name, module in layers:
        if is_awake(module):
            why = "is in training mode" if module.training else "keeps no running statistics"
            rest = f"module.eval(), GroupNorm or LayerNorm; or accept the difference:  {accepting}"
            raise BatchNormError(
                f"{type(module).__name__} '{name}' {why}: it normalizes each micro-batch by its own mean and variance, "
                "not the big batch's, so the gradients differ.",
                fix=f"BigStep, which normalizes by the big batch; {rest}",
                fix_in_step=f'batch_norm="exact", which normalizes by the big batch; {rest}',
            )


def refuse_compiled(models: Sequence[nn.Module]) -> None:
    """Refuse BatchNorm in training mode inside compiled code, where micro-batches cannot wait for each other."""
    for name, module in (named for model in models for named in model.named_modules()):
        compiled = type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None)
        if compiled and any(isinstance(m, BatchNorm) and is_awake(m) for m in module.modules()):
            raise BatchNormError(
                f"'{name or type(module).__name__}' is compiled and holds BatchNorm in training mode: inside compiled "
                "code it would normalize by the micro-batch.",
                fix="the model as it was before torch.compile, module.eval() on its BatchNorm, or accept the "
                'difference with Options(batch_norm="micro")',
            )


def unheld(accepting: str, *, given: bool) -> BatchNormError:
    """Refuse BatchNorm that a graph shows: of a model that was not given, or that was not met in lock-step."""
    how = ", in a model that was not given: it normalizes each micro-batch by its own mean and variance, not the big "
    fix = "that model in evaluation mode, discriminator.eval()"
    if given:
        how = " that normalized by the micro-batch: it was called on a thread of the model's own, or does not call "
        fix = "F.batch_norm or nn.BatchNorm on the thread that the model is called on, or freeze it"
    how += "torch.nn.functional.batch_norm." if given else "batch's."
    return BatchNormError(
        f"this loss went through BatchNorm in training mode{how}", fix=f"{fix}; or accept the difference:  {accepting}"
    )
