"""BB4: several devices. When ranks talk, and that forward and backward agree on it."""

import ast
from collections.abc import Iterator

from bigbatch.lint.finding import Severity
from bigbatch.lint.loops.cadence import Cadence
from bigbatch.lint.loops.facts import Fact, Shape, TrainingLoop
from bigbatch.lint.reading.events import Kind
from bigbatch.lint.reading.frames import Inside
from bigbatch.lint.reading.program import Program
from bigbatch.lint.rules.rule import Hit, Rule, Script, of_loops

_ASKED = {"no_sync", "no_backward_sync", "require_backward_grad_sync", "set_requires_gradient_sync", "accumulate"}
_WRAPPERS = {"DistributedDataParallel", "DDP"}


def _without_no_sync(script: Script) -> Iterator[Hit]:
    if (script.program.called | script.program.words - {"accumulate"}) & _ASKED or not _is_distributed(script.program):
        return
    for loop in script.loops:
        if loop.shape in {Shape.MODULO, Shape.NESTED} and not loop.at(Kind.STEP, Cadence.MICRO):
            for fact in loop.of(Kind.BACKWARD)[:1]:
                yield Hit(
                    fact.node,
                    f"ranks exchange gradients with every micro-batch; one exchange per window of {loop.steps_text()} "
                    "gives the same",
                )


def _is_distributed(program: Program) -> bool:
    """Tell whether a model is wrapped for data-parallel training with one process per device."""
    for call in program.calls:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if program.full_name(name).rpartition(".")[2] in _WRAPPERS:
            return True
        if name in {"Fabric", "Trainer"}:
            strategy = next((word.value for word in call.keywords if word.arg == "strategy"), None)
            if isinstance(strategy, ast.Constant) and str(strategy.value).startswith("ddp"):
                return True
    return False


def _around_backward_only(loop: TrainingLoop) -> Iterator[Hit]:
    forwards = loop.of(Kind.FORWARD)
    for backward in loop.of(Kind.BACKWARD):
        block = next((f for f in backward.event.frames if isinstance(f, Inside) and f.role == "no_sync"), None)
        if block is None:
            continue
        own = [fact for fact in forwards if _same_model(fact, block.subject)]
        if any(block in fact.event.frames for fact in own):
            continue
        if any(fact.event.order < backward.event.order for fact in own):
            yield Hit(
                block.node,
                "forward runs outside no_sync, backward inside: DDP decides in forward whether it will synchronise",
            )


def _same_model(fact: Fact, subject: str) -> bool:
    return not subject or fact.event.subject == subject


RULES = (
    Rule(
        "BB401",
        "ddp-without-no-sync",
        Severity.WARNING,
        "run forward and backward of all but the last micro-batch under model.no_sync()",
        _without_no_sync,
    ),
    Rule(
        "BB402",
        "no-sync-around-backward-only",
        Severity.ERROR,
        "put the forward into the same no_sync block",
        of_loops(_around_backward_only),
    ),
)
