"""What the reader says when it refuses a loss: what was found, and the line that settles it."""

from collections.abc import Callable, Sequence

from bigbatch.errors import CoupledLoss, LossError, UnreadableLoss

_N = (
    "# n: what this micro-batch's mean is over, as (labels != -100).sum(), of a causal language model "
    "(labels[:, 1:] != -100).sum(); of one term:  counted(term, n)"
)
_BIG_STEP = "BigStep, which has the whole batch:  step = BigStep(model, optimizer, loss_fn); step(batch)"
_OTHER_MODEL = "Accumulator([model, critic], ...) where it is another model's weight"
_APART = "cannot tell whether the samples of this loss stay apart:"
_OVER = "cannot tell what this loss was averaged over:"
_WORDS = {
    **dict.fromkeys(("Mm", "Bmm", "Addmm"), "a matrix product of samples with samples"),
    **dict.fromkeys(("Cdist", "Pdist"), "distances between all pairs"),
    **dict.fromkeys(("Softmax", "LogSoftmax"), "a softmax over the batch"),
    **dict.fromkeys(("Mean", "Sum", "Std", "Var"), "a statistic of the batch inside the loss"),
    **dict.fromkeys(("NativeBatchNorm", "CudnnBatchNorm"), "BatchNorm in training mode"),
    **dict.fromkeys(("Slice", "Cat"), "rows shifted against each other"),
    **dict.fromkeys(("Index", "IndexSelect", "Gather"), "rows taken by index and put beside other rows"),
    "Unbind": "rows of a batch taken one by one, not all of them or with others; halves by chunk(2)",
}


def _refused(kind: type[LossError], problem: str, fix: str, *counts: tuple[str, str]) -> LossError:
    """Make an error; `counts` fill in how a count of a loss is typed, in a loop, in a loss_fn, and of one term."""
    error = kind(
        problem,
        fix=fix.format(*(f"accumulator.backward({loss}, count={n})" for loss, n in counts)),
        fix_in_step=fix.format(*(f"return counted({loss}, {n})" for loss, n in counts)),
    )
    error.fix_of_term = fix.format(*(f"counted({'term' if loss == 'loss' else loss}, {n})" for loss, n in counts))
    return error


def _unread(problem: str, instead: str = "", *, kind: type[LossError] = UnreadableLoss) -> Callable[..., LossError]:
    """Make what refuses a loss that a count settles, given the operation's name; `instead` is another way out."""
    fix = f"{instead}{{}}  {_N}"
    return lambda name="": _refused(kind, problem.format(name=name), fix, ("loss", "n"))


unknown = _unread(f"{_APART} found {{name}} between the model and the mean, an operation that bigbatch does not know.")
# A part that was written over in place, where the graph does not say along which dimension.
written = _unread(
    f"{_APART} found {{name}}, a part of a tensor written over in place (out[t] = x).", "torch.stack(parts, dim); or  "
)
# Rows that were put or added up by an index: of a sample's parts, or of labels that samples share.
pooled = _unread(f"{_APART} found {{name}}Backward, which puts rows of the model's output where an index says.")
gradless_factor = _unread(
    f"{_APART} found {{name}}Backward of the model's output with a tensor that has no gradient and is no parameter or "
    "buffer of the model. It may hold other samples (detached keys, targets).",
    f"{_OTHER_MODEL}; or  ",
)
# What was taken for a copy of a frozen weight and was none; on a device that is known late.
other_weight = _unread(
    "in one of the latest micro-batches the model's output was multiplied with a tensor of shape {name} that looked "
    "like autocast's copy of a frozen weight, and is none. If it was made of other samples (detached keys), they are "
    "coupled, and the updates since are not the big batch's.",
    f"{_OTHER_MODEL}; or  ",
)
# A tensor without gradient that has spread the model's output over more places.
expanded = _unread(
    f"{_APART} in {{name}}Backward a tensor without gradient spreads the model's output over more places, as (n, 1) "
    "with (n,) gives (n, n).",
    "prediction.squeeze(1) - target; or  ",
)
lone_rows = _unread("cannot tell which of two means is over the samples: found outputs of one row each, put together.")
# A derivative of a mean inside of a loss.
slope = _unread(
    "a derivative of a mean is part of this loss: found the backward of {name}, which divides by the size of the "
    "micro-batch.",
    "torch.autograd.grad(criterion(model(x), y, reduction='sum'), x, create_graph=True)\n"
    "If the mean is over each sample's own parts:  ",
    kind=CoupledLoss,
)
custom = _unread(f"{_OVER} found {{name}}Backward, a custom or compiled function, which hides its reduction.")
# A count behind a saved-tensor hook.
hidden = _unread(
    f"{_OVER} {{name}}Backward keeps its count behind a saved-tensor hook (a checkpointed or offloaded loss).",
    "a checkpoint of the model alone, without the loss; or  ",
)


def coupled(name: str, *, chosen: bool = False) -> LossError:
    """Refuse samples that meet in the named operation; `chosen`: where an index has chosen rows of a parameter."""
    what = f"{name}Backward ({_WORDS[name]})" if name in _WORDS else f"{name}Backward" if name.isidentifier() else name
    hint = " If the index is always the same:  self.register_buffer('index', index)." if chosen else ""
    if name == "Select":
        hint = " Where steps come before samples, take a step before the last layer:  head(h[-1])."
    problem = f"the samples of this loss are coupled: found {what} below its mean, where it mixes samples.{hint}"
    instead = (
        "across.gather, across.sum or across.mean in a BigStep (docs/coupled.md)\nIf it acts on each sample alone:  "
    )
    return _unread(problem, instead, kind=CoupledLoss)()


def scaled_sum(name: str, by: str) -> LossError:
    """Refuse a factor above a data sum that may be a count or a constant."""
    masked = (name, by) == ("Div", "a tensor")
    found = f"{name}Backward, a sum over data {'divided by' if name == 'Div' else 'times'} {by}"
    fix = f"{{}}  {'# of (x * mask).sum() / mask.sum()' if masked else _N}\nor  counted(term, 'sum') for a constant"
    problem = f"{_OVER} found {found}, which may be a count or a constant."
    return _refused(UnreadableLoss, problem, fix, ("loss", "mask.sum()" if masked else "n"))


def zero_beside_mean() -> LossError:
    """Refuse a loss of zero that does not say how many samples the mean of the others leaves out."""
    return UnreadableLoss(
        f"{_OVER} in one micro-batch of this window it is 0 times something, in another a mean over all samples.",
        fix="(x * mask).mean(), one mean of both; or counted(loss, n), with what the zero was averaged over",
    )


def changing_factor(name: str, before: str, now: str) -> LossError:
    """Refuse a factor that is not constant over the window, as NaN never is."""
    return _refused(
        UnreadableLoss,
        f"the factor of {name} is not the same in all micro-batches of this window: {before} before and {now} now. It "
        "may be a count in disguise.",
        "{}  # if it is meant to differ (mixup): what the loss was averaged over",
        ("loss", "n"),
    )


def nonlinear(name: str) -> LossError:
    """Refuse a function above the mean, which does not add up."""
    if name == "Nansum":
        counts = ("torch.nanmean(x)", "(~x.isnan()).sum()"), ("torch.nansum(x)", "'sum'")
        problem = f"{_OVER} NansumBackward keeps no count of what is not NaN."
        return _refused(UnreadableLoss, problem, "{}\nor  {}", *counts)
    if name in {"Mm", "Bmm", "Mv", "Vdot"}:
        problem = (
            f"cannot tell what this loss was summed over: found {name}Backward, which makes one number of a batch."
        )
        return _refused(UnreadableLoss, problem, "(a * b).sum()\nor  {}", ("loss", "'sum'"))
    return _refused(
        UnreadableLoss,
        f"this loss does not add up over micro-batches: found {name}Backward above its mean: nonlinear in a mean.",
        "f below the mean (for RMSE: F.mse_loss, which has the same minimum); or across.once(f(across.mean(x))) in a "
        "BigStep; counted(term, 'once') for a term of parameters\n"
        "If there is no batch mean below it:  {}",
        ("loss", "n"),
    )


def data_or_constant(name: str) -> LossError:
    """Refuse a sum that may be over data or over constants."""
    return UnreadableLoss(
        f"cannot tell whether this is a sum over data or a regularizer: below {name}Backward parameters meet a tensor "
        "without gradient.",
        fix="counted(term, 'once')  # the same in every micro-batch: it counts once per window\n"
        "or  counted(term, 'sum')  # a sum over this micro-batch's data",
    )


def shared_alone(values: Sequence[float]) -> LossError:
    """Refuse what is made of values of all micro-batches and is not the same in each of them."""
    return UnreadableLoss(
        "this loss is made of values of all micro-batches alone (bigbatch.across), and counts once where it is the "
        "same in each of them. Nothing was changed.",
        found=", ".join(f"{value:.6g}" for value in values[:4]),
        fix="counted(term, n), where it is a mean over n rows of this micro-batch's own, taken out of those of all",
    )


def alone() -> LossError:
    """Refuse `across` outside of a BigStep."""
    return CoupledLoss(
        "an Accumulator gets one micro-batch after the other, and all samples of the big batch were asked for "
        "(bigbatch.across) since the last accumulator.backward: this loss is made of them, or may be.",
        fix=f"{_BIG_STEP}\nFor validation:  with torch.no_grad(): ...",
    )
