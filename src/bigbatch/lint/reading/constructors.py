"""Calls that make the objects of a training script: what is made is told by the class's name."""

import ast
import math
import re
from collections.abc import Callable

from bigbatch.lint.reading.called import Called
from bigbatch.lint.reading.program import dotted
from bigbatch.lint.reading.tensor_calls import masked_by, reduction_of
from bigbatch.lint.reading.things import Computed, Role, Thing, computed
from bigbatch.lint.reading.trees import nodes_in
from bigbatch.lint.reading.values import Number, Numbered, Rows, Several, Unknown, Value
from bigbatch.lint.reading.walk import Walk

_OPTIMIZERS = re.compile(
    r"^\w*(Adam\w*|SGD\w*|RMSprop|Adagrad|Adadelta|Rprop|LBFGS|ASGD|Lion\w*|LAMB|Lamb|LARS|Muon|Adafactor|Sophia\w*|"
    r"Optimizer)$|^(create|build|make|get|configure)_optimi[sz]ers?$"
)
_SCHEDULERS = re.compile(
    r"^\w*(LR|Scheduler|Schedule|WarmRestarts|SequentialLR)$|^get_\w*schedule\w*$|^(create|build|make)_\w*sched\w*$"
)
_WRAPPERS = {"DistributedDataParallel", "DDP"}
_MODELS = re.compile(
    r"^(DataParallel|FullyShardedDataParallel|FSDP|fully_shard|create_model|from_pretrained|Sequential|Linear)$"
)
_BY_NAME = ((Role.OPTIMIZER, _OPTIMIZERS), (Role.SCHEDULER, _SCHEDULERS), (Role.MODEL, _MODELS))
_SHAPES = {"randn", "rand", "zeros", "ones", "empty", "randint", "arange", "rand_like", "randn_like"}
_ENDLESS = {"cycle", "repeat", "count"}
# What cuts a batch, or a loader, into windows.
_CUTTERS = {
    "chunk",
    "split",
    "tensor_split",
    "batched",
    "chunked",
    "grouper",
    "ichunked",
    "islice",
    "sliced",
    "array_split",
}
_WRAPS = {
    "tqdm",
    "trange",
    "track",
    "iter",
    "list",
    "cycle",
    "set_epoch",
    "prefetch",
    "log_every",
    "progress_bar",
    "tnrange",
}


_ENDLESS_WORDS = {"endless", "infinite", "repeat", "forever", "loop_forever"}


def constructed(walk: Walk, called: Called) -> Value | None:
    """Return the object that a call makes; None if the name tells nothing."""
    if called.name == "repeat" and isinstance(called.receiver, Computed):  # `loss.repeat(2)` makes no stream
        return None
    if any(word.arg in _ENDLESS_WORDS and getattr(word.value, "value", False) is True for word in called.node.keywords):
        return Rows(None, endless=True)
    builder = _BUILDERS.get(called.name)
    if builder is not None:
        return builder(walk, called)
    if called.name.endswith("Loss") and called.name[0].isupper():
        reduction = reduction_of(called.node)
        masked = masked_by(walk, called.node, called.name) if reduction == "mean" else None
        return Thing(Role.CRITERION, called.name, called.node, detail=reduction, masked=masked)
    role = next((role for role, pattern in _BY_NAME if pattern.search(called.name)), None)
    return Thing(role, called.name, called.node) if role is not None else None


def _accelerator(walk: Walk, called: Called) -> Value:
    steps = next((word for word in called.node.keywords if word.arg == "gradient_accumulation_steps"), None)
    number = walk.number(called.words["gradient_accumulation_steps"], steps.value) if steps is not None else None
    plugin = called.words.get("gradient_accumulation_plugin")
    if isinstance(plugin, Thing):
        number = plugin.steps
    # An engine inside Accelerate accumulates by itself.
    unseen = any(word == "**" or word.startswith(("deepspeed", "megatron")) for word in called.words)
    return Thing(Role.ACCELERATOR, called.name, None if unseen else called.node, steps=number)


def _plugin(walk: Walk, called: Called) -> Value:
    given = called.words.get("num_steps", called.args[0] if called.args else Unknown())
    nodes = [*called.node.args[:1], *(word.value for word in called.node.keywords if word.arg == "num_steps")]
    number = walk.number(given, nodes[-1]) if nodes else None
    return Thing(Role.CONTEXT, called.name, called.node, steps=number)


def _wrapped(_: Walk, called: Called) -> Value:
    return Thing(Role.MODEL, called.name, called.node, detail="ddp")


def _shape(_: Walk, called: Called) -> Value | None:
    """Return the rows of `torch.randn(1000, 10)` and its like."""
    given: Value = called.first()
    if called.name == "randint":
        sizes = [each for each in (*called.args, called.words.get("size")) if isinstance(each, Several)]
        given = sizes[0] if sizes else Unknown()
    if isinstance(given, Several) and given.items:
        given = given.items[0]
    if isinstance(given, Number) and given.known is not None:
        return Rows(int(given.known))
    return computed(id(called.node))


def _dataset(_: Walk, called: Called) -> Value:
    first = called.first()
    return first if isinstance(first, Rows) else Rows(None)


def _loader(_: Walk, called: Called) -> Value:
    """Return how many batches a loader has, where samples and batch size are plain numbers."""
    rows, size = called.first(), called.words.get("batch_size", called.args[1] if len(called.args) > 1 else None)
    known = isinstance(rows, Rows) and rows.count is not None and isinstance(size, Number) and size.known
    if not (known and isinstance(rows, Rows) and rows.count is not None and isinstance(size, Number) and size.known):
        return Rows(None)
    batches = rows.count / size.known
    dropped = next((word.value for word in called.node.keywords if word.arg == "drop_last"), ast.Constant(value=False))
    if not isinstance(dropped, ast.Constant) and not batches.is_integer():
        return Rows(None)
    return Rows(math.floor(batches) if getattr(dropped, "value", False) else math.ceil(batches))


def _range(_: Walk, called: Called) -> Value:
    known = [each.known for each in called.args if isinstance(each, Number) and each.known is not None]
    if len(known) != len(called.args) or not known or 0 in known[2:]:
        return Rows(None)
    return Rows(len(range(*map(int, known))))


def _pieces(_: Walk, __: Called) -> Value:
    return Rows(None, cut=True)


def _endless(_: Walk, __: Called) -> Value:
    return Rows(None, endless=True)


def _same(_: Walk, called: Called) -> Value | None:
    return called.first() if isinstance(called.first(), Rows | Numbered) else None


def _numbered(_: Walk, called: Called) -> Value:
    return Numbered(called.node)


def _compiled(_: Walk, called: Called) -> Value | None:
    return called.first() if isinstance(called.first(), Thing) else None


def _engine(walk: Walk, called: Called) -> Value:
    """This library's own entrances: they divide by what is really in the window."""
    steps = next((word.value for word in called.node.keywords if word.arg == "steps"), None)
    number = walk.number(called.words["steps"], steps) if steps is not None else None
    return Thing(Role.ENGINE, called.name, called.node, steps=number)


def _deepspeed(walk: Walk, called: Called) -> Value | None:
    if "deepspeed" not in called.full:
        return None
    engine = Thing(Role.ENGINE, "deepspeed", called.node, steps=_configured(walk, called.node))
    return Several((engine, engine, Unknown(), Unknown()))


def _configured(walk: Walk, node: ast.Call) -> Number | None:
    """Return the number of steps in the configuration of DeepSpeed, where that is a dict in the file."""
    given = next((word.value for word in node.keywords if word.arg in {"config", "config_params"}), None)
    if isinstance(given, ast.Name):
        set_to = [
            each.value
            for each in nodes_in(walk.program.tree)
            if isinstance(each, ast.Assign) and any(dotted(target) == given.id for target in each.targets)
        ]
        given = set_to[0] if len(set_to) == 1 else None
    word = "gradient_accumulation_steps"
    for key, value in zip(given.keys, given.values, strict=True) if isinstance(given, ast.Dict) else ():
        known = isinstance(value, ast.Constant) and isinstance(value.value, int)
        if isinstance(key, ast.Constant) and key.value == word and known:
            return Number(word, float(ast.literal_eval(value)), atoms=frozenset({word}))
    return None


def _scaler(_: Walk, called: Called) -> Value:
    return Thing(Role.SCALER, called.name, called.node)


def _fabric(_: Walk, called: Called) -> Value:
    return Thing(Role.FABRIC, called.name, called.node)


_BUILDERS: dict[str, Callable[[Walk, Called], Value | None]] = {
    "GradScaler": _scaler,
    "ShardedGradScaler": _scaler,
    "Accelerator": _accelerator,
    "GradientAccumulationPlugin": _plugin,
    "Fabric": _fabric,
    "Accumulator": _engine,
    "BigStep": _engine,
    "initialize": _deepspeed,
    "compile": _compiled,
    "DataLoader": _loader,
    "TensorDataset": _dataset,
    "range": _range,
    "enumerate": _numbered,
    **dict.fromkeys(_WRAPPERS, _wrapped),
    **dict.fromkeys(_SHAPES, _shape),
    **dict.fromkeys(_CUTTERS, _pieces),
    **dict.fromkeys(_ENDLESS, _endless),
    **dict.fromkeys(_WRAPS - _ENDLESS, _same),
}
