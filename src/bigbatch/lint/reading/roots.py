"""Where reading begins: the module itself, then every function that nothing in the file calls.

A function that the file calls is read where it is called, with what it gets there. One whose caller is not in the file
is read as the body of a loop that nobody sees: a framework's, or another file's.
"""

import ast
from dataclasses import dataclass

from bigbatch.lint.reading.changes import assigned_in
from bigbatch.lint.reading.entering import bind, enter, make, new_object, run_function
from bigbatch.lint.reading.events import Event, Kind, Via
from bigbatch.lint.reading.headers import enter_comprehension, start_rounds
from bigbatch.lint.reading.places import Loop, LoopKind, Place
from bigbatch.lint.reading.program import Def, Program
from bigbatch.lint.reading.scopes import Class, Function, Object, Scope
from bigbatch.lint.reading.statements import run_block
from bigbatch.lint.reading.things import Computed
from bigbatch.lint.reading.trainer import surely_divides
from bigbatch.lint.reading.trees import nodes_in
from bigbatch.lint.reading.values import Number, Several, Value
from bigbatch.lint.reading.walk import TooLong, Walk, Ways

_NUMBERS = {
    "batch_idx",
    "batch_index",
    "batch_nb",
    "i",
    "idx",
    "step",
    "iteration",
    "it",
    "micro_step",
    "data_iter_step",
}


@dataclass(frozen=True)
class Story:
    """What happens from one beginning on."""

    events: tuple[Event, ...]
    even: bool  # the script itself refuses a number of micro-batches that leaves some over
    stopped: frozenset[Loop]  # loops that end after some number of rounds


def read_program(program: Program) -> list[Story]:
    """Read a file from all its beginnings."""
    walk = Walk(program, Scope(), Ways(enter, make, enter_comprehension))
    for statement in program.tree.body:  # functions may be used above the line that defines them
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            walk.module.set(statement.name, Function(statement, walk.module))
        elif isinstance(statement, ast.ClassDef):
            walk.module.set(statement.name, Class(statement, walk.module))
    stories: list[Story] = []
    try:
        run_block(walk, program.tree.body)
        _finish(walk, stories)
        owners = {method: node for node in program.classes.values() for method in node.body}
        for uncalled in (True, False):
            for function in program.functions:
                if function not in walk.entered and (function.name not in program.called or not uncalled):
                    _read_function(walk, function, owners.get(function))
                    _finish(walk, stories)
    except TooLong:
        pass
    return stories


def _finish(walk: Walk, stories: list[Story]) -> None:
    if walk.events:
        stories.append(Story(tuple(walk.events), walk.even, frozenset(walk.stopped)))
    walk.events = []


def _read_function(walk: Walk, function: Def, owner: ast.ClassDef | None) -> None:
    """Read a function that is called from nowhere here, or from where it could not be followed."""
    made: Object | None = None
    if owner is not None and function.name != "__init__":
        made = new_object(walk, Class(owner, walk.module), (), {})
        walk.events = []
    scope = Scope(walk.module, made.attributes if made is not None else None)
    bind(scope, function.args, (), {}, made)
    framework = _framework(walk.program, function, owner)
    parameters = frozenset(scope.variables) - {"self"}
    own = frozenset(name for name in assigned_in(function.body) if name.startswith("self."))
    loop = Loop(function, LoopKind.FRAMEWORK, parameters | own, parameters, framework=framework)
    for name in parameters & _NUMBERS:
        scope.variables[name] = Place(loop, 0 if framework == "lightning" and name.startswith("batch") else None)
    with walk.inside(loop):
        with walk.naming(scope):
            start_rounds(walk, loop, function.body)
        value = run_function(walk, function, scope)
        if framework in {"lightning", "transformers"} and not _is_manual(owner):
            sure = framework == "lightning" or surely_divides(walk.program)
            _backward_of_framework(walk, function, framework, value, sure=sure)


def _framework(program: Program, function: Def, owner: ast.ClassDef | None) -> str:
    """Say which framework calls a method."""
    bases = program.bases(owner) if owner is not None else set()
    if "LightningModule" in bases and function.name == "training_step":
        return "lightning"
    if function.name == "compute_loss" and any(base.endswith("Trainer") for base in bases):
        return "transformers"
    return ""


def _is_manual(owner: ast.ClassDef | None) -> bool:
    """Tell whether a LightningModule does its own stepping."""
    return owner is not None and any(
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and node.value.value is False
        and any(getattr(target, "attr", "") == "automatic_optimization" for target in node.targets)
        for node in nodes_in(owner)
    )


def _backward_of_framework(walk: Walk, function: Def, framework: str, value: Value, *, sure: bool) -> None:
    """Note that the framework calls backward on what the method returns, divided by its own number of steps if sure."""
    if isinstance(value, Several) and value.items:
        value = value.items[0]
    if not isinstance(value, Computed):
        return
    via = Via.LIGHTNING if framework == "lightning" else Via.TRANSFORMERS
    steps = framework_steps(walk, via)
    last = next((node for node in reversed(list(nodes_in(function))) if isinstance(node, ast.Return)), function)
    several = steps.known != 1 if steps is not None else via is Via.TRANSFORMERS
    walk.emit(Kind.BACKWARD, last, via=via, loss=value, divides=(sure and several) or None, divides_by=steps)


def framework_steps(walk: Walk, via: Via) -> Number | None:
    """Return the number of steps that the file gives to a framework's own accumulation."""
    word = "accumulate_grad_batches" if via is Via.LIGHTNING else "gradient_accumulation_steps"
    for call in walk.program.calls:
        for keyword in call.keywords:
            if keyword.arg == word:
                if isinstance(keyword.value, ast.Constant) and isinstance(keyword.value.value, int):
                    return Number(word, float(keyword.value.value), atoms=frozenset({word}))
                return Number(ast.unparse(keyword.value), atoms=frozenset({word}))
    return None
