"""What a name stands for after two ways that meet again."""

from dataclasses import replace

from bigbatch.lint.reading.conditions import AllOf, AnyOf, Condition, Fixed, Not
from bigbatch.lint.reading.places import Place
from bigbatch.lint.reading.scopes import Scope, Variables
from bigbatch.lint.reading.things import Computed, Role, Thing
from bigbatch.lint.reading.values import Number, Unknown, Value

Snapshot = list[tuple[Scope, Variables]]


def join_snapshots(condition: Condition, first: Snapshot, second: Snapshot) -> None:
    """Let all names stand for what they do after an `if` whose condition led to `first`, else to `second`."""
    others = {id(scope): variables for scope, variables in second}
    for scope, variables in first:
        other = others.get(id(scope), {})
        joined = dict(other)
        for name, value in variables.items():
            joined[name] = join(name, value, other.get(name), condition)
        scope.variables = joined


def join(name: str, first: Value | None, second: Value | None, condition: Condition | None = None) -> Value:
    """Return what is true of both, or the one that says something."""
    if first is None or second is None or first == second:
        return first or second or Unknown()
    if isinstance(first, Computed) and isinstance(second, Computed):
        return _computed(first, second, with_steps=isinstance(condition, Fixed) and condition.of_steps)
    if isinstance(first, Number) and isinstance(second, Number):
        return _numbers(name, first, second)
    if isinstance(first, Condition) and isinstance(second, Condition) and condition is not None:
        return AnyOf((AllOf((condition, first)), AllOf((Not(condition), second))))
    return _things(name, first, second, condition)


def _computed(first: Computed, second: Computed, *, with_steps: bool) -> Computed:
    """Join two values; after `if steps > 1: loss = loss / steps` it is divided wherever that matters."""
    fewer, more = sorted((first, second), key=lambda each: len(each.most))
    return Computed(
        origins=first.origins | second.origins,
        least=more.least if with_steps else min(first.least, second.least, key=len),
        most=more.most,
        reduction=first.reduction if first.reduction == second.reduction else "?",
        masked=first.masked or second.masked,
        live=first.live | second.live,
        # Divided by one number here and by another there, it was divided by neither.
        rescaled=fewer.rescaled or more.rescaled or fewer.most != more.most[: len(fewer.most)],
        divided_at=more.divided_at,
        amp=first.amp or second.amp,
    )


def _numbers(name: str, first: Number, second: Number) -> Number:
    """Return an amount that depends: on a setting, unless one of the two was made inside a loop."""
    fixed = first.fixed and second.fixed
    return Number(name, fixed=fixed, atoms=first.atoms | second.atoms | {first.text, second.text})


def _things(name: str, first: Value, second: Value, condition: Condition | None) -> Value:
    """Return the one with a role: `scaler = GradScaler() if amp else None` may be a scaler."""
    for one, other, when in ((first, second, condition), (second, first, condition and Not(condition))):
        if isinstance(one, Thing) and not (isinstance(other, Thing) and _outranks(other, one)):
            asked = one.role is Role.CONTEXT and one.detail == "no_sync" and one.condition is None
            return replace(one, condition=when) if asked else one
    for one, other in ((first, second), (second, first)):
        if isinstance(one, Place | Computed) and not isinstance(other, Place | Computed):
            return one
    return Unknown(name)


def _outranks(one: Thing, other: Thing) -> bool:
    """Among contexts, the one that acts; among models, the one that is wrapped."""
    return one.role == other.role and bool(one.detail in {"no_sync", "ddp"}) and one.detail != other.detail
