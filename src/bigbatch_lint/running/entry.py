"""Where a file's training starts: its own lines, and functions that nobody in it calls."""

import ast
from contextlib import suppress

from bigbatch_lint.reading.module import FunctionDef, Module
from bigbatch_lint.reading.names import dotted, targets, walk
from bigbatch_lint.running.interpreter import Interpreter
from bigbatch_lint.running.machine import Leave, WindowsAreWhole
from bigbatch_lint.running.values import Environment, Event, Function, Loss, Opaque, Round, Via

_SAYS_OTHERWISE = {"accepts_loss_kwargs", "model_accepts_loss_kwargs", "loss_is_scaled_for_ga", "compute_loss_func"}
_SAYS_OTHERWISE |= {"from_pretrained"}
_COUNTERS = {"i", "idx", "step", "iteration", "it", "micro_step", "data_iter_step"}
Story = tuple[list[Event], int]  # what happened, and how many micro-batches a window has


def run_file(module: Module) -> list[Story]:
    """Return what happens in each run of the file: with all settings on, then off, where it asks for any.

    A loader has two windows and a half, or two where the script refuses a leftover.
    """
    found: list[Story] = []
    n = module.steps
    for settings in (True, False):
        machine = Interpreter(module, 2 * n + max(1, n // 2), settings=settings)
        try:
            found += _stories(machine)
        except WindowsAreWhole:
            machine = Interpreter(module, 2 * n, settings=settings)
            with suppress(WindowsAreWhole):
                found += _stories(machine)
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
            trains = function in module.trains or function.name in {"training_step", "compute_loss"}
            called = function in machine.entered or (only_uncalled and function.name in module.called)
            if trains and not called and function.name != "__init__":
                machine.begin()
                with suppress(Leave):
                    _run_root(machine, function, owners.get(function), env)
                stories.append((machine.events, machine.steps))
    return stories


def _run_root(machine: Interpreter, node: FunctionDef, owner: ast.ClassDef | None, env: Environment) -> None:
    """Call a function that is called from elsewhere: once, or with every micro-batch."""
    module, function = machine.module, Function(node, env)
    bases = module.bases(owner) if owner is not None else set()
    via: Via | None = "lightning" if "LightningModule" in bases and node.name == "training_step" else None
    if node.name == "compute_loss" and any(base.endswith("Trainer") for base in bases):
        via = "trainer"
    if owner is not None:
        with suppress(Leave):
            made = machine.construct(owner, env)
            function = Function(node, made, made)
    if via is None and node in module.holds_loop:
        counted = [each.target for each in walk(owner) if isinstance(each, ast.AugAssign)] if owner else []
        # What an object counts goes on in its next call.
        for _ in range(2 if any(dotted(each).startswith("self.") for each in counted) else 1):
            machine.call_function(function, (), {})
        return
    names = [each.arg for each in (*node.args.posonlyargs, *node.args.args)][owner is not None :]
    machine.assigned.append(frozenset(names) | {text for text in targets(node) if text.startswith("self.")})
    by_lightning = via == "lightning"
    counters = [name for name in names if name.startswith(("batch_i", "batch_n")) or (not via and name in _COUNTERS)]
    for number in range(machine.length):
        total = machine.length if by_lightning else None
        machine.rounds = [Round(node, number, is_micro=True, total=total, kind="range")]
        with suppress(Leave):
            # Lightning counts the batches; others' numbers may mean anything.
            numbers = {name: number if by_lightning else Opaque(name, is_setting=False) for name in counters}
            loss = machine.call_function(function, (), numbers)
            loss = loss[0] if isinstance(loss, tuple) and loss else loss
            loss = loss.get("loss") if isinstance(loss, dict) else loss
            if via is not None and isinstance(loss, Loss) and "automatic_optimization" not in module.words:
                # The framework runs the backward of the loss that it is given.
                place = [node, *(each for each in walk(node) if isinstance(each, ast.Return))][-1]
                sure = "accumulate_grad_batches" in module.keywords if by_lightning else _divides(module)
                machine.emit("backward", place, loss=loss, via=via, divides=sure or None)
    machine.rounds = []
    machine.emit("end", node, is_exhausted=by_lightning)


def _divides(module: Module) -> bool:
    """Tell whether Hugging Face's Trainer is certain to divide a loss by its number of steps.

    It does not where a model's forward takes loss arguments, as those of its own language models do. So one case is
    sure: the models are classes of the file, and no forward takes `**kwargs`.
    """
    forwards = [module.method(cls, "forward") for cls in module.classes.values()]
    plain = [each.args.kwarg is None for each in forwards if each is not None]
    return bool(plain) and all(plain) and not (module.words | module.keywords) & _SAYS_OTHERWISE
