"""What a call does: a function of the file runs, a known function of torch or a framework has its effect."""

import ast
import re

from bigbatch_lint.reading.names import Role, announces_steps, dotted
from bigbatch_lint.running.builders import build
from bigbatch_lint.running.call import UNKNOWN, Call
from bigbatch_lint.running.machine import Machine
from bigbatch_lint.running.tensor_calls import of_tensor
from bigbatch_lint.running.trace import Event, Kind
from bigbatch_lint.running.training_calls import of_training
from bigbatch_lint.running.values import Class, Environment, Function, Instance, Items, Loss, Opaque, new_loss

_READERS = ("save", "checkpoint", "log", "print", "len", "isinstance", "get_lr", "current_lr", "getattr", "hasattr")
_RESCALES = re.compile(r"^_*((re)?scale|normali[sz]e|div(ide)?)_(\w+_)?grad", re.IGNORECASE)
_OWN_METHODS = re.compile(r"zero|clear|reset|grad|optim|step|clip|update", re.IGNORECASE)
_MODULES = {"Module", "LightningModule", "PreTrainedModel", "Sequential"}


def call(machine: Machine, node: ast.Call, env: Environment) -> object:
    """Return what a call returns, after its effect."""
    text = dotted(node.func)
    receiver, function = _function(machine, node, text, env)
    args = [machine.evaluate(each, env) for each in node.args]
    words = {word.arg or "**": machine.evaluate(word.value, env) for word in node.keywords} if node.keywords else {}
    if isinstance(function, Instance):
        method = machine.module.method(function.cls.node, "__call__")
        function = Function(method, function.cls.env, function) if method is not None else function
    if isinstance(function, Function):
        return machine.call_function(function, args, words)
    if isinstance(function, Class):
        return instance(machine, function, args, words)
    full = machine.module.full_name(text) if text else ""
    name = full.rpartition(".")[2] or (node.func.attr if isinstance(node.func, ast.Attribute) else text)
    on = dotted(node.func.value) if isinstance(node.func, ast.Attribute) else ""
    this = Call(node, name, full, on, receiver, args, words, env)
    for handle in (of_training, build):
        found = handle(machine, this)
        if found is not UNKNOWN:
            return found
    if function is None and isinstance(node.func, ast.Attribute) and text:
        function = machine.unknown(text)
    found = _of_thing(machine, this, function, text)
    found = of_tensor(machine, this) if found is UNKNOWN else found
    return _of_elsewhere(machine, this) if found is UNKNOWN else found


def _function(machine: Machine, node: ast.Call, text: str, env: Environment) -> tuple[object, object]:
    """Return what a method is called on, and the function, as far as the file has them."""
    if not isinstance(node.func, ast.Attribute):
        return None, machine.evaluate(node.func, env)
    receiver = machine.evaluate(node.func.value, env)
    bound = env.find(text) if text else None
    if bound is None and isinstance(receiver, Instance):
        if node.func.attr in receiver.attributes:
            return receiver, receiver.attributes[node.func.attr]
        method = machine.module.method(receiver.cls.node, node.func.attr)
        return receiver, Function(method, receiver.cls.env, receiver) if method is not None else None
    return receiver, bound


def instance(machine: Machine, cls: Class, args: list[object], words: dict[str, object]) -> object:
    """Return an object of a class of the file; models, optimizers and datasets stay opaque."""
    bases = machine.module.bases(cls.node)
    name = cls.node.name
    if bases & _MODULES:
        is_loss = name.lower().endswith(("loss", "criterion"))
        return Opaque(name, Role.CRITERION if is_loss else Role.MODEL, made=cls.node)
    if any(base.endswith("Optimizer") for base in bases):
        return Opaque(name, Role.OPTIMIZER, made=cls.node)
    if any("Dataset" in base for base in bases):
        return Items(None, lambda _: Opaque(is_setting=False), "dataset")
    made = Instance(cls)
    method = machine.module.method(cls.node, "__init__")
    if method is not None:
        machine.call_function(Function(method, cls.env, made), args, words)
    return made


def _of_thing(machine: Machine, this: Call, function: object, text: str) -> object:
    """Call a scaler, a model or a criterion."""
    if not isinstance(function, Opaque):
        return UNKNOWN
    if function.role is Role.SCALER and this.args and isinstance(this.args[0], Loss):
        machine.emit(Event(Kind.BACKWARD, this.node, loss=this.args[0]))
        asked = next((this.words[word] for word in ("update_grad", "need_update") if word in this.words), True)
        if machine.truth(asked, this.node):
            subject = dotted(this.node.args[1]) if len(this.node.args) > 1 else ""
            machine.emit(Event(Kind.STEP, this.node, subject=subject))
        return Opaque()
    if function.role is Role.MODEL:
        machine.emit(Event(Kind.FORWARD, this.node, subject=text or function.text))
        return new_loss(id(this.node))
    if function.role is Role.CRITERION:
        return new_loss(id(this.node), reduction=function.reduction or "?", masked=function.masked)
    return UNKNOWN


def _of_elsewhere(machine: Machine, this: Call) -> object:
    """Call code of another file: it may do what it likes with what it is given."""
    given = [each for each in (*this.args, *this.words.values()) if isinstance(each, Opaque)]
    if not this.name.lower().startswith(_READERS):
        for each in given:
            if each.role in {Role.OPTIMIZER, Role.SCALER}:
                machine.emit(Event(Kind.HANDED, this.node, subject=each.text))
    models = [each.text for each in given if each.role is Role.MODEL]
    if given and _RESCALES.search(this.name):
        machine.emit(Event(Kind.RESCALE, this.node))
    elif models:
        machine.emit(Event(Kind.FORWARD, this.node, subject=models[0]))
    if this.on == "self" and _OWN_METHODS.search(this.name):
        machine.emit(Event(Kind.HANDED, this.node, subject="self"))
    hidden = this.on == "self" and not this.name.endswith(("model", "net", "criterion", "loss_fn"))
    told = any(announces_steps(dotted(each)) for each in this.node.args) or any(map(announces_steps, this.words))
    loss = new_loss(id(this.node))
    return loss.unknown_weight() if hidden or told else loss
