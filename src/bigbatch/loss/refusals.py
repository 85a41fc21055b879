"""What the reader says when it refuses a loss: what was found, why it matters, the line that settles it."""

from collections.abc import Sequence

from bigbatch.errors import CoupledLoss, UnreadableLoss

_N = "# n: what this micro-batch's mean is over, as (labels != -100).sum(); of one term:  counted(term, n)"
_ACROSS = "across.gather, across.sum or across.mean in a BigStep, where micro-batches meet (docs/coupled.md)"
_BIG_STEP = "BigStep, which has the whole batch:  step = BigStep(model, optimizer, loss_fn); step(batch)"

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


def _fixes(text: str, *counts: tuple[str, str]) -> dict[str, str]:
    """Fill in how a count of a loss is typed, in a loop and in a loss_fn."""
    return {
        "fix": text.format(*(f"accumulator.backward({loss}, count={n})" for loss, n in counts)),
        "fix_in_step": text.format(*(f"return counted({loss}, {n})" for loss, n in counts)),
    }


def _unread(problem: str, instead: str = "") -> UnreadableLoss:
    """Refuse a loss that a count settles; `instead` is another way out."""
    before = f"{instead}; or  " if instead else ""
    return UnreadableLoss(problem, **_fixes(f"{before}{{}}  {_N}", ("loss", "n")))


def _untold(problem: str, instead: str = "") -> UnreadableLoss:
    return _unread(f"cannot tell whether the samples of this loss stay apart: {problem}", instead)


def coupled(name: str, *, chosen: bool = False) -> CoupledLoss:
    """Refuse samples that meet in the named operation; `chosen`: where an index has chosen rows of a parameter."""
    what = f"{name}Backward ({_WORDS[name]})" if name in _WORDS else f"{name}Backward" if name.isidentifier() else name
    hint = ""
    if chosen:
        hint = " If the index is always the same:  self.register_buffer('index', index)."
    elif name == "Select":
        hint = " Where steps come before samples, take a step before the last layer:  head(h[-1])."
    return CoupledLoss(
        f"the samples of this loss are coupled: found {what} below its mean, where it mixes samples. No weights make "
        f"the parts add up to the big batch's gradient.{hint}",
        **_fixes(f"{_ACROSS}\nIf it acts on each sample alone:  {{}}  {_N}", ("loss", "n")),
    )


def unknown(name: str) -> UnreadableLoss:
    """Refuse an operation below the mean that is unknown."""
    return _untold(f"found {name} between the model and the mean, an operation that bigbatch knows nothing about.")


def written(name: str) -> UnreadableLoss:
    """Refuse a part that was written over in place, where the graph does not say along which dimension."""
    return _untold(
        f"found {name}, a part of a tensor written over in place (out[t] = x), in a dimension that the graph does not "
        "tell.",
        "torch.stack(parts, dim)",
    )


def pooled(name: str) -> UnreadableLoss:
    """Refuse rows that were put or added up by an index: of a sample's parts, or of labels that samples share."""
    return _untold(
        f"found {name}Backward, which puts rows of the model's output where an index says: in places of each sample's "
        "own, or of labels that several samples share, or in another order."
    )


def gradless_factor(name: str) -> UnreadableLoss:
    """Refuse a factor without gradient, which may be a frozen weight or other samples."""
    return _untold(
        f"found {name}Backward of the model's output with a tensor that has no gradient and is no parameter or buffer "
        "of the model. A frozen weight leaves samples apart; other samples (detached keys, targets) do not.",
        "Accumulator([model, critic], ...) where it is another model's weight",
    )


def other_weight(sizes: tuple[int, ...]) -> UnreadableLoss:
    """Refuse what was taken for a copy of a frozen weight and was none; on a device that is known late."""
    return _unread(
        f"in one of the latest micro-batches the model's output was multiplied with a tensor of shape {sizes} that "
        "looked like autocast's copy of a frozen weight, and is none. If it was made of other samples (detached keys), "
        "they are coupled, and the updates since are not the big batch's.",
        "Accumulator([model, critic], ...) where it is another model's weight",
    )


def expanded(name: str) -> UnreadableLoss:
    """Refuse a tensor without gradient that has spread the model's output over more places."""
    return _untold(
        f"in {name}Backward a tensor without gradient spreads the model's output over more places, as (n, 1) with (n,) "
        "gives (n, n). That sets every sample against every other.",
        "prediction.squeeze(1) - target",
    )


def lone_rows() -> UnreadableLoss:
    """Refuse two means of which one is over a batch of one, or over rows that came one by one."""
    return _unread(
        "cannot tell which of two means is over the samples: found outputs of one row each, put together by stack, cat "
        "or view. They may be several outputs of one sample or one output of several."
    )


def slope(name: str) -> CoupledLoss:
    """Refuse a derivative of a mean inside of a loss."""
    of_sum = "torch.autograd.grad(criterion(model(x), y, reduction='sum'), x, create_graph=True)"
    return CoupledLoss(
        f"a derivative of a mean is part of this loss: found the backward of {name}, which divides by the size of the "
        "micro-batch, where the big batch divides by its own.",
        **_fixes(f"{of_sum}\nIf the mean is over each sample's own parts:  {{}}  {_N}", ("loss", "n")),
    )


def scaled_sum(name: str, by: str) -> UnreadableLoss:
    """Refuse a factor above a data sum that may be a count or a constant."""
    verb = "divided by" if name == "Div" else "times"
    masked = (name, by) == ("Div", "a tensor")
    note = "# of (x * mask).sum() / mask.sum()" if masked else _N
    return UnreadableLoss(
        f"cannot tell what this loss was averaged over: found {name}Backward, a sum over data {verb} {by}. That may be "
        "a count, which differs from micro-batch to micro-batch, or a constant, which does not.",
        **_fixes(f"{{}}  {note}\nor  counted(term, 'sum') for a constant", ("loss", "mask.sum()" if masked else "n")),
    )


def zero_beside_mean() -> UnreadableLoss:
    """Refuse a loss of zero that does not say how many samples the mean of the others leaves out."""
    return UnreadableLoss(
        "cannot tell what this loss was averaged over: in one micro-batch of this window it is 0 times something, in "
        "another a mean over all samples, to which those of the first belong.",
        fix="(x * mask).mean(), one mean of both; or counted(loss, n), with what the zero was averaged over",
    )


def changing_factor(name: str, before: str, now: str) -> UnreadableLoss:
    """Refuse a factor that is not constant over the window, as NaN never is."""
    if "nan" in now.split(" x "):
        return UnreadableLoss(
            f"this loss is multiplied by NaN: the factor of {name} is {now}, and so would its gradient be.\n"
            "Look at what computes the factor: 0 / 0, inf - inf, the mean of no elements."
        )
    return UnreadableLoss(
        f"the factor of {name} is not the same in all micro-batches of this window: {before} before and {now} now. The "
        "big batch has one factor, so this may be a count in disguise.",
        **_fixes("{}  # if it is meant to differ (mixup): what the loss was averaged over", ("loss", "n")),
    )


def nonlinear(name: str, *, root: bool = False) -> UnreadableLoss:
    """Refuse a function above the mean, which does not add up; `root`: it is a root, as of RMSE."""
    if root:
        return UnreadableLoss(
            f"this loss does not add up over micro-batches: found {name}Backward above its mean. It is nonlinear in a "
            "mean: the root of a mean (RMSE) is not the mean of the micro-batches' roots.",
            **_fixes(
                "loss = F.mse_loss(prediction, target)  # which has the same minimum; report update.loss.sqrt(); or "
                "across.once(across.mean(F.mse_loss(prediction, target)).sqrt()) in a BigStep; counted(term, 'once') "
                "for a term of parameters alone\nIf there is no batch mean below it:  {}",
                ("loss", "n"),
            ),
        )
    if name == "Nansum":
        return UnreadableLoss(
            "cannot tell what this loss was averaged over: found NansumBackward, which keeps no count of what is not "
            "NaN.",
            **_fixes("{}\nor  {}", ("torch.nanmean(x)", "(~x.isnan()).sum()"), ("torch.nansum(x)", "'sum'")),
        )
    if name in {"Mm", "Bmm", "Mv"}:
        return UnreadableLoss(
            f"cannot tell what this loss was summed over: found {name}Backward, a matrix product that makes one number "
            "of a whole batch, as torch.einsum('bi,bi->', a, b) does.",
            **_fixes("(a * b).sum()\nor  {}", ("loss", "'sum'")),
        )
    return UnreadableLoss(
        f"this loss does not add up over micro-batches: found {name}Backward above its mean, and a function of a mean "
        "is not the mean of the function (the root of a mean, a product of means).",
        **_fixes(
            "f below the mean; or across.once(f(across.mean(x))) in a BigStep; counted(term, 'once') for a term of "
            "parameters alone\nIf there is no batch mean below it:  {}",
            ("loss", "n"),
        ),
    )


def custom(name: str) -> UnreadableLoss:
    """Refuse a custom or compiled function that hides its reduction."""
    kind = "a compiled function" if name == "CompiledFunction" else "a custom function"
    return _unread(
        f"cannot tell what this loss was averaged over: found {name}Backward, {kind}, which hides its reduction."
    )


def hidden(name: str) -> UnreadableLoss:
    """Refuse a count behind a saved-tensor hook."""
    return _unread(
        f"cannot tell what this loss was averaged over without computing it again: {name}Backward keeps its count "
        "behind a saved-tensor hook (a checkpointed or offloaded loss).",
        "a checkpoint of the model alone, without the loss",
    )


def data_or_constant(name: str) -> UnreadableLoss:
    """Refuse a sum that may be over data or over constants."""
    return UnreadableLoss(
        f"cannot tell whether this is a sum over data or a regularizer: below {name}Backward parameters meet a tensor "
        "without gradient, which may be data or a constant.",
        fix="counted(term, 'once')  # the same in every micro-batch: it counts once per window\n"
        "or  counted(term, 'sum')  # a sum over this micro-batch's data",
    )


def shared_alone(values: Sequence[float]) -> UnreadableLoss:
    """Refuse what is made of values of all micro-batches and is not the same in each of them."""
    return UnreadableLoss(
        "this loss is made of values of all micro-batches alone (bigbatch.across), and counts once where it is the "
        f"same in each of them; found {', '.join(f'{value:.6g}' for value in values[:4])}. Nothing was changed.",
        fix="counted(term, n), where it is a mean over n rows of this micro-batch's own, taken out of those of all",
    )


def asked_since() -> CoupledLoss:
    """Refuse a loss since something asked for all samples: it may have been this loss."""
    return CoupledLoss(
        "all samples of the big batch were asked for (bigbatch.across) since the last accumulator.backward, and an "
        "Accumulator gets one micro-batch after the other. What was asked has no gradient, so nothing shows whether "
        "this loss is made of it.",
        fix=f"{_BIG_STEP}\nFor validation:  with torch.no_grad(): ...",
    )


def alone() -> CoupledLoss:
    """Refuse `across` outside of a BigStep."""
    return CoupledLoss(
        "this loss asks for all samples of the big batch (bigbatch.across), and an Accumulator gets one micro-batch "
        "after the other.",
        fix=_BIG_STEP,
    )
