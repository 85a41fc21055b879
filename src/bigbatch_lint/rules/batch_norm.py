"""Whether a file's models normalize by batch statistics while they are trained."""

import ast
from functools import lru_cache

from bigbatch_lint.reading.module import Module
from bigbatch_lint.reading.names import BATCH_NORMS, NORMED_NETWORKS, dotted, walk

# What takes BatchNorm out of a network, or stops it from normalizing by the batch.
_REPLACED = {
    "convert_to_groupnorm",
    "batch_norm_to_group_norm",
    "freeze_batch_norm",
    "freeze_bn",
    "convert_frozen_batchnorm",
    "FrozenBatchNorm2d",
}


@lru_cache(maxsize=8)  # asked for each loop of a file
def brings_batch_norm(module: Module, models: frozenset[str]) -> ast.Call | None:
    """Return the first layer or network with BatchNorm; None where it is replaced, frozen or in evaluation mode."""
    modes = {dotted(call.func) for call in module.calls if isinstance(call.func, ast.Attribute)}
    evaluated = {mode[: -len(".eval")] for mode in modes if mode.endswith(".eval")}
    evaluated = {name for name in evaluated if f"{name}.train" not in modes}
    if (models and models <= evaluated) or module.words & _REPLACED or _is_frozen(module):
        return None
    frozen = {
        each
        for node in module.nodes
        if isinstance(node, ast.Assign) and any(dotted(target) in evaluated for target in node.targets)
        for each in walk(node.value)
    }
    return next((call for call in module.calls if call not in frozen and _has_batch_norm(module, call)), None)


def _is_frozen(module: Module) -> bool:
    """Find `if isinstance(module, nn.BatchNorm2d): module.eval()`."""
    if not any("BatchNorm" in word for word in module.words):
        return False
    return any(isinstance(node, ast.If) and "BatchNorm" in ast.unparse(node.test) for node in module.nodes)


def _has_batch_norm(module: Module, call: ast.Call) -> bool:
    name = module.full_name(dotted(call.func)).rpartition(".")[2]
    if any(word.arg == "norm_layer" for word in call.keywords):
        return False
    if name == "create_model" and call.args and isinstance(call.args[0], ast.Constant):
        return bool(NORMED_NETWORKS.search(str(call.args[0].value)))
    return bool(BATCH_NORMS.search(name) or NORMED_NETWORKS.search(name))
