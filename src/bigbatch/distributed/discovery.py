"""A process that was started with others and trains by itself: rarely meant, and told at once."""

import warnings

import torch.distributed as dist

from bigbatch.caller import outside
from bigbatch.distributed.launcher import started

_BY_ITSELF = (
    "this process is one of {size}{how}, and nothing says that they train this model together: each would train one of "
    "its own, on its own batches alone.\n"
    "{begin}Wrap the model first, and make the Accumulator or BigStep after that:  "
    "model = DistributedDataParallel(model), or fully_shard(model). Without a wrapper, say who trains together:  "
    "group=torch.distributed.group.WORLD (for BigStep in Options(group=...)).\n"
    "To train apart on purpose, {apart}filter this warning."
)
_GROUP_OF_ONE = (
    "give a group of one process:  group=torch.distributed.new_group([rank], use_local_synchronization=True); or "
)


def warn_of_others() -> None:
    """Warn where other processes are there, or were started with this one, and it has found none to train with."""
    if dist.is_available() and dist.is_initialized():
        size, how, begin, apart = dist.get_world_size(), "", "", _GROUP_OF_ONE
    else:
        size, how = started(), " that were started together, and torch.distributed is not initialised"
        begin, apart = "Call torch.distributed.init_process_group() first. ", ""
    if size > 1:
        warnings.warn(_BY_ITSELF.format(size=size, how=how, begin=begin, apart=apart), stacklevel=outside())
