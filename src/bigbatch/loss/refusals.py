"""What the reader says when it refuses a loss: what was found, why it matters, the line that settles it."""

from collections.abc import Sequence

from bigbatch.errors import CoupledLoss, UnreadableLoss

_COUNT = """Say what the loss was averaged over:
    accumulator.backward(loss, count=n)          # n: how many things this micro-batch's mean is over
for example
    accumulator.backward(loss, count=(labels != -100).sum())          # causal language models: labels[:, 1:]
and where it is one term of several, counted(term, n) in its place."""

_NO_MEAN = """If there is no batch mean below it, say what the loss is over:
    accumulator.backward(loss, count=n)          # and a term of parameters alone: counted(term, 'once')"""

_STEPS = (
    "Where steps come before samples, as batch_first=False has them, take a step before the last layer:  head(h[-1])\n"
)

_WORDS = {
    "Mm": "a matrix product of samples with samples",
    "Bmm": "a matrix product of samples with samples",
    "Addmm": "a matrix product of samples with samples",
    "Cdist": "distances between all pairs",
    "Pdist": "distances between all pairs",
    "Softmax": "a softmax over the batch",
    "LogSoftmax": "a softmax over the batch",
    "Sort": "sorting across the batch",
    "Topk": "choosing the largest across the batch",
    "Cumsum": "a running sum across the batch",
    "Mean": "a mean over the batch inside the loss",
    "Sum": "a sum over the batch inside the loss",
    "Std": "a standard deviation over the batch",
    "Var": "a variance over the batch",
    "NativeBatchNorm": "BatchNorm in training mode",
    "CudnnBatchNorm": "BatchNorm in training mode",
    "Slice": "rows shifted against each other",
    "Index": "rows taken by index and put beside other rows",
    "IndexSelect": "rows taken by index and put beside other rows",
    "Gather": "rows taken by index and put beside other rows",
    "Unbind": "some rows of a batch without the others",
    "Cat": "rows put together and then set against each other across the seam",
}


def coupled(name: str, *, chosen: bool = False) -> CoupledLoss:
    """Explain that samples meet in the named operation; `chosen`: where an index has chosen rows of a parameter."""
    fixed = "If the index is always the same, make it the model's own:  self.register_buffer('index', index)\n"
    what = f"{name}Backward ({_WORDS[name]})" if name in _WORDS else f"{name}Backward" if name.isidentifier() else name
    return CoupledLoss(
        f"the samples of this loss are coupled: found {what} below its mean, where it mixes samples.\n"
        "A micro-batch cannot know the samples of the others, so no weights make the parts add up to the big batch's "
        "gradient.\n"
        "In a BigStep micro-batches can meet: have the loss set its own samples against all with across.gather, "
        f"across.sum or across.mean (docs/coupled.md).\n{fixed if chosen else ''}"
        f"{_STEPS if name == 'Select' else ''}If this operation really acts on each sample alone, say so:\n"
        "    accumulator.backward(loss, count=n)          # n: how many things this micro-batch's mean is over"
    )


def unknown(name: str) -> UnreadableLoss:
    """Explain that an operation below the mean is unknown."""
    return UnreadableLoss(
        f"cannot tell whether the samples of this loss stay apart: found {name} between the model and the mean, an "
        f"operation that bigbatch knows nothing about.\n{_COUNT}"
    )


def written(name: str) -> UnreadableLoss:
    """Explain that a part was written over in place, and that the graph does not say where."""
    return UnreadableLoss(
        f"cannot tell whether the samples of this loss stay apart: found {name}, a part of a tensor written over in "
        "place (out[t] = x). The graph does not say along which dimension, where several are as large as the part.\n"
        "Put the parts together instead:  torch.stack(parts, dim)\n"
        f"If each sample has its own alone:\n{_COUNT}"
    )


def pooled(name: str) -> UnreadableLoss:
    """Explain that rows were put or added up by an index, of a sample's parts or of labels that samples share."""
    return UnreadableLoss(
        f"cannot tell whether the samples of this loss stay apart: found {name}Backward, which puts rows of the "
        "model's output where an index says. Each sample's own (nodes of a graph, rows of an expert) leave samples "
        "apart; a label that several samples share, or another order, does not.\n"
        f"If every sample gets its own:\n{_COUNT}"
    )


def gradless_factor(name: str) -> UnreadableLoss:
    """Explain that a factor without gradient may be a frozen weight or other samples."""
    return UnreadableLoss(
        f"cannot tell whether the samples of this loss stay apart: found {name}Backward of the model's output with a "
        "tensor that has no gradient and is no parameter or buffer of the model. A frozen weight leaves samples apart; "
        "other samples (detached keys, targets) do not. If it is the weight of another model, name that model, too:  "
        f"Accumulator([model, critic], ...)\n{_COUNT}"
    )


def other_weight(sizes: tuple[int, ...]) -> UnreadableLoss:
    """Explain that what was taken for a copy of a frozen weight was none; on a device that is heard late."""
    return UnreadableLoss(
        f"in one of the latest micro-batches the model's output was multiplied with a tensor of shape {sizes} that "
        "looked like autocast's copy of a frozen weight, and is none. If it was made of other samples (detached keys), "
        "they are coupled, and the updates since are not the big batch's.\n"
        f"If it is the weight of another model, name that model, too:  Accumulator([model, critic], ...)\n{_COUNT}"
    )


def expanded(name: str) -> UnreadableLoss:
    """Explain that a tensor without gradient has spread the model's output over more places."""
    return UnreadableLoss(
        f"cannot tell whether the samples of this loss stay apart: in {name}Backward a tensor without gradient spreads "
        "the model's output over more places, as (n, 1) with (n,) gives (n, n). That sets every sample against every "
        "other.\n"
        "If the shapes were meant to be equal, make them so:  prediction.squeeze(1) - target\n"
        f"If each sample is only set against things of its own:\n{_COUNT}"
    )


def lone_rows() -> UnreadableLoss:
    """Explain that one of two means is over a batch of one, or over rows that came one by one."""
    return UnreadableLoss(
        "cannot tell which of two means is over the samples: found outputs of one row each, put together by stack, cat "
        "or view. They may be several outputs of one sample or one output of several.\n"
        f"{_COUNT}"
    )


def slope(name: str) -> CoupledLoss:
    """Explain that a derivative of a mean is inside of a loss."""
    return CoupledLoss(
        f"a derivative of a mean is part of this loss: found the backward of {name}, which divides by the size of the "
        "micro-batch. The big batch would divide by its own.\n"
        "Take the derivative of a sum, which is each sample's own:\n"
        "    torch.autograd.grad(criterion(model(x), y, reduction='sum'), x, create_graph=True)\n"
        f"If the mean is over each sample's own parts:\n{_COUNT}"
    )


def scaled_sum(name: str, by: str) -> UnreadableLoss:
    """Explain that a factor above a data sum may be a count or a constant."""
    verb = "divided by" if name == "Div" else "times"
    masked = (name, by) == ("Div", "a tensor")
    line = "Of (x * mask).sum() / mask.sum():  accumulator.backward(loss, count=mask.sum())\n" if masked else ""
    return UnreadableLoss(
        f"cannot tell what this loss was averaged over: found {name}Backward, a sum over data {verb} {by}. That may be "
        "a count, which differs from micro-batch to micro-batch, or a constant, which does not.\n"
        f"{line}{_COUNT}\n"
        "If it is a constant, say that this is a plain sum:  counted(term, 'sum')"
    )


def zero_beside_mean() -> UnreadableLoss:
    """Explain that a loss of zero does not say how many samples the mean of the others leaves out."""
    return UnreadableLoss(
        "cannot tell what this loss was averaged over: in one micro-batch of this window it is 0 times something, in "
        "another a mean over all samples, to which those of the first belong.\n"
        "Write the mean of both as one, (x * mask).mean(), or say what the zero was averaged over:  counted(loss, n)"
    )


def changing_factor(name: str, before: str, now: str) -> UnreadableLoss:
    """Explain that a factor is not constant over the window, as NaN never is."""
    if "nan" in now.split(" x "):
        return UnreadableLoss(
            f"this loss is multiplied by NaN: the factor of {name} is {now}, and so would its gradient be.\n"
            "Look at what computes the factor: 0 / 0, inf - inf, the mean of no elements."
        )
    return UnreadableLoss(
        f"the factor of {name} is not the same in all micro-batches of this window: {before} before and {now} now. The "
        "big batch has one factor, so this may be a count in disguise.\n"
        "If it is meant to differ (mixup), say what the loss was averaged over:\n"
        "    accumulator.backward(loss, count=n)"
    )


def nonlinear(name: str, *, root: bool = False) -> UnreadableLoss:
    """Explain that a function above the mean does not add up; `root`: that it is a root, as of RMSE."""
    if root:
        return UnreadableLoss(
            f"this loss does not add up over micro-batches: found {name}Backward above its mean. It is nonlinear in a "
            "mean: the root of a mean (RMSE) is not the mean of the micro-batches' roots.\n"
            "Train on the mean itself, which has the same minimum, and report its root:\n"
            "    loss = F.mse_loss(prediction, target)          # and update.loss.sqrt()\n"
            "or, in a BigStep:  across.once(across.mean(F.mse_loss(prediction, target)).sqrt())\n"
            f"{_NO_MEAN}"
        )
    if name == "Nansum":
        return UnreadableLoss(
            "cannot tell what this loss was averaged over: found NansumBackward, which keeps no count of what is not "
            "NaN.\n"
            "Give the count of a mean, or say that it is a sum:\n"
            "    accumulator.backward(torch.nanmean(x), count=(~x.isnan()).sum())\n"
            "    accumulator.backward(torch.nansum(x), count='sum')"
        )
    if name in {"Mm", "Bmm", "Mv"}:
        return UnreadableLoss(
            f"cannot tell what this loss was summed over: found {name}Backward, a matrix product that makes one number "
            "of a whole batch, as torch.einsum('bi,bi->', a, b) does.\n"
            "Write it as a sum of products:  (a * b).sum()\n"
            f"or say what it is over:\n    accumulator.backward(loss, count='sum')"
        )
    return UnreadableLoss(
        f"this loss does not add up over micro-batches: found {name}Backward above its mean, and a function of a mean "
        "is not the mean of the function (the root of a mean, a product of means).\n"
        "Apply the function to each sample below the mean, if that serves; or, in a BigStep, to the mean over all "
        "micro-batches:  across.once(f(across.mean(x)))\n"
        f"{_NO_MEAN}"
    )


def custom(name: str) -> UnreadableLoss:
    """Explain that a custom or compiled function hides its reduction."""
    kind = "a compiled function" if name == "CompiledFunction" else "a custom function"
    return UnreadableLoss(
        f"cannot tell what this loss was averaged over: found {name}Backward, {kind}, which hides its reduction.\n"
        f"{_COUNT}"
    )


def hidden(name: str) -> UnreadableLoss:
    """Explain that the count is behind a saved-tensor hook."""
    return UnreadableLoss(
        f"cannot tell what this loss was averaged over without computing it again: {name}Backward keeps its count "
        "behind a saved-tensor hook (a checkpointed or offloaded loss).\n"
        f"Take the loss out of the checkpoint (checkpoint the model alone), or:\n{_COUNT}"
    )


def data_or_constant(name: str) -> UnreadableLoss:
    """Explain that a sum may be over data or over constants."""
    return UnreadableLoss(
        f"cannot tell whether this is a sum over data or a regulariser: below {name}Backward parameters meet a tensor "
        "without gradient, which may be data or a constant.\n"
        "Say which:\n"
        "    counted(term, 'once')     # the same in every micro-batch: counts once per window\n"
        "    counted(term, 'sum')      # a sum over this micro-batch's data"
    )


def shared_alone(values: Sequence[float]) -> UnreadableLoss:
    """Explain that what is made of values of all micro-batches is not the same in each of them."""
    return UnreadableLoss(
        "this loss is made of values of all micro-batches alone (bigbatch.across), and counts once where it is the "
        f"same in each of them; found {', '.join(f'{value:.6g}' for value in values[:4])}. Nothing was changed.\n"
        "Where it is a mean over n rows of this micro-batch's own, taken out of those of all:  counted(term, n)"
    )


def asked_since() -> CoupledLoss:
    """Explain that something asked for all samples, and that it may have been this loss."""
    return CoupledLoss(
        "all samples of the big batch were asked for (bigbatch.across) since the last accumulator.backward, and an "
        "Accumulator gets one micro-batch after the other. What was asked has no gradient, so nothing shows whether "
        "this loss is made of it.\n"
        "Use BigStep, which has the whole batch:  step = BigStep(model, optimizer, loss_fn); step(batch)\n"
        "If it was validation, have no gradients there:  with torch.no_grad(): ..."
    )


def alone() -> CoupledLoss:
    """Explain that across needs a BigStep."""
    return CoupledLoss(
        "this loss asks for all samples of the big batch (bigbatch.across), and an Accumulator gets one micro-batch "
        "after the other.\n"
        "Use BigStep, which has the whole batch:  step = BigStep(model, optimizer, loss_fn); step(batch)"
    )
