"""Where a file's training starts: its own lines, and functions that nobody in it calls."""

import ast
from contextlib import suppress

from bigbatch_lint.reading.module import Module
from bigbatch_lint.reading.names import dotted, last_part, walk
from bigbatch_lint.running.interpreter import Interpreter
from bigbatch_lint.running.machine import Leave
from bigbatch_lint.running.values import Environment, Event, Function, Loss, Round

Story = tuple[list[Event], int]  # what happened, and how many micro-batches a window has


def run_file(module: Module) -> list[Story]:
    """Return what happens in each run of the file: with all settings on, then off, where it asks for any.

    A loader has two windows and a half, or two where the script refuses a leftover.
    """
    found: list[Story] = []
    n = module.steps
    for settings in (True, False):
        machine = Interpreter(module, 2 * n + max(1, n // 2), settings=settings)
        stories = _stories(machine)
        found += stories if not machine.refuses_leftover else _stories(Interpreter(module, 2 * n, settings=settings))
        if not machine.asked:
            break
    return found


def _stories(machine: Interpreter) -> list[Story]:
    """Run the file, then its functions that train and were not called."""
    module, env = machine.module, Environment()
    with suppress(Leave):
        machine.run(module.tree.body, env)
    stories = [(machine.events, machine.steps)]
    owners = {member: cls for cls in module.classes.values() for member in cls.body}
    for only_uncalled in (True, False):
        for function in module.functions:
            trains = function in module.trains or function.name == "training_step"
            called = function in machine.entered or (only_uncalled and function.name in module.called)
            if trains and not called and function.name != "__init__":
                machine.begin()
                with suppress(Leave):
                    _run_root(machine, function, owners.get(function), env)
                stories.append((machine.events, machine.steps))
    return stories


def _run_root(machine: Interpreter, node: ast.FunctionDef, owner: ast.ClassDef | None, env: Environment) -> None:
    """Call a function that is called from elsewhere: once, or with every micro-batch."""
    module, function = machine.module, Function(node, env)
    if owner is not None:
        with suppress(Leave):
            made = machine.construct(owner, env)
            function = Function(node, made, made)
    bases = {last_part(dotted(base)) for base in (owner.bases if owner else ())}
    by_lightning = node.name == "training_step" and "LightningModule" in bases
    if not by_lightning and node in module.holds_loop:
        counted = [each.target for each in walk(owner) if isinstance(each, ast.AugAssign)] if owner else []
        # What an object counts goes on in its next call.
        for _ in range(2 if any(dotted(each).startswith("self.") for each in counted) else 1):
            machine.call_function(function, (), {})
        return
    names = [each.arg for each in node.args.args][owner is not None :]
    machine.assigned.append(frozenset(names))
    # Lightning counts the batches; others' numbers may mean anything.
    counters = [name for name in names if by_lightning and name.startswith(("batch_i", "batch_n"))]
    total = machine.length if by_lightning else None
    for number in range(machine.length):
        machine.rounds = [Round(node, number, is_micro=True, total=total, kind="range")]
        with suppress(Leave):
            loss = machine.call_function(function, (), dict.fromkeys(counters, number))
            loss = loss.get("loss") if isinstance(loss, dict) else loss
            if by_lightning and isinstance(loss, Loss) and "automatic_optimization" not in module.words:
                # The framework runs the backward of the loss that it is given.
                place = [node, *(each for each in walk(node) if isinstance(each, ast.Return))][-1]
                is_told = "accumulate_grad_batches" in module.keywords
                machine.emit("backward", place, loss=loss, via="lightning", divides=is_told or None)
    machine.rounds = []
    machine.emit("end", node, is_exhausted=by_lightning)
