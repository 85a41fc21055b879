"""What things are called in training scripts, for where nothing but a name is left to go by."""

import re
from functools import lru_cache

from bigbatch.lint.reading.things import Role

ACCUMULATION = re.compile(
    r"accum|grad(ient)?_?acc|(^|_)acc_?(steps|iters?|grad|n)|micro_?(steps|batch_?(num|count))|(n|num)_?micro|"
    r"update_?(freq|every|interval)|iter_?size|steps_per_update|virtual_batch|subdivisions|(^|_)gas$|batches_per_(step|update)",
    re.IGNORECASE,
)
PIECES = re.compile(r"micro|chunk|window|split|group|shard|pieces|(^|_)mbs?$|(^|_)mini_?batch", re.IGNORECASE)
ENDLESS = re.compile(r"infinite|endless|forever|cycle", re.IGNORECASE)
LAST = re.compile(r"last|len|num|n_|_n|total|max|end|count|per_epoch|size", re.IGNORECASE)
MASKS = re.compile(r"mask|(^|_)valid($|_)|not_?pad|non_?pad|(^|_)keep($|_)", re.IGNORECASE)
PADDED_MODELS = re.compile(r"For(CausalLM|ConditionalGeneration|Seq2SeqLM|MaskedLM|TokenClassification)$|LMHeadModel$")
BATCH_NORMS = re.compile(r"^(Sync|Lazy)?BatchNorm([123]d)?$")
NORMED_NETWORKS = re.compile(
    r"^(wide_)?res(net|next)\w*$|^densenet\d+$|^mobilenet\w*$|^efficientnet\w*$|^mnasnet\w*$|^shufflenet\w*$|"
    r"^googlenet$|^inception_v3$|^vgg\d+_bn$|^regnet\w*$",
)

LOSSES = re.compile(r"(^|_)loss(es)?(_?\w{1,3})?$|^loss_|^losses$", re.IGNORECASE)

_ROLES: tuple[tuple[Role, re.Pattern[str]], ...] = (
    (Role.SCALER, re.compile(r"(grad|amp|loss)?_?scaler$", re.IGNORECASE)),
    (Role.SCHEDULER, re.compile(r"sched|^warm_?up(er)?$|lr_(decay|warmup)$", re.IGNORECASE)),
    (Role.OPTIMIZER, re.compile(r"optimi[sz]er|(^|_)opt(im)?s?($|_|[A-Z0-9])", re.IGNORECASE)),
    (Role.ACCELERATOR, re.compile(r"^accelerator$", re.IGNORECASE)),
    (Role.FABRIC, re.compile(r"^fabric$", re.IGNORECASE)),
    (Role.ENGINE, re.compile(r"engine|^accumulator$|deepspeed", re.IGNORECASE)),
    (Role.CRITERION, re.compile(r"^criterion|(^|_)loss_?(fn|func|fun|function|fct|module|criterion)$", re.IGNORECASE)),
    (Role.MODEL, re.compile(r"(^|_)(model|net|network|ddp|backbone|encoder|generator|discriminator)($|_)|^net[A-Z]")),
    (Role.MASK, MASKS),
)


def last_part(text: str) -> str:
    """Return `optimizer` of `self.optimizer` and of `optimizers[0]`."""
    return text.split("[", 1)[0].rpartition(".")[2]


@lru_cache(maxsize=4096)
def role_of_name(text: str) -> Role | None:
    """Say what something is for by what it is called."""
    name = last_part(text)
    return next((role for role, pattern in _ROLES if pattern.search(name)), None)


_KEYS = re.compile(r"(^|\.)(batch|data|inputs?|samples?|items?|examples?|mb|micro_?batch)\w*\[['\"](\w+)['\"]\]$")


@lru_cache(maxsize=4096)
def names_mask(text: str) -> bool:
    """Tell `batch['mask']`, a part of the data, from a loss or prediction that is called so."""
    found = _KEYS.search(text)
    return found is not None and bool(MASKS.search(found[3])) and (found[3] == "loss_mask" or "loss" not in found[3])


@lru_cache(maxsize=4096)
def counts_micro_batches(text: str) -> bool:
    """Tell whether a name announces a window: `accumulation_steps`, `grad_acc`, `update_freq`."""
    return bool(ACCUMULATION.search(text))
