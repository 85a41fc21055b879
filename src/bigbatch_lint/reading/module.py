"""One look over a syntax tree: imports, classes, functions, calls, which parts train, and how long a window is."""

import ast
import re
from collections.abc import Iterator
from functools import cached_property

from bigbatch_lint.reading.names import (
    PADDED_MODELS,
    PADDERS,
    Role,
    announces_steps,
    called_name,
    children,
    dotted,
    last_part,
    role_of,
    walk,
)

LOOPS = (ast.For, ast.AsyncFor, ast.While)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
FunctionDef = ast.FunctionDef | ast.AsyncFunctionDef
_OTHER_LIBRARIES = {"paddle", "tensorflow", "jax", "mindspore", "mxnet", "tinygrad"}
_NO_BOUNDARY = re.compile(r"last|len|num_b|total|max|end|epoch")
_HARMLESS = {*"isinstance hasattr getattr is_available is_initialized len get_rank get_world_size bool".split()}
_IGNORED = 100  # negative: what torch leaves out of a cross-entropy by default
_UPDATES = {"step", "zero_grad"}
_TORCH_METHODS = {"train", "step", "update"}
LONGEST_WINDOW = 64  # more is a batch size


class Module:
    """A parsed file, and what its parts are."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.parents: dict[ast.AST, ast.AST] = {}
        self.nodes: list[ast.AST] = [tree]
        self.imports: dict[str, str] = {}
        self.classes: dict[str, ast.ClassDef] = {}
        self.functions: list[FunctionDef] = []
        self.calls: list[ast.Call] = []
        self.words: set[str] = set()
        self.keywords: set[str] = set()
        for node in self.nodes:  # grows on the way
            for child in children(node):
                self.parents[child] = node
                self.nodes.append(child)
            self._note(node)
        self.called = {called_name(call) for call in self.calls} | set(self._passed_to_step())
        self.trains, self.holds_loop = self._training_parts()
        self.moduli: set[str] = set()
        self.steps_text = ""
        self.is_guess = False
        self.steps = self._window()
        self._mentions: dict[ast.AST, tuple[frozenset[str], bool]] = {}
        self._texts: dict[ast.AST, str] = {}

    def _note(self, node: ast.AST) -> None:
        if isinstance(node, ast.Name):
            self.words.add(node.id)
        elif isinstance(node, ast.Attribute):
            self.words.add(node.attr)
        elif isinstance(node, ast.Call):
            self.calls.append(node)
            self.keywords.update(word.arg for word in node.keywords if word.arg)
        elif isinstance(node, ast.Import):
            for name in node.names:
                first = name.name.partition(".")[0]
                self.imports[name.asname or first] = name.name if name.asname else first
        elif isinstance(node, ast.ImportFrom):
            for name in node.names:
                self.imports[name.asname or name.name] = f"{node.module or ''}.{name.name}"
        elif isinstance(node, ast.ClassDef):
            self.classes[node.name] = node
        elif isinstance(node, FUNCTIONS):
            self.functions.append(node)

    def _passed_to_step(self) -> Iterator[str]:
        """Yield the closures that an optimizer's step calls."""
        for call in self.calls:
            if called_name(call) == "step":
                yield from (each.id for each in call.args if isinstance(each, ast.Name))

    @property
    def is_of_another_library(self) -> bool:
        """Tell whether the same words mean something else here."""
        roots = {name.partition(".")[0] for name in self.imports.values()}
        return bool(roots & _OTHER_LIBRARIES) and "torch" not in roots

    @cached_property
    def generators(self) -> set[ast.AST]:
        """Return the functions that yield."""
        found: set[ast.AST] = set()
        for node in self.nodes:
            if isinstance(node, (ast.Yield, ast.YieldFrom)):
                found.update(each for each in self._around(node) if isinstance(each, FUNCTIONS))
        return found

    def _around(self, node: ast.AST) -> Iterator[ast.AST]:
        while node in self.parents:
            node = self.parents[node]
            yield node

    @cached_property
    def ignores_targets(self) -> bool:
        """Tell whether some targets are marked to be left out."""
        negative = [n.operand for n in self.nodes if isinstance(n, ast.UnaryOp)]
        return any(isinstance(n, ast.Constant) and n.value == _IGNORED for n in negative)

    @cached_property
    def pads_models(self) -> bool:
        """Tell whether a language model's own loss leaves out padding."""
        pads = bool(self.words & PADDERS) or "padding" in self.keywords or self.ignores_targets
        return pads and any(PADDED_MODELS.search(word) for word in self.words)

    @cached_property
    def is_manual_lightning(self) -> bool:
        """Tell whether a LightningModule steps on its own."""
        return "automatic_optimization" in self.words

    def full_name(self, text: str) -> str:
        """Return `torch.nn.Linear` of `nn.Linear`."""
        first, dot, rest = text.partition(".")
        return self.imports.get(first, first) + dot + rest

    def method(self, cls: ast.ClassDef, name: str, seen: tuple[str, ...] = ()) -> FunctionDef | None:
        """Return a method of a class or of its bases in this file."""
        for each in cls.body:
            if isinstance(each, FUNCTIONS) and each.name == name:
                return each
        for base in cls.bases:
            other = self.classes.get(dotted(base))
            if other is not None and other is not cls and other.name not in seen:
                found = self.method(other, name, (*seen, cls.name))
                if found is not None:
                    return found
        return None

    def bases(self, cls: ast.ClassDef) -> set[str]:
        """Return the names of all bases."""
        found: set[str] = set()
        left = [cls]
        while left:
            for base in left.pop().bases:
                name = dotted(base).rpartition(".")[2]
                if name and name not in found:
                    found.add(name)
                    left += [self.classes[name]] if name in self.classes else []
        return found

    def mentions(self, node: ast.AST) -> tuple[frozenset[str], bool]:
        """Return the names in an expression with all their beginnings, and whether it calls something."""
        if node not in self._mentions:
            names: set[str] = set()
            calls = False
            for each in walk(node):
                if isinstance(each, (ast.Name, ast.Attribute, ast.Subscript)):
                    names.add(dotted(each))
                elif isinstance(each, ast.Call):
                    calls = calls or last_part(dotted(each.func)) not in _HARMLESS
            self._mentions[node] = frozenset(names - {""}), calls
        return self._mentions[node]

    def text(self, node: ast.AST) -> str:
        """Return an expression as it may be written."""
        if node not in self._texts:
            self._texts[node] = ast.unparse(node)
        return self._texts[node]

    # Which parts of the file run a backward, and which of these hold a loop that does.
    def _training_parts(self) -> tuple[set[ast.AST], set[ast.AST]]:
        trains: set[ast.AST] = set()
        holds: set[ast.AST] = set()
        by_name: dict[str, list[ast.Call]] = {}
        for call in self.calls:
            by_name.setdefault(called_name(call), []).append(call)
        left = [(call, False) for call in self.calls if _is_backward(call)]
        known: set[tuple[str, bool]] = set()
        while left:
            for function, inside in self._climb(*left.pop(), trains, holds):
                if (function, inside) not in known:
                    known.add((function, inside))
                    left += [(call, inside) for call in by_name.get(function, ()) if not _is_torchs(call)]
        return trains, holds

    def _climb(
        self,
        node: ast.AST,
        inside: bool,  # noqa: FBT001 - part of a tuple
        trains: set[ast.AST],
        holds: set[ast.AST],
    ) -> Iterator[tuple[str, bool]]:
        """Mark everything around a call; yield the functions it is in, and whether in a loop there."""
        at: ast.AST | None = node
        while at is not None and not (at in trains and (not inside or at in holds)):
            trains.add(at)
            if inside:
                holds.add(at)
            if isinstance(at, (*LOOPS, *COMPREHENSIONS)):
                inside = True
            if isinstance(at, FUNCTIONS):
                yield at.name, inside
            at = self.parents.get(at)

    # How many micro-batches a window has.
    def _window(self) -> int:
        values = dict(self._constants())
        boundaries = list(self._boundaries())
        first = boundaries[0] if boundaries else None
        literal = [first.value] if isinstance(first, ast.Constant) and type(first.value) is int else []
        self.moduli.update(last_part(dotted(each)) for each in boundaries if dotted(each))
        written = [value for name, value in values.items() if name in self.moduli]
        announced = [value for name, value in values.items() if announces_steps(name)]
        sure = [*literal, *written] if boundaries else announced
        sizes = [size for size in (*sure, *announced, *self._keywords()) if 1 < size <= LONGEST_WINDOW]
        self.is_guess = not (sure and sizes)
        names = [dotted(each) for each in boundaries if dotted(each)] + [n for n in values if announces_steps(n)]
        self.steps_text = names[0] if names else ""
        return sizes[0] if sizes else 4 if boundaries else 2

    def _constants(self) -> Iterator[tuple[str, int]]:
        """Yield the names that are bound to a number, the first one last."""
        found = []
        for node in self.nodes:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and type(node.value.value) is int:
                found += [(last_part(dotted(target)), node.value.value) for target in node.targets]
            elif isinstance(node, ast.Dict):
                pairs = zip(node.keys, node.values, strict=True)
                constants = [
                    (k.value, v.value) for k, v in pairs if isinstance(k, ast.Constant) and isinstance(v, ast.Constant)
                ]
                found += [(key, value) for key, value in constants if isinstance(key, str) and type(value) is int]
            elif isinstance(node, ast.arguments):
                for argument, default in zip(reversed(node.args), reversed(node.defaults)):  # noqa: B905
                    if isinstance(default, ast.Constant) and type(default.value) is int:
                        found.append((argument.arg, default.value))
        yield from reversed(found)

    def _keywords(self) -> Iterator[int]:
        for call in self.calls:
            for word in call.keywords:
                if word.arg and announces_steps(word.arg) and isinstance(word.value, ast.Constant):
                    yield from [word.value.value] if type(word.value.value) is int else []

    def _functions_that_step(self) -> Iterator[str]:
        for call in self.calls:
            at: ast.AST | None = call if called_name(call) in _UPDATES else None
            while at is not None and not isinstance(at, FUNCTIONS):
                at = self.parents.get(at)
            if at is not None:
                yield at.name

    def _boundaries(self) -> Iterator[ast.expr]:
        """Yield what conditions on an update divide or compare by."""
        bound: dict[str, ast.expr] = {}
        stepping = _UPDATES | set(self._functions_that_step())
        for node in self.nodes:
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and dotted(node.targets[0]):
                bound.setdefault(dotted(node.targets[0]), node.value)
        for node in self.nodes:
            if isinstance(node, ast.If) and _updates(node, stepping):
                tests = [node.test, *(bound[dotted(n)] for n in walk(node.test) if dotted(n) in bound)]
                for test in tests:
                    yield from _boundaries_in(test)


def _is_backward(call: ast.Call) -> bool:
    name = called_name(call)
    return name in {"backward", "manual_backward"} or (role_of(name) is Role.SCALER and len(call.args) > 1)


def _is_torchs(call: ast.Call) -> bool:
    """Tell `model.train()` and `optimizer.step()` from methods of the file that are called so."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in _TORCH_METHODS:
        return False
    return role_of(dotted(call.func.value)) is not None


def _updates(node: ast.If, names: set[str]) -> bool:
    body = [each for statement in node.body for each in walk(statement)]
    if any(isinstance(each, ast.Call) and called_name(each) in names for each in body):
        return True
    skips = len(node.body) == 1 and isinstance(node.body[0], ast.Continue)
    return skips and any(isinstance(each, ast.Mod) for each in walk(node.test))


def _boundaries_in(test: ast.expr) -> Iterator[ast.expr]:
    divides = any(isinstance(node, (ast.Mod, ast.FloorDiv)) or dotted(node) == "divmod" for node in walk(test))
    for node in walk(test):
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mod, ast.FloorDiv)):
            yield node.right
        elif isinstance(node, ast.Call) and called_name(node) == "divmod" and len(node.args) == 2:  # noqa: PLR2004
            yield node.args[1]
        elif not divides and isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Eq, ast.GtE)):
            name, other = dotted(node.comparators[0]), node.comparators[0]
            if isinstance(other, ast.Constant) and type(other.value) is int and other.value > 1:
                yield other
            if name and not _NO_BOUNDARY.search(name):
                yield node.comparators[0]
