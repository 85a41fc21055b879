"""Where a file's training starts: its own lines, and functions that nobody in it calls."""

import ast
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from bigbatch_lint.reading.module import FunctionDef, Module
from bigbatch_lint.reading.names import called_name, dotted, walk
from bigbatch_lint.running.interpreter import Interpreter
from bigbatch_lint.running.machine import BreakLoop, ContinueLoop, ReturnValue, WindowsAreWhole
from bigbatch_lint.running.values import Environment, Event, Function, Loss, Opaque, Round, Via

_SAYS_OTHERWISE = {"accepts_loss_kwargs", "model_accepts_loss_kwargs", "loss_is_scaled_for_ga", "compute_loss_func"}
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
    module, env, stories = machine.module, Environment(), list[Story]()

    def tell(run: Callable[[], None]) -> None:
        machine.begin()
        with suppress(ReturnValue, BreakLoop, ContinueLoop):
            run()
        stories.append((machine.events, machine.steps))

    tell(lambda: machine.run(module.tree.body, env))
    owners = {member: cls for cls in module.classes.values() for member in cls.body}
    for only_uncalled in (True, False):
        for function in module.functions:
            trains = function in module.trains or function.name in {"training_step", "compute_loss"}
            called = function in machine.entered or (only_uncalled and function.name in module.called)
            if trains and not called and function.name != "__init__":
                tell(partial(_run_root, machine, function, owners.get(function), env))
    return stories


def _run_root(machine: Interpreter, node: FunctionDef, owner: ast.ClassDef | None, env: Environment) -> None:
    """Call a function that is called from elsewhere: once, or with every micro-batch."""
    module, function = machine.module, Function(node, env)
    bases = module.bases(owner) if owner is not None else set()
    via: Via | None = "lightning" if "LightningModule" in bases and node.name == "training_step" else None
    if node.name == "compute_loss" and any(base.endswith("Trainer") for base in bases):
        via = "trainer"
    if owner is not None:
        with suppress(ReturnValue, BreakLoop, ContinueLoop):
            made = machine.construct(owner, env)
            function = Function(node, made, made)
    if via is None and node in module.holds_loop:
        counted = [each.target for each in walk(owner) if isinstance(each, ast.AugAssign)] if owner else []
        # What an object counts goes on in its next call.
        for _ in range(2 if any(dotted(each).startswith("self.") for each in counted) else 1):
            machine.call_function(function, (), {})
        return
    names = [each.arg for each in (*node.args.posonlyargs, *node.args.args)][owner is not None :]
    bound = {dotted(target) for each in walk(node) for target in getattr(each, "targets", ())}
    machine.assigned.append(frozenset(names) | {text for text in bound if text.startswith("self.")})
    by_lightning = via == "lightning"
    total, own = (machine.length, set[str]()) if by_lightning else (None, _COUNTERS)
    counters = [name for name in names if name in own or name.startswith(("batch_i", "batch_n"))]
    asks = via == "trainer" or (by_lightning and owner is not None and not _is_manual(owner))
    for number in range(machine.length):
        machine.rounds = [Round(node, number, is_micro=True, total=total, kind="range")]
        with suppress(BreakLoop, ContinueLoop):
            # Lightning counts the batches; others' numbers may mean anything.
            numbers = {name: number if by_lightning else Opaque(name, is_setting=False) for name in counters}
            result = machine.call_function(function, (), numbers)
            if via is not None and asks:
                _step_of_framework(machine, node, via, result)
    machine.rounds = []
    machine.emit("end", node, is_exhausted=by_lightning)


def _step_of_framework(machine: Interpreter, node: FunctionDef, via: Via, result: object) -> None:
    """Let the framework run the backward of the loss that it is given."""
    loss = result[0] if isinstance(result, tuple) and result else result
    loss = loss.get("loss") if isinstance(loss, dict) else loss
    if isinstance(loss, Loss):
        place = [node, *(each for each in walk(node) if isinstance(each, ast.Return))][-1]
        sure = "accumulate_grad_batches" in machine.module.keywords if via == "lightning" else _divides(machine.module)
        machine.emit("backward", place, loss=loss, via=via, divides=sure or None)


def _is_manual(cls: ast.ClassDef) -> bool:
    """Find `self.automatic_optimization = False`."""
    assigned = [each for each in walk(cls) if isinstance(each, ast.Assign) and isinstance(each.value, ast.Constant)]
    off = [target for each in assigned if getattr(each.value, "value", True) is False for target in each.targets]
    return any(dotted(target).endswith("automatic_optimization") for target in off)


def _divides(module: Module) -> bool:
    """Tell whether Hugging Face's Trainer is certain to divide a loss by its number of steps.

    It does not where a model's forward takes loss arguments, as those of its own language models do. So one case is
    sure: the model is a class of the file, and its forward takes no `**kwargs`.
    """
    models: list[ast.expr | None] = []
    for call in module.calls:
        name = dotted(call.func)
        bases = module.bases(module.classes[name]) if name in module.classes else {name}
        if any(base.endswith("Trainer") for base in bases):
            models.append([*(word.value for word in call.keywords if word.arg == "model"), *call.args, None][0])
    unsaid = not (module.words | module.keywords) & _SAYS_OTHERWISE
    return unsaid and bool(models) and all(_is_plain(module, model) for model in models)


def _is_plain(module: Module, model: ast.expr | None) -> bool:
    """Tell whether a model is of a class of the file whose forward takes no other arguments than it names."""
    if isinstance(model, ast.Name):
        made = [n.value for n in module.nodes if isinstance(n, ast.Assign) and model.id in map(dotted, n.targets)]
        return bool(made) and all(isinstance(each, ast.Call) and _is_plain(module, each) for each in made)
    owner = module.classes.get(called_name(model)) if isinstance(model, ast.Call) else None
    forward = module.method(owner, "forward") if owner is not None else None
    return forward is not None and forward.args.kwarg is None
