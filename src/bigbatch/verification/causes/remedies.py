"""What to type against each kind of cause, in a `loss_fn` for BigStep and in a loop of one's own."""

from collections.abc import Sequence

from bigbatch.verification.result import Cause

_SHOWN = 2
_ACROSS = "across.gather(x), across.mean(x), across.sum(x)  (docs/coupled.md)"
_WITHIN = "Or attend, pool and normalize within a sample: over dim=1 and on, not dim=0."
_DRAWN = "Nothing to repair: another split draws other numbers, and the gradients are equal in distribution. Accept it:"
_WEIGHT = "Weight each micro-batch by what its loss was averaged over, of the total of the window:"
_COUNTS = "; count is mask.sum() under a mask, weight[labels].sum() under class weights"
REMEDIES = {  # for BigStep and for a loop; one text where they are the same
    "batch-norm": (
        'Normalize by it:  Options(batch_norm="exact"); or freeze:  model.get_submodule({first!r}).eval()',
        "Use BigStep(model, optimizer, loss_fn), which normalizes by the big batch; or GroupNorm, or LayerNorm.",
    ),
    "randomness": (f"{_DRAWN}  verify(...).raise_if_wrong(allow={{{{'randomness'}}}})",),
    "state": ("Write it after the update, not in forward; or have forward read a copy that only the update changes.",),
    "coupled-samples": (
        f"Use the other samples, inside BigStep:  {_ACROSS}. {_WITHIN}",
        f"No loop over micro-batches can be exact here. Use BigStep, and in there  {_ACROSS}. {_WITHIN}",
    ),
    "wrong-count": (
        "Say what the loss was averaged over:  return counted(loss, {count}){counts}",
        f"{_WEIGHT}  (loss * {{count}} / total).backward(){{counts}}; or accumulator.backward(loss), which reads it.",
    ),
    "precision": (
        "Add up in float32:  Options(gradient_dtype=torch.float32)",
        "Add up in float32, as Accumulator and BigStep do, or train float32 weights under autocast.",
    ),
    "wrong-scale": ("Return the loss as it is, and leave the weights to BigStep:  return loss, or counted(loss, n)",),
    "dropped-micro-batch": ("Leave gradients alone in loss_fn and in hooks.",),
    "stepped-inside": ("Step once in a window:  if (i + 1) % {steps} == 0: optimizer.step(); optimizer.zero_grad()",),
    "clipping": (
        "Pass clip_norm to BigStep, which clips the big batch's gradient.",
        "Clip once in a window, after the last backward and right before optimizer.step().",
    ),
    "nondeterminism": ("Try torch.use_deterministic_algorithms(True), and draw from torch's default generators.",),
    "unknown": ("",),
}
ASKED = (
    "The loss uses all samples already; check what it does with them. Rows of own samples begin at across.offset(). "
    "across.sum(x) adds up sums, across.mean(x) averages means over samples, across.mean(x, count) those over other "
    "things (docs/coupled.md)."
)


def cause(
    kind: str, where: str, found: str, *, loop: bool, remedy: str = "", count: str = "", steps: int = 0, first: str = ""
) -> Cause:
    """Make a cause; its remedy is that of its kind, unless one is passed."""
    counts = "" if count else _COUNTS
    said = REMEDIES[kind][-1 if loop else 0].format(count=count or "count", counts=counts, steps=steps, first=first)
    return Cause(kind, where, f"{found[:1].upper()}{found[1:]}.", remedy or said)


def listed(names: Sequence[str]) -> str:
    """Name a few, and say how many more there are."""
    shown = ", ".join(names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else shown


def proportion(weights: Sequence[float]) -> str:
    """Write weights as 0.5 : 0.3 : 0.2; rounded twice, so that weights which differ by rounding look the same."""
    shown = " : ".join(f"{float(f'{weight:.6g}'):.3g}" for weight in weights[:6])
    return f"{shown} : ..." if len(weights) > 6 else shown  # noqa: PLR2004 - as many as fit into a line
