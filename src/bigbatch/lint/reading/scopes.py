"""Names and what they stand for, from the inside out: a function's own, its object's, its module's."""

import ast
from dataclasses import dataclass

from bigbatch.lint.reading.values import Value

Variables = dict[str, Value]


class Scope:
    """Names of one function, object or module; what is not here is looked for outside."""

    def __init__(self, outer: "Scope | None" = None, attributes: "Scope | None" = None) -> None:
        """`attributes` holds what `self.x` is."""
        self.outer = outer
        inherited: Scope | None = outer.attributes if outer is not None else None
        self.attributes: Scope | None = attributes if attributes is not None else inherited
        self.variables: Variables = {}

    def find(self, name: str) -> Value | None:
        """Return what a name or dotted name stands for, if that was seen."""
        if name.startswith("self.") and self.attributes is not None:
            return self.attributes.variables.get(name)
        scope: Scope | None = self
        while scope is not None:
            if name in scope.variables:
                return scope.variables[name]
            scope = scope.outer
        return None

    def set(self, name: str, value: Value) -> None:
        """Let a name stand for something, and forget what its attributes were."""
        home = self.attributes if name.startswith("self.") and self.attributes is not None else self
        for old in [old for old in home.variables if old.startswith(f"{name}.")]:
            del home.variables[old]
        home.variables[name] = value

    def chain(self) -> "list[Scope]":
        """Return all scopes that a line here can write to or read from."""
        found: list[Scope] = []
        scope: Scope | None = self
        while scope is not None:
            for each in (scope, scope.attributes):
                if each is not None and each not in found:
                    found.append(each)
            scope = scope.outer
        return found

    def snapshot(self) -> "list[tuple[Scope, Variables]]":
        """Return what all names stand for now."""
        return [(scope, dict(scope.variables)) for scope in self.chain()]


def restore(snapshot: list[tuple[Scope, Variables]]) -> None:
    """Let all names stand for what they stood for."""
    for scope, variables in snapshot:
        scope.variables = dict(variables)


@dataclass(frozen=True, eq=False)
class Object(Value):
    """An instance of a class of the file; its attributes live in a scope."""

    node: ast.ClassDef
    attributes: Scope


@dataclass(frozen=True, eq=False)
class Class(Value):
    """A class of the file."""

    node: ast.ClassDef
    scope: Scope


@dataclass(frozen=True, eq=False)
class Function(Value):
    """A function of the file, with the scope it was defined in and, for a method, its object."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    scope: Scope
    owner: Object | None = None
