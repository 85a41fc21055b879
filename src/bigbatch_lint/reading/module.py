"""One look over a syntax tree: imports, classes, functions, calls, which parts train, and how long a window is."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

from bigbatch_lint.reading.names import announces_steps, called_name, children, dotted, last_part, role_of, walk

LONGEST_WINDOW = 64  # more is a batch size
_LOOPS = (ast.For, ast.While, ast.ListComp, ast.SetComp, ast.GeneratorExp)
_OTHER_LIBRARIES = {"paddle", "tensorflow", "jax", "mindspore", "mxnet", "tinygrad"}
_NO_BOUNDARY = re.compile(r"last|len|num_b|total|max|end|epoch")
_IGNORED = 100  # negative: what torch leaves out of a cross-entropy by default
_PADDED_MODELS = re.compile(r"For(CausalLM|ConditionalGeneration|Seq2SeqLM|MaskedLM|TokenClassification)$|LMHeadModel$")
_PADDERS = re.compile(r"^pad_(token|token_id|sequence)$|^DataCollator(ForSeq2Seq|WithPadding|ForLanguageModeling)$")
UPDATES = {"step", "zero_grad"}


class Module:
    """A parsed file, and what its parts are."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.nodes = walk(tree)
        self.parents = {child: node for node in self.nodes for child in children(node)}
        self.imports: dict[str, str] = {}
        for node in self.of(ast.Import, ast.ImportFrom):
            for name in node.names:
                home = f"{node.module or ''}." if isinstance(node, ast.ImportFrom) else ""
                first = name.name if home else name.name.partition(".")[0]
                self.imports[name.asname or first] = home + (name.name if name.asname else first)
        self.classes: dict[str, ast.ClassDef] = {node.name: node for node in self.of(ast.ClassDef)}
        self.functions: list[ast.FunctionDef] = self.of(ast.FunctionDef)
        self.calls: list[ast.Call] = self.of(ast.Call)
        self.words = {node.id if isinstance(node, ast.Name) else node.attr for node in self.of(ast.Name, ast.Attribute)}
        self.keywords = {node.arg or "" for node in self.of(ast.keyword)}
        yields = set(self.of(ast.Yield, ast.YieldFrom))
        self.generators = {each for each in self.functions if not yields.isdisjoint(walk(each))}
        self.called = {called_name(call) for call in self.calls}
        self.trains: set[ast.AST] = set()
        self.holds_loop: set[ast.AST] = set()
        self._find_training_parts()
        self.steps_text, self.is_guess, self.steps = self._window()

    def of(self, *kinds: type[ast.AST]) -> list[Any]:
        """Return the nodes of some kinds."""
        return [node for node in self.nodes if type(node) in kinds]

    @property
    def is_of_another_library(self) -> bool:
        """Tell whether the same words mean something else here."""
        roots = {name.partition(".")[0] for name in self.imports.values()}
        return bool(roots & _OTHER_LIBRARIES) and "torch" not in roots

    @cached_property
    def ignores_targets(self) -> bool:
        """Tell whether some targets are marked to be left out."""
        negative = [n.operand for n in self.nodes if isinstance(n, ast.UnaryOp)]
        return any(isinstance(n, ast.Constant) and n.value == _IGNORED for n in negative)

    @cached_property
    def pads_models(self) -> bool:
        """Tell whether a language model's own loss leaves out padding."""
        pads = any(map(_PADDERS.search, self.words)) or "padding" in self.keywords or self.ignores_targets
        return pads and any(map(_PADDED_MODELS.search, self.words))

    def full_name(self, text: str) -> str:
        """Return `torch.nn.Linear` of `nn.Linear`."""
        first, dot, rest = text.partition(".")
        return self.imports.get(first, first) + dot + rest

    def method(self, cls: ast.ClassDef | None, name: str) -> ast.FunctionDef | None:
        """Return a method of a class."""
        members = cls.body if cls else ()
        return next((each for each in members if isinstance(each, ast.FunctionDef) and each.name == name), None)

    def _find_training_parts(self) -> None:
        """Find what is around a backward, also through calls of functions; and what of it holds a loop that trains."""
        by_name: dict[str, list[ast.Call]] = defaultdict(list)
        for call in self.calls:
            by_name[called_name(call)].append(call)
        names = {name for name in by_name if name in {"backward", "manual_backward"} or role_of(name) == "scaler"}
        left: list[tuple[ast.AST | None, bool]] = [(call, False) for name in names for call in by_name[name]]
        while left:
            node, inside = left.pop()
            while node is not None and not (node in self.trains and (not inside or node in self.holds_loop)):
                self.trains.add(node)
                if inside:
                    self.holds_loop.add(node)
                if isinstance(node, ast.FunctionDef):
                    left += [(call, inside) for call in by_name[node.name] if not _is_torchs(call)]
                inside = inside or isinstance(node, _LOOPS)
                node = self.parents.get(node)

    def _window(self) -> tuple[str, bool, int]:
        """Return the name that says so, whether the number is a guess, and the number."""
        values = dict(reversed(list(self._constants())))  # the first one of a name
        boundaries = list(self._boundaries())
        names = [dotted(each) for each in boundaries if dotted(each)] + [n for n in values if announces_steps(n)]
        self.moduli = {last_part(dotted(each)) for each in boundaries} - {""}
        written = [each for each in [getattr([*boundaries, None][0], "value", None)] if type(each) is int]
        written += [value for name, value in values.items() if name in self.moduli]
        announced = [value for name, value in values.items() if announces_steps(name)]
        sure = [size for size in (written if boundaries else announced) if 1 < size <= LONGEST_WINDOW]
        sizes = sure + [size for size in announced if 1 < size <= LONGEST_WINDOW]
        return [*names, ""][0], not sure, [*sizes, 4 if boundaries else 2][0]

    def _constants(self) -> Iterator[tuple[str, int]]:
        for node in self.of(ast.Assign, ast.Dict, ast.arguments, ast.keyword):
            pairs: Iterable[tuple[object, ast.AST]] = [(getattr(node, "arg", ""), getattr(node, "value", node))]
            if isinstance(node, ast.Assign):
                pairs = ((last_part(dotted(target)), node.value) for target in node.targets)
            elif isinstance(node, ast.Dict):
                pairs = ((getattr(key, "value", ""), value) for key, value in zip(node.keys, node.values, strict=True))
            elif isinstance(node, ast.arguments):
                pairs = ((a.arg, d) for a, d in zip(reversed(node.args), reversed(node.defaults)))  # noqa: B905
            numbers = ((str(name), getattr(value, "value", None)) for name, value in pairs)
            yield from ((name, number) for name, number in numbers if type(number) is int)

    def _boundaries(self) -> Iterator[ast.expr]:
        """Yield what conditions on an update divide or compare by."""
        bound: dict[str, ast.expr] = {}
        for node in self.of(ast.Assign):
            bound.setdefault(dotted(node.targets[0]) or "-", node.value)
        stepping = UPDATES | {each.name for each in self.functions if _calls_any(walk(each), UPDATES)}
        for test in (node.test for node in self.of(ast.If) if decides_on_update(node, stepping)):
            for each in [test, *(bound[dotted(each)] for each in walk(test) if dotted(each) in bound)]:
                yield from _boundaries_in(each)


def _is_torchs(call: ast.Call) -> bool:
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    return called_name(call) in {"train", "step", "update"} and owner is not None and role_of(dotted(owner)) is not None


def decides_on_update(node: ast.If, names: set[str]) -> bool:
    """Tell whether a condition calls one of these functions, or skips them by a remainder."""
    skips = isinstance(node.body[0], ast.Continue) and any(isinstance(each, ast.Mod) for each in walk(node.test))
    return skips or _calls_any((each for statement in node.body for each in walk(statement)), names)


def _calls_any(nodes: Iterable[ast.AST], names: set[str]) -> bool:
    return any(isinstance(each, ast.Call) and called_name(each) in names for each in nodes)


def _boundaries_in(test: ast.expr) -> Iterator[ast.expr]:
    divides = any(isinstance(node, (ast.Mod, ast.FloorDiv)) or dotted(node) == "divmod" for node in walk(test))
    for node in walk(test):
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mod, ast.FloorDiv)):
            yield node.right
        elif isinstance(node, ast.Call) and called_name(node) == "divmod" and len(node.args) == 2:  # noqa: PLR2004
            yield node.args[1]
        elif not divides and isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Eq, ast.GtE)):
            other = node.comparators[0]
            is_number = isinstance(other, ast.Constant) and type(other.value) is int and other.value > 1
            if is_number or (dotted(other) and not _NO_BOUNDARY.search(dotted(other))):
                yield other
