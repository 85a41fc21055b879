"""What things are called in training scripts, for where nothing but a name is left to go by."""

import ast
import re
from functools import cache, lru_cache
from typing import Literal

# What a thing is for. A count is of what a mask leaves; a context is of a `with`.
Role = Literal[
    "scaler", "scheduler", "optimizer", "accelerator", "fabric", "engine", "criterion", "model", "mask", "count",
    "gradient", "context",
]  # fmt: skip

_STEPS = re.compile(
    r"accum|grad(ient)?_?acc|(^|_)acc_?(steps|iters?|grad|n)|micro_?(steps|batch_?(num|count))|(n|num)_?micro|"
    r"update_?(freq|every|interval)|iter_?size|steps_per_update|virtual_batch|subdivisions|(^|_)gas$|batches_per_(step|update)",
    re.IGNORECASE,
)
_HARMLESS = {*"isinstance hasattr getattr is_available is_initialized len get_rank get_world_size bool".split()}
_FLAGS = re.compile(r"accumulator$|accumulate$")
PIECES = re.compile(r"micro|chunk|window|split|group|shard|pieces|(^|_)mbs?$|(^|_)mini_?batch", re.IGNORECASE)
_MASKS = re.compile(r"mask|(^|_)valid($|_)|not_?pad|non_?pad|(^|_)keep($|_)", re.IGNORECASE)
_KEYS = re.compile(r"(^|\.)(batch|data|inputs?|samples?|items?|examples?|mb|micro_?batch)\w*\[['\"](\w+)['\"]\]$")
NORMED = re.compile(  # layers and networks with BatchNorm
    r"^(Sync|Lazy)?BatchNorm([123]d)?$|^(wide_)?res(net|next)\w*$|^densenet\d+$|^mobilenet\w*$|^efficientnet\w*$|^mnasnet\w*$|"
    r"^shufflenet\w*$|^googlenet$|^inception_v3$|^vgg\d+_bn$|^regnet\w*$"
)
_LOSSES = re.compile(r"(^|_)loss(es)?(_?\w{1,3})?$|^loss_|^losses$", re.IGNORECASE)
_ROLES: dict[Role, str] = {
    "scaler": r"(?i)(grad|amp|loss)?_?scaler$",
    "scheduler": r"(?i)sched|^warm_?up(er)?$|lr_(decay|warmup)$",
    "optimizer": r"(?i)optimi[sz]er|(^|_)opt(im)?s?($|_|[A-Z0-9])",
    "accelerator": r"(?i)^accelerator$",
    "fabric": r"(?i)^fabric$",
    "engine": r"(?i)engine|^accumulator$|deepspeed",
    "criterion": r"(?i)^criterion|(^|_)loss_?(fn|func|fun|function|fct|module|criterion)$",
    "model": r"(^|_)(model|net|network|ddp|backbone|encoder|generator|discriminator)($|_)|^net[A-Z]",
    "mask": f"(?i){_MASKS.pattern}",
}
# What a function makes, by its name.
_MAKERS: dict[Role, str] = {
    "scaler": r"^(Sharded)?GradScaler$",
    "fabric": r"^Fabric$",
    "engine": r"^(Accumulator|BigStep)$",
    "optimizer": r"^\w*(Adam\w*|SGD\w*|RMSprop|Adagrad|Adadelta|Rprop|LBFGS|ASGD|Lion\w*|LAMB|Lamb|LARS|Muon|Adafactor|"
    r"Sophia\w*|Optimizer)$|^(create|build|make|get|configure)_optimi[sz]ers?$",
    "scheduler": r"^\w*(LR|Scheduler|Schedule|WarmRestarts)$|^get_\w*schedule\w*$|^(create|build|make)_\w*sched\w*$",
    "model": r"^(DataParallel|FullyShardedDataParallel|FSDP|fully_shard|create_model|from_pretrained|Sequential|Linear|"
    r"DistributedDataParallel|DDP)$",
}


@cache
def dotted(node: ast.AST | None) -> str:
    """Return `a.b['c']` of a name, its attributes and constant keys; an empty text of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    base = dotted(node.value) if isinstance(node, (ast.Attribute, ast.Subscript)) else ""
    if base and isinstance(node, ast.Attribute):
        return f"{base}.{node.attr}"
    if base and isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return f"{base}[{node.slice.value!r}]"
    return ""


@cache
def children(node: ast.AST) -> list[ast.AST]:
    """Return what stands right below a node, without the mark whether a name is read or bound."""
    return [each for each in ast.iter_child_nodes(node) if not isinstance(each, ast.expr_context)]


@cache
def walk(node: ast.AST) -> list[ast.AST]:
    """Return a node and all below it, as `ast.walk` does."""
    below = [node]
    for each in below:  # grows on the way
        below += children(each)
    return below


@cache
def source_of(node: ast.AST) -> str:
    """Return an expression as it may be written."""
    return ast.unparse(node)


@cache
def targets(node: ast.AST) -> frozenset[str]:
    """Return the names that are bound below a node, with all their beginnings."""
    stored = [each for each in walk(node) if isinstance(getattr(each, "ctx", None), ast.Store)]
    return frozenset(dotted(part) for each in stored for part in walk(each)) - {""}


@cache
def mentions(node: ast.AST) -> tuple[frozenset[str], bool]:
    """Return the names in an expression with all their beginnings, and whether it calls something."""
    below = walk(node)
    calls = {last_part(dotted(each.func)) for each in below if isinstance(each, ast.Call)}
    return frozenset(map(dotted, below)) - {""}, not calls <= _HARMLESS


def forget_nodes() -> None:
    """Forget what was noted on the nodes of a file."""
    for noted in (dotted, children, walk, targets, source_of, mentions):
        noted.cache_clear()


def called_name(call: ast.Call) -> str:
    """Return `step` of `self.optimizer.step()`."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else dotted(call.func)


@lru_cache(maxsize=8192)
def last_part(text: str) -> str:
    """Return `optimizer` of `self.optimizer` and of `optimizers[0]`."""
    return text.split("[", 1)[0].rpartition(".")[2]


@lru_cache(maxsize=8192)
def role_of(text: str) -> Role | None:
    """Return what a thing is for by its name."""
    name = last_part(text)
    return next((role for role, pattern in _ROLES.items() if re.search(pattern, name)), None)


@lru_cache(maxsize=8192)
def role_made_by(name: str) -> Role | None:
    """Return what a function makes by its name."""
    return next((role for role, pattern in _MAKERS.items() if re.search(pattern, name)), None)


@lru_cache(maxsize=8192)
def is_loss(text: str) -> bool:
    """Tell whether a name is that of a loss."""
    return bool(_LOSSES.search(last_part(text)))


@lru_cache(maxsize=8192)
def announces_steps(text: str) -> bool:
    """Tell whether a name announces a window: `accumulation_steps`, `grad_acc`, `update_freq`."""
    return bool(_STEPS.search(text))


def counts_steps(text: str) -> bool:
    """Tell whether a name holds the number of micro-batches of a window."""
    name = last_part(text)
    return announces_steps(name) and role_of(name) is None and not _FLAGS.search(name)


def is_mask_key(text: str) -> bool:
    """Tell `batch['mask']`, a part of the data, from a loss or prediction that is called so."""
    found = _KEYS.search(text)
    return found is not None and bool(_MASKS.search(found[3])) and (found[3] == "loss_mask" or "loss" not in found[3])
