"""BB2: what the loss is divided by."""

import ast
from collections.abc import Iterator

from bigbatch.lint.finding import Severity
from bigbatch.lint.loops.cadence import Cadence
from bigbatch.lint.loops.facts import Fact, Shape, TrainingLoop
from bigbatch.lint.reading.events import Kind, Via
from bigbatch.lint.reading.things import Computed
from bigbatch.lint.reading.values import Number
from bigbatch.lint.reading.vocabulary import counts_micro_batches
from bigbatch.lint.rules.rule import Hit, Rule, Script, of_loops

_WORDS = {Via.LIGHTNING: "accumulate_grad_batches", Via.TRANSFORMERS: "gradient_accumulation_steps"}
_NAMES = {
    Via.ACCELERATE: "Accelerate",
    Via.LIGHTNING: "Lightning",
    Via.TRANSFORMERS: "Trainer",
    Via.ENGINE: "the engine",
}


def _not_scaled(loop: TrainingLoop) -> Iterator[Hit]:
    one = loop.every is None or loop.every.known == 1
    if one or loop.shape is Shape.FRAMEWORK or loop.of(Kind.RESCALE) or loop.at(Kind.STEP, Cadence.MICRO):
        return
    for fact, loss in loop.losses():
        if fact.event.divides is False and _is_unscaled(loop, loss):
            yield Hit(
                fact.node,
                f"{loop.steps_text()} losses are added up and none is divided: "
                f"the gradient is {loop.steps_text()} times that of the big batch's mean",
            )


def _is_unscaled(loop: TrainingLoop, loss: Computed) -> bool:
    """Tell whether a mean goes into the sum as it is; a plain number that is not the window's divides nothing here."""
    others = [
        number for number in loss.most if number.atoms or not number.fixed or number.involves(loop.every or number)
    ]
    return loss.reduction in {"mean", "?"} and not others and not loss.rescaled


def _scaled_twice(script: Script) -> Iterator[Hit]:
    for loop in script.loops:
        for fact, loss in loop.losses():
            hit = _by_framework(loop, fact, loss) or _by_hand(loop, loss)
            if hit is not None:
                yield hit


def _by_framework(loop: TrainingLoop, fact: Fact, loss: Computed) -> Hit | None:
    via = fact.event.via
    word = _WORDS.get(via, "")
    for number, node in zip(loss.least, loss.divided_at, strict=False):
        if not _is_of_steps(number, node):
            continue
        names = number.atoms | {number.text}
        own = fact.event.divides_by is not None and number.involves(fact.event.divides_by)
        announced = any(map(counts_micro_batches, names))
        told = bool(word) and any(name.endswith(word) for name in names)
        told = told and (via is Via.LIGHTNING or fact.event.divides is True)  # Trainer does not always divide
        # `accumulate` is there to accumulate, also where the number of steps cannot be seen.
        divides = fact.event.divides or (via is Via.ACCELERATE and loop.shape is Shape.FRAMEWORK)
        if told or (fact.event.divides and own) or (divides and announced):
            return Hit(
                node, f"{_NAMES.get(via, 'the framework')} divides by the number of steps as well: divided twice"
            )
    return None


def _by_hand(loop: TrainingLoop, loss: Computed) -> Hit | None:
    """Find a second division, of the loss or of its gradients."""
    if loop.every is None or not loop.accumulates:
        return None
    written = [
        (number, node)
        for number, node in zip(loss.least, loss.divided_at, strict=False)
        if (number.same(loop.every) or counts_micro_batches(number.text)) and _is_of_steps(number, node, loop.every)
    ]
    if len(written) > 1:
        return Hit(written[1][1], f"the loss is divided by {loop.steps_text()} a second time")
    later = [fact for fact in loop.of(Kind.RESCALE) if _same(fact.event.factor, loop.every)]
    if written and later:
        return Hit(later[0].node, f"loss and gradients are both divided by {loop.steps_text()}")
    return None


def _is_of_steps(number: Number, node: ast.AST, every: Number | None = None) -> bool:
    """Tell whether a division may be by the number of steps: no weight, no mean of terms, no number beside a name.

    `0.5 * loss` and `(a + b) / 2` are a loss of their own, also where there are two steps.
    """
    if number.atoms:
        return True
    of_terms = isinstance(node, ast.BinOp) and isinstance(node.left, ast.BinOp) and isinstance(node.left.op, ast.Add)
    return not (of_terms or number.text.startswith("×") or (every is not None and every.atoms))


def _same(number: Number | None, every: Number) -> bool:
    return number is not None and number.same(every)


def _masked_mean(loop: TrainingLoop) -> Iterator[Hit]:
    if loop.of(Kind.RESCALE) or loop.at(Kind.STEP, Cadence.MICRO):
        return
    for fact, loss in loop.losses():
        scaling = loop.scaling(loss)
        by_framework = loop.shape is Shape.FRAMEWORK and fact.event.via in {Via.ACCELERATE, Via.LIGHTNING}
        by_framework = by_framework and fact.event.divides is not False
        if loss.masked is None or loss.reduction != "mean" or not (scaling or by_framework):
            continue
        yield Hit(
            loss.divided_at[-1] if scaling else fact.node,
            "each micro-batch's mean is over its own number of targets, and all weigh the same: "
            "the big batch's mean weighs them by that number",
        )


RULES = (
    Rule(
        "BB201",
        "loss-not-scaled",
        Severity.ERROR,
        "divide each loss by the number of micro-batches in its window",
        of_loops(_not_scaled),
    ),
    Rule(
        "BB202",
        "loss-scaled-twice",
        Severity.WARNING,
        "divide once, or leave it to the framework; a factor that is meant: # noqa: BB202",
        _scaled_twice,
    ),
    Rule(
        "BB203",
        "masked-mean-divided-by-constant",
        Severity.WARNING,
        "sum the losses, and divide by the number of targets in the whole window",
        of_loops(_masked_mean),
    ),
)
