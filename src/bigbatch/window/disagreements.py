"""What is said where counts do not agree: among each other, or with what was counted in advance."""

from torch import Tensor

from bigbatch.loss.count import Term

_COUNTS_OF = {
    "NllLoss": "targets that are not ignored, (labels != -100).sum(), or the sum of their class weights",
    "NllLoss2D": "targets that are not ignored, (labels != -100).sum(), or the sum of their class weights",
    "counted": "the n of counted(term, n)",
}


def listed(terms: list[Term]) -> str:
    """Show terms with their counts, without waiting for a device."""
    known = [term.kind == "mean" and not isinstance(term.count, Tensor) for term in terms]
    return ", ".join(
        f"{term.name} ({term.kind}{f' over {term.count:g}' if tell else ''})"
        for term, tell in zip(terms, known, strict=True)
    )


def several(terms: list[Term], found: str) -> str:
    """Explain that several counts must be known before the first backward."""
    return (
        f"the terms of this loss were averaged over different things: found {found} in {listed(terms)}.\n"
        "Their gradients share one buffer, so each term's total over the window must be known before its first "
        "backward. Give the counts of a batch, one per term in the order in which they are written:\n"
        "    Accumulator(..., counts=lambda batch: ((batch['labels'] != -100).sum(), len(batch['labels'])))\n"
        "The wrapped loader then looks a window ahead. A mean over elements counts elements; a sum counts as 'sum'."
    )


def other_total(place: int, of: int, name: str, came: float, total: float) -> str:
    """Say which term's count in advance is not what came, and what it would have to be."""
    times = came / total if total else 0.0
    many = f", {times:g} times as many" if times > 1 and times == round(times) else ""
    right = _COUNTS_OF.get(name, "what the mean is over: elements, prediction.numel(), where it is over all of them")
    return (
        f"term {place + 1} of {of}{f', {name}' if name else ''}: counts= came to {total:g} for this window, and its "
        f"losses to {came:g}{many}. Nothing was stepped.\n"
        f"If the function counts something else than the loss, return for this term {right}.\n"
        "If a batch was passed over or never came, leave it out before accumulator.over(loader).\n"
        "Drop the window with accumulator.discard()."
    )
