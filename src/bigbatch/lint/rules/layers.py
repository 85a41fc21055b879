"""BB6: layers that see the micro-batch, not the batch."""

import ast
from collections.abc import Iterator

from bigbatch.lint.finding import Severity
from bigbatch.lint.loops.facts import Shape, TrainingLoop
from bigbatch.lint.reading.events import Kind, Via
from bigbatch.lint.reading.program import Program, dotted
from bigbatch.lint.reading.trees import nodes_in
from bigbatch.lint.reading.vocabulary import BATCH_NORMS, NORMED_NETWORKS
from bigbatch.lint.rules.rule import Hit, Rule, Script

# What takes BatchNorm out of a network, or stops it from normalising by the batch.
_REPLACED = {
    "convert_to_groupnorm",
    "batch_norm_to_group_norm",
    "freeze_batch_norm",
    "freeze_bn",
    "convert_frozen_batchnorm",
}


def _batch_norm(script: Script) -> Iterator[Hit]:
    accumulating = [loop for loop in script.loops if loop.accumulates and not _has_engine(loop)]
    loops = [loop for loop in accumulating if not _is_evaluated(script.program, loop)]
    if not loops or _is_frozen(script.program):
        return
    if all(loop.shape is Shape.FRAMEWORK and loop.every is None for loop in loops):
        return  # nobody said that there is more than one micro-batch to a window
    evaluated = _only_evaluated(script.program)
    for call in script.program.calls:
        if call not in evaluated and _brings_batch_norm(script.program, call):
            yield Hit(
                call,
                "BatchNorm normalises by each micro-batch's statistics, not by the big batch's: "
                "accumulation is an approximation here",
            )
            return


def _has_engine(loop: TrainingLoop) -> bool:
    """Tell this library's own loops, which refuse such layers or make them exact, and others that cannot be told."""
    return any(fact.event.via is Via.ENGINE for fact in loop.facts)


def _brings_batch_norm(program: Program, call: ast.Call) -> bool:
    name = program.full_name(dotted(call.func)).rpartition(".")[2]
    if any(word.arg == "norm_layer" for word in call.keywords):
        return False
    if name == "create_model" and call.args and isinstance(call.args[0], ast.Constant):
        return bool(NORMED_NETWORKS.search(str(call.args[0].value)))
    return bool(BATCH_NORMS.search(name) or NORMED_NETWORKS.search(name))


def _modes(program: Program) -> set[str]:
    """Return `model.eval`, `model.train` and all else that is called on something."""
    return {dotted(call.func) for call in program.calls if isinstance(call.func, ast.Attribute)}


def _is_evaluated(program: Program, loop: TrainingLoop) -> bool:
    """Tell whether the models of a loop are put into evaluation mode and never into training mode."""
    models, modes = {fact.event.subject for fact in loop.of(Kind.FORWARD)}, _modes(program)
    return bool(models) and all(f"{name}.eval" in modes and f"{name}.train" not in modes for name in models)


def _only_evaluated(program: Program) -> set[ast.AST]:
    """Return what makes models that are put into evaluation mode and never into training mode."""
    modes = _modes(program)
    return {
        each
        for node in nodes_in(program.tree)
        if isinstance(node, ast.Assign)
        for name in map(dotted, node.targets)
        if f"{name}.eval" in modes and f"{name}.train" not in modes
        for each in nodes_in(node.value)
    }


def _is_frozen(program: Program) -> bool:
    """Tell whether the file puts its BatchNorm layers into evaluation mode, or takes others."""
    if program.words & _REPLACED or "FrozenBatchNorm2d" in program.words:
        return True
    # `if isinstance(module, nn.BatchNorm2d): module.eval()`
    conditions = [node.test for node in nodes_in(program.tree) if isinstance(node, ast.If)]
    return any("BatchNorm" in ast.unparse(test) for test in conditions)


RULES = (
    Rule(
        "BB601",
        "batch-norm-under-accumulation",
        Severity.WARNING,
        "use bigbatch.BigStep, GroupNorm or LayerNorm, or freeze the layers",
        _batch_norm,
    ),
)
