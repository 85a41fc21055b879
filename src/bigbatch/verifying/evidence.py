"""A cause as it is told: the evidence in a sentence, the remedy as something to type."""

from collections.abc import Mapping, Sequence

from bigbatch.verifying.verification import Cause

_SHOWN = 2


def listed(names: Sequence[str]) -> str:
    """Name a few, and say how many more there are."""
    shown = ", ".join(names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else shown


def proportion(weights: Sequence[float]) -> str:
    """Write weights as 0.5 : 0.3 : 0.2."""
    # Rounded twice, so that weights which are the same but for rounding look the same.
    shown = " : ".join(f"{float(f'{weight:.6g}'):.3g}" for weight in weights[:6])
    return f"{shown} : ..." if len(weights) > 6 else shown  # noqa: PLR2004 - as many as fit into a line


def cause(kind: str, where: str, share: float, found: str, loop: bool, **said: object) -> Cause:  # noqa: FBT001
    """Make a cause; the remedy is that of the way in which it was accumulated."""
    own, theirs = REMEDIES[kind]
    unknown = str(said.get("count", "count")) == "count"
    said["such_as"] = _SUCH_AS if unknown else ""
    remedy = (theirs if loop else own).format_map(_Said(said))
    return Cause(kind, where, min(1.0, max(0.0, share)), f"{found[:1].upper()}{found[1:]}.", remedy)


class _Said(dict[str, object]):
    def __missing__(self, key: str) -> str:
        return key


_SUCH_AS = ", and count is mask.sum() under a mask, weight[labels].sum() under class weights"
_BIG_STEP = "BigStep(model, optimizer, loss_fn)"
_ACROSS = (
    "Ask for the other samples, inside BigStep:  across.gather(x), across.mean(x), across.sum(x)  (docs/coupled.md)."
)
_WITHIN = "Or attend, pool and normalise within a sample: over dim=1 and on, not dim=0."
_BENT = "across.once(across.mean(F.mse_loss(x, y)).sqrt())"
_IN_DISTRIBUTION = (
    "Nothing to repair: another split draws other numbers, and the gradients are equal in distribution. A test that "
    "accepts it:  verify(...).raise_if_wrong(allow={{'randomness'}})"
)
_WRITING = (
    "Write it after the update, not in forward; or have forward read a copy that only the update changes, as "
    "self.read = self.written.clone()"
)
_EVERY_TERM = "Write every term for every micro-batch, times 0 where it does not apply"
_AS_IT_IS = "Return the loss as it is, and leave the weighing to BigStep:  return loss, or counted(loss, n)"
# For each kind: to who uses BigStep, and to who has a loop of one's own.
REMEDIES: Mapping[str, tuple[str, str]] = {
    "batch-norm": (
        (
            'Let BigStep normalise by the big batch:  Options(batch_norm="exact"); or freeze it:  '
            "model.get_submodule('{first}').eval()"
        ),
        (
            f"Use {_BIG_STEP}, which normalises by the big batch; or freeze it:  "
            "model.get_submodule('{first}').eval(); or take GroupNorm or LayerNorm."
        ),
    ),
    "randomness": (_IN_DISTRIBUTION, _IN_DISTRIBUTION),
    "buffers-written": (_WRITING, _WRITING),
    "shared-state": ("{how}", "{how}"),
    "coupled-samples": (
        f"{_ACROSS} {_WITHIN}",
        (
            f"No loop over micro-batches can be exact here. Use {_BIG_STEP}, and ask for the other samples in there:  "
            f"across.gather(x), across.mean(x), across.sum(x)  (docs/coupled.md). {_WITHIN}"
        ),
    ),
    "nonlinear-in-a-mean": (
        f"Take the mean over the big batch before what bends it:  {_BENT}; or train on the mean itself.",
        f"No weights make the parts add up. Use {_BIG_STEP} with  {_BENT}; or train on the mean itself.",
    ),
    "wrong-count": (
        "Say what the loss was averaged over:  return counted(loss, {count}){such_as}",
        (
            "Weigh each micro-batch by what its loss was averaged over:  (loss * {count} / total).backward(), where "
            "total is that of all micro-batches{such_as}; or accumulator.backward(loss), which reads it."
        ),
    ),
    "counted-per-micro-batch": (
        "Say that it counts once in a window:  counted(loss, ...) + counted(penalty, 'once')",
        "Add it once in a window, outside the loop over micro-batches; or accumulator.backward(loss), which does.",
    ),
    "missing-term": (
        "Return it with the loss for every micro-batch:  counted(loss, ...) + counted(penalty, 'once')",
        "Add it to the window's loss, once:  penalty.backward(), outside the loop over micro-batches.",
    ),
    "unused-parameters": (
        f"{_EVERY_TERM}, with its own count:  counted(aux, mask.sum())",
        f"{_EVERY_TERM}, and divide its sum by the window's total, not by the number of micro-batches.",
    ),
    "low-precision-sums": (
        "Add up in float32:  Options(gradient_dtype=torch.float32)",
        (
            "Add up in float32: keep a float32 copy of each gradient, or float32 weights under autocast; Accumulator "
            "and BigStep do it for you."
        ),
    ),
    "nondeterminism": ("{how}", "{how}"),
    "not-divided": (
        _AS_IT_IS,
        "Divide before backward:  (loss / {steps}).backward(); or weigh by count, where micro-batches differ.",
    ),
    "divided-twice": (_AS_IT_IS, "Take one of the two divisions out: {how}"),
    "wrong-scale": (_AS_IT_IS, "{how}"),
    "dropped-micro-batch": (_AS_IT_IS, "{how}"),
    "zeroed-inside": (
        "Leave gradients alone in loss_fn and in hooks.",
        "Clear gradients once in a window, right after optimizer.step(), not before each backward.",
    ),
    "stepped-inside": (
        "Leave the optimizer alone in loss_fn and in hooks.",
        "Step once in a window:  if (i + 1) % {steps} == 0: optimizer.step(); optimizer.zero_grad()",
    ),
    "clipped-inside": (
        "Give clip_norm to BigStep, which clips the big batch's gradient.",
        "Clip once in a window, after the last backward and right before optimizer.step().",
    ),
}
