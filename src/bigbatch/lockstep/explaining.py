"""What torch says of a graph that micro-batches share by mistake, and what it means where they take turns."""

from bigbatch.errors import BigBatchError, LossError

_KEPT = (
    "a micro-batch's loss goes back through a graph that was gone back through before. Micro-batches take turns at "
    "BatchNorm and across, and share the model: what it keeps in an attribute while it runs (self.features, self.aux), "
    "and loss_fn reads afterwards, is that of the micro-batch which ran last. Or loss_fn runs a backward of its own. "
    "Nothing was stepped.\n"
    "Return it from forward:  return logits, features; and compute what has a gradient inside of loss_fn, not before."
)
_IN_PLACE = (
    "a tensor that a gradient needs was changed in place. Where micro-batches take turns at BatchNorm or across, that "
    "may be the batch, of which each is a part, or what they share. Nothing was stepped. torch said: {said}\n"
    "Write x = (x - mean) / std instead of x.sub_(mean).div_(std), or clone it first."
)


def explained(error: BaseException) -> LossError | None:
    """Return what an error of torch's own means in lock-step, where that is known."""
    if not isinstance(error, RuntimeError) or isinstance(error, BigBatchError):
        return None
    said = str(error)
    if "backward through the graph a second time" in said:
        return LossError(_KEPT)
    if "modified by an inplace operation" in said:
        return LossError(_IN_PLACE.format(said=said.partition(". Hint")[0]))
    return None
