"""Where a file's training starts: its own lines, and functions that nobody in it calls."""

import ast
from collections.abc import Callable
from contextlib import suppress

from bigbatch_lint.reading.module import Module
from bigbatch_lint.reading.names import called_name, dotted, walk
from bigbatch_lint.running.interpreter import Interpreter
from bigbatch_lint.running.machine import BreakLoop, ContinueLoop, OutOfBudget, ReturnValue, WindowsAreWhole
from bigbatch_lint.running.trace import Event, Kind, Round, Via
from bigbatch_lint.running.values import Class, Environment, Function, Instance, Loss, Opaque

_LIGHTNING_STEPS = "accumulate_grad_batches"
_SAYS_OTHERWISE = {"accepts_loss_kwargs", "model_accepts_loss_kwargs", "loss_is_scaled_for_ga", "compute_loss_func"}
_FunctionDef = ast.FunctionDef | ast.AsyncFunctionDef


def run_file(module: Module) -> list[tuple[list[Event], int]]:
    """Return the events of each run, and how many micro-batches a window has: with all settings on, then off.

    A loader has two windows and a half, or two where the script refuses a leftover.
    """
    found: list[tuple[list[Event], int]] = []
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


def _stories(machine: Interpreter) -> list[tuple[list[Event], int]]:
    """Run the file, then its functions that train and were not called."""
    module, env = machine.module, Environment()
    machine.define(module.tree.body, env)
    stories = [_story(machine, lambda: machine.run(module.tree.body, env))]
    owners = {member: cls for cls in module.classes.values() for member in cls.body}
    for only_uncalled in (True, False):
        for function in module.functions:
            trains = function in module.trains or function.name in {"training_step", "compute_loss"}
            called = function in machine.entered or (only_uncalled and function.name in module.called)
            if trains and not called and function.name != "__init__":
                stories.append(_story(machine, _Root(machine, function, owners.get(function), env).run))
    return stories


def _story(machine: Interpreter, run: Callable[[], None]) -> tuple[list[Event], int]:
    machine.begin()
    with suppress(ReturnValue, BreakLoop, ContinueLoop, OutOfBudget):
        run()
    return machine.events, machine.steps


class _Root:
    """A function that is called from elsewhere: once, or with every micro-batch."""

    def __init__(self, machine: Interpreter, node: _FunctionDef, owner: ast.ClassDef | None, env: Environment) -> None:
        self.machine, self.module, self.node, self.owner, self.env = machine, machine.module, node, owner, env
        bases = self.module.bases(owner) if owner is not None else set()
        self.via: Via | None = None
        if "LightningModule" in bases and node.name == "training_step":
            self.via = Via.LIGHTNING
        elif node.name == "compute_loss" and any(base.endswith("Trainer") for base in bases):
            self.via = Via.TRAINER
        self.is_manual = self.via is Via.LIGHTNING and owner is not None and _is_manual(owner)

    def run(self) -> None:
        """Call the function."""
        function = self._function()
        if self.via is None and self.node in self.module.holds_loop:
            for _ in range(2 if self._counts() else 1):  # what an object counts goes on in its next call
                with suppress(ReturnValue):
                    self.machine.call_function(function, (), {})
        else:
            self._run_with_each(function)

    def _counts(self) -> bool:
        """Tell whether the function's object counts something."""
        counted = [each.target for each in walk(self.owner) if isinstance(each, ast.AugAssign)] if self.owner else []
        return any(dotted(each).startswith("self.") for each in counted)

    def _function(self) -> Function:
        if self.owner is None:
            return Function(self.node, self.env)
        cls = Class(self.owner, self.env)
        made = Instance(cls)
        init = self.module.method(self.owner, "__init__")
        if init is not None:
            with suppress(ReturnValue, BreakLoop, ContinueLoop):
                self.machine.call_function(Function(init, self.env, made), (), {})
        return Function(self.node, self.env, made)

    def _run_with_each(self, function: Function) -> None:
        machine = self.machine
        arguments = self.node.args
        names = [each.arg for each in (*arguments.posonlyargs, *arguments.args)][1 if self.owner is not None else 0 :]
        bound = {dotted(target) for node in walk(self.node) for target in getattr(node, "targets", ())}
        attributes = {text for text in bound if text.startswith("self.")}
        machine.assigned.append({*names, *attributes})
        machine.passages[self.node] = 1
        total = machine.length if self.via is Via.LIGHTNING else None
        for number in range(machine.length):
            machine.rounds.append(Round(self.node, number, 1, is_micro=True, total=total, kind="range"))
            with suppress(BreakLoop, ContinueLoop):
                result = machine.call_function(function, (), self._numbers(names, number))
                self._step_of_framework(result)
            machine.rounds.pop()
        machine.assigned.pop()
        machine.emit(Event(Kind.END, self.node, is_exhausted=total is not None))

    def _numbers(self, names: list[str], number: int) -> dict[str, object]:
        """Return the arguments that say which batch it is: Lightning counts them, others may mean anything."""
        own = [name for name in names if name.startswith(("batch_i", "batch_n"))]
        if self.via is Via.LIGHTNING:
            return dict.fromkeys(own, number)
        counters = {"i", "idx", "step", "iteration", "it", "micro_step", "data_iter_step", *own}
        return {name: Opaque(name, is_setting=False) for name in names if name in counters}

    def _step_of_framework(self, result: object) -> None:
        """Let the framework run the backward of the loss that it is given."""
        if self.via is None or self.is_manual:
            return
        loss = result[0] if isinstance(result, tuple) and result else result
        loss = loss.get("loss") if isinstance(loss, dict) else loss
        if isinstance(loss, Loss):
            returns = [each for each in walk(self.node) if isinstance(each, ast.Return)]
            divides = True if self._is_divided() else None
            node = returns[-1] if returns else self.node
            self.machine.emit(Event(Kind.BACKWARD, node, loss=loss, via=self.via, divides=divides))

    def _is_divided(self) -> bool:
        if self.via is Via.LIGHTNING:
            return _LIGHTNING_STEPS in self.module.keywords
        return trainer_divides(self.module)


def _is_manual(cls: ast.ClassDef) -> bool:
    return any(
        isinstance(node, ast.Assign)
        and any(dotted(target).endswith("automatic_optimization") for target in node.targets)
        and isinstance(node.value, ast.Constant)
        and node.value.value is False
        for node in walk(cls)
    )


def trainer_divides(module: Module) -> bool:
    """Tell whether Hugging Face's Trainer is certain to divide a loss by its number of steps.

    It does not where a model's forward takes loss arguments, as those of its own language models do. So one case is
    sure: the model is a class of the file, and its forward takes no `**kwargs`.
    """
    if (module.words | module.keywords) & _SAYS_OTHERWISE:
        return False
    models = [_model_of(call) for call in module.calls if _is_trainer(module, dotted(call.func))]
    return bool(models) and all(_is_plain(module, model) for model in models)


def _is_trainer(module: Module, name: str) -> bool:
    bases = module.bases(module.classes[name]) if name in module.classes else {name}
    return any(base.endswith("Trainer") for base in bases)


def _model_of(call: ast.Call) -> ast.expr | None:
    named = next((word.value for word in call.keywords if word.arg == "model"), None)
    return named or (call.args[0] if call.args else None)


def _is_plain(module: Module, model: ast.expr | None) -> bool:
    """Tell whether a model is of a class of the file whose forward takes no other arguments than it names."""
    if isinstance(model, ast.Name):
        made = [n.value for n in module.nodes if isinstance(n, ast.Assign) and model.id in map(dotted, n.targets)]
        return bool(made) and all(isinstance(each, ast.Call) and _is_plain(module, each) for each in made)
    owner = module.classes.get(called_name(model)) if isinstance(model, ast.Call) else None
    forward = module.method(owner, "forward") if owner is not None else None
    return forward is not None and forward.args.kwarg is None
