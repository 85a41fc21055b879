"""What a call does and gives: the file's own functions are entered, known ones known, others give something new."""

import ast
import re

from bigbatch.lint.reading.called import Called, ValueOf
from bigbatch.lint.reading.constructors import constructed
from bigbatch.lint.reading.events import Kind
from bigbatch.lint.reading.program import dotted
from bigbatch.lint.reading.scopes import Class, Function, Object
from bigbatch.lint.reading.tensor_calls import tensor_call
from bigbatch.lint.reading.things import Role, Thing, computed
from bigbatch.lint.reading.training_calls import scaler_call, training_call
from bigbatch.lint.reading.values import Number, Unknown, Value
from bigbatch.lint.reading.vocabulary import counts_micro_batches, last_part
from bigbatch.lint.reading.walk import Walk

_TIDIES = re.compile(r"zero|clear|reset|grad|optim|step|clip|update", re.IGNORECASE)
# A helper from elsewhere that gets the model, as torchtune's `scale_grads(model, 1 / tokens)`.
_RESCALES = re.compile(r"^_*((re)?scale|normali[sz]e|div(ide)?)_(\w+_)?grad", re.IGNORECASE)
_HARMLESS = ("save", "checkpoint", "log", "print", "len", "isinstance", "get_lr", "current_lr", "getattr", "hasattr")


def call(walk: Walk, node: ast.Call, value_of: ValueOf) -> Value:
    """Follow a call."""
    called = _called(walk, node, value_of)
    if isinstance(called.function, Function):
        return walk.enter(called.function, called.args, called.words)
    if isinstance(called.function, Class):
        return walk.make(called.function, called.args, called.words)
    for known in (training_call, constructed, _calling_object, tensor_call):
        value = known(walk, called)
        if value is not None:
            return value
    return _unknown(walk, called)


def _called(walk: Walk, node: ast.Call, value_of: ValueOf) -> Called:
    receiver, function, on = None, None, ""
    text = dotted(node.func)
    if isinstance(node.func, ast.Attribute):
        on = dotted(node.func.value)
        name = node.func.attr
        receiver = value_of(walk, node.func.value)
        function = walk.scope.find(text) if text else None
        if function is None and isinstance(receiver, Object):
            found = walk.program.method(receiver.node, name)
            function = Function(found, walk.module, receiver) if found is not None else None
    else:
        name = text or ""
        function = value_of(walk, node.func)
    args = tuple(value_of(walk, arg) for arg in node.args)
    words = {word.arg or "**": value_of(walk, word.value) for word in node.keywords}
    full = walk.program.full_name(text) if text else name
    return Called(node, full.rpartition(".")[2] or name, full, on, receiver, function, args, words)


def _calling_object(walk: Walk, called: Called) -> Value | None:
    """Call an object: a model, a criterion, an instance of a class of the file, or the class itself."""
    function = called.function
    text = dotted(called.node.func)
    if function is None and text and isinstance(called.node.func, ast.Attribute):
        function = walk.named(text)
    match function:
        case Object():
            found = walk.program.method(function.node, "__call__")
            if found is not None:
                return walk.enter(Function(found, walk.module, function), called.args, called.words)
        case Thing(role=Role.SCALER):
            return scaler_call(walk, called)
        case Thing(role=Role.MODEL):
            walk.emit(Kind.FORWARD, called.node, subject=text or function.text)
            return computed(id(called.node))
        case Thing(role=Role.CRITERION):
            return computed(id(called.node), reduction=function.detail or "?", masked=function.masked)
    return None


def _unknown(walk: Walk, called: Called) -> Value:
    """Give something new; what it may have done with model, optimizer and number of steps is noted."""
    things = [each for each in (*called.args, *called.words.values()) if isinstance(each, Thing)]
    if not called.name.lower().startswith(_HARMLESS):
        for thing in things:
            if thing.role in {Role.OPTIMIZER, Role.SCALER}:
                walk.emit(Kind.HANDED_ON, called.node, subject=thing.text)
    if things and _RESCALES.search(called.name):
        walk.emit(Kind.RESCALE, called.node)
    elif any(thing.role is Role.MODEL for thing in things):
        subject = next(thing.text for thing in things if thing.role is Role.MODEL)
        walk.emit(Kind.FORWARD, called.node, subject=subject)
    if called.on == "self" and _TIDIES.search(called.name):
        walk.emit(Kind.HANDED_ON, called.node, subject="self")
    # A method that cannot be seen may divide, and so may a function that is told the number of steps.
    hidden = called.on == "self" and not last_part(called.name).endswith(("model", "net", "criterion", "loss_fn"))
    told = any(counts_micro_batches(_text(each)) for each in (*called.args, *called.words.values()))
    told = told or any(counts_micro_batches(word) for word in called.words)
    return computed(id(called.node), rescaled=hidden or told)


def _text(value: Value) -> str:
    return value.text if isinstance(value, Unknown | Number) else ""
